"""Learning-rate schedules, by name, counted in optimizer updates."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def steps_of(given: int | float, total_steps: int) -> int:
    """An integer counts steps; a fraction below 1 is a share of total_steps, rounded down."""
    # 0.29 * 100 is a little less than 29.
    return given if isinstance(given, int) else int(round(given * total_steps, 6))


@dataclass(frozen=True)
class Descent:
    """How the rate falls once the warm-up is over.

    left: (done, length, **those of `reads`) -> the share of the way from the base rate (1) to the rate at the end (0), after
    `done` of `length` updates, 0 <= done <= length. reads: keys of the config's table. source: of the formula.
    """

    left: Callable[..., float]
    source: str
    reads: tuple[str, ...] = ("end",)


def _linear(done: int, length: int) -> float:
    return max(0.0, float(length - done) / float(max(1, length)))


def _cosine(done: int, length: int, cycles: int = 1) -> float:
    """`cycles` half waves; each but the first begins with a jump back to the base rate."""
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * (float(cycles) * done / length % 1.0)))) if done < length else 0.0


def _rex(done: int, length: int) -> float:
    left = _linear(done, length)
    return left / (0.5 + 0.5 * left)


def _wsd(done: int, length: int, decay: int) -> float:
    """decay: the last updates, along which the rate falls in a line; of none it does not fall."""
    return min(1.0, float(length - done) / float(decay)) if decay else 1.0


SCHEDULES = {
    "constant": Descent(lambda done, length: 1.0, "the base rate", ()),
    "linear": Descent(_linear, "a line (diffusers, get_linear_schedule_with_warmup)"),
    "cosine": Descent(_cosine, "half a cosine wave (Loshchilov and Hutter, SGDR, 2017, eq. 5, without restarts)"),
    "cosine_restarts": Descent(
        _cosine, "`cycles` half waves of equal length (SGDR, eq. 5, T_mult = 1)", ("end", "cycles")
    ),
    "polynomial": Descent(
        lambda done, length, power: _linear(done, length) ** power,
        "(1 - p)^`power` (diffusers, get_polynomial_decay_schedule_with_warmup)", ("end", "power"),
    ),
    "rex": Descent(_rex, "(1 - p) / (1/2 + (1 - p) / 2) (Chen et al., REX, 2021)"),
    "wsd": Descent(
        _wsd, "the base rate, then a line over `decay` (Hu et al., MiniCPM, 2024; Hägele et al., 2024)", ("end", "decay")
    ),
}  # fmt: skip


def build_schedule(
    name: str, optimizer: torch.optim.Optimizer, *, warmup: int, total_steps: int, end: float = 0.0, **keys: Any
) -> torch.optim.lr_scheduler.LambdaLR:
    """The schedule of that name, counted in optimizer updates: a line from 0 over `warmup` updates, then its descent.

    end: the rate after total_steps, as a share of the base rate; it stays there. keys: what the descent reads, others too.
    """
    descent = SCHEDULES[name]
    read = {key: keys[key] for key in descent.reads if key != "end"}

    def share(n: int) -> float:
        n = min(n, total_steps)  # a run that was lengthened stays at the end of its frozen schedule
        if n < warmup:
            return float(n) / float(warmup)
        left = descent.left(n - warmup, total_steps - warmup, **read)
        return left + end * (1.0 - left) if "end" in descent.reads else left

    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)


class ScheduleState:
    """A schedule's counters as a piece of the checkpoint; its lambdas are rebuilt from the config.

    anew: the config may have other rates, groups or another schedule than the checkpoint's, and the next step takes them.
    say: is told the highest rate of the next step where that makes it another.
    """

    def __init__(
        self,
        schedule: torch.optim.lr_scheduler.LambdaLR,
        *,
        anew: bool = False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.schedule, self.anew, self.say = schedule, anew, say
        self.base_lrs = list(schedule.base_lrs)  # the config's: Session.lr changes the schedule's own

    def rates(self) -> list[float]:
        """The rates that the config has at the schedule's place, one for each group."""
        by_group = zip(self.base_lrs, self.schedule.lr_lambdas, strict=True)
        return [float(base * share(self.schedule.last_epoch)) for base, share in by_group]

    def state_dict(self) -> dict[str, Any]:
        """The schedule's place and the config's rates there, one for each group."""
        rates = self.rates()
        return {"last_epoch": self.schedule.last_epoch, "_step_count": self.schedule._step_count, "_last_lr": rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the place back, and set the optimizer's rates. Raises ValueError where these are not one for each group."""
        counts, rates = (state["last_epoch"], state["_step_count"]), list(state["_last_lr"])
        if not all(type(count) is int and 0 <= count < 2**53 for count in counts):  # up to there floats count exactly
            raise ValueError(f"counters {counts}")
        fits = self.anew or len(rates) == len(self.schedule.optimizer.param_groups)
        if not fits or not all(type(rate) is float and 0 <= rate < math.inf for rate in rates):
            raise ValueError(f"rates {rates}")
        self.schedule.last_epoch, self.schedule._step_count = counts
        if self.anew:
            before, rates = rates, self.rates()
            if (now := max(rates, default=0.0)) != (then := max(before, default=0.0)):
                self.say(f"learning rate of the next step: {now:.3g}; it would have been {then:.3g}")
        self.schedule._last_lr = rates
        for group, rate in zip(self.schedule.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
