"""What all packages may use. Nothing here knows a model, a config or a run."""
