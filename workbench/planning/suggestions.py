"""Suggestions for a run that does not fit: the remaining remedies, what each saves, and its price."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from trainer.base import tiles
from trainer.base.protocols import Kernels
from trainer.config import with_values
from trainer.data.buckets import Bucket
from trainer.data.examples import extremes
from trainer.plan.changes import Keys, in_words
from trainer.plan.run_plan import DataPlan, RunPlan, plan_data
from trainer.plan.samples import truths_of
from trainer.plan.storage import resident_blocks, weight_bytes
from workbench.planning.estimate import PARTS, PHOTOS, SAMPLES, STEP, Forecast, Stage, forecast
from workbench.planning.remedies import SMALL, Remedy, remedies

ACTIVATIONS = ("saved", "transient")  # parts of a phase
# A suggestion saves at least this many bytes, and this share of the shortage.
LEAST, LEAST_SHARE = 2**20, 0.005

# Phase name -> {part or component: new size / old size}; 1 for names that are missing.
Shares = Callable[[str], Mapping[str, float]]


@dataclass(frozen=True)
class Change:
    """A change of the config that saves memory. what, price: in words. after: the forecast with it and those before it."""

    what: str
    price: str
    after: Forecast

    def __str__(self) -> str:
        return f"{self.what} ({self.price})"


def changes(plan: RunPlan, kernels: Kernels, needs: Forecast, memory: int) -> list[Change]:
    """The cheapest change that saves enough, again and again, until the run fits or none does. needs: the plan's forecast.
    Only the savings of fewer or smaller images are scaled from it."""
    selection, remaining = [], list(ladder(plan, kernels, needs))
    while not needs.fits(memory):
        # A change that saves nothing now may do so later, when another phase is the largest.
        for rung in remaining:
            remedy, keys, shares = rung
            after = lowered(needs, shares)
            if needs.total - after.total >= max(LEAST, LEAST_SHARE * (needs.total - memory)):
                break
        else:
            break
        remaining.remove(rung)
        # A later change of the same key replaces this one.
        remaining = [(r, k, _relative(s, shares) if k.keys() == keys.keys() else s) for r, k, s in remaining]
        selection.append(Change(in_words(keys), remedy.price, after))
        needs = after
    return selection


def ladder(plan: RunPlan, kernels: Kernels, needs: Forecast) -> Iterator[tuple[Remedy, Keys, Shares]]:
    """The remaining changes, with their effect on a forecast."""

    def recount(keys: Keys) -> Forecast:
        return forecast(with_keys(plan, keys), kernels, base=(lambda: needs.base) if needs.base else None)

    for remedy in remedies(on_cpu=bool(needs.base)):
        for keys in remedy.remaining(plan):
            if (shares := _shares(remedy.name, keys, plan, needs, recount)) is not None:
                yield remedy, keys, shares


def _shares(remedy: str, keys: Keys, plan: RunPlan, needs: Forecast, recount: Callable[[Keys], Forecast]) -> Shares | None:
    """A remedy's effect on a forecast; None if a forecast does not show it."""
    match remedy:
        case "checkpointing" | "resident_blocks" | "vae":
            before = {phase.name: phase for phase in needs.phases}
            after = cache(lambda: {phase.name: phase for phase in recount(keys).phases})
            return lambda phase: _ratios(before[phase], after()[phase])
        case "pictures":
            return lambda phase: dict.fromkeys(PARTS, 0) if phase.startswith(SAMPLES) else {}
        case "batch":
            return _activations({STEP: 1 / plan.config.data.batch_size})
        case "text_encoders" | "denoiser":
            share = {(name := key.split(".")[2]): share_in(dtype, plan, name) for key, dtype in keys.items()}
            return lambda phase: share
        case "optimizer_bits":
            return lambda phase: {"optimizer": 8 / 32}
        case "resolution":
            return _activations(_at_small(plan.data))
    return None


def share_in(dtype: str, plan: RunPlan, name: str) -> float:
    """A component's weight bytes in that dtype, divided by its present ones."""
    storage = plan.model.storage[name]
    after, before = (weight_bytes(plan.model.source, s, held={}) for s in (storage.stored_as(dtype), storage))
    return after / before


def _relative(shares: Shares, earlier: Shares) -> Shares:
    """The shares relative to a forecast that `earlier` has lowered already."""
    return lambda phase: {name: share / earlier(phase)[name] for name, share in shares(phase).items()}


def _ratios(before: Stage, after: Stage) -> dict[str, float]:
    sizes = [(before.parts, after.parts), (before.loaded, after.loaded)]
    return {name: new[name] / size for old, new in sizes for name, size in old.items() if size and name != "weights"}


def _activations(shares: Mapping[str, float]) -> Shares:
    """Shares of the activations alone. shares: by prefix of the phase name."""
    return lambda phase: {part: share for begin, share in shares.items() if phase.startswith(begin) for part in ACTIVATIONS}


def _at_small(data: DataPlan) -> dict[str, float]:
    """The shares of the activations for photos of SMALL pixels squared. References keep their sizes."""
    (photo, *references), *_ = extremes(data.examples)
    constant, smaller = sum(map(prod, references)), prod(photo) * (SMALL / data.resolution) ** 2
    largest_reference = max((_pixels_at_once(r.bucket) for e in data.examples for r in e.references), default=0)
    largest = max(largest_reference, *(_pixels_at_once(example.bucket) for example in data.examples))
    return {STEP: (smaller + constant) / (prod(photo) + constant), PHOTOS: max(SMALL**2, largest_reference) / largest}


def _pixels_at_once(bucket: Bucket) -> int:
    """The pixels that the VAE encodes at once: of a large photo one tile."""
    return min(prod(bucket), (tiles.side(*bucket) or 2**31) ** 2)


def lowered(needs: Forecast, shares: Shares) -> Forecast:
    """The forecast after each phase's parts and weights shrink to these shares."""
    phases = []
    for phase in needs.phases:
        scale = shares(phase.name)
        loaded, parts = (
            {name: round(size * scale.get(name, 1)) for name, size in sizes.items()} for sizes in (phase.loaded, phase.parts)
        )
        if loaded != phase.loaded:
            parts["weights"] += sum(loaded.values()) - sum(phase.loaded.values())
        phases.append(replace(phase, parts=parts, loaded=loaded))
    return replace(needs, phases=tuple(phases))


def with_keys(plan: RunPlan, keys: Keys) -> RunPlan:
    """The plan with the keys of remedies, except data.resolution. Photos are not read again."""
    dtypes = {key: value for key, value in keys.items() if key.startswith("model.components.")}
    config = with_values(plan.config, {key: value for key, value in keys.items() if key not in dtypes})
    if config.data != plan.config.data:
        data, length = plan_data(config, plan.model.family, processes=plan.length.processes, scanned=plan.data.scanned)
        plan = replace(plan, data=data, length=length, truths=truths_of(config.validation, data.requests, data.examples))
    plan = replace(plan, config=config)
    model, storage = plan.model, dict(plan.model.storage)
    for key, dtype in dtypes.items():
        stored = storage[name := key.split(".")[2]].stored_as(dtype)
        storage[name] = replace(stored, compute=stored.format.dtype or stored.compute)
    if "memory.resident_blocks" in keys or "memory.offload" in keys:
        model = replace(model, resident=resident_blocks(config, model.source, model.adapted))
    return replace(plan, model=replace(model, storage=storage))
