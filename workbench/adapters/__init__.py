"""What `scripts/adapter.py` does with adapter files: show, compare, convert, resize, average, merge, upload."""
