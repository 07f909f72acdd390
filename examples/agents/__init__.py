"""Two agents whose rollouts outlive their process: docs/agents.md."""
