"""Optimizers and learning-rate schedules, by name; libraries do the work."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trainer.errors import UserError

ALIGNMENT = 256  # elements: the block of 8-bit optimizers, so that no block spans two parameters


def flatten(parameters: Sequence[nn.Parameter]) -> nn.Parameter:
    """One fp32 parameter whose slices the given ones become, gradients included.

    An adapter is hundreds of small tensors. Flat, they take one kernel each for the update, the norm, the clipping and the
    reduction over processes. Gradients accumulate in place: zero them with `flat.grad.zero_()`, never set them to None.
    """
    starts, total = [], 0
    for parameter in parameters:
        starts.append(total)
        total += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
    flat = nn.Parameter(torch.zeros(total, dtype=torch.float32, device=parameters[0].device))
    flat.grad = torch.zeros_like(flat)
    for parameter, start in zip(parameters, starts, strict=True):
        assert parameter.dtype == torch.float32
        piece = slice(start, start + parameter.numel())
        flat.data[piece].copy_(parameter.data.reshape(-1))
        parameter.data = flat.data[piece].view(parameter.shape)
        parameter.grad = flat.grad[piece].view(parameter.shape)
    return flat


def build_optimizer(
    name: str,
    groups: Sequence[Mapping[str, Any]],
    *,
    betas: tuple[float, float],
    eps: float,
    min_8bit_size: int,
) -> torch.optim.Optimizer:
    """An optimizer with one flat parameter for each group of {"params", "lr", "weight_decay", "magnitudes"}.

    The state of a group of magnitudes stays fp32 in an 8-bit optimizer.
    """
    flat = [{"params": [flatten(g["params"])], "lr": g["lr"], "weight_decay": g["weight_decay"]} for g in groups]
    if name == "adamw":
        return torch.optim.AdamW(flat, betas=betas, eps=eps, fused=True)
    if name == "adamw8bit":
        import bitsandbytes as bnb

        optimizer = bnb.optim.AdamW8bit(flat, betas=betas, eps=eps, min_8bit_size=min_8bit_size)
        manager = bnb.optim.GlobalOptimManager.get_instance()
        manager.register_parameters(optimizer.param_groups)
        for group, given in zip(optimizer.param_groups, groups, strict=True):
            if given["magnitudes"]:
                manager.override_config(group["params"][0], "optim_bits", 32)
        return optimizer
    raise UserError(f"optimizer.name = {name!r} is not known; use 'adamw' or 'adamw8bit'")


def warmup_steps(warmup: int | float, total_steps: int) -> int:
    """An integer counts steps; a fraction below 1 is a share of total_steps, rounded down."""
    return warmup if isinstance(warmup, int) else int(warmup * total_steps)


def build_schedule(
    name: str, optimizer: torch.optim.Optimizer, *, warmup: int, total_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """diffusers' schedule of that name, counted in optimizer updates."""
    from diffusers.optimization import get_scheduler

    names = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
    if name not in names:
        raise UserError(f"schedule.name = {name!r} is not known; use one of {', '.join(map(repr, names))}")
    schedule = get_scheduler(names[name], optimizer, num_warmup_steps=warmup, num_training_steps=total_steps)
    # A run that was lengthened stays at the end of its frozen schedule; the library's cosine would rise again.
    held = [lambda n, rate=rate: rate(min(n, total_steps)) for rate in schedule.lr_lambdas]
    schedule.lr_lambdas = held
    return schedule


class ScheduleState:
    """A schedule's counters as a piece of the checkpoint; its lambdas are rebuilt from the config."""

    def __init__(self, schedule: torch.optim.lr_scheduler.LambdaLR) -> None:
        self.schedule = schedule

    def state_dict(self) -> dict[str, Any]:
        schedule = self.schedule
        return {
            "last_epoch": schedule.last_epoch,
            "_step_count": schedule._step_count,
            "_last_lr": [float(rate) for rate in schedule.get_last_lr()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Also sets the optimizer's rates. Raises ValueError where these are not one rate for each group."""
        counts, rates = (state["last_epoch"], state["_step_count"]), list(state["_last_lr"])
        if not all(type(count) is int and 0 <= count < 2**53 for count in counts):  # up to there floats count exactly
            raise ValueError(f"counters {counts}")
        rates_are_rates = all(type(rate) is float and rate >= 0 and math.isfinite(rate) for rate in rates)
        if len(rates) != len(self.schedule.optimizer.param_groups) or not rates_are_rates:
            raise ValueError(f"rates {rates}")
        self.schedule.last_epoch, self.schedule._step_count = counts
        self.schedule._last_lr = rates
        for group, rate in zip(self.schedule.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


class OptimizerState:
    """An optimizer's state as a piece of the checkpoint: 'group.INDEX|KEY', one flat parameter a group.

    Set directly: torch's `load_state_dict` would cast 8-bit states and step counters to the parameters' dtype.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {
            f"{name}|{key}": value
            for name, parameter in self._parameters()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UserError where the state is of other parameters than this run trains."""
        by_name: dict[str, dict[str, Any]] = {}
        for key, value in state.items():
            name, _, state_key = key.rpartition("|")
            by_name.setdefault(name, {})[state_key] = value
        parameters = dict(self._parameters())
        unknown = sorted(by_name.keys() - parameters.keys())
        if unknown:
            raise UserError(f"the checkpoint's optimizer state has {unknown[0]!r}, which this run does not train")
        for name, parameter in parameters.items():
            saved = by_name.get(name, {})
            if by_name and not saved:
                raise UserError(f"the checkpoint has no optimizer state for {name}, which this run trains")
            kinds = {key: _kind(value) for key, value in saved.items()}
            if saved and kinds not in _layouts(parameter.numel()):
                raise UserError(
                    f"the checkpoint's optimizer state of {name} is not what the {parameter.numel()} parameters there need: "
                    + ", ".join(f"{key} {kind}" for key, kind in sorted(kinds.items()))
                )
            self.optimizer.state[parameter] = {
                key: value.to(parameter.device) if isinstance(value, torch.Tensor) else value
                for key, value in saved.items()
            }

    def is_finite(self) -> bool:
        """Whether all parameters and their state are."""
        tensors = [parameter.detach() for _, parameter in self._parameters()]
        tensors += [v for v in self.state_dict().values() if isinstance(v, torch.Tensor) and v.is_floating_point()]
        return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for index, group in enumerate(self.optimizer.param_groups):
            (parameter,) = group["params"]
            yield f"group.{index}", parameter


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return "count" if type(value) is int and 0 <= value < 2**31 else "neither tensor nor count"


def _layouts(n: int) -> list[dict[str, str]]:
    """What an optimizer keeps for a flat parameter of n elements: torch's AdamW; bitsandbytes' in 32 and in 8 bit."""
    flat, codes = f"torch.float32 [{n}]", f"torch.uint8 [{n}]"
    map_, scales = "torch.float32 [256]", f"torch.float32 [{n // ALIGNMENT}]"
    eight_bit = {
        f"{key}{i}": kind for i in "12" for key, kind in {"state": codes, "qmap": map_, "absmax": scales}.items()
    }
    return [
        {"step": "torch.float32 []", "exp_avg": flat, "exp_avg_sq": flat},
        {"step": "count", "state1": flat, "state2": flat},
        {"step": "count"} | eight_bit,
    ]
