"""Resolves a config into a plan and checks it, before any weight is read."""
