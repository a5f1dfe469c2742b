"""The mean of several adapters, against dense weights in fp64 and a plain SVD."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scripts import adapter
from trainer.adapters.portable import Factors, Portable, recipe
from trainer.base.errors import UserError
from workbench.adapter_files.opening import open_adapter, published
from workbench.adapters.average import Averaged, average, check_bases, shares_of

NAME = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
CONV = "unet.conv_in"
SIDE = 1280


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def lora(seed: int, rank: int, alpha: float) -> Factors:
    return Factors(recipe(drawn(seed, rank, SIDE)), recipe(0.1 * drawn(seed + 1, SIDE, rank)), alpha)


def dora(seed: int, rank: int, alpha: float, weight: torch.Tensor) -> Factors:
    m = weight.norm(dim=1) * (1 + 0.3 * drawn(seed + 2, SIDE))
    m[:2] *= -1  # which nothing keeps a training from
    return replace(lora(seed, rank, alpha), magnitude=recipe(m))


def averaged(tmp_path: Path, number: int, *layers: Factors, name: str = NAME, **more) -> Averaged:
    path = tmp_path / f"{number}.safetensors"
    path.write_bytes(b"%d" % number)
    return Averaged(path, published("sdxl")[0], Portable({name: layers[0]}), **more)


def dense(factors: Factors, weight: torch.Tensor | None = None) -> torch.Tensor:
    """g (W + s B A) by the definition; without W s B A."""
    added = factors.alpha / factors.rank * factors.b.make().double().flatten(1) @ factors.a.make().double().flatten(1)
    if weight is None:
        return added
    v = weight.double() + added
    if factors.magnitude is None:
        return v
    return factors.magnitude.make().double()[:, None] * v / v.norm(dim=1, keepdim=True)


def written(path: Path) -> Factors:
    return open_adapter(path, family="sdxl").portable.layers[NAME]


@pytest.mark.parametrize("rank", [3, 9])
def test_the_mean_of_loras_is_the_nearest_of_its_rank(tmp_path: Path, rank: int) -> None:
    """By a plain SVD of the dense mean; of a rank that holds it, the mean itself. Scales and ranks of the adapters differ."""
    one, two, shares = lora(0, 4, 2.0), lora(5, 3, 6.0), shares_of([3.0, 1.0], 2)
    given = [
        averaged(tmp_path, at, each, share=share) for at, (each, share) in enumerate(zip((one, two), shares, strict=True))
    ]
    made = average(given, tmp_path / "mean.safetensors", rank)
    wanted = 0.75 * dense(one) + 0.25 * dense(two)
    u, s, vh = torch.linalg.svd(wanted, full_matrices=False)
    found = written(tmp_path / "mean.safetensors")
    nearest = (u[:, :rank] * s[:rank]) @ vh[:rank]
    assert found.rank == min(rank, 7) and found.scaling == 1
    assert (dense(found) - nearest).norm() <= 1e-6 * wanted.norm()
    assert made.loss.change == pytest.approx(float(wanted.norm()), rel=1e-10)
    assert made.loss.error == pytest.approx(float(s[rank:].norm()), rel=1e-6, abs=1e-6 * made.loss.change), (
        "what is told is what is lost"
    )


def test_the_mean_of_doras_is_that_of_their_weights(tmp_path: Path) -> None:
    """Of a rank that holds it, and of a DoRA with a LoRA: direction and magnitude of the mean of the weights they give."""
    weight = drawn(90, SIDE, SIDE)
    one, two, three = dora(0, 4, 2.0, weight), dora(5, 3, 6.0, weight), lora(11, 2, 1.0)
    parts = (one, two, three)
    given = [
        averaged(tmp_path, at, each, share=share) for at, (each, share) in enumerate(zip(parts, (0.5, 0.3, 0.2), strict=True))
    ]
    made = average(given, tmp_path / "mean.safetensors", 9, weight=lambda name: weight)
    mean = 0.5 * dense(one, weight) + 0.3 * dense(two, weight) + 0.2 * dense(three, weight)
    found = written(tmp_path / "mean.safetensors")
    assert (dense(found, weight) - mean).norm() <= 1e-6 * (mean - weight).norm()
    loss = made.loss
    assert loss.error <= 1e-6 * loss.change and loss.change == pytest.approx(float((mean - weight).norm()), rel=1e-10)


def test_a_lower_rank_of_doras_keeps_the_magnitude_of_the_mean_and_is_the_nearest(tmp_path: Path) -> None:
    """No other matrix of that rank makes gm * (W + B A) nearer to the mean: by a plain SVD of what is to be cut."""
    weight, rank = 10 * drawn(90, SIDE, SIDE), 2  # of a change that is small beside it, as a training's is
    one, two = dora(0, 4, 2.0, weight), dora(5, 3, 6.0, weight)
    given = [averaged(tmp_path, at, each, share=0.5) for at, each in enumerate((one, two))]
    made = average(given, tmp_path / "mean.safetensors", rank, weight=lambda name: weight)
    mean = (dense(one, weight) + dense(two, weight)) / 2
    gains = [each.magnitude.make().double() / (weight.double() + dense(each)).norm(dim=1) for each in (one, two)]
    gm = (gains[0] + gains[1])[:, None] / 2
    u, s, vh = torch.linalg.svd(mean - gm * weight, full_matrices=False)
    wanted = (u[:, :rank] * s[:rank]) @ vh[:rank] / gm
    found = written(tmp_path / "mean.safetensors")
    assert (dense(found) - wanted).norm() <= 1e-5 * wanted.norm()
    assert torch.allclose(found.magnitude.make().double(), gm[:, 0].sign() * mean.norm(dim=1), rtol=1e-6)
    left = float((dense(found, weight) - mean).norm())
    assert made.loss.error == pytest.approx(left, rel=1e-6), "what is told is what is lost"
    assert left <= float(s[rank:].norm()), "to scale a row to its magnitude takes it no farther away"


def test_an_adapter_without_a_layer_changes_nothing_there(tmp_path: Path) -> None:
    convolution = Factors(recipe(drawn(0, 2, 4, 3, 3)), recipe(drawn(1, 320, 2, 1, 1)), 2.0)
    given = [averaged(tmp_path, 0, lora(0, 4, 2.0), share=0.5), averaged(tmp_path, 1, convolution, name=CONV, share=0.5)]
    average(given, tmp_path / "mean.safetensors", 4)
    layers = open_adapter(tmp_path / "mean.safetensors", family="sdxl").portable.layers
    assert layers.keys() == {NAME, CONV} and layers[CONV].a.shape == (2, 4, 3, 3)
    for name, factors in ((NAME, lora(0, 4, 2.0)), (CONV, convolution)):
        assert (dense(layers[name]) - dense(factors) / 2).norm() <= 1e-6 * dense(factors).norm()


def test_the_file_says_what_it_is_made_of(tmp_path: Path) -> None:
    given = [averaged(tmp_path, at, lora(at, 2, 2.0), share=share) for at, share in enumerate(shares_of([3, 1], 2))]
    average(given, tmp_path / "mean.safetensors", 4)
    said = json.loads(open_adapter(tmp_path / "mean.safetensors", family="sdxl").portable.metadata["averaged_from"])
    assert [(each["file"], each["weight"]) for each in said] == [("0.safetensors", 0.75), ("1.safetensors", 0.25)]


def refused(given: list[Averaged], out: Path, rank: int = 4, **more) -> str:
    with pytest.raises(UserError) as caught:
        average(given, out, rank, **more)
    assert not out.exists()
    return str(caught.value)


def of_family(each: Averaged, family: str) -> Averaged:
    return replace(each, model=published(family)[0])


def test_unequal_bases_are_refused(tmp_path: Path) -> None:
    """By family, by shape, by what a header says, by the digests of frozen weights that are stored alike."""
    out, one, two = tmp_path / "mean.safetensors", *(averaged(tmp_path, at, lora(at, 2, 2.0), share=0.5) for at in (0, 1))
    assert "of sdxl and of flux" in refused([one, of_family(two, "flux")], out)
    narrow = Factors(recipe(drawn(0, 2, 640)), recipe(drawn(1, SIDE, 2)), 2.0)
    assert "[1280, 1280] and [1280, 640]" in refused([one, averaged(tmp_path, 1, narrow, share=0.5)], out)
    for key in ("ss_base_model_version", "ss_new_sd_model_hash"):
        told = [
            replace(each, portable=replace(each.portable, metadata={key: value})) for each, value in ((one, "a"), (two, "b"))
        ]
        assert f"{key} is 'a' and 'b'" in refused(told, out)
    place = ("unet.conv_in", "weight", "bf16", "native", "BF16")
    other = replace(two, base={place: "b"})
    assert "unet.conv_in.weight has other bytes" in refused([replace(one, base={place: "a"}), other], out)
    # A third one tells of two that nothing in common tells apart.
    assert "other bytes" in refused([one, replace(two, base={place: "a"}), replace(one, base={place: "b"})], out)
    stored_otherwise = replace(two, base={("unet.conv_in", "weight", "fp8_e4m3", "native", "F8_E4M3"): "b"})
    check_bases([replace(one, base={place: "a"}), stored_otherwise])


@pytest.mark.parametrize("out", ["a.safetensors", "mean.txt"])
def test_the_first_file_is_not_taken_for_the_one_to_write(tmp_path: Path, capsys, out: str) -> None:
    """Where OUT is forgotten."""
    (tmp_path / "a.safetensors").write_bytes(b"mine")
    files = [str(tmp_path / name) for name in (out, "b.safetensors", "c.safetensors")]
    assert adapter.main(["average", *files, "--rank", "4"]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / out} {'exists' if out == 'a.safetensors' else 'is no'}" in said and "OUT, which comes first" in said
    assert (tmp_path / "a.safetensors").read_bytes() == b"mine" and len([*tmp_path.iterdir()]) == 1


def test_what_cannot_be_averaged_is_refused(tmp_path: Path) -> None:
    out, one = tmp_path / "mean.safetensors", averaged(tmp_path, 0, lora(0, 2, 2.0))
    assert "at least two" in refused([one], out)
    assert "a rank is at least 1" in refused([one, one], out, rank=0)
    for weights, said in (
        ([1.0], "1 numbers for 2"),
        ([1.0, 0.0], "0 is no weight"),
        ([1.0, float("nan")], "nan is no weight"),
    ):
        with pytest.raises(UserError, match=said):
            shares_of(weights, 2)
    weight = torch.eye(SIDE)
    a_dora = averaged(tmp_path, 1, dora(3, 2, 2.0, weight), share=0.5)
    assert "--base" in refused([one, a_dora], out)
    against = replace(a_dora.portable.layers[NAME], magnitude=recipe(-a_dora.portable.layers[NAME].magnitude.make()))
    opposite = replace(a_dora, portable=Portable({NAME: against}))
    assert "cancel out" in refused([a_dora, opposite], out, weight=lambda name: weight)
    columns = replace(a_dora.portable.layers[NAME], axis="input")
    assert "input axis" in refused(
        [a_dora, replace(a_dora, portable=Portable({NAME: columns}))], out, weight=lambda name: weight
    )
