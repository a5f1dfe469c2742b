"""The numbers of a run: written, mirrored, watched, and judged."""
