"""recovery.layout: what is made here is recognised here, and everything else is foreign."""

from __future__ import annotations

import pytest

from recovery import layout, log


def test_made_keys_are_recognised() -> None:
    stem = layout.segment_stem(12, "w0.1a2b3c4d", 7, "0011aabb")
    assert stem == "seg/e000012/w0.1a2b3c4d/00000007-0011aabb"
    key = f"{stem}-deadbeef.arrow"
    assert layout.segment_position(key) == layout.SegmentPosition(12, "w0.1a2b3c4d", 7)
    keys = [
        key,
        layout.ledger_key(12, "0123456789abcdef", "arrow"),
        layout.state_key(12, "data-source", "0123456789abcdef"),
        layout.garbage_key(12, "0123456789abcdef"),
        layout.segment_stem(1234567, "gpu-3.rank.0.00000000", 123456789, "00000000") + "-00000000.zip",
    ]
    assert [layout.epoch_of(key) for key in keys] == [12, 12, 12, 12, 1234567]
    assert [key.startswith(prefix) for key, prefix in zip(keys, layout.PREFIXES, strict=False)] == [True] * 4


def test_what_extends_a_snapshot_was_flushed_in_its_epoch_after_it_and_not_by_compaction() -> None:
    flushed = {"w0.1a2b3c4d": 7}
    for position, extends in (
        (layout.SegmentPosition(3, "w0.1a2b3c4d", 7), False),
        (layout.SegmentPosition(3, "w0.1a2b3c4d", 8), True),
        (layout.SegmentPosition(3, "w1.1a2b3c4d", 1), True),
        (layout.SegmentPosition(2, "w0.1a2b3c4d", 8), False),
        (layout.SegmentPosition(4, "w0.1a2b3c4d", 8), False),
        (layout.SegmentPosition(3, "compacted.1a2b3c4d", 8), False),
    ):
        assert position.extends(3, flushed) is extends, position
        key = layout.segment_stem(position.epoch, position.writer, position.flush, "0" * 8)
        assert key.startswith(layout.segments_of(position.epoch))
        assert key.startswith(layout.segments_of(position.epoch, position.writer))


@pytest.mark.parametrize(
    "key",
    [
        "seg/e000001/w0.1a2b3c4d/00000007-0011aabb-deadbeef.arrow.backup.tmp",
        "seg/e000001/w0.1a2b3c4d/00000007-0011aabb-deadbeef",
        "seg/e1/w0.1a2b3c4d/00000007-0011aabb-deadbeef.arrow",
        "seg/e000001/w0/00000007-0011aabb-deadbeef.arrow",
        "seg/e000001/00000007-0011aabb-deadbeef.arrow",
        "seg/e000001/w0.1a2b3c4d/7-0011aabb-deadbeef.arrow",
        "seg/e000001/w0.1a2b3c4d/lost-found",
        "seg/readme",
        "ledger/e000001/notes.txt",
        "ledger/e000001/0123456789abcdef",
        "state/e000001/job.json",
        "gc/e000001/0123456789abcdef.json.backup",
        "gc/ds_store",
        "hint",
        "format.json",
        log.slot_key(3),
        "",
    ],
)
def test_n1_foreign_names_are_foreign(key: str) -> None:
    assert layout.epoch_of(key) is None and layout.segment_position(key) is None
