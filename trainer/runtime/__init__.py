"""The computing environment of a run: device, processes, precision, attention, jobs."""
