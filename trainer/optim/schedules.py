"""Learning-rate schedules, by name, counted in optimizer updates."""

import math
from typing import Any

import torch


def warmup_steps(warmup: int | float, total_steps: int) -> int:
    """An integer counts steps; a fraction below 1 is a share of total_steps, rounded down."""
    return warmup if isinstance(warmup, int) else int(warmup * total_steps)


def build_schedule(
    name: str, optimizer: torch.optim.Optimizer, *, warmup: int, total_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """diffusers' schedule of that name, counted in optimizer updates."""
    from diffusers.optimization import get_scheduler

    names = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
    schedule = get_scheduler(names[name], optimizer, num_warmup_steps=warmup, num_training_steps=total_steps)
    # A run that was lengthened stays at the end of its frozen schedule; the library's cosine would rise again.
    schedule.lr_lambdas = [lambda n, rate=rate: rate(min(n, total_steps)) for rate in schedule.lr_lambdas]
    return schedule


class ScheduleState:
    """A schedule's counters as a piece of the checkpoint; its lambdas are rebuilt from the config.

    anew: the config may have other rates, groups or another schedule than the checkpoint's, and the next step takes them.
    """

    def __init__(self, schedule: torch.optim.lr_scheduler.LambdaLR, *, anew: bool = False) -> None:
        self.schedule, self.anew = schedule, anew

    def state_dict(self) -> dict[str, Any]:
        rates = [float(rate) for rate in self.schedule.get_last_lr()]
        return {"last_epoch": self.schedule.last_epoch, "_step_count": self.schedule._step_count, "_last_lr": rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Also sets the optimizer's rates. Raises ValueError where these are not one rate for each group."""
        counts, rates = (state["last_epoch"], state["_step_count"]), list(state["_last_lr"])
        if not all(type(count) is int and 0 <= count < 2**53 for count in counts):  # up to there floats count exactly
            raise ValueError(f"counters {counts}")
        rates_are_rates = all(type(rate) is float and rate >= 0 and math.isfinite(rate) for rate in rates)
        fits = self.anew or len(rates) == len(self.schedule.optimizer.param_groups)
        if not fits or not rates_are_rates:
            raise ValueError(f"rates {rates}")
        self.schedule.last_epoch, self.schedule._step_count = counts
        if self.anew:
            by_group = zip(self.schedule.base_lrs, self.schedule.lr_lambdas, strict=True)
            rates = [float(base * rate(self.schedule.last_epoch)) for base, rate in by_group]
        self.schedule._last_lr = rates
        for group, rate in zip(self.schedule.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
