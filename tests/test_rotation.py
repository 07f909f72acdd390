"""recovery.rotation against a plain list: everything stays young, whatever comes, goes and grows."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from recovery.rotation import MAX_DEPTH, MIN_SHARE, ROTATION, Rotation

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 400)),
        st.tuples(st.just("grow"), st.integers(1, 300)),
        st.tuples(st.just("lose"), st.integers(0, 400)),
        st.tuples(st.just("fail"), st.just(0)),
        st.tuples(st.just("say"), st.integers(1, 90)),
    ),
    max_size=60,
)


@given(steps=STEPS)
def test_nothing_gets_older_than_the_bound(steps: list[tuple[str, int]]) -> None:
    sizes: dict[int, int] = {}
    said: dict[int, int] = {}
    rotation: Rotation[int] = Rotation(lambda thing: sizes.get(thing, 0))
    ordinal = made = 0
    for what, n in steps:
        if what == "add":
            sizes.update(dict.fromkeys(range(made, made + n), 1))
            made += n
        elif what == "grow" and sizes:
            sizes[min(sizes)] += n
        elif what == "lose":
            for thing in sorted(sizes)[: min(n, len(sizes) - 1)]:
                del sizes[thing]
        for number in range(n if what == "say" else 1):
            total = sum(sizes.values())
            due = rotation.due(total, ordinal + 1)
            assert rotation.due(total, ordinal + 1) == due
            assert set(due.things) <= sizes.keys() and len(set(due.things)) == len(due.things)
            if what == "fail" and not number:
                continue
            ordinal += 1
            whole = {*due.things, *(thing for thing in sizes if thing not in rotation)}
            oldest = rotation.oldest(whole)
            rotation.said(sorted(whole), ordinal, due.credit)
            said = {thing: said[thing] for thing in sizes if thing in said} | dict.fromkeys(whole, ordinal)
            assert said.keys() == sizes.keys()
            rest = [last for thing, last in said.items() if thing not in whole]
            assert oldest == min(rest, default=None)
            assert not rest or min(rest) >= ordinal - MAX_DEPTH
            assert total > MIN_SHARE or not rest


def test_what_is_said_again_is_a_share_of_the_whole() -> None:
    sizes = dict.fromkeys(range(1000), 20)
    rotation: Rotation[int] = Rotation(sizes.__getitem__)
    rotation.said(sizes, 1)
    units = []
    for ordinal in range(2, 200):
        due = rotation.due(20_000, ordinal)
        rotation.said(due.things, ordinal, due.credit)
        units.append(20 * len(due.things))
    assert max(units) <= 20_000 / ROTATION + 20
    assert abs(sum(units) / len(units) - 20_000 / ROTATION) < 20


def test_something_large_waits_until_its_share_has_come_together() -> None:
    sizes = {0: 10_000, **dict.fromkeys(range(1, 101), 10)}
    rotation: Rotation[int] = Rotation(sizes.__getitem__)
    rotation.said(sizes, 1)
    said = []
    for ordinal in range(2, 3 * ROTATION):
        due = rotation.due(11_000, ordinal)
        rotation.said(due.things, ordinal, due.credit)
        said.append(sum(sizes[thing] for thing in due.things))
    times = [ordinal for ordinal, size in enumerate(said) if size >= 10_000]
    assert len(times) in (2, 3, 4) and all(b - a > ROTATION // 2 for a, b in pairwise(times))
