"""Averages of the trained weights over the updates of a run."""

from trainer.ema.running import Averages, NewShare, constant

__all__ = ["Averages", "NewShare", "constant"]
