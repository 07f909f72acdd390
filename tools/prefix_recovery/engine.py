"""A vLLM engine for one job: environment, arguments, start, and what it left behind.

Owns: how AsyncLLM is made in this process, and the CPU build's settings that make it start fast and decode exactly.
Does not know: stores, prompts.

Invariants:
1. Engine arguments of the config are passed through; a name that this vLLM does not have is a ConfigError with the
   nearest one.
2. An environment variable that the user has set is never overwritten.
3. The engine's process is forked (which saves it the imports) only from a process of one thread.
4. Leftovers of the engine live in a temporary folder of their own, which is removed at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import gc
import logging
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from prefix_recovery.output_lock import FOLDER_PREFIX
from recovery.errors import ConfigError
from vllm_hooks.abilities import engine_arguments

CPU_ENVIRONMENT = {
    # One process less and one import of vLLM less; the engine core stays a process of its own.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Decode, batch and resume are then bit-identical on this path.
    "VLLM_CPU_ATTN_SPLIT_KV": "0",
    # The only compiled function of an eager engine is a logprob count; compiling it takes longer than it saves.
    "TORCHDYNAMO_DISABLE": "1",
    # Two spinning pools on few cores starve each other.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
_START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the CPU distribution."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return "cpu" in _version("vllm")
    return True


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def set_environment() -> None:
    """What vLLM reads at import. Call before the first import of vllm in this process."""
    for name, value in {**ENVIRONMENT, **(CPU_ENVIRONMENT if is_cpu_build() else {})}.items():
        os.environ.setdefault(name, value)
    level = os.environ["VLLM_LOGGING_LEVEL"].upper()
    if level in logging.getLevelNamesMapping():  # vLLM warns while it is imported, before it has set its own level
        logging.getLogger("vllm").setLevel(level)


class Engine:
    """A started AsyncLLM. `close` ends its processes and removes its temporary folder.

    `beside`: how many engines share this machine, this one among them.
    """

    def __init__(self, model: str, arguments: Mapping[str, Any], beside: int = 1) -> None:
        set_environment()
        self._folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        self._outer_tmpdir = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = str(self._folder)
        tempfile.tempdir = None
        try:
            self.llm: Any = _start(model, arguments, beside)
        except BaseException:
            self._remove_folder()
            raise

    @property
    def folder(self) -> Path:
        return self._folder

    def close(self) -> None:
        self.llm.shutdown()
        self.llm = None
        gc.collect()  # its finalizer fails noisily if the interpreter is what ends it
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._outer_tmpdir is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = self._outer_tmpdir
        tempfile.tempdir = None
        shutil.rmtree(self._folder, ignore_errors=True)


def _share_of_memory(engines: int) -> float:
    """Of each of some engines of the CPU build: together half of the machine at most, and never what others are using.

    vLLM's default is nearly all.
    """
    with open("/proc/meminfo", encoding="ascii") as file:
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in file}
    return round(min(0.5, 0.7 * sizes["MemAvailable"] / sizes["MemTotal"]) / engines, 3)


def default_arguments(arguments: Mapping[str, Any], beside: int = 1) -> dict[str, Any]:
    """What is given to vLLM where the config says nothing; `arguments` are the config's."""
    # vLLM's own default seed is the same at every start: a run that continues a job would repeat the random draws
    # of the run before it, and give siblings the same answer.
    defaults: dict[str, Any] = {
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": int.from_bytes(os.urandom(4), "little") >> 1,
    }
    if is_cpu_build():
        defaults |= {"enforce_eager": True}
        if "kv_cache_memory_bytes" not in arguments:
            defaults["gpu_memory_utilization"] = _share_of_memory(beside)
    return defaults


class Unstarted:
    """What an engine would say of itself, without starting it: its configuration and its tokenizer."""

    def __init__(self, model: str, arguments: Mapping[str, Any]) -> None:
        set_environment()
        chosen = os.environ.get(_START_METHOD)
        try:
            with _told(model):
                self.vllm_config = _arguments(model, arguments).create_engine_config()
        finally:
            if chosen is None:  # the CPU platform sets it while a configuration is made, as if a user had chosen
                os.environ.pop(_START_METHOD, None)

    def get_tokenizer(self) -> Any:
        from vllm.tokenizers import cached_tokenizer_from_config

        return cached_tokenizer_from_config(self.vllm_config.model_config)


def _start(model: str, arguments: Mapping[str, Any], beside: int) -> Any:
    with _told(model):
        chosen = os.environ.get(_START_METHOD)
        args = _arguments(model, arguments, beside)
        config = args.create_engine_config()
        if is_cpu_build() and chosen is None:
            # Set after the config was made: the CPU platform forces spawn while it is made. Fork inherits the imports.
            os.environ[_START_METHOD] = "fork" if may_fork() else "spawn"
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            return AsyncLLM.from_vllm_config(config, disable_log_stats=bool(args.disable_log_stats))
        finally:
            if chosen is None:  # the next engine of this process may have to start in another way
                os.environ.pop(_START_METHOD, None)


def may_fork() -> bool:
    """Whether an engine process forked from this one can decode.

    A fork has one thread and whatever state the others were in. libgomp is the worst: once torch computed on a pool of
    threads, the first parallel loop of the child waits for ever for threads that it does not have.
    """
    import torch

    return threading.active_count() == 1 and torch.get_num_threads() == 1


def _arguments(model: str, arguments: Mapping[str, Any], beside: int = 1) -> Any:
    """AsyncEngineArgs of a config's `engine`. Raises ConfigError for a name that this vLLM does not have."""
    # Deprecations inside vLLM and torch are not the reader's to mend.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm|torch")
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: F401  a broken installation is told here, not later
    except ImportError as error:
        raise ConfigError(
            f"vLLM cannot be imported: {error}",
            hint="install an engine: `make setup` for the CPU build, or `pip install vllm` on a GPU machine",
        ) from error
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ConfigError(
                f"engine.{name}: this vLLM has no such argument" + (f"; did you mean {near[0]}?" if near else ""),
                hint="engine arguments are passed to vLLM as they are",
            )
    given = {**default_arguments(arguments, beside), **arguments}
    return AsyncEngineArgs(model=model, **(engine_arguments(**given) if is_cpu_build() else given))


@contextlib.contextmanager
def _told(model: str) -> Iterator[None]:
    """What vLLM raises at a model or argument that it cannot use, as ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"the engine does not start with model {model!r}: {error}",
            hint="check `model` and `engine`; if memory is short, set engine.gpu_memory_utilization or "
            "engine.kv_cache_memory_bytes; `prefix-recovery model smollm2 DIR` makes a small real model",
        ) from error
