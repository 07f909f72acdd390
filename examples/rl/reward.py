"""The task: prompts of known, heavy-tailed length, and a reward that anybody can verify by counting.

Owns: the prompt rows, the reward of an answer.
Does not know: models, training.

Invariant:
1. Rows are a function of their number: every process sees the same ones. An answer has exactly `max_tokens` tokens, so
   that a run which favours short answers would show it in its mean length.
"""

from __future__ import annotations

from typing import Any

WORDS = ("apples", "bridges", "candles", "dolphins", "engines", "forests", "gardens", "harbours")


def rows(n: int, shortest: int, longest: int) -> list[dict[str, Any]]:
    """`n` prompts; one in eight is about as long as the longest, most are short."""
    found = []
    for i in range(n):
        share = (1 / (1 + (i * 5) % 8)) ** 1.5  # 1, 0.35, 0.19, ... 0.04: a heavy tail
        found.append(
            {
                "id": f"p{i:03d}",
                "prompt": f"{i}. Tell me about {WORDS[i % len(WORDS)]}:",
                "max_tokens": shortest + round((longest - shortest) * share),
            }
        )
    return found


def reward(text: str) -> float:
    """The share of an answer's characters that are small letters of the alphabet."""
    return sum("a" <= letter <= "z" for letter in text) / len(text) if text else 0.0
