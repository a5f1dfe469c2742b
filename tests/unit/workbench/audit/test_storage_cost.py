"""What a storage costs, layer by layer: the estimate against fp64, by forward-mode derivatives of dense weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainer.base import draws
from trainer.base.errors import NonFiniteError
from trainer.base.progress import QUIET
from trainer.base.types import Batch, Conditioning
from trainer.engine.held_out_loss import HeldOutLoss
from trainer.kernels import dora_torch
from trainer.quantization import FORMATS, freeze_layers, storage_of_layers
from trainer.runtime.attention import TORCHS_OWN
from workbench.audit.storage_cost import Effect, Predictions, Terms, estimate, measured, predict, swapped, twin

PHOTOS, DRAWS, SIDE, SEED = 3, 4, 6, 5
STORED = ("fp8_e4m3", "int8", "nf4")


class Block(nn.Module):
    """Recomputed: a layer that is used twice, and one of what the model is told, to which no gradient of a latent leads."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.told = nn.Linear(8, 8), nn.Linear(5, 8)

    def forward(self, x: torch.Tensor, told: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.twice(torch.tanh(self.twice(x))))
        return x * (1 + torch.sigmoid(self.told(told))[:, None])


class Denoiser(nn.Module):
    """A convolution in, blocks over pixels as tokens, a convolution with a stride of its own out."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Conv2d(2, 8, 3, padding=1)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor, told: torch.Tensor) -> torch.Tensor:
        y = self.into(x)
        tokens = y.flatten(2).transpose(1, 2)
        for block in self.blocks:
            tokens = block(tokens, told)
        return self.out(tokens.transpose(1, 2).unflatten(2, y.shape[2:]).contiguous())


def batch_of(number: int) -> Batch:
    drawn = draws.normal((1, 2, SIDE, SIDE + number), SEED, "photo", number)
    size = torch.zeros(1, 2, dtype=torch.int64)
    told = Conditioning(draws.normal((1, 5), SEED, "caption", number))
    return Batch((), drawn, ("",), told, size, size, size)


def example(number: int) -> Any:
    photo = SimpleNamespace(sha256=f"{number:064x}", caption="", sample=str(number))
    return SimpleNamespace(sample=str(number), photo=photo, captions=("",), references=())


@pytest.fixture
def made() -> Iterator[tuple[Denoiser, Any, HeldOutLoss]]:
    """(the frozen denoiser, what stands for the components, the loss of three photos of different sizes)."""
    torch.manual_seed(SEED)
    denoiser = Denoiser().requires_grad_(False)
    weights = {name: parameter.clone() for name, parameter in denoiser.named_parameters()}
    choose = storage_of_layers(format=FORMATS["fp32"], compute=torch.float32, unquantised=torch.float32)
    freeze_layers(denoiser, choose, dora_torch)
    for name, layer in denoiser.named_modules():
        if f"{name}.weight" in weights:
            layer.load_weight(weights[f"{name}.weight"])
            layer.bias.data.copy_(weights[f"{name}.bias"])
    objective = SimpleNamespace(
        time_at=lambda shares: shares.float(), at=lambda time: time,
        noised=lambda x, noise, at: x + at.view(-1, 1, 1, 1) * noise, target=lambda x, noise, at: noise - x,
    )  # fmt: skip
    images = SimpleNamespace(predict=lambda model, noised, time, told, batch: denoiser(noised, told.sequence))
    family = SimpleNamespace(images=images)
    device = torch.device("cpu")
    components: Any = SimpleNamespace(
        family=family, model=SimpleNamespace(device=device), plan=SimpleNamespace(objective=objective), attention=TORCHS_OWN
    )
    examples = [example(n) for n in range(PHOTOS)]
    peers: Any = SimpleNamespace(rank=0, count=1, device=device, sum=lambda *_: None, largest=lambda *counts: list(counts))

    class Reader(dict):
        def __missing__(self, key):
            return batch_of(int(key[0].sample))

    held_out = HeldOutLoss(
        measured={"held_out": examples}, seed=SEED, at_once=3, reader=Reader(), errors=lambda *_: torch.zeros(0),  # type: ignore[arg-type]
        evaluating=nullcontext, processes=peers, phases=QUIET,
    )  # fmt: skip
    yield denoiser, components, held_out


def forward64(weights: dict[str, torch.Tensor], biases: dict[str, torch.Tensor], x, told) -> torch.Tensor:
    """The denoiser once more, in fp64 with dense weights."""
    y = F.conv2d(x, weights["into"], biases["into"], padding=1)
    tokens = y.flatten(2).transpose(1, 2)
    for place in range(2):
        twice, linear = (weights[f"blocks.{place}.{name}"] for name in ("twice", "told"))
        b_twice, b_told = (biases[f"blocks.{place}.{name}"] for name in ("twice", "told"))
        inner = torch.tanh(F.linear(tokens, twice, b_twice))
        tokens = tokens + torch.tanh(F.linear(inner, twice, b_twice))
        tokens = tokens * (1 + torch.sigmoid(F.linear(told, linear, b_told))[:, None])
    return F.conv2d(tokens.transpose(1, 2).unflatten(2, y.shape[2:]), weights["out"], biases["out"])


def test_terms_are_the_derivatives_of_fp64(made) -> None:
    """Along the residual and along the probe, of each layer, draw and format; an excluded layer is not there."""
    denoiser, components, held_out = made
    layers = {name: layer for name, layer in denoiser.named_modules() if hasattr(layer, "format")}
    stored = [{name: FORMATS[dtype] for name in layers if dtype != "nf4" or "told" in name} for dtype in STORED]
    seen = []
    held_out.errors = lambda batch, shares, noise: (seen.append((batch, shares, noise)), torch.zeros(len(shares)))[1]
    held_out.measure()
    found = estimate(held_out, components, denoiser, dict(denoiser.blocks.named_children()), stored)
    weights = {name: layer.dequantize(torch.float64) for name, layer in layers.items()}
    biases = {name: layer.bias.double() for name, layer in layers.items()}
    inputs = [(b, share, n) for b, shares, noise in seen for share, n in zip(shares, noise, strict=True)]
    assert [terms.layers for terms in found] == [tuple(formats) for formats in stored]
    assert {len(inputs)} == {terms.along.shape[1] for terms in found} and len(inputs) > PHOTOS * DRAWS
    for terms, formats in zip(found, stored, strict=True):
        wanted = torch.zeros(2, *terms.along.shape, dtype=torch.float64)
        for column, (batch, share, noise) in enumerate(inputs):
            x = batch.latents.double() + share.float().double() * noise.double()[None]
            told, target = batch.conditioning.sequence.double(), noise.double()[None] - batch.latents.double()
            probe = draws.normal(noise.shape, SEED, "audit_probe", column).double()
            for row, (name, format) in enumerate(formats.items()):
                change = twin(layers[name], format, torch.float64) - weights[name]
                prediction, moved = torch.func.jvp(
                    lambda weight, name=name, x=x, told=told: forward64(weights | {name: weight}, biases, x, told),
                    (weights[name],), (change,),
                )  # fmt: skip
                wanted[0, row, column] = ((prediction - target) * moved).sum()
                wanted[1, row, column] = (probe * moved).sum()
        for mine, exact in zip((terms.along, terms.probe), wanted, strict=True):
            assert exact.abs().min(1).values.max() > 0
            assert (mine - exact).norm(dim=1).div(exact.norm(dim=1)).max() < 1e-4  # sums of fp32
        assert terms.sizes.tolist() == [noise.numel() for _, _, noise in inputs]


def test_measured_is_the_difference_of_two_dense_models(made) -> None:
    """One layer swapped, and then the model as it was."""
    denoiser, components, held_out = made
    base = predict(held_out, components, "base")
    layer = denoiser.blocks[0].twice
    with swapped(layer, FORMATS["int8"]):
        other = predict(held_out, components, "other")
    assert base.errors != other.errors and predict(held_out, components, "again").errors == base.errors
    effect = measured(base, other)
    layer.load_weight(twin(layer, FORMATS["int8"], torch.float32))
    assert predict(held_out, components, "dense").errors == other.errors
    assert effect.of_loss == pytest.approx(other.loss - base.loss, rel=1e-9)
    moved = [float((a - b).square().mean()) for a, b in zip(base.residuals, other.residuals, strict=True)]
    assert effect.of_prediction == pytest.approx(sum(moved) / len(moved), rel=1e-5)


def test_effects_add_up_and_state_their_band() -> None:
    along, probe = torch.tensor([[1.0, 3.0], [2.0, -2.0]]).double(), torch.tensor([[2.0, 0.0], [1.0, 4.0]]).double()
    terms = Terms(("a", "b"), along, probe, torch.tensor([2.0, 4.0]).double())
    both = terms.effect(["a", "b"])
    assert both.loss.tolist() == [3.0, 0.5] and both.moved.tolist() == [2.5, 4.0]
    assert terms.effect(["b"]).moved.tolist() == [0.5, 4.0] and terms.ranked() == ["b", "a"]
    sized = Terms(("a", "b"), along, torch.tensor([[3.0, 0.0], [0.0, 4.0]]).double(), torch.tensor([1.0, 4.0]).double())
    assert sized.ranked() == ["a", "b"], "a photo counts once, whatever its size"
    spread = 1.96 * 1.25  # two draws, each 1.25 from their mean: their standard error is that
    assert both.band == pytest.approx(spread + 3.25) and Effect(both.loss, both.moved).band == pytest.approx(spread)
    assert math.isinf(Effect(both.loss[:1], both.moved[:1]).band)
    base = Predictions((), (1.0, 2.0), (10.0, 16.0))
    assert both.relative(base) == pytest.approx((3.25 / 13) ** 0.5) and base.loss == 1.5


def test_what_is_not_finite_is_named(made) -> None:
    denoiser, components, held_out = made
    denoiser.out.bias.data.fill_(torch.inf)
    with pytest.raises(NonFiniteError, match="base: predictions are not finite"):
        predict(held_out, components, "base")
    layers = {"into": FORMATS["int8"]}
    with pytest.raises(NonFiniteError, match="the gradient at into is not finite"):
        estimate(held_out, components, denoiser, {}, [layers])
