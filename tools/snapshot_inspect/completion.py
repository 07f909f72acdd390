"""Shell completion of a command, as a script made from its argument parser.

Owns: the scripts for bash, zsh and fish.
Does not know: which command it is made for; whatever an argparse parser with verbs declares is completed.

Invariants:
1. The script is made from the parser alone, so that it cannot know other verbs and options than the command does.
2. A script runs nothing but the shell's own commands: completing starts no Python and asks no store.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

SHELLS = ("bash", "zsh", "fish")
USE = {
    "bash": 'eval "$({command} completion bash)"    # in ~/.bashrc',
    "zsh": 'eval "$({command} completion zsh)"     # in ~/.zshrc, after compinit',
    "fish": "{command} completion fish > ~/.config/fish/completions/{command}.fish",
}


@dataclass(frozen=True, slots=True)
class Option:
    """`takes`: None for a switch, else the words that its value may be (none: a file, or free)."""

    names: tuple[str, ...]
    text: str
    takes: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Verb:
    """`words`: what its positional arguments may be, as far as that is a fixed set."""

    name: str
    text: str
    options: tuple[Option, ...]
    words: tuple[str, ...]


def verbs_of(parser: argparse.ArgumentParser) -> list[Verb]:
    (sub,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    texts = {choice.dest: choice.help or "" for choice in sub._choices_actions}
    return [
        Verb(name, texts.get(name, ""), tuple(_options(one)), tuple(_words(one))) for name, one in sub.choices.items()
    ]


def _options(parser: argparse.ArgumentParser) -> Iterator[Option]:
    for action in parser._actions:
        if action.option_strings and action.help != argparse.SUPPRESS:
            takes = None if action.nargs == 0 else tuple(map(str, action.choices or ()))
            yield Option(tuple(action.option_strings), (action.help or "").replace("%%", "%"), takes)


def _words(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if not action.option_strings:
            yield from map(str, action.choices or ())


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The script for `shell`, one of SHELLS."""
    verbs = verbs_of(parser)
    if shell == "fish":
        return _fish(parser.prog, verbs)
    bash = _bash(parser.prog, verbs)
    return bash if shell == "bash" else f"autoload -Uz +X bashcompinit && bashcompinit\n{bash}"


def _bash(command: str, verbs: list[Verb]) -> str:
    name = "_" + re.sub(r"\W", "_", command)
    names = [verb.name for verb in verbs]
    values, flags, words = [], [], []
    for verb in verbs:
        for option in (option for option in verb.options if option.takes is not None):
            meant = "|".join(f'"{verb.name} {flag}"' for flag in option.names)
            values.append(
                f"    {meant}) words={_quoted(option.takes)} ;;" if option.takes else f"    {meant}) return ;;"
            )
        flags.append(f"    {verb.name}) words={_quoted(flag for option in verb.options for flag in option.names)} ;;")
        if verb.words:
            words.append(f"    {verb.name}) words={_quoted(verb.words)} ;;")
    return "\n".join(
        [
            f"{name}() {{",
            '  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" verb="" words="" i',
            "  COMPREPLY=()",
            "  for ((i = 1; i < COMP_CWORD; i++)); do",
            f'    case "${{COMP_WORDS[i]}}" in {"|".join(names)}) verb="${{COMP_WORDS[i]}}"; break ;; esac',
            "  done",
            '  case "$verb $prev" in',
            *values,
            "  esac",
            '  if [[ -n "$words" ]]; then :',
            f'  elif [[ -z "$verb" ]]; then words={_quoted((*names, "--help"))}',
            '  elif [[ "$cur" == -* ]]; then case "$verb" in',
            *flags,
            "    esac",
            '  else case "$verb" in',
            *words,
            "    *) return ;;",
            "    esac",
            "  fi",
            '  COMPREPLY=($(compgen -W "$words" -- "$cur"))',
            "}",
            f"complete -o bashdefault -o default -F {name} {command}",
            "",
        ]
    )


def _quoted(words: Iterable[str]) -> str:
    return f'"{" ".join(words)}"'


def _fish(command: str, verbs: list[Verb]) -> str:
    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = [
        f"complete -c {command} -f -n __fish_use_subcommand -a {verb.name} -d {quoted(verb.text)}" for verb in verbs
    ]
    for verb in verbs:
        seen = f"complete -c {command} -n '__fish_seen_subcommand_from {verb.name}'"
        if verb.words:
            lines.append(f"{seen} -a {quoted(' '.join(verb.words))}")
        for option in verb.options:
            flags = " ".join(f"-l {f[2:]}" if f.startswith("--") else f"-s {f[1:]}" for f in option.names)
            value = (
                "" if option.takes is None else f" -x -a {quoted(' '.join(option.takes))}" if option.takes else " -r"
            )
            lines.append(f"{seen} {flags}{value} -d {quoted(option.text.split('. ')[0])}")
    return "\n".join([*lines, ""])


def add_verb(verbs: argparse._SubParsersAction[Any], command: str) -> argparse.ArgumentParser:
    """The verb `completion SHELL` of a command."""
    examples = "\n".join(f"  {USE[shell].format(command=command)}" for shell in SHELLS)
    added = verbs.add_parser(
        "completion",
        help="print a script that completes verbs and options in a shell",
        description="Print a script that completes verbs and options in a shell.",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    added.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")
    return added
