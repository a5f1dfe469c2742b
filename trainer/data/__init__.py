"""From folders of photos to batches: sources -> captions -> buckets -> cache -> sampler -> loader."""
