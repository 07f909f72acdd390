"""`python -m examples.rl`."""

from examples.rl.cli import main

raise SystemExit(main())
