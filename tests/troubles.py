"""What may be wrong around a job while it is killed again and again: its disk, its bucket, its clock.

Owns: making the trouble, at moments that the generator it is given draws, and ending it.
Does not know: jobs, kills. A job is told where its store is, in which environment and by which program it is run.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from storage_backends.testing import s3_proxy as faults
from storage_backends.testing import servers
from storage_backends.testing.s3_proxy import Fault, FaultProxy, Seen
from tests.job_processes import COMMAND
from tests.small_disk import SmallDisk, small_disk

CODES = {0, 20}
"""With which a run in trouble may end by itself: done, or the store is out of reach or full."""

_CLOCK = """
import random, runpy, time
draws, real, ahead = random.Random({seed!r}), time.time, 0.0
def jumping():
    global ahead
    if draws.random() < 0.02:
        ahead = draws.uniform(-86400, 86400)
    return real() + ahead
time.time = jumping
runpy.run_module("prefix_recovery", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True, slots=True)
class Trouble:
    """`over` ends it: what comes after has to go well."""

    name: str
    store: str = "store"
    environment: Mapping[str, str] = field(default_factory=dict)
    program: Sequence[str] = COMMAND
    over: threading.Event = field(default_factory=threading.Event)


CALM = Trouble("calm")


@contextmanager
def disk(folder: Path, rng: random.Random) -> Iterator[Trouble | None]:
    """The store is on a disk that is full for some seconds, again and again. None where mounting is not permitted."""
    folder.mkdir(parents=True)
    with small_disk(folder, megabytes=64) as small:
        if small is None:
            yield None
            return
        trouble = Trouble("disk full", store=str(folder / "store"))
        filling = threading.Thread(target=_fill, args=(small, trouble.over, rng.random()), daemon=True)
        filling.start()
        try:
            yield trouble
        finally:
            trouble.over.set()
            filling.join()


def _fill(small: SmallDisk, over: threading.Event, seed: float) -> None:
    draws = random.Random(seed)
    while not over.wait(draws.uniform(2, 15)):
        small.fill()
        over.wait(draws.uniform(1, 8))
        small.free()


@contextmanager
def endpoint(folder: Path, rng: random.Random) -> Iterator[Trouble]:
    """The store is in a bucket whose server is busy, drops connections, loses answers, cuts them short, garbles."""
    folder.mkdir(parents=True)
    draws = random.Random(rng.random())
    kinds: list[Fault] = [
        faults.SLOW_DOWN,
        faults.DropBefore(),
        faults.DropAfter(),
        faults.CutShort(10),
        faults.Garble(),
    ]
    server = servers.start_seaweedfs(folder)
    try:
        server.make_bucket(servers.BUCKET)
        over = threading.Event()

        def plan(seen: Seen) -> Fault:
            return faults.PASS_ON if over.is_set() or draws.random() > 0.05 else draws.choice(kinds)

        with FaultProxy(server.url, plan) as proxy:
            environment = {
                "AWS_ENDPOINT_URL": proxy.url,
                "AWS_ACCESS_KEY_ID": servers.KEY,
                "AWS_SECRET_ACCESS_KEY": servers.SECRET,
                "AWS_REGION": servers.REGION,
                "AWS_EC2_METADATA_DISABLED": "true",
            }
            yield Trouble("endpoint faults", f"s3://{servers.BUCKET}/job", environment, over=over)
    finally:
        server.stop()


@contextmanager
def clock(folder: Path, rng: random.Random) -> Iterator[Trouble]:
    """The time of day jumps by up to a day, there and back."""
    yield Trouble("clock jumps", program=("-c", _CLOCK.format(seed=rng.random())))
