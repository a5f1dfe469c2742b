"""Three small optimizers: one with state in its groups, one with modes, one with shapes. And their entries for the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainer.optim.libraries import StateLayout, keeps, like
from trainer.optim.table import OptimizerKind


class Growing(torch.optim.Optimizer):
    """As Prodigy: the rate grows with an estimate, `d`, in its group. Signs of momentum are its direction."""

    def __init__(self, groups) -> None:
        super().__init__(groups, {"d": 1e-3, "k": 0})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["d"] *= 1 + sum(float(p.grad.abs().mean()) for p in group["params"]) / (1 + group["k"]) + 0.1
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.5)
                p.add_(momentum.sign(), alpha=-group["lr"] * group["d"])


class Averaging(torch.optim.Optimizer):
    """Schedule-free, along the signs of gradients: they are taken at y, the weights that train; x, an average, is used.

    Defazio et al., The Road Less Scheduled (2024): y = (1 - beta) z + beta x. Only y and z are kept.
    """

    beta = 0.9

    def __init__(self, groups) -> None:
        super().__init__(groups, {"weight_sum": 0.0, "training": False})

    def eval(self) -> None:
        self._turn(1 - 1 / self.beta, training=False)

    def train(self) -> None:
        self._turn(1 - self.beta, training=True)

    @torch.no_grad()
    def _turn(self, share: float, *, training: bool) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["training"] != training else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], share)
            group["training"] = training

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            assert group["training"]
            lr = group["lr"]
            group["weight_sum"] += lr**2
            share = lr**2 / group["weight_sum"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share).add_(p.grad.sign(), alpha=lr * (self.beta * (1 - share) - 1))
                z.sub_(p.grad.sign(), alpha=lr)


class Factored(torch.optim.Optimizer):
    """As Adafactor: of a matrix, the second moment of its rows and columns alone."""

    def __init__(self, groups) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                square, state = p.grad.square() + 1e-12, self.state[p]
                if p.dim() < 2:
                    v = state.setdefault("v", torch.zeros_like(p)).lerp_(square, 0.1)
                else:
                    square = square.flatten(1)
                    rows = state.setdefault("rows", torch.zeros(square.shape[0])).lerp_(square.mean(1), 0.1)
                    columns = state.setdefault("columns", torch.zeros(square.shape[1])).lerp_(square.mean(0), 0.1)
                    v = (rows[:, None] * columns / rows.mean()).view_as(p)
                p.addcdiv_(p.grad, v.sqrt(), value=-group["lr"])


def factored_layouts(shape: torch.Size, group: Mapping[str, Any]) -> list[StateLayout]:
    if len(shape) < 2:
        return [{"v": like(*shape)}]
    return [{"rows": like(shape[0]), "columns": like(shape[1:].numel())}]


ENTRIES = {
    "growing": OptimizerKind(lambda: Growing, keeps("momentum"), betas=None, eps=None, group_keys=("d", "k")),
    "averaging": OptimizerKind(lambda: Averaging, keeps("z"), betas=None, eps=None, group_keys=("weight_sum",), modes=True),
    "factored": OptimizerKind(lambda: Factored, factored_layouts, betas=None, eps=None, flat=False),
}
