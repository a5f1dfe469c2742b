"""Where a run computes: the device of this process, and the processes beside it."""

import os

import torch

from trainer import kernels, precision, processes
from trainer.config import Config
from trainer.errors import UserError
from trainer.processes import Processes


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


def start_processes(config: Config) -> Processes:
    """The processes of this run, on the devices that the config asks for."""
    return processes.start(check_device(config))
