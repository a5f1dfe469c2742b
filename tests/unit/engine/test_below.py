"""A frozen adapter below equals training over the base that it was merged into, in fp64; off, it is not there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.numerics.test_dora import frozen_conv, frozen_linear
from trainer.adapters import Method, inject
from trainer.adapters.kinds import kind_named
from trainer.adapters.portable import Factors, Portable, recipe
from trainer.adapters.targets import Target
from trainer.base.errors import UserError
from trainer.engine.below import FrozenAdapter
from trainer.quantization import FrozenConv2d, FrozenLinear

SHAPES = {"conv": (6, 4, 3, 3), "first": (24, 6), "second": (5, 24)}
TARGETS = [Target("net", name, 2, 3.0) for name in ("conv", "second")]  # `first` has the frozen adapter alone
CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.conv = frozen_conv(6, 4, (3, 3), (2, 1), (1, 1), True, "fp32", torch.float64, g)
        self.first = frozen_linear(24, 6, True, "fp32", torch.float64, g)
        self.second = frozen_linear(5, 24, False, "fp32", torch.float64, g)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(torch.tanh(self.conv(x)).flatten(2).transpose(1, 2))))


def factors(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Factors:
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(3, *shape[1:], generator=g), scale * torch.randn(shape[0], 3, *[1] * (len(shape) - 2), generator=g)
    return Factors(recipe(a.double()), recipe(b.double()), alpha=1.5)


PORTABLE = Portable({f"net.{name}": factors(shape, seed) for seed, (name, shape) in enumerate(SHAPES.items())})


def merged(net: Net) -> None:
    for name, each in PORTABLE.layers.items():
        layer = net.get_submodule(name.partition(".")[2])
        base = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
        change = each.scaling * (each.b.make().flatten(1) @ each.a.make().flatten(1))
        base.merged_weight = base.dequantize(torch.float32).double() + change.view(base.weight_shape)


def trained(kind: str, below: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(the losses of six steps with momentum, the adapter's weights after them)."""
    net = Net()
    method = Method(kind_named(kind, {"factor": -1, "decompose": "w2"}), False, 0.0)
    adapter = inject({"net": net}, TARGETS, method=method, bases=(FrozenLinear, FrozenConv2d), seed=1)
    for parameter in adapter.named_parameters().values():
        parameter.data = parameter.data.double()
    if below:
        FrozenAdapter(net, PORTABLE, CPU)
    else:
        merged(net)
    adapter.mark_stale()
    g = torch.Generator().manual_seed(2)
    x, y = torch.randn(2, 4, 8, 8, generator=g).double(), torch.randn(2, 32, 5, generator=g).double()
    optimizer, losses = torch.optim.SGD(adapter.named_parameters().values(), lr=0.05, momentum=0.9), []
    for _ in range(6):
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        adapter.mark_stale()
        losses.append(loss.item())
    return losses, adapter.state_dict()


@pytest.mark.parametrize("kind", ["lora", "lokr"])
def test_six_steps_over_it_are_those_over_the_merged_base(kind: str) -> None:
    """Of a Linear and a strided convolution that are trained over it, and a Linear that is not."""
    (losses, ours), (wanted, theirs) = trained(kind, True), trained(kind, False)
    assert losses == pytest.approx(wanted, rel=1e-12) and losses[-1] < losses[0]
    assert ours.keys() == theirs.keys() and not [name for name in ours if "below" in name or "first" in name]
    for name, tensor in ours.items():
        assert (tensor - theirs[name]).abs().max() <= 1e-12 * theirs[name].abs().max(), name


def test_off_a_layer_gives_what_it_gives_alone() -> None:
    net, alone = Net(), Net()
    below = FrozenAdapter(net, PORTABLE, CPU)
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(2)).double()
    assert (net(x) - alone(x)).abs().max() > 0.1
    with below.off():
        assert torch.equal(net(x), alone(x))
    assert (net(x) - alone(x)).abs().max() > 0.1 and not [name for name in net.state_dict() if "below" in name]


def test_of_a_quantised_layer_u_is_added_to_what_it_computes() -> None:
    """In the compute dtype, each matrix rounded once."""
    g = torch.Generator().manual_seed(0)
    layer = frozen_linear(16, 16, True, "fp8_e4m3", torch.bfloat16, g)
    x, before = torch.randn(4, 16, generator=g).bfloat16(), None
    before = layer(x)
    each = factors((16, 16), 5)
    FrozenAdapter(nn.ModuleDict({"q": layer}), Portable({"net.q": each}), CPU)
    a, sb = each.a.make().bfloat16(), (each.b.make() * each.scaling).bfloat16()
    assert torch.equal(layer(x), before + (x @ a.T) @ sb.T)


def test_a_value_that_is_not_finite_is_named() -> None:
    each = factors((5, 24), 3, scale=float("inf"))
    with pytest.raises(UserError, match=r"adapter\.under = 'a': below_sb of net\.second is not finite"):
        FrozenAdapter(Net(), Portable({"net.second": each}), CPU, "a")
