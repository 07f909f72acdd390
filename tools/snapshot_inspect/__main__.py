"""`python -m snapshot_inspect`, for an environment whose scripts are not on the path."""

import sys

from snapshot_inspect.cli import main

if __name__ == "__main__":
    sys.exit(main())
