"""What a rollout generates: samples, their groups, and the version that decides whether a group is too old.

Owns: the fields of a sample, its JSON form, and which version of a group is compared.
Does not know: engines, when a sample is generated, what lag is allowed (staleness.py).

Invariants:
1. (A5) An attempt's pristine samples are never handed out: `copies` makes new ones every time.
2. (A67) A finished sample carries the identity of the sample it was generated for, whatever object came back; it is an
   object of its own, which nobody else's hands reach.
3. (V1, V7) `loss_mask`, and `logprobs` if there are any, are as long as `token_ids`; spans cover exactly the
   generated tokens, in order.
4. (V11) A group's version is the oldest of its trainable tokens; without spans it is the version at its admission
   (A53).
5. Numbers of any library are kept as Python's, so that a finished sample is the same after JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from operator import index
from typing import Any

from recovery.model import PolicyVersion

Span = tuple[int, int, str, int]
"""Generated tokens [start, end) were sampled under (lineage, number)."""


class MalformedSample(Exception):
    """A generate function returned what is no finished group of its attempt."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """One answer to one row. `row` is the caller's own; `request_id` names the engine call in every process.

    `loss_mask`: 1 for a token that is trained on. `version_spans`: as the engine reported. `extra` is the caller's.
    """

    row_id: str
    group_index: int
    sample_index: int
    request_id: str
    row: dict[str, Any]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    version_spans: list[Span] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    reward: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def copies(pristine: Sequence[Sample]) -> list[Sample]:
    """New samples that share nothing with the pristine ones."""
    return [deepcopy(sample) for sample in pristine]


def finished(pristine: Sequence[Sample], returned: Any) -> tuple[Sample, ...]:
    """What a generate function returned, as the finished samples of its attempt, identity stamped on.

    Raises MalformedSample: not one Sample for each, one of them twice, no numbers, lengths that disagree.
    """
    if not isinstance(returned, Sequence) or len(returned) != len(pristine):
        n = len(returned) if isinstance(returned, Sequence) else type(returned).__name__
        raise MalformedSample(f"group {pristine[0].row_id!r} has {len(pristine)} samples, and {n} came back")
    if len({id(sample) for sample in returned}) != len(returned):
        raise MalformedSample(f"group {pristine[0].row_id!r}: one Sample object came back twice; return one for each")
    made = []
    for sample, template in zip(returned, pristine, strict=True):
        if not isinstance(sample, Sample):
            raise MalformedSample(f"group {template.row_id!r}: {type(sample).__name__} came back instead of a Sample")
        stamped = replace(
            sample,
            row_id=template.row_id,
            group_index=template.group_index,
            sample_index=template.sample_index,
            request_id=template.request_id,
        )
        own = apart(_converted(stamped))
        _check(own)
        made.append(own)
    return tuple(made)


def apart(sample: Sample) -> Sample:
    """The same sample in lists and dicts of its own: changing one leaves the other as it is."""
    return replace(
        sample,
        row=_apart(sample.row),
        extra=_apart(sample.extra),
        token_ids=list(sample.token_ids),
        logprobs=list(sample.logprobs),
        loss_mask=list(sample.loss_mask),
        version_spans=list(sample.version_spans),
    )


def _apart(value: Any) -> Any:
    if type(value) is dict:
        return {key: _apart(one) for key, one in value.items()}
    return [_apart(one) for one in value] if type(value) is list else value


def _converted(sample: Sample) -> Sample:
    """Its numbers as Python's own, its spans as tuples. Raises MalformedSample for what is no such thing."""
    made = {}
    for name, convert in _PLAIN.items():
        found = getattr(sample, name)
        try:
            made[name] = convert(found)
        except (TypeError, ValueError, OverflowError) as error:
            what = f"sample {sample.sample_index} of {sample.row_id!r}"
            raise MalformedSample(f"{what}: {name} is {found!r:.80}, which cannot be kept: {error}") from error
    return replace(sample, **made)


def _integer(value: Any) -> int:
    return int(index(value))


def _trained(value: Any) -> int:
    if value not in (0, 1):
        raise ValueError("a token is trained on (1) or not (0)")
    return int(value)


def _span(value: Any) -> Span:
    start, end, lineage, number = value
    if not isinstance(lineage, str):
        raise TypeError(f"the lineage {lineage!r} is no string")
    return _integer(start), _integer(end), str(lineage), _integer(number)


def _each(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda values: [convert(value) for value in values]


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "token_ids": _each(_integer),
    "logprobs": _each(float),
    "loss_mask": _each(_trained),
    "version_spans": _each(_span),
    "reward": lambda value: value if value is None or type(value) is int else float(value),
}


def _check(sample: Sample) -> None:
    what, n = f"sample {sample.sample_index} of {sample.row_id!r}", len(sample.token_ids)
    if not sample.loss_mask:
        sample.loss_mask = [1] * n
    if len(sample.loss_mask) != n or len(sample.logprobs) not in (0, n):
        raise MalformedSample(f"{what}: token_ids, logprobs and loss_mask differ in length")
    at = 0
    for start, end, lineage, number in sample.version_spans:
        masked = not any(sample.loss_mask[at:start])  # tool and environment tokens have no version
        if not (at <= start < end <= n and masked and lineage and number >= 0):
            raise MalformedSample(f"{what}: version span {(start, end, lineage, number)} does not fit")
        at = end
    if sample.version_spans and any(sample.loss_mask[at:]):
        raise MalformedSample(f"{what}: tokens from {at} on are trained on and have no version")


def trainable_versions(samples: Sequence[Sample], admitted: PolicyVersion | None) -> set[PolicyVersion | None]:
    """The versions of all tokens that would be trained on. A sample that reports no spans counts as admitted.

    One whose every token is context has none.
    """
    versions: set[PolicyVersion | None] = set()
    for sample in samples:
        if not sample.version_spans and (any(sample.loss_mask) or not sample.loss_mask):
            versions.add(admitted)
        for start, end, lineage, number in sample.version_spans:
            if any(sample.loss_mask[start:end]):
                versions.add(PolicyVersion(lineage, number))
    return versions


_NUMBERS: dict[str, tuple[type, ...]] = {"token_ids": (int,), "logprobs": (float, int), "loss_mask": (int,)}
"""Fields that are long lists of numbers, which are the same after JSON if they are of these very types."""


def to_json(sample: Sample) -> dict[str, Any]:
    """Raises TypeError or ValueError if the caller's fields are no JSON, or would come back as something else.

    The value shares its lists with the sample.
    """
    value = {one.name: getattr(sample, one.name) for one in fields(sample)}
    others = {name: one for name, one in value.items() if name not in _NUMBERS}
    again = json.loads(json.dumps(others, allow_nan=False))
    again["version_spans"] = [tuple(span) for span in again["version_spans"]]
    plain = all(
        type(value[name]) is list and all(type(one) in types for one in value[name]) for name, types in _NUMBERS.items()
    )
    if again != others or not plain or not all(map(isfinite, sample.logprobs)):
        raise ValueError(f"sample {sample.sample_index} of {sample.row_id!r} is not the same after JSON")
    return value


def from_json(value: dict[str, Any]) -> Sample:
    """The inverse of `to_json`. Raises TypeError, KeyError or ValueError for anything else."""
    spans = [
        (int(start), int(end), str(lineage), int(number)) for start, end, lineage, number in value["version_spans"]
    ]
    return Sample(**{**value, "version_spans": spans})
