"""examples/rl on a real engine with a real trainer: its process group is killed twice, every sample is trained once.

`make soak-parts` kills it ten times more, at random (rl_soak.py).
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from examples.rl.checkpoints import Anchor, Checkpoints
from examples.rl.moments import ALL, VARIABLE, Moments
from examples.rl.reward import reward, rows
from recovery.errors import ConfigError
from tests.rl_lives import ROOT, live, trained

ARGUMENTS = ["--prompts", "10", "--samples", "2", "--longest", "90", "--snapshot-interval", "0.5"]


def test_killed_within_a_push_and_while_generating_every_sample_is_trained_once(
    quick_path: Path, tiny_model: Path
) -> None:
    folder, arguments = quick_path / "rl", ["--model", str(tiny_model), *ARGUMENTS]
    # So early that the next life, which is killed after its first batch, has some more to do.
    first = live(folder, arguments, die_at="weights_loaded:2")
    assert first.killed, first.text
    second = live(folder, arguments, kill_when=lambda text: "\nrollout " in text)
    assert second.killed, second.text
    last = live(folder, arguments)
    assert last.returncode == 0, last.text
    found = last.figures
    assert found["lost"] == found["doubled"] == found["open_leases"] == 0 and found["trained"] == 20
    assert found["version"] == found["optimizer_steps"] == found["rollout"] == 5
    assert found["largest_lag"] <= 4
    # Known lengths, known samples: what the uninterrupted run trains, each once.
    expected = Counter((f"p{i:03d}", s, rows(10, 8, 90)[i]["max_tokens"]) for i in range(10) for s in range(2))
    assert trained(folder) == expected
    again = live(folder, arguments)
    assert again.returncode == 0 and again.figures["trained"] == 20, "nothing is left to do, and nothing is done"
    other = live(folder, [*arguments, "--batch", "3"])
    assert other.returncode == 2 and "begun with other arguments: --" in other.text and ", now " in other.text


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    refused = live(tmp_path / "rl", ["--model", str(tmp_path / "nowhere")])
    assert refused.returncode == 2 and "is no model folder" in refused.text


def test_the_help_teaches_every_moment() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.rl", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0 and all(name in done.stdout for name in (*ALL, VARIABLE))


@pytest.mark.parametrize("wanted", ["nowhere", "saved:x", "saved:"])
def test_a_moment_that_is_none_is_refused(wanted: str) -> None:
    if wanted == "saved:":
        Moments(wanted)("leased")
        return
    with pytest.raises(ConfigError, match="is no moment"):
        Moments(wanted)


def test_a42_a_checkpoint_is_whole_or_not_there(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest() == (None, Anchor())

    def write(folder: Path) -> None:
        (folder / "weights").write_bytes(b"w")

    class Dies(Exception):
        pass

    def die() -> None:
        raise Dies

    for number in (1, 2, 3):
        checkpoints.save(Anchor(rollout=number, version=number), write, lambda: None)
    with pytest.raises(Dies):
        checkpoints.save(Anchor(rollout=4), write, die)
    again = Checkpoints(tmp_path)
    folder, anchor = again.newest()
    assert folder is not None and anchor.rollout == 3 and (folder / "weights").read_bytes() == b"w"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rollout-00000002", "rollout-00000003"]


def test_the_task_has_a_heavy_tail_and_a_reward_that_counts() -> None:
    lengths = sorted(row["max_tokens"] for row in rows(64, 8, 200))
    assert lengths[-1] == 200 and lengths[32] < 40 and len({row["id"] for row in rows(64, 8, 200)}) == 64
    assert reward("ab C1") == 0.4 and reward("") == 0.0
