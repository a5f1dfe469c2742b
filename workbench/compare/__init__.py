"""Runs of several settings beside each other: `train.py --compare`."""
