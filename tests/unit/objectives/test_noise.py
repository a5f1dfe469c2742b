"""Every noise against its source's formula in fp64, from the same keyed draws."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from trainer.base import draws
from trainer.objectives import Noise

KEY = (0, "0/a.jpg", 1)


def enlarged(coarse: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """[C, h, w] -> [C, height, width] fp64: bilinear, by the half-pixel rule, a matrix for each side."""

    def along(size: int, wide: int) -> torch.Tensor:
        matrix = torch.zeros(wide, size, dtype=torch.float64)
        for i in range(wide):
            at = max((Fraction(2 * i + 1, 2) * size / wide) - Fraction(1, 2), Fraction(0))
            first = int(at)
            matrix[i, min(first, size - 1)] += float(1 - (at - first))
            matrix[i, min(first + 1, size - 1)] += float(at - first)
        return matrix

    return along(coarse.shape[1], height) @ coarse.double() @ along(coarse.shape[2], width).T


@pytest.mark.parametrize("shape", [(4, 8, 12), (16, 5, 7), (4, 64, 64)])
@pytest.mark.parametrize(("iterations", "discount"), [(1, 0.3), (6, 0.3), (10, 0.9)])
def test_multi_resolution_noise(shape: tuple[int, int, int], iterations: int, discount: float) -> None:
    """sd-scripts' pyramid_noise_like, with one ratio for each level, of one sample."""
    ours = Noise(multires_noise_iterations=iterations, multires_noise_discount=discount).draw(shape, 7, KEY)
    expected = draws.normal(shape, 7, "noise", *KEY).double()
    ratios = draws.uniforms(iterations, 7, "noise_ratios", *KEY)
    levels = 0
    for i in range(iterations):
        r = ratios[i] * 2 + 2
        h, w = max(1, int(shape[1] / (r**i))), max(1, int(shape[2] / (r**i)))
        level = draws.normal((1, shape[0], h, w), 7, "noise_level", *KEY, i)[0]
        expected = expected + enlarged(level, shape[1], shape[2]) * discount**i
        levels += 1
        if w == 1 or h == 1:
            break
    assert levels == 1 or levels < 10
    mean = expected.mean()
    expected = expected / ((expected - mean).square().sum() / (expected.numel() - 1)).sqrt()
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)
    assert ours.std().item() == pytest.approx(1, rel=1e-5)


def test_noise_offset() -> None:
    """Guttenberg 2023: noise + offset * z, z one for each channel and sample."""
    ours = Noise(noise_offset=0.1).draw((4, 6, 5), 7, KEY).double()
    plain, z = draws.normal((4, 6, 5), 7, "noise", *KEY).double(), draws.normal((4, 1, 1), 7, "noise_offset", *KEY).double()
    torch.testing.assert_close(ours, plain + 0.1 * z, rtol=1e-6, atol=1e-6)
    assert Noise(noise_offset=0.1).perturbation((4, 6, 5), 7, [KEY]) is None


def test_the_variance_of_the_offset_is_its_square() -> None:
    """Of channel means over many samples: offset^2 beside 1 / (h w). Five standard errors of a variance, sqrt(2 / n)."""
    count = 3000
    means = torch.stack([Noise(noise_offset=0.5).draw((1, 4, 4), 1, (0, f"{i}.jpg", 0)).mean() for i in range(count)])
    assert means.var().item() == pytest.approx(0.25 + 1 / 16, rel=5 * math.sqrt(2 / count))


def test_input_perturbation_is_apart_from_the_noise() -> None:
    """Ning et al. 2023, arXiv 2301.11706, algorithm 1: the input has noise + gamma xi, the target has noise."""
    perturbed, keys = Noise(input_perturbation=0.1), [KEY, (0, "0/b.jpg", 0)]
    assert torch.equal(perturbed.draw((4, 6, 5), 7, KEY), draws.normal((4, 6, 5), 7, "noise", *KEY))
    more = perturbed.perturbation((4, 6, 5), 7, keys)
    for ours, key in zip(more, keys, strict=True):
        xi = draws.normal((4, 6, 5), 7, "input_perturbation", *key)
        torch.testing.assert_close(ours.double(), 0.1 * xi.double(), rtol=1e-6, atol=1e-7)
        assert abs(torch.corrcoef(torch.stack([ours.flatten(), perturbed.draw((4, 6, 5), 7, key).flatten()]))[0, 1]) < 0.5


def test_without_a_choice_it_is_the_plain_noise() -> None:
    assert torch.equal(Noise().draw((4, 6, 5), 7, KEY), draws.normal((4, 6, 5), 7, "noise", *KEY))
    assert Noise().perturbation((4, 6, 5), 7, [KEY]) is None and Noise().describe() == ""


def test_draws_of_one_sample_are_its_own() -> None:
    """Neither the batch nor another sample's key enters."""
    everything = Noise(0.0, 6, 0.4, 0.1)
    again = [everything.draw((4, 8, 8), 7, KEY) for _ in range(2)]
    assert torch.equal(*again)
    keys = [(0, f"0/{i}.jpg", 0) for i in range(5)]
    together = everything.perturbation((4, 8, 8), 7, keys)
    assert torch.equal(together[3:4], everything.perturbation((4, 8, 8), 7, keys[3:4]))
    assert not torch.equal(everything.draw((4, 8, 8), 7, keys[0]), everything.draw((4, 8, 8), 7, keys[1]))
