"""Shows that the tests of recovery.admission can fail: each mutation of the code must be caught by its tests.

Owns: the list of mutations, and running the named test files against a copy of the package with one of them applied.
Not a test of the suite (it runs pytest once per mutation); run it by hand when the machines or their tests change:

    python -m tests.mutations [WORD …]      only mutations whose file or text contains one of the words
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MUTATIONS = [
    # file in recovery/admission, text, what it becomes, test files
    ("holds.py", "return not self._claims and self", "return self", "ownership holds"),
    ("holds.py", "claim.frontier.discard(member)", "pass", "frontiers"),
    ("holds.py", "_Claim(hold, set(frontier))", "_Claim(hold, frontier)", "frontiers"),
    ("holds.py", "if claim.recorded:", "if False:", "frontiers"),
    ("holds.py", "if not claim.observed:", "if False:", "frontiers ownership"),
    ("attempts.py", "record.terminal is not receipt", "record.terminal != receipt and False", "attempts"),
    ("attempts.py", "if record in found:", "if False:", "attempts"),
    ("slots.py", "len(self._holders) == self.total", "len(self._holders) > self.total", "attempts"),
    ("versions.py", "newest = min(newest, at)", "newest = at", "versions"),
    ("versions.py", "else Ghost()", "else Lag(0)", "versions"),
    ("staleness.py", "updates <= self.limit:", "updates <= self.limit + 1:", "staleness ownership"),
    ("staleness.py", "updates + headroom <= self.limit", "updates <= self.limit", "staleness"),
    ("staleness.py", "stale_requeues >= self.max_requeues", "stale_requeues > self.max_requeues", "staleness"),
    ("staleness.py", "not isinstance(distance, Ahead | Ghost)", "True", "staleness"),
    ("finished.py", "-sum(lags)", "0", "preparation"),
    ("finished.py", "if not one.kept and self", "if self", "preparation"),
    ("leases.py", "return rollout > self.newest", "return True", "attempts"),
    ("leases.py", "        del self._open[lease.rollout]", "        pass", "attempts"),
    ("settlement.py", "self._slots.give_back(record.attempt.reservation_id)", "pass", "settlement ownership"),
    ("settlement.py", "if id(attempt) not in active", "if True", "settlement"),
    ("settlement.py", "raise under(error, cleanup) from cleanup", "raise cleanup", "settlement"),
    ("settlement.py", "            self.retain(records, why, cause)", "            pass", "settlement"),
    ("replay.py", "wanted = sorted(self._requeued)[:k]", "wanted = list(self._requeued)[:k]", "replay"),
    ("replay.py", "if when > rollout:\n", "if when >= rollout:\n", "replay"),
    ("replay.py", "if rollout <= self.saved:", "if rollout < self.saved:", "replay"),
    ("replay.py", "self._frontier += len(fresh)", "self._frontier += k", "replay"),
    ("replay.py", "self.draw + 1, self", "self.draw, self", "replay"),
    ("rows.py", "self._digests[index].encode() + canonical_json(made)", "canonical_json(made)", "rows replay"),
    ("trainer.py", "if members != list(publication.cohort):", "if not members:", "trainer_admission"),
    ("trainer.py", "or found.publication != publication:", ":", "trainer_admission"),
    ("trainer.py", "        self._move(one, before)\n", "", "trainer_admission"),
    ("exclusion.py", "if Work.UPDATE in (work, one.work)]", "if work is Work.UPDATE]", "preparation"),
    ("exclusion.py", "if place is not None:\n            ahead", "if False:\n            ahead", "rollout_wedges"),
    ("generation.py", "            return None, error", "            raise", "rollout_wedges"),
    ("generation.py", "run_in_executor(self._threads", "run_in_executor(None", "rollout_wedges"),
    ("updates.py", "            self._rollout.on_version(target)\n", "            pass\n", "rollout_wedges"),
    ("updates.py", "one in self._inside and one.work", "False and one.work", "rollout_wedges"),
    ("metrics.py", "self._counts = dict.fromkeys(COUNTERS, 0)\n        self._lags", "self._lags", "preparation"),
    ("samples.py", "if any(sample.loss_mask[start:end]):", "if True:", "preparation"),
    ("preparation.py", "errors = ownership.reconcile() if checkpoint else []", "errors = []", "preparation"),
    ("ownership.py", "        self._sweep()\n", "", "ownership"),
    ("ownership.py", "self.gate.settled(record.execution)\n        errors", "errors", "ownership"),
    ("ownership.py", "[record.execution for record in members]", "[]", "ownership"),
    ("ownership.py", "key=self._urgency", "key=lambda entry: 0", "ownership"),
    ("ownership.py", "        self._gone(self.settlement.retry(but", "        (self.settlement.retry(but", "ownership"),
    (
        "ownership.py",
        "if self.versions.state is not State.STEADY:\n            return f",
        "if False:\n            return f",
        "ownership",
    ),
    ("state.py", "covered:\n        raise", "covered + 9:\n        raise", "rollout_snapshots"),
    ("state.py", "record.version = found[0]", "pass", "rollout_snapshots"),
    ("state.py", "        versions.fork(lineage, number, rollout)", "        pass", "rollout_snapshots"),
    ("state.py", "    _check_line(versions, rollout, version)\n", "", "branches"),
    ("state.py", "    if version.lineage not in line:", "    if False:", "branches"),
    (
        "versions.py",
        "            last = min(bounds, default=None)\n",
        "            last = self._begun.get(lineage)\n",
        "branches",
    ),
    ("participant.py", "        own.gate.freeze(hold)\n", "", "rollout_snapshots"),
    ("participant.py", "rollout > self.covered", "False", "rollout_snapshots"),
    ("preparation.py", "min(open_leases) - 1 if open_leases else", "", "rollout_snapshots"),
    ("updates.py", "if isinstance(got, Pass):", "if got or True:", "rollout"),
    ("updates.py", "        self._left_held = hold  #", "        #", "rollout"),
    ("closing.py", "            task.cancel()\n", "            pass\n", "rollout"),
    ("closing.py", "timeout=deadline.left_s", "timeout=None", "rollout rollout_wedges"),
    ("closing.py", "is not Lifecycle.CLOSED:", "is None:", "rollout_wedges"),
    (
        "rollout.py",
        "if self._loop is not None and running_loop(verb)",
        "if running_loop(verb) and False and verb",
        "rollout_wedges",
    ),
    ("rollout.py", "self.ownership.broke(execution, error)  #", "pass  #", "rollout_wedges"),
    ("generation.py", "            cancelled = error\n", "            raise\n", "rollout"),
    ("prefixes.py", "action = verdict.action", "pass", "rollout"),
    ("participant.py", "checkpoint=strict", "checkpoint=False", "rollout_snapshots"),
    ("participant.py", "self._taken if self._taken_strictly else 0", "self._taken", "rollout_snapshots"),
    ("participant.py", "unresolved=self._rollout.unresolved", "unresolved=0", "rollout_snapshots"),
    ("ages.py", "            record.encoded = None\n        return", "        return", "rollout_wedges"),
    ("ages.py", "                    record.encoded = None\n", "", "rollout_wedges"),
    ("ages.py", "if any(sample.loss_mask)]", "]", "rollout_wedges"),
    ("state.py", "and record.encoded is None", "", "rollout_wedges"),
    ("rollout.py", "self.state.finished()  #", "pass  #", "rollout_wedges"),
    ("unserved.py", "and not unknown:", "and True:", "rollout_wedges"),
    ("unserved.py", "self._given_up += given_up", "pass", "rollout_wedges"),
    ("unserved.py", "self._draws.pop(group, None)\n            return", "return", "rollout_wedges"),
    ("view.py", "if lag != NO_LAG]", "]", "rollout_wedges"),
    ("training.py", "            told(\n", "            str(\n", "rollout_wedges"),
    ("covering.py", "wait.ended, ask = False,", "wait.ended, _ = False,", "rollout_wedges"),
    ("preparation.py", "            del self._all[wait]", "            self._all.clear()", "rollout_wedges"),
    ("trainer.py", "if not began or self._is_open(one.lease):", "if True:", "trainer_admission"),
    ("trainer.py", " or one.publication.rollout > rollout", "", "rollout_snapshots"),
    ("training.py", "        await trainer.save(newest, rollout.version)\n", "", "rollout_snapshots"),
    ("training.py", "        await rollout.updates.update(trainer.push)\n", "", "rollout_snapshots"),
    ("training.py", "        rollout.commit(got)\n", "        rollout.roll_back(got)\n", "rollout_snapshots"),
    ("training.py", "        rollout.checkpoint_saved(newest)\n", "", "rollout_snapshots"),
    ("ages.py", "return beyond and not self._left(record), lags", "return beyond, lags", "ownership"),
    ("ages.py", "for one in left)] if left else []", "for one in left)]", "ownership"),
    ("prefixes.py", "and refused < len(attempt.samples)", "", "rollout"),
    ("placement.py", "if version is None]", "]", "rollout"),
    ("placement.py", "action, choices = Action.PIN, serving", "action = Action.PIN", "rollout"),
    ("versions.py", "and far == self.distance(other))", ")", "staleness"),
    ("replay.py", "drawn_as < due.draw", "drawn_as <= due.draw", "replay"),
    ("rollout.py", "        self._prefixes.forget(self._source.spent(self._prefixes.known()))\n", "", "rollout"),
    ("patience.py", "return len(untrained) >= batches", "return False and batches", "ownership"),
    ("patience.py", "< far.updates + self.updates_due + 1", "< far.updates", "ownership"),
    ("updates.py", "if task is asyncio.current_task():", "if False:", "rollout"),
    ("updates.py", "if not inspect.isawaitable(work):", "if False:", "rollout"),
    ("updates.py", "        del self._inside[one]\n", "", "rollout"),
    ("generation.py", "not callable(found) or", "", "rollout"),
    ("rollout.py", "if self._prefixes.saved and not", "if False and not", "rollout"),
    ("changes.py", "if self._due.passed:", "if False:", "rollout"),
    ("changes.py", "if what != self._what:", "if self._what is None:", "rollout"),
    ("view.py", "if waiting.holds:", "if False:", "rollout"),
    ("ownership.py", "tuple(apart(sample) for sample in record.samples)", "record.samples", "samples"),
    ("ownership.py", "if stale and self.staleness.policy", "if self.staleness.policy", "rollout"),
    ("samples.py", "if len({id(sample) for sample in returned}) != len(returned):", "if False:", "samples"),
    ("samples.py", "        own = apart(_converted(stamped))", "        own = stamped", "samples"),
    (
        "replay.py",
        '_place(int(cursor["group_frontier"]), size)',
        'self._place(int(cursor["group_frontier"]))',
        "replay",
    ),
    ("replay.py", " if epoch or alike else row_id", " if epoch else row_id", "replay"),
    ("rows.py", "            self._next.append(row)\n", "", "rows"),
    ("rows.py", "                self._broken = error\n", "", "rows"),
    ("rows.py", "if self._digest(index, made) == self._digests[index + 1]:", "if made:", "rows"),
    ("participant.py", "        if rollout > known:", "        if False:", "rollout_snapshots"),
]


def survives(file: str, text: str, instead: str, tests: str) -> str:
    """Empty if a test fails with the mutation applied; else what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "recovery", Path(folder) / "recovery")
        path = Path(folder) / "recovery" / "admission" / file
        source = path.read_text(encoding="utf-8")
        if not text or source.count(text) < 1:
            return "the text is not there"
        path.write_text(source.replace(text, instead), encoding="utf-8")
        for name in ("tests", "storage_backends", "tools", "vllm_hooks", "pyproject.toml"):
            (Path(folder) / name).symlink_to(ROOT / name)
        files = [f"tests/test_{name}.py" for name in tests.split()]
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "60", *files]
        environment = {**os.environ, "PYTHONPATH": f"{folder}:{folder}/tools"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        return "" if done.returncode == 1 else f"pytest ended with {done.returncode}: {done.stdout[-300:]}"


def main() -> int:
    words = sys.argv[1:] or [""]
    chosen = [row for row in MUTATIONS if any(word in f"{row[0]} {row[1]}" for word in words)]
    alive = 0
    for row in chosen:
        problem = survives(*row)
        alive += bool(problem)
        print(f"{'ALIVE ' if problem else 'caught'} {row[0]}: {row[1]!r} -> {row[2]!r} {problem}", flush=True)
    print(f"{len(chosen) - alive} of {len(chosen)} mutations are caught")
    return 1 if alive or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
