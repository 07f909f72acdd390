"""What a job is on this machine, found out without starting its engine.

Owns: the fields that a restore compares, the stop rules and the prompts, as `run` would have them.
Does not know: stores, what is compared with what.

Invariant:
1. Every value is made by the code that `run` makes it with; nothing is guessed from the config's text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefix_recovery.engine import Unstarted
from prefix_recovery.engine_requests import Requests
from prefix_recovery.prompts import read_prompts
from recovery.config import JobConfig, load_config
from recovery.resume import StopRules


@dataclass(frozen=True, slots=True)
class JobHere:
    """`source_digests`: of every sample, by its name in the store."""

    must: Mapping[str, Any]
    recorded: Mapping[str, Any]
    stop: StopRules
    source_digests: Mapping[str, str]


def job_fields(config: JobConfig) -> dict[str, Any]:
    """Fields of which a difference refuses a restore, beside those of the engine."""
    return {"job.samples_per_prompt": config.samples_per_prompt}


def job_here(path: str) -> JobHere:
    """Reads the job file, the model's files and the prompts. Raises ConfigError."""
    from vllm_hooks.fingerprint import engine_fields
    from vllm_hooks.start import rules_of

    config = load_config(path)
    prompts = read_prompts(config.prompts)
    engine = Unstarted(config.model, config.engine)
    rules = rules_of(engine, config.rollout_checkpointing)
    must, recorded = engine_fields(engine, rules)
    requests = Requests(engine, config.sampling)
    samples = prompts.samples(config.samples_per_prompt)
    digests = {sample.name: requests.source_digest(sample.prompt) for sample in samples}
    return JobHere({**must, **job_fields(config)}, recorded, rules, digests)
