"""A flat parameter and matrices are views of the adapter's parameters, gradients included."""

from __future__ import annotations

import torch
from torch import nn

from trainer.optim.parameters import ALIGNMENT, flatten, matrices


def drawn() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 5), (2, 3, 3, 3), (300,))]


def test_a_flat_parameter_shares_values_and_gradients_each_from_a_block_of_its_own() -> None:
    parameters, before = drawn(), [parameter.detach().clone() for parameter in drawn()]
    (flat,) = flatten(parameters)
    starts = [0, ALIGNMENT, 2 * ALIGNMENT]
    assert len(flat) == 4 * ALIGNMENT and not flat.grad.any()
    sum(parameter.square().sum() for parameter in parameters).backward()
    for parameter, was, start in zip(parameters, before, starts, strict=True):
        assert torch.equal(parameter, was)
        assert torch.equal(flat.detach()[start : start + was.numel()], was.flatten())
        assert torch.equal(flat.grad[start : start + was.numel()], 2 * was.flatten())
    with torch.no_grad():
        flat.sub_(flat.grad)
    assert all(torch.equal(parameter, -was) for parameter, was in zip(parameters, before, strict=True))


def test_matrices_have_two_dimensions_and_magnitudes_one() -> None:
    parameters = drawn()
    views = matrices(parameters[:2], magnitudes=False) + matrices(parameters[2:], magnitudes=True)
    assert [tuple(view.shape) for view in views] == [(3, 5), (2, 27), (300,)]
    sum(parameter.square().sum() for parameter in parameters).backward()
    for parameter, view in zip(parameters, views, strict=True):
        assert torch.equal(view.grad.flatten(), 2 * parameter.detach().flatten()) and view.data_ptr() == parameter.data_ptr()
