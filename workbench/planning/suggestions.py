"""What makes a run smaller that does not fit: keys, what each saves, and its price."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any

import torch

from trainer.base import tiles
from trainer.base.protocols import Kernels
from trainer.data.buckets import Bucket
from trainer.data.examples import extremes
from trainer.plan.run_plan import RunPlan
from trainer.plan.storage import held_as, resident_blocks, weight_bytes
from trainer.runtime.precision import SMALLER_DTYPES, SMALLER_VAE, compute_dtype
from trainer.runtime.streaming import device_bytes
from workbench.planning.estimate import PHOTOS, SAMPLES, STEP, Forecast, Stage, forecast

ACTIVATIONS = ("saved", "transient")  # parts of a phase
# By the names of memory.fit_by.
PRICES = {
    "checkpointing": "every step takes up to a third longer; no byte changes",
    "resident_blocks": "the frozen base lies in host memory and is copied to the device in each step; no byte changes",
    "optimizer_bits": "the optimizer's state is rounded to 8 bits: another run",
    "batch": "as many photos in an update, fewer at a time and in another order: slower, and another run",
}
# A change counts that saves so many bytes, and such a share of what is missing.
LEAST, LEAST_SHARE = 2**20, 0.005


@dataclass(frozen=True)
class Change:
    """A change of the config that lowers what a run takes. after: the forecast with this change and those before it."""

    what: str
    price: str
    after: Forecast


@dataclass(frozen=True)
class _Rung:
    """change: of a forecast, whatever was changed before."""

    what: str
    price: str
    change: Callable[[Forecast], Forecast]


def changes(plan: RunPlan, kernels: Kernels, found: Forecast, memory: int) -> list[Change]:
    """The cheapest that saves enough to count, again and again, until the run is small enough or nothing does.

    Weights, recomputation and the VAE's dtype are counted anew; of fewer images or smaller ones the share is taken.
    """
    chosen, left = [], list(_ladder(plan, kernels, found))
    while not found.fits(memory):
        # One that saves nothing now may do so later: what was the largest phase is not, once it was made smaller.
        for rung in left:
            after = rung.change(found)
            if found.total - after.total >= max(LEAST, LEAST_SHARE * (found.total - memory)):
                break
        else:
            break
        left.remove(rung)
        chosen.append(Change(rung.what, rung.price, after))
        found = after
    return chosen


def _ladder(plan: RunPlan, kernels: Kernels, found: Forecast) -> Iterator[_Rung]:
    """found: of the plan as it is."""
    config, family = plan.config, plan.model.family
    base = (lambda: found.base) if found.base else None
    if family.blocks and config.memory.gradient_checkpointing is not True:
        yield _Rung(
            "memory.gradient_checkpointing = true",
            PRICES["checkpointing"],
            _as_counted(found, lambda: forecast(with_checkpointing(plan, True), kernels, base=base), (STEP,)),
        )
    if plan.data.requests:
        yield _Rung(
            "validation.every_steps = 0, or smaller samples",
            "no pictures while it trains; the adapter is the same",
            lambda found: replace(found, phases=tuple(p for p in found.phases if not p.name.startswith(SAMPLES))),
        )
    if not found.base:  # of a CPU, what streams lies in the same memory
        yield from _streaming(plan, kernels)
    count = config.data.batch_size
    if count > 1:
        yield _Rung(
            f"data.batch_size = 1, step.accumulation = {count * config.step.accumulation}",
            PRICES["batch"],
            lambda found: _scaled(found, STEP, 1 / count),
        )
    compute = {component: plan.model.storage[component].compute for component in (family.vae, family.denoiser)}
    if compute == {family.vae: torch.float32, family.denoiser: compute_dtype(SMALLER_VAE)}:
        smaller = replace(plan.model.storage[family.vae].stored_as(SMALLER_VAE), compute=compute_dtype(SMALLER_VAE))
        stored = {**plan.model.storage, family.vae: smaller}
        changed = replace(plan, model=replace(plan.model, storage=stored))
        yield _Rung(
            f"model.components.{family.vae}.dtype = {SMALLER_VAE!r}",
            "photos are encoded in 16 bits: another run",
            _as_counted(found, lambda: forecast(changed, kernels, base=base), (PHOTOS, SAMPLES), family.vae),
        )
    for name in family.text_encoders:
        yield from _smaller(plan, name, f"captions are read by {name} in 8 or 4 bits: another run")
    # On a CPU bitsandbytes decodes the whole state: its update takes more for a moment than fp32 takes all the time.
    # In place of another optimizer than AdamW it would train otherwise.
    if config.optimizer.name == "adamw" and not found.base:
        yield _Rung(
            "optimizer.name = 'adamw8bit'",
            PRICES["optimizer_bits"],
            lambda found: replace(found, phases=tuple(_in_8_bit(phase) for phase in found.phases)),
        )
    yield from _smaller(plan, family.denoiser, "the frozen weights are rounded, see docs/precision.md: another run")
    largest = plan.data.resolution
    if largest > 512:
        # References keep their sizes.
        (photo, *shown), *_ = extremes(plan.data.examples)
        kept, smaller = sum(map(prod, shown)), prod(photo) * (512 / largest) ** 2
        beside = max((_encoded(each.bucket) for e in plan.data.examples for each in e.references), default=0)
        encoded = max(beside, *(_encoded(example.bucket) for example in plan.data.examples))
        step, photos = (smaller + kept) / (prod(photo) + kept), max(512**2, beside) / encoded
        yield _Rung(
            "data.resolution = 512",
            "the photos are trained at half the size or less: another run",
            lambda found: _scaled(_scaled(found, STEP, step), PHOTOS, photos),
        )


def _streaming(plan: RunPlan, kernels: Kernels) -> Iterator[_Rung]:
    family, config = plan.model.family, plan.config
    if plan.model.parts > 1:
        return
    if family.blocks and config.memory.offload == "none" and not config.step.graphs:
        yield _Rung(
            "memory.offload = 'blocks'",
            PRICES["resident_blocks"],
            _with_counted_weights(lambda: forecast(streamed(plan, 0), kernels), (family.denoiser, *family.text_encoders)),
        )
    if plan.model.resident.get(family.denoiser):
        yield _Rung(
            "memory.resident_blocks = 0",
            "every block is copied to the device in each step; no byte changes",
            lambda found: with_resident(found, family.denoiser, 0),
        )


def _smaller(plan: RunPlan, name: str, price: str) -> Iterator[_Rung]:
    """The component in each smaller dtype than its own. What a file holds quantised stays as it is."""
    if held_as(plan.model.source, name) is not None:
        return
    component = plan.model.storage[name]
    now = weight_bytes(plan.model.source, component, held={})
    for dtype in SMALLER_DTYPES:
        there = weight_bytes(plan.model.source, component.stored_as(dtype), held={})
        if there < now:
            change = partial(_with_share, name=name, share=there / now)
            yield _Rung(f"model.components.{name}.dtype = {dtype!r}", price, change)


def _encoded(bucket: Bucket) -> int:
    """The pixels that the VAE has at a time: it takes a large photo in tiles, and what it needs is that of one."""
    return min(prod(bucket), (tiles.side(*bucket) or 2**31) ** 2)


def _part(phase: Stage, part: str, size: int) -> Stage:
    return replace(phase, parts=phase.parts | {part: size}) if part in phase.parts else phase


def _in_8_bit(phase: Stage) -> Stage:
    """With AdamW's two states in a byte each for every trained number, as many as there are fp32 gradients."""
    return _part(phase, "optimizer", min(phase.parts.get("optimizer", 0), phase.parts.get("gradients", 0) // 2))


def _with_weights(found: Forecast, name: str, size: int) -> Forecast:
    """With that component in so many bytes, wherever it is in memory."""
    phases = []
    for phase in found.phases:
        if phase.loaded.get(name, 0) > size:
            weights = phase.parts["weights"] - phase.loaded[name] + size
            phase = replace(_part(phase, "weights", weights), loaded={**phase.loaded, name: size})
        phases.append(phase)
    return replace(found, phases=tuple(phases))


def _with_share(found: Forecast, name: str, share: float) -> Forecast:
    """With that share of that component's weights, wherever it is in memory."""
    largest = max((phase.loaded.get(name, 0) for phase in found.phases), default=0)
    return _with_weights(found, name, int(share * largest))


def _scaled(found: Forecast, phases: str, share: float) -> Forecast:
    """With that share of the activations, in the phases whose names begin so."""
    scaled = (
        replace(phase, parts=phase.parts | {p: int(share * phase.parts[p]) for p in ACTIVATIONS if p in phase.parts})
        if phase.name.startswith(phases)
        else phase
        for phase in found.phases
    )
    return replace(found, phases=tuple(scaled))


def _as_counted(
    before: Forecast, recount: Callable[[], Forecast], phases: tuple[str, ...], component: str | None = None
) -> Callable[[Forecast], Forecast]:
    """A change that was counted anew: its share of the activations in these phases, and its weights of the component."""

    @cache
    def counted() -> Mapping[str, Stage]:
        return {phase.name: phase for phase in recount().phases}

    def change(found: Forecast) -> Forecast:
        earlier = {phase.name: phase for phase in before.phases}
        changed = []
        for phase in found.phases:
            if phase.name.startswith(phases):
                old, new = earlier[phase.name].parts, counted()[phase.name].parts
                shares = {p: int(phase.parts[p] * new[p] / old[p]) for p in ACTIVATIONS if old.get(p)}
                phase = replace(phase, parts=phase.parts | shares)
            changed.append(phase)
        after = replace(found, phases=tuple(changed))
        if component is not None:
            size = min(stage.loaded[component] for stage in counted().values() if component in stage.loaded)
            after = _with_weights(after, component, size)
        return after

    return change


def _with_counted_weights(recount: Callable[[], Forecast], names: Sequence[str]) -> Callable[[Forecast], Forecast]:
    """A change that was counted anew: its weights of those components."""

    @cache
    def counted() -> tuple[Stage, ...]:
        return recount().phases

    def change(found: Forecast) -> Forecast:
        for name in names:
            sizes = [stage.loaded[name] for stage in counted() if name in stage.loaded]
            found = _with_weights(found, name, min(sizes)) if sizes else found
        return found

    return change


def with_memory(plan: RunPlan, **keys: Any) -> RunPlan:
    """The plan with those keys of `memory`."""
    memory = plan.config.memory.model_copy(update=keys)
    return replace(plan, config=plan.config.model_copy(update={"memory": memory}))


def with_checkpointing(plan: RunPlan, every: bool | int) -> RunPlan:
    """The plan with that memory.gradient_checkpointing."""
    return with_memory(plan, gradient_checkpointing=every)


def streamed(plan: RunPlan, resident: int) -> RunPlan:
    """The plan with streamed blocks, of which so many of the denoiser stay on the device."""
    changed = with_memory(plan, offload="blocks", resident_blocks=resident)
    model = changed.model
    blocks = resident_blocks(changed.config, model.source, {target.component for target in model.targets})
    return replace(changed, model=replace(model, resident=blocks))


def unstreamed(plan: RunPlan) -> RunPlan:
    """The plan with nothing streamed."""
    changed = with_memory(plan, offload="none", resident_blocks="auto")
    return replace(changed, model=replace(changed.model, resident={}))


def with_resident(found: Forecast, denoiser: str, resident: int) -> Forecast:
    """A forecast of a streamed denoiser, with so many blocks that stay."""
    assert found.streaming is not None
    blocks, now = found.streaming.blocks, found.streaming.resident
    more = device_bytes(blocks, resident) - device_bytes(blocks, now)
    phases = tuple(
        replace(_part(p, "weights", p.parts["weights"] + more), loaded={**p.loaded, denoiser: p.loaded[denoiser] + more})
        if denoiser in p.loaded
        else p
        for p in found.phases
    )
    return replace(found, phases=phases, streaming=replace(found.streaming, resident=resident))
