"""The configuration: what is accepted, what is refused and in which words, and that every form says the same.

Owns: the tests of recovery.config and recovery.config_forms.
Does not know: the runner, a store, an engine.

Invariants (beside those of the two modules):
1. The defaults are compared with a copy of the documented block, not with the code's own.
2. What is written is read back with PyYAML as it comes, not with the reader under test.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
import sys
from collections import UserDict
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from recovery import config, config_checks
from recovery import config_forms as forms
from recovery.config import (
    CheckpointingConfig,
    GymConfig,
    JobConfig,
    RolloutConfig,
    StoreOptions,
    load_config,
    parse_config,
)
from recovery.config_checks import NOT_OF_A_BATCH_JOB, Unsupported, check_combinations, check_rollout
from recovery.errors import ConfigError
from storage_backends.s3_options import S3Options, check_options

NEEDED = {"model": "org/name", "prompts": "p.jsonl", "output": "o.jsonl"}
DOCUMENTED = """
rollout_checkpointing:
  enabled: false
  store: null
  store_options:
    endpoint_url: null
    region: null
    addressing: auto
    profile: null
    connect_timeout_s: 5
    read_timeout_s: 20
    retry_for_s: 20
    max_connections: 64
    exclusive: false
  codec: arrow
  gym:
    mode: prefix_recovery
    generation_chunk_flush_tokens: 256
  staging: store
  snapshot_interval_s: 60
  snapshot_timeout_s: 30
  keep_latest_k: 2
  restore: auto
  unresumable: restart
  draws: position
  grace_s: 20
rollout:
  max_policy_version_lag: null
  on_stale: requeue_pristine
  stale_granularity: prompt_group
  max_executing_groups: 4
  completed_prefetch_groups: 8
  staleness_headroom: 0
  max_pristine_requeues: 3
  escalate_to: wait_not_drop
  async_buffer_max_groups: null
"""
HEAD = "model: org/name\nprompts: p.jsonl\noutput: o.jsonl\n"  # what follows starts on line 4


def refusal(call: Any, *args: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        call(*args)
    assert caught.value.exit_code == 2
    return caught.value


def job(**blocks: Any) -> JobConfig:
    return JobConfig(**{**NEEDED, **blocks})


def value_at(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = tree[name] if isinstance(tree, dict) else getattr(tree, name)
    return tree


def test_defaults_are_the_documented_ones() -> None:
    assert msgspec.to_builtins(parse_config(NEEDED)) == {
        **NEEDED,
        "engine": {},
        "metrics": None,
        "workers": 1,
        "ray": {"address": None, "cpus_per_worker": 1.0, "gpus_per_worker": 0.0},
        "sampling": {},
        "samples_per_prompt": 1,
        "max_concurrent_calls": 16,
        **yaml.safe_load(DOCUMENTED),
    }


@pytest.mark.parametrize("block", [GymConfig, StoreOptions, CheckpointingConfig, RolloutConfig, JobConfig])
def test_blocks_are_frozen_keyword_only_and_closed(block: Any) -> None:
    setup = block.__struct_config__
    assert setup.frozen and setup.forbid_unknown_fields
    with pytest.raises(TypeError):
        block("positional")
    with pytest.raises(AttributeError):
        setattr(job() if block is JobConfig else block(), block.__struct_fields__[0], 1)


ACCEPTED = [
    ("rollout_checkpointing: {gym: {mode: off}}", "rollout_checkpointing.gym.mode", "off"),
    ("rollout_checkpointing: {gym: {mode: no}}", "rollout_checkpointing.gym.mode", "off"),
    ("rollout_checkpointing: {gym: {mode: 'off'}}", "rollout_checkpointing.gym.mode", "off"),
    ("rollout_checkpointing: {enabled: off}", "rollout_checkpointing.enabled", False),
    ("rollout_checkpointing: {restore: 12}", "rollout_checkpointing.restore", 12),
    ("rollout_checkpointing: {restore: '12'}", "rollout_checkpointing.restore", 12),
    ("rollout_checkpointing: {restore: 00000000000000000012}", "rollout_checkpointing.restore", 12),
    ("rollout_checkpointing: {restore: strict}", "rollout_checkpointing.restore", "strict"),
    ("rollout_checkpointing: {snapshot_interval_s: 1e-1}", "rollout_checkpointing.snapshot_interval_s", 0.1),
    ("rollout_checkpointing: {grace_s: 0}", "rollout_checkpointing.grace_s", 0.0),
    ("rollout_checkpointing:\n  # all of it commented out", "rollout_checkpointing.keep_latest_k", 2),
    ("rollout_checkpointing:\n  gym:\n", "rollout_checkpointing.gym", GymConfig()),
    ("engine:\nsampling:", "engine", {}),
    ("engine: {a: [1, x, null, {b: true}]}", "engine", {"a": [1, "x", None, {"b": True}]}),
    ("engine: {revision: 2026-01-02}", "engine.revision", "2026-01-02"),
    ("engine: {revision: 0012}", "engine.revision", "0012"),
    ("engine: {time: 1:30}", "engine.time", "1:30"),
    ("sampling: {temperature: 1e-5}", "sampling.temperature", 1e-5),
    ("sampling: {logit_bias: {7: -1.5}}", "sampling.logit_bias", {7: -1.5}),
    ("sampling: &s {top_k: 3}\nengine: {<<: *s, seed: 1}", "engine", {"top_k": 3, "seed": 1}),
    ("rollout: {max_policy_version_lag: null}", "rollout.max_policy_version_lag", None),
]


@pytest.mark.parametrize(("text", "path", "value"), ACCEPTED)
def test_accepted(tmp_path: Path, text: str, path: str, value: Any) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(HEAD + text)
    found = value_at(load_config(file), path)
    assert found == value and type(found) is type(value)


CKPT = "rollout_checkpointing"
REFUSED = [
    # the text after HEAD, the message, a part of the hint
    ("rollout_checkpointing: {\n snapshot_intervall_s: 3}", f"{CKPT}.snapshot_intervall_s: unknown key; did you mean "
     "snapshot_interval_s? (job.yaml, line 5)", ""),
    ("mode: off", f"mode: unknown key; did you mean {CKPT}.gym.mode? (job.yaml, line 4)", ""),
    ("gym: {}", f"gym: unknown key; did you mean {CKPT}.gym? (job.yaml, line 4)", ""),
    ("rollout: {zzz: 1}", "rollout.zzz: unknown key; accepted: max_policy_version_lag, on_stale,", ""),
    ("rollout_checkpointing:\n  snapshot_interval_s: 60s", f'{CKPT}.snapshot_interval_s: found "60s"; accepted: '
     "a number of seconds > 0 and <= 31622400 (job.yaml, line 5)", "Seconds between"),
    ("rollout_checkpointing: {snapshot_timeout_s: 0}", f"{CKPT}.snapshot_timeout_s: found 0; accepted: a number of "
     "seconds > 0", ""),
    ("rollout_checkpointing: {snapshot_timeout_s: .nan}", f"{CKPT}.snapshot_timeout_s: found NaN;", ""),
    ("rollout_checkpointing: {grace_s: .inf}", f"{CKPT}.grace_s: found Infinity;", ""),
    ("rollout_checkpointing: {grace_s: true}", f"{CKPT}.grace_s: found true; accepted: a number of seconds", ""),
    ("rollout_checkpointing: {keep_latest_k: 0}", f"{CKPT}.keep_latest_k: found 0; accepted: a whole number >= 1 (",
     "two are recommended"),
    ("rollout_checkpointing: {gym: {generation_chunk_flush_tokens: -1}}", f"{CKPT}.gym.generation_chunk_flush_tokens:"
     " found -1; accepted: a whole number of tokens >= 0 (job.yaml, line 4)", "0: at cuts only"),
    ("rollout_checkpointing: {gym: {mode: on}}", f"{CKPT}.gym.mode: found true, which is how YAML reads on and yes; "
     "accepted: off, turn, prefix_recovery (job.yaml, line 4)", "mode: prefix_recovery"),
    ("rollout_checkpointing: {gym: prefix_recovery}", f'{CKPT}.gym: found "prefix_recovery"; accepted: a mapping of '
     "mode, generation_chunk_flush_tokens (", ""),
    ("rollout_checkpointing: {codec: arow}", f'{CKPT}.codec: found "arow"; accepted: arrow, zarr; did you '
     "mean arrow?", ""),
    ("rollout_checkpointing: {enabled: 'true'}", f'{CKPT}.enabled: found "true"; accepted: true or false', ""),
    ("rollout_checkpointing: {restore: latest}", f'{CKPT}.restore: found "latest"; accepted: auto, never, strict or a '
     "whole number >= 1", "snapshot"),
    ("rollout_checkpointing: {restore: -1}", f"{CKPT}.restore: found -1;", ""),
    ("rollout_checkpointing: {restore: no}", f"{CKPT}.restore: found false;", ""),
    ("rollout_checkpointing: {store_options: {endpoint: x}}", f"{CKPT}.store_options.endpoint: unknown key; did you "
     "mean endpoint_url? (job.yaml, line 4)", ""),
    ("rollout_checkpointing: {store_options: {secret: x}}", f"{CKPT}.store_options.secret: is no field (", "a profile"),
    ("rollout_checkpointing: {store_options: {addressing: dns}}", f'{CKPT}.store_options.addressing: found "dns"; '
     "accepted: auto, path, virtual", "bucket's name"),
    ("rollout_checkpointing: {store_options: {read_timeout_s: 0}}", f"{CKPT}.store_options.read_timeout_s: found 0;",
     "one request"),
    ("rollout_checkpointing: {store: 5}", f"{CKPT}.store: found 5; accepted: text that is not empty or null; put it in "
     "quotes", ""),
    ("rollout_checkpointing: {store: ''}", f'{CKPT}.store: found ""; accepted: text that is not empty or null', ""),
    ("rollout_checkpointing: {store: s3:/b/run}", f"{CKPT}.store: found s3:/b/run; a URL has two slashes", ""),
    ("rollout: {max_policy_version_lag: -1}", "rollout.max_policy_version_lag: found -1; accepted: a whole number >= 0 "
     "or null", ""),
    ("rollout: {on_stale: [x]}", "rollout.on_stale: found a list; accepted: pin_weights, reject, requeue_pristine", ""),
    ("rollout: {escalate_to: drop}", 'rollout.escalate_to: found "drop"; accepted: pin_weights, reject,', ""),
    ("rollout: [1]", "rollout: found a list; accepted: a mapping of max_policy_version_lag,", ""),
    ("rollout: {1: 2}", "rollout.1: unknown key;", ""),
    ("samples_per_prompt: 0", "samples_per_prompt: found 0; accepted: a whole number >= 1 (job.yaml, line 4)", ""),
    ("samples_per_prompt: 1.5", "samples_per_prompt: found 1.5; accepted: a whole number >= 1", ""),
    ("max_concurrent_calls: many", 'max_concurrent_calls: found "many"; accepted: a whole number >= 1', ""),
    ("engine: fast", 'engine: found "fast"; accepted: a mapping', ""),
    ("engine: {on: 1}", "engine: the key true is not text (job.yaml, line 4)", "put it in quotes"),
    ("engine: {s: !!set {a}}", "engine.s: found a value of type set; accepted: text, numbers,", ""),
    ("engine: &e {e: *e}", "nested deeper than 32 levels, or refers to itself", ""),
    ("2: 3", "the top: the key 2 is not text", "put it in quotes"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message", "hint"), REFUSED)
def test_refused_with_path_value_and_line(tmp_path: Path, text: str, message: str, hint: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(HEAD + text + "\n")
    error = refusal(load_config, file)
    assert message.replace("job.yaml", str(file)) in error.message
    assert str(file) in error.message and hint in error.hint


@pytest.mark.parametrize("name", NEEDED)
def test_needed_fields(name: str) -> None:
    left = {key: value for key, value in NEEDED.items() if key != name}
    assert refusal(parse_config, left).message == f"{name}: missing"
    assert refusal(parse_config, {**left, name: None}).message.startswith(f"{name}: found null; accepted: text")
    assert refusal(parse_config, {**left, name: "a\0"}).message.startswith(f'{name}: found "a\\u0000"; accepted')


FILES = [
    # file name, content, a part of the message, a part of the hint
    ("a.yaml", b"", "{}: is empty", "model, prompts and output"),
    ("a.yaml", b"# only a comment\n", "{}: is empty", ""),
    ("a.json", b" \n", "{}: is empty", ""),
    ("a.yaml", b"- model: x\n", "the top: found a list; accepted: a mapping of model, engine, prompts,", ""),
    ("a.yaml", b"just words", 'the top: found "just words"; accepted: a mapping of model', ""),
    ("a.yaml", b"model: m\nprompts: caf\xe9\n", "{}: is not UTF-8: byte 0xe9 at offset 21", "UTF-8"),
    ("a.yaml", "model: m".encode("utf-16"), "{}: is not UTF-8: byte 0xff at offset 0", "UTF-8"),
    ("a.yaml", b"model: a: b\n", "{}: is not YAML at line 1, column 9: mapping values", "goes in quotes"),
    ("a.yaml", b"model: m\nrollout:\n\ton_stale: x\n", "{}: is not YAML at line 3, column 1: found character '\\t'",
     "indent with spaces"),
    ("a.yaml", b"model: m\nprompts: a\x07\n", "{}: is not YAML at line 2, column 11: special characters", ""),
    ("a.yaml", b"model: m\n---\nmodel: n\n", "{}: is not YAML at line 2, column 1: but found another document", ""),
    ("a.yaml", b"model: !!python/name:os.system x\n", "{}: is not YAML at line 1, column 8: could not determine", ""),
    ("a.yaml", b"model: !!int x\n", "{}: is not usable YAML: invalid literal for int", ""),
    ("a.yaml", b"a: " + b"[" * 5000, "{}: is not usable YAML: maximum recursion", ""),
    ("a.yaml", b"\n".join([b"a0: &a0 [x]", *(b"a%d: &a%d [" % (n, n) + b", ".join([b"*a%d" % (n - 1)] * 9) + b"]"
     for n in range(1, 9))]), "{}: its aliases stand for more than 1048576 values", "write them out"),
    ("a.yaml", b"model: m\nmodel: n\n", "{}: model: given twice, on line 1 and on line 2", ""),
    ("a.yaml", b"rollout:\n  x: [{y: 1,\n  'y': 2}]\n", "{}: rollout.x.y: given twice, on line 2 and on line 3", ""),
    ("a.yaml", b"#" * (1024 * 1024 + 1), "{}: is larger than 1048576 bytes", "prompts file"),
    ("a.json", b'{"model": "m",\n "prompts" 1}', "{}: is not JSON at line 2, column 12: Expecting ':'", ""),
    ("a.json", b'{"engine":{"a":1,\n\t"a":2}}', "{}: engine.a: given twice, on line 1 and on line 2", ""),
    ("a.json", b'{"model":"m",\n"prompt":"p"}', "prompt: unknown key; did you mean prompts? ({}, line 2)", ""),
    ("a.json", b"[" * 100000, "{}: is not usable JSON: maximum recursion", ""),
    ("a.JSON", b"[1]", "the top: found a list;", ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "data", "message", "hint"), FILES)
def test_files_that_are_no_configuration(tmp_path: Path, name: str, data: bytes, message: str, hint: str) -> None:
    file = tmp_path / name
    file.write_bytes(data)
    error = refusal(load_config, file)
    assert message.replace("{}", str(file)) in error.message and hint in error.hint


def test_files_that_are_not_there(tmp_path: Path) -> None:
    assert refusal(load_config, tmp_path / "no.yaml").message.endswith(
        "no.yaml: cannot be read: No such file or directory"
    )
    assert refusal(load_config, tmp_path).message == f"{tmp_path}: cannot be read: Is a directory"
    assert "cannot be read: embedded null byte" in refusal(load_config, "a\0b").message


def test_json_and_byte_order_mark(tmp_path: Path) -> None:
    text = '\ufeff{"model":"org/name",\n\t"prompts":"\\ud83d\\ude00\u2028\x7f\\/p","output":"o",\n\t"engine":{"a":1e3}}'
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    read = load_config(tmp_path / "a.json")
    assert read.prompts == os.path.join(tmp_path, "\U0001f600\u2028\x7f/p") and read.engine == {"a": 1000.0}


def test_overrides_are_typed_ordered_and_named(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(HEAD + "engine:\nsampling: {top_k: 3, stop: [x]}\n")
    texts = ["engine.hf.rope={a: 1}", "engine.dtype=float32", "sampling.stop=", "sampling.stop='a=b'", "model= n/m"]
    read = load_config(tmp_path / "a.yaml", [*texts, " rollout_checkpointing.gym.mode =off", "engine.dtype=half"])
    assert read.engine == {"hf": {"rope": {"a": 1}}, "dtype": "half"} and read.model == "n/m"
    assert read.sampling == {"top_k": 3, "stop": "a=b"} and read.rollout_checkpointing.gym.mode == "off"
    assert parse_config(NEEDED, ["engine={a: 1}", "engine={}"]).engine == {}
    assert parse_config({**NEEDED, "rollout": None}, ["rollout.max_policy_version_lag="]).rollout == RolloutConfig()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout_checkpointing.codek=zarr", f"{CKPT}.codek: unknown key; did you mean codec? (override "),
        ("rollout={on_stale: x}", 'rollout.on_stale: found "x"; accepted: '),
        ("samples_per_prompt=0", "found 0; accepted: a whole number >= 1 (override samples_per_prompt=0)"),
        ("samples_per_prompt", "override samples_per_prompt: accepted: key=value with a dotted key"),
        ("a..b=1", "override a..b=1: accepted: key=value"),
        ("=1", "override =1: accepted: key=value"),
        ("engine=[1", "override engine=[1: is not YAML at line 1, column 3: "),
        ("engine={a: 1, a: 2}", "override engine={a: 1, a: 2}: a: given twice, on line 1 and on line 1"),
        ("model.size=3", 'model.size: model is "org/name", not a mapping (override model.size=3)'),
    ],
)  # fmt: skip
def test_overrides_refused(override: str, message: str) -> None:
    assert message in refusal(parse_config, NEEDED, [override]).message
    assert "accepted: a list of key=value" in refusal(parse_config, NEEDED, override).message


def test_an_override_hides_the_line_it_replaces(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(HEAD + "rollout: {on_stale: reject}\n")
    message = refusal(load_config, tmp_path / "a.yaml", ["rollout={on_stale: x}"]).message
    assert message.endswith("(override rollout={on_stale: x})")


class Colour(StrEnum):
    RED = "red"


def test_any_mapping_is_a_tree() -> None:
    inner = MappingProxyType({"codec": "arrow", "gym": UserDict({"mode": False})})
    tree = UserDict({**NEEDED, "prompts": Path("p.jsonl"), CKPT: inner, "engine": {"a": ("x", Colour.RED)}})
    read = parse_config(tree)
    assert read == job(engine={"a": ["x", "red"]}, rollout_checkpointing=CheckpointingConfig(gym=GymConfig(mode="off")))
    assert parse_config(yaml.safe_load(config.to_yaml(read))) == read
    assert refusal(parse_config, [1]).message.startswith("the top: found a list; accepted: a mapping of model")


def test_blocks_check_themselves_and_copy_what_they_are_given() -> None:
    error = refusal(lambda: CheckpointingConfig(keep_latest_k=0))
    assert error.message == f"{CKPT}.keep_latest_k: found 0; accepted: a whole number >= 1"
    assert refusal(lambda: job(rollout={"max": 1})).message.startswith("rollout: found a mapping; accepted:")
    engine = {"a": [1]}
    made = job(engine=engine)
    engine["a"].append(2)
    assert made.engine == {"a": [1]}


def test_paths_are_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, elsewhere = tmp_path / "jobs", tmp_path / "elsewhere"
    (folder / "tiny").mkdir(parents=True)
    elsewhere.mkdir()
    (folder / "a.yaml").write_text(f"model: tiny\nprompts: ../p.jsonl\noutput: ~/o.jsonl\n{CKPT}: {{store: st}}")
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HOME", "/home/someone")
    read = load_config("../jobs/a.yaml")
    assert (read.model, read.prompts) == (str(folder / "tiny"), str(tmp_path / "p.jsonl"))
    assert (read.output, read.rollout_checkpointing.store) == ("/home/someone/o.jsonl", str(folder / "st"))
    urls = {"model": "org/name", "prompts": "s3://b/p", "output": "file:///x/o", f"{CKPT}.store": "memory://a"}
    read = load_config(folder / "a.yaml", [f"{key}={value}" for key, value in urls.items()])
    assert {key: value_at(read, key) for key in urls} == urls
    assert load_config(folder / "a.yaml", ["output=x/o"]).output == str(folder / "x/o")
    assert parse_config(NEEDED).prompts == "p.jsonl"


ON = {"enabled": True, "store": "st"}
CONFLICTS = [
    ({"rollout": {"completed_prefetch_groups": 3}}, "rollout.completed_prefetch_groups: found 3; accepted: at least "
     "max_executing_groups, 4", "wait for its slot"),
    ({"rollout": {"max_policy_version_lag": 1, "staleness_headroom": 2}}, "rollout.staleness_headroom: found 2; "
     "accepted: at most max_policy_version_lag, 1", "no prefix"),
    ({"rollout": {"escalate_to": "requeue_pristine"}}, "rollout.escalate_to: requeue_pristine is what is "
     "escalated from", "wait_not_drop"),
    ({"engine": {"model": "x"}}, "engine.model: is given twice", "the field `model`"),
    ({"sampling": {"n": 4}}, "sampling.n: is not how samples are counted", "samples_per_prompt"),
    ({CKPT: {"enabled": True}}, f"{CKPT}.store: missing, and enabled is true", "s3://bucket"),
    ({CKPT: {**ON, "store": "memory://x"}}, f"{CKPT}.store: memory://x does not survive a crash", "s3://"),
    ({CKPT: {**ON, "store": "o.jsonl"}}, f"{CKPT}.store: is output itself, or inside it", "folder of its own"),
    ({CKPT: {**ON, "store": "./x/../o.jsonl/st"}}, f"{CKPT}.store: is output itself, or inside it", ""),
    ({CKPT: {**ON, "store": "p.jsonl"}}, f"{CKPT}.store: is prompts itself, or inside it", ""),
    ({CKPT: {**ON, "store": "st/"}, "output": "st/o"}, "output: is inside the store", "folder of its own"),
    ({CKPT: {**ON, "store": "file:///d/st"}, "prompts": "/d/st/p"}, "prompts: is inside the store", ""),
    ({CKPT: {**ON, "store": "s3://b/run"}, "output": "s3://b/run/o"}, "output: is inside the store", ""),
    ({CKPT: {**ON, "store_options": {"region": "x"}}}, f"{CKPT}.store_options.region: is given, and st is not on S3",
     "only stores on s3://"),
    ({"output": "./p.jsonl"}, "output: would overwrite prompts", "another name"),
    ({"prompts": "o.jsonl.errors.jsonl"}, "output: would overwrite prompts", ""),
]  # fmt: skip


@pytest.mark.parametrize(("tree", "message", "hint"), CONFLICTS)
def test_conflicts(tree: dict[str, Any], message: str, hint: str) -> None:
    error = refusal(parse_config, {**NEEDED, **tree})
    assert error.message == message and hint in error.hint
    made = msgspec.convert({**NEEDED, **tree}, JobConfig)
    refused = refusal(partial(check_combinations, on=config.effective_mode(made) != "off"), made)
    assert refused.message == message


@pytest.mark.parametrize(
    "block",
    [
        {**ON, "store": "s3://bucket/run"},
        {**ON, "store": "S3://bucket/run", "store_options": {"endpoint_url": "http://h:1", "exclusive": True}},
        {**ON, "store_options": {"max_connections": 64}},
        {**ON, "store": "file:///data/run"},
        {**ON, "store": "o.jsonl2"},
        {"store": "memory://x", "codec": "zarr", "gym": {"mode": "turn"}},
        {"enabled": True, "gym": {"mode": "off"}},
    ],
)
def test_no_conflict(block: dict[str, Any]) -> None:
    parse_config({**NEEDED, CKPT: block, "sampling": {"n": 1}})


def test_a_store_is_not_the_models_folder(tmp_path: Path) -> None:
    for name in ("m/config.json", "m/a/st/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    text = f"model: m\nprompts: p\noutput: o\n{CKPT}: {{enabled: true}}\n"
    (tmp_path / "a.yaml").write_text(text)
    for store, said in (("m", "is the model's folder"), ("m/a/st", "lie in each other"), (".", "lie in each other")):
        error = refusal(load_config, tmp_path / "a.yaml", [f"{CKPT}.store={store}"])
        assert said in error.message and "folder of its own" in error.hint
    load_config(tmp_path / "a.yaml", [f"{CKPT}.store=m2"])
    load_config(tmp_path / "a.yaml", [f"{CKPT}.store=org/m", "model=org/m"])  # a name on the hub is no folder


def test_store_options_are_those_of_a_store_on_s3() -> None:
    """Names and defaults; but no secrets, which a job file must not hold."""
    known = {field.name: field.default for field in dataclasses.fields(S3Options)}
    ours = {field.name: field.default for field in msgspec.structs.fields(StoreOptions)}
    assert ours == {name: value for name, value in known.items() if name not in StoreOptions.ELSEWHERE}
    assert StoreOptions().given() == {}
    given = {"endpoint_url": "http://s3.example", "read_timeout_s": 7.0, "exclusive": True}
    assert StoreOptions(**given).given() == given
    check_options({**given, **StoreOptions(**given).given()})


def test_places_are_compared_through_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "a.yaml").write_text(f"model: m\nprompts: p\noutput: link/o\n{CKPT}:\n  enabled: true\n  store: real\n")
    assert (
        refusal(load_config, tmp_path / "a.yaml").message == f"output: is inside the store ({tmp_path}/a.yaml, line 3)"
    )


@pytest.mark.parametrize("row", NOT_OF_A_BATCH_JOB, ids=lambda row: row.path)
def test_what_is_not_supported_is_refused_by_name(row: Unsupported) -> None:
    other = {
        "max_policy_version_lag": 3,
        "on_stale": "reject",
        "stale_granularity": "sibling",
        "escalate_to": "reject",
    }
    name = row.path.rpartition(".")[2]
    value = row.value or other.get(name, 7)
    setup = [f"{CKPT}.enabled=true", f"{CKPT}.store=st", "rollout.max_executing_groups=4"]
    error = refusal(parse_config, NEEDED, [*setup, f"{row.path}={value}"])
    assert error.message == f"{row.path}: {value} is not supported by this version (override {row.path}={value})"
    assert error.hint == row.instead and row.instead


def test_a_loop_of_ones_own_takes_what_a_batch_job_refuses(tmp_path: Path) -> None:
    text = "rollout: {max_policy_version_lag: 2, completed_prefetch_groups: 16, on_stale: resume_masked}\n"
    (tmp_path / "loop.yaml").write_text(f"{text}{CKPT}: {{enabled: true, store: st}}\n")
    loop = config.load_loop_config(tmp_path / "loop.yaml", ["rollout.async_buffer_max_groups=9"])
    assert loop.rollout == RolloutConfig(
        max_policy_version_lag=2, completed_prefetch_groups=16, on_stale="resume_masked", async_buffer_max_groups=9
    )
    assert loop.rollout_checkpointing.store == str(tmp_path / "st")
    assert config.parse_loop_config({"rollout": {"max_policy_version_lag": 0}}).rollout.max_policy_version_lag == 0
    (tmp_path / "empty.yaml").write_text("")
    assert config.load_loop_config(tmp_path / "empty.yaml") == config.LoopConfig()
    in_turns = config.load_loop_config(tmp_path / "loop.yaml", [f"{CKPT}.gym.mode=turn"])
    assert in_turns.rollout_checkpointing.gym.mode == "turn"
    assert "unknown key" in refusal(config.parse_loop_config, {"model": "m"}).message
    assert "missing" in refusal(config.parse_loop_config, {CKPT: {"enabled": True}}).message


@pytest.mark.parametrize(
    ("values", "batch", "path"),
    [
        ({"max_executing_groups": 9}, 1, "rollout.completed_prefetch_groups"),
        ({}, 9, "rollout.completed_prefetch_groups"),
        ({}, 0, "batch_groups"),
        ({"async_buffer_max_groups": 3}, 4, "rollout.async_buffer_max_groups"),
        ({"max_policy_version_lag": 1, "staleness_headroom": 2}, 1, "rollout.staleness_headroom"),
        ({"escalate_to": "requeue_pristine"}, 1, "rollout.escalate_to"),
    ],
)
def test_a14_capacities_that_cannot_work_are_refused_at_start_up(values: Any, batch: int, path: str) -> None:
    error = refusal(check_rollout, RolloutConfig(**values), batch)
    assert error.message.startswith(f"{path}: ")
    check_rollout(RolloutConfig(async_buffer_max_groups=8), 8)


def test_a52_a_negative_lag_is_refused() -> None:
    negative = {"rollout": {"max_policy_version_lag": -1}}
    assert "max_policy_version_lag" in refusal(config.parse_loop_config, negative).message


def test_knobs_go_by_the_names_they_have_elsewhere() -> None:
    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    given = parser.parse_args(
        [
            "--max-policy-version-lag",
            "2",
            "--async-buffer-max-groups",
            "9",
            "--fully-async-max-completed-prefetch-groups",
            "12",
            "--fully-async-max-executing-groups",
            "6",
            "--rollout-on-stale",
            "reject",
        ]
    )
    assert config.parse_loop_config({}, config.overrides_from_args(given)).rollout == RolloutConfig(
        max_policy_version_lag=2,
        async_buffer_max_groups=9,
        completed_prefetch_groups=12,
        max_executing_groups=6,
        on_stale="reject",
    )


def test_a_flag_with_an_empty_value_is_not_taken_for_null() -> None:
    """As a variable of the shell that is not set leaves it: that would be no limit."""
    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    with pytest.raises(ConfigError, match="--rollout-max-policy-version-lag is empty"):
        config.overrides_from_args(parser.parse_args(["--max-policy-version-lag="]))
    given = config.overrides_from_args(parser.parse_args(["--max-policy-version-lag=null"]))
    assert config.parse_loop_config({}, given).rollout.max_policy_version_lag is None


@pytest.mark.parametrize(
    ("enabled", "mode", "expected"),
    [
        (False, "prefix_recovery", "off"),
        (False, "turn", "off"),
        (True, "off", "off"),
        (True, "turn", "turn"),
        (True, "prefix_recovery", "prefix_recovery"),
    ],
)
def test_effective_mode(enabled: bool, mode: Any, expected: str) -> None:
    block = CheckpointingConfig(enabled=enabled, store="st", gym=GymConfig(mode=mode))
    assert config.effective_mode(block) == config.effective_mode(job(rollout_checkpointing=block)) == expected


def test_schema_describes_every_field_and_agrees() -> None:
    schema = config.job_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate({**NEEDED, **yaml.safe_load(DOCUMENTED)})
    for tree in (
        {},
        {**NEEDED, "x": 1},
        {**NEEDED, CKPT: {"keep_latest_k": 0}},
        {**NEEDED, "rollout": {"on_stale": "x"}},
    ):
        assert not validator.is_valid(tree)
    for name, block in schema["$defs"].items():
        assert block["description"], name
        assert all(field["description"] for field in block["properties"].values()), name


WORDS = st.text(min_size=1, max_size=12).filter(lambda text: "\0" not in text)
SECONDS = st.floats(0.001, 1e6) | st.integers(1, 10**6)
POLICIES = st.sampled_from(["reject", "resume_mixed", "resume_masked", "pin_weights", "wait_not_drop"])
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
    | st.sampled_from(["off", "1e5", "1e-5", "0012", "1:30", "2026-01-02", "null", "~", "=", "<<", "0x1", "\x85"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6) | st.integers(), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
OPTIONS = st.builds(
    StoreOptions,
    endpoint_url=st.none() | WORDS,
    addressing=st.sampled_from(["auto", "path", "virtual"]),
    retry_for_s=SECONDS,
    max_connections=st.integers(1, 99),
    exclusive=st.booleans(),
)
NO_OPTIONS = st.just(StoreOptions())
PLACES = st.tuples(WORDS.map("s3://{}".format), OPTIONS) | st.tuples(WORDS.map("/st/{}".format), NO_OPTIONS)
BLOCKS = st.builds(
    lambda place, **fields: CheckpointingConfig(store=place[0], store_options=place[1], **fields),
    place=PLACES,
    enabled=st.booleans(),
    codec=st.sampled_from(["arrow", "zarr"]),
    gym=st.builds(GymConfig, mode=st.sampled_from(["off", "turn", "prefix_recovery"])),
    snapshot_interval_s=SECONDS,
    keep_latest_k=st.integers(1, 99),
    restore=st.sampled_from(["auto", "never", "strict"]) | st.integers(1, 10**19),
    unresumable=st.sampled_from(["restart", "refuse"]),
    draws=st.sampled_from(["position", "engine"]),
    grace_s=SECONDS | st.just(0),
)
ROLLOUTS = st.builds(
    RolloutConfig,
    max_policy_version_lag=st.none() | st.integers(5, 9),
    on_stale=POLICIES,
    stale_granularity=st.sampled_from(["prompt_group", "sibling"]),
    max_executing_groups=st.integers(1, 8),
    completed_prefetch_groups=st.integers(8, 99),
    staleness_headroom=st.integers(0, 5),
    escalate_to=POLICIES,
    async_buffer_max_groups=st.none() | st.integers(1, 99),
)
KEYED = st.dictionaries(st.text(max_size=6).filter(lambda key: key not in ("model", "n")), TREES, max_size=3)
JOBS = st.builds(
    JobConfig, model=WORDS, prompts=WORDS.map("/p/{}".format), output=WORDS.map("/o/{}".format), engine=KEYED,
    sampling=KEYED, samples_per_prompt=st.integers(1, 99), rollout_checkpointing=BLOCKS, rollout=ROLLOUTS,
)  # fmt: skip


@given(JOBS)
def test_yaml_round_trip(made: JobConfig) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config_checks, "NOT_OF_A_BATCH_JOB", ())
        assert parse_config(yaml.safe_load(config.to_yaml(made))) == made
        assert parse_config(forms.read_yaml(config.to_yaml(made), "text")[0]) == made
    assert jsonschema.Draft202012Validator(config.job_schema()).is_valid(msgspec.to_builtins(made, str_keys=True))


@given(BLOCKS, ROLLOUTS)
def test_flags_round_trip(block: CheckpointingConfig, rollout: RolloutConfig) -> None:
    made, arguments = job(rollout_checkpointing=block, rollout=rollout), []
    for leaf in (*forms.leaves(CheckpointingConfig), *forms.leaves(RolloutConfig)):
        flag, value = "--" + re.sub("[._]", "-", leaf.path), value_at(made, leaf.path)
        if isinstance(value, bool):
            arguments.append(flag if value else flag.replace("--", "--no-", 1))
        elif value is not None or not leaf.takes_text:  # of a field of text, the text null is that text
            arguments.append(f"{flag}={'null' if value is None else value}")
    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config_checks, "NOT_OF_A_BATCH_JOB", ())
        assert parse_config(NEEDED, config.overrides_from_args(parser.parse_args(arguments))) == made


def test_flags_that_are_not_given_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    assert vars(parser.parse_args([])) == {} and config.overrides_from_args(argparse.Namespace()) == []
    set_by_code = argparse.Namespace(rollout_checkpointing_grace_s=5, rollout_checkpointing_store=None, other=1)
    assert config.overrides_from_args(set_by_code) == [f"{CKPT}.grace_s=5"]
    given_text = parser.parse_args(["--rollout-checkpointing-store", "123", "--rollout-checkpointing-gym-mode", "of"])
    assert f"{CKPT}.store='123'" in config.overrides_from_args(given_text)
    assert "did you mean off?" in refusal(parse_config, NEEDED, config.overrides_from_args(given_text)).message
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    assert "two are recommended. a whole number >= 1 (default: 2)" in " ".join(capsys.readouterr().out.split())


def test_import_is_light() -> None:
    heavy = "{'torch', 'vllm', 'pyarrow', 'fsspec', 'zarr', 'ray', 'yaml'}"
    code = f"import sys, recovery.config; print(sorted({heavy} & set(sys.modules)))"
    root = Path(config.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
