"""The cost of storing the denoiser in a format: the change of its predictions and of the held-out loss, layer by layer.

With W + dW in place of W a layer's output changes to first order by dW x, and the prediction p by J dW x, with J the
derivative of p by that output. Neither J nor a gradient of W's size is made: a backward pass brings g = J^T c to each layer,
for two cotangents c at once, and <g, dW x> is summed there for each format and sample.

    along = <r, J dW x>   c = r = p - target, the residual
    probe = <v, J dW x>   c = v, of independent standard normal numbers

The expectation of probe^2 over v is ||J dW x||^2 (Hutchinson's estimator of a trace). Errors of different layers are nearly
independent, so their squares are added. The loss of a sample of n numbers is ||r||^2 / n: to first order it changes by 2
along / n. The second order is ||d||^2 / n of the prediction's change d, and the residual times the curvature of p in W, which
is not computed and was seen to cancel most of it. So the band of an estimate has ||d||^2 / n on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from trainer.base import draws
from trainer.base.errors import NonFiniteError
from trainer.base.memory import checkpoint_blocks
from trainer.base.types import Batch
from trainer.engine.components import Components
from trainer.engine.held_out_loss import HeldOutLoss, predictions
from trainer.quantization import Format, FrozenLayer

SURE = 1.96  # standard errors: 95 % of a normal distribution

Formats = Mapping[str, Format]  # layer -> its format, of the layers that a storage quantises


@dataclass(frozen=True)
class Predictions:
    """A denoiser's predictions at D fixed draws. residuals: fp32 [C, h, w] of each draw, on the CPU: prediction - target.
    errors, power: [D], the mean square of each residual, and of each prediction."""

    residuals: tuple[torch.Tensor, ...]
    errors: tuple[float, ...]
    power: tuple[float, ...]

    @property
    def loss(self) -> float:
        """The held-out loss, as in a run's log."""
        return fmean(self.errors)


@dataclass(frozen=True)
class Effect:
    """The changes at each draw. loss: fp64 [D], change of the error. moved: fp64 [D], mean square of the prediction's change.
    first_order: whether the loss is an estimate of first order."""

    loss: torch.Tensor
    moved: torch.Tensor
    first_order: bool = False

    @property
    def of_loss(self) -> float:
        """The change of the loss: the mean over draws."""
        return float(self.loss.mean())

    @property
    def band(self) -> float:
        """Half the 95 % interval of the change of the loss under other noises and times for the same photos: 1.96 standard
        errors of the mean over draws, plus the second order for an estimate. Infinite for one draw."""
        count = len(self.loss)
        sampling = SURE * float(self.loss.std()) / math.sqrt(count) if count > 1 else math.inf
        return sampling + self.of_prediction if self.first_order else sampling

    @property
    def of_prediction(self) -> float:
        """The mean squared change of the prediction, in units of the loss."""
        return float(self.moved.mean())

    def relative(self, base: Predictions) -> float:
        """The root mean square of the prediction's change, relative to that of the prediction."""
        return math.sqrt(self.of_prediction / fmean(base.power))


def measured(base: Predictions, other: Predictions) -> Effect:
    """The measured effect: the difference of two denoisers' predictions at the same draws."""
    pairs = zip(base.residuals, other.residuals, strict=True)
    moved = torch.stack([(b.double() - a.double()).square().mean() for a, b in pairs])
    errors = (torch.tensor(predictions.errors, dtype=torch.float64) for predictions in (other, base))
    return Effect(torch.sub(*errors), moved)


@dataclass(frozen=True)
class Terms:
    """The estimate of one storage. layers: [L] names. along, probe: fp64 [L, D]. sizes: fp64 [D], numbers in a prediction."""

    layers: tuple[str, ...]
    along: torch.Tensor
    probe: torch.Tensor
    sizes: torch.Tensor

    def effect(self, names: Collection[str]) -> Effect:
        """The joint effect of these layers, with the others as in the base."""
        rows = [index for index, name in enumerate(self.layers) if name in names]
        along, squares = self.along[rows].sum(0), self.probe[rows].square().sum(0)
        return Effect(2 * along / self.sizes, squares / self.sizes, first_order=True)

    def ranked(self) -> list[str]:
        """The layers by their change of the prediction, the largest first."""
        moved = (self.probe.square() / self.sizes).mean(1)
        return [self.layers[index] for index in moved.argsort(descending=True, stable=True).tolist()]


def twin(layer: FrozenLayer, format: Format, dtype: torch.dtype) -> torch.Tensor:
    """A dense layer's weight after a round trip through a format, in `dtype` and its own shape."""
    weight = layer.stored().codes.view(layer.weight_shape)
    payload = format.empty_payload(layer.weight_shape, weight.device)
    format.quantize_into(weight, payload)
    return layer.kernels.upcast(format.stored(payload, layer.weight_shape), dtype).view(layer.weight_shape)


@contextmanager
def swapped(layer: FrozenLayer, format: Format) -> Iterator[None]:
    """A block in which one layer computes with its weight as stored in a format."""
    layer.merged_weight = twin(layer, format, torch.float32)
    try:
        yield
    finally:
        layer.merged_weight = None


def predict(held_out: HeldOutLoss, components: Components, phase: str) -> Predictions:
    """The loaded denoiser's predictions at the fixed draws. phase: its name. Raises NonFiniteError."""
    compute, residuals = predictions(components), list[torch.Tensor]()
    errors, power = list[float](), list[float]()

    @torch.no_grad()
    def measure(batch: Batch, shares: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        prediction, target = compute(batch, shares, noise)
        residual = prediction - target
        squared = residual.square().flatten(1).mean(1)
        residuals.extend(residual.cpu())
        errors.extend(squared.tolist())
        power.extend(prediction.square().flatten(1).mean(1, dtype=torch.float64).tolist())
        return squared

    replace(held_out, errors=measure, name=phase).measure()
    if not all(map(math.isfinite, (*errors, *power))):
        raise NonFiniteError(f"{phase}: predictions are not finite")
    return Predictions(tuple(residuals), tuple(errors), tuple(power))


def estimate(
    held_out: HeldOutLoss,
    components: Components,
    denoiser: nn.Module,
    blocks: Mapping[str, nn.Module],
    stored: Sequence[Formats],
) -> list[Terms]:
    """The terms of each storage, in one forward and one backward pass for each draw. The blocks are recomputed in the
    backward pass, from now on too. Raises NonFiniteError."""
    layers = {name: layer for name, layer in denoiser.named_modules() if isinstance(layer, FrozenLayer)}
    checkpoint_blocks(blocks, True, compiled=list(blocks))
    sums = ErrorSums(stored)
    compute, anchor = predictions(components), torch.zeros((), device=components.model.device, requires_grad=True)

    def errors(batch: Batch, shares: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        count = len(shares)
        with torch.enable_grad():
            # Each draw twice: half of the gradients belong to the residual, half to the probe.
            prediction, target = compute(batch, shares.repeat(2), noise.repeat(2, *[1] * (noise.dim() - 1)))
        residual = (prediction - target).detach()[:count]
        indices = sums.begin(count, residual[0].numel())
        probes = [draws.normal(residual.shape[1:], held_out.seed, "audit_probe", index) for index in indices]
        cotangent = torch.cat([residual, torch.stack(probes).to(residual.device)])
        with components.attention.used():  # blocks are recomputed
            torch.autograd.grad(prediction, anchor, cotangent, allow_unused=True)
        return residual.square().flatten(1).mean(1)

    with ExitStack() as hooks:
        for name in dict.fromkeys(name for formats in stored for name in formats):
            callback = partial(sums.add, name, layers[name])
            hooks.callback(layers[name].register_forward_hook(partial(_watch, anchor, callback)).remove)
        replace(held_out, errors=errors, name="estimating every layer").measure()
    return sums.terms()


class ErrorSums:
    """Sums the terms of several storages."""

    def __init__(self, stored: Sequence[Formats]) -> None:
        self.stored, self.count = stored, 0
        self.sizes: list[int] = []
        self.sums: list[dict[str, list[torch.Tensor]]] = [{name: [] for name in formats} for formats in stored]

    def begin(self, count: int, size: int) -> range:
        """Begin `count` further draws, of predictions of `size` numbers. Returns their indices."""
        self.count = count
        self.sizes += [size] * count
        for layers in self.sums:
            for sums in layers.values():
                sums.append(torch.zeros(2, count, dtype=torch.float64))
        return range(len(self.sizes) - count, len(self.sizes))

    @torch.no_grad()
    def add(self, name: str, layer: FrozenLayer, x: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add the terms of a layer. x: its input, [2 count, ...], the draws twice. gradient: of its output."""
        assert len(x) == len(gradient) == 2 * self.count, name
        x, gradient = x[: self.count].float(), gradient.float()
        for formats, sums in zip(self.stored, self.sums, strict=True):
            if name in formats:
                change = twin(layer, formats[name], layer.compute_dtype).float().sub_(layer.compute_weight())
                moved = layer.product(x, change)
                terms = [(moved * half).flatten(1).sum(1, dtype=torch.float64) for half in gradient.split(self.count)]
                sums[name][-1] += torch.stack(terms).cpu()

    def terms(self) -> list[Terms]:
        """The terms of all draws. Raises NonFiniteError."""
        terms, sizes = [], torch.tensor(self.sizes, dtype=torch.float64)
        for layers in self.sums:
            sums = torch.stack([torch.cat(parts, 1) for parts in layers.values()])
            if not bool(sums.isfinite().all()):
                layer = next(name for name, row in zip(layers, sums, strict=True) if not bool(row.isfinite().all()))
                raise NonFiniteError(
                    f"the gradient at {layer} is not finite; compute in another way: precision.compute = 'bf16' or 'fp32'"
                )
            terms.append(Terms(tuple(layers), sums[:, 0], sums[:, 1], sizes))
        return terms


def _watch(
    anchor: torch.Tensor,
    callback: Callable[[torch.Tensor, torch.Tensor], None],
    layer: nn.Module,
    inputs: tuple,
    output: torch.Tensor,
) -> torch.Tensor | None:
    return _Watched.apply(output, inputs[0].detach(), anchor, callback) if torch.is_grad_enabled() else None


class _Watched(torch.autograd.Function):
    """The identity on a layer's output, whose backward pass calls callback(input of the layer, gradient of its output).
    anchor: the scalar that needs a gradient, as no weight does."""

    @staticmethod
    def forward(ctx, output, x, anchor, callback):
        ctx.save_for_backward(x)
        ctx.callback = callback
        ctx.mark_dirty(output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        ctx.callback(*ctx.saved_tensors, gradient)
        return gradient, None, None, None


# --- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerCost:
    """One layer in a format. alone: its effect as measured, or None. more: extra bytes if it is excluded."""

    name: str
    estimated: Effect
    alone: Effect | None
    more: int

    @property
    def moved(self) -> float:
        """The mean squared change of the prediction: measured, else estimated."""
        return (self.alone or self.estimated).of_prediction


@dataclass(frozen=True)
class FormatCost:
    """The cost of a storage. layers: the quantised ones, the costliest first. estimated, whole: the effect of all, estimated
    and measured. after_exclusion: measured without `exclude`, or None if that is empty. remaining: the estimated mean squared
    change of the prediction without the first 0, 1, ... layers. bytes: of the quantised layers."""

    format: Format
    layers: tuple[LayerCost, ...]
    estimated: Effect
    whole: Effect
    after_exclusion: Effect | None
    exclude: tuple[str, ...]
    remaining: tuple[float, ...]
    bytes: int

    @property
    def more(self) -> int:
        """The extra bytes of `exclude`."""
        return sum(layer.more for layer in self.layers if layer.name in self.exclude)


@dataclass(frozen=True)
class Audit:
    """An audit. stored: format of the base. kind: "held_out" or "trained" photos. excluded: the config's `exclude`."""

    model: str
    denoiser: str
    stored: str
    kind: str
    photos: int
    base: Predictions
    excluded: tuple[str, ...]
    costs: tuple[FormatCost, ...]
