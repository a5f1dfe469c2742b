"""Draws images with a checkpoint or adapter files: `scripts/sample.py`."""
