"""`snapshot-inspect forget` and `prune`, and `prefix-recovery pin`, as people run them (C7, C8, C10, N1, W10)."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefix_recovery import cli as jobs
from recovery.errors import RecoveryError
from recovery.log_reading import read_slot
from recovery.slots import SlotLog
from snapshot_inspect import cli, places, pruning, writing
from storage_backends import temporaries
from storage_backends.local import LocalStore
from storage_backends.memory import MemoryStore, named
from storage_backends.testing.faults import PASS, FaultyStore, RaiseBefore
from storage_backends.testing.kills import WAYS, Killed, KillingStore
from tests import inspect_stores as stores
from tests.fakes import ManualClock, SeededEntropy
from tests.inspect_stores import Job
from tests.test_inspect_screens import VALIDATORS

Run = Callable[..., tuple[int, str, str]]


def full(store: Any) -> Job:
    """Two processes with ten snapshots, each with a state of its own; the first one flushed again as a zombie."""
    first = Job(store, 1, keep=9)
    calls = {name: first.open(name, (5, 6, i)) for i, name in enumerate(("p-1", "p-2", "p-3"))}
    for i in range(4):
        for call in calls.values():
            call.append([4 + i, 9], [-0.5, -0.25], stores.A0)
        first.flush()
        first._states = {**first._states, "data": json.dumps({"cursor": i}).encode()}
        first.snapshot()
    second = Job(store, 2, keep=9)
    first.flush()
    for call in calls.values():
        call.append([7], [-1.0], stores.A0)
    first.flush()
    for i, call in enumerate(second.carry_on().values()):
        call.append([8 + i], [-0.125], stores.A0)
    for i in range(4):
        second._states = {**second._states, "data": json.dumps({"cursor": 10 + i}).encode()}
        second.snapshot()
    for call in second.calls.values():
        call.append([6], [-0.125], stores.A0)
    second.flush()
    return second


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store = MemoryStore()
    full(store)
    stores.on_disk(tmp_path / "run 17", stores.objects_of(store))
    return tmp_path / "run 17"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def one(*argv: str, main: Callable[[list[str]], int] = cli.main) -> tuple[int, str, str]:
        code = main(list(argv))
        said = capsys.readouterr()
        return code, said.out, said.err

    return one


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def document(run: Run, *argv: str) -> tuple[int, dict[str, Any]]:
    code, out, err = run(*argv, "--json")
    assert out, err
    found = json.loads(out)
    VALIDATORS[argv[0]].validate(found)
    return code, found


# ---- prune ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_c7_prune_deletes_exactly_what_it_showed(root: Path, run: Run, keep: int) -> None:
    before = files(root)
    code, shown = document(run, "prune", str(root), "--keep", str(keep))
    assert code == 0 and files(root) == before, "a dry run writes nothing"
    assert shown["objects"] == len(shown["deleted"]) > 3 and shown["published"] == [] and shown["epoch"] is None
    assert shown["nbytes"] == sum(len(before[item["object"]]) for item in shown["deleted"])
    assert "fenced" in shown["notes"][0] and shown["adopted"] == {"segments": 1, "tokens": 3}
    code, done = document(run, "prune", str(root), "--keep", str(keep), "--apply")
    assert code == 0 and done["deleted"] == shown["deleted"] and len(done["published"]) == 2
    assert before.keys() - files(root).keys() == {item["object"] for item in shown["deleted"]}
    assert run("verify", str(root), "--read-data")[0] == 0
    code, out, _ = run("prune", str(root), "--keep", str(keep))
    assert code == 0 and "add --apply" in out and "objects to delete" in out


def test_the_words_of_a_prune(root: Path, run: Run) -> None:
    code, out, _ = run("prune", str(root), "--apply")
    assert code == 0 and "add --apply" not in out and re.search(r"[0-9]+ objects deleted, [0-9.]+ kB", out)
    assert "3 tokens that no snapshot named; they are published first" in out
    assert "a job that ran on this store is fenced" in out


def test_c8_a_job_that_runs_is_fenced_by_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    store = named("prune fences")
    job = full(store)
    assert run("prune", "memory://prune fences", "--apply")[0] == 0
    attempt = job._coordinator.take("interval")
    assert attempt.error is not None and attempt.error.exit_code == 11


@pytest.mark.parametrize("verb", ["prune", "forget"])
def test_c8_who_loses_the_race_says_so_with_exit_code_11(
    verb: str, root: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims: list[int] = []

    def overtaken(address: str) -> tuple[Any, bool]:
        inner = LocalStore(str(root))

        def step(what: str, key: str) -> Any:
            if what == "put_new" and key.startswith("log/"):
                claims.append(1)
                if len(claims) == 2:
                    SlotLog(inner, ManualClock(), SeededEntropy("other"), "somebody else").claim()
            return PASS

        return FaultyStore(inner, step), False

    for module in (pruning, cli.forgetting):
        monkeypatch.setattr(module, "open_for_writing", overtaken)
    words = [str(root), "--apply"] if verb == "prune" else [str(root), "latest", "--apply"]
    code, out, err = run(verb, *words)
    assert (code, out) == (11, "") and "somebody else" in err
    assert run("verify", str(root), "--read-data")[0] == 0


def test_n1_c10_foreign_names_stay_and_unfinished_files_of_dead_writers_go(root: Path, run: Run) -> None:
    foreign = ["step-100.backup", ".DS_Store", "lost+found/x", "seg/e000001/notes (copy).txt", "snap-x.backup"]
    for name in foreign:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"mine")
    (root / ".tmp").mkdir(exist_ok=True)
    dead = f".tmp/{temporaries.host()}.999999999.1.{'0' * 16}"
    living = f".tmp/{temporaries.new_name()}"
    other = ".tmp/not ours"
    for name in (dead, living, other):
        (root / name).write_bytes(b"half")
    _, shown = document(run, "prune", str(root))
    assert shown["unfinished"] == [{"file": dead, "nbytes": 4}] and (root / dead).exists()
    code, out, _ = run("prune", str(root), "--apply")
    assert code == 0 and dead in out and not (root / dead).exists()
    assert (root / living).exists() and (root / other).exists()
    assert [(root / name).read_bytes() for name in foreign] == [b"mine"] * len(foreign)


def test_what_was_passed_over_leaves_garbage_and_says_what_to_do(root: Path, run: Run) -> None:
    newest = json.loads(run("latest", str(root), "--json")[1])["id"]
    ledger = json.loads(run("show", str(root), str(newest), "--json")[1])["ledger"]["key"]
    (root / ledger).write_bytes(b"?" * (root / ledger).stat().st_size)
    code, shown = document(run, "prune", str(root))
    assert code == 1 and shown["objects"] == 0 and shown["passed_over"][0]["what"] == f"snapshot {newest}"
    assert "forget STORE ID" in shown["notes"][1]
    assert document(run, "prune", str(root), "--apply")[0] == 3
    assert run("forget", str(root), str(newest), "--apply")[0] == 0
    code, done = document(run, "prune", str(root), "--apply")
    assert code == 0 and ledger in {item["object"] for item in done["deleted"]}


@pytest.mark.parametrize(("words", "code"), [(("--keep", "0"), 2), (("--keep", "x"), 2)])
def test_it_keeps_one_at_least(words: tuple[str, ...], code: int, root: Path, run: Run) -> None:
    assert run("prune", str(root), *words)[0] == code


def test_an_empty_store_and_none_at_all(tmp_path: Path, run: Run) -> None:
    assert run("prune", str(tmp_path / "none"))[0] == 10 and not (tmp_path / "none").exists()
    store = MemoryStore()
    stores.empty(store)
    stores.on_disk(tmp_path / "empty", stores.objects_of(store))
    before = files(tmp_path / "empty")
    for verb in (("prune",), ("prune", "--apply")):
        assert run(verb[0], str(tmp_path / "empty"), *verb[1:])[0] == 14
    assert run("forget", str(tmp_path / "empty"), "latest", "--apply")[0] == 14
    assert files(tmp_path / "empty") == before, "nobody is fenced for nothing"


# ---- forget --------------------------------------------------------------------------------------------------------


def test_w10_forgetting_makes_a_restore_take_the_older_one(root: Path, run: Run) -> None:
    ids = [json.loads(line)["id"] for line in run("list", str(root), "--json")[1].splitlines()]
    before = files(root)
    code, shown = document(run, "forget", str(root), str(ids[-1]), str(ids[-2]))
    assert code == 0 and files(root) == before
    assert shown["restore_from"] == {"before": ids[-1], "after": ids[-3]} and shown["slot"] is None
    assert shown["objects"] == len(shown["freed"]) >= 2
    code, done = document(run, "forget", str(root), str(ids[-1]), str(ids[-2]), "--apply")
    assert code == 0 and {**done, **dict.fromkeys(("applied", "notes", "slot", "epoch"))} == {
        **shown,
        **dict.fromkeys(("applied", "notes", "slot", "epoch")),
    }
    read = read_slot(LocalStore(str(root)), done["slot"])
    assert read is not None and read.slot.kind == "forget" and read.slot.epoch == done["epoch"]
    assert before.items() <= {key: data for key, data in files(root).items() if key != "hint"}.items() | {
        ("hint", before["hint"])
    }
    latest = json.loads(run("latest", str(root), "--check", "--json")[1])
    assert latest["id"] == ids[-3] and latest["forgotten"] == ids[-2:] and latest["adoption"]["segments"] == []
    rows = [json.loads(line) for line in run("list", str(root), "--json")[1].splitlines()]
    assert [row["id"] for row in rows if row["forgotten"]] == ids[-2:]
    told = json.loads(run("show", str(root), str(ids[-1]), "--json")[1])
    assert told["forgotten"] is True and told["latest"] == ids[-3]
    assert json.loads(run("show", str(root), str(ids[-3]), "--json")[1])["forgotten"] is False
    assert json.loads(run("show", str(root), str(ids[0]), "--json")[1])["forgotten"] is None
    statuses = {s["id"]: s["status"] for s in json.loads(run("verify", str(root), "--json")[1])["snapshots"]}
    assert statuses[ids[-1]] == statuses[ids[-2]] == "forgotten"
    assert run("verify", str(root), "--read-data")[0] == 0
    counted = json.loads(run("stats", str(root), "--json")[1])["snapshots"]
    assert counted["forgotten"] == 2
    code, _, err = run("diff", str(root), str(ids[-3]), str(ids[-1]))
    assert code == 0 and f"note: snapshot {ids[-1]} of {root} was forgotten" in err
    assert f"snapshot {ids[-3]} of" not in err
    code, again = document(run, "forget", str(root), str(ids[-1]), "--apply")
    assert (code, again["forgotten"], again["already"], again["slot"]) == (0, [], [ids[-1]], None)


def test_what_cannot_be_forgotten_is_said_before_anything_is_claimed(root: Path, run: Run) -> None:
    before = files(root)
    for text, says in (("1", "could be any of"), ("999", "there is no snapshot 999"), ("x", "is no snapshot")):
        code, out, err = run("forget", str(root), text, "--apply")
        assert (code, out) == (2, "") and says in err, err
    assert files(root) == before


def test_all_forgotten_is_told(root: Path, run: Run) -> None:
    ids = [str(json.loads(line)["id"]) for line in run("list", str(root), "--json")[1].splitlines()]
    before = files(root)
    for words in ((), ("--apply",)):
        code, out, err = run("forget", str(root), *ids, *words)
        assert (code, out) == (2, "") and "no snapshot would be left" in err and "--leave-none" in err
    assert files(root) == before, "nobody is fenced for nothing"
    code, shown = document(run, "forget", str(root), *ids, "--apply", "--leave-none")
    assert code == 0 and shown["restore_from"]["after"] is None and "restore: never" in " ".join(shown["notes"])
    assert run("latest", str(root))[0] == 14
    assert json.loads(run("show", str(root), ids[-1], "--json")[1])["forgotten"] is True
    assert run("prune", str(root))[0] == 14
    for verb in (("verify",), ("list",), ("holds",)):
        assert run(verb[0], str(root))[0] == 0


# ---- pin -----------------------------------------------------------------------------------------------------------


def test_c7_a_pinned_snapshot_outlives_a_prune(root: Path, run: Run) -> None:
    ids = [json.loads(line)["id"] for line in run("list", str(root), "--json")[1].splitlines()]
    code, out, err = run("pin", str(root), str(ids[1]), main=jobs.main)
    assert code == 0 and f"snapshot {ids[1]} is pinned" in out, err
    assert run("pin", str(root), main=jobs.main)[1] == f"snapshot {ids[1]} is pinned\n"
    row = next(json.loads(x) for x in run("list", str(root), "--json")[1].splitlines() if json.loads(x)["pinned"])
    assert row["id"] == ids[1] and "pinned" in run("list", str(root))[1]
    assert json.loads(run("show", str(root), str(ids[1]), "--json")[1])["pinned"] is True
    assert "it is not collected" in run("show", str(root), str(ids[1]))[1]
    code, err = run("forget", str(root), str(ids[1]), "--apply")[::2]
    assert code == 2 and f"snapshot {ids[1]} is pinned" in err and "pin --remove" in err
    code, done = document(run, "prune", str(root), "--keep", "1", "--apply")
    assert code == 0 and done["pinned"] == [ids[1]] and done["objects"] > 0
    assert run("verify", str(root), "--read-data", "--snapshot", str(ids[1]))[0] == 0
    code, out, _ = run("pin", "--remove", str(root), str(ids[1]), main=jobs.main)
    assert (code, out) == (0, f"snapshot {ids[1]} is no longer pinned\n")
    assert run("pin", "--remove", str(root), str(ids[1]), main=jobs.main)[1].endswith("was not pinned\n")
    assert document(run, "prune", str(root), "--keep", "1", "--apply")[1]["objects"] > 0
    assert run("calls", str(root), str(ids[1]))[0] == 1, "collected"


def test_latest_and_first_digits_work_and_a_second_pin_replaces_the_first(root: Path, run: Run) -> None:
    newest = json.loads(run("latest", str(root), "--json")[1])["id"]
    for text in ("latest", str(newest)):
        assert run("pin", str(root), text, main=jobs.main)[0] == 0
        assert len(list((root / "pin").iterdir())) == 1
    assert run("pin", "--remove", str(root), str(newest)[:2], main=jobs.main)[0] == 0
    assert not list((root / "pin").iterdir())
    assert run("pin", "--remove", str(root), main=jobs.main)[0] == 2
    assert run("pin", str(root), "1", main=jobs.main)[0] == 2
    assert run("pin", str(root / "none"), "1", main=jobs.main)[0] == 10


@pytest.mark.parametrize("damage", ["segment gone", "segment flipped", "state flipped", "ledger flipped"])
def test_c3_what_does_not_verify_is_not_pinned(root: Path, run: Run, damage: str) -> None:
    newest = json.loads(run("latest", str(root), "--json")[1])["id"]
    told = json.loads(run("show", str(root), str(newest), "--json")[1])
    what, how = damage.split()
    path = {
        "segment": max((root / "seg").rglob("*.arrow")),
        "state": root / told["states"][0]["key"],
        "ledger": root / told["ledger"]["key"],
    }[what]
    if what == "segment":
        path = min((root / "seg" / "e000001").rglob("*.arrow"))
    data = path.read_bytes()
    path.unlink() if how == "gone" else path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    n_slots = len(list((root / "log").iterdir()))
    code, out, err = run("pin", str(root), str(newest), main=jobs.main)
    assert (code, out) == (1, "") and f"snapshot {newest} is damaged and is not pinned" in err, err
    assert not list((root / "pin").iterdir()) if (root / "pin").exists() else True
    read_first = damage != "segment flipped"
    assert (len(list((root / "log").iterdir())) == n_slots) == read_first, "what can be seen by names is seen first"


def test_a_collected_snapshot_is_too_late(root: Path, run: Run) -> None:
    ids = [json.loads(line)["id"] for line in run("list", str(root), "--json")[1].splitlines()]
    assert run("prune", str(root), "--keep", "1", "--apply")[0] == 0
    code, _, err = run("pin", str(root), str(ids[0]), main=jobs.main)
    assert code == 1 and "is collected and is not pinned" in err
    assert not (root / "pin").exists()


def test_what_is_pinned_and_lacks_something_is_damaged_whatever_garbage_lists_say(root: Path, run: Run) -> None:
    ids = [json.loads(line)["id"] for line in run("list", str(root), "--json")[1].splitlines()]
    assert run("pin", str(root), str(ids[1]), main=jobs.main)[0] == 0
    assert run("prune", str(root), "--keep", "1", "--apply")[0] == 0
    told = json.loads(run("show", str(root), str(ids[1]), "--json")[1])
    os.unlink(root / told["ledger"]["key"])
    code, out, _ = run("verify", str(root))
    assert code == 1 and re.search(rf"damaged +{ids[1]}\n", out)


# ---- kills ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["prune", "forget", "pin"])
def test_a_kill_at_store_calls_of_the_commands(verb: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a store in memory: verify finds no problem after it, and the same command again does the work."""
    template = MemoryStore()
    full(template)
    last = 0
    at = 1
    while not last or at <= last:
        for how in WAYS:
            store = named(f"kill {verb} {at} {how}")
            store._objects.update(template._objects)
            address = f"memory://kill {verb} {at} {how}"
            killing = KillingStore(store, at, how)
            opened = lambda address, killing=killing: (killing, False)  # noqa: E731
            for module in (pruning, cli.forgetting, writing):
                monkeypatch.setattr(module, "open_for_writing", opened)
            monkeypatch.setattr("prefix_recovery.pin.open_for_writing", opened)
            words = {"prune": ("prune", address, "--apply"), "forget": ("forget", address, "10", "--apply")}
            command = words.get(verb, ("pin", address, "10"))
            main = jobs.main if verb == "pin" else cli.main
            with contextlib.suppress(Killed, RecoveryError):
                run(*command, main=main)
            last = last or (killing.n_calls if killing.n_calls < at else 0)
            monkeypatch.undo()
            code, out, err = run("verify", address)
            assert code == 0, (at, how, out, err)
            if at % 4 == 0:
                assert run(*command, main=main)[0] == 0
                assert run("verify", address, "--read-data")[0] == 0
        at += 2
    print(f"{verb}: {last} store calls")
    assert last > 5


def test_a_dry_run_does_not_need_to_write(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    store = named("read only")
    full(store)
    refusing = FaultyStore(store, lambda verb, key: RaiseBefore(AssertionError(verb)) if verb in WRITES else PASS)
    monkeypatch.setattr(places, "open_store", lambda url, **options: refusing)
    assert run("prune", "memory://read only")[0] == 0
    assert run("forget", "memory://read only", "latest")[0] == 0


WRITES = ("put", "put_new", "delete")
