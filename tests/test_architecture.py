"""The shape of the project: who may import whom, what the core may load, how modules are named, sized and described.

Owns: the rules of CONTRIBUTING.md that a program can check.
Does not know: what any module does.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "recovery": ROOT / "recovery",
    "storage_backends": ROOT / "storage_backends",
    "vllm_hooks": ROOT / "vllm_hooks",
    "prefix_recovery": ROOT / "tools" / "prefix_recovery",
    "snapshot_inspect": ROOT / "tools" / "snapshot_inspect",
    "bench": ROOT / "tools" / "bench",
    "examples": ROOT / "examples",
}
TOOLS = {"prefix_recovery", "snapshot_inspect", "bench", "examples"}
LINES_MAX = 400
BANNED = ("Manager", "Handler", "Helper", "Util", "Common")
HEAVY = ("torch", "vllm", "pyarrow", "zarr", "fsspec", "ray", "s3fs", "google_crc32c")

CORE_FOR_BACKENDS = {
    "recovery.model", "recovery.errors", "recovery.ports", "recovery.codec", "recovery.ledger_columns",
    "recovery.records",
}  # fmt: skip
"""What storage_backends may know of the core."""

COMPOSITION_ROOTS = {
    "vllm_hooks.session",
    "vllm_hooks.opening",
    "vllm_hooks.ray_workers.coordination",
    "vllm_hooks.ray_workers.actors",
}
"""Where parts are chosen and joined (opening.py is the half of session.py that opens the store)."""

EXTRA_IMPORTS = {"recovery.config": {"msgspec", "yaml"}, "recovery.config_forms": {"msgspec", "yaml"}}
"""What modules of the core may import besides the standard library and numpy."""

FOREIGN = {
    r"storage_backends\..*|storage_backends": {"numpy", "pyarrow", "google_crc32c", "msgspec"},
    r"storage_backends\.s3\w*": {"s3fs", "botocore", "fsspec", "aiohttp"},
    r"storage_backends\.transfer_queue": {"ray"},
    r"storage_backends\.testing\..*": {"pytest", "hypothesis", "moto", "botocore"},
    r"vllm_hooks\..*|vllm_hooks": {"numpy", "vllm", "torch", "msgspec"},
    r"vllm_hooks\.\w*metrics": {"prometheus_client"},
    r"vllm_hooks\.ray_workers\..*": {"ray"},
    r"prefix_recovery\..*": {"numpy", "rich", "tokenizers", "vllm", "torch", "yaml"},
    r"prefix_recovery\.metrics_server": {"prometheus_client"},
    r"snapshot_inspect\..*": {"numpy", "rich", "tokenizers"},
    r"snapshot_inspect\.rescore": {"vllm"},
    r"examples\..*": {"vllm", "torch", "transformers", "openai", "httpx"},
}
"""What modules outside the core may import of others, by name: the last column of the table in CONTRIBUTING.md. What
`bench` measures beside this project is its own affair."""


DRIVERS = {
    f"recovery.admission.{name}"
    for name in ("changes", "closing", "covering", "generation", "rollout", "training", "updates")
}
"""The asyncio edge of the core: FullyAsyncRollout, which drives the machines beside it, and a trainer's loop. No
machine imports one."""


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of ours, by its dotted name."""
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join((package, *(part for part in parts if part != "__init__"))), path


MODULES = dict(modules())


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports_of(name: str) -> set[str]:
    """Dotted names that module `name` imports, wherever in it the statement stands; of ours down to the module."""
    found: set[str] = set()
    for node in ast.walk(tree_of(MODULES[name])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else str(node.module))
    return found


def package_of(name: str) -> str:
    return name.partition(".")[0]


def allowed(importer: str, imported: str) -> bool:
    """The arrows between the packages of ours."""
    source, target = package_of(importer), package_of(imported)
    if source == target or source in TOOLS:
        return True
    if source == "storage_backends":
        return imported in CORE_FOR_BACKENDS
    if source == "vllm_hooks":
        return target == "recovery" or (target == "storage_backends" and importer in COMPOSITION_ROOTS)
    return False


@pytest.mark.parametrize("name", MODULES)
def test_imports_follow_the_arrows(name: str) -> None:
    wrong = [one for one in imports_of(name) if package_of(one) in PACKAGES and not allowed(name, one)]
    assert not wrong, f"{name} may not import {sorted(wrong)}"


def test_nobody_imports_the_tests() -> None:
    assert not [name for name in MODULES if any(package_of(one) == "tests" for one in imports_of(name))]


@pytest.mark.parametrize("name", [name for name in MODULES if package_of(name) == "recovery"])
def test_the_core_imports_the_standard_library_and_numpy(name: str) -> None:
    known = set(sys.stdlib_module_names) | {"numpy", "recovery"} | EXTRA_IMPORTS.get(name, set())
    foreign = {package_of(one) for one in imports_of(name)} - known
    assert not foreign, f"{name} imports {sorted(foreign)}"


@pytest.mark.parametrize("name", [name for name in MODULES if package_of(name) not in ("recovery", "bench")])
def test_the_edges_import_of_others_what_the_layer_table_says(name: str) -> None:
    allowed = {one for where, what in FOREIGN.items() if re.fullmatch(where, name) for one in what}
    foreign = {package_of(one) for one in imports_of(name)} - set(sys.stdlib_module_names) - set(PACKAGES)
    assert foreign <= allowed, f"{name} imports {sorted(foreign - allowed)}"


def test_importing_the_core_loads_nothing_heavy() -> None:
    core = [name for name in MODULES if package_of(name) == "recovery"]
    program = (
        "import importlib, sys\n"
        f"for name in {core!r}: importlib.import_module(name)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_there_are_no_import_cycles() -> None:
    """At the top of modules; an import inside a function is a choice that says why there."""
    edges = {name: {one for one in top_imports(name) if one in MODULES} for name in MODULES}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for one in edges[name]:
                visit(one, (*path, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


def top_imports(name: str) -> set[str]:
    found: set[str] = set()
    for node in tree_of(MODULES[name]).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            wholes = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {whole if whole in MODULES else str(node.module) for whole in wholes}
    return found


@pytest.mark.parametrize("name", MODULES)
def test_names_say_what_a_thing_is(name: str) -> None:
    words = re.compile("|".join(BANNED), re.IGNORECASE)
    assert not words.search(MODULES[name].stem), f"the file {MODULES[name].name}"
    classes = [node.name for node in ast.walk(tree_of(MODULES[name])) if isinstance(node, ast.ClassDef)]
    assert not [one for one in classes if any(word in one for word in BANNED)]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_says_what_it_owns_and_what_it_does_not_know(name: str) -> None:
    tree = tree_of(MODULES[name])
    text = ast.get_docstring(tree)
    if MODULES[name].name in ("__init__.py", "__main__.py") and len(tree.body) <= 4:
        return  # nothing but a docstring, or a name handed on
    assert text is not None, f"{name} has no docstring"
    for heading in ("Owns:", "Does not know:"):
        assert heading in text, f"the docstring of {name} has no line {heading!r}"


@pytest.mark.parametrize("name", MODULES)
def test_no_file_is_too_long(name: str) -> None:
    n = len(MODULES[name].read_text(encoding="utf-8").splitlines())
    assert n <= LINES_MAX, f"{name} has {n} lines; split off what belongs elsewhere"


def broad_handlers(name: str) -> Iterator[ast.ExceptHandler]:
    """Handlers that catch every error there is."""
    for node in ast.walk(tree_of(MODULES[name])):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            names = {one.id for one in caught if isinstance(one, ast.Name)}
            if node.type is None or names & {"Exception", "BaseException"}:
                yield node


@pytest.mark.parametrize("name", MODULES)
def test_no_error_is_swallowed(name: str) -> None:
    """A broad handler raises, or hands the error object on; it never just goes on."""
    for handler in broad_handlers(name):
        raises = any(isinstance(node, ast.Raise) for node in ast.walk(handler))
        uses = {node.id for node in ast.walk(handler) if isinstance(node, ast.Name)}
        assert raises or handler.name in uses, f"{name}, line {handler.lineno}: the error is dropped"
    for node in ast.walk(tree_of(MODULES[name])):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            everything = {ast.unparse(one) for one in node.args} & {"Exception", "BaseException"}
            lines = MODULES[name].read_text(encoding="utf-8").splitlines()[node.lineno - 2 : node.lineno]
            assert not everything or "#" in "".join(lines), f"{name}, line {node.lineno}: dropped, and not why"


def test_the_core_reads_no_clock_and_draws_no_chance() -> None:
    """Time and randomness are passed in (recovery.ports); only a thread's own deadline is real time."""
    allowed_modules = {"recovery.coordinator": {"time"}}
    for name in MODULES:
        if package_of(name) == "recovery":
            found = {package_of(one) for one in imports_of(name)} & {"time", "random", "secrets", "uuid", "datetime"}
            assert found <= allowed_modules.get(name, set()), f"{name} imports {sorted(found)}"


def test_no_machine_of_the_core_knows_a_driver() -> None:
    for name in MODULES:
        if package_of(name) == "recovery" and name not in DRIVERS and name != "recovery.admission":
            assert not top_imports(name) & DRIVERS, name


def test_the_core_logs_nothing_and_awaits_nothing() -> None:
    for name in MODULES:
        if package_of(name) == "recovery" and name not in DRIVERS:
            assert not {"logging", "asyncio", "warnings"} & {package_of(one) for one in imports_of(name)}, name
            waits = [
                node for node in ast.walk(tree_of(MODULES[name])) if isinstance(node, ast.Await | ast.AsyncFunctionDef)
            ]
            assert not waits, name
