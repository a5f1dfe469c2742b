"""Where a run computes: the device of this process, and the processes beside it."""

import os
from dataclasses import dataclass

import psutil
import torch

from trainer import kernels, precision, processes
from trainer.config import Config
from trainer.errors import UserError
from trainer.processes import Processes
from trainer.protocols import Kernels


def check_device(config: Config) -> torch.device:
    """The device that this process of a run would have. config: as `resolve` gives.

    Sets up torch for it. Raises UserError where this machine lacks what the config asks for.
    """
    if config.run.deterministic:
        precision.be_deterministic()
    if config.run.device == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device = 'cuda', but no CUDA device is visible; check nvidia-smi, or use 'auto'")
    on_cpu = config.run.device == "cpu" or not torch.cuda.is_available()
    # As accelerate gives them out: not the first for all.
    device = torch.device("cpu") if on_cpu else torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    precision.prepare_device(device, {component.compute for component in config.model.components.values()})
    chosen = kernels.choose(config.adapter.kernels, device)
    precision.check_scaled_matmul(config.precision.matmul, chosen, device)
    return device


@dataclass(frozen=True)
class Memory:
    """Of the device that a run is planned for. size: bytes. base: what the process itself takes of it. kernels: the run's."""

    size: int
    base: int
    kernels: Kernels

    @staticmethod
    def of(device: torch.device, config: Config) -> "Memory":
        """What is here."""
        chosen = kernels.choose(config.adapter.kernels, device)
        if device.type == "cuda":
            return Memory(torch.cuda.get_device_properties(device).total_memory, 0, chosen)
        return Memory(psutil.virtual_memory().total, base_of(device), chosen)


def accelerator_of(config: Config, memory: int) -> Memory:
    """An accelerator of so many bytes, on any machine."""
    return Memory(memory, 0, kernels.planned(config.adapter.kernels))


def base_of(device: torch.device) -> int:
    """Bytes that this process takes on the device before it holds a tensor there."""
    return psutil.Process().memory_info().rss if device.type == "cpu" else 0


def start_processes(config: Config) -> Processes:
    """The processes of this run, on the devices that the config asks for."""
    return processes.start(check_device(config))
