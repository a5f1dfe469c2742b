"""How an estimate of memory and time is printed, by --plan and at the start of a run."""

from collections.abc import Sequence
from math import prod

from trainer.base.progress import duration
from trainer.base.tensorfile import size_text
from trainer.memory_plan.cpu_speed import Speed
from trainer.memory_plan.estimate import PARTS, STEP, Forecast
from trainer.memory_plan.suggestions import Change
from trainer.plan.run_plan import RunPlan


def describe_memory(found: Forecast, memory: int, smaller: Sequence[Change], *, updates: int) -> str:
    """What a run takes of its device's memory, phase by phase. The last line says whether it fits.

    memory: of the device. smaller: what would need less, where it does not fit. updates: micro-batches in an update.
    """
    width = max(len(phase.name) for phase in found.phases)
    lines = ["memory, at the largest moment of each phase"]  # no table: a terminal may have 80 columns
    for phase in found.phases:
        parts = ", ".join(f"{part} {size_text(phase.parts[part])}" for part in PARTS if phase.parts.get(part))
        lines.append(f"  {phase.name:<{width}}  {size_text(phase.peak)}: {parts}")
    below = "libraries" if found.base else "the device's context"
    lines.append(
        f"  saved: what the backward pass needs. Not in these numbers: {size_text(found.base + found.margin)}, an estimate, "
        f"for {below} and for what the allocator loses"
    )
    if found.host:
        told = ", ".join(f"{what} {size_text(size)}" for what, size in found.host.items())
        lines.append(
            f"  on the host: {size_text(sum(found.host.values()))}: {told}; not counted: what the device's libraries take"
        )
    aside = f", averages set aside {size_text(found.set_aside)} each time" if found.set_aside else ""
    lines.append(f"  on the disk: cache {size_text(found.cache)}, each checkpoint {size_text(found.checkpoint)}" + aside)
    for phase in found.phases:
        if phase.name.startswith(STEP):
            flops = updates * phase.cost.flops / 1e9
            told = f"{flops / 1e3:.2f} TFLOP" if flops >= 100 else f"{flops:.2f} GFLOP"
            lines.append(f"  {phase.name}: {told} an update in products, convolutions and attention")
    needed = f"{size_text(found.total)} of {size_text(memory)} are needed, most in {found.largest.name}"
    if found.fits(memory):
        return "\n".join([*lines, f"fits: {needed}"])
    if smaller:
        lines.append("what needs less, the cheapest first, each together with those above it:")
    total = found.total
    for change in smaller:
        enough = ", which is enough" if change.after.fits(memory) else ""
        saved, total = total - change.after.total, change.after.total
        lines.append(f"  {change.what}: {size_text(saved)} less, {size_text(total)}{enough} ({change.price})")
    return "\n".join([*lines, f"does not fit: {needed}"])


def describe_cpu(plan: RunPlan, found: Forecast, speed: Speed, *, slow: bool) -> str:
    """How long a run takes without a GPU: an estimate from the operators of its step at the largest size. slow: whether
    this CPU would take much less time in fp32 (trainer/memory_plan/cpu_speed.py)."""
    config, last = plan.config, plan.length.max_steps
    step = next(phase for phase in found.phases if phase.name.startswith(STEP))
    sizes = [(prod(example.bucket), example.photo.repeats) for example in plan.data.examples]
    pixels = sum(size * repeats for size, repeats in sizes)
    batches = config.step.accumulation
    share = pixels / plan.length.steps_per_epoch / (batches * config.data.batch_size * max(size for size, _ in sizes))
    seconds = batches * speed.seconds(step.cost, share)
    return (
        f"time on the CPU: about {duration(seconds)} a step, {duration(seconds * last)} for {last} steps, without samples "
        "(an estimate for a machine without other work)"
        + ("\nthis CPU is slow in 16 bits: --set precision.compute=fp32 takes less time and more memory" if slow else "")
    )
