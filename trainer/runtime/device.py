"""The device of this process: chosen, checked and set up; its memory; the other processes of the run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePosixPath

import psutil
import torch

from trainer import kernels
from trainer.base.errors import UserError, number_in
from trainer.base.protocols import Kernels
from trainer.config import Config, against_graphs
from trainer.runtime import precision, processes
from trainer.runtime.processes import Processes


def check_device(config: Config) -> torch.device:
    """The device of this process; sets torch up for it. config: the resolved one. Raises UserError if this machine lacks
    something that the config requires."""
    if config.run.deterministic:
        precision.be_deterministic()
    if config.run.device == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device = 'cuda', but no CUDA device is visible; check nvidia-smi, or use 'auto'")
    on_cpu = config.run.device == "cpu" or not torch.cuda.is_available()
    # One device per local rank, as accelerate assigns them.
    device = torch.device("cpu") if on_cpu else torch.device("cuda", number_in("LOCAL_RANK", 0))
    precision.prepare_device(device, {component.compute for component in config.model.components.values()})
    choice = kernels.choose(config.adapter.kernels, device)
    precision.check_scaled_matmul(config.precision.matmul, choice, device)
    precision.check_encoding(config.vae.encode, device)
    if config.step.graphs is True and device.type != "cuda":
        raise UserError(f"step.graphs = true needs a CUDA device, this run is on {device}; leave it out")
    return device


def without_graphs(config: Config, device: torch.device) -> str:
    """Why a run's steps are not replayed as CUDA graphs; "" if they are."""
    if config.step.graphs is False:
        return "step.graphs = false"
    if device.type != "cuda":
        return f"they need a CUDA device, this run is on {device}"
    return next((f"{setting}: {reason}" for setting, reason in against_graphs(config)), "")


@dataclass(frozen=True)
class Memory:
    """The memory of the device that a run is planned for. size: bytes. base: `base_of` the device. device: None if it may be
    in another machine. largest: the largest of each number over the processes."""

    size: int
    base: Callable[[], int] | None
    kernels: Kernels
    device: torch.device | None = None
    largest: Callable[..., list[int]] = lambda *numbers: [*numbers]

    @staticmethod
    def of(device: torch.device, config: Config) -> "Memory":
        """The memory of a device of this machine."""
        size = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host_memory()
        return Memory(size, base_of(device), kernels.choose(config.adapter.kernels, device), device)

    def everywhere(self, largest: Callable[..., list[int]]) -> "Memory":
        """The same memory in all processes: the smallest size, and the largest base on a CPU, agreed on at its first use
        only, as processes may use it unequally often."""
        base = self.base and cache(lambda base=self.base: largest(base())[0])
        return replace(self, size=-largest(-self.size)[0], base=base, largest=largest)


def base_of(device: torch.device) -> Callable[[], int] | None:
    """A function that returns the bytes of this process, for a CPU; None for a GPU."""
    return (lambda: psutil.Process().memory_info().rss) if device.type == "cpu" else None


# Linux lists a process's control groups, and their limits, here.
CGROUPS, CGROUP_ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def host_memory(cgroups: Path = CGROUPS, root: Path = CGROUP_ROOT) -> int:
    """Bytes of memory that this process may use: the machine's, or a container's smaller limit."""
    return min([psutil.virtual_memory().total, *_limits(cgroups, root)])


def _limits(cgroups: Path, root: Path) -> Iterator[int]:
    """The limits of this process's control groups and of their parents; version 2 and version 1."""
    for line in cgroups.read_text().splitlines() if cgroups.is_file() else ():
        _, controllers, place = line.split(":", 2)
        if controllers == "":
            top, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        # A container sees its own group at the root, whatever the group's name outside.
        group = PurePosixPath(place.lstrip("/"))
        for folder in (group, *group.parents):
            file = top / folder / name
            limit = file.read_text().strip() if file.is_file() else "max"
            if limit.isdigit():
                yield int(limit)


def start_processes(config: Config, *, quiet: bool = False) -> Processes:
    """The processes of this run, on the config's devices. quiet: they print warnings alone."""
    return processes.start(check_device(config), lost_after=config.run.lost_after, quiet=quiet)
