"""`vae.encode = "fast"`: what the latents of the pocket models' VAEs lose in TF32, whose rounding is done here by hand."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from diffusers import AutoencoderKL
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import ROOT, Workbench
from tests.integration.test_caches import encoded
from tests.numerics.test_vae_tiles import photo
from trainer import config as configs
from trainer.base.errors import UserError
from trainer.base.types import Occurrence
from trainer.models.shared import vae
from trainer.plan.run_plan import make_plan, open_source, resolve
from trainer.runtime import precision

ATEN = torch.ops.aten
# (operator, the places of the tensors that it multiplies)
PRODUCTS = {
    ATEN.convolution.default: (0, 1), ATEN.mm.default: (0, 1), ATEN.addmm.default: (1, 2), ATEN.bmm.default: (0, 1),
    ATEN._scaled_dot_product_flash_attention_for_cpu.default: (0, 1, 2),
}  # fmt: skip
TF32, BF16 = 13, 16  # bits of an fp32 number that are left out


class Rounds(TorchDispatchMode):
    """Inside, fp32 tensors are rounded before they are multiplied: to nearest, as torch's documentation has it of TF32
    (pytorch#49625), or cut off."""

    def __init__(self, bits: int = TF32, *, cut: bool = False) -> None:
        super().__init__()
        self.bits, self.half, self.multiplied = bits, 0 if cut else 1 << bits - 1, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        places = PRODUCTS.get(func, ())
        self.multiplied += bool(places)
        args = [self.rounded(each) if place in places else each for place, each in enumerate(args)]
        return func(*args, **kwargs or {})

    def rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        numbers = tensor.contiguous().view(torch.int32) + self.half
        return (numbers >> self.bits << self.bits).view(torch.float32).view(tensor.shape)


def pocket(family: str) -> AutoencoderKL:
    return AutoencoderKL.from_pretrained(ROOT / "examples" / f"pocket_{family}" / "vae")


@torch.no_grad()
def off(module: AutoencoderKL, rounds, dtype: torch.dtype = torch.float32, side: int = 128) -> float:
    """Of a photo: how far latents are from those in fp32, in the norm."""
    pixels = photo(side).float()
    exact = vae.posterior_mean(module, pixels)
    with rounds as mode:
        given = vae.posterior_mean(module.to(dtype), pixels.to(dtype))
    convolutions = sum(isinstance(layer, nn.Conv2d) for layer in (*module.encoder.modules(), module.quant_conv))
    assert mode is None or mode.multiplied >= convolutions
    return float((given - exact).norm() / exact.norm())


@pytest.mark.parametrize("family", ["sdxl", "flux"])  # FLUX.2's is that of Flux
def test_tf32_keeps_to_what_is_allowed_and_bf16_does_not(family: str) -> None:
    nearest, cut = (off(pocket(family), Rounds(cut=cut)) for cut in (False, True))
    bf16 = off(pocket(family), nullcontext(), torch.bfloat16)
    print(f"nearest {nearest:.1e}, cut off {cut:.1e}, bf16 {bf16:.1e}")
    assert nearest < precision.FAST / 2 and bf16 > 3 * precision.FAST
    assert cut > precision.FAST, "so a card that cut off would be refused"


@pytest.mark.proof
def test_random_weights_of_the_published_size_are_at_the_limit() -> None:
    torch.manual_seed(0)
    config = AutoencoderKL.load_config(ROOT / "trainer" / "models" / "published" / "sdxl" / "vae")
    assert precision.FAST / 2 < (found := off(AutoencoderKL.from_config(config), Rounds(), side=256)) < 2 * precision.FAST
    print(f"nearest {found:.2e}")


def start(bench: Workbench, monkeypatch, encode: str, rounds=Rounds, **more):
    """(what a start of the pocket SDXL says of its encodings, what reads them), were this CPU a card that rounds so."""
    monkeypatch.setattr(precision, "check_encoding", lambda *_: None)
    monkeypatch.setattr(precision, "in_tf32", rounds)
    return encoded(bench, ROOT / "examples" / "pocket_sdxl", data__resolution=128, vae__encode=encode, **more)


@pytest.mark.slow
def test_entries_of_one_are_never_taken_for_the_other(bench: Workbench, monkeypatch) -> None:
    (made,), exact = start(bench, monkeypatch, "exact")
    first, again = (start(bench, monkeypatch, "fast") for _ in range(2))
    counts = made.removeprefix("cache: ").partition(" and ")[0]
    assert [line.partition(" and ")[0] for line in (*first[0], *again[0])] == [f"cache: {counts}", "cache: 0 latents"]
    (photo_exact,), (photo_fast,) = ([reader[(Occurrence(0, "0/01.jpg", 0),)].latents] for reader in (exact, first[1]))
    assert 0 < (photo_fast - photo_exact).norm() / photo_exact.norm() < precision.FAST
    assert first[1].latent_fingerprint == f"{exact.latent_fingerprint}:tf32"
    (kept,), _ = start(bench, monkeypatch, "exact")
    assert kept.startswith("cache: 0 latents"), "those without the key are found as ever"


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["disk", "none"])
def test_the_first_photo_is_measured_and_refused_where_it_loses_more(bench: Workbench, monkeypatch, capsys, cache) -> None:
    given = {"encode": "fast", "data__cache": cache}
    with pytest.raises(UserError, match=r"latents are off by \d.\de-03, and at most 1e-03 is allowed; leave it out"):
        _, reader = start(bench, monkeypatch, rounds=partial(Rounds, BF16), **given)
        reader[(Occurrence(0, "0/01.jpg", 0),)]


def test_refused_where_it_would_change_nothing(bench: Workbench) -> None:
    with pytest.raises(UserError, match="needs the TF32 of an Ampere or newer GPU, and this run is on the CPU; leave it out"):
        precision.check_encoding("fast", torch.device("cpu"))
    given = bench.tree("sdxl", vae__encode="fast", model__components={"vae": {"compute": "bf16"}}, run__device="cpu")
    config = configs.parse(given)
    source = open_source(config)
    with pytest.raises(UserError, match="model.components.vae has compute = 'bf16'; leave it out, or set compute = 'fp32'"):
        make_plan(resolve(config, source), source, processes=1)


def test_a_card_has_tf32_in_the_block_alone() -> None:
    flags = lambda: (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32)  # noqa: E731
    precision.prepare_device(torch.device("cpu"), set())
    with pytest.raises(ValueError, match="x"), precision.in_tf32():
        assert flags() == (True, True)
        raise ValueError("x")
    assert flags() == (False, False)
