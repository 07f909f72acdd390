"""How a call goes on from a saved prefix, or why it cannot: pure decisions over request and prefix.

Owns: the ResumePlan.
Does not know: vLLM's classes; the sampling is the plain mapping of a Request. Which fields resume how is
resume_table.py's.

Invariants:
1. prefix + what the plan asks for never exceeds the original budget, however often a call is resumed (B1, B2, B4).
2. A prefix that already is a whole answer is finished, not sent again.
3. What an engine cannot do now is not resumed, whatever the engine could that the call was begun on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from recovery import resume_table
from recovery.model import Request
from recovery.resume_table import Kind, drawn_alike, is_greedy, why


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends a call in this engine, and what it adds to a resume.

    `eos_token_ids` are those of the model, the primary one first; `abilities` are keys of resume_table.ABILITIES;
    `blocked_by` names what about the engine makes every call begin again; `thinking_end` is the marker that the engine
    forces when a thinking budget is used up. `whole_calls`: mode `turn`, in which a call is kept whole or not at all.
    """

    eos_token_ids: tuple[int, ...]
    max_model_len: int
    abilities: frozenset[str] = frozenset()
    blocked_by: str = ""
    thinking_end: tuple[int, ...] = ()
    whole_calls: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    """The prefix is the whole answer."""

    finish_reason: str
    stop_reason: int | None


@dataclass(frozen=True, slots=True)
class Resume:
    """Prefill prompt + prefix and generate at most `max_tokens` more (None: up to the context length).

    0: nothing, and whether it ended by a stop string is to be looked up in its text. `difference` says what will not be
    as in the uninterrupted call; empty: nothing.
    """

    n_prefix: int
    max_tokens: int | None
    min_tokens: int
    difference: str = ""


@dataclass(frozen=True, slots=True)
class Restart:
    """Begin again from the prompt; `reason` says why the prefix is of no use."""

    reason: str


ResumePlan = Finish | Resume | Restart


def plan(request: Request, n_prefix: int, last_token_id: int | None, stop: StopRules) -> ResumePlan:
    """What to do with an open call of which `n_prefix` tokens are saved, the last of them `last_token_id`."""
    return Plans(stop).plan(request, n_prefix, last_token_id)


class Plans:
    """Plans for many calls on one engine; what calls share that were sampled alike is decided once."""

    def __init__(self, stop: StopRules) -> None:
        self._stop = stop
        self._known: dict[tuple[int, int, str], _Asked] = {}

    def plan(self, request: Request, n_prefix: int, last_token_id: int | None) -> ResumePlan:
        """Follows the order of vLLM's own check after each token: end-of-sequence, stop ids, then the budgets."""
        if n_prefix == 0:
            return Restart("no token was saved")
        asked = self._asked(request)
        if last_token_id in asked.ends:
            return asked.ends[last_token_id]
        room = self._stop.max_model_len - len(request.prompt_token_ids) - n_prefix
        left = room if asked.budget is None else min(room, asked.budget - n_prefix)
        if left <= 0 and not asked.stops_at_text:
            return Finish("length", None)
        if left <= 0:  # the last token may have completed a stop string; who has the text, says how it ended
            return Resume(n_prefix=n_prefix, max_tokens=0, min_tokens=0)
        if self._stop.whole_calls:
            return Restart("mode turn: a call that has not ended begins again")
        if asked.blocked:
            return Restart(f"{asked.blocked}: {why(asked.blocked)}")
        if last_token_id in asked.inside_marker:
            # The engine would take the half of a marker for thinking, and force the whole of it again.
            return Restart("thinking_token_budget: the cut may lie inside the marker that ends thinking")
        resume = asked.resumes.get(n_prefix)
        if resume is None:
            resume = asked.resumes[n_prefix] = Resume(
                n_prefix=n_prefix,
                max_tokens=None if asked.budget is None else asked.budget - n_prefix,
                min_tokens=max(0, asked.min_tokens - n_prefix),
                difference=asked.difference,
            )
        return resume

    def _asked(self, request: Request) -> _Asked:
        key = id(request.sampling), id(request.extra), request.restart_only
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _Asked.of(request, self._stop)
        return known


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What a request says of its end, on one engine. `request` keeps what the key of `Plans` names alive."""

    request: Request
    ends: Mapping[int | None, Finish]
    budget: int | None
    min_tokens: int
    stops_at_text: bool
    blocked: str
    inside_marker: Collection[int | None]
    difference: str
    resumes: dict[int, Resume] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request, stop: StopRules) -> _Asked:
        sampling = request.sampling
        budget = sampling.get("max_tokens", 16)
        thinks = sampling.get("thinking_token_budget") is not None
        return cls(
            request=request,
            ends=_ends(sampling, stop),
            budget=None if budget is None else int(budget),
            min_tokens=int(sampling.get("min_tokens", 0)),
            stops_at_text=bool(sampling.get("stop")),
            blocked=blocked_by(request, stop),
            inside_marker=stop.thinking_end[:-1] if thinks else (),
            difference=difference(request, stop.abilities),
        )


def hindrance(sampling: Mapping[str, Any], arguments: Iterable[str], stop: StopRules) -> str:
    """The field because of which a call is not resumed in the middle on this engine, or "".

    `sampling`: fields that differ from vLLM's defaults; `arguments`: names of what else the request has set.
    """
    return stop.blocked_by or resume_table.hindrance(sampling, arguments, stop.abilities)


def blocked_by(request: Request, stop: StopRules) -> str:
    """The field because of which this call begins again, or "".

    What was written down at admission stands, unless it is only something that this engine may have and that one had
    not.
    """
    noted = resume_table.row(request.restart_only)
    if request.restart_only and (noted.kind is Kind.RESTART or noted.limit is not None):
        return request.restart_only  # past a limit, values were not kept (and once they never were)
    return hindrance(request.sampling, request.extra, stop)


def difference(request: Request, abilities: frozenset[str]) -> str:
    """What a resume will change, of a call that is not blocked."""
    if is_greedy(request.sampling) or drawn_alike(request.sampling, request.extra, abilities):
        return ""
    return "another draw from the same distribution"


def _ends(sampling: Mapping[str, Any], stop: StopRules) -> Mapping[int | None, Finish]:
    """The tokens that end a call when they come last."""
    ends: dict[int | None, Finish] = {}
    if not sampling.get("ignore_eos", False):
        ends = {token: Finish("stop", token) for token in stop.eos_token_ids}
        ends.update((token, Finish("stop", None)) for token in stop.eos_token_ids[:1])
    for token in sampling.get("stop_token_ids") or ():
        ends.setdefault(token, Finish("stop", token))
    return ends
