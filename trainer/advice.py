"""What makes a run smaller that does not fit: keys, what each saves, and its price. And the keys of memory.fit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from trainer.errors import UserError
from trainer.files import parse_size
from trainer.forecast import SAMPLES, STEP, Forecast, Stage, forecast
from trainer.plan import Plan
from trainer.precision import SMALLER_DTYPES
from trainer.protocols import Kernels
from trainer.storage import held_as, weight_bytes
from trainer.tensorfile import size_text

# Of memory.gradient_checkpointing, the fastest first: none, every fourth block, ..., all. They change no byte of a run.
CHECKPOINTING: tuple[bool | int, ...] = (False, 4, 3, 2, True)


@dataclass(frozen=True)
class Change:
    """after: the forecast with this change and those before it."""

    what: str
    price: str
    after: Forecast


def changes(plan: Plan, kernels: Kernels, found: Forecast, memory: int) -> list[Change]:
    """Cheapest first, each on top of those before it, until the run is small enough. One that saves nothing is left out.

    Weights and recomputation are counted anew; of fewer images or smaller ones the share is taken.
    """
    chosen: list[Change] = []
    for what, price, change in _ladder(plan, kernels):
        if found.fits(memory):
            break
        after = change(found)
        if after.total < found.total:
            chosen.append(Change(what, price, after))
            found = after
    return chosen


def _ladder(plan: Plan, kernels: Kernels) -> Iterator[tuple[str, str, Callable[[Forecast], Forecast]]]:
    config, family = plan.config, plan.family
    if family.blocks and config.memory.gradient_checkpointing is not True:
        yield (
            "memory.gradient_checkpointing = true",
            "every step takes about a third longer; no byte changes",
            lambda found: replace(
                found, phases=_steps_of(found, forecast(with_checkpointing(plan, True), kernels, base=_same_base(found)))
            ),
        )
    if plan.requests:
        yield (
            "validation.every_steps = 0, or smaller samples",
            "no pictures while it trains; the adapter is the same",
            lambda found: replace(found, phases=tuple(p for p in found.phases if not p.name.startswith(SAMPLES))),
        )
    count = config.data.batch_size
    if count > 1:
        yield (
            f"data.batch_size = 1, step.accumulation = {count * config.step.accumulation}",
            "the same images in an update, one after the other: slower, and another run",
            lambda found: _scaled(found, 1 / count),
        )
    for name in family.text_encoders:
        yield from _smaller(plan, name, f"captions are read by {name} in 8 or 4 bits: another run")
    if not config.optimizer.name.endswith("8bit"):
        yield (
            "optimizer.name = 'adamw8bit'",
            "the optimizer's state is rounded to 8 bits: another run",
            lambda found: replace(
                found, phases=tuple(_part(p, "optimizer", p.parts.get("optimizer", 0) // 4) for p in found.phases)
            ),
        )
    yield from _smaller(plan, family.denoiser, "the frozen weights are rounded, see docs/precision.md: another run")
    largest = max(each for example in plan.examples for each in example.photo.source.resolutions)
    if largest > 512:
        yield (
            "data.resolution = 512",
            "the photos are trained at half the size or less: another run",
            lambda found: _scaled(found, (512 / largest) ** 2),
        )


def _smaller(plan: Plan, name: str, price: str) -> Iterator[tuple[str, str, Callable[[Forecast], Forecast]]]:
    """The component in each smaller dtype than its own. What a file holds quantised stays as it is."""
    if held_as(plan.source, name) is not None:
        return
    component = plan.components[name]
    now = weight_bytes(plan.source, component, held={})
    for dtype in SMALLER_DTYPES:
        there = weight_bytes(plan.source, component.stored_as(dtype), held={})

        def change(found: Forecast, there: int = there) -> Forecast:
            nonlocal now
            saved, now = now - there, there
            phases = tuple(_part(p, "weights", p.parts["weights"] - saved) if name in p.loaded else p for p in found.phases)
            return replace(found, phases=phases)

        if there < now:
            yield f"model.components.{name}.dtype = {dtype!r}", price, change


def _part(phase: Stage, part: str, size: int) -> Stage:
    return replace(phase, parts=phase.parts | {part: size}) if part in phase.parts else phase


def _scaled(found: Forecast, share: float) -> Forecast:
    """With that share of a step's activations."""
    phases = []
    for phase in found.phases:
        if phase.name.startswith(STEP):
            phase = replace(phase, parts=phase.parts | {p: int(share * phase.parts[p]) for p in ("saved", "transient")})
        phases.append(phase)
    return replace(found, phases=tuple(phases))


def _same_base(found: Forecast) -> Callable[[], int] | None:
    return (lambda: found.base) if found.base else None


def _steps_of(found: Forecast, other: Forecast) -> tuple[Stage, ...]:
    """The phases with the other's steps."""
    by_name = {phase.name: phase for phase in other.phases if phase.name.startswith(STEP)}
    return tuple(by_name.get(phase.name, phase) for phase in found.phases)


def with_checkpointing(plan: Plan, every: bool | int) -> Plan:
    memory = plan.config.memory.model_copy(update={"gradient_checkpointing": every})
    return replace(plan, config=plan.config.model_copy(update={"memory": memory}))


def fitted(plan: Plan, kernels: Kernels, *, base: Callable[[], int] | None) -> Plan:
    """The plan with the keys that memory.fit chooses: the fastest that need no more memory, of those that change no byte.

    Raises UserError where none of them is small enough.
    """
    if plan.config.memory.fit is None:
        return plan
    memory, family = parse_size(plan.config.memory.fit), plan.family
    choices = CHECKPOINTING if family.blocks else (False,)
    smallest = with_checkpointing(plan, choices[-1])
    least = forecast(smallest, kernels, base=base)
    if not least.fits(memory):
        advice = "".join(f"\n- {change.what} ({change.price})" for change in changes(smallest, kernels, least, memory))
        raise UserError(
            f"memory.fit = {plan.config.memory.fit!r}: with every block recomputed the run needs {size_text(least.total)}, "
            f"in {least.largest.name}; raise memory.fit, or{advice or ' choose smaller photos'}"
        )
    for every in choices[:-1]:
        tried = with_checkpointing(plan, every)
        if forecast(tried, kernels, base=base).fits(memory):
            return tried
    return smallest
