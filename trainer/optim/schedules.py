"""Learning-rate schedules, by name, counted in optimizer updates."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def steps_of(count_or_share: int | float, total_steps: int) -> int:
    """The steps of an integer, or of a share below 1 of total_steps, rounded down."""
    # 0.29 * 100 is a little less than 29.
    return count_or_share if isinstance(count_or_share, int) else int(round(count_or_share * total_steps, 6))


@dataclass(frozen=True)
class Descent:
    """The curve of the rate after the warm-up.

    curve: (n, length, **keys of `reads`) -> from 1 (the base rate) to 0 (the rate at the end), after n of `length` updates,
    0 <= n <= length. reads: keys of the config's table.
    """

    curve: Callable[..., float]
    reads: tuple[str, ...] = ("end",)


def _linear(n: int, length: int) -> float:
    return max(0.0, float(length - n) / float(max(1, length)))


def _cosine(n: int, length: int, cycles: int = 1) -> float:
    """`cycles` half waves; each but the first begins with a jump back to the base rate."""
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * (float(cycles) * n / length % 1.0)))) if n < length else 0.0


def _rex(n: int, length: int) -> float:
    line = _linear(n, length)
    return line / (0.5 + 0.5 * line)


def _wsd(n: int, length: int, decay: int) -> float:
    """A line over the last `decay` updates; with 0 the rate does not fall."""
    return min(1.0, float(length - n) / float(decay)) if decay else 1.0


# p: the share of the descent that is over.
SCHEDULES = {
    "constant": Descent(lambda n, length: 1.0, ()),
    "linear": Descent(_linear),  # diffusers, get_linear_schedule_with_warmup
    "cosine": Descent(_cosine),  # half a wave (Loshchilov and Hutter, SGDR, 2017, eq. 5, without restarts)
    "cosine_restarts": Descent(_cosine, ("end", "cycles")),  # half waves of equal length (SGDR, eq. 5, T_mult = 1)
    # (1 - p)^power (diffusers, get_polynomial_decay_schedule_with_warmup)
    "polynomial": Descent(lambda n, length, power: _linear(n, length) ** power, ("end", "power")),
    "rex": Descent(_rex),  # (1 - p) / (1/2 + (1 - p) / 2) (Chen et al., REX, 2021)
    # The base rate, then a line over `decay` (Hu et al., MiniCPM, 2024; Hägele et al., 2024)
    "wsd": Descent(_wsd, ("end", "decay")),
}


def build_schedule(
    name: str, optimizer: torch.optim.Optimizer, *, warmup: int, total_steps: int, end: float = 0.0, **keys: Any
) -> torch.optim.lr_scheduler.LambdaLR:
    """The schedule `name`, counted in optimizer updates: a line from 0 over `warmup` updates, then its descent.

    end: the rate after total_steps, as a share of the base rate; it stays there. keys: the descent's; others are ignored.
    """
    descent = SCHEDULES[name]
    arguments = {key: keys[key] for key in descent.reads if key != "end"}

    def factor(n: int) -> float:
        n = min(n, total_steps)  # a run that was lengthened stays at the end of its frozen schedule
        if n < warmup:
            return float(n) / float(warmup)
        height = descent.curve(n - warmup, total_steps - warmup, **arguments)
        return height + end * (1.0 - height) if "end" in descent.reads else height

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class ScheduleState:
    """A schedule's counters as a piece of the checkpoint; its lambdas are rebuilt from the config.

    anew: the config's rates, groups and schedule replace the checkpoint's at the next step. say: prints a line if that
    changes the highest rate of that step.
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
        """The config's rates at the schedule's present update, one for each group."""
        by_group = zip(self.base_lrs, self.schedule.lr_lambdas, strict=True)
        return [float(base * factor(self.schedule.last_epoch)) for base, factor in by_group]

    def state_dict(self) -> dict[str, Any]:
        """The schedule's counters and the config's rates there, one for each group."""
        rates = self.rates()
        return {"last_epoch": self.schedule.last_epoch, "_step_count": self.schedule._step_count, "_last_lr": rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the counters and the optimizer's rates. Raises ValueError for wrong ones, or unless each group has one rate."""
        counts, rates = (state["last_epoch"], state["_step_count"]), list(state["_last_lr"])
        if not all(type(count) is int and 0 <= count < 2**53 for count in counts):  # up to there floats count exactly
            raise ValueError(f"counters {counts}")
        fits = self.anew or len(rates) == len(self.schedule.optimizer.param_groups)
        if not fits or not all(type(rate) is float and 0 <= rate < math.inf for rate in rates):
            raise ValueError(f"rates {rates}")
        self.schedule.last_epoch, self.schedule._step_count = counts
        if self.anew:
            saved, rates = rates, self.rates()
            if (rate := max(rates, default=0.0)) != (saved_rate := max(saved, default=0.0)):
                self.say(f"learning rate of the next step: {rate:.3g}; it would have been {saved_rate:.3g}")
        self.schedule._last_lr = rates
        for group, rate in zip(self.schedule.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
