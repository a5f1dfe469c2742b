"""Results of a run: samples, adapter files, and the ports for pages, trackers and mirror."""
