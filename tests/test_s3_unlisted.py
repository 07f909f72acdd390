"""S6: a store on S3 under a policy without s3:ListBucket, where 403 stands for what is not there, too."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from recovery.errors import CredentialsRefused, Fenced, NotFoundOrRefused
from recovery.log import slot_key
from recovery.log_reading import find_tail
from snapshot_inspect import cli
from storage_backends.s3 import S3Store
from storage_backends.testing import s3_proxy as faults
from storage_backends.testing.s3_proxy import FaultProxy
from storage_backends.testing.servers import BUCKET, Server
from tests.fake_engine import Life, reference_answers
from tests.lives import ids, objects_of, worked
from tests.log_stores import all_slots

pytest_plugins = ["storage_backends.testing.s3_fixtures"]
pytestmark = pytest.mark.usefixtures("s3_environment")


class Place:
    """One store, as its owner sees it (`whole`) and as somebody sees it who may not list (`unlisted`)."""

    def __init__(self, server: Server, proxy: FaultProxy, prefix: str) -> None:
        self.proxy, self.url = proxy, f"s3://{BUCKET}/{prefix}"
        self.whole = S3Store(BUCKET, prefix, endpoint_url=server.url)
        self.unlisted = S3Store(BUCKET, prefix, endpoint_url=proxy.url)


@pytest.fixture
def place(request: pytest.FixtureRequest, fresh_prefix: Callable[[], str]) -> Iterator[Place]:
    server: Server = request.getfixturevalue(getattr(request, "param", "moto"))
    with FaultProxy(server.url, faults.unlisted) as proxy:
        yield Place(server, proxy, fresh_prefix())


@pytest.mark.parametrize("place", ["moto", "seaweedfs"], indirect=True)
def test_s6_a_restore_by_exact_id_works_and_so_does_the_job_after_it(place: Place) -> None:
    """Claim, restore, snapshots, the look at the log before each row, fencing: all without a list."""
    life = worked(place.whole)
    wanted = ids(life)[-1]
    again = Life(place.unlisted, 2, choice=wanted)
    assert again.restored.snapshot == wanted and again.chosen_content == life.published[wanted]
    assert isinstance(again.restored.uncollected, CredentialsRefused), "garbage is left to who may list"
    again.log.check_not_fenced()
    assert again.run_to_end() == reference_answers()
    all_slots(place.whole)
    heir = Life(place.whole, 3)
    with pytest.raises(Fenced):
        again.log.check_not_fenced()
    assert isinstance(again.snapshot().error, Fenced)
    assert heir.answers() == reference_answers()


def test_s6_what_needs_a_list_says_so_and_is_not_called_corrupt(place: Place) -> None:
    """`auto` adopts what was flushed later, which only a list shows: refused, with the way that needs none."""
    worked(place.whole)
    with pytest.raises(CredentialsRefused, match=r"ListObjectsV2 of .*/seg/e000001") as caught:
        Life(place.unlisted, 2)
    assert caught.value.exit_code == 12
    assert "s3:ListBucket" in caught.value.hint and "restore: ID" in caught.value.hint


@pytest.mark.parametrize("what", ["seg/", "ledger/"])
def test_s6_a_missing_object_is_not_found_or_not_permitted(place: Place, what: str) -> None:
    """Nothing can be concluded from 403: no older snapshot is taken instead, nothing is called damaged."""
    life = worked(place.whole)
    newest = ids(life)[-1]
    place.whole.delete(next(key for key in objects_of(place.whole, newest) if key.startswith(what)))
    with pytest.raises(NotFoundOrRefused, match=rf"GetObject of .*/{what}.*not found or no permission") as caught:
        Life(place.unlisted, 2, choice=newest)
    assert caught.value.exit_code == 12 and "s3:ListBucket" in caught.value.hint


def test_s6_the_tail_is_found_by_reading_alone(place: Place) -> None:
    life = worked(place.whole, n_snapshots=5)
    tail = life.log.tail
    for hint in (None, b'{"tail": 1}', b'{"tail": 4}', b'{"tail": 900}', b"?"):
        place.whole.delete("hint") if hint is None else place.whole.put("hint", hint)
        assert find_tail(place.unlisted) == find_tail(place.unlisted, trust_hint=False) == tail
    for seq in range(1, tail + 1):
        place.whole.delete(slot_key(seq))
    with pytest.raises(NotFoundOrRefused, match="not found or no permission"):
        find_tail(place.unlisted)


def test_s6_who_may_only_read_can_look(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    life = worked(place.whole)
    monkeypatch.setenv("AWS_ENDPOINT_URL", place.proxy.url)
    assert cli.main(["latest", place.url]) == 0
    assert re.search(rf"snapshot +{ids(life)[-1]}\b", capsys.readouterr().out)
    assert cli.main(["show", place.url, str(ids(life)[-1])]) == 0
    capsys.readouterr()
    assert cli.main(["verify", place.url]) == 12
    assert "s3:ListBucket" in capsys.readouterr().err
