"""What operators cost: each form of arguments is another question, and memory is counted once, while it is there."""

from __future__ import annotations

import torch

from trainer.memory_plan.dry_run import META, without_values
from trainer.memory_plan.op_trace import Remembering, Trace, Work


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
        assert (trace.cost.launches, trace.cost.flops) == (1, 2 * 64 * 32 * 16)
        assert list(trace.cost.works) == [Work(4 * (64 * 32 + 32 * 16), 4 * 64 * 16, 2 * 64 * 32 * 16, 4)]
        assert (trace.cost.read, trace.cost.written) == (4 * (64 * 32 + 32 * 16), 4 * 64 * 16)
        trace.reset()
        product.add_(row)
        assert (trace.cost.read, trace.cost.written) == (4 * (64 * 16 + 16), 4 * 64 * 16)
        trace.reset()
        torch.empty_like(product).view(-1)
        assert trace.cost.launches == 0, "nothing is computed"


def test_attention_multiplies() -> None:
    """q k^T and p v forward; backward those of dv, dp, dq, dk, and q k^T again, which no fused kernel keeps."""
    q, k, v = (torch.empty(2, 3, rows, 8, device=META, requires_grad=True) for rows in (16, 24, 24))
    product = 2 * (2 * 3) * 16 * 24 * 8
    with without_values(), Trace() as trace:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        assert trace.cost.flops == 2 * product
        out.backward(torch.empty_like(out))
    assert trace.cost.flops == 7 * product and {work.width for work in trace.cost.works if work.flops} == {4}
