"""vLLM's reasoning parser of marks that are single tokens, for a model that has no words for them.

Owns: which of the tiny model's words stands for `</think>`, and the parser's name.
Does not know: who asks for it. A server loads this file with `--reasoning-parser-plugin`: it imports nothing of ours.
"""

from __future__ import annotations

from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser

NAME = "spoken"


class SpokenReasoning(DeepSeekR1ReasoningParser):
    """DeepSeek's, with other marks: reasoning is begun by the prompt's first token and ended by the word `ends`."""

    ends = "th"

    @property
    def start_token(self) -> str:
        return "<bos>"

    @property
    def end_token(self) -> str:
        return self.ends


ReasoningParserManager.register_module(name=NAME, module=SpokenReasoning, force=True)
