"""Forecasts the memory and time of a run before it starts, and chooses what fits."""
