"""Prints an estimate of memory and time, by --plan and at the start of a run."""

from collections.abc import Sequence
from math import inf, prod

import torch

from trainer.base.tensorfile import size_text
from trainer.plan.run_plan import RunPlan
from workbench.planning import step_time
from workbench.planning.estimate import PARTS, STEP, Forecast
from workbench.planning.step_time import Machine
from workbench.planning.suggestions import Change

UNITS = ((1, "s", 90), (60, "min", 90 * 60), (3600, "h", inf))  # (seconds, name, limit in seconds)


def describe_memory(needs: Forecast, memory: int, smaller: Sequence[Change], *, accumulation: int) -> str:
    """A run's device memory by phase, and whether it fits. smaller: changes that help. accumulation: the config's."""
    width = max(len(phase.name) for phase in needs.phases)
    lines = ["memory, at the largest moment of each phase"]  # no table: a terminal may have 80 columns
    for phase in needs.phases:
        parts = ", ".join(f"{part} {size_text(phase.parts[part])}" for part in PARTS if phase.parts.get(part))
        lines.append(f"  {phase.name:<{width}}  {size_text(phase.peak)}: {parts}")
    overhead = "libraries" if needs.base else "the device's context"
    lines.append(
        f"  saved: what the backward pass needs. Not in these numbers: {size_text(needs.base + needs.margin)}, an estimate, "
        f"for {overhead} and for what the allocator loses"
    )
    if needs.streaming:
        lines.append(f"  {needs.streaming.about}")
    if needs.graphs:
        room = "there is room for them" if needs.fits(memory, graphs=True) else "there is none, so the steps are eager"
        lines.append(f"  step.graphs: CUDA graphs keep {size_text(needs.graphs)} beside that; {room}")
    if needs.host:
        text = ", ".join(f"{name} {size_text(size)}" for name, size in needs.host.items())
        lines.append(
            f"  on the host: {size_text(sum(needs.host.values()))}: {text}; not counted: what the device's libraries take"
        )
    lines.append(f"  on the disk: cache {size_text(needs.cache)}, each checkpoint {size_text(needs.checkpoint)}")
    for phase in needs.phases:
        if phase.name.startswith(STEP):
            flops = accumulation * phase.cost.total("flops") / 1e9
            text = f"{flops / 1e3:.2f} TFLOP" if flops >= 100 else f"{flops:.2f} GFLOP"
            lines.append(f"  {phase.name}: {text} an update in products, convolutions and attention")
    result = f"{size_text(needs.total)} of {size_text(memory)} are needed, most in {needs.largest.name}"
    if needs.fits(memory):
        return "\n".join([*lines, f"fits: {result}"])
    if smaller:
        lines.append("what needs less, the cheapest first, each together with those above it:")
    total = needs.total
    for change in smaller:
        enough = ", which is enough" if change.after.fits(memory) else ""
        saved, total = total - change.after.total, change.after.total
        lines.append(f"  {change.what}: {size_text(saved)} less, {size_text(total)}{enough} ({change.price})")
    return "\n".join([*lines, f"does not fit: {result}"])


def describe_time(plan: RunPlan, needs: Forecast, device: torch.device | None, *, start_step: int = 0) -> str:
    """The time of a step and of the rest of a run, as bands. device: None: unknown. start_step: steps of earlier starts."""
    if device is None:
        return "time: no figures for a step: --plan_memory names no card"
    compute, on_cpu = plan.model.storage[plan.model.family.denoiser].compute, device.type == "cpu"
    if on_cpu:
        machine, name = step_time.on_cpu(step_time.Probe.of(compute)), "this CPU"
    else:
        name = torch.cuda.get_device_name(device)
        machine = step_time.on_card(name, step_time.bare_operator())
    if machine is None:
        return f"time: no figures for a step's time on {name} (workbench/planning/cards.json lists the cards)"
    seconds, steps = step_seconds(plan, needs, machine), plan.length.max_steps - start_step
    several = ", nor the exchange between processes" if plan.length.processes > 1 else ""
    line = (
        f"time: about {band(*seconds)} a step on {name}, {band(*(second * steps for second in seconds))} for {steps} "
        f"{'step' if steps == 1 else 'steps'} (an estimate for a machine without other work; samples, held-out losses, "
        f"encoding and checkpoints are not counted{several})"
    )
    table = plan.config.step
    copied = size_text(table.accumulation * needs.streaming.copied) if needs.streaming else ""
    if copied and plan.model.parts > 1:
        line += f"\n  beside it {copied} of blocks are brought together a step, over what connects the processes: not counted"
    elif copied and not on_cpu:
        slow, fast = sorted(rate / 1e9 for rate in step_time.BUS)
        line += f"\n  with {copied} of streamed blocks a step, copied beside it at {slow:g} to {fast:g} GB/s: not measured"
    if needs.graphs or table.compile != "none":
        line += "\n  of eager steps: step.compile and step.graphs take other time and memory, see docs/speed.md"
    if on_cpu and step_time.slow_in(compute):
        line += "\nthis CPU is slow in 16 bits: --set precision.compute=fp32 takes less time and more memory"
    return line


def step_seconds(plan: RunPlan, needs: Forecast, machine: Machine) -> tuple[float, float]:
    """(least, most) seconds of an average update: the operators of the largest step, scaled to an average micro-batch."""
    step = next(phase for phase in needs.phases if phase.name.startswith(STEP))
    sizes = [(sum(map(prod, example.layout)), example.photo.repeats) for example in plan.data.examples]
    pixels, largest = sum(size * repeats for size, repeats in sizes), max(size for size, _ in sizes)
    batches = plan.config.step.accumulation
    share = pixels / plan.length.steps_per_epoch / (batches * plan.config.data.batch_size * largest) / plan.length.processes
    # Independent of the photos' sizes. The interconnect that shards come over is unknown, so they are not counted.
    copied = needs.streaming.copied if needs.streaming and plan.model.parts == 1 else 0
    (least, most), (once, at_most) = machine.seconds(step.cost, share, copied), machine.seconds(step.once)
    return batches * least + once, batches * most + at_most


def band(least: float, most: float) -> str:
    """A range of seconds as text, each end with two digits: "0.7 to 1.1 s", "25 s to 1.6 min", "2 h"."""
    unit, name = next((size, name) for size, name, limit in UNITS if most < limit)
    # A small fraction of a unit would be hard to read.
    if least < unit / 2 and next(least_name for _, least_name, limit in UNITS if least < limit) != name:
        return f"{band(least, least)} to {band(most, most)}"
    ends = dict.fromkeys(f"{float(f'{seconds / unit:.2g}'):g}" for seconds in (least, most))
    return f"{' to '.join(ends)} {name}"
