"""Optimizers and learning-rate schedules, by name; libraries do the work."""

from trainer.optim.regrouping import Regrouping
from trainer.optim.schedules import ScheduleState, build_schedule, warmup_steps
from trainer.optim.state import OptimizerState
from trainer.optim.table import OPTIMIZERS, build_optimizer, state_bytes

__all__ = [
    "OPTIMIZERS", "OptimizerState", "Regrouping", "ScheduleState", "build_optimizer", "build_schedule", "state_bytes",
    "warmup_steps",
]  # fmt: skip
