"""Many engines under one coordinator, each an actor of Ray; `docs/ray.md` says how to use it and what dies how."""
