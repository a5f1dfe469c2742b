"""Judges whether rounding explains the difference between a run's step and the same step in fp64.

For a number q of the step (its loss, its gradient norm, a layer's gradient) let q64 be its value in fp64 (exact.py), and q_i
its values in REPETITIONS steps with random errors as large as the run's rounding (rounding.py). Then

    bound = FACTOR * sqrt(mean of (q_i - q64)^2)   [+ 2^-24 |q64| for the loss and the norm, which the log has in fp32]

If the run's error has the distribution of the repetitions' errors, (q - q64) over that root is Student's t with as many
degrees of freedom as repetitions: |t| > 8 with 8 of them in 4.4e-5 of all cases. The bound follows from the formulas and the
compute dtype alone: a wrong kernel of the run cannot widen it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from statistics import median

import torch
from torch import Tensor

from trainer.adapters import Adapter
from trainer.adapters.kinds import KINDS, MAGNITUDE, A, B
from trainer.base.types import Batch, Occurrence, each_tensor
from trainer.engine.step import Losses, Step, StepResult, backward
from workbench.replay.formulas import Update, sample_losses
from workbench.replay.rounding import InFp64, rounded_to

REPETITIONS, FACTOR = 8, 8.0
LOG_ROUNDOFF = 2.0**-24
LABELS = {A: "A", B: "B", MAGNITUDE: "m"}


@dataclass(kw_only=True)
class RecordingStep(Step):
    """A step that keeps its gradients before clipping, without the loss scale. trained: the parameters by name."""

    trained: Mapping[str, Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def read(self, losses: Tensor, norm: Tensor) -> tuple[list[float], float, float]:
        self.gradients = {name: parameter.grad.detach().clone() for name, parameter in self.trained.items()}
        return super().read(losses, norm)


@dataclass(frozen=True)
class RepeatedStep:
    """A step repeated in the run's own precision. before: the adapter's parameters, by name. batches, occurrences: its data.
    gradients: by name, before clipping; perhaps not finite if the update was refused."""

    number: int
    result: StepResult
    before: Mapping[str, Tensor]
    batches: Sequence[Batch]
    occurrences: Sequence[Occurrence]
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True)
class Number:
    """A number of the step. logged, here: in the run and repeated; None: not finite. exact: in fp64. bound: of
    |logged - exact|. overflows: whether rounding may have made it infinite."""

    logged: float | None
    here: float | None
    exact: float
    bound: float
    overflows: bool

    @property
    def share(self) -> float:
        """The error as a share of the bound."""
        if self.logged is None:
            return 0.0 if self.overflows else math.inf
        return _share(abs(self.logged - self.exact), self.bound)


@dataclass(frozen=True)
class LayerGradient:
    """The gradient of a layer's A, B or magnitude (part). size: its norm in fp64. error: of the repeated step, as a share of
    size. along: its part along the gradient, where roundings add up to far less than a wrong factor. bounds: of both."""

    name: str
    part: str
    size: float
    error: float
    along: float
    bounds: tuple[float, float]

    @property
    def share(self) -> float:
        """The larger of error and along, each as a share of its bound."""
        return max(_share(abs(error), bound) for error, bound in zip((self.error, self.along), self.bounds, strict=True))


@dataclass(frozen=True)
class JudgedStep:
    """The judgement of a step. layers: each A, B and magnitude; none if the repeated step has no finite gradient."""

    number: int
    loss: Number
    norm: Number
    layers: tuple[LayerGradient, ...]
    update: Update = Update({})

    @property
    def explained(self) -> bool:
        """Whether rounding explains the log and the repeated step."""
        return all(part.share <= 1 for part in (self.loss, self.norm, *self.layers, self.update))


@dataclass(frozen=True)
class StepValues:
    """Loss, gradient norm and gradients of a step, all in fp64."""

    loss: float
    norm: float
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True)
class Judge:
    """Judges steps of a model within `exact.computing_exactly`. dtype: the run's compute dtype. training: as in Step."""

    losses: Losses
    adapter: Adapter
    training: Callable[[int, int], AbstractContextManager[None]]
    dtype: torch.dtype

    def judge(self, step: RepeatedStep, logged: tuple[float | None, float | None]) -> JudgedStep:
        """The judgement of a step. logged: (loss, gradient norm)."""
        for name, parameter in self.adapter.named_parameters().items():
            parameter.data.copy_(step.before[name])
        exact = self.values(step, None)
        rounded = [self.values(step, index) for index in range(REPETITIONS)]
        loss = _number(logged[0], step.result.loss, exact.loss, [values.loss for values in rounded])
        norm = _number(logged[1], step.result.grad_norm, exact.norm, [values.norm for values in rounded])
        layers = () if step.result.grad_norm is None else tuple(_gradients(step.gradients, exact, rounded))
        return JudgedStep(step.number, loss, norm, layers)

    def values(self, step: RepeatedStep, repetition: int | None) -> StepValues:
        """The step's values in fp64; repetition: with random errors seeded by this number; None: exact."""
        parameters = self.adapter.named_parameters()
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        device, scale = self.losses.device, 1.0 if repetition is None else step.result.loss_scale
        generator = torch.Generator(device)
        generator.manual_seed(1_000_003 * step.number + (repetition or 0))
        share, total = torch.tensor(scale / len(step.occurrences), dtype=torch.float64, device=device), 0.0
        for index, batch in enumerate(step.batches):
            with self.training(step.number, index):
                inputs = self.losses.inputs(batch, step.occurrences)
                if repetition is None:
                    inputs = each_tensor(inputs, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
                with InFp64() if repetition is None else rounded_to(self.dtype, generator):
                    losses = sample_losses(self.losses, inputs)
                    values = backward(losses, share.to(losses.dtype))
            total += float(values.double().sum())
        gradients = {name: parameter.grad / scale for name, parameter in parameters.items()}
        norm = _norm(gradients.values()) if repetition is None else _norm_in_fp32(gradients.values())
        return StepValues(total / len(step.occurrences), norm, gradients)


def recording(step: Step, adapter: Adapter) -> RecordingStep:
    """A copy of a step that records its gradients."""
    return RecordingStep(**{each.name: getattr(step, each.name) for each in fields(step)}, trained=adapter.named_parameters())


def _number(logged: float | None, here: float | None, exact: float, rounded: Sequence[float]) -> Number:
    finite = [value for value in rounded if math.isfinite(value)]
    bound = FACTOR * _rms([value - exact for value in finite]) + LOG_ROUNDOFF * abs(exact)
    return Number(logged, here, exact, bound, len(finite) < len(rounded))


def _share(error: float, bound: float) -> float:
    return error / bound if bound else (0.0 if error == 0 else math.inf)


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values)) if values else 0.0


def _norm_in_fp32(tensors: Iterable[Tensor]) -> float:
    """The norm of the flat gradient as in a run: a CPU's sum of many millions of numbers in fp32 comes out short."""
    flat = torch.cat([tensor.flatten().float() for tensor in tensors])
    return float(torch.nn.utils.get_total_norm([flat]))


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def _gradients(here: Mapping[str, Tensor], exact: StepValues, rounded: Sequence[StepValues]) -> Iterator[LayerGradient]:
    """The error of each tensor and its bounds. With few repetitions some roots come out far too small: each is raised to the
    median of its kind (A, B or magnitudes)."""
    roots: dict[str, list[float]] = {}
    for name, gradient in exact.gradients.items():
        errors = [_errors(values.gradients[name], gradient) for values in rounded]
        roots[name] = [_rms([error for error in part if math.isfinite(error)]) for part in zip(*errors, strict=True)]
    for end in dict.fromkeys(end for kind in KINDS.values() for end in kind.ends):
        names = [name for name in roots if name.endswith(f".{end}")]
        floor = [median(roots[name][index] for name in names) for index in (0, 1)] if names else []
        for name in names:
            bounds = [FACTOR * max(pair) for pair in zip(roots[name], floor, strict=True)]
            size, (error, along) = _norm([exact.gradients[name]]), _errors(here[name], exact.gradients[name])
            layer = name.removesuffix(f".{end}")
            yield LayerGradient(layer, LABELS.get(end, end), size, error, along, (bounds[0], bounds[1]))


def _errors(values: Tensor, exact: Tensor) -> tuple[float, float]:
    """(||values - exact|| / size, <values - exact, exact> / size^2) with size = ||exact||."""
    error, size = values.double() - exact, _norm([exact])
    if size == 0:
        return (math.inf if bool(error.any()) else 0.0), 0.0
    return _norm([error]) / size, float((error * exact).sum()) / size**2
