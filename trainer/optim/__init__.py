"""Optimizers and learning-rate schedules, by name; libraries do the work."""

from trainer.optim.regrouping import Regrouping
from trainer.optim.schedules import SCHEDULES, ScheduleState, build_schedule, steps_of
from trainer.optim.state import OptimizerState, state_bytes
from trainer.optim.table import OPTIMIZERS, build_optimizer, in_8_bits, levers

__all__ = [
    "OPTIMIZERS", "SCHEDULES", "OptimizerState", "Regrouping", "ScheduleState", "build_optimizer", "build_schedule",
    "in_8_bits", "levers", "state_bytes", "steps_of",
]  # fmt: skip
