"""Kills of the OpenAI server at random moments, under clients that want whole messages: a part of tests/soak.py.

A few clients ask all the time, each for one message after the other, of random kinds. The server is killed with SIGKILL
at a random moment of its life, which hits its start too, and started again; some of the time a supervisor sends SIGTERM
first. Every message is compared with that of a server that nobody killed, except those drawn without a seed, which
their clients compare with what they had.

Owns: when a kill comes, what is asked for, the figures.
Does not know: how a server is started, what a client does while it is away.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from prefix_recovery.tiny import make_tiny_llama
from tests import spoken_reasoning
from tests.server_clients import REASONING, REQUESTS, STREAMED, Asking, Message, ask_all, client_of
from tests.server_process import ServerProcess, many_processes, one_process, serving

CLIENTS = 5
FLUSH = 64
TERM = 0.4
"""Of the kills that do not hit a start."""
KEY = "soak"
REASONS = (
    "--reasoning-parser", spoken_reasoning.NAME, "--reasoning-parser-plugin", str(Path(spoken_reasoning.__file__)),
)  # fmt: skip


@dataclass(slots=True)
class Figures:
    """`again_most`: the most tokens that a client had seen of a choice and one kill made the server generate again."""

    kills: int = 0
    kills_at_start: int = 0
    terms: int = 0
    messages: int = 0
    carried_on: int = 0
    again_most: int = 0
    over_the_bound: int = 0
    tokens_reused: int = 0
    problems: list[str] = field(default_factory=list)


class Clients:
    """Whoever asks; `uncut` has what each kind of message is."""

    def __init__(
        self,
        server: ServerProcess,
        rng: random.Random,
        requests: dict[str, dict[str, Any]],
        uncut: dict[str, Message],
        figures: Figures,
    ) -> None:
        self._server, self._rng, self._requests, self._uncut, self._figures = server, rng, requests, uncut, figures
        self._n = 0
        self.running: list[tuple[str, Asking]] = []
        self.seen: dict[str, int] = {}

    def top_up(self) -> None:
        """Look at who has ended, and send as many anew."""
        for kind, thread in [one for one in self.running if not one[1].is_alive()]:
            self.running.remove((kind, thread))
            self._judge(kind, thread)
        while len(self.running) < CLIENTS:
            self._start()

    def _start(self) -> None:
        kind = self._rng.choice(sorted(self._uncut))
        client, name = client_of(self._server, KEY, retries=1000), kind.replace(" ", "-")
        thread = Asking(client, self._requests[kind], f"soak-{self._n}-{name}", stream=kind in STREAMED)
        self._n += 1
        self.running.append((kind, thread))
        thread.start()

    def _judge(self, kind: str, thread: Asking) -> None:
        self._figures.messages += 1
        if thread.error is not None:
            self._figures.problems.append(f"{thread.name}: {thread.error!r}")
        elif kind != "unseeded" and thread.message.said() != self._uncut[kind].said():
            self._figures.problems.append(f"{thread.name} is another message than without a kill")

    def note_seen(self) -> None:
        self.seen = {one.name: one.message.n_tokens for kind, one in self.running if kind in STREAMED}

    def note_resumed(self, server: ServerProcess) -> None:
        """How far each that was running was carried on."""
        for name, n_seen in self.seen.items():
            with suppress(httpx.HTTPError):
                calls = server.get(f"/v1/recovery/attempts/{name}", KEY)["calls"]
                kept = min((call["resumed_at"][-1] if call["resumed_at"] else 0 for call in calls), default=0)
                if any(call["finish_reason"] and not call["resumed_at"] for call in calls):
                    continue  # it had ended; or it began anew and has ended since
                self._figures.carried_on += 1
                self._figures.again_most = max(self._figures.again_most, n_seen - kept)
                self._figures.over_the_bound += n_seen - kept > FLUSH
        self.seen = {}

    def finish(self, server: ServerProcess) -> None:
        for kind, thread in self.running:
            thread.whole(server)
            self._judge(kind, thread)


def lacking_reasoning(whole: dict[str, Message]) -> list[str]:
    """Kinds that are to have reasoning, and an answer behind it, and have not."""
    return [kind for kind in REASONING if kind in whole and not (whole[kind].reasoning[0] and whole[kind].text[0])]


def kill_servers(folder: Path, seed: int, kills: int, deadline: float | None) -> bool:
    """Whether every client got every message whole, of both servers. Prints the figures."""
    plain = kill_server(folder / "plain", f"servers {seed}", REQUESTS, (), kills, deadline)
    return kill_server(folder / "reasons", f"reasoning servers {seed}", REASONING, REASONS, kills, deadline) and plain


def kill_server(
    folder: Path,
    seed: str,
    requests: dict[str, dict[str, Any]],
    flags: tuple[str, ...],
    kills: int,
    deadline: float | None,
) -> bool:
    """Of one server with these flags."""
    began, rng, figures = time.monotonic(), random.Random(seed), Figures()
    folder.mkdir(parents=True, exist_ok=True)
    model = make_tiny_llama(folder / "model")
    settings = [
        f"rollout_checkpointing.{one}" for one in ("enabled=true", f"gym.generation_chunk_flush_tokens={FLUSH}")
    ]
    settings += [f"rollout_checkpointing.store={folder / 'store'}", "rollout_checkpointing.snapshot_interval_s=2"]
    clients: Clients | None = None
    life = 0
    while True:
        last = figures.kills >= kills or (deadline is not None and time.monotonic() > deadline)
        program = many_processes(model, 2) if rng.random() < 0.3 else one_process(model)
        with serving(folder, f"life-{life}", [*program, *flags, "--api-key", KEY], settings) as server:
            life += 1
            if clients is not None and not last and rng.random() < 0.2:
                time.sleep(rng.uniform(1.0, 15.0))
                figures.kills_at_start += 1
            else:
                server.wait_ready().get("/v1/recovery", KEY)  # once it answers, the process that captures is up
                if clients is None:
                    # all under attempt ids, since draws are the plug-in's
                    names = {kind: f"uncut-{kind.replace(' ', '-')}" for kind in requests}
                    whole = ask_all(client_of(server, KEY, retries=10), names, requests)
                    figures.problems += [f"no reasoning in {kind}" for kind in lacking_reasoning(whole)]
                    clients = Clients(server, rng, requests, whole, figures)
                clients.note_resumed(server)
                if last:
                    clients.finish(server)
                    figures.tokens_reused += server.get("/v1/recovery", KEY)["tokens_reused"]
                    break
                until = time.monotonic() + rng.uniform(0.1, 8.0)
                while time.monotonic() < until:
                    clients.top_up()
                    time.sleep(0.02)
                clients.note_seen()
                if rng.random() < TERM:
                    os.kill(server.process.pid, signal.SIGTERM)
                    figures.terms += 1
                    with suppress(subprocess.TimeoutExpired):
                        server.process.wait(rng.uniform(0.0, 10.0))
            server.kill()
            figures.kills += 1
    for problem in figures.problems:
        print(f"PROBLEM: {problem}")
    print(f"kills of {seed}: {figures}, {time.monotonic() - began:.0f} s", flush=True)
    return not figures.problems
