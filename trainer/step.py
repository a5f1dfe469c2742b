"""One optimizer step: micro-batches, backward, unscale, clip, update. Knows no model, no schedule of saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from trainer import draws
from trainer.errors import NonFiniteError
from trainer.objectives import Objective, sample_losses
from trainer.types import Batch, Conditioning


def draw_time_and_noise(
    batch: Batch, *, objective: Objective, tokens: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(time [B], noise fp32 like the latents), on the CPU, each a pure function of seed and occurrence."""
    keys = [(o.epoch, o.sample, o.repeat) for o in batch.occurrences]
    u = torch.tensor([draws.uniform(seed, "timestep", *key) for key in keys], dtype=torch.float64)
    noise = torch.stack([draws.normal(batch.latents.shape[1:], seed, "noise", *key) for key in keys])
    return objective.time(u, tokens), noise


def batch_losses(
    batch: Batch,
    *,
    objective: Objective,
    predict: Callable[[torch.Tensor, torch.Tensor, Conditioning, Batch], torch.Tensor],
    encode: Callable[[Sequence[str]], Conditioning],
    image_tokens: Callable[[int, int], int],
    seed: int,
    device: torch.device,
) -> torch.Tensor:
    """fp32 [B]: the objective's loss of each sample. `encode` is used where the batch carries no conditioning."""
    height, width = (int(n) for n in batch.target_size[0])
    time, noise = draw_time_and_noise(batch, objective=objective, tokens=image_tokens(height, width), seed=seed)
    latents, noise, time = batch.latents.to(device), noise.to(device), time.to(device)
    conditioning = batch.conditioning.to(device) if batch.conditioning is not None else encode(batch.captions)
    prediction = predict(objective.noised(latents, noise, time), time, conditioning, batch)
    losses = sample_losses(prediction, objective.target(latents, noise, time), objective.weight(time))
    if not torch.isfinite(losses.detach()).all():
        bad = [o.sample for o, loss in zip(batch.occurrences, losses.tolist(), strict=True) if not math.isfinite(loss)]
        raise NonFiniteError(f"the loss of {', '.join(bad)} is not finite")
    return losses


@dataclass(frozen=True)
class StepResult:
    """loss: per-sample mean over the global batch. grad_norm: before clipping; None where it overflowed.

    lr: of each parameter group, as used. skipped: the loss scaler dropped this update.
    """

    loss: float
    grad_norm: float | None
    lr: tuple[float, ...]
    skipped: bool
    loss_scale: float


class Step:
    """Runs one update. Gradients are those of fp32 adapters, so unscaling an fp16 gradient cannot occur.

    losses: Batch -> fp32 [B].  optimizer: over flat parameters (optim.flatten).
    after_update: called when parameters changed (DoRA norms are marked stale there).
    reduce: sums a tensor over processes, in place; None for a single process.
    dropout: (step, micro-batch) -> a context in which adapter dropout is on and seeded.
    """

    def __init__(
        self,
        *,
        losses: Callable[[Batch], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LambdaLR,
        scaler: torch.amp.GradScaler,
        max_grad_norm: float,
        after_update: Callable[[], None],
        reduce: Callable[[torch.Tensor], object] | None,
        dropout: Callable[[int, int], AbstractContextManager[None]],
    ) -> None:
        self.losses = losses
        self.flat = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.optimizer, self.schedule, self.scaler = optimizer, schedule, scaler
        self.max_grad_norm = max_grad_norm
        self.after_update, self.reduce, self.dropout = after_update, reduce, dropout

    def run(self, step: int, batches: Sequence[Batch], samples: int) -> StepResult:
        """One update from this process's micro-batches; `samples` counts the global batch.

        Raises NonFiniteError, before anything changed, for a loss or gradient that is not finite and that the loss
        scaler cannot answer by lowering its scale.
        """
        total = torch.zeros((), dtype=torch.float32)
        for parameter in self.flat:
            parameter.grad.zero_()
        try:
            for index, batch in enumerate(batches):
                with self.dropout(step, index):
                    loss = self.losses(batch).sum() / samples
                    self.scaler.scale(loss).backward()
                total += loss.detach().cpu()
        except NonFiniteError as error:
            raise NonFiniteError(f"step {step}: {error}; the adapter is unchanged") from error
        if self.reduce is not None:
            total = total.to(self.flat[0].device)
            for tensor in (*(parameter.grad for parameter in self.flat), total):
                self.reduce(tensor)
        scale = self.scaler.get_scale()
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in self.flat])
        finite = bool(torch.isfinite(norm))
        if not finite and (not self.scaler.is_enabled() or scale <= 1):
            names = ", ".join(sorted({o.sample for batch in batches for o in batch.occurrences}))
            raise NonFiniteError(f"step {step}: the gradient is not finite (samples {names}); the adapter is unchanged")
        lr = tuple(self.schedule.get_last_lr())
        if finite:
            if self.max_grad_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(self.flat, self.max_grad_norm, norm)
            self.optimizer.step()
            self.schedule.step()
            self.after_update()
        if self.scaler.is_enabled():
            self.scaler.update()
        return StepResult(total.item(), norm.item() if finite else None, lr, not finite, scale)
