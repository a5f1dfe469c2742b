"""The text of a plan, printed at the start of a run and by --plan."""

from collections import Counter
from math import prod

import torch

from trainer.adapters.kinds import kind_named
from trainer.base.account import counted
from trainer.base.console import printable
from trainer.base.tensorfile import size_text
from trainer.config import Config, IntervalTable
from trainer.data.batches import short_batches
from trainer.optim.table import optimizer_named
from trainer.plan.run_plan import RunPlan
from trainer.plan.storage import weight_bytes
from workbench.summary.data import data_lines
from workbench.summary.model import model_account

# In fewer steps an optimizer that finds its rate may not reach it: from Prodigy's default the pocket SDXL learned next to
# nothing in 30 (docs/optimizers.md). This number is a guess.
SHORT = 300


def described(plan: RunPlan) -> str:
    """The text at the start of a run."""
    return describe_head(plan.config, on_cpu=False) + "\n" + describe(plan, sizes=False)


def describe_head(config: Config, *, on_cpu: bool) -> str:
    """The first lines, of the config alone. on_cpu: whether a plan is for the CPU."""
    lines = [f"run {config.run.name} -> {config.run.output_dir}", f"model {config.model.family} from {config.model.path}"]
    if on_cpu:
        reason = "run.device = 'cpu'" if config.run.device == "cpu" else "no GPU was found"
        lines.append(f"{reason}: this would train on the CPU; the time that it takes is estimated below")
    return "\n".join(lines)


def describe(plan: RunPlan, *, sizes: bool, data: bool = True) -> str:
    """The text below the head. sizes: with the bytes of every component, which is built on the meta device for them; without
    them (at a start) the report on the captions follows. data: with the photos."""
    config, source = plan.config, plan.model.source
    lines = ["parts of the model"]
    width = max(len(component.format.name) for component in plan.model.storage.values())
    stored = {name: weight_bytes(source, part, held=source.held(name)) for name, part in plan.model.storage.items() if sizes}
    for name, component in plan.model.storage.items():
        compute = str(component.compute).removeprefix("torch.")
        in_bytes = f"  {size_text(stored[name])}" if sizes else ""
        lines.append(f"  {name:<15} stored {component.format.name:<{width}} computes {compute}{in_bytes}")
    if sizes:
        lines.append(f"  weights in all   {size_text(sum(stored.values()))}")
    lines += [f"  {line}" for line in model_account(source, plan.model.options).lines()]
    lines += [*_adapter_lines(plan), f"objective {plan.model.objective.describe()}{_preservation(config)}"]
    doubts = plan.model.objective.doubts()
    if plan.model.objective.stratified and config.data.batch_size * config.step.accumulation * plan.length.processes == 1:
        remedy = "raise data.batch_size or step.accumulation"
        doubts.append(f"objective.stratified has no effect on updates of one photo; {remedy}")
    lines += [f"warning: {doubt}" for doubt in doubts]
    text = "encoded when it is drawn" if config.data.cache == "none" else "cached"
    text = text if plan.model.cache_text else "encoded live"
    lines += data_lines(config, plan.data, plan.length, text=text, reported=not sizes) if data else []
    group, end = config.optimizer, f", ending at {config.schedule.end:g} of the rate" if config.schedule.end else ""
    clipping = f"clipping {config.step.max_grad_norm:g}" if config.step.max_grad_norm else "no clipping"
    decay, schedule = f"weight decay {group.weight_decay:g} (none on magnitudes)", f"schedule {config.schedule.name}"
    rates = f"{clipping}; {schedule}, warm-up {config.schedule.warmup:g}{end}"
    lines.append(f"optimizer {group.name}, lr {group.lr:g}, {decay}, {rates}")
    lines += [f"  {line}" for line in _optimizer_lines(config)]
    lines += [f"  warning: {line}" for line in optimizer_warnings(config, plan.length.max_steps)]
    if config.step.compile == "blocks":
        size, fill = config.data.batch_size, config.data.short_batches == "merge"
        kinds = short_batches.shapes(plan.data.examples, batch_size=size, fill=fill)
        lengths = ", and for each length of captions" if config.data.clip_chunks > 1 else ""
        lines.append(f"blocks are compiled: each kind for {counted(len(kinds), 'shape')} of micro-batches{lengths}")
    checkpoint = config.checkpoint
    if checkpoint.mirror is not None:
        copied = f"checkpoints are copied there ({checkpoint.keep_last} are kept)"
        lines.append(f"mirror {checkpoint.mirror}: {copied}, and at the end the adapter files and the report")
    if plan.length.max_steps > 1 and not plan.saves_before_the_end:
        keys = f"{_interval(checkpoint, 'checkpoint')}, checkpoint.every_minutes = {checkpoint.every_minutes:g}"
        lines.append(f"note: only the end and a stop are saved ({keys}): a kill or a power cut loses all that was trained")
    length, samples = plan.length, "samples are drawn before the first step and"
    for table, name, first, action in (
        (config.export, "export", config.export.first, "files are written"),
        (config.validation, "validation", 0, samples if plan.data.requests else ""),
    ):
        keys, every = _interval(table, name) + (f", {name}.from = {first}" if first else ""), length.every(table, first)
        if action and every.every and not every.steps(length.max_steps):
            lines.append(f"note: {keys}, and the run has {length.max_steps} steps: {action} at the end alone")
    return "\n".join(lines)


def _preservation(config: Config) -> str:
    weight, words = config.objective.preserve, config.objective.preserve_as
    captions = f"{printable(repr(words))} in the trigger's place" if words else "captions without the trigger"
    return f", preservation {weight:g} ({captions})" if weight else ""


def _interval(table: IntervalTable, name: str) -> str:
    key = "every_epochs" if table.every_epochs else "every_steps"
    return f"{name}.{key} = {getattr(table, key)}"


def _adapter_lines(plan: RunPlan) -> list[str]:
    adapter, lines = plan.config.adapter, []
    kind = kind_named(adapter.type, vars(adapter))
    formula = "alpha / sqrt(rank)" if adapter.rslora else "alpha / rank"
    for component in plan.model.adapted:
        mine = [t for t in plan.model.targets if t.component == component]
        shapes = [kind.shapes(plan.shapes[t.component, t.name], t.rank) for t in mine]
        count = sum(prod(size) for sizes in shapes for size in sizes.values())
        wholes = map(kind.unscaled, shapes)
        kinds = Counter((t.rank, t.alpha, whole, t.lr, t.stop_step) for whole, t in zip(wholes, mine, strict=True))
        lines.append(f"adapter {adapter.type} on {component}: {len(mine)} layers, {count:,} trainable parameters (fp32)")
        for (rank, alpha, whole, lr, stop), layers in sorted(kinds.items(), key=str):
            rate = f", lr {lr:g}" if lr is not None else ""
            stops = f", trained up to step {stop}" if stop is not None else ""
            ranked = f"rank {rank}, alpha {alpha:g}, {formula} = {kind.scaling((), rank, alpha, adapter.rslora):g}"
            lines.append(f"  {layers} layers: {'whole matrices, scale 1' if whole else ranked}{rate}{stops}")
    if absent := {*plan.config.export.formats} - {*plan.model.family.file_formats(kind.in_files, plan.config.export.formats)}:
        lines.append(f"  no file for {', '.join(absent)}: its loader of {plan.model.family.name} takes no {kind.word}")
    if plan.skipped:
        lines.append(f"  skipped, without a gradient path: {len(plan.skipped)} layers ({plan.skipped[0]}, ...)")
    return lines


def _optimizer_lines(config: Config) -> list[str]:
    """The rates and options that are not the usual ones."""
    table = config.optimizer
    rates = [f"{key} {rate:g}" for key in ("text_encoder_lr", "magnitude_lr") if (rate := getattr(table, key)) is not None]
    rates += [f"lora_plus {table.lora_plus:g} (B's rate over A's)"] if table.lora_plus != 1 else []
    options = [f"{key} = {value!r}" for key, value in table.options.items()]
    return [", ".join(parts) for parts in (rates, options) if parts]


def optimizer_warnings(config: Config, steps: int) -> list[str]:
    """Sentences on keys of the optimizer that work badly together. config: the resolved one. steps: of the run."""
    table, entry = config.optimizer, optimizer_named(config.optimizer.name)
    lines, finds = [], entry.finds
    if finds and not table.options.get(finds.guard):
        restarts = "schedule.name = 'cosine_restarts'" if config.schedule.name == "cosine_restarts" else ""
        if low := "schedule.warmup" if config.schedule.warmup else restarts:
            fault = f"the estimate of {table.name} divides by the low rates and grows too far"
            lines.append(f"{low} with optimizer.options.{finds.guard} = false: {fault}; set it to true")
    if finds and finds.start not in table.options and steps < SHORT:
        low = "whose default is so low that it may hardly have grown by the end; raise it, for example to 1e-4"
        lines.append(f"a run of {steps} steps: {table.name} finds its rate from optimizer.options.{finds.start} on, {low}")
    if entry.paged and (config.run.device == "cpu" or not torch.cuda.is_available()):
        lines.append(f"{table.name} pages its state only on CUDA; on a CPU it is {table.name.removeprefix('paged_')}")
    return lines
