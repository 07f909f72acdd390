"""The tests; a package, so that they can share oracles and be run as modules (`python -m tests.soak`)."""
