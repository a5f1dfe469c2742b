"""Where a run starts, and what must not have changed since it stopped."""
