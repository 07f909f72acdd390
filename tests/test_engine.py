"""prefix_recovery.engine without an engine: what is set when the user said nothing."""

from __future__ import annotations

from prefix_recovery import engine


def test_the_share_of_memory_fits_what_is_free() -> None:
    share = engine._share_of_memory()
    assert 0 < share <= 0.5
