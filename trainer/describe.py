"""How a plan is printed: at the start of a run, and by --plan."""

from collections import Counter
from math import prod

from trainer.data import buckets
from trainer.kernels import dora_torch
from trainer.models.loading import ModelSource
from trainer.plan import Plan
from trainer.tensorfile import size_text


def describe(plan: Plan, *, sizes: bool) -> str:
    """The start print. sizes: also build every component on the meta device to count its bytes."""
    config = plan.config
    lines = [f"run {config.run.name} -> {config.run.output_dir}", f"model {plan.family.name} from {config.model.path}"]
    total, width = 0, max(len(component.format.name) for component in plan.components.values())
    for name, component in plan.components.items():
        compute = str(component.compute).removeprefix("torch.")
        line = f"  {name:<15} stored {component.format.name:<{width}} computes {compute}"
        if sizes:
            module = plan.source.build(name)
            component.swap(module, kernels=dora_torch, held=plan.source.held(name))  # nothing is computed
            count = sum(t.numel() * t.dtype.itemsize for t in module.state_dict().values())
            total += count
            line += f"  {size_text(count)}"
        chosen = plan.source.chosen(name)
        if chosen is not None and chosen.why:
            line += f"; reads the {chosen.files} ({chosen.why})"
        lines.append(line)
    if sizes:
        lines.append(f"  weights in all   {size_text(total)}")
    if plan.source.published_parts:
        lines.append(f"  of the published model's configs: {', '.join(plan.source.published_parts)}")
    lines += _hub_lines(plan.source)
    lines += _adapter_lines(plan) + [f"objective {plan.objective.describe()}"] + _data_lines(plan)
    group = config.optimizer
    lines.append(
        f"optimizer {group.name}, lr {group.lr:g}, weight decay {group.weight_decay:g} (none on magnitudes), "
        f"clipping {config.step.max_grad_norm:g}; schedule {config.schedule.name}, warm-up {config.schedule.warmup:g}"
    )
    return "\n".join(lines)


def _hub_lines(source: ModelSource) -> list[str]:
    """What of a hub id is not here yet."""
    if source.fetched:
        return []
    lines = []
    if source.embedded:
        lines.append(f"  configs as embedded: nothing was fetched ({source.embedded})")
    count = source.to_fetch()
    if count:
        lines.append(f"  to be downloaded {size_text(count)}, into {source.repository.blobs.parent}")
    return lines


def _adapter_lines(plan: Plan) -> list[str]:
    adapter = plan.config.adapter
    lines = []
    for component in plan.adapted:
        mine = [t for t in plan.targets if t.component == component]
        dora = adapter.type == "dora"
        count = sum(_adapter_parameters(plan.shapes[t.component, t.name], t.rank, dora) for t in mine)
        kinds = Counter((t.rank, t.alpha, t.scaling(adapter.rslora), t.lr) for t in mine)
        lines.append(f"adapter {adapter.type} on {component}: {len(mine)} layers, {count:,} trainable parameters (fp32)")
        for (rank, alpha, scaling, lr), layers in sorted(kinds.items(), key=str):
            rate = f", lr {lr:g}" if lr is not None else ""
            formula = "alpha / sqrt(rank)" if adapter.rslora else "alpha / rank"
            lines.append(f"  {layers} layers: rank {rank}, alpha {alpha:g}, {formula} = {scaling:g}{rate}")
    if plan.skipped:
        lines.append(f"  skipped, without a gradient path: {len(plan.skipped)} layers ({plan.skipped[0]}, ...)")
    return lines


def _adapter_parameters(shape: tuple[int, ...], rank: int, dora: bool) -> int:
    rows, columns = shape[0], prod(shape[1:])
    return rank * (rows + columns) + (rows if dora else 0)


def _data_lines(plan: Plan) -> list[str]:
    data, accumulation = plan.config.data, plan.config.step.accumulation
    images = sum(photo.repeats for photo, _ in plan.photos)
    even = images / (data.batch_size * accumulation * plan.processes)
    counts = Counter()
    for photo, bucket in plan.photos:
        counts[bucket] += photo.repeats
    shown = ", ".join(f"{w}x{h}: {n}" for (w, h), n in sorted(counts.items()))
    repeats = sorted({photo.repeats for photo, _ in plan.photos})
    captions = sum(not photo.caption for photo, _ in plan.photos)
    upscaled = sum(buckets.place(photo.width, photo.height, bucket).upscaled for photo, bucket in plan.photos)
    small = f"; {upscaled} photos are smaller than their bucket and are enlarged" if upscaled else ""
    length = f"{plan.max_steps} steps = {plan.max_steps / plan.steps_per_epoch:.4g} epochs"
    return [
        f"data {len(plan.photos)} images x {'/'.join(map(str, repeats))} repeats / (batch {data.batch_size} x accumulation "
        f"{accumulation} x {plan.processes} processes) = {even:g}, with bucket remainders {plan.steps_per_epoch} steps an "
        f"epoch; {length}",
        f"  buckets (images an epoch) {shown}{small}",
        f"  captions: {captions} missing or empty; dropped with probability {data.caption_dropout:g}; flip "
        f"{'on' if data.flip else 'off'}; text {'cached' if plan.cache_text else 'encoded live'}",
    ]
