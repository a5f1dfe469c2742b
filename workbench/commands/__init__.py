"""The command line: `train.py` and what it offers beside training."""
