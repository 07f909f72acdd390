"""`prefix-recovery doctor CONFIG`: what would end a run at its start is found and named, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefix_recovery.cli import main
from storage_backends import open_store
from storage_backends.local import LocalStore
from storage_backends.testing import s3_proxy as faults
from storage_backends.testing.s3_proxy import Answer, FaultProxy, of, when
from storage_backends.testing.servers import BUCKET, KEY, Server
from tests.fake_engine import Life
from tests.job_files import write_job

pytest_plugins = ["storage_backends.testing.s3_fixtures"]

LINE = '{"id": "a", "prompt": "hello"}'
Said = Callable[..., tuple[int, str]]


@pytest.fixture
def said(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> Said:
    """Exit code and findings about the job itself, each with what to do about it on the same line."""
    (tmp_path / "model").symlink_to(tiny_model)
    config = write_job(tmp_path, tmp_path / "model", [LINE])

    def run(*arguments: str, **fields: Any) -> tuple[int, str]:
        if fields:
            write_job(tmp_path, tmp_path / "model", [LINE], **fields)
        code = main(["doctor", str(config), *arguments])
        text = capsys.readouterr().out.replace("\n      ", " -> ")
        return code, text[text.index("fail") if "can be read" not in text else text.index("can be read") :]

    return run


def set_store(address: object) -> tuple[str, str]:
    return "--set", f"rollout_checkpointing.store={address}"


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# ---- on disk ---------------------------------------------------------------------------------------------------------


def test_a_job_that_could_start(said: Said, tmp_path: Path) -> None:
    before = everything(tmp_path)
    code, text = said()
    assert code == 0 and "fail" not in text and "no store at" in text
    assert everything(tmp_path) == before


def test_set_and_flags_are_those_of_run(said: Said, tmp_path: Path) -> None:
    assert said("--set", f"model={tmp_path}/nowhere")[1].count(f"there is no model folder {tmp_path}/nowhere") == 1
    code, text = said("--rollout-checkpointing-keep-latest-k", "0")
    assert code == 1 and "keep_latest_k: found 0" in text


def test_the_store_is_the_models_folder(said: Said, tmp_path: Path) -> None:
    code, text = said(*set_store(tmp_path / "model"))
    assert code == 1 and "rollout_checkpointing.store: is the model's folder" in text and "-> give the store" in text


def test_the_output_is_a_directory_or_below_a_file(said: Said, tmp_path: Path) -> None:
    code, text = said("--set", f"output={tmp_path / 'model'}")
    assert code == 1 and f"the output {tmp_path / 'model'} is not a file -> check `output`" in text
    code, text = said("--set", f"output={tmp_path / 'prompts.jsonl' / 'out'}")
    assert code == 1 and "prompts.jsonl is a file, not a folder" in text


@pytest.mark.parametrize("field", ["output", "prompts", "rollout_checkpointing.store"])
def test_a_name_that_is_too_long_is_a_finding(said: Said, tmp_path: Path, field: str) -> None:
    code, text = said("--set", f"{field}={tmp_path}/{'n' * 300}")
    assert code == 1 and "too long" in text.lower()


def test_a_terminal_is_shown_no_control_characters(said: Said) -> None:
    code, text = said("--set", "\x1b[31m=1")
    assert code == 1 and "\x1b" not in text and "\\x1b[31m: unknown key" in text


@pytest.mark.parametrize("installed", [True, False])
def test_a_queue_that_is_configured_has_to_be_installed(
    said: Said, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    if not installed:
        monkeypatch.setitem(sys.modules, "transfer_queue", None)
    code, text = said(workers=2, block={"staging": "transfer_queue"})
    assert code == (0 if installed else 1), text
    expected = "TransferQueue 0." if installed else "needs transfer_queue, which is not installed -> pip install"
    assert expected in text


def test_a_store_that_is_a_file_or_a_dangling_link(said: Said, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    code, text = said(*set_store(tmp_path / "file"))
    assert code == 1 and "file is a file, not a folder" in text
    code, text = said(*set_store(tmp_path / "link"))
    assert code == 1 and "link is a symbolic link to nowhere, which does not exist" in text


def test_a_folder_of_other_files_is_worth_a_word(said: Said, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    code, text = said(*set_store(tmp_path / "mine"))
    assert code == 0 and "warn  " in text and "holds other files and no store" in text


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder with a store in it that may be read only: by a mount where that is possible, else by its mode."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    life = Life(LocalStore(folder), 1)
    life.close()
    mounted = subprocess.run(["mount", "--bind", folder, folder], capture_output=True).returncode == 0
    remount = ["mount", "-o", "remount,bind,ro", folder]
    if mounted and subprocess.run(remount, capture_output=True).returncode == 0:
        yield folder
        subprocess.run(["umount", folder], check=True)
        return
    if mounted:
        subprocess.run(["umount", folder], check=True)
    assert os.geteuid() != 0, "root may write into any folder that is not mounted read-only"
    folder.chmod(0o555)
    yield folder
    folder.chmod(0o755)


def test_a_store_that_may_only_be_read(said: Said, read_only: Path) -> None:
    code, text = said(*set_store(read_only))
    assert code == 1 and f"the store {read_only} can be read but not written: " in text
    assert "read-only" in text and "-> " in text
    code, text = said(*set_store(read_only / "new"))
    assert code == 1 and f"no store can be made at {read_only}/new" in text
    code, text = said("--set", f"output={read_only}/results.jsonl")
    assert code == 1 and f"the output {read_only}/results.jsonl: {read_only} " in text


def test_what_an_ordinary_user_may_not_write(said: Said, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        folder = tmp_path / "closed"
        folder.mkdir(mode=0o555)
        code, text = said(*set_store(folder))
    else:
        # Of root's folders an ordinary user may write none; the job's own folder has to be readable for it.
        with tempfile.TemporaryDirectory(dir="/tmp") as name:
            os.chmod(name, 0o755)
            job = Path(name)
            (job / "model").mkdir()
            (job / "model" / "config.json").write_text("{}")
            config = write_job(job, job / "model", [LINE])
            os.seteuid(65534)
            try:
                code, text = said_by(config)
            finally:
                os.seteuid(0)
    assert code == 1 and "may not be written by this user" in text and "ls -ld" in text


def said_by(config: Path) -> tuple[int, str]:
    from prefix_recovery.job_checks import check_job
    from recovery.config import load_config

    findings = list(check_job(load_config(config), config.parent))
    levels = {finding.level for finding in findings}
    return int("fail" in levels), "\n".join(f"{finding.what} -> {finding.todo}" for finding in findings)


def test_c14_doctor_shows_who_holds_a_store_and_who_was_fenced(said: Said, tmp_path: Path) -> None:
    """C14: nothing has to be unlocked; who took over from whom is read off the log."""
    store = LocalStore(open_store(tmp_path / "store", create=True).root)  # type: ignore[attr-defined]
    for number in (1, 2, 3):
        life = Life(store, number)
        life.dispatch()
        life.snapshot()
    code, text = said()
    assert code == 0
    assert "the last to claim the store was life 3 (claimed 2023-11-14 22:13:20Z) (epoch 3); whether it lives" in text
    assert text.index("fenced: life 2 ") < text.index("fenced: life 1 ")
    claims = [n for n in range(1, life.log.tail + 1) if b'"kind":"epoch"' in store.get(f"log/{n:012d}.json")]
    assert f"of epoch 2, by slot {claims[2]}" in text and f"of epoch 1, by slot {claims[1]}" in text


def test_a_damaged_log_is_a_finding(said: Said, tmp_path: Path) -> None:
    life = Life(open_store(tmp_path / "store", create=True), 1)
    life.close()
    (tmp_path / "store" / "log" / "000000000001.json").write_text("?")
    code, text = said()
    assert code == 1 and "log slot 1 is not JSON" in text and "snapshot-inspect verify" in text


# ---- in a bucket -----------------------------------------------------------------------------------------------------


@pytest.fixture
def url(s3_environment: Path, fresh_prefix: Callable[[], str]) -> str:
    return f"s3://{BUCKET}/{fresh_prefix()}"


def at(url: str, server: Server | FaultProxy, **options: Any) -> dict[str, Any]:
    return {"block": {"store": url, "store_options": {"endpoint_url": server.url, **options}}}


def test_a_bucket_is_tried_as_a_run_tries_it_and_nothing_is_left(said: Said, moto: Server, url: str) -> None:
    code, text = said(**at(url, moto))
    assert code == 0 and f"no store at {url} of {moto.url} yet" in text
    assert open_store(url, endpoint_url=moto.url).list("") == []


def test_credentials_that_may_only_read(said: Said, proxy: FaultProxy, url: str) -> None:
    proxy.plan = when(of("PutObject"), ever_after=Answer(403, "AccessDenied"))
    for exclusive in (False, True):
        code, text = said(**at(url, proxy, exclusive=exclusive))
        assert code == 1 and "fail  PutObject of s3://" in text and "-> allow s3:PutObject" in text
        assert f"for the access key {KEY}" in text


def test_wrong_credentials_are_named(said: Said, seaweedfs: Server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    code, text = said(**at(url, seaweedfs))
    assert code == 1 and "SignatureDoesNotMatch" in text and "use other credentials" in text


def test_a_bucket_or_server_that_is_not_there(said: Said, moto: Server, url: str, proxy: FaultProxy) -> None:
    code, text = said(**at("s3://no-such-bucket/x", moto))
    assert code == 1 and "has no bucket no-such-bucket -> make the bucket" in text
    proxy.close()
    code, text = said(**at(url, proxy))
    assert code == 1 and f"cannot reach {proxy.url}" in text


def test_f7_a_server_that_overwrites_is_refused_and_single_writer_mode_is_told(
    said: Said, proxy: FaultProxy, url: str
) -> None:
    proxy.plan = faults.ignoring_conditions
    code, text = said(**at(url, proxy))
    assert code == 1 and "silently ignores the condition" in text
    code, text = said(**at(url, proxy, exclusive=True))
    assert code == 0 and "warn  single-writer mode (store_options.exclusive): nothing keeps a second run" in text


def test_a_gpu_build_is_told_which_setting_makes_it_bit_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU build is told of VLLM_CPU_ATTN_SPLIT_KV; a GPU's setting is named, and whether it is there."""
    from prefix_recovery import doctor

    assert any("VLLM_CPU_ATTN_SPLIT_KV=0" in finding.what for finding in doctor._exactness())
    monkeypatch.setattr(doctor, "is_cpu_build", lambda: False)
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    (finding,) = doctor._exactness()
    assert finding.level == "warn" and "export VLLM_BATCH_INVARIANT=1" in finding.todo
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    (finding,) = doctor._exactness()
    assert finding.level == "ok" and not finding.todo
