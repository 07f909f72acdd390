"""A model that is not where the config says: the place is named, and the hub is asked at most once."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from prefix_recovery.cli import main
from prefix_recovery.model_place import check_model
from recovery.errors import ConfigError
from snapshot_inspect.cli import main as inspect
from storage_backends.local import LocalStore
from tests.inspect_stores import one_snapshot
from tests.job_files import write_job

NAME = "nobody-here/of-this-name"


class Hub:
    """A hub that has one model; `asked`: what for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        hub = self

        class Answers(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub.asked.append(self.path)
                self.send_response(404 if self.path.endswith(NAME) else 200)
                self.end_headers()

            def log_message(self, *words: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Answers)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_USE_MODELSCOPE", "HF_HUB_CACHE", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    thread = threading.Thread(target=hub.server.serve_forever, args=(0.01,))
    thread.start()
    yield hub
    hub.server.shutdown()
    thread.join()
    hub.server.server_close()


def test_a_folder_and_what_only_vllm_understands_are_not_asked_for(hub: Hub, tmp_path: Path) -> None:
    for model in (str(tmp_path), "s3://bucket/model", "somebody/model/file-Q4.gguf"):
        check_model(model, tmp_path)
    assert hub.asked == []


@pytest.mark.parametrize("model", ["./model", "../model", "/not/here", "a/b/c", "~/not-here", "models/"])
def test_what_looks_like_a_path_is_not_asked_for(hub: Hub, tmp_path: Path, model: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_model(model, tmp_path)
    place = Path(tmp_path, Path(model).expanduser()).resolve()
    assert caught.value.message == f"there is no model folder {place}" and "bring the folder" in caught.value.hint
    assert hub.asked == []


def test_a_name_is_asked_for_once(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_model("somebody/model", tmp_path)
    check_model("somebody/model-GGUF:Q4_K_M", tmp_path)
    assert hub.asked == ["/api/models/somebody/model", "/api/models/somebody/model-GGUF"]
    with pytest.raises(
        ConfigError, match=f"no model folder {tmp_path}/{NAME}, nor a model {NAME} on the hub"
    ) as caught:
        check_model(NAME, tmp_path)
    assert "has none (HTTP 404)" in caught.value.message
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="the hub's cache has nothing named"):
        check_model(NAME, tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "hub" / f"models--{NAME.replace('/', '--')}" / "snapshots").mkdir(parents=True)
    check_model(NAME, tmp_path)
    assert len(hub.asked) == 3


def test_a_hub_that_does_not_answer_is_told_by_every_verb_at_once(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """run, doctor and plan, in the same words, with the place where the folder was looked for: beside the config."""
    with socket.socket() as unheard:  # bound and not listening: nobody else gets the port, and nobody answers
        unheard.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unheard.getsockname()[1]}")
        config = write_job(tmp_path, Path(NAME), ['{"id": "a", "prompt": "hello"}'])
        (tmp_path / "store").mkdir()
        expected = f"there is no model folder {tmp_path}/{NAME}, nor a model {NAME} on the hub: http://127.0.0.1"
        assert main(["run", str(config)]) == 2
        assert expected in capsys.readouterr().err
        assert main(["doctor", str(config)]) == 1
        out = capsys.readouterr().out
        assert out.count(expected) == 1 and out.count("does not answer") == 1
    assert hub.asked == []


@pytest.mark.parametrize("endpoint", ["http://hub:abc", "http://hub:99999999", "hub", "http://[::1"])
def test_an_endpoint_that_is_none_is_said(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(ConfigError, match="no model folder"):
        check_model(NAME, tmp_path)


def test_with_a_store_each_verb_asks_once(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_job(tmp_path, Path(NAME), ['{"id": "a", "prompt": "hello"}'])
    (tmp_path / "store").mkdir()
    one_snapshot(LocalStore(tmp_path / "store"))
    for verb in ("plan", "explain"):
        assert inspect([verb, str(config)]) == 2
        assert f"there is no model folder {tmp_path}/{NAME}" in capsys.readouterr().err
    assert len(hub.asked) == 2
    assert main(["run", str(config)]) == 2
    assert f"there is no model folder {tmp_path}/{NAME}" in capsys.readouterr().err and len(hub.asked) == 3
