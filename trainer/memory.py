"""What makes a run fit: gradient checkpointing."""

from __future__ import annotations

from torch import nn


def checkpoint_blocks(denoiser: nn.Module, every: bool | int) -> int:
    """Recompute the activations of every n-th block in the backward pass (True: of all). Returns how many blocks.

    `denoiser` is a diffusers model: it offers the switch on each container of blocks.
    """
    if every is False:
        return 0
    denoiser.enable_gradient_checkpointing()
    containers = [m for m in denoiser.modules() if getattr(m, "gradient_checkpointing", False)]
    n = 1 if every is True else every
    for index, container in enumerate(containers):
        container.gradient_checkpointing = index % n == 0
    return sum(container.gradient_checkpointing for container in containers)
