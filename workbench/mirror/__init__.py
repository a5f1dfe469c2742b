"""A second place for a run's files, which outlives the machine: `checkpoint.mirror`."""
