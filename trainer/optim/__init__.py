"""Optimizers and learning-rate schedules, by name; libraries implement them."""

from trainer.optim.schedules import SCHEDULES, ScheduleState, build_schedule, steps_of
from trainer.optim.state import OptimizerState, Regrouping, state_bytes
from trainer.optim.table import OPTIMIZERS, build_optimizer, in_8_bits, levers

__all__ = [
    "OPTIMIZERS", "SCHEDULES", "OptimizerState", "Regrouping", "ScheduleState", "build_optimizer", "build_schedule",
    "in_8_bits", "levers", "state_bytes", "steps_of",
]  # fmt: skip
