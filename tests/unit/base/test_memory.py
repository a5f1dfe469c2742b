"""Recomputed blocks: the bytes of ordinary ones, from their inputs alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.base.memory import checkpoint_blocks, recomputing


class Block(nn.Module):
    """Takes tensors in each way that the families' blocks do, and gives two. dropout: of what is inside."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second, self.frozen = (nn.Linear(6, 6) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.dropout = nn.Dropout(dropout)
        self.again: list[bool] = []

    def forward(self, x: Tensor, condition: Tensor | None = None, *, rotary: tuple = (), options: dict | None = None):
        self.again.append(recomputing())
        y = self.frozen(self.dropout(torch.nn.functional.gelu(self.first(x))))
        for cos, sin in rotary:
            y = y * cos + y.flip(-1) * sin
        if condition is not None:
            y = y + self.second(condition)
        return (condition if condition is not None else x) * 2, y * (options or {"scale": 1.0})["scale"] + x


def inputs(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(3, 6, generator=generator) for name in ("x", "condition", "cos", "sin", "scale")}


def gradients(
    block: nn.Module, wanted: tuple[str, ...], read: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Tensor | None]:
    """Of the parameters, and of the inputs named. read: what the loss is of the two outputs."""
    given = {name: tensor.requires_grad_(name in wanted) for name, tensor in inputs().items()}
    torch.manual_seed(5)
    outputs = block(
        given["x"], given["condition"], rotary=[(given["cos"], given["sin"])], options={"scale": given["scale"], "name": "a"}
    )
    read(*outputs).backward()
    drawn = {"the next draw": torch.rand(4)}
    return drawn | {n: p.grad for n, p in block.named_parameters()} | {name: given[name].grad for name in given}


def both(one: Tensor, other: Tensor) -> Tensor:
    return (one.sin() * other).sum()


def second(one: Tensor, other: Tensor) -> Tensor:
    return other.square().sum()


def assert_same(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = other[name] is None if value is None else torch.equal(value, other[name])
        assert same, name


@pytest.mark.parametrize(
    "wanted", [(), ("x",), ("x", "condition"), ("cos", "scale"), ("x", "condition", "cos", "sin", "scale")]
)
@pytest.mark.parametrize("read", [both, second])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_recomputed_block_has_the_gradients_of_an_ordinary_one(wanted, read, dropout: float) -> None:
    """Bit for bit, wherever a tensor stands among the arguments, whichever of them need a gradient and whichever output is
    read; and as torch.utils.checkpoint makes them. The generators go on as if it had run once."""
    torch.manual_seed(1)
    plain = Block(dropout)
    theirs, ours = copy.deepcopy(plain), copy.deepcopy(plain)
    forward = theirs.forward
    theirs.forward = lambda *args, **keys: checkpoint(forward, *args, use_reentrant=False, **keys)
    assert checkpoint_blocks({"0": ours}, True) == 1
    expected = gradients(plain, wanted, read)
    assert_same(gradients(ours, wanted, read), expected)
    assert_same(gradients(theirs, wanted, read), expected)
    assert (plain.again, ours.again) == ([False], [False, True])
    assert expected["first.weight"] is not None and (expected["condition"] is not None) == ("condition" in wanted)


def test_gradients_are_added_to_those_of_an_earlier_micro_batch() -> None:
    plain = Block()
    ours = copy.deepcopy(plain)
    checkpoint_blocks({"0": ours}, True)
    for block in (plain, ours):
        for seed in (0, 1):
            block(inputs(seed)["x"])[1].square().sum().backward()
    assert_same({n: p.grad for n, p in ours.named_parameters()}, {n: p.grad for n, p in plain.named_parameters()})
    assert plain.first.weight.grad.any()


def test_nothing_but_its_inputs_is_kept_of_a_recomputed_block() -> None:
    block, x = Block(), inputs()["x"].requires_grad_()
    checkpoint_blocks({"0": block}, True)
    kept = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(x)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr()]


def test_a_frozen_parameter_gets_no_gradient_also_where_it_was_trained_before() -> None:
    block = Block()
    checkpoint_blocks({"0": block}, True)
    block.second.requires_grad_(False)
    given = inputs()
    block(given["x"], given["condition"])[1].sum().backward()
    assert block.first.weight.grad is not None and block.second.weight.grad is None
    for parameter in block.parameters():
        parameter.requires_grad_(False)
    assert not block(given["x"])[1].requires_grad


def test_an_input_that_was_changed_in_place_is_refused() -> None:
    """A second forward of it would give other gradients, and nobody would know."""
    block, x = Block(), inputs()["x"]
    checkpoint_blocks({"0": block}, True)
    loss = block(x)[1].sum()
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_without_a_graph_a_block_runs_once() -> None:
    block, x = Block(), inputs()["x"]
    checkpoint_blocks({"0": block}, True)
    with torch.no_grad():
        block(x)
    assert block.again == [False]


def test_what_fails_in_a_second_forward_leaves_no_trace() -> None:
    """What ran out of memory there is tried again by the caller, or told."""
    block, x = Block(), inputs()["x"]
    checkpoint_blocks({"0": block}, True)
    loss = block(x)[1].sum()
    block.frozen.forward = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        loss.backward()
    assert not recomputing()


@pytest.mark.parametrize("readers", range(1, 5))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", ["outside", "with a block"])
def test_an_input_that_is_read_elsewhere_too_has_its_gradient_summed_in_the_same_order(readers: int, dtype, shared) -> None:
    """As a U-Net reads again later what a block was given. The sum of the same numbers in another order has other bits."""

    class Read(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return sum((x * (1 + 0.37 * place) for place in range(readers)), torch.zeros((), dtype=dtype))

    def made(recomputed: bool) -> Tensor:
        block = Read()
        checkpoint_blocks({"0": block}, recomputed, skipped=("*",) if shared == "outside" else ())
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()
        given = x * 1.7
        before = given.sin()
        once = block(given).tanh()
        (once + (given.exp() if shared == "outside" else block(given)) + before * given).sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(made(True), made(False))


def test_an_output_that_is_an_input_keeps_its_gradient() -> None:
    class Same(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x * 2

    block, x = Same(), inputs()["x"].requires_grad_()
    checkpoint_blocks({"0": block}, True)
    one, other = block(x * 1.0)
    (one * 3 + other).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 5.0))


@pytest.mark.parametrize("there", [False, True])
def test_two_parameters_that_are_added_have_gradients_of_their_own(there: bool) -> None:
    """Autograd gives both the same tensor. there: a step of ours makes every `.grad` before."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p, self.q = (nn.Parameter(torch.zeros(3)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.p + self.q

    block = Sum()
    checkpoint_blocks({"0": block}, True)
    for parameter in block.parameters():
        parameter.grad = torch.zeros(3) if there else None
    for _ in range(2):
        block(torch.ones(3)).sum().backward()
    for parameter in block.parameters():
        assert torch.equal(parameter.grad, torch.full((3,), 2.0))


class Pair(NamedTuple):
    one: Tensor


def test_what_would_lose_a_gradient_without_a_word_is_refused() -> None:
    class Odd(nn.Module):
        def __init__(self, output) -> None:
            super().__init__()
            self.scale, self.output = nn.Parameter(torch.ones(())), output

        def forward(self, x):
            return self.output(self.scale * (x if isinstance(x, Tensor) else x.one))

    x = inputs()["x"]
    listing, plain = Odd(lambda y: [y]), Odd(lambda y: y)
    checkpoint_blocks({"0": listing, "1": plain}, True)
    with pytest.raises(TypeError, match="returns a tensor or a tuple of tensors, not a list"):
        listing(x)
    with pytest.raises(TypeError, match="takes tensors in tuples, lists and dictionaries, not in a Pair"):
        plain(Pair(x))
