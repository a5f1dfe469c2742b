"""Whether a step that a run made is what its inputs give: the same step in fp64, and how far rounding may lead from that.

Of a number q of the step (its loss, its gradient norm, a layer's gradient) let q64 be that of fp64 (exact.py), and q_i that
of REPETITIONS steps with random errors as large as the run's rounding (rounding.py). Then

    bound = FACTOR * sqrt(mean of (q_i - q64)^2)   [+ 2^-24 |q64| of the loss and the norm, which the log has in fp32]

If the run's own error is drawn from what the repetitions are drawn from, (q - q64) over that root is Student's t with as many
degrees of freedom as repetitions: |t| > 8 with 8 of them in 4.4e-5 of all cases. The bound follows from the formulas and the
compute dtype alone. No kernel of the run has a part in it, so a wrong one cannot widen it.
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
class WatchedStep(Step):
    """A step that keeps its gradients before clipping, without the loss scale, in `seen`. trained: the parameters by name."""

    trained: Mapping[str, Tensor]
    seen: dict[str, Tensor] = field(default_factory=dict)

    def read(self, losses: Tensor, norm: Tensor) -> tuple[list[float], float, float]:
        self.seen = {name: parameter.grad.detach().clone() for name, parameter in self.trained.items()}
        return super().read(losses, norm)


@dataclass(frozen=True)
class Made:
    """A step done again in the run's own precision. before: the adapter's parameters, by name. given, occurrences: what it
    saw. gradients: by name, before clipping; of a refused update perhaps not finite."""

    number: int
    result: StepResult
    before: Mapping[str, Tensor]
    given: Sequence[Batch]
    occurrences: Sequence[Occurrence]
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True)
class Number:
    """A number of the step. logged: the run's, here: done again, both None where it was not finite. exact: in fp64. bound:
    for |logged - exact|. overflows: whether rounding may have made it infinite."""

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
    """The gradient of a layer's A, B or magnitude: `part`. size: its norm in fp64. error: of the step done again here, as a
    share of the size. along: the part of it along the gradient, where roundings add up to far less than a wrong factor does.
    bounds: for error and along."""

    name: str
    part: str
    size: float
    error: float
    along: float
    bounds: tuple[float, float]

    @property
    def share(self) -> float:
        """The larger of both as a share of its bound."""
        return max(_share(abs(each), bound) for each, bound in zip((self.error, self.along), self.bounds, strict=True))


@dataclass(frozen=True)
class JudgedStep:
    """A step in three ways. layers: of each A, B and magnitude; none where the step done again has no finite gradient.
    update: what it did with its gradients."""

    number: int
    loss: Number
    norm: Number
    layers: tuple[LayerGradient, ...]
    update: Update = Update({})

    @property
    def explained(self) -> bool:
        """Whether rounding explains the log and the step done again."""
        return all(each.share <= 1 for each in (self.loss, self.norm, *self.layers, self.update))


@dataclass(frozen=True)
class Passed:
    """Loss, gradient norm and gradients of a step, all in fp64."""

    loss: float
    norm: float
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True)
class Judge:
    """Judges steps of a model within `exact.computing_exactly`. dtype: what the run computes in. training: as of a Step."""

    losses: Losses
    adapter: Adapter
    training: Callable[[int, int], AbstractContextManager[None]]
    dtype: torch.dtype

    def judge(self, made: Made, logged: tuple[float | None, float | None]) -> JudgedStep:
        """The judgement of a step. logged: (loss, gradient norm)."""
        for name, parameter in self.adapter.named_parameters().items():
            parameter.data.copy_(made.before[name])
        exact = self.passed(made, None)
        rounded = [self.passed(made, index) for index in range(REPETITIONS)]
        here = made.result
        loss = _number(logged[0], here.loss, exact.loss, [each.loss for each in rounded])
        norm = _number(logged[1], here.grad_norm, exact.norm, [each.norm for each in rounded])
        if here.grad_norm is None:
            return JudgedStep(made.number, loss, norm, ())
        return JudgedStep(made.number, loss, norm, tuple(_gradients(made.gradients, exact, rounded)))

    def passed(self, made: Made, repetition: int | None) -> Passed:
        """The step in fp64; repetition: with errors of that number's drawing."""
        parameters = self.adapter.named_parameters()
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        device, scale = self.losses.device, 1.0 if repetition is None else made.result.loss_scale
        generator = torch.Generator(device)
        generator.manual_seed(1_000_003 * made.number + (repetition or 0))
        share, total = torch.tensor(scale / len(made.occurrences), dtype=torch.float64, device=device), 0.0
        for index, batch in enumerate(made.given):
            with self.training(made.number, index):
                inputs = self.losses.inputs(batch, made.occurrences)
                if repetition is None:
                    inputs = each_tensor(inputs, lambda each: each.double() if each.is_floating_point() else each)
                with InFp64() if repetition is None else rounded_to(self.dtype, generator):
                    losses = sample_losses(self.losses, inputs)
                    values = backward(losses, share.to(losses.dtype))
            total += float(values.double().sum())
        gradients = {name: parameter.grad / scale for name, parameter in parameters.items()}
        norm = _norm(gradients.values()) if repetition is None else _norm_in_fp32(gradients.values())
        return Passed(total / len(made.occurrences), norm, gradients)


def watched(step: Step, adapter: Adapter) -> WatchedStep:
    """The step, with its gradients kept."""
    return WatchedStep(**{each.name: getattr(step, each.name) for each in fields(step)}, trained=adapter.named_parameters())


def _number(logged: float | None, here: float | None, exact: float, rounded: Sequence[float]) -> Number:
    finite = [each for each in rounded if math.isfinite(each)]
    bound = FACTOR * _rms([each - exact for each in finite]) + LOG_ROUNDOFF * abs(exact)
    return Number(logged, here, exact, bound, len(finite) < len(rounded))


def _share(error: float, bound: float) -> float:
    return error / bound if bound else (0.0 if error == 0 else math.inf)


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values)) if values else 0.0


def _norm_in_fp32(tensors: Iterable[Tensor]) -> float:
    """The norm as a run makes it of its flat gradient: of many millions of numbers a CPU's sum in fp32 comes out short."""
    flat = torch.cat([tensor.flatten().float() for tensor in tensors])
    return float(torch.nn.utils.get_total_norm([flat]))


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def _gradients(here: Mapping[str, Tensor], exact: Passed, rounded: Sequence[Passed]) -> Iterator[LayerGradient]:
    """Each tensor's error and its bounds. Of few repetitions some roots come out far too small: none counts as less than the
    median of its kind, of A, B or magnitudes."""
    roots: dict[str, list[float]] = {}
    for name, gradient in exact.gradients.items():
        off = [_errors(each.gradients[name], gradient) for each in rounded]
        roots[name] = [_rms([each for each in part if math.isfinite(each)]) for part in zip(*off, strict=True)]
    for end in dict.fromkeys(end for kind in KINDS.values() for end in kind.ends):
        names = [name for name in roots if name.endswith(f".{end}")]
        least = [median(roots[name][place] for name in names) for place in (0, 1)] if names else []
        for name in names:
            bounds = [FACTOR * max(pair) for pair in zip(roots[name], least, strict=True)]
            size, errors = _norm([exact.gradients[name]]), _errors(here[name], exact.gradients[name])
            yield LayerGradient(name.removesuffix(f".{end}"), LABELS.get(end, end), size, *errors, (bounds[0], bounds[1]))


def _errors(values: Tensor, exact: Tensor) -> tuple[float, float]:
    """(||found - exact|| / size, <found - exact, exact> / size^2), size that of exact."""
    off, size = values.double() - exact, _norm([exact])
    if size == 0:
        return (math.inf if bool(off.any()) else 0.0), 0.0
    return _norm([off]) / size, float((off * exact).sum()) / size**2
