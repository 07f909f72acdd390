"""What a run tells its operator at its end and of its input, word by word, without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefix_recovery.cli import main
from prefix_recovery.prompts import read_prompts
from prefix_recovery.saving import stopped_line


def test_a_signal_says_that_the_last_snapshot_was_taken() -> None:
    assert stopped_line("SIGINT", 3, 12) == (
        "stopped by SIGINT; the last snapshot was taken (12); run the same command to continue (3 to go)"
    )
    assert stopped_line("SIGTERM", 1, None) == "stopped by SIGTERM; run the same command to continue (1 to go)"


def test_a_line_that_is_no_json_is_told_by_its_own_characters(tmp_path: Path) -> None:
    (tmp_path / "p").write_text('{"id": "a", "prompt": "x"}\n{"id": "b", "prompt" "x"}\nhello\n')
    file = read_prompts(tmp_path / "p")
    assert [(bad.line, bad.error) for bad in file.bad] == [
        (2, "the line is not JSON: expecting ':' delimiter at character 22"),
        (3, "the line is not JSON: expecting value at character 1"),
    ]


@pytest.mark.parametrize("verb", ["run", "doctor"])
def test_a_batch_job_is_offered_no_flag_that_it_refuses(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    text = capsys.readouterr().out
    assert "--rollout-checkpointing-store" in text and "--rollout-on-stale" not in text
    assert "--max-policy-version-lag" not in text
