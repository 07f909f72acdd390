"""`prefix-recovery` as a process, also `python -m prefix_recovery` where scripts are not on the path.

Owns: that the imports can be interrupted like the rest. A running job takes an interrupt as a signal.
Does not know: verbs (cli.py).
"""

import sys
from typing import NoReturn

from snapshot_inspect.interrupt import code_of


def _run() -> int:
    from prefix_recovery.cli import command

    command()


def process() -> NoReturn:
    sys.exit(code_of(_run))


if __name__ == "__main__":
    process()
