"""A second reader of stores on local disk, written from docs/format.md alone.

Owns: reading a store and checking every sum, digest and length on the way.
Does not know: the project. It imports nothing of it, so that the two can be held against each other; what is special to
Zarr segments is in independent_zarr.py.

Invariants:
1. Nothing is returned that did not check; BadStore names the first object that does not.
2. Every slot is read, not only those down to the newest snapshot. Nothing is passed over: a restore would take an older
   snapshot where this reader stops.
"""

import hashlib
import json
import re
import struct
from contextlib import contextmanager
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa

from tests import independent_zarr
from tests.independent_zarr import TYPES

OBJECTS = {
    "seg": re.compile(r"seg/e\d{6,}/[a-z0-9._-]+\.[0-9a-f]{8}/\d{8,}-[0-9a-f]{8}-([0-9a-f]{8})\.(?:arrow|zarr)"),
    "ledger": re.compile(r"ledger/e\d{6,}/[0-9a-f]{16}\.arrow"),
    "state": re.compile(r"state/e\d{6,}/[a-z0-9._-]+-[0-9a-f]{16}\.json"),
    "gc": re.compile(r"gc/e\d{6,}/[0-9a-f]{16}\.json"),
}
MARK_LIMIT, SLOT_LIMIT, JSON_LIMIT = 64 << 10, 4 << 20, 1 << 30
ARROW_LIMIT, TOKEN_LIMIT, DEPTH_LIMIT = 4 << 30, 1 << 20, 256
LEDGER = (
    "call_id: fixed_size_binary[16], attempt: uint32, state: uint8, n_tokens: uint32, kept: uint32, "
    "chunks: list<: struct<segment: uint32, index: uint32, start: uint32, n_tokens: uint32, "
    "digest: fixed_size_binary[16], lineage: string, number: uint64>>, "
    "identity: struct<rollout: string, turn: uint64, request_digest: fixed_size_binary[16], source_digest: string, "
    "restart_only: string, segment: string, index: uint32>, ended: string, history: string"
)
NUMBERS, LINEAGE = ", call: uint32", ", lineage: struct<model_call: uint32, parent: fixed_size_binary[16]>"
SEGMENT = (
    "kind: uint8, call_id: fixed_size_binary[16], attempt: uint32, start: uint32, token_ids: list<: int32>, "
    "logprobs: list<: float>, mask_starts: list<: uint32>, mask_values: list<: bool>, lineage: string, "
    "number: uint64, digest: fixed_size_binary[16], body: string"
)
FEATURES = {"call-numbers": NUMBERS, "call-lineage": LINEAGE}
ARROW_NAMES = {"float16": "halffloat", "float32": "float", "float64": "double"}
COLUMNS_LIMIT, WIDTH_LIMIT, WIDE_LIMIT = 256, 4096, 1 << 28


class BadStore(Exception):
    """The message begins with the object that does not check."""


def need(true, name, message):
    if not true:
        raise BadStore(f"{name}: {message}")


@contextmanager
def reading(name):
    """What Python or Arrow makes of a mangled object is BadStore, naming it."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError, RecursionError) as error:
        raise BadStore(f"{name}: {type(error).__name__}: {error}") from error
    except pa.ArrowException as error:
        raise BadStore(f"{name}: {error}") from error


# ---- bytes, JSON, Arrow ----------------------------------------------------------------------------------------------


def fetch(root, key, limit):
    path = Path(root, key)
    need(path.is_file(), key, "is missing")
    need(path.stat().st_size <= limit, key, f"has more than {limit} bytes")
    return path.read_bytes()


def fetch_referenced(root, ref, name, kind, limit):
    with reading(name):
        key, nbytes, sha256 = ref["key"], ref["nbytes"], ref["sha256"]
        need(OBJECTS[kind].fullmatch(key), name, f"references {key!r:.99} as a {kind} object")
    data = fetch(root, key, limit)
    need(len(data) == nbytes, key, f"has {len(data)} bytes, not {nbytes}")
    need(hashlib.sha256(data).hexdigest() == sha256, key, "has another sha256")
    return key, data


def parse(text, name, kind=dict):
    with reading(name):
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(text, parse_constant=lambda constant: need(False, name, f"holds {constant}"))
    need(isinstance(value, kind), name, f"is no JSON {kind.__name__}")
    return value


def check_version(value, name, mark, known=()):
    need(value.get("format") == mark, name, f"has format {value.get('format')!r:.60}; this reader knows {mark!r}")
    version = value.get("version")
    need(type(version) is int and version == 1, name, f"has version {version!r:.60}; this reader knows version 1")
    check_requires(value, name, known)


def check_requires(value, name, known=()):
    requires = value.get("requires", [])
    need(isinstance(requires, list), name, "has requirements that are no list")
    for needed in requires:
        need(needed in known, name, f"requires {needed!r:.60}, which is not known here")


def read_arrow(data, name, kind, columns, known=()):
    """Header, types of wide columns, batches."""
    with reading(name):
        reader = pa.ipc.open_file(pa.BufferReader(data))
        header = parse(reader.schema.metadata[b"prefix-recovery"], name)
        check_version(header, name, f"prefix-recovery/{kind}", known)
        found = ", ".join(f"{field.name}: {field.type}" for field in reader.schema)
        types = [type_ for type_ in TYPES if f"wide_{type_}" in reader.schema.names] if kind == "segment" else []
        if kind == "ledger":
            columns += "".join(more for feature, more in FEATURES.items() if feature in header.get("requires", []))
        wide = "".join(f", wide_{type_}: list<: {ARROW_NAMES.get(type_, type_)}>" for type_ in types)
        columns += f", wide: string{wide}" if types else ""
        need(re.sub("(?<=list<)[^:]*|( not null)", "", found) == columns, name, "has other columns")
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        for batch in batches:
            batch.validate(full=True)
    return header, types, batches


# ---- digests ---------------------------------------------------------------------------------------------------------


def canonical(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def without_draws(extra):
    return {name: value for name, value in extra.items() if name != "draws"}


def u64(number):
    return struct.pack("<Q", number)


def lp(text):
    return u64(len(text.encode())) + text.encode()


def digest(of, *parts):
    return hashlib.sha256(b"prefix-recovery " + of + b" 1\0" + b"".join(parts)).digest()[:16]


# ---- the log, a ledger, a segment ------------------------------------------------------------------------------------


def read_slots(root):
    """Every slot, oldest first, each believed because the next one names its sha256 (the newest: as it is)."""
    names = [path.name for path in Path(root, "log").glob("*")]
    tail = max((int(name[:-5]) for name in names if re.fullmatch(r"\d{12,}\.json", name)), default=0)
    slots, prev, claimed = [], "0" * 64, 0
    for seq in range(1, tail + 1):
        name = f"log/{seq:012d}.json"
        data = fetch(root, name, SLOT_LIMIT)
        slot = parse(data, name)
        check_requires(slot, name)
        with reading(name):
            need(type(slot["seq"]) is int and slot["seq"] == seq, name, f"says that it is slot {slot['seq']!r:.60}")
            need(slot["prev"] == prev, name, f"does not follow the slot {seq - 1} that is here")
            need(re.fullmatch("[0-9a-f]{32}", slot["nonce"]), name, "has no nonce")
            kind, epoch = slot["kind"], slot["epoch"]
            need(kind in ("epoch", "snapshot", "gc", "pin", "forget"), name, f"is of the unknown kind {kind!r:.60}")
            fits = epoch > claimed if kind == "epoch" else epoch == claimed > 0
            need(type(epoch) is int and fits, name, f"has epoch {epoch!r:.60} after {claimed}")
            need(isinstance(slot["body"], dict), name, "has no body")
        claimed, prev = epoch, hashlib.sha256(data).hexdigest()
        slots.append(slot)
    return slots


def read_ledger(root, ref, name):
    """Rows by call, all objects applied; descriptions of segments by key; number of objects but one; `flushed`."""
    chain, depth = [], 0
    while len(chain) <= depth:
        need(ref is not None, name, f"has no parent, and {depth} objects before the newest are needed")
        name, data = fetch_referenced(root, ref, name, "ledger", ARROW_LIMIT)
        header, _, batches = read_arrow(data, name, "ledger", LEDGER, tuple(FEATURES))
        chain.append((name, header, numbered(name, header, batches)))
        ref = chain[-1][1].get("parent")
        if len(chain) == 1:
            with reading(name):
                depth = chain[0][1]["depth"]
                need(type(depth) is int and 0 <= depth <= DEPTH_LIMIT, name, f"has depth {depth!r:.60}")
    calls, segments, numbers, unknown = {}, {}, {}, set()
    meant = name_calls(chain)
    for name, header, _ in chain:
        with reading(name):
            infos = {info["key"]: info for info in header["segments"]}
            told = {info["number"]: info["key"] for info in header["segments"]}
            need(len(infos) == len(told) == len(header["segments"]), name, "describes a segment twice")
            need(all(0 <= number < header["numbered"] for number in told), name, "has a number that is not given out")
            need(all(numbers.get(n, key) == key for n, key in told.items()), name, "numbers another segment")
            for key, info in infos.items():
                other = segments.get(key, info)
                same = all(other.get(field) == info.get(field) for field in ("nbytes", "crc32c", "batches", "wide"))
                need(same, name, f"describes {key} in another way")
            numbers |= told
            segments |= infos
    for name, header, rows in reversed(chain):
        with reading(name):
            for row in rows:
                need(row["call_id"] != bytes(16) or row["call"] in meant, name, f"means no call by {row.get('call')}")
                row["call_id"] = meant[row["call"]] if row["call_id"] == bytes(16) else row["call_id"]
            need(len({row["call_id"] for row in rows}) == len(rows), name, "has two rows for one call")
            need(header["parent"] is not None or not any(row["kept"] for row in rows), name, "keeps chunks of nothing")
            for row in rows:
                merge(row, calls, unknown, f"{name}: call {row['call_id'].hex()}")
    need(not unknown, name, f"and those before it say {len(unknown)} calls in part only")
    with reading(name):
        for row in calls.values():
            for chunk in row["chunks"]:
                chunk["key"] = numbers[chunk["segment"]]
    return calls, segments, depth, chain[0][1]["flushed"]


def numbered(name, header, batches):
    """Rows as an object without numbers has them, but for `call`, and the ids that are left to it."""
    with reading(name):
        rows = [row for batch in batches for row in batch.to_pylist()]
        if "call-numbers" not in header.get("requires", []):
            return rows
        at = 0
        for batch in batches:
            number = 0
            for row in rows[at : at + batch.num_rows]:
                row["call"] = number = (row["call"] + number) % (1 << 32)
            at += batch.num_rows
        given = [row["call"] for row in rows if row["call"]]
        need(len(set(given)) == len(given), name, "has a number in two rows")
        need(max(given, default=0) < header["calls_numbered"], name, "has a call's number that is not given out")
        for row in rows:
            is_whole = row["state"] == 2 or (row["kept"] == 0 and row["identity"] and row["history"])
            need(row["call_id"] != bytes(16) or (row["call"] and not is_whole), name, "has a row of no call")
            for chunk in row["chunks"]:
                need(chunk["lineage"] == "", name, "has a lineage beside a version's place")
                chunk["lineage"], chunk["number"] = header["versions"][chunk["number"]]
        return rows


def name_calls(chain):
    """Which call each number means, in all objects of a ledger."""
    meant = {}
    for name, _, rows in chain:
        for row in rows:
            if row.get("call") and row["call_id"] != bytes(16):
                same = meant.setdefault(row["call"], row["call_id"]) == row["call_id"]
                need(same, name, f"means two calls by {row['call']}")
    return meant


def merge(row, calls, unknown, name):
    """Apply one row. `unknown`: calls of which only parts were said."""
    call_id, whole = row["call_id"], row["kept"] == 0 and row["identity"] is not None and row["history"] is not None
    if call_id not in calls and not whole and row["state"] != 2:
        unknown.add(call_id)
        return
    unknown.discard(call_id)
    old = calls.pop(call_id, {"chunks": []})
    need(row["kept"] <= len(old["chunks"]), name, f"keeps {row['kept']} of {len(old['chunks'])} chunks")
    need(row["state"] in (0, 1, 2), name, f"has state {row['state']}")
    need((row["ended"] is not None) == (row["state"] == 1), name, "has an end and a state that do not fit")
    row["chunks"] = old["chunks"][: row["kept"]] + row["chunks"]
    stops = [0, *(chunk["start"] + chunk["n_tokens"] for chunk in row["chunks"])]
    need(stops[:-1] == [chunk["start"] for chunk in row["chunks"]], name, "has chunks that are not contiguous")
    need(stops[-1] == row["n_tokens"], name, f"has {stops[-1]} tokens, not {row['n_tokens']}")
    if "lineage" in row:
        need((row["lineage"] is None) == (row["identity"] is None), name, "has a lineage without an identity")
    elif row["identity"] is not None:
        row["lineage"] = {"model_call": 0, "parent": bytes(16)}
    row.setdefault("lineage", None)
    for field in ("identity", "history", "lineage"):
        row[field] = old.get(field) if row[field] is None else row[field]
    if row["state"] != 2:
        calls[call_id] = row
    else:
        need(not row["chunks"], name, "is dropped and has chunks")


def read_segment(root, info):
    """Its records, by running number: rows as section 9 has them, lists as arrays."""
    key, nbytes, whole, told = info["key"], info["nbytes"], info["crc32c"], info["batches"]
    match = OBJECTS["seg"].fullmatch(key)
    need(match, key, "is not a segment's key")
    data = fetch(root, key, ARROW_LIMIT)
    need(len(data) == nbytes, key, f"has {len(data)} bytes, not {nbytes}")
    need(google_crc32c.value(data) == whole == int(match[1], 16), key, "has another crc32c")
    with reading(key):
        for at, length, crc, n in told:
            need(google_crc32c.value(data[at : at + length]) == crc, key, f"has another crc32c in the batch at {at}")
            need(0 < n <= 64, key, "has a batch of a wrong size")
        if key.endswith(".zarr"):
            header, types, bounds, rows = independent_zarr.rows(data)
            check_version(header, key, "prefix-recovery/segment", ["wide-columns"])
            need(bounds == [[at, length, n] for at, length, _, n in told], key, "is divided into other batches")
        else:
            header, types, batches = read_arrow(data, key, "segment", SEGMENT, ["wide-columns"])
            need([batch.num_rows for batch in batches] == [n for *_, n in told], key, "is divided into other batches")
            rows = [row_of(batch, i) for batch in batches for i in range(batch.num_rows)]
        need(bool(header.get("requires")) == bool(types), key, "does not require what it has")
        need(info.get("wide", []) == types, key, "has other wide columns than its description")
    return rows


def row_of(batch, i):
    """A row of a record batch, lists as arrays."""
    cells = {name: batch[name][i] for name in batch.schema.names}
    is_list = {name: pa.types.is_list(cell.type) and cell.is_valid for name, cell in cells.items()}
    return {name: c.values.to_numpy(False) if is_list[name] else c.as_py() for name, c in cells.items()}


# ---- one call --------------------------------------------------------------------------------------------------------


def read_call(row, record):
    """A ledger's row with its tokens. `record(key, index)` gives a record of a segment."""
    call = f"call {row['call_id'].hex()}"
    identity, history = row["identity"], parse(row["history"], call, list)
    need(None not in identity.values() and identity["turn"] < 1 << 63, call, "has an identity with a hole")
    ended = {"finish_reason": None, "stop_reason": None} if row["ended"] is None else parse(row["ended"], call)

    def take(key, index, kind):
        got, name = record(key, index), f"{key}: record {index}"
        need(got["kind"] == kind, name, f"is not of kind {kind}")
        need(got["call_id"] == row["call_id"], name, f"is not of {call}")
        need(got["attempt"] <= row["attempt"], name, "is of a later attempt")
        return name, got

    name, got = take(identity["segment"], identity["index"], 0)
    body, prompt = parse(got["body"], name), got["token_ids"]
    parts = [u64(len(prompt)), prompt.astype("<i4").tobytes()]
    asked = digest(b"request", *parts, lp(canonical(body["sampling"])), lp(canonical(without_draws(body["extra"]))))
    need(asked == got["digest"], name, "has another request digest")
    need(asked == identity["request_digest"], name, "is not the request that the ledger names")
    for field in ("rollout", "turn", "restart_only", "source_digest"):
        need(body[field] == identity[field], name, f"has another {field} than the ledger")
    said = body["extra"].get("lineage", {"call": 0, "parent": None})
    lineage = {"model_call": said["call"], "parent": bytes.fromhex(said["parent"] or "00" * 16)}
    need(lineage == row["lineage"], name, "has another lineage than the ledger")
    own = digest(b"call", lp(body["rollout"]), u64(body["turn"]), asked)
    need(own == row["call_id"], name, f"makes call {own.hex()}")
    tokens, logprobs, has, masks, versions, columns = [], [], [], [], [], {}
    for chunk in row["chunks"]:
        name, got = take(chunk["key"], chunk["index"], 1)
        ids, bits, found = read_chunk(got, row["call_id"], name)
        lps, wide = found.pop("logprobs"), found.pop("columns")
        need(found == {field: chunk[field] for field in found}, name, "is not the chunk that the ledger lists")
        tokens.append(ids)
        logprobs.append(np.zeros(len(ids), "f4") if lps is None else lps)
        has.append(np.full(len(ids), lps is not None))
        masks.append(bits)
        for column, values in wide.items():
            join(columns.setdefault(column, []), chunk["start"], values)
        version = [chunk["lineage"], chunk["number"]]
        if not versions or versions[-1][2:] != version:
            versions.append([chunk["start"], 0, *version])
        versions[-1][1] = chunk["start"] + len(ids)
    return {
        **{field: body[field] for field in ("rollout", "turn", "sampling", "extra", "restart_only", "source_digest")},
        **{field: ended[field] for field in ("finish_reason", "stop_reason")},
        "call_id": row["call_id"].hex(),
        "attempt": row["attempt"],
        "state": ("open", "ended")[row["state"]],
        "history": history,
        "prompt_token_ids": prompt,
        "token_ids": np.concatenate([np.zeros(0, "i4"), *tokens]),
        "logprobs": np.concatenate([np.zeros(0, "f4"), *logprobs]),
        "has_logprobs": np.concatenate([np.zeros(0, bool), *has]),
        "mask": np.concatenate([np.zeros(0, bool), *masks]),
        "versions": versions,
        "columns": {name: columns[name] for name in sorted(columns)},
        "n_chunks": len(row["chunks"]),
    }


def join(runs, start, values):
    """Add the values of the tokens from `start` on to the stretches [start, values] of a column."""
    if runs:
        begin, last = runs[-1]
        if begin + len(last) == start and last.dtype == values.dtype and last.shape[1:] == values.shape[1:]:
            runs[-1][1] = np.concatenate([last, values])
            return
    runs.append([start, values])


def read_chunk(got, call_id, name):
    """Token ids, mask, and what the ledger lists of it with logprobs (None: there are none) and wide columns."""
    start, lineage, number, lps = (got[field] for field in ("start", "lineage", "number", "logprobs"))
    ids, starts, values = (got[field] for field in ("token_ids", "mask_starts", "mask_values"))
    n = len(ids)
    need(1 <= n <= TOKEN_LIMIT and (lps is None or len(lps) == n), name, f"has {n} tokens and not as many logprobs")
    lengths = np.diff(np.append(starts.astype("i8"), n))
    need(starts[0] == 0 and (lengths > 0).all(), name, "has a mask whose runs do not follow each other")
    need((values[1:] != values[:-1]).all(), name, "has a mask whose runs do not alternate")
    mask = np.repeat(values, lengths)
    parts = [call_id, u64(start), lp(lineage), u64(number), u64(n), ids.astype("<i4").tobytes()]
    parts += [b"\0"] if lps is None else [b"\1", lps.astype("<f4").tobytes()]
    columns = read_wide(got, n, name)
    wide = [u64(len(columns))] if columns else []
    for column, array in columns.items():
        wide += [lp(column), lp(array.dtype.name), u64(array.shape[1] if array.ndim == 2 else 0)]
        wide.append(array.astype(array.dtype.newbyteorder("<")).tobytes())
    own = digest(b"chunk", *parts, mask.astype("u1").tobytes(), *wide)
    need(own == got["digest"], name, "has another chunk digest")
    found = {"start": start, "n_tokens": n, "digest": own, "lineage": lineage, "number": number}
    return ids, mask, {**found, "logprobs": lps, "columns": columns}


def read_wide(got, n, name):
    """The wide columns of a chunk of n tokens, by name."""
    told = [] if got.get("wide") is None else parse(got["wide"], name, list)
    need(told or got.get("wide") is None, name, "lists no wide column")
    names = [column for column, _, _ in told]
    need(names == sorted(set(names)) and len(names) <= COLUMNS_LIMIT, name, "has too many wide columns, or not by name")
    taken, columns, nbytes = dict.fromkeys(TYPES, 0), {}, 0
    for column, type_, width in told:
        need(re.fullmatch("[A-Za-z0-9._-]{1,64}", column), name, "has a wide column of no name")
        need(type_ in TYPES and type(width) is int and 0 <= width <= WIDTH_LIMIT, name, f"has an odd column {column}")
        stop = taken[type_] + n * max(width, 1)
        values = got[f"wide_{type_}"][taken[type_] : stop]
        columns[column] = values.reshape(n, width) if width else values.reshape(n)
        taken[type_] = stop
        nbytes += values.nbytes
    need(nbytes <= WIDE_LIMIT, name, "has too large wide columns")
    left = [type_ for type_ in TYPES if len(got.get(f"wide_{type_}", ())) != taken[type_]]
    need(not left, name, f"has values of {left} that no column is of")
    return columns


# ---- a store ---------------------------------------------------------------------------------------------------------


def read_snapshot(root, slot):
    name, body = f"log/{slot['seq']:012d}.json", slot["body"]
    with reading(name):
        refs = {who: fetch_referenced(root, ref, name, "state", JSON_LIMIT) for who, ref in body["states"].items()}
        states = {who: parse(data, key) for who, (key, data) in refs.items()}
        if "job" in states:
            own = hashlib.sha256(canonical(states["job"]["must"]).encode()).hexdigest()[:32]
            need(own == body["fingerprint"], name, f"states another fingerprint than {own}, that of its job")
        rows, segments, depth, flushed = read_ledger(root, body["ledger"], name)
        need(depth == body["depth"], name, f"has {depth} ledger objects before the newest, not {body['depth']}")
    records = {}

    def record(key, index):
        if key not in records:
            records[key] = read_segment(root, segments[key])
        return records[key][index]

    calls = []
    for row in rows.values():
        with reading(f"call {row['call_id'].hex()}"):
            calls.append(read_call(row, record))
    counts = {"calls": len(calls), "tokens": sum(len(call["token_ids"]) for call in calls)}
    counts |= {state: sum(call["state"] == state for call in calls) for state in ("open", "ended")}
    counts |= {"chunks": sum(call["n_chunks"] for call in calls), "segments": len(records)}
    counts["nbytes"] = sum(segments[key]["nbytes"] for key in records)
    need(body.get("counts") == counts, name, f"counts {body.get('counts')}, not {counts}")
    calls.sort(key=lambda call: (call["rollout"], call["turn"], call["call_id"]))
    return {**body, "id": slot["seq"], "states": states, "flushed": flushed, "calls": calls}


def read_store(root, snapshot=None):
    """The format mark, all slots, and all calls of the newest snapshot (or of snapshot `snapshot`)."""
    mark = parse(fetch(root, "format.json", MARK_LIMIT), "format.json")
    check_version(mark, "format.json", "prefix-recovery")
    slots = read_slots(root)
    ids = [slot["seq"] for slot in slots if slot["kind"] == "snapshot"]
    forgotten = {seq for slot in slots if slot["kind"] == "forget" for seq in slot["body"]["snapshots"]}
    left = [seq for seq in ids if seq not in forgotten]
    need(left if snapshot is None else snapshot in left, "log/", f"holds the snapshots {left}, not {snapshot}")
    read = read_snapshot(root, slots[(snapshot or left[-1]) - 1])
    return {"format": mark, "tail": len(slots), "slots": slots, "snapshots": ids, "snapshot": read}


def check_everything(root):
    """Read every snapshot. Answers (ids that were read, ids of which garbage collection has taken something)."""
    store, listed, lost = read_store(root), {}, 0
    for slot in store["slots"]:
        if slot["kind"] == "gc":
            name, ref = f"log/{slot['seq']:012d}.json", slot["body"].get("victims")
            try:
                victims = parse(fetch_referenced(root, ref, name, "gc", JSON_LIMIT)[1], ref["key"], list)
                listed |= dict.fromkeys(victims, slot["seq"])
            except BadStore as error:
                if not str(error).endswith(".json: is missing"):
                    raise
                lost = slot["seq"]  # a list is garbage itself some time later; what it named is not known any more
    found = [], []
    for slot in store["slots"]:
        if slot["kind"] == "snapshot":
            try:
                read_snapshot(root, slot)
                found[0].append(slot["seq"])
            except BadStore as error:
                key, _, what = str(error).partition(": ")
                if what != "is missing" or max(listed.get(key, 0), lost) < slot["seq"]:
                    raise
                found[1].append(slot["seq"])
    return found
