"""What a start settles before it needs a weight: where it begins, its plan, and that both fit together.

`--plan` ends here, so it refuses what the training would. What keeps a run from being written over is a warning there.
"""

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

from trainer import optim
from trainer.adapters import Adapter
from trainer.artifacts.ports import Ports, refuse_unserved
from trainer.base import files
from trainer.base.console import printable
from trainer.base.errors import UserError
from trainer.base.progress import Phases
from trainer.base.run_layout import Layout
from trainer.base.tensorfile import size_text
from trainer.checkpoint.pieces import Pieces
from trainer.checkpoint.state import Pin, Progress, Saved
from trainer.config import Config
from trainer.data import identity
from trainer.data.batches import sampler
from trainer.data.cache.entries import Cache, MemoryCache
from trainer.data.memo import Memo
from trainer.engine.components import without_modules
from trainer.engine.encoding import report_captions
from trainer.models.loading import ModelSource
from trainer.plan.data_sources import cache_dir, open_cache, open_memo
from trainer.plan.run_plan import RunPlan, make_plan
from trainer.resume import pins, start_point
from trainer.resume.allowed_changes import Allowance
from trainer.resume.initial_adapter import Start, open_start
from trainer.run import container
from trainer.runtime.attention import Attention, choose, head_sizes, planned
from trainer.runtime.compilation import check_compiler
from trainer.runtime.device import Memory


@dataclass(frozen=True)
class Beginning:
    """A run before a weight is read. saved: the checkpoint that it goes on from. pieces: without those that need a weight.
    environment: None where the device need not be here. attention: the denoiser's. memo: of the photos, not written yet."""

    plan: RunPlan
    saved: Saved | None
    pieces: Pieces
    progress: Progress
    start: Start
    environment: Pin | None
    attention: Attention
    memo: Memo


@dataclass(frozen=True)
class Launch:
    """The way a run is started. ports: the parts that it is given. planned: nothing will be written. elsewhere: what this
    machine lacks is said and not refused. verify: every photo is read, whatever an earlier start knows of it."""

    resume_from: str | None
    allowed: Allowance
    ports: Ports = Ports()
    planned: bool = False
    elsewhere: bool = False
    verify: bool = False


def begin(
    config: Config,
    source: ModelSource,
    there: Memory,
    asked: Launch,
    *,
    processes: int,
    phases: Phases,
    say: Callable[[str], None],
) -> Beginning:
    """Reads photos, headers and the checkpoint to go on from; writes nothing. config: the resolved one. there: where it
    computes. Raises UserError for what can be refused without weights."""
    allowed = asked.allowed
    if lost := refuse_unserved(config, asked.ports):
        say(f"note: no {lost}: this run was opened without the parts that make them (ports=workbench.PORTS has them)")
    _check_machine(config, asked, say)
    saved, config, warnings = start_point.find_start(config, asked.resume_from, allowed, phases, planned=asked.planned)
    given = config.step.accumulation
    config = config if saved is None else pins.share_out(config, saved, processes, allowed, say)
    memo = open_memo(config, trusted=not asked.verify, layouts=asked.ports.layouts or ())
    plan = make_plan(config, source, processes=processes, phases=phases, scanned=memo)
    reader = asked.ports.adapter_files  # there, where it is asked
    plan = reader.with_below(plan, say) if config.adapter.under else plan
    start = open_start(config.adapter.init_from, lambda: reader.read_start(plan), resumed=saved is not None)
    plan = _chosen(plan, there, asked.ports, kept=() if saved is None else start_point.fixed_levers(config), say=say)
    config = plan.config
    doubts = (*warnings, *container.doubts(Path(config.run.output_dir), "run.output_dir"))
    for line in (*memo.lines(), *start.account.lines(), *(f"warning: {doubt}" for doubt in doubts)):
        say(line)
    pieces = Pieces(saved, start_point.census(config))
    pieces.enter("config", pins.pin_config(config, allowed=allowed))
    progress = pieces.enter("progress", start_point.first_progress(plan))
    start.enter(pieces)
    photos = pins.pin_data(
        digests=identity.fingerprint(plan.data.examples),
        photos=identity.photo_digests(plan.data.examples),
        samples=len(plan.data.photos),
        micro_batches=config.step.accumulation * plan.length.processes,
        accumulation=given,
        steps_per_epoch=plan.length.steps_per_epoch,
        allowed=allowed,
    )
    pieces.enter("data", photos)
    plan = start_point.go_on(plan, progress, allowed, say)
    environment, attention = None, planned(config.step.attention)
    if there.device is not None:
        attention = choose_attention(plan, there.device, say)
        pin = environment_pin(config, there.device, there.kernels.name, str(attention), processes, say)
        environment = pieces.enter("environment", pin)
    start_point.check_length(plan, progress, saved and saved.folder, allowed, say)
    if config.data.strict_captions and source.fetched:
        report_captions(plan.data, source.family, without_modules(source, plan.model.options))
    lock = Layout(Path(config.run.output_dir)).lock
    if lock.exists() and os.access(lock, os.W_OK):
        with files.locked(lock, shared=True):  # each process of this start asks at about the same time
            pass
    return Beginning(plan, saved, pieces, progress, start, environment, attention, memo)


def _chosen(plan: RunPlan, there: Memory, ports: Ports, *, kept: Collection[str], say: Callable[[str], None]) -> RunPlan:
    """The plan with what is chosen by the device there is. Raises UserError where nothing fits there, or compiles."""
    if ports.planning is not None:
        plan = ports.planning.fitted(plan, there, fixed=kept, say=say)
        plan = ports.planning.compiling(plan, there, say=say)
    if there.device is not None and plan.config.step.compile == "blocks":
        check_compiler(there.device)
    return plan


def _check_machine(config: Config, asked: Launch, say: Callable[[str], None]) -> None:
    """Raises UserError, or OSError, where the run could not write here, or lacks a library; elsewhere that is said."""
    checks = [
        partial(files.check_folder, Path(config.run.output_dir), "run.output_dir"),
        partial(files.check_folder, cache_dir(config), "data.cache_dir"),
    ]
    if config.checkpoint.mirror is not None and asked.ports.mirror is not None:
        checks.append(partial(asked.ports.mirror.check_library, config.checkpoint.mirror))
    if asked.ports.trackers is not None:
        checks.append(partial(asked.ports.trackers.check_trackers, config))
    for check in checks:
        try:
            check()
        except (UserError, OSError) as error:
            if not asked.elsewhere:
                raise
            say(f"note: not on this machine: {error}")


def written_bytes(plan: RunPlan, adapter: Adapter, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """(of one checkpoint, of the trained weights): bytes. The tensors may have no values."""
    config, trained = plan.config, sum(parameter.nbytes for parameter in adapter.named_parameters().values())
    copies = 1 + (config.ema.kind == "constant") + bool(config.adapter.init_from)
    return copies * trained + optim.state_bytes(config.optimizer.name, optimizer), trained


def disk_needs(plan: RunPlan, checkpoint: int, adapter: int, cache: int = 0) -> dict[str, tuple[Path, int]]:
    """(folder, bytes that will be written there) by the key that moves them: weights of a hub id, what the run leaves,
    encodings. checkpoint, adapter: bytes of each checkpoint, of the trained weights. cache: of all encodings; 0 where they
    are there. An image takes two bytes a pixel, as those of photos do."""
    config, source, steps = plan.config, plan.model.source, plan.length.max_steps
    layout, versions = Layout(Path(config.run.output_dir)), 1 + (config.ema.kind == "constant")
    kept = min(config.checkpoint.keep_last, steps) + 1  # the oldest goes when the newest is there
    intervals = plan.length.every(config.export, config.export.first), plan.length.every(config.validation)
    exports, drawn = (len(every.steps(steps)) + 1 for every in intervals)
    images = sum(2 * request.width * request.height for request in plan.data.requests)
    output = to_write(kept * checkpoint, layout.checkpoints)
    output += to_write(exports * versions * len(config.export.formats) * adapter, layout.adapters)
    output += to_write((drawn + 1) * versions * images, layout.samples)
    needs = {"run.output_dir": (layout.root, output)}
    if config.data.cache == "disk" and cache:
        needs["data.cache_dir"] = (cache_dir(config), to_write(cache, cache_dir(config)))
    if download := source.to_fetch():
        needs["HF_HUB_CACHE"] = (source.repository.blobs, download)
    return needs


def to_write(size: int, folder: Path) -> int:
    """What is left of `size` bytes that a folder will hold, after those that are there. Checkpoints set aside stay."""
    inside = (path for path in folder.rglob("*") if not path.relative_to(folder).parts[0].startswith("superseded-"))
    return max(0, size - sum(path.lstat().st_size for path in inside if path.is_file()))


def shortages(needs: Mapping[str, tuple[Path, int]]) -> list[str]:
    """A sentence for each disk that has less free space than will be written there. needs: (folder, bytes) by key."""
    disks: dict[int, tuple[list[str], Path, int]] = {}
    for key, (folder, size) in needs.items():
        there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
        keys, _, before = disks.get(there.stat().st_dev, ([], there, 0))
        disks[there.stat().st_dev] = [*keys, key], there, before + size
    return [
        f"{' and '.join(keys)} need about {size_text(size)}, and the disk of {printable(there)} has {size_text(free)} free; "
        f"free some, give another folder{', or lower checkpoint.keep_last' if 'run.output_dir' in keys else ''}"
        for keys, there, size in disks.values()
        if (free := shutil.disk_usage(there).free) < size
    ]


def warn_of_disk(needs: Mapping[str, tuple[Path, int]], say: Callable[[str], None]) -> None:
    """Say which disks are too small. The run goes on: room may be made meanwhile."""
    for line in shortages(needs):
        say(f"warning: {line}")


def opened_cache(plan: RunPlan, say: Callable[[str], None]) -> Cache | MemoryCache | None:
    """The cache of encodings, which says, once it is known, that the disk is too small for it."""
    folder = cache_dir(plan.config)
    return open_cache(plan.config.data, folder, lambda size: warn_of_disk({"data.cache_dir": (folder, size)}, say))


def environment_pin(
    config: Config, device: torch.device, kernels: str, attention: str, processes: int, say: Callable[[str], None]
) -> Pin:
    """What a step's last bits depend on, here."""
    compiled = pins.NOT_COMPILED
    if config.step.compile != "none":  # only a compiler makes other sums of a block that is recomputed
        compiled = f"blocks, gradient_checkpointing = {config.memory.gradient_checkpointing}"
    chosen = {"kernels": kernels, "attention": attention, "compiled": compiled, "processes": processes}
    return pins.pin_environment(device, config.optimizer.name, chosen, deterministic=config.run.deterministic, say=say)


def choose_attention(plan: RunPlan, device: torch.device, say: Callable[[str], None]) -> Attention:
    """The denoiser's attention there; said where it is a choice. Raises UserError for a kind that the device lacks."""
    asked, source, denoiser = plan.config.step.attention, plan.model.source, plan.model.family.denoiser
    dtype = plan.model.storage[denoiser].compute
    layouts = {example.layout for example in plan.data.examples}
    tokens = max(sum(plan.model.family.images.image_tokens(height, width) for width, height in layout) for layout in layouts)
    chosen = choose(asked, device, dtype, sizes := cache(lambda: head_sizes(source.build(denoiser))), tokens)
    if device.type != "cpu" or asked != "auto":
        taken = f"; the largest photo takes {chosen.selected(device, dtype, sizes(), tokens)}" if asked == "auto" else ""
        say(f"attention: {chosen} (step.attention = {asked!r}{taken}{'; ' if chosen.note else ''}{chosen.note})")
    return chosen


def updates_of(plan: RunPlan, *, after: int) -> Iterator[list[sampler.MicroBatch]]:
    """Every update's micro-batches, of all processes, beyond step `after`."""
    config = plan.config
    return sampler.all_updates(
        plan.data.examples,
        seed=config.run.seed,
        batch_size=config.data.batch_size,
        group=config.step.accumulation * plan.length.processes,
        after=after,
        fill=config.data.short_batches == "merge",
        began=plan.length.began,
    )
