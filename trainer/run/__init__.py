"""A run, from its config to its adapter files: set-up, steps, saving, end."""
