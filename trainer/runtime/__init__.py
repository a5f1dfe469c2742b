"""Where and in what a run computes: device, processes, precision, attention."""
