"""One optimizer step: draws, losses, backward, unscale, clip, update. It knows no model and no schedule of saves."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property, reduce
from typing import Any, Protocol

import torch

from trainer.base import draws
from trainer.base.console import printable
from trainer.base.errors import OutOfMemory, is_out_of_memory
from trainer.base.types import Batch, Conditioning, Occurrence, each_tensor
from trainer.objectives import AtTime, Objective, stratified


def draw_time_and_noise(
    batch: Batch, *, objective: Objective, tokens: int, seed: int, update: Sequence[Occurrence] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """(time [B], noise fp32 [B, C, H, W]) on the CPU, each a pure function of seed and occurrence. tokens: image tokens of a
    sample. update: occurrences of the global batch, over which stratified times are spread; empty: the batch alone."""
    keys = [astuple(occurrence) for occurrence in batch.occurrences]
    u = torch.tensor([draws.uniform(seed, "timestep", *key) for key in keys], dtype=torch.float64)
    if objective.stratified:
        u = stratified(u, keys, [astuple(occurrence) for occurrence in update] or keys, seed)
    noise = torch.stack([objective.noise.draw(batch.latents.shape[1:], seed, key) for key in keys])
    return objective.time(u, tokens), noise


# Text encoder -> the token ids that it reads of each caption (TextPart.tokens).
TokenIds = Mapping[str, Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Inputs:
    """All that a micro-batch's losses depend on besides the weights: tensors only, on the run's device.

    batch: without occurrences and captions. time: [B], in the model's convention. at: the objective's coefficients at these
    times. noise: fp32 [B, C, H, W]. perturbation: added to the noise that the model sees; None: nothing. tokens: of captions
    that are encoded live; else empty.
    """

    batch: Batch
    time: torch.Tensor
    at: AtTime
    noise: torch.Tensor
    perturbation: torch.Tensor | None
    tokens: TokenIds


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The objective's loss of each sample: (micro-batch, occurrences of its global batch) -> fp32 [B].

    `inputs` is the host's part. `of` is the device's: the shapes of its inputs determine its kernels, and it reads nothing
    back, so a CUDA graph can record it. predict, tokens, encode, image_tokens: the family's functions; tokens and encode are
    called if the batch has no cached conditioning. on_draw: called with times and noise, on the CPU. preserve: weight of the
    drift from the model without its adapter. without_adapter: a context in which the adapter is off.
    """

    objective: Objective
    predict: Callable[[torch.Tensor, torch.Tensor, Conditioning, Batch], torch.Tensor]
    tokens: Callable[[Sequence[str]], TokenIds]
    encode: Callable[[TokenIds], Conditioning]
    image_tokens: Callable[[int, int], int]
    seed: int
    device: torch.device
    on_draw: Callable[[torch.Tensor, torch.Tensor], object] = lambda time, noise: None
    preserve: float = 0.0
    without_adapter: Callable[[], AbstractContextManager[None]] = nullcontext

    def __call__(self, batch: Batch, update: Sequence[Occurrence] = ()) -> torch.Tensor:
        return self.of(self.inputs(batch, update))

    def inputs(self, batch: Batch, update: Sequence[Occurrence] = ()) -> Inputs:
        """The micro-batch, its draws and its captions' tokens, on the device."""
        objective = self.objective
        height, width = batch.target_size.tolist()[0]
        image_tokens = self.image_tokens(height, width)
        time, noise = draw_time_and_noise(batch, objective=objective, tokens=image_tokens, seed=self.seed, update=update)
        self.on_draw(time, noise)
        keys = [astuple(occurrence) for occurrence in batch.occurrences]
        perturbation = objective.noise.perturbation(noise.shape[1:], self.seed, keys)
        tokens = {} if batch.conditioning is not None else self.tokens(batch.captions)
        tensors = replace(batch, occurrences=(), captions=(), preserved_captions=())
        return each_tensor(Inputs(tensors, time, objective.at(time), noise, perturbation, tokens), self._to_device)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        # Page-locked memory, as the loader gives, is copied while the device computes; for other memory the host waits.
        if self.device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def of(self, inputs: Inputs) -> torch.Tensor:
        """The losses, fp32 [B]: noise the latents, predict, compare with the target."""
        objective, batch, noise = self.objective, inputs.batch, inputs.noise
        perturbed = noise if inputs.perturbation is None else noise + inputs.perturbation
        conditioning = self.encode(inputs.tokens) if batch.conditioning is None else batch.conditioning
        noised = objective.noised(batch.latents, perturbed, inputs.at)
        prediction = self.predict(noised, inputs.time, conditioning, batch)
        losses = objective.losses(prediction, batch.latents, noise, inputs.at, batch.loss_weights)
        return losses if batch.preserved is None else losses + self.preserve * self._drift(noised, inputs, batch.preserved)

    def _drift(self, noised: torch.Tensor, inputs: Inputs, conditioning: Conditioning) -> torch.Tensor:
        with self.without_adapter(), torch.no_grad():
            frozen = self.predict(noised, inputs.time, conditioning, inputs.batch)
        return self.objective.drift(self.predict(noised, inputs.time, conditioning, inputs.batch), frozen, inputs.at)


@dataclass(frozen=True)
class StepResult:
    """The outcome of an update.

    loss: per-sample mean over the global batch; None if a sample's is not finite. grad_norm: before clipping; None if there
    is none or it overflowed. lr: of each parameter group, as used. updated: whether the parameters changed. refused: names
    the samples whose non-finite values no lower loss scale would mend; "" if there are none. bad_latents: whether latents
    alone were not finite, which no update changes. log_fields: further entries of the log.
    """

    loss: float | None
    grad_norm: float | None
    lr: tuple[float, ...]
    updated: bool
    loss_scale: float
    refused: str = ""
    bad_latents: bool = False
    log_fields: Mapping[str, Any] = field(default_factory=dict)


def backward(losses: torch.Tensor, share: torch.Tensor, attention: AbstractContextManager[Any] | None = None) -> torch.Tensor:
    """Add the gradient of share [] * sum(losses [B]) to the parameters' gradients. Returns the losses' values. attention: a
    context that selects the denoiser's attention, for blocks that are recomputed here."""
    with attention or nullcontext():
        torch.autograd.backward(losses, share.expand_as(losses))
    return losses.detach()


# A sample's flag in the global batch: its latents, or its loss, are not finite.
_LATENTS, _LOSS = 1, 2


class Replays(Protocol):
    """`backward` of (micro-batch, occurrences of its update, share) by CUDA graphs (graphs.py). recorded: the graphs that
    hold memory. `clear` and `give_up` free it; after `give_up` all micro-batches are eager."""

    recorded: Mapping[str, Any]
    clear: Callable[[], None]
    give_up: Callable[[str], None]

    def __call__(self, batch: Batch, update: Sequence[Occurrence], share: torch.Tensor, /) -> torch.Tensor: ...


@dataclass(kw_only=True)
class Step:
    """Runs one update. Adapters and their gradients are fp32, so unscaling an fp16 gradient cannot occur.

    losses: (micro-batch, occurrences of its global batch) -> fp32 [B]. optimizer: its parameters have gradients
    (optim.build_optimizer); a group with a "stop_step" keeps its parameters and state after that step. after_update: called
    with the step if parameters changed; returns entries of the log. sum: sums tensors over the processes, in place. training:
    (step, micro-batch of this process) -> a context with the adapter's dropouts. attention: a context that selects the
    denoiser's attention, for the backward pass. too_large: what to change if memory runs out. begin: called before the first
    micro-batch of an update. graphs: replaces `losses` and `backward`; None: eager. If memory runs out beside them, the
    update is repeated without.
    """

    losses: Callable[[Batch, Sequence[Occurrence]], torch.Tensor]
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    scaler: torch.amp.GradScaler
    max_grad_norm: float
    after_update: Callable[[int], Mapping[str, Any]]
    sum: Callable[..., None]
    training: Callable[[int, int], AbstractContextManager[None]]
    attention: Callable[[], AbstractContextManager[Any]] = nullcontext
    too_large: str = ""
    begin: Callable[[], object] = lambda: None
    graphs: Replays | None = None

    @cached_property
    def parameters(self) -> list[torch.Tensor]:
        """The trained parameters, in the order of the groups."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def run(self, step: int, batches: Sequence[Batch], occurrences: Sequence[Occurrence]) -> StepResult:
        """One update from this process's micro-batches. occurrences: of the global batch. Latents, losses or a gradient that
        are not finite leave parameters, optimizer and schedule unchanged, in all processes alike. So does a lack of memory in
        any: then OutOfMemory is raised in all."""
        sums, exhausted = self._backward(step, batches, occurrences)
        # In any case: a process that stopped on its own would leave the others waiting.
        self.sum(sums, *(parameter.grad for parameter in self.parameters))
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in self.parameters])
        (loss, out_of_memory, *flags), grad_norm, scale = self.read(sums, norm)
        lr, refused = tuple(self.schedule.get_last_lr()), _refusal(occurrences, flags)
        if (out_of_memory or refused) and self.scaler.is_enabled():
            self.scaler.update(new_scale=scale)  # forgets these gradients, and changes nothing else
        if out_of_memory:
            raise OutOfMemory(f"step {step}: out of memory in {exhausted or 'another process'}\n{self.too_large}".rstrip())
        if refused:
            return StepResult(None, None, lr, False, scale, refused, _LATENTS in flags and _LOSS not in flags)
        finite, log_fields = math.isfinite(grad_norm), dict[str, Any]()
        if finite:
            if self.max_grad_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(self.parameters, self.max_grad_norm, norm)
            self._update(step)
            self.schedule.step()
            log_fields |= self.after_update(step)
        elif not self.scaler.is_enabled() or scale <= 1:
            refused = f"the gradient is not finite (samples {', '.join(sorted({printable(o.sample) for o in occurrences}))})"
        if self.scaler.is_enabled():
            # No lower than 1: there an overflow is the run's own, and a lower scale would only lose small gradients.
            self.scaler.update()
            if not finite and scale * self.scaler.get_backoff_factor() < 1:
                self.scaler.update(new_scale=1.0)
        return StepResult(loss, grad_norm if finite else None, lr, finite, scale, refused, log_fields=log_fields)

    def _backward(self, step: int, batches: Sequence[Batch], occurrences: Sequence[Occurrence]) -> tuple[torch.Tensor, str]:
        """Make this process's gradients. Returns (fp32 [2 + samples of the global batch] on the device, as the host reads
        nothing before the end: its part of the loss, 1 if memory ran out, each sample's flag; where memory ran out)."""
        index_of = {occurrence: index for index, occurrence in enumerate(occurrences)}
        total = torch.zeros((), dtype=torch.float32, device=self.parameters[0].device)
        flags = [torch.zeros_like(total)] * len(occurrences)
        # How much a sample's loss counts in the gradient: of a mean over the global batch, times the loss scale.
        share = self.scaler.scale(torch.ones_like(total)) / len(occurrences)
        self.begin()
        exhausted, bad_latents = "", False
        for parameter in self.parameters:
            parameter.grad.zero_()
        for number, batch in enumerate(batches):
            indices = [index_of[occurrence] for occurrence in batch.occurrences]
            encoded = (batch.latents, *batch.references)
            bad = reduce(torch.logical_or, (~torch.isfinite(tensor).flatten(1).all(1) for tensor in encoded))
            if bad_latents or bad.any():
                # There will be no update: the rest is only looked at, to name all of them at once.
                bad_latents = True
                for index in (index for index, is_bad in zip(indices, bad.tolist(), strict=True) if is_bad):
                    flags[index] = torch.full_like(total, _LATENTS)
                continue
            try:
                with self.training(step, number):
                    if self.graphs is None:
                        losses = backward(self.losses(batch, occurrences), share, self.attention())
                    else:
                        losses = self.graphs(batch, occurrences, share)
                    total += losses.sum() / len(occurrences)
                    bad_losses = _LOSS * (~torch.isfinite(losses)).float()
                    for index, flag in zip(indices, bad_losses.unbind(), strict=True):
                        flags[index] = flag
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                # Only its text is kept: the exception holds on to the activations.
                text = "\n".join([str(error), *getattr(error, "__notes__", ())])
                exhausted = f"micro-batch {number + 1} of {len(batches)}: {batch.describe()}\n{text}"
                break
        if exhausted and self.graphs is not None and self.graphs.recorded:
            self.graphs.give_up("memory ran out")
            return self._backward(step, batches, occurrences)
        return torch.stack([total, torch.full_like(total, float(bool(exhausted))), *flags]), exhausted

    def _update(self, step: int) -> None:
        """One optimizer step over the groups that still train: weight decay and momentum would move the others, too."""
        groups = self.optimizer.param_groups
        try:
            stopped = [group.get("stop_step", step) < step for group in groups]
            self.optimizer.param_groups = [g | {"params": []} if off else g for g, off in zip(groups, stopped, strict=True)]
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups

    def read(self, sums: torch.Tensor, norm: torch.Tensor) -> tuple[list[float], float, float]:
        """(sums, norm, the loss scale) as numbers: the one place of an update where the host waits for the device."""
        *numbers, grad_norm = torch.cat([sums, norm.to(sums)[None]]).tolist()
        return numbers, grad_norm, self.scaler.get_scale()


def _refusal(occurrences: Sequence[Occurrence], flags: Sequence[float]) -> str:
    """The samples whose latents or loss are not finite, in words; "" if all are finite."""
    parts = []
    for kind, name, verb in ((_LATENTS, "latents", "are"), (_LOSS, "loss", "is")):
        if samples := sorted({printable(o.sample) for o, flag in zip(occurrences, flags, strict=True) if flag == kind}):
            parts.append(f"the {name} of {', '.join(samples)} {verb} not finite")
    return "; ".join(parts)
