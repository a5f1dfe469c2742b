"""Optimizers and learning-rate schedules, by name; libraries do the work."""

from trainer.optim.schedules import ScheduleState, build_schedule, warmup_steps
from trainer.optim.state import OptimizerState
from trainer.optim.table import OPTIMIZERS, build_optimizer

__all__ = ["OPTIMIZERS", "OptimizerState", "ScheduleState", "build_optimizer", "build_schedule", "warmup_steps"]
