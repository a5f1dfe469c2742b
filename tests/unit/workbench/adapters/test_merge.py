"""What a merge makes of a weight, row by row, against the formulas on whole matrices in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from trainer.adapters.portable import DoraScale, Factors, Portable, recipe
from workbench.adapter_files.opening import OpenedAdapter, published
from workbench.adapter_files.reading import ReadAdapter
from workbench.adapters import merge
from workbench.adapters.merge import Adapters, merged_rows

LAYER = "unet.a"
SHAPES = {"Linear": (12, 10), "Conv2d": (12, 4, 3, 3)}


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def applied(
    seed: int, shape: Sequence[int], kind: str, strength: float, meaning: DoraScale = "magnitude"
) -> tuple[OpenedAdapter, float]:
    """kind: "lora", or the axis of a DoRA's magnitude. Its alpha is not its rank."""
    columns = shape[1] if kind == "input" else shape[0]
    magnitude = None if kind == "lora" else recipe(1 + drawn(seed + 2, columns).abs())
    ones = (1,) * (len(shape) - 2)
    factors = Factors(
        recipe(drawn(seed, 3, *shape[1:])), recipe(drawn(seed + 1, shape[0], 3, *ones)), 1.5, magnitude=magnitude,
        axis="input" if kind == "input" else "output",
    )  # fmt: skip
    of = published("sdxl")[0]
    read = ReadAdapter(Portable({LAYER: factors}, meaning))
    return OpenedAdapter(Path(f"{seed}.safetensors"), of, (of.label,), read), strength


def dense(weight: torch.Tensor, adapters: Adapters) -> torch.Tensor:
    """By the formulas at the head of merge.py."""
    w = weight.double()
    for opened, strength in adapters:
        portable = opened.portable
        factors = portable.layers[LAYER]
        a, b = factors.a.make().double().flatten(1), factors.b.make().double().flatten(1)
        update = (factors.alpha / 3 * b @ a).view(w.shape)
        if factors.magnitude is None:
            w = w + strength * update
            continue
        m, v = factors.magnitude.make().double(), w + update
        of = w if portable.meaning == "comfyui_released" else v
        kept = 0 if factors.axis == "output" else 1
        norm = (of if factors.axis == "output" else v).transpose(0, kept).flatten(1).norm(dim=1)
        whole = [-1 if axis == kept else 1 for axis in range(w.dim())]
        w = w + strength * ((m / norm).view(whole) * v - w)
    return w.flatten(1)


@pytest.mark.parametrize("rows", [1, 5, 12], ids=lambda rows: f"{rows} rows at once")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "kinds",
    [
        [("lora", 1.0, "magnitude")], [("lora", -0.5, "magnitude"), ("lora", 2.0, "magnitude")],
        [("output", 0.7, "magnitude")], [("output", 0.7, "comfyui_released")], [("input", 0.7, "magnitude")],
        [("lora", 0.5, "magnitude"), ("input", 1.0, "magnitude")],
        [("output", 0.5, "magnitude"), ("output", 1.5, "comfyui_released"), ("lora", 1.0, "magnitude")],
    ],
    ids=lambda kinds: ", ".join(f"{kind} {meaning}" for kind, _, meaning in kinds),
)  # fmt: skip
def test_a_weight_is_merged_as_the_formulas_say(monkeypatch, kinds, shape: tuple[int, ...], rows: int) -> None:
    """In their order, at their strengths; however many rows are made at once."""
    weight = drawn(99, *shape)
    monkeypatch.setattr(merge, "BLOCK", rows * weight[0].numel())
    adapters = [applied(10 * n, shape, kind, strength, meaning) for n, (kind, strength, meaning) in enumerate(kinds)]
    parts = list(merged_rows(weight, adapters, LAYER))
    found, wanted = torch.cat([part for _, part in parts]), dense(weight, adapters)
    assert found.dtype == torch.float64 and (found - wanted).norm() <= 1e-12 * wanted.norm()
    assert torch.equal(torch.cat([weight.flatten(1)[where].double() for where, _ in parts]), weight.flatten(1).double())


def test_a_layer_without_an_adapter_stays() -> None:
    weight = drawn(99, 12, 10)
    ((_, found),) = merged_rows(weight, [applied(0, (12, 10), "lora", 1.0)], "unet.b")
    assert torch.equal(found, weight.double())
