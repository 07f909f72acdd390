"""`python -m prefix_recovery`: the same command, for a Python that was not asked where its scripts are."""

from prefix_recovery.cli import command

command()
