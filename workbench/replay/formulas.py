"""A step without its model, implemented from the papers, without a run's own code: noising, target and loss; clipping,
AdamW, the average.

Sources: DDPM (arXiv 2006.11239), v (2202.00512), rectified flow (2209.03003), pseudo-Huber loss (2403.16728), weights by SNR
(2303.09556, 2401.11605, 2310.08442, 2204.00227), AdamW with its decay times the rate (1711.05101).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.engine.assembly import TrainState
from trainer.engine.step import Inputs, Losses, StepResult
from trainer.objectives import Diffusion, Objective
from workbench.replay.rounding import no_errors

UNIT = 2.0**-24  # unit roundoff of fp32, the dtype of updates
LEAST = 2.0**-126  # smallest normal number of fp32


def sample_losses(losses: Losses, inputs: Inputs) -> Tensor:
    """The loss of each sample, [B] in the latents' dtype: of the model's prediction at the noised latents."""
    objective, batch, photo, noise = losses.objective, inputs.batch, inputs.batch.latents, inputs.noise
    with no_errors():  # in a run they are fp32 at every compute dtype
        at = {name: value.to(photo.dtype).view(-1, 1, 1, 1) for name, value in _at_time(objective, inputs.time).items()}
    signal, sigma, c = at["signal"], at["sigma"], at["threshold"]
    perturbed = noise if inputs.perturbation is None else noise + inputs.perturbation
    conditioning = losses.encode(inputs.tokens) if batch.conditioning is None else batch.conditioning
    prediction = losses.predict(signal * photo + sigma * perturbed, inputs.time, conditioning, batch)
    target = noise - photo
    if isinstance(objective, Diffusion):
        target = noise if objective.prediction == "epsilon" else signal * noise - sigma * photo
    error = (prediction.to(photo.dtype) - target) ** 2
    if objective.loss.loss != "mse":
        error = 2 * error / (1 + (1 + error / c**2) ** 0.5)
        error = error if objective.loss.loss == "huber" else error / c
    if batch.loss_weights is not None:
        error = error * batch.loss_weights[:, None]
    return (error * at["weight"]).mean((1, 2, 3))


def _at_time(objective: Objective, time: Tensor) -> dict[str, Tensor]:
    """Signal, sigma, the weight of the loss, and its threshold: fp64 [B] each."""
    t, loss = time.double(), objective.loss
    weight = torch.ones_like(t)
    if isinstance(objective, Diffusion):
        abar, by = objective.alphas_cumprod.to(t.device)[time], objective.weighting
        signal, sigma, progress, snr = abar**0.5, (1 - abar) ** 0.5, t / len(objective.alphas_cumprod), abar / (1 - abar)
        if by.name != "none":
            of_photo = {
                "min_snr": lambda: torch.minimum(snr, torch.full_like(snr, by.gamma)),
                "soft_min_snr": lambda: snr * by.gamma / (snr + by.gamma),
                "debiased": lambda: snr**0.5,
                "p2": lambda: snr * (by.p2_k + snr) ** -by.p2_gamma,
            }[by.name]()
            weight = of_photo / (snr if objective.prediction == "epsilon" else 1 + snr)
    else:
        signal, sigma, progress, snr = 1 - t, t, t, ((1 - t) / t) ** 2
    threshold = {
        "constant": lambda: torch.full_like(t, loss.huber_c),
        "exponential": lambda: loss.huber_c**progress,
        "snr": lambda: (1 - loss.huber_c) * (1 + snr**-0.5) ** -2 + loss.huber_c,
    }[loss.huber_schedule]()
    return {"signal": signal, "sigma": sigma, "weight": weight, "threshold": threshold}


@dataclass(frozen=True)
class Snapshot:
    """A copy of everything that an update changes. state: the optimizer's. average: may be empty. averaged: its updates."""

    parameters: Mapping[str, Tensor]
    state: Mapping[str, Any]
    average: Mapping[str, Tensor]
    averaged: int

    @classmethod
    def of(cls, state: TrainState) -> Snapshot:
        """The snapshot of the present state."""
        average = state.average
        parts = (state.adapter.state_dict(), state.optimizer.state_dict(), average.weights if average else {})
        copies = ({name: v.clone() if isinstance(v, Tensor) else v for name, v in part.items()} for part in parts)
        return cls(*copies, averaged=average.updates if average else 0)


@dataclass(frozen=True)
class Update:
    """The judgement of an update. worst: (largest error as a share of the bound, its parameter), by kind of number. unjudged:
    why the optimizer's part was not judged, or ""."""

    worst: Mapping[str, tuple[float, str]]
    unjudged: str = ""

    @property
    def share(self) -> float:
        """The largest share of all."""
        return max((share for share, _ in self.worst.values()), default=0.0)


@dataclass(frozen=True)
class Updates:
    """Judges the updates of a run. adamw: whether they are AdamW's, without options and limits of norms; else the average
    alone is judged. average: its decay. The other fields are the config's."""

    state: TrainState
    adamw: bool
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    average: float

    def judge(
        self, before: Snapshot, after: Snapshot, gradients: Mapping[str, Tensor], step: int, result: StepResult
    ) -> Update:
        """Compare an update with the formulas in fp64. gradients: before clipping. The bound of a number is UNIT times the
        terms of its sum, each as often as fp32 may round it."""
        worst: dict[str, tuple[float, str]] = {}

        def compare(kind: str, name: str, value: Tensor, exact: Tensor, terms: Tensor) -> None:
            share = float(((value.double() - exact).abs() / (UNIT * terms + LEAST)).nan_to_num(math.inf).max())
            worst[kind] = max(worst.get(kind, (-1.0, "")), (share, name))

        param_groups = self.state.optimizer.optimizer.param_groups
        groups = {_memory(group["params"][0]): index for index, group in enumerate(param_groups)}
        for name, parameter in self.state.adapter.named_parameters().items() if self.adamw else ():
            group, start = groups[_memory(parameter)], parameter.storage_offset()
            piece = slice(start, start + parameter.numel())
            old, new = (_flat(snapshot, name, group, piece) for snapshot in (before, after))
            for kind, (exact, terms) in self._adamw(old, gradients[name].flatten(), name, step, result, group).items():
                compare(kind, name, new[kind], exact, terms)
        n = after.averaged
        share = 1 - min(self.average, (1 + n) / (10 + n)) if n > before.averaged else 0.0
        for name, average in before.average.items():
            a, p = average.double(), after.parameters[name].double()
            compare("average", name, after.average[name], a + share * (p - a), 4 * (a.abs() + p.abs()))
        if before.average:
            counts = [torch.tensor(float(count)) for count in (n, before.averaged + result.updated)]
            compare("average's count", "the average", *counts, torch.zeros(()))
        return Update(worst, "" if self.adamw else "only AdamW is, without optimizer.options and without adapter.max_norm")

    def _adamw(
        self, old: Mapping[str, Tensor], gradient: Tensor, name: str, step: int, result: StepResult, group: int
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """(value after the update, terms of its sum times their roundings) in fp64, by kind of number."""
        p, m, v, n = (value.double() for value in old.values())
        layer = name.removesuffix(".weight").rpartition(".")[0]
        terms, target = [torch.zeros_like(p)] * 3, self.state.adapter.targets[layer]
        if result.updated and step <= (target.stop_step or step):
            limit, norm, (b1, b2), n = self.max_grad_norm, result.grad_norm or 0.0, self.betas, n + 1
            g = gradient.double() * (min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0)
            decay = self.weight_decay if target.weight_decay is None else target.weight_decay
            decay = 0.0 if name.endswith("magnitude_vector") else decay
            size = b1 * m.abs() + (1 - b1) * g.abs()
            m, v, rate = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2, result.lr[group]
            moved = rate / (1 - b1**n) / ((v / (1 - b2**n)).sqrt() + self.eps)
            p = (1 - rate * decay) * p - moved * m
            terms = [3 * p.abs() + 32 * moved * size, 32 * size, 32 * v]
        return dict(zip(old, zip((p, m, v, n), (*terms, torch.zeros_like(n)), strict=True), strict=True))


def _flat(snapshot: Snapshot, name: str, group: int, piece: slice) -> dict[str, Tensor]:
    """A parameter and AdamW's state of it, [N] each; zeros before its first update."""
    p = snapshot.parameters[name].flatten()
    moments = [snapshot.state.get(f"group.{group}|{key}") for key in ("exp_avg", "exp_avg_sq")]
    m, v = (torch.zeros_like(p) if moment is None else moment[piece] for moment in moments)
    step = snapshot.state.get(f"group.{group}|step", torch.zeros_like(p[0]))
    return {"weight": p, "first moment": m, "second moment": v, "step": step}


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
