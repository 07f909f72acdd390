"""Two coordinator processes on one store, one of them stopped and woken: a hundred in `make soak-parts`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from storage_backends.testing.servers import Server
from tests.racing import WAYS, Figures, Place, Plan, play

pytest_plugins = ["storage_backends.testing.s3_fixtures"]
pytestmark = pytest.mark.usefixtures("s3_environment")


@pytest.mark.parametrize(("kind", "ways"), [("disk", WAYS), ("moto", ("before",)), ("seaweedfs", ("after",))])
def test_c4_c8_c14_a_coordinator_that_is_stopped_is_replaced_and_wakes_fenced(
    request: pytest.FixtureRequest, tmp_path: Path, rng: random.Random, kind: str, ways: tuple[str, ...]
) -> None:
    """C4, C8, C14: SIGSTOP at any moment, or between the create of a slot and its answer; another process takes over at
    once and by itself; the first one wakes, and ends fenced. No snapshot is lost or doubled, ids are in the order of
    publication, and neither deletes what the other needs."""
    place = Place(kind, tmp_path)
    if kind != "disk":
        server: Server = request.getfixturevalue(kind)
        place.server = server.url
    figures = Figures()
    plans = [Plan.drawn(rng, way) for way in ways]
    for plan in plans:
        play(place, plan, figures)
    print(figures)
    assert figures.fenced == figures.rounds == len(ways)
    assert figures.acknowledged >= sum(plan.least for plan in plans)
