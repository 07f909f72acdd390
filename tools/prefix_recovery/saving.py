"""What a run tells its operator about what was and was not saved: lines for stderr.

Owns: the words for what the self-test saw, what a restore found, and what was not stored in the end.
Does not know: when a line is shown, what waits meanwhile (waiting.py), the engine.

Invariants:
1. Everything that a restore or a coordinator counted as not taken is said, with its reason.
2. Nothing is said of what went as it should, but what the operator needs to recognise the job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from recovery.restored import Restored
from recovery.staging import StagingCounters
from snapshot_inspect.texts import count_text
from vllm_hooks.parity import Parity


def restored_lines(restored: Restored, n_calls: int, n_tokens: int) -> Iterator[str]:
    """What the restore found and did. `n_calls`, `n_tokens`: calls in flight, and tokens of them that are kept."""
    yield from restored.passed_over_lines()
    if restored.snapshot is not None or restored.adopted_segments:
        yield (
            f"continuing from snapshot {restored.snapshot or 'none'}, "
            f"{count_text(restored.adopted_segments, 'later segment')}, as snapshot {restored.published}: "
            f"{count_text(n_calls, 'call')} in flight, {count_text(n_tokens, 'token')} of them kept"
        )
    yield from rejected_lines("of the later segments", restored.rejected)
    if restored.uncollected is not None:
        yield f"garbage of earlier runs stays for a later run to collect: {restored.uncollected.message}"


def parity_lines(parity: Parity) -> Iterator[str]:
    """What the self-test saw, if one was run."""
    if parity.n_calls:
        yield (
            f"self-test{' of an earlier start' if parity.earlier else ''}: "
            f"{parity.n_calls - parity.n_different} of {parity.n_calls} resumed calls equal, "
            f"largest logprob gap {parity.largest_gap:.2g}: resumes are graded `{parity.grade}`; "
            f"tokens are captured {'by looking at running calls' if parity.pull_agrees else 'as they are streamed'}"
        )
    for apart in parity.divergences:
        gap = "" if apart.best_gap is None else f", where the two best logits were {apart.best_gap:.2g} apart"
        yield f"self-test: a resumed call went another way at token {apart.at}{gap}"


def closing_lines(staging: StagingCounters, rejected: Mapping[str, int]) -> Iterator[str]:
    """At the end of a run. `rejected`: records that did not fit the ledger, by reason."""
    yield from rejected_lines("that were stored", rejected)
    if staging.skipped or staging.failures:
        skipped = count_text(staging.skipped, "periodic flush", "periodic flushes")
        yield (
            f"stored {count_text(staging.flushes, 'segment')}; {skipped} skipped while another was being written (the "
            f"next one took its tokens), {staging.failures} failed"
        )
    if staging.backlog_records:
        yield (
            f"{staging.backlog_records} records could not be stored and end with this process: {staging.last_failure}"
        )


def undelivered_line(n_rows: int, output: str, *, stored: bool) -> str:
    """Said when a run ends before all finished rows were appended."""
    then = "writes them from the store" if stored else "generates them again"
    return f"{n_rows} finished rows are not in {output}; the next run {then}"


def stopped_line(signal: str, n_missing: int, snapshot: int | None) -> str:
    """Said when a signal ended the run. `snapshot`: the last one, if it was published."""
    taken = f"; the last snapshot was taken ({snapshot})" if snapshot is not None else ""
    return f"stopped by {signal}{taken}; run the same command to continue ({n_missing} to go)"


def rejected_lines(which: str, rejected: Mapping[str, int]) -> Iterator[str]:
    """Records that did not fit the ledger, by reason."""
    for reason, n in sorted(rejected.items()):
        yield f"{n} record{'s' if n > 1 else ''} {which} did not fit and {'are' if n > 1 else 'is'} not used: {reason}"
