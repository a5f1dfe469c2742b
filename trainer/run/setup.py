"""The part of a start before weights are needed: its starting point, its plan, and checks of both. `--plan` ends here, so
that it refuses the same configs as training. An existing run in the output folder is only a warning there."""

import os
import re
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
from trainer.checkpoint.state import Pieces, Pin, Progress, Saved
from trainer.config import Config
from trainer.data.batches import sampler
from trainer.data.memo import Memo
from trainer.engine.components import without_modules
from trainer.engine.encoding import report_captions
from trainer.models.loading import ModelSource
from trainer.plan.data_sources import cache_dir, open_memo
from trainer.plan.run_plan import RunPlan, make_plan
from trainer.resume import pins, start_point
from trainer.resume.allowed_changes import Allowance
from trainer.resume.initial_adapter import Start, open_start
from trainer.runtime.attention import Attention, choose, head_sizes, planned
from trainer.runtime.compilation import check_compiler
from trainer.runtime.device import Memory

IN_IMAGE = "TRAINER_IMAGE"  # set by docker/Dockerfile
MOUNTS = Path("/proc/self/mountinfo")
# Anonymous mounts: of Docker and containerd for a VOLUME without -v; Kubernetes' emptyDir.
UNNAMED = re.compile(r"/[0-9a-f]{64}(/_data)?$|/kubernetes\.io~empty-dir/")


@dataclass(frozen=True)
class Beginning:
    """A run before a weight is read. saved: the checkpoint to resume. pieces: those that need no weight. environment: None if
    no device is needed. attention: the denoiser's. memo: of the photos, not written yet."""

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
    """The options of a start. ports: optional parts. planned: nothing will be written. elsewhere: features that this machine
    lacks are reported, not refused. verify: read every photo again, even if an earlier start has checked it."""

    resume_from: str | None
    allowed: Allowance
    ports: Ports = Ports()
    planned: bool = False
    elsewhere: bool = False
    verify: bool = False


def begin(
    config: Config,
    source: ModelSource,
    memory: Memory,
    launch: Launch,
    *,
    processes: int,
    phases: Phases,
    say: Callable[[str], None],
) -> Beginning:
    """Read photos, headers and the checkpoint to resume; nothing is written. config: resolved. memory: of the device. Raises
    UserError for everything that can be refused without weights."""
    allowed = launch.allowed
    if unserved := refuse_unserved(config, launch.ports):
        say(f"note: no {unserved}: this run was opened without the parts that make them (ports=workbench.PORTS has them)")
    _check_machine(config, launch, say)
    saved, config, warnings = start_point.find_start(config, launch.resume_from, allowed, phases, planned=launch.planned)
    accumulation = config.step.accumulation
    config = config if saved is None else pins.share_out(config, saved, processes, allowed, say)
    memo = open_memo(config, trusted=not launch.verify, layouts=launch.ports.layouts or ())
    plan = make_plan(config, source, processes=processes, phases=phases, scanned=memo)
    reader = launch.ports.adapter_files  # not None if it is needed: refuse_unserved
    plan = reader.with_below(plan, say) if config.adapter.under else plan
    start = open_start(config.adapter.init_from, lambda: reader.read_start(plan), resumed=saved is not None)
    plan = _fitted(plan, memory, launch.ports, fixed=() if saved is None else start_point.fixed_levers(config), say=say)
    config = plan.config
    doubts = (*warnings, *container_warnings(Path(config.run.output_dir), "run.output_dir"))
    for line in (*memo.lines(), *start.account.lines(), *(f"warning: {doubt}" for doubt in doubts)):
        say(line)
    pieces = Pieces(saved, start_point.census(config))
    pieces.enter("config", pins.pin_config(config, allowed=allowed))
    progress = pieces.enter("progress", start_point.first_progress(plan))
    if start.path:
        pieces.enter("start", start)
    pieces.enter("data", pins.pin_data(plan, accumulation=accumulation, allowed=allowed))
    plan = start_point.go_on(plan, progress, allowed, say)
    environment, attention = None, planned(config.step.attention)
    if memory.device is not None:
        attention = choose_attention(plan, memory.device, say)
        names = {"kernels": memory.kernels.name, "attention": str(attention)}
        pin = pins.pin_environment(config, memory.device, **names, processes=processes, say=say)
        environment = pieces.enter("environment", pin)
    start_point.check_length(plan, progress, saved and saved.folder, allowed, say)
    if config.data.strict_captions and source.fetched:
        report_captions(plan.data, source.family, without_modules(source, plan.model.options))
    lock = Layout(Path(config.run.output_dir)).lock
    if lock.exists() and os.access(lock, os.W_OK):
        with files.locked(lock, shared=True):  # shared: all processes of this start take it at about the same time
            pass
    return Beginning(plan, saved, pieces, progress, start, environment, attention, memo)


def container_warnings(output: Path, name: str) -> list[str]:
    """A warning if `output` (`name` in the config) may be deleted with a container of this project's image."""
    if IN_IMAGE not in os.environ:
        return []
    source, point, system = _mount(output.resolve())
    if point == "/" or system == "tmpfs":
        problem = "is in the container and goes with it"
    elif UNNAMED.search(source):
        problem = "is on a volume without a name, which goes with the container under docker run --rm or in Kubernetes"
    else:
        return []
    return [f'{name} {problem}: mount a folder, as with docker run -v "$PWD/outputs:/outputs"']


def _mount(path: Path) -> tuple[str, str, str]:
    """(source folder, mount point, file system) of the innermost mount that contains `path`."""
    mount = ("/", "/", "")
    for line in MOUNTS.read_text(encoding="utf-8").splitlines():
        fields, _, system = line.partition(" - ")
        source, point = (re.sub(r"\\([0-7]{3})", lambda c: chr(int(c[1], 8)), part) for part in fields.split()[3:5])
        # A later line covers an earlier one at the same place.
        if path.is_relative_to(point) and len(point) >= len(mount[1]):
            mount = (source, point, system.split()[0])
    return mount


def _fitted(plan: RunPlan, memory: Memory, ports: Ports, *, fixed: Collection[str], say: Callable[[str], None]) -> RunPlan:
    """The plan with the choices that depend on the device. Raises UserError if nothing fits, or cannot be compiled."""
    if ports.planning is not None:
        plan = ports.planning.fitted(plan, memory, fixed=fixed, say=say)
        plan = ports.planning.compiling(plan, memory, say=say)
    if memory.device is not None and plan.config.step.compile == "blocks":
        check_compiler(memory.device)
    return plan


def _check_machine(config: Config, launch: Launch, say: Callable[[str], None]) -> None:
    """Raises UserError or OSError if the run cannot write here or lacks a library. With launch.elsewhere only reports it."""
    checks = [
        partial(files.check_folder, Path(config.run.output_dir), "run.output_dir"),
        partial(files.check_folder, cache_dir(config), "data.cache_dir"),
    ]
    if config.checkpoint.mirror is not None and launch.ports.mirror is not None:
        checks.append(partial(launch.ports.mirror.check_library, config.checkpoint.mirror))
    if launch.ports.trackers is not None:
        checks.append(partial(launch.ports.trackers.check_trackers, config))
    for check in checks:
        try:
            check()
        except (UserError, OSError) as error:
            if not launch.elsewhere:
                raise
            say(f"note: not on this machine: {error}")


def written_bytes(plan: RunPlan, adapter: Adapter, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """The bytes of (one checkpoint, the trained weights). The tensors may be on the meta device."""
    config, trained = plan.config, sum(parameter.nbytes for parameter in adapter.named_parameters().values())
    copies = 1 + (config.ema.kind == "constant") + bool(config.adapter.init_from)
    return copies * trained + optim.state_bytes(config.optimizer.name, optimizer), trained


def disk_needs(plan: RunPlan, checkpoint: int, adapter: int, cache: int = 0) -> dict[str, tuple[Path, int]]:
    """(folder, bytes still to be written there) by the key that sets the folder: downloads of the hub, results, encodings.
    checkpoint, adapter, cache: bytes of a checkpoint, of the trained weights, of all missing encodings. An image is
    estimated at two bytes a pixel, like those of photos."""
    config, source, steps = plan.config, plan.model.source, plan.length.max_steps
    layout, versions = Layout(Path(config.run.output_dir)), 1 + (config.ema.kind == "constant")
    checkpoints = min(config.checkpoint.keep_last, steps) + 1  # the oldest is deleted after the newest is written
    intervals = plan.length.every(config.export, config.export.first), plan.length.every(config.validation)
    exports, draws = (len(every.steps(steps)) + 1 for every in intervals)
    images = sum(2 * request.width * request.height for request in plan.data.requests)
    output = to_write(checkpoints * checkpoint, layout.checkpoints)
    output += to_write(exports * versions * len(config.export.formats) * adapter, layout.adapters)
    output += to_write((draws + 1) * versions * images, layout.samples)
    needs = {"run.output_dir": (layout.root, output)}
    if config.data.cache == "disk" and cache:
        needs["data.cache_dir"] = (cache_dir(config), to_write(cache, cache_dir(config)))
    if download := source.to_fetch():
        needs["HF_HUB_CACHE"] = (source.repository.blobs, download)
    return needs


def to_write(size: int, folder: Path) -> int:
    """The part of `size` bytes that a folder lacks. Checkpoints set aside do not count: they stay."""
    paths = (path for path in folder.rglob("*") if not path.relative_to(folder).parts[0].startswith("superseded-"))
    return max(0, size - sum(path.lstat().st_size for path in paths if path.is_file()))


def shortages(needs: Mapping[str, tuple[Path, int]]) -> list[str]:
    """A sentence for each disk with too little free space. needs: (folder, bytes) by key."""
    disks: dict[int, tuple[list[str], Path, int]] = {}
    for key, (folder, size) in needs.items():
        mount = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
        keys, _, before = disks.get(mount.stat().st_dev, ([], mount, 0))
        disks[mount.stat().st_dev] = [*keys, key], mount, before + size
    return [
        f"{' and '.join(keys)} need about {size_text(size)}, and the disk of {printable(mount)} has {size_text(free)} free; "
        f"free some, give another folder{', or lower checkpoint.keep_last' if 'run.output_dir' in keys else ''}"
        for keys, mount, size in disks.values()
        if (free := shutil.disk_usage(mount).free) < size
    ]


def warn_of_disk(needs: Mapping[str, tuple[Path, int]], say: Callable[[str], None]) -> None:
    """Warn of disks that are too small. The run goes on, as space may be freed meanwhile."""
    for line in shortages(needs):
        say(f"warning: {line}")


def choose_attention(plan: RunPlan, device: torch.device, say: Callable[[str], None]) -> Attention:
    """The denoiser's attention on the device; reported if it is a choice. Raises UserError if the device lacks the kind."""
    setting, source, denoiser = plan.config.step.attention, plan.model.source, plan.model.family.denoiser
    dtype = plan.model.storage[denoiser].compute
    layouts = {example.layout for example in plan.data.examples}
    tokens = max(sum(plan.model.family.images.image_tokens(height, width) for width, height in layout) for layout in layouts)
    attention = choose(setting, device, dtype, sizes := cache(lambda: head_sizes(source.build(denoiser))), tokens)
    if device.type != "cpu" or setting != "auto":
        note = f"; the largest photo takes {attention.selected(device, dtype, sizes(), tokens)}" if setting == "auto" else ""
        say(f"attention: {attention} (step.attention = {setting!r}{note}{'; ' if attention.note else ''}{attention.note})")
    return attention


def updates_of(plan: RunPlan, *, after: int) -> Iterator[list[sampler.MicroBatch]]:
    """The micro-batches of each update after step `after`, of all processes."""
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
