"""A finished run's steps, computed again in fp64: `scripts/replay.py`."""
