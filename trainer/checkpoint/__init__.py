"""Crash-safe storage of a run's state."""
