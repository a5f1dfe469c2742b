"""The subcommands of `scripts/adapter.py`: show, compare, convert, resize, average, merge, upload adapter files."""
