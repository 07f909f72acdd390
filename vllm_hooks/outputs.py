"""From the engine's deltas to the outputs the caller asked for: DELTA, CUMULATIVE or FINAL_ONLY, whole or resumed.

Owns: the shape of what `RecoverableEngine.generate` yields.
Does not know: buffers, sessions, stores.

Invariants:
1. What the caller did not ask for is not there: no logprobs, no text without detokenize (case L4).
2. A resumed call looks like one that was never interrupted: original prompt, all tokens, all logprobs, whole text,
   one cumulative logprob; a DELTA caller gets the prefix as its first delta, or, replayed, token by token as it came.
3. The last output is the engine's object with its own finish and stop reason, unless the call ended by something that
   only its whole text or all its tokens show: a stop string or a repetition that began before the cut.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from typing import Any

from recovery.transcripts import ColumnRun
from vllm_hooks import surface, top_logprobs

REPETITION = ("repetition", "repetition_detected")
"""Finish and stop reason of a call that repeats itself, in vLLM's words."""


class Assembly:
    """The outputs of one call as its caller wants them.

    `prompt_logprobs` are the engine's, or set by who asked for them apart; a stream of deltas has them once.
    """

    def __init__(
        self,
        params: Any,
        request_id: str,
        prompt_ids: list[int],
        prompt_text: str | None,
        tokenizer: Any | None,
        prefix_ids: array[int],
        prefix_logprobs: array[float],
        prefix_columns: Mapping[str, tuple[ColumnRun, ...]],
    ) -> None:
        from vllm.logprobs import create_sample_logprobs
        from vllm.sampling_params import RequestOutputKind

        self._delta = params.output_kind == RequestOutputKind.DELTA
        self._final_only = params.output_kind == RequestOutputKind.FINAL_ONLY
        self._wants_logprobs = params.logprobs is not None
        self._request_id = request_id
        self._prompt_ids = prompt_ids
        self._prompt_text = prompt_text
        self.prompt_logprobs: Any = None
        self._ids: list[int] = list(prefix_ids)
        self._text = ""
        self._logprobs: Any = create_sample_logprobs(params.flat_logprobs)
        self._resumed = len(prefix_ids) > 0
        self._entries: top_logprobs.Entries | None = None
        self._n_top = top_logprobs.n_kept(params) or 0
        self._unsent = len(self._ids)
        self._detokenizer = None
        self._undecoded: list[int] = []
        self._replayed_text = ""
        self._repetition = getattr(params, "repetition_detection", None) if self._resumed else None
        self._min_tokens = int(params.min_tokens)
        if self._resumed:
            self._new_detokenizer = lambda: surface.detokenizer(tokenizer, params, prompt_ids, request_id)
            self._detokenizer = self._new_detokenizer()
            self._undecoded = list(self._ids)
            if self._wants_logprobs:
                self._entries = top_logprobs.Entries(params, tokenizer)
                self._entries.add(top_logprobs.positions_from(prefix_ids, prefix_logprobs, prefix_columns, self._n_top))

    def begin(self) -> tuple[str, str] | None:
        """Whether the saved tokens already hold a stop string or a repetition: its finish and stop reason.

        To be asked before anything is generated, of a call whose last saved token does not end it.
        """
        if not self._resumed:
            return None
        stop = self._feed([], by_token=False)
        if stop is not None:
            return "stop", stop
        return REPETITION if self._repeats(len(self._ids)) else None

    def replay(self, n_tokens: int) -> Iterator[Any]:
        """The deltas of the first saved tokens, each as the engine gave it; of a DELTA caller, before anything else."""
        if not n_tokens:
            return
        assert self._delta and self._resumed
        detokenizer, cumulative = self._new_detokenizer(), 0.0
        for at, token in enumerate(self._ids[:n_tokens], start=1):
            detokenizer.update([token], False)
            text = detokenizer.get_next_output_text(False, True)
            self._replayed_text += text
            self._unsent = len(self._ids) - at
            entries = None if self._entries is None else self._entries.fresh(1)
            cumulative += sum(surface.sampled_logprobs([token], entries) or ())
            yield self._output([token], text, entries, cumulative if entries is not None else None)

    def settle(self, output: Any) -> bool:
        """Look for what ends a resumed call across the joint. True: `output` is its last one, and trimmed.

        To be asked of each engine output before its tokens are captured.
        """
        if not self._resumed:
            return False
        completion = output.outputs[0]
        fresh = list(completion.token_ids)
        # One by one, as the engine looked at them: an output that waited may hold many tokens.
        for n, token in enumerate(fresh, start=1):
            last = n == len(fresh)
            self._ids.append(token)
            stop = self._feed([token], by_token=last and completion.finish_reason == "stop")
            if stop is not None:
                return self._end(output, n, ("stop", stop))
            looks = not last or completion.finish_reason is None  # what ends a call by its last token comes first
            if looks and self._repeats(len(self._ids)):
                return self._end(output, n, REPETITION)
        return False

    @staticmethod
    def _end(output: Any, n_tokens: int, ended: tuple[str, str]) -> bool:
        surface.trim(output, n_tokens)
        output.outputs[0].finish_reason, output.outputs[0].stop_reason = ended
        output.finished = True
        return True

    def _repeats(self, n_tokens: int) -> bool:
        if self._repetition is None or n_tokens < self._min_tokens:
            return False
        return surface.repeats(self._ids[:n_tokens], self._repetition)

    def _feed(self, ids: list[int], *, by_token: bool) -> str | None:
        """Decode `ids`, and the prefix before the first of them; the token that stopped has no text.

        Returns the stop string that is there now.
        """
        assert self._detokenizer is not None
        ids, self._undecoded = [*self._undecoded, *ids], []
        stop: str | None = self._detokenizer.update(ids, by_token)
        return stop

    def add(self, output: Any) -> Any | None:
        """The engine's delta, once settled, turned into what the caller is given now, or None."""
        completion = output.outputs[0]
        fresh = list(completion.token_ids)
        if self._detokenizer is not None:
            text = self._after_the_replayed(self._detokenizer.get_next_output_text(output.finished, True))
        else:
            self._ids.extend(fresh)
            text = completion.text
        if output.prompt_logprobs:
            self.prompt_logprobs = output.prompt_logprobs
        self._text += text
        if self._entries is not None:
            self._entries.add(top_logprobs.positions_of(completion.logprobs, 0, len(fresh), self._n_top))
        elif self._wants_logprobs and completion.logprobs is not None and not self._delta:
            top_logprobs.extend(self._logprobs, completion.logprobs)
        if self._final_only and not output.finished:
            return None
        self._shape(output, completion, fresh, text)
        return output

    def _shape(self, output: Any, completion: Any, fresh: list[int], text: str) -> None:
        if self._resumed:
            output.prompt_token_ids = self._prompt_ids
            if self._entries is not None:
                completion.cumulative_logprob = self._entries.cumulative
        if self._delta:
            first, self._unsent = self._unsent, 0
            n_before = len(self._ids) - len(fresh)
            completion.token_ids = self._ids[n_before - first : n_before] + fresh if first else fresh
            completion.text = text
            if self._resumed:
                output.prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
            if self._entries is not None:
                completion.logprobs = self._entries.fresh()
        else:
            output.prompt_logprobs = self.prompt_logprobs
            completion.token_ids = list(self._ids)
            completion.text = self._text
            completion.logprobs = self._all_logprobs()
        if not self._wants_logprobs:
            completion.logprobs = None
            completion.cumulative_logprob = None

    def _all_logprobs(self) -> Any | None:
        if self._entries is not None:
            return self._entries.all
        return self._logprobs[:] if self._wants_logprobs else None

    def _after_the_replayed(self, text: str) -> str:
        """A detokenizer's next text, without what of it was replayed."""
        n_known, self._replayed_text = len(self._replayed_text), ""
        return text[n_known:]

    def finished(self, finish_reason: str, stop_reason: int | str | None) -> Any:
        """The last output of a call whose tokens all were saved: the engine is not asked again."""
        text = ""
        if self._detokenizer is not None:
            self._feed([], by_token=finish_reason == "stop" and not isinstance(stop_reason, str))
            text = self._after_the_replayed(self._detokenizer.get_next_output_text(True, True))
        replayed = self._unsent < len(self._ids)
        ids = self._ids[len(self._ids) - self._unsent :] if replayed else list(self._ids)
        logprobs = self._entries.fresh() if replayed and self._entries is not None else self._all_logprobs()
        cumulative = self._entries.cumulative if self._entries is not None else None
        output = self._output(ids, self._text + text, logprobs, cumulative)
        output.outputs[0].finish_reason, output.outputs[0].stop_reason = finish_reason, stop_reason
        output.finished = True
        return output

    def _output(self, ids: list[int], text: str, logprobs: Any, cumulative: float | None) -> Any:
        """An output of our own making, not the last one; a stream has the prompt's logprobs once."""
        from vllm.outputs import CompletionOutput, RequestOutput

        prompt_logprobs = self.prompt_logprobs
        if self._delta:
            self.prompt_logprobs = None
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt_text,
            prompt_token_ids=self._prompt_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[
                CompletionOutput(index=0, text=text, token_ids=ids, cumulative_logprob=cumulative, logprobs=logprobs)
            ],
            finished=False,
        )
