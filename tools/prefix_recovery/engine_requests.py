"""What the engine is asked for one line of the prompts file: token ids and SamplingParams.

Owns: the job's and the line's sampling put together, tokenizing, chat templates.
Does not know: the engine's loop, the store, the output.

Invariants:
1. A line that cannot be asked for raises InputError, and nothing of it has reached the engine.
2. A text prompt gets its beginning-of-sequence token once (case K2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefix_recovery.prompts import Prompt
from recovery.errors import ConfigError, InputError
from vllm_hooks import surface

_SAMPLING = "see vLLM's SamplingParams for the fields"


def check_sampling(sampling: Mapping[str, Any]) -> None:
    """Raises ConfigError for a job's `sampling` that vLLM does not take."""
    try:
        surface.sampling_params(sampling)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"sampling: {error}", hint=_SAMPLING) from error


class Requests:
    """Makes requests for a started engine, under the job's own `sampling`."""

    def __init__(self, engine: Any, sampling: Mapping[str, Any]) -> None:
        self._sampling = sampling
        self._tokenizer = surface.tokenizer_of(engine)
        self._vocabulary = int(engine.vllm_config.model_config.get_vocab_size())

    def tokenizer_for(self, prompt: Prompt) -> Any | None:
        """The tokenizer, unless the prompt asked for no text."""
        return self._tokenizer if self._fields(prompt).get("detokenize", True) else None

    def _fields(self, prompt: Prompt) -> dict[str, Any]:
        """The sampling of one prompt, as its line and the job ask for it."""
        return {"logprobs": 0, **self._sampling, **prompt.sampling}

    def prepare(self, prompt: Prompt, index: int = 0) -> tuple[Any, Any]:
        """Prompt ids and SamplingParams of a prompt's sample number `index`. Raises InputError for what cannot be one.

        A seed is that of the first sample; the others count on from it, as those of one request with `n` do in vLLM.
        """
        params = self._params(prompt, index)
        ids = self.token_ids(prompt)
        if self._tokenizer is None and (largest := max(ids)) >= self._vocabulary:
            # vLLM leaves this check to the tokenizer, and an engine without one dies of such an id.
            raise InputError(
                f"token id {largest} is out of vocabulary ({self._vocabulary} tokens)", hint="mend the line, run again"
            )
        return surface.token_prompt(ids), params

    def _params(self, prompt: Prompt, index: int) -> Any:
        from vllm.sampling_params import RequestOutputKind

        try:
            params = surface.sampling_params(self._fields(prompt))
        except (TypeError, ValueError) as error:
            raise InputError(f"sampling: {error}", hint=_SAMPLING) from error
        params.output_kind = RequestOutputKind.FINAL_ONLY
        if params.seed is not None:
            params.seed += index
        return params

    def sampling_of(self, prompt: Prompt, index: int = 0) -> dict[str, Any]:
        """The sampling of a sample as it is stored with its call. Raises InputError for what cannot be one."""
        return surface.sampling_fields(self._params(prompt, index))

    def token_ids(self, prompt: Prompt) -> list[int]:
        """Its ids, as the model sees them."""
        if prompt.kind == "prompt_token_ids":
            return list(prompt.value)
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise InputError(
                f"a prompt of text needs a tokenizer, and the engine has none (`{prompt.kind}`)",
                hint="send prompt_token_ids, or leave skip_tokenizer_init out of `engine`",
            )
        if prompt.kind == "messages":
            if not getattr(tokenizer, "chat_template", None):
                raise InputError("this model's tokenizer has no chat template", hint="send `prompt` instead")
            try:
                text = tokenizer.apply_chat_template(prompt.value, add_generation_prompt=True, tokenize=False)
            except Exception as error:  # a template is a program of the model's, and may raise anything
                raise InputError(
                    f"the chat template does not take these messages: {error}", hint="mend `messages`, run again"
                ) from error
            return list(tokenizer.encode(text, add_special_tokens=False))
        begins_with_bos = bool(tokenizer.bos_token) and prompt.value.startswith(tokenizer.bos_token)
        return list(tokenizer.encode(prompt.value, add_special_tokens=not begins_with_bos))
