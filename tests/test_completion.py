"""Shell completion: what the scripts offer is what the parsers know, tried in a real bash.

Owns: one bash per command.
Does not know: zsh and fish beyond the text of their scripts.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
from collections.abc import Callable

import pytest

import prefix_recovery.cli
import snapshot_inspect.cli
from snapshot_inspect import completion

PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "snapshot-inspect": snapshot_inspect.cli.parser,
    "prefix-recovery": prefix_recovery.cli.parser,
}


def offered(command: str, *lines: str) -> dict[str, list[str]]:
    """What bash offers at the end of each line."""
    script = completion.script("bash", PARSERS[command]())
    name = "_" + command.replace("-", "_")
    tries = []
    for line in lines:
        words = line.split(" ")
        listed = " ".join(map(shlex.quote, words))
        tries.append(
            f"COMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; {name}; "
            f"printf '%s\\t%s\\n' {shlex.quote(line)} \"${{COMPREPLY[*]}}\""
        )
    ran = subprocess.run(
        ["bash", "--norc", "-uc", script + "\n".join(tries)], capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
    pairs = (line.partition("\t") for line in ran.stdout.splitlines())
    return {line: words.split() for line, _, words in pairs}


@pytest.mark.parametrize("command", PARSERS)
def test_every_verb_and_option_is_offered(command: str) -> None:
    verbs = completion.verbs_of(PARSERS[command]())
    found = offered(command, f"{command} ", *(f"{command} {verb.name} -" for verb in verbs))
    assert found[f"{command} "] == [*(verb.name for verb in verbs), "--help"]
    for verb in verbs:
        assert found[f"{command} {verb.name} -"] == [flag for option in verb.options for flag in option.names]
        assert "--help" in found[f"{command} {verb.name} -"]


def test_values_words_and_beginnings() -> None:
    found = offered(
        "snapshot-inspect",
        "snapshot-inspect ca",
        "snapshot-inspect calls runs/17 --state ",
        "snapshot-inspect calls runs/17 --state o",
        "snapshot-inspect verify runs/17 --read",
        "snapshot-inspect explain runs/17 --config ",
        "snapshot-inspect latest ",
        "snapshot-inspect completion ",
    )
    assert list(found.values()) == [
        ["calls", "cat"],
        ["open", "ended"],
        ["open"],
        ["--read-data"],
        [],  # files: the shell's own completion
        [],
        ["bash", "zsh", "fish"],
    ]
    model = offered("prefix-recovery", "prefix-recovery model ", "prefix-recovery model x --dtype b")
    assert list(model.values()) == [["smollm2", "tiny"], ["bfloat16"]]


@pytest.mark.parametrize("command", PARSERS)
def test_fish_and_zsh_know_the_same(command: str) -> None:
    parser = PARSERS[command]()
    zsh, fish = completion.script("zsh", parser), completion.script("fish", parser)
    assert zsh.endswith(completion.script("bash", parser)) and "bashcompinit" in zsh
    for verb in completion.verbs_of(parser):
        assert f"-n __fish_use_subcommand -a {verb.name} -d " in fish
        for option in verb.options:
            assert f"__fish_seen_subcommand_from {verb.name}' -{'l' if option.names[0][1] == '-' else 's'} " in fish


def test_the_commands_print_their_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    for command, main in (
        ("snapshot-inspect", snapshot_inspect.cli.main),
        ("prefix-recovery", prefix_recovery.cli.main),
    ):
        for shell in completion.SHELLS:
            assert main(["completion", shell]) == 0
            assert capsys.readouterr().out == completion.script(shell, PARSERS[command]())


@pytest.mark.parametrize("command", PARSERS)
def test_every_verb_teaches_by_example(command: str) -> None:
    """Each example is a line that the parser itself takes."""
    parser = PARSERS[command]()
    (sub,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for name, verb in sub.choices.items():
        text = verb.format_help()
        examples = [line.strip() for line in text.partition("examples:\n")[2].splitlines() if command in line]
        assert examples, name
        for example in examples:
            if name == "completion":
                continue
            words = shlex.split(re.split(r"    | > | \| ", example)[0])
            assert words[0] == command and json.dumps(vars(parser.parse_args(words[1:])), default=str)
