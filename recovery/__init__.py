"""The core: what is captured, how it is ordered, published and restored. It knows no engine and opens no store.

Owns: the public name of the core, `load_config` (loaded when it is first used: it alone needs more than numpy).
Does not know: vLLM, Arrow, disks; those live in `vllm_hooks` and `storage_backends`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recovery.config import load_config

__all__ = ["load_config"]


def __getattr__(name: str) -> Any:
    if name == "load_config":
        from recovery.config import load_config

        return load_config
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
