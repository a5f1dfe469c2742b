"""The loss of held-out photos, and of as many trained ones, at fixed draws of time and noise.

It is the plain mean squared error, with equal weights for every time, pixel and photo: comparable between runs with other
objectives. It depends on the adapter alone, and changes nothing in the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import sha256
from statistics import fmean

import torch

from trainer.base import draws
from trainer.base.files import json_bytes
from trainer.base.memory import give_back
from trainer.base.progress import Phases
from trainer.base.types import Batch, Occurrence, each_tensor
from trainer.data.batches.loader import Reader
from trainer.data.examples import Example
from trainer.engine.components import Components
from trainer.monitoring.course import BY_PHOTO, COPIES, COUNT, PHOTOS
from trainer.plan.fixed_draws import QUARTERS, at_once, copies, draws_of
from trainer.plan.run_plan import RunPlan
from trainer.runtime.jobs import Fields
from trainer.runtime.processes import Processes

Errors = Callable[[Batch, torch.Tensor, torch.Tensor], torch.Tensor]


def predictions(components: Components) -> Callable[[Batch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """(one photo, shares of time [n], noise fp32 [n, C, h, w]) -> (prediction, target), both fp32 [n, C, h, w]."""
    family, model, objective = components.family, components.model, components.plan.objective

    def predict(batch: Batch, shares: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        conditioning, time = batch.conditioning or family.encode_prompts(model, batch.captions), objective.time_at(shares)
        inputs = _repeated(replace(batch, conditioning=conditioning), len(shares)), noise, time, objective.at(time)
        batch, noise, time, at = each_tensor(inputs, lambda tensor: tensor.to(model.device))
        prediction = family.images.predict(model, objective.noised(batch.latents, noise, at), time, batch.conditioning, batch)
        return prediction.float(), objective.target(batch.latents, noise, at)

    return predict


def squared_errors(components: Components) -> Errors:
    """(one photo, shares of time [n], noise fp32 [n, C, h, w]) -> fp32 [n]: the mean squared error of each prediction."""
    predict = predictions(components)

    @torch.no_grad()
    def measure(batch: Batch, shares: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        prediction, target = predict(batch, shares, noise)
        return (prediction - target).square().flatten(1).mean(1)

    return measure


def _repeated(batch: Batch, count: int) -> Batch:
    """A batch of one photo, repeated `count` times."""
    repeated = each_tensor(batch, lambda tensor: tensor.repeat(count, *[1] * (tensor.dim() - 1)))
    return replace(repeated, occurrences=batch.occurrences * count, captions=batch.captions * count)


@dataclass(kw_only=True)
class HeldOutLoss:
    """Measures the loss at its fixed draws; each process computes a share of them.

    measured: examples by kind. seed: of the draws. at_once: draws in one forward pass. errors: (batch, shares of time, noise)
    -> each draw's. evaluating: a context in which the adapter has the weights for use. copies: how many held-out photos have
    a near duplicate that is trained on. changed: settings of the measurement that --allow changed. name: of the phase.
    """

    measured: Mapping[str, Sequence[Example]]
    seed: int
    at_once: int
    reader: Reader
    errors: Errors
    evaluating: Callable[[], AbstractContextManager[None]]
    processes: Processes
    phases: Phases
    copies: int = 0
    changed: Sequence[str] = ()
    name: str = "held-out loss"

    @staticmethod
    def of(
        plan: RunPlan, components: Components, reader: Reader, evaluating: Callable[[], AbstractContextManager[None]]
    ) -> HeldOutLoss:
        """The held-out loss of a run. evaluating: the context in which it is measured."""
        examples_of = {example.sample: example for examples in plan.data.measured.values() for example in examples}
        return HeldOutLoss(
            measured=plan.data.measured,
            seed=plan.config.validation.seed,
            at_once=at_once(plan.data) if plan.data.measured else 1,
            reader=replace(reader, examples=examples_of),
            errors=squared_errors(components),
            evaluating=evaluating,
            processes=components.processes,
            phases=components.phases,
            copies=copies(plan.data),
        )

    @property
    def names(self) -> list[str]:
        """The fields that every measurement has."""
        return [PHOTOS, *(f"{kind}_loss" for kind in self.measured)]

    @cached_property
    def mark(self) -> str:
        """The digest of photos, captions and draws, and of changed settings of the measurement."""
        photos = {
            kind: [
                # captions[0] is what the model reads: a trigger or another rule may change the caption.
                [e.photo.sha256, *dict.fromkeys((e.photo.caption, e.captions[0])), *(r.photo.sha256 for r in e.references)]
                for e in examples
            ]
            for kind, examples in self.measured.items()
        }
        changed = {"changed": self.changed} if self.changed else {}
        return sha256(json_bytes({"seed": self.seed, "photos": photos} | changed)).hexdigest()[:16]

    def measure(self) -> Fields:
        """Fields of the log; none if another process failed. This process's own error is raised once the others know."""
        owners = [(kind, example.photo.sha256[:16]) for kind, example, numbers in self._draws() for _ in numbers]
        losses = torch.zeros(len(owners), dtype=torch.float32, device=self.processes.device)
        work, failed = self._share(), 1
        try:
            with (
                self.phases(self.name, sum(len(numbers) for _, numbers, _ in work), "draw") as phase,
                phase.between_modules(),
                self.evaluating(),
            ):
                for example, numbers, first in work:
                    # Only one process fills each element: the sum over processes rounds nothing.
                    losses[first : first + len(numbers)] = self._errors(example, numbers)
                    phase.advance(len(numbers))
            failed = 0
        finally:
            give_back()
            # The others finish their shares, and learn of the failure here.
            (failed,) = self.processes.largest(failed)
        if failed:
            return {}
        self.processes.sum(losses)
        photos = len({example.photo.sample for example in self.measured.get("held_out", ())})
        counts = {COUNT: photos, COPIES: self.copies} if photos else {}
        return {PHOTOS: self.mark} | counts | _fields(owners, losses.tolist())

    def _draws(self) -> Iterator[tuple[str, Example, range]]:
        """(kind, example, numbers of its draws) of all measured examples."""
        for kind, examples in self.measured.items():
            for example in examples:
                yield kind, example, range(draws_of(len(examples)))

    def _share(self) -> list[tuple[Example, range, int]]:
        """(example, numbers of its draws, index of the first in all losses) of this process; pieces are cut alike for any
        count."""
        work, place = [], 0
        for _, example, numbers in self._draws():
            pieces = (numbers[first : first + self.at_once] for first in numbers[:: self.at_once])
            work += [(example, piece, place + piece.start) for piece in pieces]
            place += len(numbers)
        return work[self.processes.rank :: self.processes.count]

    def _errors(self, example: Example, numbers: Sequence[int]) -> torch.Tensor:
        batch, sha256 = self.reader[(Occurrence(0, example.sample, 0),)], example.photo.sha256
        # Draw n of a photo lies in quarter n modulo 4 of the time.
        quarters = [n % QUARTERS + draws.uniform(self.seed, "held_out_time", sha256, n) for n in numbers]
        shares = torch.tensor(quarters, dtype=torch.float64) / QUARTERS
        noise = partial(draws.normal, batch.latents.shape[1:], self.seed, "held_out_noise", sha256)
        return self.errors(batch, shares, torch.stack([noise(number) for number in numbers]))


def _fields(owners: Sequence[tuple[str, str]], errors: Sequence[float]) -> Fields:
    """Each kind's loss, its loss in each quarter of time (the least noise, time 0, first), and each photo's, over all its
    sizes; None for a mean of a value that is not finite. owners: (kind, photo) of each error. A photo's draws cycle through
    the quarters, and each photo has a multiple of four."""
    fields: Fields = {}
    for kind in dict.fromkeys(kind for kind, _ in owners):
        values, by_photo = list[float](), dict[str, list[float]]()
        for (owner, photo), error in zip(owners, errors, strict=True):
            if owner == kind:
                values.append(error)
                by_photo.setdefault(photo, []).append(error)
        fields[f"{kind}_loss"] = _mean(values)
        fields[f"{kind}_quarters"] = [_mean(values[quarter::QUARTERS]) for quarter in range(QUARTERS)]
        fields[BY_PHOTO[f"{kind}_loss"]] = {photo: _mean(each) for photo, each in by_photo.items()}
    return fields


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if all(map(math.isfinite, values)) else None
