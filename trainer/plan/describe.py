"""How a plan is printed: at the start of a run, and by --plan."""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import isqrt, prod

from trainer import config as configs
from trainer.adapters.kinds import kind_named
from trainer.base.account import counted
from trainer.base.console import printable, shortlist
from trainer.base.tensorfile import size_text
from trainer.base.text import invisible
from trainer.config import Config, IntervalTable
from trainer.data.batches import sampler, short_batches
from trainer.data.buckets import REFERENCE_AREA, named, reference_bucket
from trainer.data.captions import prompts
from trainer.data.examples import Example
from trainer.data.sources import Photo, Source
from trainer.plan import fixed_draws, optimizer_rules
from trainer.plan.data_sources import sources_of
from trainer.plan.model_account import model_account
from trainer.plan.run_plan import DataPlan, Length, RunPlan
from trainer.plan.storage import weight_bytes

SHOWN = 20  # names in one line
TEXTS = {"prompt", "prompts", "negative", "trigger", "prefix", "suffix"}  # keys, or parts of them


def describe_head(config: Config, *, on_cpu: bool) -> str:
    """The first lines of a start print and of a plan, of the config alone. on_cpu: whether a plan is for the CPU."""
    lines = [f"run {config.run.name} -> {config.run.output_dir}", f"model {config.model.family} from {config.model.path}"]
    if on_cpu:
        why = "run.device = 'cpu'" if config.run.device == "cpu" else "no GPU was found"
        lines.append(f"{why}: this would train on the CPU; the time that it takes is estimated below")
    return "\n".join(lines)


def describe(plan: RunPlan, *, sizes: bool, data: bool = True) -> str:
    """The start print below its head. sizes: also build every component on the meta device to count its bytes. data: with
    the photos."""
    config = plan.config
    lines = ["parts of the model"]
    total, width = 0, max(len(component.format.name) for component in plan.model.storage.values())
    for name, component in plan.model.storage.items():
        compute = str(component.compute).removeprefix("torch.")
        line = f"  {name:<15} stored {component.format.name:<{width}} computes {compute}"
        if sizes:
            count = weight_bytes(plan.model.source, component, held=plan.model.source.held(name))
            total += count
            line += f"  {size_text(count)}"
        lines.append(line)
    if sizes:
        lines.append(f"  weights in all   {size_text(total)}")
    lines += [f"  {line}" for line in model_account(plan.model.source, plan.model.options).lines()]
    lines += [*_adapter_lines(plan), f"objective {plan.model.objective.describe()}"]
    doubts = plan.model.objective.doubts()
    if plan.model.objective.stratified and config.data.batch_size * config.step.accumulation * plan.length.processes == 1:
        remedy = "raise data.batch_size or step.accumulation"
        doubts.append(f"objective.stratified has no effect on updates of one photo; {remedy}")
    lines += [f"warning: {doubt}" for doubt in doubts]
    lines += data_lines(config, plan.data, plan.length, text=_text(plan)) if data else []
    group, end = config.optimizer, f", ending at {config.schedule.end:g} of the rate" if config.schedule.end else ""
    lines.append(
        f"optimizer {group.name}, lr {group.lr:g}, weight decay {group.weight_decay:g} (none on magnitudes), "
        f"clipping {config.step.max_grad_norm:g}; schedule {config.schedule.name}, warm-up {config.schedule.warmup:g}{end}"
    )
    lines += [f"  {line}" for line in optimizer_rules.start_lines(config, plan.length.max_steps)]
    if config.step.compile == "blocks":
        size, fill = config.data.batch_size, config.data.short_batches == "merge"
        kinds = short_batches.shapes(plan.data.examples, batch_size=size, fill=fill)
        each = ", and for each length of captions" if config.data.clip_chunks > 1 else ""
        lines.append(f"blocks are compiled: each kind for {counted(len(kinds), 'shape')} of micro-batches{each}")
    checkpoint = config.checkpoint
    if checkpoint.mirror is not None:
        copied = f"checkpoints are copied there ({checkpoint.keep_last} are kept)"
        lines.append(f"mirror {checkpoint.mirror}: {copied}, and at the end the adapter files and the report")
    if plan.length.max_steps > 1 and not plan.saves_before_the_end:
        keys = f"{_interval(checkpoint, 'checkpoint')}, checkpoint.every_minutes = {checkpoint.every_minutes:g}"
        lines.append(f"note: only the end and a stop are saved ({keys}): a kill or a power cut loses all that was trained")
    length, drawn = plan.length, "samples are drawn before the first step and"
    for table, name, first, what in (
        (config.export, "export", config.export.first, "files are written"),
        (config.validation, "validation", 0, drawn if plan.data.requests else ""),
    ):
        asked, every = _interval(table, name) + (f", {name}.from = {first}" if first else ""), length.every(table, first)
        if what and every.every and not every.steps(length.max_steps):
            lines.append(f"note: {asked}, and the run has {length.max_steps} steps: {what} at the end alone")
    return "\n".join(lines)


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


def data_lines(config: Config, data: DataPlan, length: Length, *, text: str = "", reported: bool = False) -> list[str]:
    """The lines about the data. text: how the captions are encoded, if known. reported: a report on the captions follows,
    which counts those that are missing or empty."""
    batch_size, accumulation = data.table.batch_size, config.step.accumulation
    per_step = f"up to {batch_size} images of one shape" if batch_size > 1 else "1 image"
    per_step = f"up to {accumulation} batches (step.accumulation) of {per_step}" if accumulation > 1 else per_step
    per_step += f", in each of {length.processes} processes" if length.processes > 1 else ""
    counts = ", ".join(f"{named(each)}: {n}" for each, n in sorted(short_batches.appearances(data.examples).items()))
    subject = [photo for photo in data.photos if not photo.source.regularisation]
    prior = [photo for photo in data.photos if photo.source.regularisation]
    more = f" + {counted(len(prior), 'regularisation image')}{_times(prior)}" if prior else ""
    blank = sum(not photo.caption for photo in data.photos)
    count = "" if reported else f"{blank} missing or empty; "
    too_small = sum(example.small for example in data.examples)
    instead = "enlarged" if data.table.enlarge else "trained in a smaller one (data.enlarge = true enlarges them)"
    small = f"; {too_small} smaller than the bucket of their shape: {instead}" if too_small else ""
    sources = sources_of(data.table)
    variants = max(len(example.captions) for example in data.examples)
    varied = f"up to {variants} variants of each; " if variants > 1 else ""
    dropout = "/".join(f"{rate:g}" for rate in sorted({source.caption_dropout for source in sources}))
    flip = "/".join(sorted({"on" if source.flip else "off" for source in sources}, reverse=True))
    first, epoch = length.began
    lengths = f"{length.max_steps} steps = {epoch + (length.max_steps - first) / length.steps_per_epoch:.4g} epochs"
    return [
        f"data {counted(len(subject), 'image')}{_times(subject)}{more}: {counted(length.steps_per_epoch, 'step')} an epoch; "
        f"a step has {per_step}; {lengths}",
        f"  buckets (images an epoch) {counts}{small}",
        f"  short batches: {_short_batches(data)}",
        f"  captions: {count}{varied}dropped with probability {dropout}; flip {flip}" + (f"; text {text}" if text else ""),
        *(f"  warning: {line}" for line in _doubts(config, data, subject)),
        *_weight_lines(data),
        *_view_lines(sources),
        *(f"  {line}" for line in data.account.lines()),
        *_held_out(config, data),
        *_alike_lines(data),
    ]


def _doubts(config: Config, data: DataPlan, subject: Sequence[Photo]) -> Iterator[str]:
    """What looks unintended of the photos of the subject, and of the texts that the config gives."""
    if len(subject) == 1:
        yield "this is one photo alone, and the adapter learns to draw just that picture; 10 to 30 are usual"
    if (table := config.validation).prompts == "captions" and (table.every_steps or table.every_epochs) and not data.requests:
        yield "no samples are drawn: validation.prompts = 'captions', and no photo has a caption; give a list"
    for key, text in configs.flatten(configs.tree(config)).items():
        if not TEXTS.isdisjoint(key.split(".")) and (lost := invisible(str(text))):
            yield f"{key} has invisible characters ({lost}), dropped"
    texts = [text for r in data.requests for text in (r.prompt, r.negative)]
    yield from prompts.unread(texts, weighted=config.data.weighted_captions)
    weighed = [each.sample for each in data.examples if any(map(prompts.WEIGHT.search, each.captions))]
    if weighed and not config.data.weighted_captions:
        rest = "which are trained as words; data.weighted_captions = true reads them for SDXL"
        yield f"captions with weights as (word:1.2), {rest}: {shortlist(weighed, SHOWN)}"
    yield from prompts.warnings((r.prompt for r in data.requests), data.examples)


def _alike_lines(data: DataPlan) -> list[str]:
    """How many photos are near duplicates, and a warning if one of them is held out and another trained on."""
    held_out = {example.photo.sample for example in data.held_out}
    across = [group for group in data.alike if len({photo.sample in held_out for photo in group}) == 2]
    pairs = {"near duplicates": data.alike, "warning: near duplicates on both sides of data.held_out": across}
    return [f"  {what}: {_groups(groups)}" for what, groups in pairs.items() if groups]


def _groups(groups: Sequence[Sequence[Photo]]) -> str:
    """The counts, and the first three groups with up to three names each."""
    names = [[printable(photo.sample) for photo in group[:3]] + ["..."] * (len(group) > 3) for group in groups[:3]]
    texts = [" = ".join(group) for group in names] + ["..."] * (len(groups) > 3)
    return f"{sum(map(len, groups))} photos in {counted(len(groups), 'group')} ({'; '.join(texts)})"


def _short_batches(data: DataPlan) -> str:
    """How many short batches there are, and what would fill them."""
    batch_size, examples = data.table.batch_size, data.examples
    count = sampler.batches_per_epoch(examples, batch_size=batch_size)
    left = short_batches.short(examples, batch_size=batch_size)
    again = sum(batch_size - size for size in left.values())
    if data.table.short_batches == "merge":
        moved = sum(example.merged for example in examples)
        return f"none of an epoch's {count} batches; merged: {moved} moved to another bucket, {again} more appearances"
    if not left:
        return f"none of an epoch's {count} batches"
    which = ", ".join(f"{named(layout)}: {counted(size, 'photo')}" for layout, size in left.items())
    below, factor = short_batches.would_fill(examples, batch_size=batch_size)
    remedy = f"data.batch_size = {below}, {factor} x the repeats, or data.short_batches = 'merge'"
    return f"{len(left)} of an epoch's {count} batches have fewer than {batch_size} photos ({which}); to fill them: {remedy}"


def _held_out(config: Config, data: DataPlan) -> list[str]:
    names = list(dict.fromkeys(example.photo.sample for example in data.held_out))
    lines = []
    if names:
        photos = f"{len(names)} of {len(data.scanned.photos)} photos"
        lines = [f"  held out, never trained on: {photos}: {shortlist(names, SHOWN)}"]
    if data.measured:
        counts = " and ".join(f"{len(examples)} {kind.replace('_', '-')}" for kind, examples in data.measured.items())
        when = f"before the first step, every {config.validation.loss_every_steps} steps and at the end"
        passing = f"{fixed_draws.forwards(data)} images pass the denoiser"
        lines.append(f"  loss at fixed draws of {counts} photos: {passing} {when}")
        none = "warning: no photo is held out, so this loss cannot show memorising; data.held_out = 0.1 holds out a tenth"
        apart = len(data.measured.get("held_out", ()))
        warning = too_few(apart) if apart else none
        lines += [f"  {warning}"] if warning else []
    return lines


def too_few(apart: int) -> str:
    """The warning for a held-out loss of so few photos; "" where they are enough."""
    why = "the held-out loss of one photo decides nothing, and that of two or three little; set data.held_out = 4 or more"
    return f"warning: {why}" if apart < fixed_draws.ENOUGH else ""


def _times(photos: Sequence[Photo]) -> str:
    repeats = sorted({photo.repeats for photo in photos})
    return "" if repeats == [1] else f" x {'/'.join(map(str, repeats))} repeats"


def _weight_lines(data: DataPlan) -> list[str]:
    """A line for each source with masks, references or another loss weight."""
    lines = []
    for index in dict.fromkeys(photo.source.index for photo in data.photos):
        mine = [photo for photo in data.photos if photo.source.index == index]
        source, rows = mine[0].source, []
        if source.regularisation or source.loss_weight != 1:
            rows.append(f"loss weight {source.loss_weight:g}" + (", regularisation images" if source.regularisation else ""))
        if weights := Counter(photo.beside.loss_weight for photo in mine if photo.beside.loss_weight != 1):
            each = ", ".join(f"{weight:g} of {count}" for weight, count in sorted(weights.items()))
            rows.append(f"loss weights of single photos: {each}")
        if source.masks != "none":
            masked = sum(photo.mask is not None for photo in mine)
            rows.append(f"{masked} of {len(mine)} photos with a mask, unmasked parts weigh {source.unmasked_weight:g}")
        if source.references:
            rows.append(_references([e for e in (*data.examples, *data.held_out) if e.photo.source is source]))
        if rows:
            lines.append(f"  {printable(source.path)}: {'; '.join(rows)}")
    return lines


def _references(examples: Sequence[Example]) -> str:
    """How many images the model is shown beside each photo, and of which photos they are shrunk or cut for it."""
    side = isqrt(REFERENCE_AREA)
    changes = {
        f"shrunk to the area of {side} x {side}": lambda each: each.photo.width * each.photo.height > REFERENCE_AREA,
        "their edges cut to sides that the model takes": lambda each: (
            reference_bucket(*each.photo.size, step=1) != each.bucket
        ),
    }
    text = f"{counted(len(examples[0].references), 'reference')} beside each photo"
    for what, is_changed in changes.items():
        if names := list(dict.fromkeys(e.photo.sample for e in examples if any(map(is_changed, e.references)))):
            text += f", {what} at {counted(len(names), 'photo')} ({shortlist(names, SHOWN)})"
    return text


def _view_lines(sources: Sequence[Source]) -> list[str]:
    one = sources[0]
    jitters = f"crop jitter {one.crop_jitter:g} and colour jitter {one.colour_jitter:g}"
    line = f"  image variants: {one.image_variants} of each photo, the first unchanged, the others with {jitters}"
    return [line] if one.jitters else []


def _text(plan: RunPlan) -> str:
    if not plan.model.cache_text:
        return "encoded live"
    return "encoded when it is drawn" if plan.config.data.cache == "none" else "cached"
