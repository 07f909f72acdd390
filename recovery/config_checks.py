"""Which values of a configuration cannot be run, or cannot be restored, together.

Owns: the refusals that need more than one field, and the list of what a batch job does not do.
Does not know: files, YAML, where a key stood (config.py adds it).

Invariants:
1. A refusal names the field to change, what was found, what is accepted, and what to do.
2. What a batch job cannot honour is refused for it, and only for it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

from recovery.config_forms import URL, FieldError

if TYPE_CHECKING:
    from recovery.config import CheckpointingConfig, JobConfig, LoopConfig, RolloutConfig

_STORE, _STAGING = "rollout_checkpointing.store", "rollout_checkpointing.staging"


class Unsupported(NamedTuple):
    """A value that is refused (None: every value but the field's default), and what to do instead."""

    path: str
    value: str | None
    instead: str


_NO_UPDATES = "a batch job has no weight updates: leave it out (recovery.admission.FullyAsyncRollout takes it)"

# What a batch job (`prefix-recovery run`) refuses.
NOT_OF_A_BATCH_JOB = (
    Unsupported("rollout.max_policy_version_lag", None, _NO_UPDATES),
    Unsupported("rollout.on_stale", None, _NO_UPDATES),
    Unsupported("rollout.stale_granularity", None, _NO_UPDATES),
    Unsupported("rollout.max_executing_groups", None, _NO_UPDATES),
    Unsupported("rollout.completed_prefetch_groups", None, _NO_UPDATES),
    Unsupported("rollout.staleness_headroom", None, _NO_UPDATES),
    Unsupported("rollout.max_pristine_requeues", None, _NO_UPDATES),
    Unsupported("rollout.escalate_to", None, _NO_UPDATES),
    Unsupported("rollout.async_buffer_max_groups", None, _NO_UPDATES),
)


def check_rollout(rollout: RolloutConfig, batch_groups: int = 1) -> None:
    """Refuse capacities under which a group would wait for ever, or a batch of so many groups never be put together."""
    slots, executing = rollout.completed_prefetch_groups, rollout.max_executing_groups
    if slots < executing:
        problem = f"found {slots}; accepted: at least max_executing_groups, {executing}"
        raise FieldError("rollout.completed_prefetch_groups", problem, "a group must never wait for its slot")
    lag, headroom = rollout.max_policy_version_lag, rollout.staleness_headroom
    if lag is not None and headroom > lag:
        problem = f"found {headroom}; accepted: at most max_policy_version_lag, {lag}"
        raise FieldError("rollout.staleness_headroom", problem, "with more, no prefix would ever be resumed")
    if rollout.escalate_to == "requeue_pristine":
        problem = "requeue_pristine is what is escalated from"
        raise FieldError("rollout.escalate_to", problem, "use wait_not_drop or resume_mixed")
    cap = rollout.async_buffer_max_groups
    if batch_groups < 1:
        raise FieldError("batch_groups", f"found {batch_groups}; accepted: at least 1")
    if slots < batch_groups:
        problem = f"found {slots}; accepted: at least the train batch, {batch_groups} groups"
        raise FieldError("rollout.completed_prefetch_groups", problem, "a batch holds a slot for each of its groups")
    if cap is not None and cap < batch_groups:
        problem = f"found {cap}; accepted: at least the train batch, {batch_groups} groups, or null"
        raise FieldError("rollout.async_buffer_max_groups", problem, "with less, no batch would ever be full")


def check_combinations(config: JobConfig, *, on: bool) -> None:
    """Refuse values that are fine alone and cannot be run, or restored, together. `on`: calls are captured."""
    check_rollout(config.rollout)
    block = config.rollout_checkpointing
    if "model" in config.engine:
        raise FieldError("engine.model", "is given twice", "remove it: the field `model` names the model")
    if config.sampling.get("n", 1) != 1:
        raise FieldError("sampling.n", "is not how samples are counted", "use samples_per_prompt")
    _check_ray(config, on)
    _check_store(block, on)
    if on and block.staging != "store" and not config.on_ray:
        problem = f"found {block.staging}, and this job runs in one process, which its queue would die with"
        raise FieldError(_STAGING, problem, "set workers: 2 (or more), or ray.address; or leave it out")
    _check_places(config, block.store if on else None)
    for row in NOT_OF_A_BATCH_JOB:
        _check_one(config, row)


def check_loop(config: LoopConfig, *, on: bool) -> None:
    """The same for a training loop of one's own."""
    check_rollout(config.rollout)
    _check_store(config.rollout_checkpointing, on)


def _check_ray(config: JobConfig, on: bool) -> None:
    if not config.on_ray:
        return
    if not on:
        problem = f"found {config.workers}, and rollout_checkpointing is off"
        raise FieldError(
            "workers", problem, "set rollout_checkpointing.enabled: true, or workers: 1 without ray.address"
        )
    if config.metrics is not None:
        raise FieldError("metrics", "is not served for workers on Ray", "leave it out")


def _check_store(block: CheckpointingConfig, on: bool) -> None:
    if on and block.store is None:
        raise FieldError(_STORE, "missing, and enabled is true", "e.g. store: s3://bucket/run-17, or a folder")
    if on and str(block.store).startswith("memory:"):
        problem = f"{block.store} does not survive a crash"
        raise FieldError(_STORE, problem, "use a folder or an s3:// URL")
    options = block.store_options.given()
    if on and block.staging != "store" and not block.gym.generation_chunk_flush_tokens:
        problem = f"found {block.staging}, and nothing is flushed between two snapshots"
        raise FieldError(_STAGING, problem, "set gym.generation_chunk_flush_tokens to 1 or more, or leave it out")
    if on and options and not str(block.store).lower().startswith("s3:"):
        problem = f"is given, and {block.store} is not on S3"
        raise FieldError(f"{_STORE}_options.{next(iter(options))}", problem, "only stores on s3:// have options")


def _check_one(config: JobConfig, row: Unsupported) -> None:
    value: Any = config
    block = getattr(config, row.path.partition(".")[0])
    default: Any = type(block)()
    for name in row.path.split("."):
        value = getattr(value, name)
    for name in row.path.split(".")[1:]:
        default = getattr(default, name)
    if (value != default) if row.value is None else (value == row.value):
        raise FieldError(row.path, f"{value} is not supported by this version", row.instead)


def _check_places(config: JobConfig, store: str | None) -> None:
    """Prompts and output are two files; the store is a folder that neither is, holds or lies in, nor the model's."""
    prompts, output = _place(config.prompts), _place(config.output)
    if prompts in (output, f"{output}.errors.jsonl"):
        raise FieldError("output", "would overwrite prompts", "give it another name")
    root = _place(store) if store else None
    if root and os.path.isdir(config.model):
        model = _place(config.model)
        if f"{root}/".startswith(f"{model}/") or model.startswith(f"{root}/"):
            what = "is the model's folder" if root == model else "and the model's folder lie in each other"
            raise FieldError(_STORE, what, "give the store a folder of its own")
    for name, file in (("prompts", prompts), ("output", output)):
        if root and f"{root}/".startswith(f"{file}/"):
            raise FieldError(_STORE, f"is {name} itself, or inside it", "give it a folder of its own")
        if root and file.startswith(f"{root}/"):
            raise FieldError(name, "is inside the store", "the store is a folder of its own: move one of them")


def _place(text: str) -> str:
    """A path or URL in a form that can be compared."""
    if text.startswith("file://"):
        text = url2pathname(urlsplit(text).path)
    return text.rstrip("/") if URL.match(text) else os.path.realpath(os.path.expanduser(text))
