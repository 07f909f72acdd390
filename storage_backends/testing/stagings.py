"""What every staging has to pass, and rows that fail on purpose.

Owns: StagingConformance, the contract of ports.Staging as tests; FaultyRows, what a queue may do to rows.
Does not know: any particular staging.

A subclass gives `make_rows`: fresh rows that nobody else uses. Every test gets a staging of its own over them.

Invariants:
1. No test depends on time: a delay is an event that the test sets.
2. Whatever FaultyRows does, a fetch gives the bytes that were staged, or raises ObjectMissing, DigestMismatch or
   StoreUnavailable.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recovery.errors import ConfigError, Damaged, DigestMismatch, ObjectMissing, StoreUnavailable
from recovery.ports import Staging
from storage_backends.stagings import CheckedStaging, Rows
from storage_backends.sums import crc32c
from storage_backends.testing.conformance import in_threads

FOREIGN = ["epoch", "seg/e000001/w0.00000000/00000001-00000000", "seg/e000001/w0.00000000/1-0000000g.arrow"]
"""Keys that end with no sum."""


def key_for(data: bytes, *, epoch: int = 1, writer: str = "w0.0a1b2c3d", flush: int = 1) -> str:
    """The key of a segment of these bytes."""
    return f"seg/e{epoch:06d}/{writer}/{flush:08d}-{flush:08x}-{crc32c(data):08x}.arrow"


class Fault(Enum):
    """What becomes of one row that is put, or of one call."""

    NONE = "none"
    DROP = "drop"
    """The put is acknowledged, and no row is kept."""
    GHOST = "ghost"
    """The key is listed, and has no row."""
    OVERWRITE = "overwrite"
    """Somebody else's row is put under the key, in silence."""
    ANOTHER = "another"
    """Of two rows one is given for the other."""
    TIMEOUT = "timeout"
    """Nobody answers; nothing was done."""
    LATE = "late"
    """Nobody answers, and it is done all the same."""


class FaultyRows:
    """Rows around others that do to each put what `plan` says next, NONE when it has ended."""

    def __init__(self, inner: Rows, plan: Sequence[Fault] = ()) -> None:
        self._inner = inner
        self._plan = iter(plan)
        self._ghosts: set[str] = set()
        self._swapped: dict[str, str] = {}
        self._last = ""
        self.dead = False
        """Nothing is answered from here on."""

    def put(self, key: str, data: bytes) -> None:
        self._alive()
        fault = next(self._plan, Fault.NONE)
        before, self._last = self._last, key
        match fault:
            case Fault.DROP:
                return
            case Fault.GHOST:
                self._ghosts.add(key)
                return
            case Fault.TIMEOUT:
                raise StoreUnavailable("nobody answers (on purpose)")
            case Fault.ANOTHER if before:
                self._swapped[key] = before
        self._inner.put(key, b"another's" + data[9:] if fault is Fault.OVERWRITE else data)
        if fault is Fault.LATE:
            raise StoreUnavailable("nobody answers (on purpose)")

    def get(self, key: str) -> bytes | None:
        self._alive()
        return None if key in self._ghosts else self._inner.get(self._swapped.get(key, key))

    def keys(self) -> Sequence[str]:
        self._alive()
        return [*self._inner.keys(), *self._ghosts]

    def clear(self, keys: Sequence[str]) -> None:
        self._alive()
        self._ghosts.difference_update(keys)
        self._inner.clear(keys)

    def _alive(self) -> None:
        if self.dead:
            raise StoreUnavailable("nobody answers (on purpose)")


class StagingConformance:
    """The contract of ports.Staging."""

    EXAMPLES = 25

    def make_rows(self) -> Rows:
        """New rows, that only this test uses; what others put is not seen."""
        raise NotImplementedError

    @pytest.fixture
    def rows(self) -> Rows:
        return self.make_rows()

    @pytest.fixture
    def staging(self, rows: Rows) -> Staging:
        return CheckedStaging(rows)

    def test_what_is_staged_is_listed_and_fetched(self, staging: Staging) -> None:
        said = [b"one", b"two" * 1000, bytes(range(256)) * 40]
        keys = [key_for(data, flush=k + 1) for k, data in enumerate(said)]
        for key, data in zip(keys, said, strict=True):
            staging.stage(key, data)
        assert list(staging.staged("seg/")) == keys
        assert [staging.fetch(key) for key in keys] == said

    def test_nothing_is_there_at_first(self, staging: Staging) -> None:
        assert list(staging.staged("")) == [] == list(staging.staged("seg/"))
        with pytest.raises(ObjectMissing):
            staging.fetch(key_for(b"x"))
        staging.drop([key_for(b"x")])
        staging.drop([])

    @pytest.mark.parametrize("nbytes", [0, 1, 4096, (3 << 20) + 1])
    def test_any_length_comes_back_as_it_was(self, staging: Staging, nbytes: int) -> None:
        data = random.Random(nbytes).randbytes(nbytes)
        staging.stage(key_for(data), data)
        assert staging.fetch(key_for(data)) == data

    def test_listing_is_by_prefix_and_in_order(self, staging: Staging) -> None:
        keys = [key_for(b"%d" % n, epoch=e, writer=w, flush=n) for e in (1, 2) for w in ("a.0", "b.0") for n in (1, 2)]
        for key in random.Random(7).sample(keys, len(keys)):
            staging.stage(key, b"%d" % int(key.split("/")[-1][:8]))
        assert list(staging.staged("seg/e000001/")) == sorted(keys[:4])
        assert list(staging.staged("seg/e000002/b.")) == sorted(keys[6:])
        assert list(staging.staged("seg/e000003/")) == []

    def test_what_is_dropped_is_gone_and_the_rest_is_not(self, staging: Staging) -> None:
        keys = [key_for(b"%d" % n, flush=n) for n in range(1, 5)]
        for n, key in enumerate(keys, 1):
            staging.stage(key, b"%d" % n)
        staging.drop([keys[0], keys[2], key_for(b"never")])
        assert list(staging.staged("")) == [keys[1], keys[3]]
        with pytest.raises(ObjectMissing):
            staging.fetch(keys[0])
        assert staging.fetch(keys[1]) == b"2"
        staging.stage(keys[0], b"1")  # and may come back
        assert staging.fetch(keys[0]) == b"1"

    def test_staging_the_same_again_changes_nothing(self, staging: Staging) -> None:
        for _ in range(3):
            staging.stage(key_for(b"same"), b"same")
        assert list(staging.staged("")) == [key_for(b"same")] and staging.fetch(key_for(b"same")) == b"same"

    def test_bytes_that_do_not_fit_their_key_are_refused_and_change_nothing(self, staging: Staging) -> None:
        staging.stage(key_for(b"right"), b"right")
        with pytest.raises(DigestMismatch):
            staging.stage(key_for(b"right"), b"wrong")
        assert staging.fetch(key_for(b"right")) == b"right"

    @pytest.mark.parametrize("key", FOREIGN)
    def test_a_key_without_a_sum_is_refused(self, staging: Staging, key: str) -> None:
        with pytest.raises(Damaged):
            staging.stage(key, b"x")
        assert list(staging.staged("")) == []

    @pytest.mark.parametrize("key", ["", "../a", "A", "a//b"])
    def test_what_is_no_key_is_refused(self, staging: Staging, key: str) -> None:
        with pytest.raises(ConfigError):
            staging.stage(key, b"x")
        with pytest.raises(ConfigError):
            staging.fetch(key)

    def test_an_overwritten_row_is_not_handed_out(self, staging: Staging, rows: Rows) -> None:
        staging.stage(key_for(b"mine"), b"mine")
        rows.put(key_for(b"mine"), b"theirs")
        with pytest.raises(DigestMismatch):
            staging.fetch(key_for(b"mine"))

    def test_foreign_rows_are_not_listed(self, staging: Staging, rows: Rows) -> None:
        rows.put("not-ours", b"x")
        staging.stage(key_for(b"mine"), b"mine")
        assert list(staging.staged("")) == [key_for(b"mine")]

    def test_many_writers_at_a_time_keep_apart(self, staging: Staging) -> None:
        def work(n: int) -> list[str]:
            keys = []
            for flush in range(1, 6):
                data = b"%d-%d" % (n, flush) * 50
                keys.append(key_for(data, writer=f"w{n}.00000000", flush=flush))
                staging.stage(keys[-1], data)
            return keys

        keys = [key for some in in_threads(4, work) for key in some]
        assert list(staging.staged("")) == sorted(keys)
        assert all(crc32c(staging.fetch(key)) == int(key[-14:-6], 16) for key in keys)

    def test_no_fault_of_the_rows_becomes_other_bytes(self) -> None:
        examples = settings(
            max_examples=self.EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None
        )

        @examples
        @given(st.lists(st.sampled_from(Fault), min_size=1, max_size=8))
        def check(plan: list[Fault]) -> None:
            staging = CheckedStaging(FaultyRows(self.make_rows(), plan))
            said: dict[str, bytes] = {}
            for n, fault in enumerate(plan, 1):
                data = b"segment %d " % n * 20
                key = key_for(data, flush=n)
                said[key] = data
                honest = fault is Fault.NONE or (fault is Fault.ANOTHER and n == 1)
                try:
                    staging.stage(key, data)
                except (ObjectMissing, DigestMismatch, StoreUnavailable):
                    assert not honest
                else:
                    assert honest
            for key in staging.staged("seg/"):
                with suppress(ObjectMissing, DigestMismatch):
                    assert staging.fetch(key) == said[key]

        check()
