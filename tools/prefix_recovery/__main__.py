"""`prefix-recovery` as a process, also `python -m prefix_recovery` where scripts are not on the path.

Owns: that an interrupt is one line and its exit code, also while the imports run. A running job takes it as a signal.
Does not know: verbs (cli.py).
"""

import sys
from typing import NoReturn

INTERRUPTED = 130


def process() -> NoReturn:
    try:
        from prefix_recovery.cli import command

        command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    process()
