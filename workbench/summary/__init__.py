"""The summary of a run in text: its model, adapter, data and length, with warnings about likely mistakes."""
