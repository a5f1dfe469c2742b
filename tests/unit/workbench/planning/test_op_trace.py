"""What operators cost: each form of arguments is another question, and memory is counted once, while it is there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from trainer import kernels
from trainer.adapters import Method, Target, inject
from trainer.adapters.kinds import KINDS
from trainer.quantization import FORMATS, FrozenConv2d, FrozenLinear, freeze_layers, storage_of_layers
from trainer.quantization import layers as frozen_layers
from workbench.planning.dry_run import META, without_values
from workbench.planning.op_trace import Remembering, Trace, Work


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def test_what_is_remembered_is_of_the_same_form() -> None:
    """1 is not 1.0, nor a transposed tensor the tensor: twice each, asked and remembered."""
    whole, square = empty(4, dtype=torch.int64), empty(3, 3)
    for _ in range(2):
        with Remembering():
            assert (whole + 1).dtype == torch.int64 and (whole + 1.0).dtype == torch.float32
            assert (square + 1).stride() == (3, 1) and (square.t() + 1).stride() == (1, 3)
            assert (square + 1).dtype == torch.float32 and (square.to(torch.bfloat16) + 1).dtype == torch.bfloat16
            assert square.add_(1) is square


def test_memory_is_counted_once_while_it_is_there() -> None:
    outside, size = empty(1000), 4000
    again = outside.view(10, 100)
    with Trace() as trace:
        assert trace.enter([outside, again]) == size
        made = outside + 1
        row = made.view(10, 100)[0].expand(50, 100)
        assert (trace.alive, trace.peak) == (2 * size, 2 * size), "a view takes none"
        made.mul_(2)
        del made
        assert trace.alive == 2 * size, "the view has it"
        del row
        assert (trace.alive, trace.peak) == (size, 2 * size)
        trace.reset()
        assert (trace.peak, trace.cost.launches) == (size, 0)
        (outside + 1).add_(1)
        assert (trace.alive, trace.peak) == (size, 2 * size)


def test_an_operator_reads_and_writes_what_is_there() -> None:
    """Of a row that was expanded it reads the row; what it changes is written, whether it is given back or not."""
    a, b = empty(64, 32), empty(32, 16)
    row = empty(1, 16).expand(64, 16)
    with Trace() as trace:
        product = a @ b
        assert (trace.cost.launches, trace.cost.total("flops")) == (1, 2 * 64 * 32 * 16)
        assert list(trace.cost.works) == [Work(4 * (64 * 32 + 32 * 16), 4 * 64 * 16, 2 * 64 * 32 * 16, 4)]
        assert (trace.cost.total("read"), trace.cost.total("written")) == (4 * (64 * 32 + 32 * 16), 4 * 64 * 16)
        trace.reset()
        product.add_(row)
        assert (trace.cost.total("read"), trace.cost.total("written")) == (4 * (64 * 16 + 16), 4 * 64 * 16)
        trace.reset()
        torch.empty_like(product).view(-1)
        assert trace.cost.launches == 0, "nothing is computed"


def test_attention_multiplies() -> None:
    """q k^T and p v forward; backward those of dv, dp, dq, dk, and q k^T again, which no fused kernel keeps."""
    q, k, v = (torch.empty(2, 3, rows, 8, device=META, requires_grad=True) for rows in (16, 24, 24))
    product = 2 * (2 * 3) * 16 * 24 * 8
    with without_values(), Trace() as trace:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        assert trace.cost.total("flops") == 2 * product
        out.backward(torch.empty_like(out))
    assert trace.cost.total("flops") == 7 * product and {work.width for work in trace.cost.works if work.flops} == {4}


@pytest.mark.parametrize(
    "multiply",
    [
        lambda y, a, b: torch.addmm(y[0], a[0], b[0]), lambda y, a, b: y[0].addmm_(a[0], b[0], beta=2),
        lambda y, a, b: torch.addmm(y[0], a[0], b[0], out=y[1]), lambda y, a, b: torch.mm(a[0], b[0], out=y[0]),
        lambda y, a, b: y[:1].baddbmm_(a[:1], b[:1]), lambda y, a, b: torch.baddbmm(y[:1], a[:1], b[:1], out=y[1:]),
        lambda y, a, b: torch.bmm(a[:1], b[:1], out=y[:1]),
    ],
)  # fmt: skip
def test_a_product_counts_where_it_is_written_into_a_tensor(multiply: Callable[..., torch.Tensor]) -> None:
    """In place or into `out`, it multiplies as much as one whose result is new."""
    with Trace() as trace:
        multiply(empty(2, 6, 10), empty(2, 6, 8), empty(2, 8, 10))
    assert (trace.cost.launches, trace.cost.total("flops")) == (1, 2 * 6 * 8 * 10)


@pytest.mark.parametrize("chosen", ["torch", "triton"])
@pytest.mark.parametrize("storage", ["fp32", "bf16", "fp8_e4m3", "fp8_e4m3 scaled"])
@pytest.mark.parametrize("adapter", ["lora", "dora"])
@pytest.mark.parametrize("convolution", [False, True], ids=["linear", "convolution"])
def test_every_product_of_an_adapted_layer_is_counted(
    convolution: bool, adapter: str, storage: str, chosen: str, monkeypatch
) -> None:
    """A multiplication and its sum are 2. They are of x W^T and (g G) W, of the adapter's six products (adapters/dora.py),
    and of the three of a DoRA's norm. Two layers share their input, so the second one adds to its gradient in place."""
    if chosen == "triton":
        pytest.importorskip("triton")
    monkeypatch.setattr(frozen_layers, "scaled_matmul_pays", lambda *_: True)  # else such small layers would not
    rank, outputs, rows = 3, (96, 160), 128
    shape, columns = ((2, 16, 8, 8), 16 * 3 * 3) if convolution else ((2, 64, 128), 128)
    layers = [nn.Conv2d(16, n, 3, padding=1, device=META) if convolution else nn.Linear(128, n, device=META) for n in outputs]
    model = nn.ModuleList(layers)
    how = storage_of_layers(format=FORMATS[storage.split()[0]], compute=torch.bfloat16, unquantised=torch.bfloat16)
    x = torch.empty(shape, dtype=torch.bfloat16, device=META, requires_grad=True)
    with without_values():
        freeze_layers(model, how, kernels.planned(chosen))
        for layer in model:
            layer.scaled_matmul = storage.endswith("scaled")
        targets = [Target("net", name, rank, 1.5) for name in ("0", "1")]
        bases = FrozenLinear, FrozenConv2d
        adapted = inject({"net": model}, targets, bases=bases, method=Method(KINDS[adapter]), seed=0)
        adapted.share_inputs("net", [("0", "1")])
        adapted.mark_stale()
        with Trace() as trace:
            adapted.refresh()
            made = [layer(x) for layer in model]
            torch.autograd.backward(made, [torch.empty_like(each) for each in made])
    base = sum(4 * rows * n * columns for n in outputs)
    factors = sum(6 * rows * rank * (n + columns) for n in outputs)
    norms = sum(2 * rank * (n * columns + rank * columns + n * rank) for n in outputs) if adapter == "dora" else 0
    assert trace.cost.total("flops") == base + factors + norms
    by_codes = any("scaled_mm" in name for name in trace.by_name)
    assert by_codes == (storage.endswith("scaled") and chosen == "triton" and not convolution)
