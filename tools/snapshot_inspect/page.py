"""A report as one self-contained page.

Owns: how page, style, program and figures become one file, and that nothing in the figures is taken for markup.
Does not know: what the figures mean; the program in web/report.js draws them.

Invariants:
1. The page asks for nothing: no network, no other file. Its policy (CSP) allows exactly the style and program that are
   in it, by their hashes.
2. Whatever a store's names hold, the figures are data: `<`, `>`, `&` and line separators are escaped, and the program
   writes text, never markup.
3. The file is there as a whole or not at all (new_file.py).
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources

from snapshot_inspect.documents import Document
from snapshot_inspect.new_file import new_file
from storage_backends.posix import write_all

_ESCAPED = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029\u007f"}


def render(document: Document) -> str:
    """The page."""
    parts = resources.files("snapshot_inspect") / "web"
    page, style, program = (
        (parts / name).read_text(encoding="utf-8") for name in ("report.html", "report.css", "report.js")
    )
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(program)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    for mark, text in (("POLICY", policy), ("STYLE", style), ("PROGRAM", program), ("FIGURES", _data(document))):
        before, found, after = page.partition(f"@@{mark}@@")
        assert found, mark
        page = before + text + after
    return page


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data(document: Document) -> str:
    """JSON that ends no script element, also with names that try to; half a surrogate pair stays an escape."""
    return json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":")).translate(_ESCAPED)


def write(path: str, document: Document) -> None:
    """Put the page at `path`, in the place of an earlier one. Raises ConfigError, or what the system says."""
    data = render(document).encode()
    with new_file(path, replace=True) as fd:
        write_all(fd, data)
