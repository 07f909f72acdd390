"""What an engine was given to make more requests exact: asked for at its start, found out later.

Owns: the engine arguments of the plug-in, and reading from a started engine which parts of it are there.
Does not know: which requests need what (recovery.resume_table), how the parts work.

Invariants:
1. Only documented engine arguments are used; nothing of vLLM is replaced.
2. An ability is claimed only if the engine's own configuration shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module, metadata
from typing import Any

from recovery.resume_table import GENERATOR_DRAWS, GRAMMAR, POSITION_DRAWS, PREFIX_SAFE, TRUE_SPLIT

TRUE_SPLIT_CLASS = "vllm_hooks.logits:TrueSplit"
DRAWS_CLASS = "vllm_hooks.draws:PositionDraws"
_OURS = (DRAWS_CLASS, TRUE_SPLIT_CLASS)
SCHEDULER_CLASS = "vllm_hooks.scheduling.PrefixScheduler"
_RAW = ("raw_logprobs", "raw_logits")
"""With the other modes the engine reports what the sampler left, and ours leaves one token."""


def engine_arguments(**arguments: Any) -> dict[str, Any]:
    """`arguments` of a vLLM engine with the plug-in's parts added; for engines with the V1 runner.

    A speculative engine takes no custom logits processors, and is given none. The scheduler is for the CPU build, whose
    own is of the same kind.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and arguments.get("scheduler_cls") is None:
        arguments = {**arguments, "scheduler_cls": SCHEDULER_CLASS}
    if arguments.get("speculative_config"):
        return arguments
    listed = list(arguments.get("logits_processors") or ())
    return {**arguments, "logits_processors": [*listed, *(one for one in _OURS if one not in listed)]}


def abilities_of(engine: Any) -> frozenset[str]:
    """Keys of resume_table.ABILITIES that this engine has."""
    config = engine.vllm_config
    classes = list(_processors(config.model_config))
    found = set()
    scheduler = config.scheduler_config.scheduler_cls
    named = scheduler if scheduler is None or isinstance(scheduler, str) else _name(scheduler).replace(":", ".")
    if named == SCHEDULER_CLASS and not config.structured_outputs_config.reasoning_parser:
        found.add(GRAMMAR)
    if all(_is_prefix_safe(one) for one in classes):
        found.add(PREFIX_SAFE)
        if getattr(config, "use_v2_model_runner", False) or config.speculative_config:
            return frozenset(found)  # a V2 runner has processors of another kind, a speculative engine none
        if classes and _name(classes[-1]) == TRUE_SPLIT_CLASS:
            found.add(TRUE_SPLIT)
        if DRAWS_CLASS in map(_name, classes) and config.model_config.logprobs_mode in _RAW:
            found.add(POSITION_DRAWS)
            if _draws_by_kernel():
                found.add(GENERATOR_DRAWS)
    return frozenset(found)


def _processors(model_config: Any) -> Iterator[type]:
    """The custom logits processors in the order in which the engine runs them."""
    for entry in metadata.entry_points(group="vllm.logits_processors"):
        yield entry.load()
    for one in model_config.logits_processors or ():
        if isinstance(one, type):
            yield one
            continue
        module, _, name = one.partition(":")
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        yield found


def _draws_by_kernel() -> bool:
    """Whether the engine's own sampler is the CPU build's, which takes one number of a request's generator a token."""
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    current_platform.import_kernels()
    return hasattr(torch.ops._C, "fused_gumbel_argmax")


def _name(one: type) -> str:
    return f"{one.__module__}:{one.__qualname__}"


def _is_prefix_safe(one: type) -> bool:
    from vllm_hooks.logits import PrefixSafe

    return issubclass(one, PrefixSafe) or _name(one) in _OURS


def fields_of(engine: Any) -> Mapping[str, Any]:
    """What is recorded about the plug-in with a snapshot."""
    return {"engine.logits_processors": [_name(one) for one in _processors(engine.vllm_config.model_config)]}
