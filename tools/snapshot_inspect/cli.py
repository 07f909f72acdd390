"""The command line of `snapshot-inspect`: arguments, help, errors, exit codes.

Owns: the grammar, what is printed where, and that every way out has its exit code.
Does not know: what a verb does (verbs.py).

Invariants:
1. Answers go to stdout, errors and progress to stderr. With --json stdout holds whole lines of JSON or nothing.
2. An error is `error: message` and a line that says what to do next; its exit code is that of recovery.errors.
3. Interrupting is safe at any time (130), and a reader that closes the pipe is no error.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata

from recovery.errors import NoStore, RecoveryError
from snapshot_inspect import (
    completion,
    documents,
    export,
    forgetting,
    importing,
    job_verbs,
    pruning,
    repair,
    verbs,
    views,
)
from snapshot_inspect.grammar import Parser
from snapshot_inspect.interrupt import code_of
from snapshot_inspect.newest import newest
from snapshot_inspect.places import open_place
from snapshot_inspect.render import Screen
from snapshot_inspect.survey import position
from snapshot_inspect.texts import error_text, filled, printable
from snapshot_inspect.verbs import Answer
from storage_backends.posix import translate

Verb = Callable[[argparse.Namespace, float], Answer]

EXAMPLES = (
    ("list", "snapshot-inspect list runs/17", "the snapshots of a store, or the stores of a folder"),
    ("show", "snapshot-inspect show runs/17 12", "one snapshot: what it holds, which job it belongs to"),
    ("latest", "snapshot-inspect latest runs/17", "what a restore would take, and what it would pass over"),
    ("verify", "snapshot-inspect verify runs/17 --read-data", "is everything there, and as it was written?"),
    ("calls", "snapshot-inspect calls runs/17", "the calls of a snapshot and how far they are"),
    ("cat", "snapshot-inspect cat runs/17 p-3", "one call: tokens, logprobs, policy versions, text"),
    ("explain", "snapshot-inspect explain runs/17 --config job.yaml", "can it be restored here? field by field"),
    ("plan", "snapshot-inspect plan runs/17 --config job.yaml", "what a restore would do, call by call"),
    ("diff", "snapshot-inspect diff runs/17 5 8", "what is different between two snapshots, or two stores"),
    ("stats", "snapshot-inspect stats runs/17", "where the bytes are, and what is garbage"),
    ("holds", "snapshot-inspect holds runs/17", "who held the store, and who fenced whom"),
    (
        "report",
        "snapshot-inspect report runs/17 --html job.html",
        "the job's life: figures, and a page with its timeline",
    ),
    ("doctor", "snapshot-inspect doctor runs/17 --probe", "permissions, clock, format; what the place guarantees"),
    ("export", "snapshot-inspect export runs/17 run-17.zip", "one snapshot as one file, or as JSON lines"),
    ("forget", "snapshot-inspect forget runs/17 8", "snapshots that no restore shall consider any more"),
    ("prune", "snapshot-inspect prune runs/17", "delete at once what nothing needs, and show what that is"),
    ("repair", "snapshot-inspect repair runs/17", "what could be mended of the newest snapshot, and at what loss"),
    ("import", "snapshot-inspect import run-17.zip s3://bucket/run-17", "a new store out of an exported file"),
)

_ABOUT = (
    "Look into the store of a rollout job. A running job is not disturbed, and nothing is written, but by import, by "
    "forget, prune and repair with --apply, and by doctor with --probe."
)
_STORE = "the store's folder, its address (s3://bucket/run), the config of its job, or a portable file"
_NEW_STORE = "where the store is made: a folder, an address, or a job's config; nothing may be there yet"
_ID = "`latest`, a snapshot's number, or the digits that only one number begins with (default: latest)"
_CODES = (
    "exit codes: 0 fine, 1 problem found, 2 usage, 3 partly done, 10 no store there, 11 fenced, 12 no permission, "
    "13 format not understood, 14 nothing published, 15 belongs to another job, 20 store cannot be reached, "
    "130 interrupted"
)


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="snapshot-inspect",
        description=_ABOUT,
        epilog=_CODES,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"%(prog)s {metadata.version('prefix-recovery')}")
    sub = top.add_subparsers(dest="verb", metavar="VERB", required=True)
    codes = textwrap.fill(_CODES, 100)

    def add(name: str, verb: Verb, *examples: str, file: str = "") -> argparse.ArgumentParser:
        _, example, purpose = next(item for item in EXAMPLES if item[0] == name)
        added = sub.add_parser(
            name,
            help=purpose,
            description=purpose[0].upper() + purpose[1:],
            epilog="\n".join(["examples:", *(f"  {text}" for text in (example, *examples)), "", codes]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        added.set_defaults(run=verb)
        if file:
            added.add_argument("file", metavar="FILE", help=file)
        added.add_argument("store", metavar="STORE", help=_NEW_STORE if file else _STORE)
        added.add_argument("--json", action="store_true", help="one JSON document, or one object a line")
        return added

    one = add("list", verbs.list_, "snapshot-inspect list runs", "snapshot-inspect list runs/17 --last 5 --json")
    one.add_argument("--last", type=_positive, metavar="N", help="only the newest N snapshots")
    one = add("show", verbs.show, "snapshot-inspect show runs/17 latest --json")
    one.add_argument("id", metavar="ID", help=_ID.replace(" (default: latest)", ""))
    one = add("latest", verbs.latest, "snapshot-inspect latest runs/17 --check")
    one.add_argument("--check", action="store_true", help="read everything that a restore reads before it takes one")
    one = add("verify", verbs.verify_, "snapshot-inspect verify runs/17 --snapshot latest --json")
    one.add_argument("--read-data", action="store_true", help="read every segment and check every token's digest")
    one.add_argument("--snapshot", metavar="ID", help="only this one (default: all)")
    one.add_argument(
        "--rescore",
        metavar="MODEL",
        help="start this model, score the calls' tokens once more, and compare the logprobs",
    )
    one = add("calls", verbs.calls_, "snapshot-inspect calls runs/17 12 --state open")
    one.add_argument("id", metavar="ID", nargs="?", default="latest", help=_ID)
    one.add_argument("--state", choices=("open", "ended"), help="only these")
    one = add("cat", verbs.cat, "snapshot-inspect cat runs/17 8c2f --tokenizer models/smollm2")
    one.add_argument(
        "call", metavar="CALL", help="a rollout's name, a call's id, or the digits that only one id begins with"
    )
    one.add_argument("id", metavar="ID", nargs="?", default="latest", help=_ID)
    one.add_argument("--tokenizer", metavar="DIR", help="the folder of a tokenizer.json: show text as well")
    for name, verb in (("explain", job_verbs.explain_), ("plan", job_verbs.plan_)):
        one = add(name, verb, f"snapshot-inspect {name} runs/17 8 --json")
        one.add_argument("id", metavar="ID", nargs="?", default="latest", help=_ID)
        one.add_argument("--config", metavar="FILE", help="the job's file: compare with what it is on this machine")
    one = add("diff", job_verbs.diff_, "snapshot-inspect diff runs/17 5", "snapshot-inspect diff runs/17 runs/18")
    one.add_argument("a", metavar="A", help="a snapshot's id, or another store (then the latest of both)")
    one.add_argument("b", metavar="B", nargs="?", help="a snapshot's id (default: latest)")
    add("stats", job_verbs.stats_, "snapshot-inspect stats runs/17 --json")
    add("holds", job_verbs.holds_, "snapshot-inspect holds runs/17 --json")
    one = add("report", job_verbs.report_, "snapshot-inspect report runs/17")
    one.add_argument(
        "--html", metavar="FILE", help="write one self-contained page, to open in a browser without network"
    )
    one = add("doctor", job_verbs.doctor_, "snapshot-inspect doctor s3://bucket/new-run --probe")
    one.add_argument("--probe", action="store_true", help="write scratch objects, time them, and remove them again")
    _add_writing(add)
    completion.add_verb(sub, top.prog).set_defaults(run=_completion, store="", json=False)
    return top


def _add_writing(add: Callable[..., argparse.ArgumentParser]) -> None:
    one = add(
        "export",
        export.export,
        "snapshot-inspect export s3://bucket/run-17 8 run-17-8.zip --codec zarr",
        "snapshot-inspect export runs/17 --jsonl calls.jsonl --tokenizer models/smollm2",
        "snapshot-inspect export runs/17 --jsonl - | jq .rollout",
    )
    one.add_argument(
        "words", metavar="[ID] FILE", nargs="*", help="the snapshot (default: latest), and the file to make"
    )
    one.add_argument(
        "--codec", choices=("arrow", "zarr"), help="encoding of the segments in it (default: the newest's)"
    )
    one.add_argument("--adopt", action="store_true", help="add what was flushed since, as a restore would")
    one.add_argument("--jsonl", metavar="FILE", help="write JSON lines instead, one call a line; - is stdout")
    one.add_argument(
        "--tokenizer", metavar="DIR", help="with --jsonl: the folder of a tokenizer.json, for text as well"
    )
    one.add_argument("--force", action="store_true", help="replace FILE if it is there")
    one = add("forget", forgetting.forget_, "snapshot-inspect forget runs/17 7 8 --apply")
    one.add_argument("ids", metavar="ID", nargs="+", help=_ID.replace(" (default: latest)", ""))
    one.add_argument("--leave-none", action="store_true", help="also if no snapshot is left that a restore could take")
    one.add_argument("--apply", action="store_true", help="do it; a job that runs on the store is fenced by it")
    one = add("prune", pruning.prune_, "snapshot-inspect prune runs/17 --keep 1 --apply")
    one.add_argument("--keep", type=_positive, metavar="N", default=2, help="newest snapshots that stay (default: 2)")
    one.add_argument("--apply", action="store_true", help="do it; a job that runs on the store is fenced by it")
    one = add("repair", repair.repair, "snapshot-inspect repair runs/17 --apply")
    one.add_argument(
        "--apply", action="store_true", help="publish what is left; a job that runs on the store is fenced by it"
    )
    one = add(
        "import",
        importing.import_,
        "snapshot-inspect import run-17.zip runs/18 --codec arrow",
        file="a portable file, as `export` makes it",
    )
    one.add_argument("--codec", choices=("arrow", "zarr"), help="encoding of the new segments (default: as in FILE)")
    one.add_argument(
        "--single-writer",
        action="store_true",
        help="for a server without atomic create: nothing else writes there, ever, and nothing is fenced",
    )


def _completion(args: argparse.Namespace, now: float) -> Answer:
    script = completion.script(args.shell, parser())
    return Answer(0, [], lambda screen: screen.verbatim(script))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns its exit code."""
    return code_of(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: list[str]) -> int:
    front = argparse.Namespace(run=lambda args, now: Answer(0, [], _front_page), store=".", json=False)
    try:
        args = parser().parse_args(argv) if argv else front
    except SystemExit as leaving:  # argparse has said why, or has printed its help
        return leaving.code if isinstance(leaving.code, int) else 2
    try:
        answer = args.run(args, time.time())
        code = _printed(answer, json=args.json or answer.always_json)
        if answer.error is not None and answer.error.exit_code >= NoStore.exit_code:
            _say(answer.error, args)
        return code
    except RecoveryError as error:
        _say(error, args)
        return error.exit_code


def _say(error: RecoveryError, args: argparse.Namespace) -> None:
    hint = filled(error.hint, "STORE", args.store)
    if "file" in args:
        hint = filled(hint, "FILE", args.file)
    print(error_text(error.message, hint), file=sys.stderr)


def _printed(answer: Answer, *, json: bool) -> int:
    """Print an answer. Its exit code stands also if nobody reads to the end."""
    for note in answer.notes:
        print(f"note: {printable(' '.join(note.splitlines()))}", file=sys.stderr)
    try:
        if json:
            if hasattr(sys.stdout, "reconfigure"):  # what JSON escapes in no other encoding: a lone surrogate
                sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
            for document in answer.documents:
                print(documents.dump(document))
        else:
            if hasattr(sys.stdout, "reconfigure"):
                sys.stdout.reconfigure(errors="backslashreplace")
            answer.show(Screen(sys.stdout))
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()
    except OSError as error:  # the disk under it is full, say
        _drop_stdout()
        raise translate(error, "write to", "stdout") from error
    return answer.exit_code


def _drop_stdout() -> None:
    """Python flushes stdout once more at exit; let that go nowhere."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _front_page(screen: Screen) -> None:
    """What is shown without arguments: the verbs by example, and this folder's latest snapshot if it is a store."""
    screen.line(_ABOUT)
    screen.line()
    screen.facts([(example, purpose) for _, example, purpose in EXAMPLES])
    screen.line()
    screen.line("`snapshot-inspect VERB --help` says more; --json works with every verb that looks into a store.")
    screen.line("`snapshot-inspect completion bash` prints a script that completes all of this (also zsh, fish).")
    if not os.path.isfile("format.json"):
        return
    screen.line()
    try:
        place = open_place(".")
        found = newest(place.store, position(place.store))
    except RecoveryError as error:
        screen.line(f"This folder is a store, but: {error.message}")
        return
    screen.line("This folder is a store:")
    views.latest(screen, documents.latest(place, found, time.time()))


if __name__ == "__main__":
    sys.exit(main())
