"""Capture and resume on a vLLM engine: `open_session`, then `RecoverableEngine(engine, session)`.

Owns: the public names of this package.
Does not know: vLLM until an engine is handed in. The names are loaded when they are first used: vLLM imports this
package in each of its processes for the sake of plugin.py, and those need nothing else of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_hooks.abilities import engine_arguments
    from vllm_hooks.capture import RecoverableEngine
    from vllm_hooks.session import RecoverySession
    from vllm_hooks.start import open_session

__all__ = ["RecoverableEngine", "RecoverySession", "engine_arguments", "open_session"]

_HOMES = {
    "RecoverableEngine": "capture",
    "RecoverySession": "session",
    "engine_arguments": "abilities",
    "open_session": "start",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"vllm_hooks.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
