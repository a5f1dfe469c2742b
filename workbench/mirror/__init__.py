"""Copies of a run's files that outlive the machine: `checkpoint.mirror`."""
