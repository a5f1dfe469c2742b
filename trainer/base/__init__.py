"""Helpers for all packages. Nothing here knows a model, a config or a run."""
