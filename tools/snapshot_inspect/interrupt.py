"""An interrupt of a command: one line and its exit code, wherever it comes, also while the imports run.

Owns: the words and the code.
Does not know: what is interrupted. It loads nothing, so that it is there before anything slow is.
"""

import sys
from collections.abc import Callable

INTERRUPTED = 130


def code_of(run: Callable[[], int]) -> int:
    """What `run` returns, or INTERRUPTED."""
    try:
        return run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
