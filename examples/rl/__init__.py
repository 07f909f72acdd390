"""Reinforcement learning of a small model on a CPU, in one process that may be killed at any moment."""
