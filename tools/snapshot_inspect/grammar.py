"""A command line that names the verb that was meant.

Owns: the nearest verb to one that there is not.
Does not know: which verbs there are.
"""

from __future__ import annotations

import argparse
import difflib
import re
from typing import NoReturn

MEANT = {"resume": "run", "restore": "run", "continue": "run", "start": "run", "ls": "list", "check": "verify"}
"""Words of neighbouring tools."""
_UNKNOWN = re.compile(r"argument VERB: invalid choice: '(?P<word>[^']*)' \(choose from (?P<verbs>.*)\)")


class Parser(argparse.ArgumentParser):
    """Verbs have `metavar="VERB"`."""

    def error(self, message: str) -> NoReturn:
        super().error(nearest(message))


def nearest(message: str) -> str:
    """What argparse says of a verb that there is not, with the one that was meant before the list of all."""
    found = _UNKNOWN.fullmatch(message)
    if found is None:
        return message
    word, verbs = found["word"], re.findall(r"[\w-]+", found["verbs"])
    near = [MEANT[word]] if MEANT.get(word) in verbs else difflib.get_close_matches(word, verbs, 1)
    return f"no verb {word!r}" + (f"; did you mean {near[0]}?" if near else ".") + f" There are: {', '.join(verbs)}"
