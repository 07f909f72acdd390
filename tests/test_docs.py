"""Every block of code in docs/ and README.md is checked: commands parse, configurations load, Python fits its calls.

Owns: what is demanded of a block of each kind, and of links.
Does not know: what the program prints (test_inspect_docs.py runs the examples of the inspector, test_segment_docs.py
the code of its page).
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import inspect
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from prefix_recovery import cli as prefix_recovery
from prefix_recovery.prompts import read_prompts
from recovery import errors
from recovery.config import job_schema, parse_config, parse_loop_config
from recovery.errors import RecoveryError
from snapshot_inspect import cli as snapshot_inspect
from storage_backends import s3_errors

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
OURS = ("recovery", "storage_backends", "vllm_hooks", "snapshot_inspect", "prefix_recovery")
PARSERS = {"prefix-recovery": prefix_recovery.parser, "snapshot-inspect": snapshot_inspect.parser}
TEMPLATES = {"docs/format.md"}
"""Its JSON has placeholders; the independent reader of the tests is written from it."""


class Block(NamedTuple):
    page: str
    line: int
    kind: str
    text: str


def blocks(*kinds: str) -> list[Block]:
    found = []
    for page in PAGES:
        text, name = page.read_text("utf-8"), page.relative_to(ROOT).as_posix()
        for match in re.finditer(r"^```([^\n`]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            found.append(Block(name, text[: match.start()].count("\n") + 1, match[1].strip(), match[2]))
    return [block for block in found if block.kind in kinds] if kinds else found


def named(block: Block) -> str:
    return f"{block.page}:{block.line}"


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    known = {"console", "sh", "yaml", "json", "python", "mermaid", "text"}
    assert [named(block) for block in blocks() if block.kind not in known] == []
    assert {block.page for block in blocks("text")} <= {"docs/snapshot-inspect.md", "docs/format.md"}, (
        "held against the program elsewhere"
    )


# ---- commands ------------------------------------------------------------------------------------------------------


def _commands(block: Block) -> Iterator[list[str]]:
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.kind == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    for line in lines:
        for part in re.split(r"\s(?:\||&&|;|>|2>)\s", line):
            words = shlex.split(part, comments=True)
            if words:
                yield [Path(words[0]).name, *words[1:]]


@pytest.mark.parametrize("block", blocks("console", "sh"), ids=named)
def test_commands_are_ones_that_there_are(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(line[2:] for line in block.text.splitlines() if line.startswith("$ "))
    subprocess.run(["bash", "-n"], input=text if block.kind == "console" else block.text, text=True, check=True)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for program, *arguments in _commands(block):
        if program in PARSERS:
            try:
                PARSERS[program]().parse_args(arguments)
            except SystemExit as ended:
                assert ended.code == 0, f"{program} {arguments}: {capsys.readouterr().err}"
        elif program == "make":
            assert {word for word in arguments if "=" not in word} <= targets, arguments


# ---- data ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", blocks("yaml"), ids=named)
def test_configurations_load(block: Block) -> None:
    tree = yaml.safe_load(block.text)
    assert isinstance(tree, dict)
    if "scrape_configs" in tree:  # Prometheus's own file
        return
    try:
        (parse_config if "model" in tree else parse_loop_config)(tree)
    except RecoveryError as error:
        pytest.fail(f"{error.message}")


@pytest.mark.parametrize("block", [b for b in blocks("json") if b.page not in TEMPLATES], ids=named)
def test_json_is_what_it_is_said_to_be(block: Block, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in block.text.splitlines()] if block.text.startswith('{"') else []
    if rows and all({"prompt", "messages", "prompt_token_ids"} & set(row) and "token_ids" not in row for row in rows):
        (tmp_path / "prompts.jsonl").write_text(block.text, encoding="utf-8")
        assert read_prompts(tmp_path / "prompts.jsonl", strict=True).prompts
    elif not rows:
        policy = json.loads(block.text)
        allowed = {action for one in policy["Statement"] for action in [one["Action"]] if isinstance(action, str)}
        allowed |= {
            action for one in policy["Statement"] if isinstance(one["Action"], list) for action in one["Action"]
        }
        assert allowed == set(s3_errors._ACTIONS.values()), "the actions that a refusal asks for"


# ---- Python --------------------------------------------------------------------------------------------------------


def _ours(tree: ast.AST) -> dict[str, Any]:
    """What a block imports of ours, by the name that it has there. Fails where there is no such thing."""
    names: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS:
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
                names[alias.asname or alias.name] = getattr(module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in OURS:
                    importlib.import_module(alias.name)
    return names


@pytest.mark.parametrize("block", blocks("python"), ids=named)
def test_python_fits_what_it_imports_and_calls(block: Block) -> None:
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
    tree = compile(block.text, named(block), "exec", flags)
    names = _ours(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in names:
            continue
        if any(isinstance(item, ast.Starred) for item in node.args) or any(k.arg is None for k in node.keywords):
            continue
        if not (callable(names[node.func.id]) and hasattr(names[node.func.id], "__code__")) and not inspect.isclass(
            names[node.func.id]
        ):
            continue  # a NewType
        signature = inspect.signature(names[node.func.id])
        signature.bind(*node.args, **{str(keyword.arg): keyword.value for keyword in node.keywords})


def test_what_the_pages_import_is_in_the_reference() -> None:
    """It says of everything else that it is internal and may move."""
    reference = (ROOT / "docs" / "reference" / "python.md").read_text("utf-8")
    parse = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
    trees = [compile(block.text, named(block), "exec", parse) for block in blocks("python")]
    imported = {name for tree in trees for name in _ours(tree)}
    assert len(imported) > 20
    assert {name for name in imported if not re.search(rf"\b{name}\b", reference)} == set()


@pytest.mark.parametrize("block", [b for b in blocks("python") if b.page == "docs/configuration.md"], ids=named)
def test_the_page_about_configuration_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("model: m\nprompts: p\noutput: o\nrollout_checkpointing: {enabled: true, store: s}\n")
    exec(compile(block.text, named(block), "exec"), {})


# ---- links and the site --------------------------------------------------------------------------------------------


def _anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", head.lower()).strip()) for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {target}"
        if anchor and there.suffix == ".md":
            assert anchor in _anchors(there), f"{page.name}: {target}"


def _hooks(name: str = "site_hooks") -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_has_every_field_with_its_meaning() -> None:
    schema, text = job_schema(), "\n".join(_hooks().tables(job_schema(), "JobConfig"))
    reached = {"JobConfig", "CheckpointingConfig", "StoreOptions", "GymConfig", "RolloutConfig"}
    assert reached <= set(schema["$defs"])
    for block in reached:
        for name, field in schema["$defs"][block]["properties"].items():
            (row,) = re.findall(rf"^\| `{name}` \|.*$", text, re.MULTILINE) or [""]
            assert field.get("description", "") in row, name
    assert "| `model` | string | **needed** |" in text


def test_every_diagram_is_a_picture_of_the_site() -> None:
    pictures, n = _hooks("site_pictures"), 0
    for page in PAGES:
        text = page.read_text()
        shown = pictures.with_pictures(text, f"some/{page.name}")
        count = text.count("```mermaid")
        assert "```mermaid" not in shown and count == len(pictures.BLOCK.findall(text))
        assert all(f"]({page.stem}-diagram-{k + 1}.svg)" in shown for k in range(count))
        n += count
    assert n >= 5


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('<script src="https://unpkg.com/x.js"></script>', ["<script> of https://unpkg.com/x.js"]),
        ('<script src="assets/x.js"></script><a href="https://example.org">x</a>', []),
        ('<link rel="stylesheet" href="//fonts.example/css">', ["<link> of //fonts.example/css"]),
        ('<link rel="preconnect" href="https://fonts.example">', ["<link> of https://fonts.example"]),
        ('<link rel="canonical" href="https://example.org/"><link rel="icon" href="assets/icon.png">', []),
        ('<img src="HTTPS://example.org/x.png"><img src="x.png">', ["<img> of HTTPS://example.org/x.png"]),
        ("<style>@font-face{src:url('https://f.example/a.woff')}</style>", ["https://f.example/a.woff"]),
        ('<p style="background: url(//b.example/b.png)">url(//shown.example)</p>', ["//b.example/b.png"]),
        ('<pre class="mermaid"><code>x</code></pre>', ["a Mermaid diagram that is not a picture"]),
    ],
)
def test_what_a_page_loads_from_elsewhere_is_found(text: str, found: list[str]) -> None:
    assert list(_hooks("site_alone").elsewhere(text)) == found


def test_what_a_style_sheet_loads_from_elsewhere_is_found() -> None:
    text = "@import 'https://f.example/a.css'; a{background:url(data:image/svg+xml,x)} b{src:url(../x.woff)}"
    assert list(_hooks("site_alone").elsewhere(text, style=True)) == ["https://f.example/a.css"]


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    missing = [
        path
        for page in PAGES[2:]
        if (path := page.relative_to(ROOT / "docs").as_posix()) not in text and not path.startswith("decisions/")
    ]
    assert missing == []


def test_commands_of_tables_parse() -> None:
    """In the failure table of operators.md every command that somebody may have to type is one that there is."""
    text = (ROOT / "docs" / "operators.md").read_text()
    found = [words for words in re.findall(r"`((?:prefix-recovery|snapshot-inspect) [^`]+)`", text)]
    assert len(found) > 15
    for words in found:
        program, *arguments = shlex.split(words)
        namespace = PARSERS[program]().parse_args(arguments)
        assert isinstance(namespace, argparse.Namespace)


def _exit_codes(kind: type[RecoveryError] = RecoveryError) -> set[int]:
    """Of the errors of the tree."""
    own = set() if kind.__dict__.get("abstract", False) else {kind.exit_code}
    return own.union(*(_exit_codes(below) for below in kind.__subclasses__() if below.__module__ == errors.__name__))


@pytest.mark.parametrize("page", ["run.md", "operators.md"])
def test_every_exit_code_is_in_the_tables_and_in_the_help(page: str) -> None:
    rows = re.findall(r"^\| (\d+(?:, \d+)*)", (ROOT / "docs" / page).read_text("utf-8"), re.MULTILINE)
    told = {int(code) for row in rows for code in row.split(", ")}
    assert _exit_codes() | {2, 3, 129, 130, 143} <= told
    help_text = prefix_recovery.parser().format_help()
    assert [code for code in sorted(told) if not re.search(rf"\b{code}\b", help_text)] == []


def test_decisions_have_each_a_number_of_its_own() -> None:
    records = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert len({path.name[:4] for path in records}) == len(records)
    for path in records:
        assert path.read_text("utf-8").startswith(f"# {int(path.name[:4])}. "), path.name
