"""Pictures from a checkpoint or an adapter file: `scripts/sample.py`."""
