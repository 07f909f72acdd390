"""`calls` and `cat`: which call is meant, and that everything stored comes out as it went in (L3).

Owns: floats through JSON, names of calls, text with a tokenizer.
Does not know: damage (test_inspect_verify.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshot_inspect import arrays, cli, documents, places
from storage_backends.codecs import CodecName
from storage_backends.memory import MemoryStore
from tests import inspect_stores as stores
from tests.inspect_stores import A0, A1, say

SPECIAL = [0x7FC00000, 0x7F800000, 0xFF800000, 0x80000000, 0x00000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x7F7FFFFF]
"""NaN, infinity, -infinity, -0.0, 0.0, the smallest numbers of both signs, the largest subnormal, the largest one."""


def read_back(values: list[float | str]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """As the documentation of the JSON form says: numbers, or one of three strings, rounded to float32."""
    return np.array([float(value) for value in values], dtype=np.float64).astype(np.float32)


def through_json(bits: list[int]) -> list[int]:
    stored = np.array(bits, dtype=np.uint32).view(np.float32)
    text = documents.dump({"logprobs": arrays.floats(stored.tolist())})
    return [int(value) for value in read_back(json.loads(text)["logprobs"]).view(np.uint32)]


@given(st.lists(st.integers(0, 0xFFFFFFFF), max_size=40))
@settings(max_examples=300)
def test_any_float32_comes_back_bit_for_bit(bits: list[int]) -> None:
    """L3. Of a NaN the payload is not kept: it is a NaN."""
    for before, after in zip(bits, through_json(bits), strict=True):
        is_nan = before & 0x7F800000 == 0x7F800000 and before & 0x007FFFFF
        assert after == before or (is_nan and after & 0x7FFFFFFF == 0x7FC00000)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    memory = MemoryStore()
    monkeypatch.setattr(places, "open_store", lambda address: memory)
    return memory


def test_logprobs_from_the_store_to_json(store: MemoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    """L3: NaN, -inf, -0.0, 1e-45, and a chunk without any."""
    values = np.array(SPECIAL, dtype=np.uint32).view(np.float32)
    job = stores.Job(store)
    call = job.open("p-1")
    say(call, *range(len(SPECIAL)), logprobs=values.tolist())
    job.flush()
    call.append([7, 7], None, A1)
    job.snapshot()
    job.close()
    code, out, _ = run(capsys, "cat", "s", "p-1", "--json")
    document = json.loads(out)
    assert code == 0 and document["logprobs"][:4] == ["NaN", "Infinity", "-Infinity", -0.0]
    assert read_back(document["logprobs"]).view(np.uint32).tolist()[: len(SPECIAL)] == SPECIAL
    assert document["logprobs"][len(SPECIAL) :] == ["NaN", "NaN"], "none was captured"
    code, out, _ = run(capsys, "cat", "s", "p-1")
    assert code == 0 and "  -Infinity  a/0" in out and "  -0.000000  a/0" in out


@pytest.mark.parametrize("codec", ["arrow", "zarr"])
def test_wide_columns_from_the_store_to_json(
    store: MemoryStore, capsys: pytest.CaptureFixture[str], codec: CodecName
) -> None:
    """L3: bit for bit through JSON as the documentation reads it; where a column was not captured there is nothing."""
    special = np.array(SPECIAL, dtype=np.uint32).view(np.float32)[1:]  # a NaN keeps no payload
    top = {"top_ids": np.arange(16, dtype=np.int32).reshape(8, 2), "top_logprobs": special.reshape(8, 1)}
    other = {
        "half": np.array([np.nan, -np.inf, 6e-8, -0.0], np.float16),
        "big": np.array([2**64 - 1, 0, 1, 2**53 + 1], np.uint64),
        "hit": np.array([[True], [False], [True], [True]]),
        "double": np.array([[0.1, 5e-324]] * 4),
    }
    job = stores.Job(store, codec=codec)
    call = job.open("p-1")
    call.append(range(8), [-1.0] * 8, A0, top)
    call.append([9, 9, 9], [-1.0] * 3, A0)
    job.flush()
    call.append([1, 2, 3, 4], [-1.0] * 4, A1, other)
    job.snapshot()
    job.close()
    code, out, _ = run(capsys, "cat", "s", "p-1", "--json")
    assert code == 0
    document = json.loads(out)
    found = {column["name"]: column for column in document["columns"]}
    assert len(found) == len(document["columns"]) == 6
    for columns, start in ((top, 0), (other, 11)):
        for name, values in columns.items():
            column = found[name]
            assert (column["start"], column["stop"]) == (start, start + len(values))
            assert column["width"] == (values.shape[1] if values.ndim == 2 else 0)
            via = "float64" if column["type"].startswith("float") else column["type"]
            read = np.array(column["values"], dtype=via).astype(column["type"])
            assert read.dtype == values.dtype and read.shape == values.shape and read.tobytes() == values.tobytes()
    code, out, _ = run(capsys, "cat", "s", "p-1")
    assert code == 0 and "column    top_ids, int32 x 2, tokens 0 to 8\n" in out
    assert "column    half, float16, tokens 11 to 15\n" in out


def test_everything_of_a_call(store: MemoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    stores.carried_on(store).close()
    _, out, _ = run(capsys, "cat", "s", "p-1", "--json")
    document = json.loads(out)
    assert document["token_ids"] == [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]
    assert document["prompt_token_ids"] == [1, 5, 6]
    assert document["version_spans"] == [[0, 5, "a", 0], [5, 11, "a", 1]]
    assert document["sampling"] == {"max_tokens": 64, "temperature": 0.0}
    assert (document["state"], document["finish_reason"], document["attempt"]) == ("open", None, 1)
    assert document["history"] == [{"kind": "resume", "at": 10, "snapshot": 7, "exactness": "bitwise"}]
    spans = [(chunk["start"], chunk["stop"]) for chunk in document["chunks"]]
    assert spans == [(0, 3), (3, 5), (5, 6), (6, 7), (7, 9), (9, 10), (10, 11)]
    assert document["text"] is None and document["prompt_text"] is None
    _, out, _ = run(capsys, "cat", "s", "p-2", "4", "--json")
    document = json.loads(out)
    assert (document["state"], document["finish_reason"], document["extra"]) == ("ended", "stop", {"row": 2})
    _, out, _ = run(capsys, "cat", "s", "p-1", "3", "--json")
    assert json.loads(out)["token_ids"] == [7, 8, 9], "an older snapshot has what it had"


def test_calls_in_the_order_of_their_names(store: MemoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    stores.carried_on(store).close()
    _, out, _ = run(capsys, "calls", "s", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["rollout"] for row in rows] == ["p-1", "p-2", "p-3", "p-10"]
    assert [row["n_tokens"] for row in rows] == [11, 4, 0, 2]
    assert rows[0]["n_segments"] == 6 and rows[3]["restart_only"] == "seed"
    for state, names in (("open", ["p-1", "p-3", "p-10"]), ("ended", ["p-2"])):
        _, out, _ = run(capsys, "calls", "s", "latest", "--state", state, "--json")
        assert [json.loads(line)["rollout"] for line in out.splitlines()] == names


def test_a_call_is_named_by_its_rollout_its_id_or_the_beginning_of_it(
    store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    job = stores.Job(store)
    first = job.open("p-1")
    say(first, 5)
    hexes = first.call_id.hex()
    say(job.open(hexes[:6]), 6)  # a rollout whose name is the beginning of another one's id: the name goes first
    say(job.open("p-2"), 7)
    say(job.open("p-2", turn=1), 8)
    job.snapshot()
    job.close()

    def tokens(name: str) -> list[int]:
        code, out, err = run(capsys, "cat", "s", name, "--json")
        assert code == 0, err
        return list(json.loads(out)["token_ids"])

    assert tokens("p-1") == tokens(hexes) == tokens(hexes[:8]) == [5]
    assert tokens(hexes[:6]) == [6]
    code, out, err = run(capsys, "cat", "s", "p-2")
    assert (code, out) == (2, "") and "'p-2' could be any of 2 calls" in err and "turn 1)" in err
    code, out, err = run(capsys, "cat", "s", "p-9")
    assert (code, out) == (2, "") and "there is no call 'p-9' in this snapshot (4 calls)" in err
    assert "list them: snapshot-inspect calls s" in err
    code, _, err = run(capsys, "cat", "s", "P-1")
    assert code == 2, "a name is exact"


def test_names_that_a_terminal_would_act_upon(store: MemoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    """N6: one row stays one line, nothing is taken for markup, and the JSON has the name as it is."""
    names = ["a\nb", "c\x1b[31md", "[bold]e[/bold]", "tab\there", "é", "e\u0301", "😀 +%2F#:", "\u202egnp", "x" * 255]
    job = stores.Job(store)
    for name in names:
        say(job.open(name), 5)
    job.snapshot()
    job.close()
    code, out, _ = run(capsys, "calls", "s")
    assert code == 0 and len(out.splitlines()) == 1 + len(names)
    assert "\x1b" not in out and "\u202e" not in out
    assert "a\\nb" in out and "c\\x1b[31md" in out and "[bold]e[/bold]" in out and "tab\\there" in out
    _, out, _ = run(capsys, "calls", "s", "--json")
    assert {json.loads(line)["rollout"] for line in out.splitlines()} == set(names)
    for name in names:
        assert run(capsys, "cat", "s", name)[0] == 0


# ---- text ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with one token that is special."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save(str(folder / "tokenizer.json"))
    return folder


def test_text_with_a_tokenizer(store: MemoryStore, capsys: pytest.CaptureFixture[str], tokenizer: Path) -> None:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode("dé\n<|end|>").ids
    job = stores.Job(store)
    say(job.open("p-1", ids[:1]), *ids)
    job.snapshot()
    job.close()
    _, out, _ = run(capsys, "cat", "s", "p-1", "--tokenizer", str(tokenizer), "--json")
    document = json.loads(out)
    assert document["text"] == "dé\n<|end|>" and document["prompt_text"] == "d"
    code, out, _ = run(capsys, "cat", "s", "p-1", "--tokenizer", str(tokenizer / "tokenizer.json"))
    assert code == 0 and "text         dé\\n<|end|>\n" in out and out.endswith("'<|end|>'\n")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: None, "there is no tokenizer at"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "is no tokenizer"),
    ],
)
def test_a_tokenizer_that_is_none(
    store: MemoryStore, capsys: pytest.CaptureFixture[str], tmp_path: Path, make: Any, says: str
) -> None:
    stores.one_snapshot(store).close()
    make(tmp_path)
    code, out, err = run(capsys, "cat", "s", "p-1", "--tokenizer", str(tmp_path))
    assert (code, out) == (2, "") and says in err and str(tmp_path) in err


def test_versions_stay_with_their_tokens(store: MemoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    job = stores.Job(store)
    call = job.open("p-1")
    say(call, 5, version=A0)
    say(call, 6, 7, version=A1)
    job.snapshot()
    job.close()
    _, out, _ = run(capsys, "cat", "s", "p-1")
    rows = [line.split() for line in out.splitlines()[-3:]]
    assert [(row[1], row[3]) for row in rows] == [("5", "a/0"), ("6", "a/1"), ("7", "a/1")]
