"""Token ids as text, with the tokenizer that people point to.

Owns: loading a `tokenizer.json`.
Does not know: whether it is the tokenizer of the job (its fingerprint is not compared here), stores.

Invariants:
1. No network: a folder or a file on this machine, nothing else.
2. Special tokens are shown, not skipped: what is printed is what was generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recovery.errors import ConfigError


class Texts:
    """The tokenizer in `folder`. Raises ConfigError if there is none or it cannot be loaded."""

    def __init__(self, folder: str) -> None:
        path = Path(folder)
        if path.is_dir():
            path /= "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"there is no tokenizer at {path}", hint="give the model's folder, or the path of its tokenizer.json"
            )
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ConfigError("--tokenizer needs the package tokenizers", hint="pip install tokenizers") from None
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception itself, for whatever it cannot load
            raise ConfigError(f"{path} is no tokenizer: {error}", hint="make it anew from the model") from error

    def text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Each token by itself; bytes of a character that several tokens share are shown as U+FFFD."""
        return [self.text([token_id]) for token_id in token_ids]
