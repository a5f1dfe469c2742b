"""A run, from its config to its adapter files: built, gone through step by step, ended and saved."""
