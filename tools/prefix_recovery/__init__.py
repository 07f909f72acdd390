"""The command `prefix-recovery`: batch jobs that survive their machine, the demo, the packaged model."""
