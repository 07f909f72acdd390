"""`/metrics` of a run, for a Prometheus scraper.

Owns: where it is served, and the samples about the job's results.
Does not know: what a session counts (vllm_hooks.session_metrics).

Invariants:
1. Loopback unless the address names another host. Port 0 takes a free one, and the address that was taken is told.
2. What cannot be served is a ConfigError before the engine starts.
3. A job without `metrics` neither imports prometheus_client nor opens a port.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from recovery.errors import ConfigError

if TYPE_CHECKING:
    from vllm_hooks.session import RecoverySession

LOOPBACK = "127.0.0.1"
_HOW = "a port (loopback), or HOST:PORT; port 0 takes a free one"


def read_address(text: str) -> tuple[str, int]:
    """`9400`, `0.0.0.0:9400`, `[::1]:0`. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or LOOPBACK
    if not (port.isascii() and port.isdigit()) or int(port) > 65535 or text.startswith(":"):
        raise ConfigError(f"metrics: {text!r} is no address to serve at", hint=f"write {_HOW}")
    return host, int(port)


class MetricsServer:
    """Serves from the start of a run to its end. `results` gives (results there, results wanted)."""

    def __init__(self, address: str, results: Callable[[], tuple[int, int]]) -> None:
        host, port = read_address(address)
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            raise ConfigError(
                "metrics need the package prometheus_client", hint="pip install 'prefix-recovery[metrics]'"
            ) from None
        self.registry = CollectorRegistry()
        self._results = results
        self._watched: Any = None
        self.registry.register(self)  # type: ignore[arg-type]
        try:
            self._server, self._thread = start_http_server(port, host, self.registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"metrics cannot be served at {host}:{port}: {error}", hint=f"write {_HOW}") from error
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_port}/metrics"

    def watch(self, session: RecoverySession) -> None:
        """From here on this session's counters are served too, in place of an earlier one's.

        One that captures nothing has none.
        """
        if self._watched is not None:
            self._watched.leave()
            self._watched = None
        if session.capturing:
            from vllm_hooks.session_metrics import SessionMetrics

            self._watched = SessionMetrics(session, self.registry)

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        done, wanted = self._results()
        yield GaugeMetricFamily("prefix_recovery_results", "Results in the job's output.", value=done)
        yield GaugeMetricFamily("prefix_recovery_results_wanted", "Results that the job asks for.", value=wanted)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
