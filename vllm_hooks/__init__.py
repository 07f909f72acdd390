"""Capture and resume on a vLLM engine. `RecoverableEngine(engine, session)` is the one thing most callers need.

Owns: the public names of this package.
Does not know: vLLM until an engine is handed in; importing this loads no engine.
"""

from vllm_hooks.capture import RecoverableEngine
from vllm_hooks.session import RecoverySession
from vllm_hooks.start import open_session

__all__ = ["RecoverableEngine", "RecoverySession", "open_session"]
