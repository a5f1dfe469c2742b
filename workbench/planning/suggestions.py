"""What makes a run smaller that does not fit: the remedies that are left, what each saves, and its price."""

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
# A change counts that saves so many bytes, and such a share of what is missing.
LEAST, LEAST_SHARE = 2**20, 0.005

# Phase name -> the share that stays of each part and of each component's weights; 1 for what is not named.
Shares = Callable[[str], Mapping[str, float]]


@dataclass(frozen=True)
class Change:
    """A change of the config that lowers what a run takes. after: the forecast with this change and those before it."""

    what: str
    price: str
    after: Forecast

    def __str__(self) -> str:
        return f"{self.what} ({self.price})"


def changes(plan: RunPlan, kernels: Kernels, needs: Forecast, memory: int) -> list[Change]:
    """The cheapest that saves enough to count, again and again, until the run is small enough or nothing does. needs: of the
    plan as it is. Only of fewer or smaller images a share is taken."""
    taken, left = [], list(ladder(plan, kernels, needs))
    while not needs.fits(memory):
        # One that saves nothing now may do so later: what was the largest phase is not, once it was made smaller.
        for rung in left:
            remedy, keys, shares = rung
            after = lowered(needs, shares)
            if needs.total - after.total >= max(LEAST, LEAST_SHARE * (needs.total - memory)):
                break
        else:
            break
        left.remove(rung)
        # A key that is set again: what comes later takes the place of this one.
        left = [(other, its, _instead(more, shares) if its.keys() == keys.keys() else more) for other, its, more in left]
        taken.append(Change(in_words(keys), remedy.price, after))
        needs = after
    return taken


def ladder(plan: RunPlan, kernels: Kernels, needs: Forecast) -> Iterator[tuple[Remedy, Keys, Shares]]:
    """All that is left to change, and what it leaves of a forecast."""

    def recount(keys: Keys) -> Forecast:
        return forecast(with_keys(plan, keys), kernels, base=(lambda: needs.base) if needs.base else None)

    for remedy in remedies(on_cpu=bool(needs.base)):
        for keys in remedy.left(plan):
            if (shares := _shares(remedy.name, keys, plan, needs, recount)) is not None:
                yield remedy, keys, shares


def _shares(remedy: str, keys: Keys, plan: RunPlan, needs: Forecast, recount: Callable[[Keys], Forecast]) -> Shares | None:
    """What a remedy leaves; None where a forecast does not show it."""
    match remedy:
        case "checkpointing" | "resident_blocks" | "vae":
            before = {phase.name: phase for phase in needs.phases}
            after = cache(lambda: {phase.name: phase for phase in recount(keys).phases})
            return lambda phase: _as_counted(before[phase], after()[phase])
        case "pictures":
            return lambda phase: dict.fromkeys(PARTS, 0) if phase.startswith(SAMPLES) else {}
        case "batch":
            return _of_activations({STEP: 1 / plan.config.data.batch_size})
        case "text_encoders" | "denoiser":
            share = {(name := key.split(".")[2]): share_in(dtype, plan, name) for key, dtype in keys.items()}
            return lambda phase: share
        case "optimizer_bits":
            return lambda phase: {"optimizer": 8 / 32}
        case "resolution":
            return _of_activations(_at_small(plan.data))
    return None


def share_in(dtype: str, plan: RunPlan, name: str) -> float:
    """The share of a component's weights that they take in that dtype."""
    now = plan.model.storage[name]
    sizes = [weight_bytes(plan.model.source, each, held={}) for each in (now.stored_as(dtype), now)]
    return sizes[0] / sizes[1]


def _instead(shares: Shares, earlier: Shares) -> Shares:
    """The shares relative to a forecast that `earlier` has lowered already."""
    return lambda phase: {what: share / earlier(phase)[what] for what, share in shares(phase).items()}


def _as_counted(before: Stage, after: Stage) -> dict[str, float]:
    sizes = [(before.parts, after.parts), (before.loaded, after.loaded)]
    return {what: new[what] / size for old, new in sizes for what, size in old.items() if size and what != "weights"}


def _of_activations(shares: Mapping[str, float]) -> Shares:
    """shares: by how the names of phases begin."""
    return lambda phase: {part: share for begin, share in shares.items() if phase.startswith(begin) for part in ACTIVATIONS}


def _at_small(data: DataPlan) -> dict[str, float]:
    """The shares of the activations where photos are as small as SMALL. References keep their sizes."""
    (photo, *references), *_ = extremes(data.examples)
    constant, smaller = sum(map(prod, references)), prod(photo) * (SMALL / data.resolution) ** 2
    beside = max((_encoded(each.bucket) for e in data.examples for each in e.references), default=0)
    encoded = max(beside, *(_encoded(example.bucket) for example in data.examples))
    return {STEP: (smaller + constant) / (prod(photo) + constant), PHOTOS: max(SMALL**2, beside) / encoded}


def _encoded(bucket: Bucket) -> int:
    """The pixels that the VAE has at a time: it takes a large photo in tiles, and what it needs is that of one."""
    return min(prod(bucket), (tiles.side(*bucket) or 2**31) ** 2)


def lowered(needs: Forecast, shares: Shares) -> Forecast:
    """The forecast after each phase's parts and weights shrink to these shares."""
    phases = []
    for phase in needs.phases:
        left = shares(phase.name)
        loaded, parts = (
            {what: round(size * left.get(what, 1)) for what, size in sizes.items()} for sizes in (phase.loaded, phase.parts)
        )
        if loaded != phase.loaded:
            parts["weights"] += sum(loaded.values()) - sum(phase.loaded.values())
        phases.append(replace(phase, parts=parts, loaded=loaded))
    return replace(needs, phases=tuple(phases))


def with_keys(plan: RunPlan, keys: Keys) -> RunPlan:
    """The plan with keys of remedies, but for its photos' sizes. They are not read again."""
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
