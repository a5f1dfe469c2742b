"""One optimizer step: micro-batches, backward, unscale, clip, update. Knows no model, no schedule of saves."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from functools import cached_property

import torch

from trainer import draws
from trainer.errors import OutOfMemory
from trainer.memory import is_out_of_memory
from trainer.objectives import Objective, sample_losses
from trainer.types import Batch, Conditioning, Occurrence


def draw_time_and_noise(batch: Batch, *, objective: Objective, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(time [B], noise fp32 like the latents), on the CPU, each a pure function of seed and occurrence."""
    keys = [astuple(occurrence) for occurrence in batch.occurrences]
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
    return sample_losses(prediction, objective.target(latents, noise, time), objective.weight(time))


@dataclass(frozen=True)
class StepResult:
    """What an update did. lr: of each parameter group, as used.

    loss: per-sample mean over the global batch; None where a sample's is not finite. grad_norm: before clipping; None where
    there is none or it overflowed. updated: whether the parameters changed. refused: what was not finite and cannot be
    answered by a lower loss scale, with the samples' names; "" otherwise.
    """

    loss: float | None
    grad_norm: float | None
    lr: tuple[float, ...]
    updated: bool
    loss_scale: float
    refused: str = ""


# What stands in a step's flags, one for each sample of the global batch.
_LATENTS, _LOSS = 1, 2


@dataclass(kw_only=True)
class Step:
    """Runs one update. Gradients are those of fp32 adapters, so unscaling an fp16 gradient cannot occur.

    losses: Batch -> fp32 [B].  optimizer: its parameters have gradients (optim.build_optimizer).
    after_update: called when parameters changed (DoRA norms are marked stale there).
    sum: sums a tensor over the processes, in place.
    dropout: (step, micro-batch of this process) -> a context in which adapter dropout is on and seeded.
    """

    losses: Callable[[Batch], torch.Tensor]
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    scaler: torch.amp.GradScaler
    max_grad_norm: float
    after_update: Callable[[], None]
    sum: Callable[[torch.Tensor], None]
    dropout: Callable[[int, int], AbstractContextManager[None]]

    @cached_property
    def parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def run(self, step: int, batches: Sequence[Batch], occurrences: Sequence[Occurrence]) -> StepResult:
        """One update from this process's micro-batches; `occurrences` are those of the global batch.

        Whether anything changes is decided before anything does, by all processes alike: latents, losses or a gradient that
        are not finite leave parameters, optimizer and schedule as they were.
        Raises OutOfMemory in every process where one of them ran out of memory; nothing has changed then.
        """
        place = {occurrence: index for index, occurrence in enumerate(occurrences)}
        flags = torch.zeros(len(occurrences), dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float32)
        exhausted = ""
        for parameter in self.parameters:
            parameter.grad.zero_()
        for index, batch in enumerate(batches):
            here = [place[occurrence] for occurrence in batch.occurrences]
            flags[here] = _LATENTS * (~torch.isfinite(batch.latents).flatten(1).all(1)).float()
            if flags[here].any():
                continue
            try:
                # Once a sample is bad there is no update: the rest is only looked at, to name all of them at once.
                with self.dropout(step, index), torch.set_grad_enabled(not flags.any()):
                    losses = self.losses(batch)
                    flags[here] = _LOSS * (~torch.isfinite(losses.detach().cpu())).float()
                    if flags.any():
                        continue
                    loss = losses.sum() / len(occurrences)
                    self.scaler.scale(loss).backward()
                    total += loss.detach().cpu()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                # Only its text is kept: the exception holds on to the activations.
                exhausted = f"micro-batch {index + 1} of {len(batches)}: {batch.describe()}\n{error}"
                break
            finally:
                losses = loss = None  # and so does a graph that was not walked back
        # One reduction says whether there is a gradient to reduce: a process that stopped on its own leaves no other waiting.
        told = torch.stack([total, torch.tensor(float(bool(exhausted))), *flags]).to(self.parameters[0].device)
        self.sum(told)
        total, out_of_memory, *flags = told.tolist()
        if out_of_memory:
            raise OutOfMemory(f"step {step}: out of memory in {exhausted or 'another process'}")
        scale, lr = self.scaler.get_scale(), tuple(self.schedule.get_last_lr())
        refused = []
        for kind, name in ((_LATENTS, "latents"), (_LOSS, "loss")):
            bad = sorted({o.sample for o, flag in zip(occurrences, flags, strict=True) if flag == kind})
            if bad:
                refused.append(f"the {name} of {', '.join(bad)} {'are' if kind == _LATENTS else 'is'} not finite")
        if refused:
            return StepResult(None, None, lr, False, scale, "; ".join(refused))
        for parameter in self.parameters:
            self.sum(parameter.grad)
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in self.parameters])
        finite = bool(torch.isfinite(norm))
        refused = ""
        if finite:
            if self.max_grad_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(self.parameters, self.max_grad_norm, norm)
            self.optimizer.step()
            self.schedule.step()
            self.after_update()
        elif not self.scaler.is_enabled() or scale <= 1:
            refused = f"the gradient is not finite (samples {', '.join(sorted({o.sample for o in occurrences}))})"
        if self.scaler.is_enabled():
            # No lower than 1: there an overflow is the run's own, and a lower scale would only lose small gradients.
            self.scaler.update()
            if self.scaler.get_scale() < 1:
                self.scaler.update(new_scale=1.0)
        return StepResult(total, norm.item() if finite else None, lr, finite, scale, refused)
