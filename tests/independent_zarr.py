"""The second reader's part for Zarr segments, written from docs/format.md (section 9.1) alone.

Owns: a zip file to the rows of section 9, every entry accounted for; no zarr is needed for it.
Does not know: the project, sums over whole objects, digests (independent_reader.py checks those).

Invariants:
1. Any breach is ValueError (or what Python makes of mangled bytes); the caller names the object.
2. Which entries there have to be is computed from the shapes and the ranges, and compared with those that are there.
"""

import io
import json
import zipfile

import google_crc32c
import numpy as np
import pyarrow as pa

RECORDS_LIMIT, VALUES_LIMIT, BATCH_LIMIT = 64, 65_536, 1 << 30
TYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
TYPES += ["float16", "float32", "float64"]
PER_RECORD = {"kind": "uint8", "attempt": "uint32", "start": "uint32", "number": "uint64", "has_logprobs": "bool"}
PER_RECORD |= {"call_id": "uint8 16", "digest": "uint8 16"}
PER_RECORD |= dict.fromkeys(["token_range", "mask_range", "lineage_range", "body_range"], "uint64 2")
VALUES = {"token_ids": ("int32", "token_range"), "logprobs": ("float32", "token_range")}
VALUES |= {"mask_starts": ("uint32", "mask_range"), "mask_values": ("bool", "mask_range")}
VALUES |= {"lineage": ("uint8", "lineage_range"), "body": ("uint8", "body_range")}


def check(true, message):
    if not true:
        raise ValueError(message)


class Segment:
    """The group of one segment. `arrays`: by name the type, the shape of an element, and length and chunk length."""

    def __init__(self, data):
        self.data = data
        self.zip = zipfile.ZipFile(io.BytesIO(data))
        self.names = self.zip.namelist()
        group = json.loads(self.zip.read("zarr.json"))
        check(group["zarr_format"] == 3 and group["node_type"] == "group", "is no group of Zarr 3")
        self.header = group["attributes"]
        self.types = [name for name in TYPES if f"wide_{name}/zarr.json" in self.names]
        per_record, self.values = dict(PER_RECORD), dict(VALUES)
        if self.types:
            self.values |= {"wide": ("uint8", "wide_range")}
            self.values |= {f"wide_{name}": (name, f"wide_{name}_range") for name in self.types}
            per_record |= dict.fromkeys([ranges for _, ranges in self.values.values() if "wide" in ranges], "uint64 2")
        self.per_record = sorted(per_record)
        self.arrays = {}
        for name, told in per_record.items():
            dtype, *element = told.split()
            self.arrays[name] = (dtype, [int(n) for n in element], *self.shape(name, dtype, element, RECORDS_LIMIT))
        for name, (dtype, _) in self.values.items():
            self.arrays[name] = (dtype, [], *self.shape(name, dtype, [], VALUES_LIMIT))
            check(self.arrays[name][2] % self.arrays[name][3] == 0, f"{name} is no whole number of chunks")
        shapes = {tuple(self.arrays[name][2:]) for name in self.per_record}
        check(len(shapes) == 1, "has arrays of different numbers of records")
        ((self.n_records, self.per_batch),) = shapes
        self.n_batches = -(-self.n_records // self.per_batch)

    def shape(self, name, dtype, element, limit):
        """Length and chunk length; everything else of the document has to be as the format says."""
        document = json.loads(self.zip.read(f"{name}/zarr.json"))
        length, chunk = document["shape"][0], document["chunk_grid"]["configuration"]["chunk_shape"][0]
        check(
            type(length) is int and type(chunk) is int and length >= 0 and 1 <= chunk <= limit, f"{name} has no shape"
        )
        element = [int(n) for n in element]
        size = np.dtype(dtype).itemsize
        fill = 255 if name == "kind" else False if dtype == "bool" else 0
        wanted = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [length, *element],
            "data_type": dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [chunk, *element]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": fill,
            "codecs": [
                {"name": "bytes"} if size == 1 else {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "zstd", "configuration": {"level": 1, "checksum": False}},
                {"name": "crc32c"},
            ],
        }
        check(document == wanted, f"{name} has another zarr.json")
        return length, chunk

    def chunk(self, name, index):
        """The elements of one chunk, the padding included."""
        dtype, element, _, length = self.arrays[name]
        stored = self.zip.read(self.key(name, index))
        frame = stored[:-4]
        check(google_crc32c.value(frame) == int.from_bytes(stored[-4:], "little"), f"{name} has another crc32c")
        nbytes = np.dtype(dtype).itemsize * length * int(np.prod(element, dtype=int))
        raw = pa.decompress(frame, decompressed_size=nbytes, codec="zstd", asbytes=True)
        check(len(raw) == nbytes and (dtype != "bool" or max(raw) <= 1), f"{name} has a chunk of a wrong size or value")
        return np.frombuffer(raw, np.dtype(dtype).newbyteorder("<")).reshape(length, *element)

    def key(self, name, index):
        return f"{name}/c/{index}" + "/0" * len(self.arrays[name][1])

    def batches(self):
        """By batch the columns of its records and the entries that it has to have."""
        at = dict.fromkeys(self.values, 0)
        for number in range(self.n_batches):
            n = min(self.per_batch, self.n_records - number * self.per_batch)
            columns = {name: self.chunk(name, number) for name in self.per_record}
            check((columns["kind"][n:] == 255).all() and (columns["kind"][:n] < 3).all(), "has other kinds of records")
            entries = []
            for name in sorted(self.arrays):
                if name in columns:
                    entries.append(self.key(name, number))
                    continue
                ranges = columns[self.values[name][1]][:n].astype(object)
                begin, end, length = ranges[0, 0], ranges[-1, 1], self.arrays[name][3]
                check(
                    (ranges[1:, 0] == ranges[:-1, 1]).all() and (ranges[:, 0] <= ranges[:, 1]).all(), "has odd ranges"
                )
                check(end - begin <= BATCH_LIMIT, f"has too many values of {name}")
                count = -(-(end - begin) // length)
                check(not count or begin == at[name] * length, f"{name} begins elsewhere than its ranges")
                chunks = range(at[name], at[name] + count)
                entries += [self.key(name, index) for index in chunks]
                flat = [self.chunk(name, index) for index in chunks] or [np.zeros(0, self.values[name][0])]
                columns[name] = (int(begin), np.concatenate(flat))
                at[name] += count
            yield n, columns, entries
        for name, count in at.items():
            check(count * self.arrays[name][3] == self.arrays[name][2], f"{name} has chunks that no range asks for")


def rows(data):
    """Header, types of the wide columns, [offset, length, number of records] of each batch, and all rows."""
    segment = Segment(data)
    wanted = ["zarr.json", *(f"{name}/zarr.json" for name in sorted(segment.arrays))]
    bounds, found = [], []
    for n, columns, entries in segment.batches():
        first, last = (segment.zip.getinfo(name) for name in (entries[0], entries[-1]))
        stop = last.header_offset + 30 + len(last.filename) + last.compress_size
        bounds.append([first.header_offset, stop - first.header_offset, n])
        wanted += entries
        found += [row(segment, columns, i) for i in range(n)]
    check(segment.names == wanted, "has other entries than its shapes and ranges make")
    for info in segment.zip.infolist():
        plain = (info.compress_type, info.flag_bits, info.extra, info.comment) == (0, 0, b"", b"")
        check(plain and info.date_time == (1980, 1, 1, 0, 0, 0), f"has the entry {info.filename}, which is special")
    check(segment.zip.comment == b"", "has a comment")
    return segment.header, segment.types, bounds, found


def row(segment, columns, i):
    """One record as section 9 has it; what is null there is None."""
    kind = int(columns["kind"][i])

    def values(name):
        begin, flat = columns[name]
        first, last = (int(at) - begin for at in columns[segment.values[name][1]][i])
        return flat[first:last]

    def text(name):
        return values(name).tobytes().decode()

    return {
        "kind": kind,
        **{name: int(columns[name][i]) for name in ("attempt", "start")},
        "call_id": columns["call_id"][i].tobytes(),
        "token_ids": values("token_ids"),
        "logprobs": values("logprobs") if columns["has_logprobs"][i] else None,
        "mask_starts": values("mask_starts"),
        "mask_values": values("mask_values"),
        "lineage": text("lineage") if kind == 1 else None,
        "number": int(columns["number"][i]) if kind == 1 else None,
        "digest": columns["digest"][i].tobytes() if kind < 2 else None,
        "body": text("body") if kind != 1 else None,
        "wide": (text("wide") or None) if segment.types else None,
        **{f"wide_{name}": values(f"wide_{name}") for name in segment.types},
    }
