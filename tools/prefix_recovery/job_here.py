"""What a job is on this machine, found out without starting its engine.

Owns: the fields that a restore compares, the stop rules and the prompts, as `run` would have them.
Does not know: stores, what is compared with what.

Invariant:
1. Every value is made by the code that `run` makes it with; nothing is guessed from the config's text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefix_recovery.engine import Unstarted
from prefix_recovery.engine_requests import Requests, check_sampling
from prefix_recovery.model_place import check_model
from prefix_recovery.prompts import PromptFile, Sample, read_prompts, source_digest
from recovery.config import JobConfig, load_config
from recovery.resume import StopRules


@dataclass(frozen=True, slots=True)
class JobHere:
    """`samples` and `source_digests`: of every sample, by its name in the store."""

    must: Mapping[str, Any]
    recorded: Mapping[str, Any]
    stop: StopRules
    samples: Mapping[str, Sample]
    source_digests: Mapping[str, str]
    requests: Requests


def job_fields(config: JobConfig) -> dict[str, Any]:
    """Fields of which a difference refuses a restore, beside those of the engine."""
    return {"job.samples_per_prompt": config.samples_per_prompt}


def job_here(path: str) -> JobHere:
    """Reads the job file, the model's files and the prompts. Raises ConfigError."""
    config = load_config(path)
    check_model(config.model, Path(path).parent)
    return job_of(config, read_prompts(config.prompts))


def job_of(config: JobConfig, prompts: PromptFile) -> JobHere:
    """Reads the model's files. Raises ConfigError for a model, engine argument or sampling that vLLM does not take."""
    from vllm_hooks.fingerprint import engine_fields
    from vllm_hooks.start import rules_of

    engine = Unstarted(config.model, config.engine)
    check_sampling(config.sampling)
    rules = rules_of(engine, config.rollout_checkpointing)
    must, recorded = engine_fields(engine, rules)
    requests = Requests(engine, config.sampling)
    samples = {sample.name: sample for sample in prompts.samples(config.samples_per_prompt)}
    digests = {name: source_digest(sample.prompt, config.sampling) for name, sample in samples.items()}
    return JobHere({**must, **job_fields(config)}, recorded, rules, samples, digests, requests)
