"""`snapshot-inspect` as a process, also `python -m snapshot_inspect` where scripts are not on the path.

Owns: that the imports, which take a second and more on a busy machine, can be interrupted like the rest.
Does not know: verbs (cli.py).
"""

import sys
from typing import NoReturn

from snapshot_inspect.interrupt import code_of


def _run() -> int:
    from snapshot_inspect.cli import main

    return main()


def command() -> NoReturn:
    sys.exit(code_of(_run))


if __name__ == "__main__":
    command()
