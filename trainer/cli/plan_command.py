"""What a run would do, and whether it fits into memory: `--plan`, `--plan_memory` and the end of `--new`."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from trainer.base.console import printable, write
from trainer.base.errors import number_in
from trainer.base.progress import Phases
from trainer.base.run_layout import Layout
from trainer.base.tensorfile import size_text
from trainer.config import Config
from trainer.memory_plan.describe import describe_memory, describe_time
from trainer.memory_plan.estimate import forecast
from trainer.memory_plan.suggestions import changes
from trainer.plan.describe import describe, describe_head
from trainer.plan.run_plan import RunPlan, open_source, resolve
from trainer.resume.allowed_changes import Allowance
from trainer.run.setup import Launch, begin, cache_dir
from trainer.runtime.device import Memory, accelerator_of, check_device


def preview(
    config: Config,
    memory: int | None = None,
    *,
    head: bool = True,
    data: bool = True,
    resume_from: str | None = None,
    allowed: Allowance | None = None,
    otherwise: str | None = None,
) -> bool:
    """Print what a run would do, and whether it fits into memory. Returns whether it does.

    memory: bytes of the accelerator that is planned for; None: of the device that this machine has. head: with what
    `write_head` prints, before a part of the model is built. data: with the photos. otherwise: what is done where it does
    not fit, said in place of what would make it smaller.
    """
    source = open_source(config)
    config = resolve(config, source)
    if head:
        write_head(config, memory)
    device = check_device(config) if memory is None else None
    there = accelerator_of(config, memory) if device is None else Memory.of(device, config)
    beginning = begin(
        config,
        source,
        there,
        Launch(resume_from, allowed or Allowance(resume_from=resume_from or "auto"), planned=True),
        processes=number_in("WORLD_SIZE", 1, least=1),
        phases=Phases(show=True, every=config.logging.every_seconds),
        say=write,
    )
    plan = beginning.plan
    write(describe(plan, sizes=True, data=data))
    found = forecast(plan, there.kernels, base=there.base)
    if config.checkpoint.mirror is not None:
        write(f"mirror: about {size_text(found.checkpoint)} for each checkpoint; a run asks first whether it can be written")
    fits = found.fits(there.size)
    if not fits and otherwise is not None:
        write(f"does not fit: {size_text(found.total)} of {size_text(there.size)} are needed; {otherwise}")
        return False
    for line in disk_warnings(disk_needs(plan, checkpoint=found.checkpoint, cache=found.cache)):
        write(line)
    write(describe_time(plan, found, device, made=beginning.progress.step))
    smaller = [] if fits else changes(plan, there.kernels, found, there.size)
    write(describe_memory(found, there.size, smaller, updates=config.step.accumulation))  # ends with whether it fits
    return fits


def write_head(config: Config, memory: int | None) -> None:
    """Print the first lines of a plan, which need the config alone. memory: None: of this machine's device."""
    write(describe_head(config, on_cpu=memory is None and check_device(config).type == "cpu"))


def disk_needs(plan: RunPlan, *, checkpoint: int, cache: int) -> dict[str, tuple[Path, int]]:
    """(folder, bytes that will be written there) by the key that moves them: weights of a hub id, checkpoints, encodings.

    checkpoint: bytes of each. cache: of all encodings. Exports and samples are not counted: they are small beside these.
    """
    config, source = plan.config, plan.model.source
    kept = min(config.checkpoint.keep_last, plan.length.max_steps) + 1  # the oldest goes when the newest is there
    output = Path(config.run.output_dir)
    needs = {"run.output_dir": (output, to_write(kept * checkpoint, Layout(output).checkpoints))}
    if config.data.cache == "disk":
        needs["data.cache_dir"] = (cache_dir(config), to_write(cache, cache_dir(config)))
    if download := source.to_fetch():
        needs["HF_HUB_CACHE"] = (source.repository.blobs, download)
    return needs


def to_write(size: int, folder: Path) -> int:
    """What is left of `size` bytes that a folder will hold, after those that it holds already and will take the place of.
    Checkpoints that were set aside stay."""
    inside = (path for path in folder.rglob("*") if not path.relative_to(folder).parts[0].startswith("superseded-"))
    return max(0, size - sum(path.lstat().st_size for path in inside if path.is_file()))


def disk_warnings(needs: Mapping[str, tuple[Path, int]]) -> list[str]:
    """A line for each disk that has less free space than will be written there. needs: (folder, bytes) by key."""
    disks: dict[int, tuple[list[str], Path, int]] = {}
    for key, (folder, size) in needs.items():
        there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
        keys, _, before = disks.get(there.stat().st_dev, ([], there, 0))
        disks[there.stat().st_dev] = [*keys, key], there, before + size
    lines = []
    for keys, there, size in disks.values():
        if (free := shutil.disk_usage(there).free) < size:
            lines.append(
                f"warning: {' and '.join(keys)} need about {size_text(size)}, and the disk of {printable(there)} has "
                f"{size_text(free)} free; free some, give another folder"
                + (", or lower checkpoint.keep_last" if "run.output_dir" in keys else "")
            )
    return lines
