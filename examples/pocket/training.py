"""A training loop for small models that can be killed at any time and goes on from its last state in the same bytes.

Every draw is a function of (seed, step), so there is no generator to save. The state is one safetensors file: weights, their
average, AdamW's moments; of which seed it is, how many steps were done, and how many there are to be.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer.base.errors import UserError

SAVE_SECONDS = 120
LOG_STEPS = 50
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # AdamW's


def generator(seed: int, step: int) -> torch.Generator:
    """Of what one step draws."""
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


def epoch_order(seed: int, count: int, start: int, length: int) -> torch.Tensor:
    """Which of `count` samples the positions start ... start + length - 1 of an endless, shuffled order are."""
    positions = range(start, start + length)
    orders = {
        epoch: torch.randperm(count, generator=generator(seed, -1 - epoch)) for epoch in {p // count for p in positions}
    }
    return torch.stack([orders[p // count][p % count] for p in positions])


def rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """Cosine from `peak` to 1 % of it, after a linear warm-up."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def train(
    module: nn.Module,
    loss: Callable[[int], torch.Tensor],
    state: Path,
    *,
    seed: int,
    steps: int,
    peak: float,
    warmup: int = 200,
    average: float = 0.999,
    weight_decay: float = 0.01,
    max_norm: float = 1.0,
    seconds: float = math.inf,
) -> float:
    """Train to `steps`, or for that many seconds. At its end `module` has the averaged weights.

    loss(step) -> the loss of that step, in fp32. state: the file that is gone on from where it exists. seed: of the weights'
    start and of every draw. Raises UserError for a state of another seed.
    average: of the weights; early on it is shorter, so that it does not remember the first ones: (1 + n) / (10 + n).
    Returns the mean of the last losses.
    """
    weights = dict(module.named_parameters())
    averaged = {name: p.detach().clone() for name, p in weights.items()}
    plain = [p for p in weights.values() if p.ndim < 2]
    groups = [
        {"params": [p for p in weights.values() if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.99), fused=True)
    step = restore(state, seed, weights, averaged, optimizer) if state.exists() else 0
    started = saved = time.monotonic()
    recent: list[float] = []
    module.train()
    while step < steps and time.monotonic() - started < seconds:
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps, peak, warmup)
        optimizer.zero_grad(set_to_none=True)
        # Of so few tokens: torch's flash attention takes half of a step on a CPU, plain products a tenth.
        with sdpa_kernel(SDPBackend.MATH):
            value = loss(step)
            value.backward()
        nn.utils.clip_grad_norm_(weights.values(), max_norm)
        optimizer.step()
        step += 1
        keep = min(average, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(averaged.values()), [p.detach() for p in weights.values()], 1 - keep)
        recent = [*recent[-199:], value.item()]
        if step % LOG_STEPS == 0 or step == steps:
            line = {"step": step, "loss": sum(recent) / len(recent), "seconds": round(time.monotonic() - started, 1)}
            with state.with_suffix(".jsonl").open("a") as log:
                log.write(json.dumps(line) + "\n")
        if time.monotonic() - saved > SAVE_SECONDS:
            save(state, weights, averaged, optimizer, step=step, steps=steps, seed=seed)
            saved = time.monotonic()
    save(state, weights, averaged, optimizer, step=step, steps=steps, seed=seed)
    with torch.no_grad():
        for name, parameter in weights.items():
            parameter.copy_(averaged[name])
    module.eval()
    return sum(recent) / max(1, len(recent))


def save(path: Path, weights: dict, averaged: dict, optimizer: torch.optim.Optimizer, **numbers: int) -> None:
    """numbers: step, steps, seed."""
    tensors = {f"weights/{name}": p.detach() for name, p in weights.items()}
    tensors |= {f"average/{name}": value for name, value in averaged.items()}
    for name, parameter in weights.items():
        tensors |= {f"optimizer/{key}/{name}": value for key, value in optimizer.state[parameter].items()}
    temporary = path.with_suffix(".tmp")
    # One entry: safetensors writes several in any order, and the same training is to give the same bytes.
    save_file(tensors, temporary, {"training": json.dumps(numbers)})
    os.replace(temporary, path)


def restore(path: Path, seed: int, weights: dict, averaged: dict, optimizer: torch.optim.Optimizer) -> int:
    """Returns the number of steps that were done."""
    with safe_open(path, "pt") as file, torch.no_grad():
        numbers = read_numbers(path, file, seed)
        stored = set(file.keys())
        for name, parameter in weights.items():
            parameter.copy_(file.get_tensor(f"weights/{name}"))
            averaged[name].copy_(file.get_tensor(f"average/{name}"))
            # A text encoder's last layer may be read by nobody: it has no gradient, and so no moments.
            if f"optimizer/step/{name}" in stored:
                optimizer.state[parameter] = {key: file.get_tensor(f"optimizer/{key}/{name}") for key in MOMENTS}
        return numbers["step"]


def read_numbers(path: Path, file: safe_open, seed: int) -> dict[str, int]:
    """step, steps and seed of a state. Raises UserError where that is not this seed."""
    numbers = json.loads(file.metadata()["training"])
    if numbers["seed"] != seed:
        raise UserError(f"{path} is of seed {numbers['seed']}, not of {seed}: choose another --work, or delete it")
    return numbers


def load_average(module: nn.Module, path: Path, *, seed: int) -> nn.Module:
    """`module` with the averaged weights of a state, in evaluation mode.

    Raises UserError where there is no state, or one of another seed, or one whose training was not seen to its end.
    """
    if not path.exists():
        raise UserError(f"{path} is missing: the part {path.stem!r} makes it, and comes first")
    with safe_open(path, "pt") as file, torch.no_grad():
        numbers = read_numbers(path, file, seed)
        if numbers["step"] < numbers["steps"]:
            raise UserError(
                f"{path} stands at step {numbers['step']} of {numbers['steps']}: go on with the part {path.stem!r} first"
            )
        for name, parameter in module.named_parameters():
            parameter.copy_(file.get_tensor(f"average/{name}"))
    return module.eval()
