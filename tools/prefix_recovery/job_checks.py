"""What `prefix-recovery doctor` says of a job: could it start here, and if not, what is in the way.

Owns: the checks of a job's model, prompts, output and store.
Does not know: the machine's own checks (doctor.py), how a finding is shown, how anything is mended.

Invariants:
1. Nothing is left behind. In a bucket one object is made and removed, as a run does when it starts; on disk nothing is.
2. What would end a run at its start is a `fail` here, with the same words.
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from prefix_recovery.changes import refuse_rows
from prefix_recovery.engine import Unstarted
from prefix_recovery.engine_requests import Requests, check_sampling
from prefix_recovery.job_here import job_of
from prefix_recovery.model_place import check_model
from prefix_recovery.prompts import BadLine, read_prompts
from prefix_recovery.results import Results
from prefix_recovery.stored_job import begins_anew, check_stored
from recovery.claims import latest_claims
from recovery.config import JobConfig, effective_mode
from recovery.errors import InputError, NoStore, RecoveryError
from recovery.log import Slot
from recovery.log_reading import Read, find_tail, walk_back
from recovery.ports import ObjectStore
from recovery.snapshots import FORMAT_KEY, check_root
from snapshot_inspect.texts import count_text
from storage_backends import open_store
from storage_backends.posix import translate
from storage_backends.transfer_queue import package

CLAIMS_SHOWN = 4
LINES_SHOWN = 8
TIGHT_BYTES = 64 << 20
"""Less room than this is worth a word."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`level` is ok, warn or fail."""

    level: str
    what: str
    todo: str = ""


def check_job(config: JobConfig, folder: Path) -> Iterator[Finding]:
    """`folder`: the config's."""
    failed, model = set[Callable[..., Iterator[Finding]]](), partial(_model, folder)
    for check in (model, _prompts, _engine, _output, _store, _queue):
        if check is _engine and model in failed:  # it would look for the model again, and say the same in more words
            failed.add(check)
            continue
        for finding in _guarded(check, config):
            if finding.level == "fail":
                failed.add(check)
            yield finding
    if not failed & {_engine, _store}:  # else it would be tried, waited for and told a second time
        yield from _guarded(_same_job, config)


def _guarded(check: Callable[[JobConfig], Iterator[Finding]], config: JobConfig) -> Iterator[Finding]:
    try:
        yield from check(config)
    except RecoveryError as error:
        yield Finding("fail", error.message, error.hint)
    except OSError as error:
        said = translate(error, "look at", str(error.filename or "a file of the job"))
        yield Finding("fail", said.message, said.hint)


def _queue(config: JobConfig) -> Iterator[Finding]:
    if config.rollout_checkpointing.staging == "transfer_queue":
        yield Finding("ok", f"TransferQueue {package().__version__} is here for flushes to wait in")


def _model(folder: Path, config: JobConfig) -> Iterator[Finding]:
    check_model(config.model, folder)
    model = Path(config.model)
    if not model.is_dir():
        yield Finding("ok", f"model {model} is no folder here, but a name under which vLLM may find it")
    elif not (model / "config.json").is_file():
        todo = "`prefix-recovery model smollm2 DIR` makes one"
        yield Finding("fail", f"model folder {model} has no config.json", todo)
    else:
        yield Finding("ok", f"model {model}")


def _prompts(config: JobConfig) -> Iterator[Finding]:
    file = read_prompts(config.prompts)
    if file.prompts:
        yield Finding("ok", f"{count_text(len(file.prompts), 'prompt')} in {config.prompts}")
    if file.bad:
        yield _lines(f"{count_text(len(file.bad), 'line')} of {config.prompts} will have no result", file.bad)


def _lines(what: str, bad: Sequence[BadLine]) -> Finding:
    shown = [f"line {line.line}: {line.error}" for line in bad[:LINES_SHOWN]]
    more = [f"and {len(bad) - LINES_SHOWN} more"] if len(bad) > LINES_SHOWN else []
    return Finding("warn", what, "\n".join([*shown, *more]))


def _engine(config: JobConfig) -> Iterator[Finding]:
    """What vLLM says of the configuration before an engine starts. Imports it, which takes seconds."""
    if find_spec("vllm") is None:
        return  # doctor.py has said so
    engine = Unstarted(config.model, config.engine)
    check_sampling(config.sampling)
    yield Finding("ok", "vLLM takes `model`, `engine` and `sampling`")
    requests, bad = Requests(engine, config.sampling), list[BadLine]()
    for prompt in read_prompts(config.prompts).prompts:
        if prompt.sampling:
            try:
                requests.sampling_of(prompt)
            except InputError as error:
                bad.append(BadLine(prompt.line, prompt.id, error.message))
    if bad:
        yield _lines(f"the sampling of {count_text(len(bad), 'line')} is refused, and it will have no result", bad)


def _output(config: JobConfig) -> Iterator[Finding]:
    output = Path(config.output)
    if output.exists() and not output.is_file():
        yield Finding("fail", f"the output {output} is not a file", "check `output` in the config")
        return
    if output.exists() and not os.access(output, os.R_OK | os.W_OK, effective_ids=True):
        yield Finding("fail", f"the output {output} cannot be written", f"see `ls -l {output}`")
        return
    problem = _cannot_hold(output.parent)
    if problem is not None:
        yield Finding("fail", f"the output {output}: {problem[0]}", problem[1])
        return
    results = Results(output)
    results.look()
    samples = read_prompts(config.prompts).samples(config.samples_per_prompt)
    for what in refuse_rows(results, samples, config.sampling).sentences(output):
        yield Finding("warn", what, "see that the output is this job's own")
    yield Finding("ok", f"output {output}" + (f", with {count_text(len(results.done), 'row')}" if results.done else ""))
    yield from _room(output.parent, "the output's disk")


def _cannot_hold(folder: Path) -> tuple[str, str] | None:
    """Why nothing can be made in `folder` (which need not be there yet), and what to do; None if it can."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is a file, not a folder", "name another place"
    if os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        return None
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return f"{folder} is on a file system that is mounted read-only", "mount it for writing, or name another place"
    return f"{folder} may not be written by this user", f"see `ls -ld {folder}`; run as its owner, or change its mode"


def _room(folder: Path, what: str) -> Iterator[Finding]:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < TIGHT_BYTES:
        level = "fail" if not free else "warn"
        yield Finding(level, f"{what} ({folder}) has {free >> 10} KiB free", "make room before the run")


def _store(config: JobConfig) -> Iterator[Finding]:
    block = config.rollout_checkpointing
    if effective_mode(block) == "off" or block.store is None:
        what = "rollout_checkpointing is off: a crash costs every unfinished call"
        yield Finding("warn", what, "set enabled: true")
        return
    if warning := block.store_options.warning(block.store):
        yield Finding("warn", warning, "make sure that nothing starts a second run")
    yield from _bucket(config) if block.store.lower().startswith("s3:") else _folder(block.store, config)


def _bucket(config: JobConfig) -> Iterator[Finding]:
    """With `create` the store tries the server as a run does: may it be written, does it keep two writers apart?"""
    block = config.rollout_checkpointing
    assert block.store is not None
    store = open_store(block.store, create=True, **block.store_options.given())
    if block.store_options.exclusive:  # then nothing was tried
        key = f"probe/{secrets.token_hex(16)}"
        store.put(key, b"")
        store.delete(key)
    yield from _contents(store, block.store, config)


def _folder(address: str, config: JobConfig) -> Iterator[Finding]:
    try:
        store = open_store(address)
    except NoStore:
        path = Path(address.removeprefix("file://"))
        problem = _cannot_hold(path)
        if problem is not None:
            yield Finding("fail", f"no store can be made at {address}: {problem[0]}", problem[1])
        elif path.is_symlink():
            raise
        else:
            yield Finding("ok", f"no store at {address} yet; the run makes one")
            yield from _room(path, "the store's disk")
        return
    root = Path(getattr(store, "root", address))
    problem = _cannot_hold(root)
    if problem is not None:
        yield Finding("fail", f"the store {address} can be read but not written: {problem[0]}", problem[1])
    yield from _contents(store, address, config)
    if not (root / FORMAT_KEY).exists() and any(root.iterdir()):
        what = f"{root} holds other files and no store; a run would make one among them"
        yield Finding("warn", what, "name a folder of its own")
    yield from _room(root, "the store's disk")


def _contents(store: ObjectStore, address: str, config: JobConfig) -> Iterator[Finding]:
    if none := begins_anew(store, address):
        yield Finding("ok", none)
        return
    tail = find_tail(store)
    yield Finding("ok", f"store {address}, {tail} log entries; `snapshot-inspect latest` says more")
    claims = latest_claims(store, tail, CLAIMS_SHOWN)
    for holder in claims[:1]:
        yield Finding("ok", _holder(holder, ended=_ended(store, tail)))
    for heir, old in itertools.pairwise(claims):
        yield Finding("ok", f"fenced: {_claim(old)}, of epoch {old.epoch}, by slot {heir.seq}")


def _same_job(config: JobConfig) -> Iterator[Finding]:
    """As a run compares it before it claims the store."""
    block = config.rollout_checkpointing
    if effective_mode(block) == "off" or block.store is None:
        return
    try:
        store = open_store(block.store, **block.store_options.given())
        check_root(store)
    except NoStore:
        return
    if find_spec("vllm") is None:
        yield Finding("warn", "whether the store belongs to this job was not compared: vLLM is not installed", "")
        return
    found = check_stored(store, block.restore, lambda: job_of(config, read_prompts(config.prompts)))
    if found is not None:
        calls = count_text(found.same, "stored call")
        yield Finding("ok", f"the store belongs to this job; {calls} with the same prompt and sampling")


def _ended(store: ObjectStore, tail: int) -> bool:
    """Whether the newest snapshot is the last one of a process that stopped by itself."""
    for read in walk_back(store, tail):
        if isinstance(read, Read) and read.slot.kind in ("snapshot", "epoch"):
            return read.slot.kind == "snapshot" and read.slot.body.get("cause") == "final"
    return False


def _holder(slot: Slot, *, ended: bool) -> str:
    who = f"{_claim(slot)} (epoch {slot.epoch})"
    if ended:
        return f"the last run was {who}; it stopped by itself, and nobody uses the store now"
    return f"the last to claim the store was {who}; whether it lives no store knows, and the next run fences it"


def _claim(slot: Slot) -> str:
    when = datetime.fromtimestamp(slot.utc, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    return f"{slot.owner or 'somebody unknown'} (claimed {when})"
