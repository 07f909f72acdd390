"""`python -m prefix_recovery`: the same command, for a Python that was not asked where its scripts are."""

import sys

from prefix_recovery.cli import main

sys.exit(main())
