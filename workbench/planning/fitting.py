"""Resolves `memory.fit` (by the remedies of `memory.fit_by`), and "auto" in `memory.resident_blocks` and `step.compile`."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from trainer.adapters.kinds import kind_named
from trainer.base.account import counted
from trainer.base.errors import UserError
from trainer.base.files import parse_size
from trainer.base.tensorfile import size_text
from trainer.data.batches import short_batches
from trainer.plan.changes import Keys, in_words
from trainer.plan.requirements import COMPOSED
from trainer.plan.run_plan import RunPlan
from trainer.runtime.compilation import RECOMPUTES, check_compiler
from trainer.runtime.device import Memory
from trainer.runtime.streaming import device_bytes
from workbench.planning import step_time
from workbench.planning.describe import band, step_seconds
from workbench.planning.dry_run import Rehearsal, without_values
from workbench.planning.estimate import Forecast, forecast
from workbench.planning.remedies import remedies, what_would_fit
from workbench.planning.suggestions import changes, lowered, with_keys

__all__ = ["compiling", "fitted", "what_would_fit"]


def cheapest(levels: Sequence[Sequence[Any]], fits: Callable[[Sequence[Any]], bool]) -> list[Any] | None:
    """A level of each remedy with which the run fits: the last remedy at its lowest level, then the one before it; None if
    the highest levels do not fit. levels: by remedy, the cheapest first; no level needs more memory than the one before."""
    current = [ladder[0] for ladder in levels]
    used = -1
    while not fits(current):
        used += 1
        if used == len(levels):
            return None
        current[used] = levels[used][-1]
    for place in reversed(range(used + 1)):

        def enough(level: Any, place: int = place) -> bool:
            return fits([*current[:place], level, *current[place + 1 :]])

        current[place] = levels[place][bisect_left(levels[place][:-1], True, key=enough)]  # the last is known to fit
    return current


def fitted(
    plan: RunPlan, memory: Memory, *, fixed: Collection[str] = (), say: Callable[[str], None] = lambda line: None
) -> RunPlan:
    """The plan with the keys that depend on memory, each as cheap as fits. A size in memory.fit replaces memory's. fixed:
    names of memory.fit_by that may no longer change. say: prints each choice, and its price. Raises UserError if nothing
    fits."""
    fit = plan.config.memory.fit
    memory = memory if fit in (None, "auto") else replace(memory, size=parse_size(fit))
    if fit is not None:
        plan = _fitted_by_remedies(plan, memory, fixed, say)
    table = plan.config.memory
    if table.offload == "blocks" and table.resident_blocks == "auto":
        if memory.base is not None:  # streamed blocks are in the same memory
            return with_keys(plan, {"memory.resident_blocks": 0})
        return _with_most_resident(plan, memory)
    if table.offload == "blocks" and memory.base is None:
        _check_slots(plan, memory)
    return plan


def _fitted_by_remedies(plan: RunPlan, memory: Memory, fixed: Collection[str], say: Callable[[str], None]) -> RunPlan:
    table, available = plan.config.memory, {remedy.name: remedy for remedy in remedies(on_cpu=memory.base is not None)}
    selected = [available[name] for name in table.fit_by if name in available and name not in fixed]
    ladders = {remedy: levels for remedy in selected if len(levels := remedy.levels(plan)) > 1}
    setting = f"memory.fit = {table.fit!r}"

    @cache
    def cached_forecast(keys: tuple[tuple[str, Any], ...]) -> Forecast:
        return forecast(with_keys(plan, dict(keys)), memory.kernels, base=memory.base)

    def needing(settings: Sequence[Keys]) -> Forecast:
        """The forecast with these settings. Resident blocks are computed from the forecast without any."""
        keys = _merged(settings)
        if not (resident := keys.get("memory.resident_blocks")) or resident == "auto":
            return cached_forecast(tuple(keys.items()))
        needs = cached_forecast(tuple((keys | {"memory.resident_blocks": 0}).items()))
        return with_resident(needs, plan.model.family.denoiser, resident)

    # Recomputation is preferred to eager steps, and these to remedies that change the run or stream blocks. If eager steps
    # do not fit, the remedy that is named first is used first.
    slower = [levels if remedy.name == "checkpointing" else levels[:1] for remedy, levels in ladders.items()]
    settings = None
    fit_eager = needing([levels[0] for levels in slower]).fits(memory.size)
    if fit_eager or [remedy.name for remedy in ladders][:1] == ["checkpointing"]:
        settings = cheapest(slower, lambda settings: needing(settings).fits(memory.size, graphs=True))
    settings = settings or cheapest([*ladders.values()], lambda settings: needing(settings).fits(memory.size))
    if settings is None:
        last = [levels[-1] for levels in ladders.values()]
        least = ", ".join(remedy.least for remedy in ladders) or "nothing that memory.fit_by may change"
        auto, needs = table.fit == "auto", needing(last)
        raise UserError(
            f"{setting}{f' ({size_text(memory.size)})' if auto else ''}: with {least} the run needs "
            f"{size_text(needs.total)}, in {needs.largest.name}; {'use a larger card' if auto else 'raise memory.fit'}, or"
            f"{_advice(with_keys(plan, _merged(last)), needs, memory)}"
        )
    for (remedy, levels), keys in zip(ladders.items(), settings, strict=True):
        if keys != levels[0]:
            say(f"{setting}: {in_words(keys)} ({remedy.price})")
    if not needing(settings).fits(memory.size, graphs=True):
        say(f"{setting}: step.graphs = false (steps wait for Python; no byte changes)")
        settings = [*settings, {"step.graphs": False}]
    return with_keys(plan, _merged(settings))


def compiling(plan: RunPlan, memory: Memory, *, say: Callable[[str], None]) -> RunPlan:
    """The plan with step.compile = "auto" resolved, alike in all processes: "blocks" if the least time that it saves is more
    than the most that it takes. say: prints the choice, and its reason."""
    if plan.config.step.compile != "auto":
        return plan
    choice, reason = _compile_choice(plan, memory)
    if memory.largest(choice == "none")[0] and choice != "none":
        choice, reason = "none", "another process does not earn its compile time back"
    say(f"step.compile = 'auto': {choice!r}, as {reason}")
    return with_keys(plan, {"step.compile": choice})


def _compile_choice(plan: RunPlan, memory: Memory) -> tuple[str, str]:
    """("blocks" or "none", reason)."""
    config, device = plan.config, memory.device
    if device is None:
        return "none", "no card is named; a start on one chooses by its speed"
    if device.type != "cuda":
        return "none", f"it chooses 'blocks' on a CUDA card alone, and this run is on {device}"
    if kind_named(config.adapter.type).factors is not None:
        return "none", COMPOSED["step.compile"]
    if config.memory.gradient_checkpointing and not RECOMPUTES:
        return "none", f"programs of torch {torch.__version__} need more memory than the plan says"
    try:
        check_compiler(device)
    except UserError as error:
        return "none", str(error)
    name = torch.cuda.get_device_name(device)
    machine = step_time.on_card(name, step_time.bare_operator())
    if machine is None:
        return "none", f"there are no figures for a step's time on {name}"
    needs, steps = forecast(plan, memory.kernels), plan.length.max_steps
    if needs.graphs and needs.fits(memory.size, graphs=True):
        machine = machine.scaled(1, 0)  # CUDA graphs do not wait for the host
    compiled = machine.scaled(step_time.COMPILED_CARD, step_time.COMPILED_HOST)
    ends = zip(step_seconds(plan, needs, machine), step_seconds(plan, needs, compiled), strict=True)
    saved = sorted(steps * (eager - quicker) for eager, quicker in ends)
    fill = config.data.short_batches == "merge"
    sizes = len(short_batches.shapes(plan.data.examples, batch_size=config.data.batch_size, fill=fill))
    least, most = (sizes * plan.data.table.clip_chunks * seconds for seconds in step_time.COMPILING)
    return "blocks" if saved[0] > most else "none", (
        f"compiling is estimated to save {band(*saved)} in {counted(steps, 'step')}, and to take {band(least, most)} for "
        f"{counted(sizes, 'size')} of micro-batches"
    )


def _merged(settings: Sequence[Keys]) -> Keys:
    return {key: value for keys in settings for key, value in keys.items()}


def _advice(plan: RunPlan, needs: Forecast, memory: Memory) -> str:
    """The end of a refusal: other changes that would help, one a line."""
    lines = [f"\n- {change}" for change in changes(plan, memory.kernels, needs, memory.size)]
    return "".join(lines) or " choose smaller photos"


def _with_most_resident(plan: RunPlan, memory: Memory) -> RunPlan:
    """The plan for an accelerator with as many resident blocks as fit."""
    least = with_keys(plan, {"memory.resident_blocks": 0})
    needs, denoiser = forecast(least, memory.kernels), plan.model.family.denoiser
    if not needs.fits(memory.size):
        raise UserError(
            f"memory.offload = 'blocks': with every block streamed the run needs {size_text(needs.total)}, in "
            f"{needs.largest.name}, and there are {size_text(memory.size)}; use a larger card, or"
            f"{_advice(least, needs, memory)}"
        )
    assert needs.streaming is not None
    counts = range(len(needs.streaming.blocks), -1, -1)
    most = next(count for count in counts if with_resident(needs, denoiser, count).fits(memory.size))
    return with_keys(plan, {"memory.resident_blocks": most})


def _check_slots(plan: RunPlan, memory: Memory) -> None:
    """Raises UserError if the resident blocks, and the slots of the streamed ones, do not fit into memory."""
    name = plan.model.family.denoiser
    with without_values():
        components = Rehearsal(plan, kernels=memory.kernels).components
        components.load(name)
        sizes, resident = components.streamers[name].sizes, plan.model.resident[name]
    if (size := device_bytes(sizes, resident)) > memory.size:
        remedy = "not even two blocks fit; use a larger card"
        if device_bytes(sizes, 0) <= memory.size:
            fewer = _with_most_resident(plan, memory)
            remedy = f"use at most {fewer.config.memory.resident_blocks}, or 'auto'"
        raise UserError(
            f"memory.resident_blocks = {resident}: these blocks of the {name}, and two that pass, take {size_text(size)}, "
            f"and there are {size_text(memory.size)}; {remedy}"
        )


def with_resident(needs: Forecast, denoiser: str, resident: int) -> Forecast:
    """A forecast of a streamed denoiser, with another number of resident blocks."""
    streaming = needs.streaming
    assert streaming is not None
    change = device_bytes(streaming.blocks, resident) - device_bytes(streaming.blocks, streaming.resident)
    sizes = {phase.name: phase.loaded.get(denoiser) for phase in needs.phases}
    needs = lowered(needs, lambda phase: {denoiser: 1 + change / size} if (size := sizes[phase]) else {})
    return replace(needs, streaming=replace(streaming, resident=resident))
