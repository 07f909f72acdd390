"""Two readers against each other and against what was written: golden stores, fresh ones, and damage.

The golden store is bytes that an earlier version wrote. Nothing here writes into tests/golden.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest

from recovery.errors import Damaged, FormatNotUnderstood, ObjectMissing
from recovery.ledger import Entry
from recovery.log_reading import Read, find_tail, walk_back
from recovery.model import OPEN, WIDE_TYPES, Chunk, Record
from recovery.ports import ObjectStore
from recovery.reading import read_segment, read_transcripts
from recovery.snapshots import Loaded, Snapshot, check_root, load
from storage_backends import arrow_file
from storage_backends.arrow_ledger import ArrowLedgerCodec
from storage_backends.codecs import MixedSegmentCodec
from storage_backends.local import LocalStore
from tests import independent_reader, independent_zarr
from tests.golden.make_golden import A0, A1, FOREIGN, Life, bits, expectation, golden
from tests.independent_reader import BadStore, check_everything, read_store

GOLDEN = Path(__file__).parent / "golden"
STORE = GOLDEN / "v1-arrow"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text("utf-8"))
NEWEST, TAIL = EXPECTED["readable"][-1], len(EXPECTED["kinds"])
WHOLE = [int(number) for number, snapshot in EXPECTED["snapshots"].items() if "calls" in snapshot]
FLIPS_PER_OBJECT = 12

Root = Path
Calls = list[dict[str, Any]]


# ---- both readers, in the words of expected.json -------------------------------------------------------------------


def independent(snapshot: dict[str, Any]) -> Calls:
    """What the independent reader returned."""
    calls = []
    for read in snapshot["calls"]:
        assert read["logprobs"].dtype == np.float32 and read["mask"].dtype == np.bool_
        call = {name: value for name, value in read.items() if name not in ("has_logprobs", "n_chunks")}
        words = zip(read["logprobs"].view(np.uint32).tolist(), read["has_logprobs"].tolist(), strict=True)
        call["logprobs"] = [word if has else None for word, has in words]
        call["mask"] = "".join("01"[bit] for bit in read["mask"].tolist())
        call["columns"] = [
            column_as_json(name, start, values) for name, runs in read["columns"].items() for start, values in runs
        ]
        call["token_ids"], call["prompt_token_ids"] = read["token_ids"].tolist(), read["prompt_token_ids"].tolist()
        calls.append(call)
    return calls


def column_as_json(name: str, start: int, values: Any) -> dict[str, Any]:
    """A stretch of a wide column: `bits` are its bytes, little-endian, row by row."""
    assert values.dtype.isnative and not values.dtype.hasobject
    width = values.shape[1] if values.ndim == 2 else 0
    stop, bits = start + len(values), values.tobytes().hex()
    return {"name": name, "type": values.dtype.name, "width": width, "start": start, "stop": stop, "bits": bits}


def snapshot_of_project(store: ObjectStore, number: int | None = None) -> Loaded:
    """The newest snapshot, or snapshot `number`, as the project loads it."""
    check_root(store)
    for read in walk_back(store, find_tail(store)):
        if not isinstance(read, Read):
            raise read
        if read.slot.kind == "snapshot" and number in (None, read.slot.seq):
            return load(store, ArrowLedgerCodec(), Snapshot.from_slot(read.slot))
    raise ObjectMissing(f"there is no snapshot {number}")


def project(store: ObjectStore, number: int | None = None) -> Calls:
    """What the project's own reader returns."""
    loaded, codec = snapshot_of_project(store, number), MixedSegmentCodec()
    entries = sorted(loaded.ledger, key=lambda entry: (entry.identity.rollout, entry.identity.turn))
    transcripts = read_transcripts(store, codec, loaded.ledger, entries)
    read = cache(lambda key: read_segment(store, codec, loaded.ledger.segment(key)))
    calls = []
    for entry in entries:
        found = transcripts[entry.call_id]
        reason, stop = entry.ended or (None, None)
        mask, has = masks(read, entry)
        words = zip(found.logprobs.view(np.uint32).tolist(), has, strict=True)
        calls.append(
            {
                "rollout": found.request.rollout,
                "turn": found.request.turn,
                "call_id": entry.call_id.hex(),
                "prompt_token_ids": found.request.prompt_token_ids.tolist(),
                "sampling": found.request.sampling,
                "extra": found.request.extra,
                "restart_only": found.request.restart_only,
                "source_digest": found.request.source_digest,
                "attempt": entry.attempt,
                "state": "open" if entry.state == OPEN else "ended",
                "finish_reason": reason,
                "stop_reason": stop,
                "history": [event_as_json(event) for event in entry.history],
                "token_ids": found.token_ids.tolist(),
                "logprobs": [word if present else None for word, present in words],
                "mask": mask,
                "versions": [[start, stop, v.lineage, v.number] for start, stop, v in found.version_spans],
                "columns": [
                    column_as_json(name, run.start, run.values) for name, runs in found.columns.items() for run in runs
                ],
            }
        )
    return calls


def event_as_json(event: Any) -> dict[str, Any]:
    kind = {"Resumed": "resume", "Restarted": "restart"}[type(event).__name__]
    return {"kind": kind, **{name: getattr(event, name) for name in event.__slots__}}


def masks(read: Callable[[str], list[Record]], entry: Entry) -> tuple[str, list[bool]]:
    """What a Transcript does not carry: the mask, and which tokens have a logprob."""
    mask, has = "", []
    for ref in entry.chunks:
        record = read(ref.at.segment)[ref.at.index]
        assert isinstance(record, Chunk)
        mask += "".join("01"[bit] for bit in record.mask.tolist())
        has += [record.logprobs is not None] * ref.n_tokens
    return mask, has


def check(found: Calls, wanted: Calls) -> None:
    """Equal, with the differing field in the message."""
    assert [(call["rollout"], call["turn"]) for call in found] == [(call["rollout"], call["turn"]) for call in wanted]
    for call, told in zip(found, wanted, strict=True):
        told = {"columns": [], **told}  # the first golden store was made before there were any
        for name in told:
            assert call[name] == told[name], f"{name} of {told['rollout']!r}"
        assert call.keys() == told.keys()


def copied(tmp_path: Path) -> Root:
    root = tmp_path / "store"
    shutil.copytree(STORE, root, copy_function=shutil.copyfile)
    return root


# ---- the golden store ------------------------------------------------------------------------------------------------


def test_golden_files_are_the_ones_that_were_written() -> None:
    lines = (GOLDEN / "v1-arrow.sha256").read_text("utf-8").splitlines()
    listed = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    files = [path for path in STORE.rglob("*") if path.is_file()]
    found = {path.relative_to(GOLDEN).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    # Some tools leave these out of an archive; they are foreign to the store anyway.
    may_lack = {name for name in listed if name.endswith(".DS_Store")}
    assert {**{name: listed[name] for name in may_lack}, **found} == listed
    assert sum(path.stat().st_size for path in files) < 170_000


def test_independent_reader_imports_nothing_of_the_project() -> None:
    allowed = {"contextlib", "google_crc32c", "hashlib", "json", "numpy", "pathlib", "pyarrow", "re", "struct"}
    allowed |= {"io", "zipfile", "tests.independent_zarr"}
    for module in (independent_reader, independent_zarr):
        names = set()
        for node in ast.walk(ast.parse(Path(module.__file__).read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                below = {f"tests.{alias.name}" for alias in node.names}
                names |= below if node.module == "tests" else {str(node.module)}
        assert names <= allowed


def test_golden_log_read_independently() -> None:
    store = read_store(STORE)
    assert store["format"]["format"] == "prefix-recovery" and store["format"]["version"] == 1
    assert [slot["kind"] for slot in store["slots"]] == EXPECTED["kinds"]
    assert [slot["epoch"] for slot in store["slots"]] == EXPECTED["epochs"]
    assert store["tail"] == TAIL and store["snapshot"]["id"] == NEWEST
    assert store["snapshots"] == sorted(EXPECTED["readable"] + EXPECTED["collected"])
    assert check_everything(STORE) == (EXPECTED["readable"], EXPECTED["collected"])


@pytest.mark.parametrize("number", EXPECTED["readable"])
def test_golden_snapshot_read_by_both(number: int) -> None:
    wanted, found = EXPECTED["snapshots"][str(number)], read_store(STORE, number)["snapshot"]
    assert {name: found[name] for name in ("cause", "restored_from", "states")} == {
        name: wanted[name] for name in ("cause", "restored_from", "states")
    }
    loaded = snapshot_of_project(LocalStore(STORE), number)
    assert {name: json.loads(data) for name, data in loaded.states.items()} == wanted["states"]
    for calls in (independent(found), project(LocalStore(STORE), number)):
        if number in WHOLE:
            check(calls, wanted["calls"])
        lengths = {f"{call['rollout']} {call['turn']}": len(call["token_ids"]) for call in wanted.get("calls", calls)}
        assert {f"{call['rollout']} {call['turn']}": len(call["token_ids"]) for call in calls} == lengths
        assert wanted.get("tokens", lengths) == lengths


def test_golden_store_holds_what_it_is_for() -> None:
    """The cases because of which the store is as it is; without one of them it would prove less."""
    newest, calls = read_store(STORE)["snapshot"], EXPECTED["snapshots"][str(NEWEST)]["calls"]
    by_name = {(call["rollout"], call["turn"]): call for call in calls}
    depths = {number: read_store(STORE, number)["snapshot"]["depth"] for number in EXPECTED["readable"]}
    assert depths[WHOLE[0]] == 2 and depths[NEWEST] == 3 and 1 in depths.values(), "ledgers of several objects"
    assert any(len(call["versions"]) > 1 for call in calls)
    assert {event["kind"] for call in calls for event in call["history"]} == {"resume", "restart"}
    assert {type(call["stop_reason"]) for call in calls} == {type(None), int, str}
    assert {call["finish_reason"] for call in calls} == {None, "stop", "length"}
    bitwise = {word for call in calls for word in call["logprobs"]}
    assert {None, bits(float("nan")), bits(-float("inf")), bits(-0.0)} <= bitwise
    assert by_name["p-1", 0]["mask"].startswith("101") and any(not call["rollout"].isascii() for call in calls)
    assert any(call["n_chunks"] > 64 for call in newest["calls"]), "one call over more than one batch"
    assert ("dropped", 0) not in by_name and ("repetition", 0) not in by_name
    adoptable = sorted(STORE.glob("seg/e000002/*.????????/*.arrow"))[-1].relative_to(STORE)
    assert newest["flushed"] == {adoptable.parts[2]: int(adoptable.name[:8]) - 1}, "a flush that no snapshot names"
    assert json.loads((STORE / "hint").read_bytes())["tail"] < TAIL, "a hint that is behind"


def test_current_code_writes_the_same_job(tmp_path: Path) -> None:
    """The bytes may differ (another Arrow, another choice where the format leaves one); what is read may not."""
    store = LocalStore(tmp_path)
    life = golden(store)
    assert json.loads(json.dumps(expectation(life, store))) == EXPECTED
    assert check_everything(tmp_path) == (EXPECTED["readable"], EXPECTED["collected"])
    for number in WHOLE:
        wanted = EXPECTED["snapshots"][str(number)]["calls"]
        check(independent(read_store(tmp_path, number)["snapshot"]), wanted)
        check(project(store, number), wanted)


# ---- what must not matter ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hint", [None, b"", b"{}", b'{"tail": 1}', b'{"tail": 99}', b'{"tail": -1}', b"\xff"])
def test_any_hint_will_do(tmp_path: Path, hint: bytes | None) -> None:
    root = copied(tmp_path)
    (root / "hint").unlink() if hint is None else (root / "hint").write_bytes(hint)
    for calls in (independent(read_store(root)["snapshot"]), project(LocalStore(root))):
        check(calls, EXPECTED["snapshots"][str(NEWEST)]["calls"])


def test_foreign_files_are_ignored(tmp_path: Path) -> None:
    root = copied(tmp_path)
    for folder in [root, *(path for path in root.rglob("*") if path.is_dir())]:
        for name in (".DS_Store", "Thumbs.db", "note"):
            (folder / name).write_bytes(b"foreign")
    (root / ".tmp").mkdir()
    (root / ".tmp" / "host.1.2.0123456789abcdef").write_bytes(b"half a segme")
    for calls in (independent(read_store(root)["snapshot"]), project(LocalStore(root))):
        check(calls, EXPECTED["snapshots"][str(NEWEST)]["calls"])
    for key in FOREIGN:
        (root / key).unlink(missing_ok=True)
    check(independent(read_store(root)["snapshot"]), EXPECTED["snapshots"][str(NEWEST)]["calls"])


# ---- stores that the present code writes -----------------------------------------------------------------------------


def some_job(store: ObjectStore, seed: int) -> Life:
    """A few lives of a job with a few calls; what it does is a function of the seed."""
    rng = random.Random(seed)
    life: Life | None = None
    for _ in range(rng.randint(1, 3)):
        life = Life(store, life, keep=rng.choice([1, 2, 6]), seed=seed, codec=rng.choice(["arrow", "zarr"]))
        for step in range(rng.randint(0, 40)):
            act(life, rng, step)
        life.close()
    assert life is not None
    return life


def act(life: Life, rng: random.Random, step: int) -> None:
    going = [name for name, call in life.live.items() if call.ended is None]
    name = rng.choice(going) if going else None
    match rng.randrange(12):
        case 0 | 1:
            fields = {"sampling": {"max_tokens": rng.choice([4, 64]), "temperature": rng.choice([0.0, 0])}}
            if rng.random() < 0.3:
                fields |= {"restart_only": "seed", "sampling": {"max_tokens": 64, "seed": 1}}
            rollout = rng.choice(["r", "ü/雪", "", "a b\n"]) + str(step + 100 * life.log.epoch)
            life.open(
                rollout, rng.choice([0, 1, 2**50]), [rng.randrange(3, 900) for _ in range(rng.randint(0, 9))], **fields
            )
        case 2 | 3 | 4 | 5 | 6 if name:
            n = rng.choice([1, 1, 2, 5, 70])
            logprobs = rng.choice([None, [rng.uniform(-9, 0) for _ in range(n)]])
            mask = rng.choice([None, [rng.random() < 0.5 for _ in range(n)]])
            tokens = [rng.randrange(3, 1000) for _ in range(n)]
            version, columns = rng.choice([A0, A1, ("ß", 2**63)]), some_columns(rng, n)
            life.say(name, tokens, version=version, logprobs=logprobs, mask=mask, columns=columns)
        case 7 if name:
            life.end(name, *rng.choice([("stop", 7), ("stop", "x\0"), ("stop", None), ("length", None)]))
        case 8 if name:
            life.again(name)
        case 9:
            life.flush()
        case 10 | 11:
            over = [name for name, call in life.published.items() if call.ended is not None]
            life.states["sampler"]["drawn"] = step // 8
            life.snapshot(drop=rng.sample(over, 1) if over and rng.random() < 0.4 else ())


def some_columns(rng: random.Random, n: int) -> dict[str, np.ndarray]:
    columns = {}
    for name in rng.sample(["top_ids", "top_logprobs", "A.z", "-", "0"], rng.choice([0, 0, 1, 3])):
        dtype = np.dtype(rng.choice(WIDE_TYPES))
        shape = (n, *rng.choice([(), (1,), (3,)]))
        raw = np.frombuffer(rng.randbytes(int(np.prod(shape)) * dtype.itemsize), np.uint8)
        columns[name] = (raw > 127 if dtype == np.bool_ else raw.view(dtype)).reshape(shape)
    return columns


@pytest.mark.parametrize("number", range(12))
def test_fresh_stores_are_read_alike(tmp_path: Path, rng: random.Random, number: int) -> None:
    seed = rng.randrange(2**32)
    print(f"some_job(store, {seed})")
    store = LocalStore(tmp_path)
    life = some_job(store, seed)
    wanted = expectation(life, store)
    found = read_store(tmp_path)
    assert [slot["kind"] for slot in found["slots"]] == wanted["kinds"]
    assert check_everything(tmp_path) == (wanted["readable"], wanted["collected"])
    newest = life.expected[wanted["readable"][-1]]
    assert {name: found["snapshot"][name] for name in newest if name != "calls"} == {
        name: value for name, value in newest.items() if name != "calls"
    }
    check(independent(found["snapshot"]), newest["calls"])
    check(project(store), newest["calls"])


# ---- damage ----------------------------------------------------------------------------------------------------------


def keys_read(monkeypatch: pytest.MonkeyPatch, read: Callable[[], object]) -> list[str]:
    """The objects that `read` fetches, in order, each once."""
    keys: dict[str, None] = {}
    fetch = independent_reader.fetch

    def noting(root: Root, key: str, limit: int) -> bytes:
        keys[key] = None
        return fetch(root, key, limit)

    with monkeypatch.context() as patched:
        patched.setattr(independent_reader, "fetch", noting)
        read()
    return list(keys)


def all_keys(root: Root) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def test_every_flipped_byte_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte at a time, in every object. What no snapshot references may be anything at all."""
    root = copied(tmp_path)
    readers: dict[str, Callable[[], object]] = {}
    for read in [*(partial(read_store, root, number) for number in reversed(WHOLE)), partial(check_everything, root)]:
        readers = {**dict.fromkeys(keys_read(monkeypatch, read), read), **readers}
    assert {key.split("/")[0] for key in readers} == {"format.json", "log", "ledger", "seg", "state", "gc"}
    # No later slot says what the newest slot is, and nothing says what the format mark is.
    unsummed = {"format.json", f"log/{TAIL:012d}.json"}
    whole, rng = as_text(read_store(root)), random.Random("flips")
    n_found = n_harmless = 0
    for key in all_keys(root):
        data = (root / key).read_bytes()
        for at in sorted(rng.sample(range(len(data)), min(FLIPS_PER_OBJECT, len(data)))):
            flipped = bytearray(data)
            flipped[at] ^= rng.randrange(1, 256)
            (root / key).write_bytes(flipped)
            where = f"byte {at} of {key}, now {flipped[at]:#04x}"
            try:
                unchanged = as_text(readers.get(key, partial(read_store, root))()) == whole
            except BadStore as error:
                assert key in readers, f"{where}: nobody needs it, and yet {error}"
                assert named(error, key), f"{where}: {error}"
                n_found += 1
            else:
                assert key not in readers or key in unsummed, f"{where}: not found"
                assert unchanged, f"{where}: not found, and something else is read"
                n_harmless += 1
        (root / key).write_bytes(data)
    print(f"{n_found} flips were found, {n_harmless} were of no consequence")
    assert n_found >= 500
    assert as_text(read_store(root)) == whole, "the copy was not put back as it was"


def as_text(store: Any) -> str:
    """All of a snapshot that was read, as text; what the log says beside it, and the format mark, are left out."""
    snapshot = store["snapshot"]
    return json.dumps({**snapshot, "calls": independent(snapshot)}, sort_keys=True)


def named(error: BadStore, key: str) -> bool:
    """The object itself, or for a slot the one after it, which knows its sum."""
    if not key.startswith("log/"):
        return str(error).startswith(f"{key}: ")
    after = f"log/{int(key[4:-5]) + 1:012d}.json"
    return str(error).startswith((f"{key}: ", f"{after}: "))


@pytest.mark.parametrize("how", ["missing", "short", "long", "empty"])
def test_every_lost_or_truncated_object_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    root = copied(tmp_path)
    for key in keys_read(monkeypatch, lambda: read_store(root)):
        path, data = root / key, (root / key).read_bytes()
        last = key == f"log/{TAIL:012d}.json"
        if how == "missing":
            path.unlink()
        else:
            path.write_bytes({"short": data[:-1], "long": data + b"\n", "empty": b""}[how])
        if (key == "format.json" or last) and how == "long":  # white space after what no sum covers
            read_store(root)
        elif last and how == "missing":  # a shorter log is a log
            assert read_store(root)["tail"] == TAIL - 1
        else:
            with pytest.raises(BadStore) as raised:
                read_store(root)
            assert named(raised.value, key), f"{key}: {raised.value}"
        path.write_bytes(data)


# ---- newer versions, unknown requirements, unknown fields ------------------------------------------------------------

Change = Callable[[dict[str, Any]], dict[str, Any]]


def rewrite(root: Root, key: str, change: Change) -> None:
    path = root / key
    path.write_bytes(json.dumps(change(json.loads(path.read_bytes())), ensure_ascii=False).encode())


def rewrite_slot(root: Root, seq: int, change: Change) -> None:
    """Change a slot, and `prev` of all later ones."""
    rewrite(root, f"log/{seq:012d}.json", change)
    for later in range(seq + 1, TAIL + 1):
        before = hashlib.sha256((root / f"log/{later - 1:012d}.json").read_bytes()).hexdigest()
        rewrite(root, f"log/{later:012d}.json", lambda slot, prev=before: {**slot, "prev": prev})


def rewrite_ledger(root: Root, change: Change, change_row: Change = lambda row: row) -> None:
    """Change header and rows of the newest snapshot's ledger object, and the slot that names it."""
    old = json.loads((root / f"log/{NEWEST:012d}.json").read_bytes())["body"]["ledger"]["key"]
    table = pa.ipc.open_file(pa.BufferReader((root / old).read_bytes())).read_all()
    header = change(json.loads(table.schema.metadata[b"prefix-recovery"]))
    schema = table.schema.with_metadata({b"prefix-recovery": json.dumps(header).encode()})
    rows = [change_row(row) for row in table.to_pylist()]
    data, _ = arrow_file.write(schema, [pa.RecordBatch.from_pylist(rows, schema=schema)])
    key = f"{old[:-22]}{hashlib.sha256(data).hexdigest()[:16]}.arrow"
    (root / key).write_bytes(data)
    ref = {"key": key, "nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite_slot(root, NEWEST, lambda slot: {**slot, "body": {**slot["body"], "ledger": ref}})


def rewrite_segment(root: Root, change: Change, change_row: Change = lambda row: row) -> None:
    """Change header and records of the newest segment that the newest ledger object describes."""
    ledger = json.loads((root / f"log/{NEWEST:012d}.json").read_bytes())["body"]["ledger"]["key"]
    schema = pa.ipc.open_file(pa.BufferReader((root / ledger).read_bytes())).schema
    described = json.loads(schema.metadata[b"prefix-recovery"])["segments"]
    info = max(described, key=lambda info: info["number"])
    table = pa.ipc.open_file(pa.BufferReader((root / info["key"]).read_bytes())).read_all()
    header = change(json.loads(table.schema.metadata[b"prefix-recovery"]))
    schema = table.schema.with_metadata({b"prefix-recovery": json.dumps(header).encode()})
    rows = [change_row(row) for row in table.to_pylist()]
    data, parts = arrow_file.write(schema, [pa.RecordBatch.from_pylist(rows, schema=schema)])
    crc = google_crc32c.value(data)
    key = f"{info['key'][:-14]}{crc:08x}.arrow"
    (root / key).write_bytes(data)
    (frame,) = parts.batches
    inner = google_crc32c.value(data[frame.offset : frame.offset + frame.length])
    fresh = {
        "number": info["number"],
        "key": key,
        "nbytes": len(data),
        "crc32c": crc,
        "batches": [[frame.offset, frame.length, inner, len(rows)]],
    }

    def renamed(row: dict[str, Any]) -> dict[str, Any]:
        who = row["identity"]
        moved = who is not None and who["segment"] == info["key"]
        return {**row, "identity": {**who, "segment": key}} if moved else row

    segments = [fresh if other is info else other for other in described]
    rewrite_ledger(root, lambda header: {**header, "segments": segments}, renamed)
    grown = len(data) - info["nbytes"]

    def recounted(slot: dict[str, Any]) -> dict[str, Any]:
        counts = slot["body"]["counts"]
        return {**slot, "body": {**slot["body"], "counts": {**counts, "nbytes": counts["nbytes"] + grown}}}

    rewrite_slot(root, NEWEST, recounted)


PLACES: dict[str, Callable[[Root, Change], None]] = {
    "format.json": lambda root, change: rewrite(root, "format.json", change),
    "newest slot": lambda root, change: rewrite_slot(root, TAIL, change),
    "snapshot slot": lambda root, change: rewrite_slot(root, NEWEST, change),
    "ledger header": rewrite_ledger,
    "segment header": rewrite_segment,
}


def refusals(root: Root) -> tuple[str, str]:
    """How the two readers refuse."""
    with pytest.raises(BadStore) as independently:
        read_store(root)
    with pytest.raises(FormatNotUnderstood) as ours:
        project(LocalStore(root))
    return str(independently.value), ours.value.message


@pytest.mark.parametrize("place", PLACES)
def test_unknown_requirement_is_refused_by_name(tmp_path: Path, place: str) -> None:
    root = copied(tmp_path)
    PLACES[place](root, lambda document: {**document, "requires": ["folded-tokens"]})
    for message in refusals(root):
        assert "requires" in message and "folded-tokens" in message


@pytest.mark.parametrize("place", ["format.json", "ledger header", "segment header"])
@pytest.mark.parametrize("field, value", [("version", 2), ("format", "prefix-recovery/other")])
def test_newer_version_is_refused_by_number(tmp_path: Path, place: str, field: str, value: object) -> None:
    root = copied(tmp_path)
    PLACES[place](root, lambda document: {**document, field: value})
    for message in refusals(root):
        assert str(value) in message and ("version 1" in message or field == "format")


@pytest.mark.parametrize("seq", [TAIL, NEWEST])
def test_unknown_kind_of_slot_is_refused(tmp_path: Path, seq: int) -> None:
    root = copied(tmp_path)
    rewrite_slot(root, seq, lambda slot: {**slot, "kind": "merge"})
    for message in refusals(root):
        assert "'merge'" in message


@pytest.mark.parametrize("place", PLACES)
def test_unknown_fields_are_ignored(tmp_path: Path, place: str) -> None:
    root = copied(tmp_path)
    PLACES[place](root, lambda document: {**document, "later": {"requires": 1}, "ä": [None]})
    for calls in (independent(read_store(root)["snapshot"]), project(LocalStore(root))):
        check(calls, EXPECTED["snapshots"][str(NEWEST)]["calls"])


def more(text: str | None) -> str | None:
    """A JSON text with a field that nobody knows, in each of its objects."""
    if text is None:
        return None
    value = json.loads(text)
    if isinstance(value, list):
        return json.dumps([{**item, "later": 1} for item in value])
    if "opened" in value:
        value["opened"]["later"] = 1
    return json.dumps({**value, "later": [1]})


def test_unknown_fields_inside_are_ignored(tmp_path: Path) -> None:
    """In a snapshot's body, an object reference, a segment's description, and the texts of rows and records."""
    root = copied(tmp_path)
    rewrite_segment(root, lambda header: header, lambda row: {**row, "body": more(row["body"])})

    def header(document: dict[str, Any]) -> dict[str, Any]:
        parent, segments = {**document["parent"], "later": 1}, [{**s, "later": 1} for s in document["segments"]]
        return {**document, "parent": parent, "segments": segments}

    rewrite_ledger(root, header, lambda row: {**row, **{n: more(row[n]) for n in ("ended", "history")}})

    def slot(document: dict[str, Any]) -> dict[str, Any]:
        body = document["body"]
        states = {name: {**ref, "later": 1} for name, ref in body["states"].items()}
        return {**document, "body": {**body, "states": states, "later": 1}}

    rewrite_slot(root, NEWEST, slot)
    wanted = EXPECTED["snapshots"][str(NEWEST)]["calls"]
    check(project(LocalStore(root)), wanted)
    found = independent(read_store(root)["snapshot"])
    for call in found:
        for event in call["history"]:
            event.pop("later", None)
    check(found, wanted)


def test_project_finds_the_same_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = copied(tmp_path)
    for key in keys_read(monkeypatch, lambda: read_store(root)):
        if key == "format.json" or f"log/{NEWEST:012d}.json" > key > "log/" or key == f"log/{TAIL:012d}.json":
            continue  # no sum covers it, or the newest snapshot does without it
        data = (root / key).read_bytes()
        (root / key).write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
        with pytest.raises(Damaged):
            project(LocalStore(root))
        (root / key).write_bytes(data)
    check(project(LocalStore(root)), EXPECTED["snapshots"][str(NEWEST)]["calls"])
