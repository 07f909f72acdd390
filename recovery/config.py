"""The configuration of a job: its fields, their defaults, and which of them go together.

Owns: every block and field, the ways to read and write them.
Does not know: how text becomes a tree and a tree a block (config_forms.py), whether a store or model exists.

Invariants:
1. A JobConfig from `load_config` or `parse_config` can be run and restored: what cannot is refused, by name.
2. Off by default: unless `enabled`, nothing of the block `rollout_checkpointing` is used, whatever the mode.
3. No value is ignored: what a batch job cannot honour is a row of NOT_OF_A_BATCH_JOB, and nowhere else.
4. A loaded path does not depend on the folder that the command is started in.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, field

from recovery import config_forms as forms
from recovery.config_checks import check_combinations, check_loop
from recovery.config_forms import Block, FieldError
from recovery.errors import ConfigError

Tree = dict[str, Any]
Mode = Literal["off", "turn", "prefix_recovery"]
Policy = Literal["reject", "requeue_pristine", "resume_mixed", "resume_masked", "pin_weights", "wait_not_drop"]
Granularity = Literal["prompt_group", "sibling"]
Text = Annotated[str, Meta(min_length=1)]
Whole = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
YEAR_S = 366 * 24 * 3600  # a larger number of seconds is a mistaken unit
Duration = Annotated[float, Meta(gt=0, le=YEAR_S)]


class GymConfig(Block, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is captured while a call is generated, and how often it leaves the process."""

    AT: ClassVar[str] = "rollout_checkpointing.gym"

    mode: Annotated[Mode, Meta(description="What survives: nothing, turns, tokens.")] = "prefix_recovery"
    generation_chunk_flush_tokens: Annotated[Whole, Meta(description="New tokens in a flush; 0: at cuts only.")] = 256

    @classmethod
    def spelled(cls, name: str, value: Any) -> Any:
        """`mode: off` is a boolean to YAML, and means off all the same."""
        if name == "mode" and value is True:
            problem = "found true, which is how YAML reads on and yes; accepted: off, turn, prefix_recovery"
            raise FieldError(f"{cls.AT}.mode", problem, hint="write mode: prefix_recovery")
        return "off" if name == "mode" and value is False else value


_NO_SECRETS = "credentials do not belong in a job file: set AWS_ACCESS_KEY_ID and its like, or name a profile"


class StoreOptions(Block, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a store on S3 is reached; what is not said here is looked up in the environment (docs/s3.md).

    The names and defaults are those of storage_backends.s3_options.S3Options; a test compares the two.
    """

    AT: ClassVar[str] = "rollout_checkpointing.store_options"
    ELSEWHERE: ClassVar[Mapping[str, str]] = dict.fromkeys(("key", "secret", "token"), _NO_SECRETS)

    endpoint_url: Annotated[Text | None, Meta(description="Address of the server; null: AWS_ENDPOINT_URL.")] = None
    region: Annotated[Text | None, Meta(description="The bucket's region; null: AWS_REGION.")] = None
    addressing: Annotated[
        Literal["auto", "path", "virtual"], Meta(description="Where the bucket's name goes: path or host name.")
    ] = "auto"
    profile: Annotated[Text | None, Meta(description="Profile of AWS's own files; null: AWS_PROFILE.")] = None
    connect_timeout_s: Annotated[Duration, Meta(description="Of one request.")] = 5.0
    read_timeout_s: Annotated[Duration, Meta(description="Of one request; a large one is given more.")] = 20.0
    retry_for_s: Annotated[Duration, Meta(description="Patience of one call with a busy server.")] = 20.0
    max_connections: Annotated[Positive, Meta(description="At the same time, per process.")] = 64
    exclusive: Annotated[bool, Meta(description="Promise that nothing else writes: single writer, no fencing.")] = False

    def given(self) -> Tree:
        """The options that are not the default, as `open_store` takes them."""
        fields = msgspec.structs.fields(self)
        return {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}

    def warning(self, store: str) -> str:
        """What people must be told of the options for `store`; empty if nothing."""
        if not self.exclusive:
            return ""
        lost = "if one is started while another still lives, acknowledged work can be lost"
        return f"single-writer mode (store_options.exclusive): nothing keeps a second run away from {store}; {lost}"


class CheckpointingConfig(Block, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Snapshots: where they go, how often they are taken, what a restart does with them."""

    AT: ClassVar[str] = "rollout_checkpointing"

    enabled: Annotated[bool, Meta(description="Switches the block on; without it the mode is off.")] = False
    store: Annotated[Text | None, Meta(description="Folder or URL, the store root of this job alone.")] = None
    store_options: Annotated[StoreOptions, Meta(description="How a store on S3 is reached.")] = StoreOptions()
    codec: Annotated[Literal["arrow", "zarr"], Meta(description="Encoding of new segments.")] = "arrow"
    gym: Annotated[GymConfig, Meta(description="What is captured during generation.")] = GymConfig()
    staging: Annotated[
        Literal["store", "transfer_queue"],
        Meta(description="Where flushes wait for a snapshot: in the store, or in a TransferQueue on Ray."),
    ] = "store"
    snapshot_interval_s: Annotated[Duration, Meta(description="Seconds between two snapshots.")] = 60.0
    snapshot_timeout_s: Annotated[Duration, Meta(description="Seconds until a snapshot is abandoned.")] = 30.0
    keep_latest_k: Annotated[Positive, Meta(description="Snapshots kept; two are recommended.")] = 2
    restore: Annotated[
        Literal["auto", "never", "strict"] | Positive,
        Meta(description="The newest usable snapshot, none, the newest or fail, or the one with this id."),
    ] = "auto"
    unresumable: Annotated[
        Literal["restart", "refuse", "redraw"],
        Meta(description="Requests that cannot resume exactly; redraw: sampled ones go on with other draws."),
    ] = "restart"
    draws: Annotated[
        Literal["position", "engine"],
        Meta(description="What draws for sampled calls: seed and position (needs the plug-in), or the engine."),
    ] = "position"
    grace_s: Annotated[
        float, Meta(ge=0, le=YEAR_S, description="Seconds that the last snapshot may take after SIGTERM.")
    ] = 20.0

    @classmethod
    def spelled(cls, name: str, value: Any) -> Any:
        """A snapshot id may be text, with the zeros that a listing shows."""
        if name == "restore" and isinstance(value, str) and re.fullmatch(r"[0-9]{1,20}", value):
            return int(value)
        if name == "store" and isinstance(value, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)", value):
            raise FieldError(f"{cls.AT}.store", f"found {value}; a URL has two slashes after the colon")
        return value


class RolloutConfig(Block, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Staleness and capacity of a fully asynchronous rollout."""

    AT: ClassVar[str] = "rollout"

    max_policy_version_lag: Annotated[Whole | None, Meta(description="Largest lag; null: any.")] = None
    on_stale: Annotated[Policy, Meta(description="What becomes of a staler group.")] = "requeue_pristine"
    stale_granularity: Annotated[
        Granularity, Meta(description="A stale sample costs its group, or is left out of training alone.")
    ] = "prompt_group"
    max_executing_groups: Annotated[Positive, Meta(description="Groups generated at a time (E).")] = 4
    completed_prefetch_groups: Annotated[Positive, Meta(description="Slots for finished ones (P).")] = 8
    staleness_headroom: Annotated[Whole, Meta(description="Lag expected to grow by in a resumed suffix.")] = 0
    max_pristine_requeues: Annotated[Whole, Meta(description="Requeues before escalate_to applies.")] = 3
    escalate_to: Annotated[Policy, Meta(description="The policy after that many requeues.")] = "wait_not_drop"
    async_buffer_max_groups: Annotated[
        Positive | None, Meta(description="Finished groups kept before the oldest is drawn again; null: all.")
    ] = None


class RayConfig(Block, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Ray that a job of several workers runs on (docs/ray.md)."""

    AT: ClassVar[str] = "ray"

    address: Annotated[
        Text | None, Meta(description="Of a running Ray, such as auto or HOST:PORT; null: one for this job, here.")
    ] = None
    cpus_per_worker: Annotated[float, Meta(gt=0, le=1024, description="Ray's count of CPUs for a worker.")] = 1.0
    gpus_per_worker: Annotated[float, Meta(ge=0, le=1024, description="Ray's count of GPUs for a worker.")] = 0.0


class JobConfig(Block, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job of `prefix-recovery run`: prompts in, one result for every sample out."""

    model: Annotated[Text, Meta(description="Model folder or hub name.")]
    engine: Annotated[Tree, Meta(description="vLLM engine arguments.")] = field(default_factory=dict)
    prompts: Annotated[Text, Meta(description="JSONL file, one request a line.")]
    output: Annotated[Text, Meta(description="JSONL file that results are appended to.")]
    sampling: Annotated[Tree, Meta(description="vLLM SamplingParams fields.")] = field(default_factory=dict)
    samples_per_prompt: Annotated[Positive, Meta(description="Results wanted for each prompt.")] = 1
    max_concurrent_calls: Annotated[Positive, Meta(description="Calls given to the engine at a time.")] = 16
    workers: Annotated[Positive, Meta(description="Engines; more than one run on Ray.")] = 1
    ray: Annotated[RayConfig, Meta(description="The Ray that workers run on.")] = RayConfig()
    rollout_checkpointing: Annotated[CheckpointingConfig, Meta(description="Snapshots and restore.")] = (
        CheckpointingConfig()
    )
    rollout: Annotated[RolloutConfig, Meta(description="Staleness and capacity.")] = RolloutConfig()
    metrics: Annotated[
        Port | Text | None, Meta(description="Where /metrics is served: a port, or HOST:PORT; 0: a free port.")
    ] = None

    @property
    def on_ray(self) -> bool:
        """Whether its engines are actors of Ray; else there is one, in this process."""
        return self.workers > 1 or self.ray.address is not None


class LoopConfig(Block, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The two blocks that a training loop of one's own takes."""

    rollout_checkpointing: Annotated[CheckpointingConfig, Meta(description="Snapshots and restore.")] = (
        CheckpointingConfig()
    )
    rollout: Annotated[RolloutConfig, Meta(description="Staleness and capacity.")] = RolloutConfig()


_FLAGGED = (CheckpointingConfig, RolloutConfig)
_SHORT_FLAGS = {
    "rollout.max_policy_version_lag": "--max-policy-version-lag",
    "rollout.async_buffer_max_groups": "--async-buffer-max-groups",
    "rollout.completed_prefetch_groups": "--fully-async-max-completed-prefetch-groups",
    "rollout.max_executing_groups": "--fully-async-max-executing-groups",
}
"""Names that these knobs have elsewhere, beside `--rollout-…`."""


def effective_mode(config: JobConfig | CheckpointingConfig) -> Mode:
    """The mode that applies: off unless the block is enabled."""
    block = config.rollout_checkpointing if isinstance(config, JobConfig) else config
    return block.gym.mode if block.enabled else "off"


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> JobConfig:
    """Read a YAML file, or a JSON file if it is named so, and check all of it.

    Args:
        path: the file.
        overrides: `a.b=c`, applied in order over the file; `c` is read as YAML (`a.b=null`, `a.b={x: 1}`).

    Relative paths are taken from the folder of the file and not from the current one, in overrides too:
    `prompts`, `output`, a local `store`, and `model` if that folder exists there (else it is a name on the
    hub). A leading `~` is the home folder. URLs (`s3://`, `file://`) are left alone.

    Raises:
        ConfigError: with the dotted path, what was found, what is accepted, and the file and line.
    """
    source = os.fspath(path)
    if forms.URL.match(source):
        raise ConfigError(
            f"{source} is an address, not a job's file",
            hint="a store does not hold its job: bring config and prompts, and name the store in the config",
        )
    tree, origins = forms.read_file(source)
    if tree is None:
        raise ConfigError(f"{source}: is empty", hint="a job needs at least model, prompts and output")
    return _job(tree, overrides, origins, os.path.dirname(os.path.abspath(source)))


def parse_config(mapping: Mapping[str, Any], overrides: Sequence[str] = ()) -> JobConfig:
    """The same from a tree that is in memory: plain dicts, hydra's, any Mapping. Paths stay as they are."""
    return _job(mapping, overrides, {}, None)


def load_loop_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> LoopConfig:
    """The same for a file that holds only the blocks `rollout_checkpointing` and `rollout`."""
    tree, origins = forms.read_file(os.fspath(path))
    return _loop({} if tree is None else tree, overrides, origins, os.path.dirname(os.path.abspath(os.fspath(path))))


def parse_loop_config(mapping: Mapping[str, Any], overrides: Sequence[str] = ()) -> LoopConfig:
    """The same from a tree that is in memory."""
    return _loop(mapping, overrides, {}, None)


def _job(mapping: Any, overrides: Sequence[str], origins: forms.Origins, folder: str | None) -> JobConfig:
    try:
        tree = forms.plain(mapping)
        if isinstance(tree, dict):
            forms.override(tree, overrides, origins)
        config = forms.build(JobConfig, tree, JobConfig)
        if folder is not None:
            config = _beside(config, folder)
        check_combinations(config, on=effective_mode(config) != "off")
    except FieldError as error:
        raise error.located(origins) from None
    return config


def _loop(mapping: Any, overrides: Sequence[str], origins: forms.Origins, folder: str | None) -> LoopConfig:
    try:
        tree = forms.plain(mapping)
        if isinstance(tree, dict):
            forms.override(tree, overrides, origins)
        config = forms.build(LoopConfig, tree, LoopConfig)
        check_loop(config, on=effective_mode(config.rollout_checkpointing) != "off")
    except FieldError as error:
        raise error.located(origins) from None
    block = config.rollout_checkpointing
    return (
        config
        if folder is None
        else LoopConfig(rollout_checkpointing=_store_beside(block, folder), rollout=config.rollout)
    )


def _absolute(text: str, folder: str) -> str:
    return text if forms.URL.match(text) else os.path.normpath(os.path.join(folder, os.path.expanduser(text)))


def _store_beside(block: CheckpointingConfig, folder: str) -> CheckpointingConfig:
    return block if block.store is None else msgspec.structs.replace(block, store=_absolute(block.store, folder))


def _beside(config: JobConfig, folder: str) -> JobConfig:
    """The job with its local paths taken from `folder`."""

    def absolute(text: str) -> str:
        return _absolute(text, folder)

    block = _store_beside(config.rollout_checkpointing, folder)
    return msgspec.structs.replace(
        config,
        model=absolute(config.model) if os.path.isdir(absolute(config.model)) else config.model,
        prompts=absolute(config.prompts),
        output=absolute(config.output),
        rollout_checkpointing=block,
    )


def job_schema() -> dict[str, Any]:
    """The JSON schema of a job file, every field described."""
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, "title": "prefix-recovery job", **msgspec.json.schema(JobConfig)}


def to_yaml(config: Block) -> str:
    """A configuration, or one block of it, as YAML that reads back equal."""
    return forms.write_yaml(msgspec.to_builtins(config))


def add_arguments(parser: argparse.ArgumentParser, *, rollout: bool = True) -> None:
    """One flag for every field of the two blocks: `--rollout-checkpointing-gym-mode`, `--rollout-on-stale`.

    Values are checked with the rest of the configuration; a flag that is not given leaves no attribute. Without
    `rollout` the flags of that block are left out: a batch job has no use for them.
    """
    for block in _FLAGGED if rollout else _FLAGGED[:1]:
        group = parser.add_argument_group(block.AT, block.__doc__)
        for leaf in forms.leaves(block):
            default = forms.write_yaml(leaf.field.default).strip()
            switch = leaf.field.default is False
            group.add_argument(
                "--" + re.sub(r"[._]", "-", leaf.path),
                *([_SHORT_FLAGS[leaf.path]] if leaf.path in _SHORT_FLAGS else []),
                dest=leaf.path.replace(".", "_"),
                default=argparse.SUPPRESS,
                help=f"{leaf.description} {leaf.words} (default: {default})".replace("%", "%%"),
                **({"action": argparse.BooleanOptionalAction} if switch else {"metavar": "VALUE"}),
            )


def overrides_from_args(namespace: argparse.Namespace) -> list[str]:
    """The overrides, for `load_config` or `parse_config`, of the flags of `add_arguments` that were given."""
    found = []
    for leaf in (leaf for block in _FLAGGED for leaf in forms.leaves(block)):
        value = getattr(namespace, leaf.path.replace(".", "_"), None)
        if value == "" and not leaf.takes_text:
            flag = "--" + re.sub(r"[._]", "-", leaf.path)
            raise ConfigError(f"{flag} is empty", hint="leave the flag out, or write null where that is accepted")
        if value is not None:
            as_is = isinstance(value, str) and not leaf.takes_text
            found.append(f"{leaf.path}={value if as_is else forms.write_yaml(value).strip()}")
    return found
