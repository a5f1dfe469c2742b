"""Adapter files and checkpoints as a person handles them: read, convert, merge, compare, resize, push."""
