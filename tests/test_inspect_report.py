"""`snapshot-inspect report`: estimated times, the figures, and the page in a real browser.

Owns: pages of small, large and hostile jobs.
Does not know: how Chromium is found (browser.py).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery.layout import SegmentPosition, segment_stem
from recovery.ledger import Entry
from recovery.model import CallId, ChunkRef, Identity, PolicyVersion, RecordRef, Restarted, Resumed
from recovery.ports import ObjectStore
from snapshot_inspect import page
from snapshot_inspect.timeline import NEW, REGENERATED, REUSED, FlushTimes, Span, life_of
from tests import browser
from tests import inspect_stores as stores
from tests.inspect_stores import made, say
from tests.test_inspect_screens import VALIDATORS, opened_as, run_once

HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.documentElement.dataset.owned='yes'\">",
    "\u2028'\"`${1}&lt;b&gt;<!--",
)


# ---- times -----------------------------------------------------------------------------------------------------------


def _key(epoch: int, flush: int) -> str:
    return f"{segment_stem(epoch, 'w0.0000aaaa', flush, '00000000')}-00000000.arrow"


def _at(epoch: int, flush: int) -> SegmentPosition:
    return SegmentPosition(epoch, "w0.0000aaaa", flush)


def test_times_between_two_snapshots_pass_evenly() -> None:
    accounted = [(1, 20.0, {"w0.0000aaaa": 4}), (1, 30.0, {"w0.0000aaaa": 9})]
    times = FlushTimes({1: Span(10.0, 30.0, 100.0)}, accounted, [_key(1, 12)])
    assert [times.at(_at(1, n)) for n in (1, 2, 4, 5, 9)] == [12.5, 15.0, 20.0, 22.0, 30.0]
    assert times.at(_at(1, 5), before=True) == 20.0
    assert times.at(_at(1, 18)) == 50.0, "after the last snapshot as evenly as before it"
    assert times.at(_at(1, 1000)) == 100.0, "but not beyond the next epoch's claim"
    assert times.at(_at(9, 3)) == 0.0


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0, 500)), max_size=8),
    st.lists(st.integers(1, 60), min_size=1, max_size=12),
    st.floats(0, 100),
    st.floats(0, 900),
)
def test_times_never_run_backwards(points: list[Any], flushes: list[int], begin: float, lasts: float) -> None:
    """Whatever the writers' clocks said."""
    accounted = [(1, at, {"w0.0000aaaa": flush}) for flush, at in points]
    span = Span(begin, begin + lasts / 2, begin + lasts)
    times = FlushTimes({1: span}, accounted, [_key(1, flush) for flush in flushes])
    at = [times.at(_at(1, flush)) for flush in sorted(flushes)]
    assert at == sorted(at) and all(span.begin <= one <= span.limit for one in at)
    assert all(times.at(_at(1, flush), before=True) <= times.at(_at(1, flush)) for flush in flushes)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2)), max_size=10), st.data())
def test_every_token_is_in_one_run(chunks: list[Any], data: st.DataObject) -> None:
    """Counted token by token: below the last resume it survived, below a restart it was generated again."""
    refs, at = [], 0
    for n_tokens, number in chunks:
        version = PolicyVersion("a", number)
        refs.append(ChunkRef(RecordRef(_key(1, len(refs) + 1), 0), at, n_tokens, b"", version))
        at += n_tokens
    bounds = st.integers(0, at + 5)
    events = st.one_of(
        st.builds(Resumed, bounds, st.just(2), st.just("")), st.builds(Restarted, bounds, st.just(2), st.just(""))
    )
    history = data.draw(st.lists(events, max_size=3))
    identity = Identity(
        rollout="p", turn=0, request_digest=b"", source_digest="", restart_only="", opened=RecordRef(_key(1, 1), 0)
    )
    entry = Entry(CallId(b"x" * 16), 0, identity, chunks=refs, n_tokens=at, history=tuple(history))
    life = life_of(entry, FlushTimes({1: Span(0.0, 9.0)}, [], [_key(1, len(refs) or 1)]))
    kinds = np.full(at, NEW)
    kinds[: max((e.at for e in history if isinstance(e, Restarted)), default=0)] = REGENERATED
    if not (history and isinstance(history[-1], Restarted)):
        kinds[: max((e.at for e in history if isinstance(e, Resumed)), default=0)] = REUSED
    assert [life.count(kind) for kind in (NEW, REUSED, REGENERATED)] == [int((kinds == k).sum()) for k in range(3)]
    told = [run.version.number for run in life.runs for _ in range(run.n_tokens)]
    assert told == [number for n_tokens, number in chunks for _ in range(n_tokens)]
    assert all(run.begin <= run.end for run in life.runs) and life.begin <= life.end


# ---- figures ---------------------------------------------------------------------------------------------------------


def _report(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    ran = run_once(capsys, "report", *argv, "--json")
    assert ran.code == 0, ran
    (document,) = ran.documents
    VALIDATORS["report"].validate(document)
    return document


@pytest.mark.parametrize("make", [stores.several, stores.crashed, stores.carried_on, stores.collected])
def test_a_report_has_the_figures_of_stats(
    make: Callable[[ObjectStore], Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_as(monkeypatch, made(make))
    document = _report(capsys, "s")
    (stats,) = run_once(capsys, "stats", "s", "--json").documents
    assert _comparable(document["figures"]) == _stats_figures(stats)
    assert sum(call["tokens"] for call in document["calls"]) == document["figures"]["tokens"]
    assert sum(run[2] for call in document["calls"] for run in call["runs"]) == document["figures"]["tokens"]
    assert sum(version["tokens"] for version in document["versions"]) == document["figures"]["tokens"]
    at = [snapshot["at_s"] for snapshot in document["snapshots"]]
    assert at == sorted(at) and at[-1] <= document["duration_s"]


SHARED = ("calls", "open", "ended", "tokens", "chunks", "segments", "stored_nbytes", "raw_nbytes", "tokens_thrown_away")


def _comparable(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: figures[name] for name in SHARED}


def _stats_figures(stats: dict[str, Any]) -> dict[str, Any]:
    return {name: {**stats["calls"], **stats["tokens"]}[name] for name in SHARED}


def test_a_report_tells_what_kills_cost(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One kill: ten tokens of p-1 were carried over, two of p-10 (restart-only) are thrown away by a third life."""
    store = made(stores.carried_on)
    job = stores.Job(store, 3, keep=8)
    say(job.carry_on()["p-10"], 9)
    job.snapshot()
    job.close()
    opened_as(monkeypatch, store)
    document = _report(capsys, "s")
    assert document["figures"]["kills"] == 1, "the second life ended with a final snapshot"
    assert [epoch["killed"] for epoch in document["epochs"]] == [True, False, False]
    calls = {call["rollout"]: call for call in document["calls"]}
    assert calls["p-1"]["reused"] == 11 and calls["p-10"] | {"thrown_away": 2, "regenerated": 1} == calls["p-10"]
    assert document["figures"]["tokens_reused"] == 11 and document["figures"]["tokens_thrown_away"] == 2
    assert [v["lag"] for v in document["versions"]] == [1, 0]
    out = run_once(capsys, "report", "s").out
    assert "1 epoch of 3 ended without a last one" in out and "11 tokens carried over" in out
    assert "killed or fenced" in out and "how many of those were generated again is not known" in out


def test_a_report_without_a_snapshot(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    opened_as(monkeypatch, made(stores.empty))
    assert run_once(capsys, "report", "s").code == 14


def test_a_page_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened_as(monkeypatch, made(stores.several))
    ran = run_once(capsys, "report", "s", "--html", str(tmp_path / "none" / "page.html"))
    assert (ran.code, ran.out) == (2, "") and "there is no folder" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_page_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*names: str, **folders: int) -> None:
        raise KeyboardInterrupt

    opened_as(monkeypatch, made(stores.several))
    monkeypatch.setattr(os, "replace", interrupted)
    assert run_once(capsys, "report", "s", "--html", str(tmp_path / "page.html")).code == 130
    assert list(tmp_path.iterdir()) == []


def test_a_page_takes_the_place_of_a_plain_file_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A device or a pipe of that name is no earlier page."""
    opened_as(monkeypatch, made(stores.several))
    os.mkfifo(tmp_path / "pipe")
    ran = run_once(capsys, "report", "s", "--html", str(tmp_path / "pipe"))
    assert ran.code == 2 and "is no plain file" in ran.err and (tmp_path / "pipe").is_fifo()
    (tmp_path / "page.html").write_text("earlier")
    assert run_once(capsys, "report", "s", "--html", str(tmp_path / "page.html")).code == 0
    assert (tmp_path / "page.html").read_text().startswith("<!")


# ---- the page --------------------------------------------------------------------------------------------------------


@contextmanager
def shown(file: Path, fragment: str = "") -> Iterator[browser.Tab]:
    """The page after its program ran; at the end it has said nothing, asked for nothing and stayed what it was."""
    with browser.opened(file, fragment) as tab:
        assert tab("document.documentElement.dataset.ready") == "yes", tab.console
        yield tab
        assert tab.console == [] and {url.partition("#")[0] for url in tab.requests} == {file.as_uri()}
        assert tab("document.documentElement.dataset.owned ?? document.getElementById('owned')") is None
        assert tab("document.title").startswith("Rollout report · ")


def _count(tab: browser.Tab) -> str:
    return str(tab("document.getElementById('count').textContent"))


def _rows(tab: browser.Tab) -> list[list[str]]:
    """The rows of the table that are in the document."""
    rows = tab("[...document.querySelectorAll('#rows .row')].map(r => [...r.children].map(c => c.textContent))")
    return [list(map(str, row)) for row in rows]


def test_the_page_shows_the_figures_of_stats(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    store = stores.on_disk(tmp_path / "s", stores.objects_of(made(stores.carried_on)))
    file = tmp_path / "job.html"
    ran = run_once(capsys, "report", store.root, "--html", str(file))
    assert ran.code == 0 and str(file) in ran.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.html", "s"]
    (stats,) = run_once(capsys, "stats", store.root, "--json").documents
    with shown(file) as tab:
        cards = "[...document.querySelectorAll('[data-figure]')].map(c => [c.dataset.figure, Number(c.dataset.value)])"
        figures = dict(tab(cards))
        both = {name: n for name, n in _stats_figures(stats).items() if name in figures}
        assert {name: figures[name] for name in both} == both
        assert set(both) == {"calls", "open", "tokens", "stored_nbytes"}
        assert tab("document.querySelector('[data-figure=tokens]').textContent") == "17"
        assert _count(tab) == "4 of 4 calls, 17 tokens"
        assert {row[0]: row[4] for row in _rows(tab)} == {"p-1": "11", "p-2": "4", "p-3": "0", "p-10": "2"}


def test_search_order_and_address(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As somebody types and clicks; what is searched is kept in the address, and the address brings it back."""
    store = stores.on_disk(tmp_path / "s", stores.objects_of(made(stores.carried_on)))
    file = tmp_path / "job.html"
    assert run_once(capsys, "report", store.root, "--html", str(file)).code == 0
    with shown(file) as tab:
        tab("document.getElementById('search').focus()")
        tab.type("P-1 open")
        assert _count(tab) == "2 of 4 calls, 13 tokens" and {row[0] for row in _rows(tab)} == {"p-1", "p-10"}
        assert tab("location.hash") == "#q=P-1+open"
        click = "[...document.querySelectorAll('#heads button')].find(b => b.textContent.startsWith('tokens')).click()"
        tab(click)
        assert [row[0] for row in _rows(tab)] == ["p-1", "p-10"]
        tab(click)
        assert [row[0] for row in _rows(tab)] == ["p-10", "p-1"]
        tab(
            "canvas.dispatchEvent(new MouseEvent('mousemove', {clientX: 300, "
            "clientY: canvas.getBoundingClientRect().top + 6, bubbles: true}))"
        )
        assert tab("tip.hidden") is False and tab("tip.textContent").startswith("p-10\nopen, 2 tokens")
    with shown(file, "#q=resumed") as tab:
        assert _count(tab) == "1 of 4 calls, 11 tokens" and tab("document.getElementById('search').value") == "resumed"


def test_the_page_asks_for_nothing() -> None:
    text = page.render(_large(3))
    assert set(re.findall(r"https?://[^\"' )]*", text)) == {"http://www.w3.org/2000/svg"}, "a name, never fetched"
    assert "default-src 'none'" in text and not re.search(r"<(script|link|img|iframe)[^>]* src=", text)


def _large(n: int) -> dict[str, Any]:
    """A report of `n` calls, each a little different."""
    versions = [
        {"lineage": "a", "number": i, "tokens": n, "begin_s": i, "end_s": i + 9, "lag": 9 - i} for i in range(10)
    ]
    epochs = [
        {
            "epoch": e,
            "owner": f"host pid {e}",
            "begin_s": 100.0 * e,
            "at_most_s": None,
            "end_s": 100.0 * e + 60,
            "killed": e < 3,
            "snapshots": 2,
        }
        for e in (1, 2, 3)
    ]
    calls = [
        {
            "call_id": f"{i:032x}", "rollout": f"prompt-{i}#0", "turn": 0, "state": "open" if i % 3 else "ended",
            "finish_reason": None if i % 3 else "stop", "tokens": 30, "attempt": i % 2, "reused": 10 * (i % 2),
            "regenerated": 0, "thrown_away": 5 * (i % 7 == 0), "lag": i % 10, "begin_s": 100.0 + i % 50,
            "end_s": 330.0, "runs": [[100.0 + i % 50, 160.0, 10, i % 2, i % 10], [300.0, 330.0, 20, 0, 9]],
        }
        for i in range(n)
    ]  # fmt: skip
    figures = dict.fromkeys(
        (*SHARED, "tokens_reused", "tokens_regenerated", "restored", "snapshots", "kills", "epochs", "versions"), n
    )
    snapshots = [
        {
            "id": i,
            "epoch": 1,
            "cause": "interval",
            "at_s": 100.0 + i,
            "tokens": i * n,
            "calls": n,
            "ended": i,
            "nbytes": i * n,
        }
        for i in range(1, 40)
    ]
    document = {
        "store": "s3://bucket/run", "snapshot": 39, "begin_utc": "2026-01-01T00:00:00.000Z", "duration_s": 360.0,
        "end_utc": "2026-01-01T00:06:00.000Z", "figures": figures, "epochs": epochs, "snapshots": snapshots,
        "versions": versions, "calls": calls, "notes": [],
    }  # fmt: skip
    VALIDATORS["report"].validate(document)
    return document


def test_ten_thousand_calls_stay_usable(tmp_path: Path) -> None:
    """Only what is in view is in the document, however far one scrolls; a search finds its calls among all."""
    (tmp_path / "big.html").write_text(page.render(_large(10_000)))
    with shown(tmp_path / "big.html", "#colour=lag") as tab:
        assert _count(tab) == "10,000 of 10,000 calls, 300,000 tokens"
        assert 5 < len(_rows(tab)) < 60
        assert ">lag 9</span>" in tab("document.getElementById('calls-legend').innerHTML")
        tab("document.getElementById('order').value = 'rollout'")
        tab("document.getElementById('order').dispatchEvent(new Event('change'))")
        tab(
            "(async () => { const table = document.getElementById('table'); table.scrollTop = table.scrollHeight; "
            "lanes.scrollTop = 1e9; for (let i = 0; i < 3; i += 1) await new Promise(requestAnimationFrame); })()"
        )
        assert 5 < len(_rows(tab)) < 60 and _rows(tab)[-1][0] == "prompt-9999#0"
        assert tab("document.querySelectorAll('*').length") < 1500
        tab("document.getElementById('search').focus()")
        tab.type("prompt-77 ended")
        meant = [i for i in range(10_000) if f"prompt-{i}#0".startswith("prompt-77") and i % 3 == 0]
        assert _count(tab) == f"{len(meant)} of 10,000 calls, {30 * len(meant):,} tokens"
        assert [row[0] for row in _rows(tab)][:3] == [f"prompt-{i}#0" for i in meant[:3]]


def test_hostile_names_are_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Markup, a script's end and line separators in names of calls and in the address."""
    store = made(stores.empty)
    job = stores.Job(store)
    for number, name in enumerate(HOSTILE):
        say(job.open(name, (3, 4 + number)), 7, 8)
    job.snapshot()
    job.close()
    folder = tmp_path / "<b id=owned>"
    address = stores.on_disk(folder, stores.objects_of(store)).root
    file = tmp_path / "page.html"
    assert run_once(capsys, "report", address, "--html", str(file)).code == 0
    with shown(file) as tab:
        assert {row[0] for row in _rows(tab)} == set(HOSTILE)
        assert tab("document.getElementById('address').textContent") == address
        assert tab("document.scripts.length") == 2 and tab("document.images.length") == 0
    data = re.search(r'<script type="application/json" id="figures">(.*?)</script>', file.read_text(), re.DOTALL)
    assert data is not None and not re.search("[<>&\u2028]", data[1])
    assert {call["rollout"] for call in json.loads(data[1])["calls"]} == set(HOSTILE)


def test_an_error_on_a_page_would_be_seen(tmp_path: Path) -> None:
    """The checks of console and network can fail."""
    text = "<script>console.error('seen'); fetch('http://192.0.2.1/x').catch(() => 0); missing()</script>"
    (tmp_path / "wrong.html").write_text(text)
    with browser.opened(tmp_path / "wrong.html") as tab:
        tab("new Promise(requestAnimationFrame)")
        assert any("seen" in line for line in tab.console) and any("missing" in line for line in tab.console)
        assert "http://192.0.2.1/x" in tab.requests


def test_without_a_browser_it_is_said_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browser.shutil, "which", lambda name: None)
    monkeypatch.delenv("PREFIX_RECOVERY_CHROMIUM", raising=False)
    with pytest.raises(pytest.fail.Exception, match="no Chromium on this machine; type: make browser"):
        browser.executable()


def test_figures_that_are_not_of_the_newest_snapshot_are_said_to_be_older(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an epoch of which nothing but its beginning is known is not said to have lasted 0 s."""
    store = made(stores.several)
    stores.Job(store, 3).close()  # it dies before its first flush
    stores.Job(store, 4).close()
    newest = max(item.key for item in store.list("log/"))
    ledger = json.loads(store.get(newest))["body"]["ledger"]["key"]
    stores.replace(store, ledger, b"?")
    opened_as(monkeypatch, store)
    document = json.loads(run_once(capsys, "report", "s", "--json").out)
    (note,) = [note for note in document["notes"] if "the newest sound one" in note]
    assert f"those of snapshot {document['snapshot']}" in note and "cannot be used" in note
    assert note in json.loads(run_once(capsys, "stats", "s", "--json").out)["notes"]
    row = next(line for line in run_once(capsys, "report", "s").out.splitlines() if "host-a pid 3" in line)
    assert " < 1 h" in row and "killed or fenced" in row
