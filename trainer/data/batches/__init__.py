"""The order of an epoch, and the batches that it is cut into."""
