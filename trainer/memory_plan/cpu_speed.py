"""How fast this CPU is, measured in less than a second, for an estimate of a run's time."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from trainer.memory_plan.op_trace import Cost

# A bare operator's time that a launch takes in a step, with what Python and autograd do around it: 25 was measured on the
# pocket SDXL in fp32, where it is most of a step.
AROUND = 20


@dataclass(frozen=True)
class Speed:
    """What a CPU does now, measured in less than a second. flops: a second, in products. moved: bytes a second. launch:
    seconds of an operator of a step that computes next to nothing."""

    flops: float
    moved: float
    launch: float

    def seconds(self, cost: Cost, share: float = 1.0) -> float:
        """An estimate of these operators, with so large a share of their tensors."""
        return cost.launches * self.launch + share * (cost.flops / self.flops + (cost.read + cost.written) / self.moved)


@functools.cache
def speed_of(dtype: torch.dtype) -> Speed:
    """The speed of this process's CPU in products of that dtype, as if nothing else ran: one thread's processor time is
    measured, once in a process, and its products and copies counted for all threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # As a layer computes forward and backward: some CPUs have a fast product in 16 bits for one of them alone.
        x, w = torch.ones(64, 1280, dtype=dtype), torch.ones(1280, 1280, dtype=dtype)
        big, small = torch.ones(2**22), torch.ones(8)
        products, copy, launch = map(
            _fastest, (lambda: torch.nn.functional.linear(x, w) @ w, big.clone, lambda: small + small)
        )
    finally:
        torch.set_num_threads(threads)
    return Speed(4 * x.numel() * len(w) * threads / products, 2 * big.nbytes * threads / copy, AROUND * launch)


def slow_in(dtype: torch.dtype) -> bool:
    """Whether this CPU takes more than twice as long for products of that dtype as in fp32: many have no instructions for
    16 bits."""
    return 2 * speed_of(dtype).flops < speed_of(torch.float32).flops


def _fastest(work: Callable[[], object], span: float = 0.1) -> float:
    """Seconds of this thread's processor time, at least twice: the first one also sets up what it needs."""
    least, total, times = float("inf"), 0.0, 0
    while times < 2 or total < span:
        start = time.thread_time()
        work()
        taken = time.thread_time() - start
        least, total, times = min(least, taken), total + taken, times + 1
    return max(least, 1e-9)
