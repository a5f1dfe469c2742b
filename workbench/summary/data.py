"""The text on a run's data: photos, buckets, batches and captions, with warnings about likely mistakes."""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import isqrt, prod

from trainer import config as configs
from trainer.base.account import Account, Entry, Heading, counted
from trainer.base.console import printable, shortlist
from trainer.base.text import invisible
from trainer.config import Config
from trainer.data import buckets
from trainer.data.batches import sampler, short_batches
from trainer.data.examples import Example
from trainer.data.images import views
from trainer.data.sources import Photo
from trainer.plan import fixed_draws
from trainer.plan.data_sources import sources_of
from trainer.plan.run_plan import DataPlan, Length
from workbench.summary import prompts

NAMES = 20  # in one line
TEXTS = {"prompt", "prompts", "negative", "trigger", "prefix", "suffix"}  # keys, or parts of them


def data_account(data: DataPlan) -> Account:
    """The account of all files, of the photos that lose most by cropping, and of the others' stretching."""
    least, beyond, stretch = dict[str, float](), dict[str, None](), 0.0
    for example in (*data.examples, *data.held_out):
        photo, (width, height), (across, down) = example.photo, example.bucket, example.photo.size
        share = buckets.share_kept(*photo.size, example.bucket, crop=views.plain(example).crop)
        if share < 0.5:
            least[str(photo.image)] = min(share, least.get(str(photo.image), share))
        elif share < 1 and photo.aspect > data.table.max_aspect:
            beyond[str(photo.image)] = None
        change = across * height / (down * width)
        stretch = max(stretch, change - 1, 1 / change - 1)
    names = [f"{name}: {share:.0%}" for name, share in sorted(least.items(), key=lambda item: item[1])]
    reason, remedy = "the crop keeps less than half of it", "cut it into several photos, or raise data.max_aspect"
    entry = Entry(Heading.WARNING, reason, names, len(names), remedy, "photo")
    account = data.scanned.account + Account([entry] * bool(names))
    if beyond:
        reason = f"its shape is beyond data.max_aspect = {data.table.max_aspect:g}, to which it is cropped"
        account.add(Heading.NOTE, reason, list(beyond), noun="photo")
    if data.table.crop == "none":
        reason = f"nothing is cut (data.crop = 'none'); aspect ratios change by up to {stretch:.1%}"
        account.add(Heading.NOTE, f"{reason}, and by less with a smaller data.bucket_step")
    return account


def data_lines(config: Config, data: DataPlan, length: Length, *, text: str = "", reported: bool = False) -> list[str]:
    """The lines on the data. text: how captions are encoded. reported: a report that counts blank captions follows."""
    batch_size, accumulation = data.table.batch_size, config.step.accumulation
    per_step = f"up to {batch_size} images of one shape" if batch_size > 1 else "1 image"
    per_step = f"up to {accumulation} batches (step.accumulation) of {per_step}" if accumulation > 1 else per_step
    per_step += f", in each of {length.processes} processes" if length.processes > 1 else ""
    counts = ", ".join(
        f"{buckets.named(layout)}: {n}" for layout, n in sorted(short_batches.appearances(data.examples).items())
    )
    subject = [photo for photo in data.photos if not photo.source.regularisation]
    prior = [photo for photo in data.photos if photo.source.regularisation]
    more = f" + {counted(len(prior), 'regularisation image')}{_times(prior)}" if prior else ""
    blank = sum(not photo.caption for photo in data.photos)
    count = "" if reported else f"{blank} missing or empty; "
    too_small = sum(example.small for example in data.examples)
    instead = "enlarged" if data.table.enlarge else "trained in a smaller one (data.enlarge = true enlarges them)"
    small = f"; {too_small} smaller than the bucket of their shape: {instead}" if too_small else ""
    sources = sources_of(data.table)
    captions, one = max(len(example.captions) for example in data.examples), sources[0]
    varied = f"up to {captions} variants of each; " if captions > 1 else ""
    jitters = f"crop jitter {one.crop_jitter:g} and colour jitter {one.colour_jitter:g}"
    variants = f"{one.image_variants} of each photo, the first unchanged, the others with {jitters}"
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
        *([f"  image variants: {variants}"] if one.jitters else []),
        *(f"  {line}" for line in data_account(data).lines()),
        *_held_out(config, data),
        *_alike_lines(data),
    ]


def _doubts(config: Config, data: DataPlan, subject: Sequence[Photo]) -> Iterator[str]:
    """Warnings about likely mistakes in the photos of the subject, and in the texts of the config."""
    if len(subject) == 1:
        yield "this is one photo alone, and the adapter learns to draw just that picture; 10 to 30 are usual"
    if (table := config.validation).prompts == "captions" and (table.every_steps or table.every_epochs) and not data.requests:
        yield "no samples are drawn: validation.prompts = 'captions', and no photo has a caption; give a list"
    for key, text in configs.flatten(configs.tree(config)).items():
        if not TEXTS.isdisjoint(key.split(".")) and (characters := invisible(str(text))):
            yield f"{key} has invisible characters ({characters}), dropped"
    texts = [text for r in data.requests for text in (r.prompt, r.negative)]
    yield from prompts.unread(texts, weighted=config.data.weighted_captions)
    weighted = [example.sample for example in data.examples if any(map(prompts.WEIGHT.search, example.captions))]
    if weighted and not config.data.weighted_captions:
        rest = "which are trained as words; data.weighted_captions = true reads them for SDXL"
        yield f"captions with weights as (word:1.2), {rest}: {shortlist(weighted, NAMES)}"
    yield from prompts.warnings((r.prompt for r in data.requests), data.examples)


def _alike_lines(data: DataPlan) -> list[str]:
    """How many photos are near duplicates, and a warning if one of them is held out and another trained on."""
    held_out = {example.photo.sample for example in data.held_out}
    across = [group for group in data.alike if len({photo.sample in held_out for photo in group}) == 2]
    lines = {"near duplicates": data.alike, "warning: near duplicates on both sides of data.held_out": across}
    return [f"  {title}: {_groups(groups)}" for title, groups in lines.items() if groups]


def _groups(groups: Sequence[Sequence[Photo]]) -> str:
    names = [[printable(photo.sample) for photo in group[:3]] + ["..."] * (len(group) > 3) for group in groups[:3]]
    texts = [" = ".join(group) for group in names] + ["..."] * (len(groups) > 3)
    return f"{sum(map(len, groups))} photos in {counted(len(groups), 'group')} ({'; '.join(texts)})"


def _short_batches(data: DataPlan) -> str:
    batch_size, examples = data.table.batch_size, data.examples
    count = sampler.batches_per_epoch(examples, batch_size=batch_size)
    short = short_batches.short(examples, batch_size=batch_size)
    if data.table.short_batches == "merge":
        moved, added = sum(example.merged for example in examples), sum(batch_size - size for size in short.values())
        return f"none of an epoch's {count} batches; merged: {moved} moved to another bucket, {added} more appearances"
    if not short:
        return f"none of an epoch's {count} batches"
    sizes = ", ".join(f"{buckets.named(layout)}: {counted(size, 'photo')}" for layout, size in short.items())
    smaller, factor = short_batches.would_fill(examples, batch_size=batch_size)
    remedy = f"data.batch_size = {smaller}, {factor} x the repeats, or data.short_batches = 'merge'"
    return f"{len(short)} of an epoch's {count} batches have fewer than {batch_size} photos ({sizes}); to fill them: {remedy}"


def _held_out(config: Config, data: DataPlan) -> list[str]:
    names, lines = list(dict.fromkeys(example.photo.sample for example in data.held_out)), []
    if names:
        photos = f"{len(names)} of {len(data.scanned.photos)} photos"
        lines = [f"  held out, never trained on: {photos}: {shortlist(names, NAMES)}"]
    if data.measured:
        counts = " and ".join(f"{len(examples)} {kind.replace('_', '-')}" for kind, examples in data.measured.items())
        times = f"before the first step, every {config.validation.loss_every_steps} steps and at the end"
        lines.append(
            f"  loss at fixed draws of {counts} photos: {fixed_draws.forwards(data)} images pass the denoiser {times}"
        )
        missing = "warning: no photo is held out, so this loss cannot show memorising; data.held_out = 0.1 holds out a tenth"
        count = len(data.measured.get("held_out", ()))
        if warning := too_few(count) if count else missing:
            lines.append(f"  {warning}")
    return lines


def too_few(count: int) -> str:
    """The warning for a held-out loss of `count` photos; "" if they are enough."""
    fault = "the held-out loss of one photo decides nothing, and that of two or three little; hold out 4 or more"
    return f"warning: {fault}" if count < fixed_draws.ENOUGH else ""


def _times(photos: Sequence[Photo]) -> str:
    repeats = sorted({photo.repeats for photo in photos})
    return "" if repeats == [1] else f" x {'/'.join(map(str, repeats))} repeats"


def _weight_lines(data: DataPlan) -> list[str]:
    lines = []
    for index in dict.fromkeys(photo.source.index for photo in data.photos):
        mine = [photo for photo in data.photos if photo.source.index == index]
        source, rows = mine[0].source, []
        if source.regularisation or source.loss_weight != 1:
            rows.append(f"loss weight {source.loss_weight:g}" + (", regularisation images" if source.regularisation else ""))
        if weights := Counter(photo.extras.loss_weight for photo in mine if photo.extras.loss_weight != 1):
            counts = ", ".join(f"{weight:g} of {count}" for weight, count in sorted(weights.items()))
            rows.append(f"loss weights of single photos: {counts}")
        if source.masks != "none":
            masked = sum(photo.mask is not None for photo in mine)
            rows.append(f"{masked} of {len(mine)} photos with a mask, unmasked parts weigh {source.unmasked_weight:g}")
        if source.references:
            rows.append(_references([e for e in (*data.examples, *data.held_out) if e.photo.source is source]))
        if rows:
            lines.append(f"  {printable(source.path)}: {'; '.join(rows)}")
    return lines


def _references(examples: Sequence[Example]) -> str:
    """How many references the model is shown with each photo, and which of them are shrunk or cut for it."""
    text = f"{counted(len(examples[0].references), 'reference')} beside each photo"
    showing = next((reference.showing for reference in examples[0].references), "cut")
    if showing == "stretched":
        sizes = Counter(reference.bucket for example in examples for reference in example.references)
        return text + ", resized to " + ", ".join(f"{w}x{h}: {count}" for (w, h), count in sorted(sizes.items()))
    area, action, bucket = buckets.REFERENCE_AREA, "their edges cut", buckets.reference_bucket
    if showing == "framed":
        area, action, bucket = buckets.WHOLE_AREA, "framed by their edges, mirrored,", buckets.framed_bucket
    changes = {
        f"shrunk to the area of {isqrt(area)} x {isqrt(area)}": lambda one: prod(one.photo.size) > area,
        f"{action} to sides that the model takes": lambda one: bucket(*one.photo.size, step=1) != one.bucket,
    }
    for change, is_changed in changes.items():
        if names := list(dict.fromkeys(e.photo.sample for e in examples if any(map(is_changed, e.references)))):
            text += f", {change} at {counted(len(names), 'photo')} ({shortlist(names, NAMES)})"
    return text
