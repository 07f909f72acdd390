"""recovery.admission.rows: the same rows from a file and from a list, and rows that are none."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery.admission.rows import IterableRows, JsonlRows
from recovery.errors import InputError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


@given(values=st.lists(JSON, max_size=5), blank=st.booleans())
@settings(max_examples=60)
def test_a_file_and_a_list_give_the_same_rows_and_digests(values: list[Any], blank: bool) -> None:
    rows = [{"id": f"é{i}", "value": value} for i, value in enumerate(values)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        gap = "\n\n" if blank else "\n"
        path.write_text(gap.join(json.dumps(row) for row in rows), encoding="utf-8")
        file, plain = JsonlRows(path), IterableRows(iter(rows))
        assert file.size == len(rows)
        for index in (*range(len(rows))[::-1], *range(len(rows) + 1)):
            assert file.row(index) == plain.row(index) == (rows[index] if index < len(rows) else None)
        digests = [file.digest(n) for n in range(len(rows) + 1)]
        assert digests == [plain.digest(n) for n in range(len(rows) + 1)] and len(set(digests)) == len(digests)
        file.close()


@pytest.mark.parametrize(
    "line, said",
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is no JSON object"),
        ('{"prompt": "x"}', "line 2 has no id"),
        ('{"id": ""}', "line 2 has no id"),
        ('{"id": true}', "line 2 has no id"),
        ('{"id": "a"}', "line 2: the id 'a' came before"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=said):
        JsonlRows(path)


def test_a_file_that_is_not_there_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        JsonlRows(tmp_path / "none.jsonl")


@pytest.mark.parametrize("row", [3, {"id": 1, "x": object()}, {"id": 1, "x": float("nan")}, {"no": 1}])
def test_an_item_that_is_no_row_is_named_and_not_counted(row: Any) -> None:
    rows = IterableRows([{"id": 0}, row])
    assert rows.row(0) == {"id": 0}
    with pytest.raises(InputError, match="row 1"):
        rows.row(1)
    assert rows.digest(1) == IterableRows([{"id": 0}]).digest(1)


def test_post_processing_is_part_of_the_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1, "q": "2+2"}\n', encoding="utf-8")

    def ask(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "prompt": f"Q: {row['q']}"}

    assert JsonlRows(path, ask).row(0) == {"id": 1, "q": "2+2", "prompt": "Q: 2+2"}
    assert JsonlRows(path, ask).digest(1) != JsonlRows(path).digest(1)


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"id": f"p{i}", "prompt": "x"}) for i in range(4)]
    path.write_text("\n".join(lines), encoding="utf-8")
    file = JsonlRows(path)
    for text in (
        [*lines[:2], lines[2].replace("x", "y"), lines[3]],
        [lines[0].replace("x", "xyz"), *lines[1:]],
        [],
        lines[::-1],
    ):
        with path.open("r+", encoding="utf-8") as opened:  # in place: the file that is open sees it
            opened.truncate()
            opened.write("\n".join(text))
        with pytest.raises(InputError, match=r"rows\.jsonl, line 3 is not what it was"):
            file.row(2)
    path.write_text("\n".join(lines), encoding="utf-8")
    assert file.row(2) == {"id": "p2", "prompt": "x"}
    file.close()


def test_a_row_that_could_not_be_taken_is_not_skipped() -> None:
    """A6, A7: asked again it is the same row, mended or not; and an iterable that failed has not ended."""
    broken = True

    def process(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == 1 and broken:
            raise KeyError("prompt")
        return row

    rows = IterableRows(({"id": i} for i in range(3)), process)
    for _ in range(2):
        with pytest.raises(InputError, match="KeyError"):
            rows.row(1)
    broken = False
    assert [rows.row(i) for i in range(4)] == [{"id": 0}, {"id": 1}, {"id": 2}, None]

    def failing() -> Any:
        yield {"id": 0}
        raise OSError("the network is away")

    rows = IterableRows(failing())
    for _ in range(2):
        with pytest.raises(OSError, match="away"):
            rows.row(1)
    assert rows.size is None and rows.row(0) == {"id": 0}


@pytest.mark.parametrize("lines", [True, False])
@pytest.mark.parametrize(
    "answer, said",
    [(KeyError("prompt"), "raised KeyError"), (StopIteration(), "raised StopIteration"), (None, "NoneType")],
)
def test_what_a_function_over_rows_raises_or_does_not_return_names_the_row(
    tmp_path: Path, lines: bool, answer: Any, said: str
) -> None:
    """A StopIteration is not the end of the data."""

    def process(row: dict[str, Any]) -> Any:
        if row["id"] == 1:
            if isinstance(answer, Exception):
                raise answer
            return answer
        return row

    rows = [{"id": 0}, {"id": 1}, {"id": 2}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match=f"{'line 2' if lines else 'row 1|item 1|1'}.*{said}"):
        if lines:
            JsonlRows(path, process)
        else:
            found = IterableRows(rows, process)
            assert found.row(0) == {"id": 0}
            found.row(1)


def test_a_line_too_deep_and_a_pipe_are_input_errors(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1}\n{"id": 2, "x": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(InputError, match="line 2"):
        JsonlRows(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="no regular file"):
        JsonlRows(tmp_path / "pipe")


@pytest.mark.parametrize("other", [["x", "b", "c"], ["b", "a", "c"], ["b", "c"]])
def test_a_digest_is_of_every_row_before_the_cursor_and_of_their_order(other: list[str]) -> None:
    def digest(names: list[str]) -> str:
        return IterableRows([{"id": name} for name in names]).digest(len(names))

    assert digest(["a", "b", "c"]) != digest(other)
