"""The page of many runs, served while they go on: `scripts/watch.py`."""
