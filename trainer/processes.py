"""What the processes of a run say to one another. The only file that knows torch.distributed; accelerate starts it."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


class Processes:
    """This process among its equals: device, count, rank. Every method is called by all of them in the same order."""

    def __init__(self, accelerator) -> None:
        self._accelerator = accelerator
        self.device: torch.device = accelerator.device
        self.count: int = accelerator.num_processes
        self.rank: int = accelerator.process_index
        self.is_main: bool = accelerator.is_main_process

    def sum(self, tensor: torch.Tensor) -> None:
        """Over the processes, in place."""
        if self.count > 1:
            torch.distributed.all_reduce(tensor)

    def largest(self, *numbers: int) -> list[int]:
        """The largest of each number in any process: what all of them agree on."""
        if self.count == 1:
            return list(numbers)
        agreed = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MAX)
        return agreed.tolist()

    def wait(self) -> None:
        """Until every process is here."""
        self._accelerator.wait_for_everyone()

    def main_first(self) -> AbstractContextManager[None]:
        """The main process goes through the block before the others."""
        return self._accelerator.main_process_first()
