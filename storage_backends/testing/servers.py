"""Real S3 servers for tests, started and stopped by the test that uses them.

Owns: starting moto (fast) and SeaweedFS (another code base, on disk, checks signatures and sums), a bucket in them,
and a client of botocore's own, so that a store is not only tested against itself.
Does not know: what is tested.

Invariants:
1. A server listens on loopback only, on ports that nobody else takes meanwhile, and keeps its files in the folder that
   it was given.
2. A server ends with the process that started it, also if that one is killed: its keeper reads a pipe from it.
3. Nothing is found by name: what is ended is what was started here, by process group.

Usage: python -m storage_backends.testing.servers moto | seaweedfs FOLDER   (prints its port; ends with its stdin)
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEY, SECRET = "tester", "tester-secret"
REGION = "us-east-1"
BUCKET = "bucket"
DOMAIN = "s3.test"
"""Hosts below this name have to lead to loopback (tests see to it); what stands before it is a bucket's name."""

_FIRST_PORT, _LAST_PORT, _BLOCK = 20_000, 28_000, 8
_START_S = 240.0
_STOP_S = 10.0


@dataclass(slots=True)
class Server:
    """One running server."""

    name: str
    port: int
    process: subprocess.Popen[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def client(self) -> Any:
        """A client that has nothing in common with the store's but botocore."""
        return raw_client(self.url)

    def make_bucket(self, name: str) -> str:
        self.client.create_bucket(Bucket=name)
        return name

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@functools.cache
def raw_client(url: str) -> Any:
    """botocore's own client for a server here."""
    import botocore.session
    from botocore.config import Config

    client = botocore.session.Session().create_client(
        "s3",
        endpoint_url=url,
        region_name=REGION,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
    )
    client.meta.events.register("before-send.s3.PutObject", _without_expect)
    return client


def _without_expect(request: Any, **about: Any) -> None:
    """Do not wait to be asked for the body: botocore misreads a server that asks later than after one second."""
    request.headers.pop("Expect", None)


def start_moto() -> Server:
    """A server in the memory of a process of its own: ready in a second."""
    return _start("moto")


def start_seaweedfs(folder: Path) -> Server:
    """A server on disk in `folder`: ready in about four seconds."""
    return _start("seaweedfs", str(folder))


def _start(name: str, *arguments: str) -> Server:
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, name, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    server = Server(name, int(line) if line.strip().isdigit() else 0, process)
    if not server.port:
        server.stop()
        raise RuntimeError(f"{name} did not start; its own messages are above, or in its folder: {arguments}")
    return server


# ---- the keepers: they run in a process of their own -----------------------------------------------------------------


@contextmanager
def claimed_ports(n: int) -> Iterator[list[int]]:
    """Up to eight ports of loopback that nobody listens on, and that no other claim has for the time of the block.

    They are below those that a system gives to whoever asks for any: one of those, once let go, may be anybody's.
    """
    folder = Path(tempfile.gettempdir(), f"prefix-recovery-ports-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    for first in range(_FIRST_PORT, _LAST_PORT, _BLOCK):
        with Path(folder, str(first)).open("a") as claim:
            try:
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for port in range(first, first + n):
                    with socket.socket() as probe:
                        probe.bind(("127.0.0.1", port))
            except OSError:  # claimed by another, or somebody listens there
                continue
            yield list(range(first, first + n))
            return
    raise RuntimeError(f"no {n} ports are free between {_FIRST_PORT} and {_LAST_PORT}")


def _keep_moto() -> None:
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    _say_and_wait(server.get_host_and_port()[1])


def _keep_seaweedfs(folder: str) -> None:
    with claimed_ports(8) as ports:
        _keep_seaweedfs_on(folder, ports)


def _keep_seaweedfs_on(folder: str, ports: list[int]) -> None:
    master, master_grpc, volume, volume_grpc, filer, filer_grpc, port, port_grpc = ports
    accounts = Path(folder, "accounts.json")
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    account = {"name": KEY, "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": actions}
    accounts.write_text(json.dumps({"identities": [account]}))
    options = {
        "dir": folder, "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "master.telemetry": "false",
        "master.port": master, "master.port.grpc": master_grpc, "master.volumeSizeLimitMB": 64,
        "volume.port": volume, "volume.port.grpc": volume_grpc, "volume.max": 400,
        "filer.port": filer, "filer.port.grpc": filer_grpc, "filer.localSocket": f"{folder}/filer.sock",
        "s3.port": port, "s3.port.grpc": port_grpc, "s3.port.iceberg": 0, "s3.port.lance": 0,
        "s3.localSocket": f"{folder}/s3.sock", "s3.config": accounts, "s3.autoCreateBucket": "false",
        "s3.domainName": DOMAIN,
    }  # fmt: skip
    weed = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed") or "weed"
    with open(Path(folder, "weed.log"), "w") as log:
        process = subprocess.Popen(
            [weed, "-logtostderr=true", "server", "-s3", *(f"-{name}={value}" for name, value in options.items())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            env={**os.environ, "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"},
            preexec_fn=_die_with_parent,
        )
    try:
        _wait_until_healthy(process, port, Path(folder, "weed.log"))
        _say_and_wait(port)
    finally:
        process.kill()
        process.wait()
        sockets = {"master": master_grpc, "volume": volume_grpc, "filer": filer_grpc, "s3": port_grpc}
        for part, number in sockets.items():
            with suppress(OSError):  # their place cannot be chosen
                os.unlink(f"/tmp/seaweedfs-{part}-grpc-{number}.sock")


def _die_with_parent() -> None:
    set_death_signal = 1
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + _START_S
    while True:
        with suppress(OSError):
            opener.open(f"http://127.0.0.1:{port}/healthz", timeout=2).close()
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"seaweedfs did not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.05)


def _say_and_wait(port: int) -> None:
    """Say where the server listens, and return when whoever started this is gone or wants it gone."""
    print(port, flush=True)
    with suppress(KeyboardInterrupt):
        sys.stdin.read()


def main() -> None:
    match sys.argv[1:]:
        case ["moto"]:
            _keep_moto()
            os._exit(0)  # its threads are not waited for
        case ["seaweedfs", folder]:
            _keep_seaweedfs(folder)
        case _:
            raise SystemExit(f"usage: python -m {__spec__.name if __spec__ else __name__} moto | seaweedfs FOLDER")


if __name__ == "__main__":
    main()
