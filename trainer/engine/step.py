"""One optimizer step: micro-batches, backward, unscale, clip, update. Knows no model, no schedule of saves."""

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
    """(time [B], noise fp32 like the latents), on the CPU, each a pure function of seed and occurrence. update: the
    occurrences of the global batch, which stratified times depend on, too; left out: the batch alone."""
    keys = [astuple(occurrence) for occurrence in batch.occurrences]
    u = torch.tensor([draws.uniform(seed, "timestep", *key) for key in keys], dtype=torch.float64)
    if objective.stratified:
        u = stratified(u, keys, [astuple(occurrence) for occurrence in update] or keys, seed)
    noise = torch.stack([objective.noise.draw(batch.latents.shape[1:], seed, key) for key in keys])
    return objective.time(u, tokens), noise


# Of each text encoder, by name, what it reads of each caption (TextPart.tokens).
TokenIds = Mapping[str, Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Inputs:
    """All that the losses of a micro-batch follow from, beside the weights: tensors alone, on the device.

    batch: without occurrences and captions. time [B]: as the model takes it. at: what else follows from it. noise: fp32 like
    the latents. perturbation: added to the noise that the model sees; None: none. tokens: of captions encoded live, or empty.
    """

    batch: Batch
    time: torch.Tensor
    at: AtTime
    noise: torch.Tensor
    perturbation: torch.Tensor | None
    tokens: TokenIds


@dataclass(frozen=True, kw_only=True)
class Losses:
    """(a micro-batch, the occurrences of its global batch) -> fp32 [B], the objective's loss of each sample.

    `inputs` is all that the host does; what `of` launches on the device follows from the shapes of its inputs alone, and it
    reads nothing back. predict, tokens, encode, image_tokens: the family's; tokens and encode are used where the batch
    carries no conditioning. drawn: is given times and noise, on the CPU. preserve: the weight of a drift. frozen: a block
    without the adapter.
    """

    objective: Objective
    predict: Callable[[torch.Tensor, torch.Tensor, Conditioning, Batch], torch.Tensor]
    tokens: Callable[[Sequence[str]], TokenIds]
    encode: Callable[[TokenIds], Conditioning]
    image_tokens: Callable[[int, int], int]
    seed: int
    device: torch.device
    drawn: Callable[[torch.Tensor, torch.Tensor], object] = lambda time, noise: None
    preserve: float = 0.0
    frozen: Callable[[], AbstractContextManager[None]] = nullcontext

    def __call__(self, batch: Batch, update: Sequence[Occurrence] = ()) -> torch.Tensor:
        return self.of(self.inputs(batch, update))

    def inputs(self, batch: Batch, update: Sequence[Occurrence] = ()) -> Inputs:
        """What is drawn for a micro-batch, its captions' tokens, and itself, on the device."""
        objective = self.objective
        height, width = batch.target_size.tolist()[0]
        tokens = self.image_tokens(height, width)
        time, noise = draw_time_and_noise(batch, objective=objective, tokens=tokens, seed=self.seed, update=update)
        self.drawn(time, noise)
        keys = [astuple(occurrence) for occurrence in batch.occurrences]
        more = objective.noise.perturbation(noise.shape[1:], self.seed, keys)
        live = {} if batch.conditioning is not None else self.tokens(batch.captions)
        tensors = replace(batch, occurrences=(), captions=(), preserved_captions=())
        made = Inputs(tensors, time, objective.at(time), noise, more, live)
        return each_tensor(made, self._moved)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        # Page-locked memory, as the loader gives, is copied while the device computes; for other memory the host waits.
        if self.device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def of(self, given: Inputs) -> torch.Tensor:
        """fp32 [B]."""
        objective, batch = self.objective, given.batch
        seen = given.noise if given.perturbation is None else given.noise + given.perturbation
        conditioning = self.encode(given.tokens) if batch.conditioning is None else batch.conditioning
        noised = objective.noised(batch.latents, seen, given.at)
        prediction = self.predict(noised, given.time, conditioning, batch)
        losses = objective.losses(prediction, batch.latents, given.noise, given.at, batch.loss_weights)
        return losses if batch.preserved is None else losses + self.preserve * self._drift(noised, given, batch.preserved)

    def _drift(self, noised: torch.Tensor, given: Inputs, texts: Conditioning) -> torch.Tensor:
        with self.frozen(), torch.no_grad():
            frozen = self.predict(noised, given.time, texts, given.batch)
        return self.objective.drift(self.predict(noised, given.time, texts, given.batch), frozen, given.at)


@dataclass(frozen=True)
class StepResult:
    """What an update did. lr: of each parameter group, as used.

    loss: per-sample mean over the global batch; None where a sample's is not finite. grad_norm: before clipping; None where
    there is none or it overflowed. updated: whether the parameters changed. refused: what was not finite and cannot be
    answered by a lower loss scale, with the samples' names; "" otherwise. bad_latents: whether it was these alone, which no
    update changes. told: further entries of the log.
    """

    loss: float | None
    grad_norm: float | None
    lr: tuple[float, ...]
    updated: bool
    loss_scale: float
    refused: str = ""
    bad_latents: bool = False
    told: Mapping[str, Any] = field(default_factory=dict)


def backward(losses: torch.Tensor, share: torch.Tensor, attention: AbstractContextManager[Any] | None = None) -> torch.Tensor:
    """Add the gradient of share [] * the sum of losses [B] to those that the parameters have. Returns the losses' values.
    attention: a context with the denoiser's, of which blocks run again here."""
    with attention or nullcontext():
        torch.autograd.backward(losses, share.expand_as(losses))
    return losses.detach()


# What stands in a step's flags, one for each sample of the global batch.
_LATENTS, _LOSS = 1, 2


class Replays(Protocol):
    """`backward` of the losses of (a micro-batch, the occurrences of its update, a sample's share), by CUDA graphs
    (graphs.py). recorded: what holds memory. `let_go` and `give_up` free it; after `give_up` all are eager."""

    recorded: Mapping[str, Any]
    let_go: Callable[[], None]
    give_up: Callable[[str], None]

    def __call__(self, batch: Batch, update: Sequence[Occurrence], share: torch.Tensor, /) -> torch.Tensor: ...


@dataclass(kw_only=True)
class Step:
    """Runs one update. Gradients are those of fp32 adapters, so unscaling an fp16 gradient cannot occur.

    losses: (a micro-batch, the occurrences of its global batch) -> fp32 [B]. optimizer: its parameters have gradients
    (optim.build_optimizer); a group with a "stop_step" is left alone, with all that is kept of it, after that step.
    after_update: called with the step when parameters changed; gives entries of the log. sum: sums tensors over the
    processes, in place. training: (step, micro-batch of this process) -> a context with the adapter's dropouts. attention: a
    context with the denoiser's, for the backward pass. too_large: what to change where memory runs out. begin: called before
    the first micro-batch of an update. graphs: in place of `losses` and `backward`; None: eager. Where memory runs out beside
    them, the update is made without.
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
        """Every parameter that is trained, in the order of the groups."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def run(self, step: int, batches: Sequence[Batch], occurrences: Sequence[Occurrence]) -> StepResult:
        """One update from this process's micro-batches; `occurrences` are those of the global batch. Latents, losses or a
        gradient that are not finite leave parameters, optimizer and schedule as they were, in all processes alike. So does
        one that ran out of memory: then OutOfMemory is raised in all."""
        losses, exhausted = self._backward(step, batches, occurrences)
        # Whatever happened here: a process that stopped on its own would leave the others waiting.
        self.sum(losses, *(parameter.grad for parameter in self.parameters))
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in self.parameters])
        (total, out_of_memory, *flags), grad_norm, scale = self.read(losses, norm)
        lr = tuple(self.schedule.get_last_lr())
        refused = []
        for kind, name in ((_LATENTS, "latents"), (_LOSS, "loss")):
            bad = sorted({printable(o.sample) for o, flag in zip(occurrences, flags, strict=True) if flag == kind})
            if bad:
                refused.append(f"the {name} of {', '.join(bad)} {'are' if kind == _LATENTS else 'is'} not finite")
        if (out_of_memory or refused) and self.scaler.is_enabled():
            self.scaler.update(new_scale=scale)  # forgets these gradients, and changes nothing else
        if out_of_memory:
            raise OutOfMemory(f"step {step}: out of memory in {exhausted or 'another process'}\n{self.too_large}".rstrip())
        if refused:
            return StepResult(None, None, lr, False, scale, "; ".join(refused), _LATENTS in flags and _LOSS not in flags)
        finite, refused, told_more = math.isfinite(grad_norm), "", {}
        if finite:
            if self.max_grad_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(self.parameters, self.max_grad_norm, norm)
            self._update(step)
            self.schedule.step()
            told_more = self.after_update(step)
        elif not self.scaler.is_enabled() or scale <= 1:
            refused = f"the gradient is not finite (samples {', '.join(sorted({printable(o.sample) for o in occurrences}))})"
        if self.scaler.is_enabled():
            # No lower than 1: there an overflow is the run's own, and a lower scale would only lose small gradients.
            self.scaler.update()
            if not finite and scale * self.scaler.get_backoff_factor() < 1:
                self.scaler.update(new_scale=1.0)
        return StepResult(total, grad_norm if finite else None, lr, finite, scale, refused, told=told_more)

    def _backward(self, step: int, batches: Sequence[Batch], occurrences: Sequence[Occurrence]) -> tuple[torch.Tensor, str]:
        """Make this process's gradients. Returns (its loss, whether it ran out of memory, and a flag for each sample of the
        global batch, on the device, as nothing is read before the end; where it ran out of memory, in words)."""
        place = {occurrence: index for index, occurrence in enumerate(occurrences)}
        device = self.parameters[0].device
        total = torch.zeros((), dtype=torch.float32, device=device)
        flags = [torch.zeros_like(total)] * len(occurrences)
        # How much a sample's loss counts in the gradient: of a mean over the global batch, times the loss scale.
        share = self.scaler.scale(torch.ones_like(total)) / len(occurrences)
        self.begin()
        exhausted, bad_latents, beside = "", False, False
        for parameter in self.parameters:
            parameter.grad.zero_()
        for index, batch in enumerate(batches):
            here = [place[occurrence] for occurrence in batch.occurrences]
            encoded = (batch.latents, *batch.references)
            broken = reduce(torch.logical_or, (~torch.isfinite(each).flatten(1).all(1) for each in encoded))
            if bad_latents or broken.any():
                # There will be no update: the rest is only looked at, to name all of them at once.
                bad_latents = True
                for at in (at for at, bad in zip(here, broken.tolist(), strict=True) if bad):
                    flags[at] = torch.full_like(total, _LATENTS)
                continue
            try:
                with self.training(step, index):
                    if self.graphs is None:
                        losses = backward(self.losses(batch, occurrences), share, self.attention())
                    else:
                        losses = self.graphs(batch, occurrences, share)
                    total += losses.sum() / len(occurrences)
                    wrong = _LOSS * (~torch.isfinite(losses)).float()
                    for at, flag in zip(here, wrong.unbind(), strict=True):
                        flags[at] = flag
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                beside = self.graphs is not None and self.graphs.recorded
                # Only its text is kept: the exception holds on to the activations.
                text = "\n".join([str(error), *getattr(error, "__notes__", ())])
                exhausted = f"micro-batch {index + 1} of {len(batches)}: {batch.describe()}\n{text}"
                break
        if self.graphs is not None and beside:
            self.graphs.give_up("memory ran out")
            return self._backward(step, batches, occurrences)
        return torch.stack([total, torch.full_like(total, float(bool(exhausted))), *flags]), exhausted

    def _update(self, step: int) -> None:
        """Of the groups that are trained still: to an optimizer, weight decay and momentum are reasons to move, too."""
        groups = self.optimizer.param_groups
        try:
            stopped = [group.get("stop_step", step) < step for group in groups]
            self.optimizer.param_groups = [g | {"params": []} if off else g for g, off in zip(groups, stopped, strict=True)]
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups

    def read(self, losses: torch.Tensor, norm: torch.Tensor) -> tuple[list[float], float, float]:
        """(losses, norm, the loss scale) as numbers: the one place of an update where the host waits for the device."""
        *numbers, grad_norm = torch.cat([losses, norm.to(losses)[None]]).tolist()
        return numbers, grad_norm, self.scaler.get_scale()
