"""Blocks in a file: they compute and differentiate as blocks in memory, out of turn too, and memory holds two of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from trainer.base.memory import checkpoint_blocks
from trainer.kernels import dora_torch
from trainer.quantization import FORMATS, FrozenLayer, FrozenLinear
from workbench.audit.spilling import Spiller

CPU, WIDTHS = torch.device("cpu"), (5, 9, 70, 5, 6)


class Block(nn.Module):
    """Two layers of unlike sizes."""

    def __init__(self, stored: str, width: int) -> None:
        super().__init__()
        common = dict(format=FORMATS[stored], compute_dtype=torch.float32, kernels=dora_torch, device="meta", bias=False)
        self.first, self.second = FrozenLinear(6, width, **common), FrozenLinear(width, 6, **common)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


def filled(stored: str, folder: Path | None) -> tuple[nn.Sequential, Spiller | None]:
    """The same model each time, in a file of `folder`, or in memory."""
    model, generator = nn.Sequential(*(Block(stored, width) for width in WIDTHS)), torch.Generator().manual_seed(3)
    spiller = None if folder is None else Spiller(dict(model.named_children()), CPU, folder)
    if spiller is None:
        model.to_empty(device=CPU)
    for layer in (layer for layer in model.modules() if isinstance(layer, FrozenLayer)):
        layer.load_weight(torch.randn(layer.weight_shape, generator=generator))
    return model, spiller


@pytest.mark.parametrize("stored", ["fp32", "bf16", "fp8_e4m3", "nf4"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_the_numbers_are_those_of_blocks_in_memory(tmp_path: Path, stored: str, recomputed: bool) -> None:
    """Three passes with gradients and one without, bit for bit; and each weight out of turn."""
    results = []
    for folder in (None, tmp_path):
        model, spiller = filled(stored, folder)
        blocks = dict(model.named_children())
        if recomputed:
            checkpoint_blocks(blocks, True, compiled=list(blocks))
        found = []
        for number in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number)).requires_grad_()
            y = model(x)
            y.square().sum().backward()
            with torch.no_grad():
                found += [y.detach(), x.grad, model(x)]
        layers = [layer for layer in model.modules() if isinstance(layer, FrozenLayer)]
        results.append(found + [layer.dequantize(torch.float32) for layer in layers])
        if spiller is not None:
            own = [tensor.nbytes for layer in layers for tensor in layer.payload().values() if tensor.device.type == "cpu"]
            assert sum(slot.nbytes for slot in spiller.slots) == 2 * max(spiller.sizes) and spiller.master_bytes == 0
            assert len(own) <= 2 * len(layers[0].payload()) * 2, "what has no slot has no memory"
            assert spiller.end == sum(spiller.sizes) and not list(tmp_path.iterdir()), "the file has no name"
            spiller.close()
            assert spiller.file.closed
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*results, strict=True))


class Faulty:
    """A file that moves a few bytes at once, until it moves none."""

    def __init__(self, file, left: int) -> None:
        self.file, self.left = file, left

    def _part(self, view: memoryview) -> memoryview:
        part = view[: min(7, self.left)]
        self.left -= len(part)
        return part

    def seek(self, place: int) -> None:
        self.file.seek(place)

    def write(self, view: memoryview) -> int:
        return self.file.write(self._part(view))

    def readinto(self, view: memoryview) -> int:
        return self.file.readinto(self._part(view))


def test_weights_that_are_not_whole_on_the_disk_are_an_error(tmp_path: Path) -> None:
    """A short write or read is gone on with; one of nothing leaves no weight half old."""
    model, spiller = filled("fp32", tmp_path)
    layer, whole = model[2].first, spiller.file
    wanted = layer.dequantize(torch.float32).clone()
    for homes, tries in ((10**6, "goes on"), (20, "ends")):
        spiller.file = layer._home.file = Faulty(whole, homes)
        for work in (lambda: layer.load_weight(wanted), lambda: layer.dequantize(torch.float32)):
            if tries == "goes on":
                work()
            else:
                with pytest.raises(OSError, match="the temporary file of the weights ended .* bytes too early"):
                    work()
    layer._home.file = spiller.file = whole
    assert torch.equal(layer.dequantize(torch.float32), wanted)
    spiller.close()
