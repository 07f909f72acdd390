"""`snapshot-inspect` as a process, also `python -m snapshot_inspect` where scripts are not on the path.

Owns: that an interrupt is one line and its exit code, also while the imports run: they take a second, and more on a
machine that is busy.
Does not know: verbs (cli.py).
"""

import sys
from typing import NoReturn

INTERRUPTED = 130


def command() -> NoReturn:
    try:
        from snapshot_inspect.cli import main

        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    command()
