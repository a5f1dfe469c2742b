"""Optimizers and learning-rate schedules, by name; libraries do the work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def schedule_state(schedule: torch.optim.lr_scheduler.LambdaLR) -> dict[str, Any]:
    """The counters of a schedule, as JSON: its lambdas are rebuilt from the config."""
    return {"last_epoch": schedule.last_epoch, "_step_count": schedule._step_count, "_last_lr": schedule.get_last_lr()}


def load_schedule_state(schedule: torch.optim.lr_scheduler.LambdaLR, saved: dict[str, Any]) -> None:
    """The inverse of `schedule_state`; also sets the optimizer's rates."""
    schedule.last_epoch, schedule._step_count = saved["last_epoch"], saved["_step_count"]
    schedule._last_lr = list(saved["_last_lr"])
    for group, rate in zip(schedule.optimizer.param_groups, schedule._last_lr, strict=True):
        group["lr"] = rate
