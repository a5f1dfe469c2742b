"""A digest of what a step draws, for the log: by it two runs can be seen to have drawn the same (`logging.draws`)."""

import zlib
from dataclasses import dataclass

import torch


@dataclass
class DrawDigest:
    """The digest of a step's draws: the sum of its samples', whatever micro-batches they come in; none unless enabled."""

    enabled: bool
    value: int = 0

    def begin(self) -> None:
        """An update begins; a refused one leaves nothing."""
        self.value = 0

    def add(self, time: torch.Tensor, noise: torch.Tensor) -> None:
        """Take in a micro-batch. time: [B]. noise: fp32 [B, C, H, W]. Both on the CPU."""
        for draws in zip(time.unbind(), noise.unbind(), strict=True) if self.enabled else ():
            digest = 0
            for tensor in draws:
                digest = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy(), digest)
            self.value = (self.value + digest) % 2**32

    def told(self) -> dict[str, str]:
        """The entry of the log, in hexadecimal. The next update's begins."""
        value, self.value = self.value, 0
        return {"draws": f"{value:08x}"} if self.enabled else {}
