"""How long a step takes, estimated before it is made: a roofline over the operators of its trace, as a band.

For an operator a device takes as long as its products at their rate or its bytes at the memory's, whichever is longer, and a
launch; the host as long as Python, autograd and the driver need to ask for it. On a card both work at once: at best a step
takes the longer of the two, at worst their sum. A CPU is both, one after the other, and is probed, as every host is. Of a
card its maker's data sheet says the rates; what a step reaches of them was measured on one H100
(docs/benchmarks/GPU-2026-11-22.json).
"""

import functools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from math import inf

import torch

from workbench.planning.op_trace import Cost

# From the best to the worst end of a band.
Range = tuple[float, float]
SINGLE = 4  # bytes of a number in fp32

# What a step reaches of a card's data sheet. Products: one large one had 0.74 of it on the H100, layers of SDXL with their
# decoding up to 0.75, of Flux 0.57 to 0.68; flash attention has 0.35 there (arXiv 2407.08608), and is a quarter of Flux's
# FLOPs at 1024 px, which makes 0.45 of all. Memory: a copy had 0.90, our decoding of large weights 0.6 to 0.82; but a weight
# that was just decoded may still lie in a cache.
CARD_PRODUCTS: Range = (0.80, 0.45)
CARD_MEMORY: Range = (1.0, 0.60)
# Seconds of a card's own for a launch: the smallest kernels took 5 us in a graph.
CARD_LAUNCH: Range = (0.0, 5e-6)
# What a CPU reaches of its probe, whose product and copy are convenient ones.
CPU_PRODUCTS: Range = (1.0, 0.4)
CPU_MEMORY: Range = (1.0, 0.4)

# What follows is in bare operators, as the probe times one: a host that is twice as slow takes twice as long for all.
# Of the host, for an operator of a step: benchmarks/host_time.py has 16 (Flux) to 37 us (SDXL) on a core on which a bare one
# takes 1.0 to 1.2. Compiled blocks or graphs ask for fewer operators, and take less time for each: a range of their own.
ASKING: Range = (15, 37)
# Besides, of a CPU, for the operator itself: steps of tiny models, which compute next to nothing, take 22 to 47 in all.
CPU_LAUNCH: Range = (5, 10)
# Bytes a second from the host's pinned memory to a card: of PCIe 5.0 and of PCIe 4.0, 16 lanes. Not measured here: what is
# usually told.
BUS: Range = (50e9, 25e9)
# Seconds of the driver for a launch on a card. Not measured here: what is usually told.
DRIVER: Range = (2e-6, 8e-6)
# Of the time of eager steps what compiled blocks took where they saved least. Of the card's: Flux on an H200 at 1024 px, 0.64
# at 512 px. Of the host's: SDXL's DoRA, 0.51 to 0.67 elsewhere (benchmarks/host_time.py). SDXL was not measured on a card.
COMPILED_CARD, COMPILED_HOST = 0.70, 0.69
# Seconds to compile for one size of micro-batch: Flux beside an H200 (docs/benchmarks/GPU-2026-11-26.json), the pocket Flux
# on a core of a CPU (docs/benchmarks/starts-compiled-CPU-2026-11-26.json).
COMPILING: Range = (43, 86)


@dataclass(frozen=True)
class Card:
    """A card's data sheet: dense products, without sparsity, in TFLOP/s, summed in fp32, and memory in GB/s. bits16: of bf16
    and fp16. single: of fp32 proper, not of TF32. bits8: of float8; None where there are no such products."""

    bits16: float
    single: float
    bits8: float | None
    memory: float


# By the name that CUDA gives. From NVIDIA's data sheets (H100, H200, A100, L40S, L4, T4, V100, RTX 6000 Ada, HGX B200) and
# architecture papers (GA102, Ada, RTX Blackwell), whose products are tensor cores x 128 FLOPs x boost clock; of the RTX 3060,
# 4060 and 4070 by the same rule from their cores and clocks; of the A10G, which has no sheet, from those who rent it out.
_SHEETS = json.loads((resources.files("workbench.planning") / "cards.json").read_text(encoding="utf-8"))
CARDS = {name: Card(**sheet) for name, sheet in _SHEETS.items()}


@dataclass(frozen=True)
class Speed:
    """What a machine does at one end of its band. products: FLOPs a second, by the bytes of an element of what is multiplied;
    the entry of 4 stands for missing ones. memory: bytes a second. launch: seconds of the device for an operator, besides.
    host: seconds to ask for one. bus: bytes a second from the host's memory to the device's."""

    products: Mapping[int, float]
    memory: float
    launch: float
    host: float
    bus: float = inf

    def device_seconds(self, cost: Cost, share: float) -> float:
        """The time of all operators, one after another, with so large a share of their tensors."""
        total = 0.0
        for work, count in cost.works.items():
            rate = self.products.get(work.width, self.products[SINGLE])
            total += count * (self.launch + share * max(work.flops / rate, (work.read + work.written) / self.memory))
        return total

    def host_seconds(self, cost: Cost) -> float:
        """The time to ask for all of them, which does not depend on their size."""
        return cost.launches * self.host


@dataclass(frozen=True)
class Machine:
    """What a step is made on, at both ends of its band. card: whether host and device are two that work at once."""

    best: Speed
    worst: Speed
    card: bool

    def taking(self, device: float, host: float) -> "Machine":
        """One that takes so large a part of this one's time on the device, and on the host."""

        def slowed(speed: Speed) -> Speed:
            products = {width: rate / device for width, rate in speed.products.items()}
            return Speed(products, speed.memory / device, speed.launch * device, speed.host * host, speed.bus)

        return Machine(slowed(self.best), slowed(self.worst), self.card)

    def seconds(self, cost: Cost, share: float = 1.0, copied: int = 0) -> Range:
        """The least and the most that these operators take, with so large a share of their tensors (in bytes and FLOPs).
        copied: bytes of streamed blocks, which go over the bus while something computes."""
        device, host = self.best.device_seconds(cost, share), self.best.host_seconds(cost)
        at_most = self.worst.device_seconds(cost, share) + self.worst.host_seconds(cost)
        at_least = max(device, host) if self.card else device + host
        return max(at_least, copied / self.best.bus), max(at_most, copied / self.worst.bus)


@dataclass(frozen=True)
class Probe:
    """What a CPU does, as if nothing else ran. products, memory: of Speed, of all threads. operator: `bare_operator`."""

    products: Mapping[int, float]
    memory: float
    operator: float

    @staticmethod
    def of(dtype: torch.dtype) -> "Probe":
        """This process's CPU, with products in that dtype and in fp32: one thread's, once in a process, counted for all."""
        return Probe({each.itemsize: _products(each) for each in (dtype, torch.float32)}, _memory(), bare_operator())


def on_cpu(probe: Probe) -> Machine:
    """The machine that a CPU is."""
    speeds = []
    for reached, moved, launch, asking in zip(CPU_PRODUCTS, CPU_MEMORY, CPU_LAUNCH, ASKING, strict=True):
        products = {width: reached * rate for width, rate in probe.products.items()}
        speeds.append(Speed(products, moved * probe.memory, launch * probe.operator, asking * probe.operator))
    return Machine(*speeds, card=False)


def on_card(name: str, operator: float) -> Machine | None:
    """A card with its host; None for a name that is not in the table. operator: seconds of a bare one on that host."""
    card = CARDS.get(name)
    if card is None:
        return None
    tera = {width: rate for width, rate in ((SINGLE, card.single), (2, card.bits16), (1, card.bits8)) if rate is not None}
    speeds, ends = [], zip(CARD_PRODUCTS, CARD_MEMORY, CARD_LAUNCH, ASKING, DRIVER, BUS, strict=True)
    for reached, moved, launch, asking, driver, bus in ends:
        products = {width: reached * rate * 1e12 for width, rate in tera.items()}
        speeds.append(Speed(products, moved * card.memory * 1e9, launch, asking * operator + driver, bus))
    return Machine(*speeds, card=True)


def slow_in(dtype: torch.dtype) -> bool:
    """Whether this CPU takes more than twice as long for products of that dtype as in fp32: many lack instructions for it."""
    return 2 * _products(dtype) < _products(torch.float32)


@functools.cache
def bare_operator() -> float:
    """Seconds of this process's host for an operator that computes next to nothing, outside of autograd."""
    small = torch.ones(8)
    return _fastest(lambda: [small + small for _ in range(100)]) / 100  # one alone takes no longer than a look at the clock


@functools.cache
def _products(dtype: torch.dtype) -> float:
    # As a layer computes forward and backward: some CPUs have a fast product in 16 bits for one of them alone.
    x, w = torch.ones(64, 1280, dtype=dtype), torch.ones(1280, 1280, dtype=dtype)
    return torch.get_num_threads() * 4 * x.numel() * len(w) / _fastest(lambda: torch.nn.functional.linear(x, w) @ w)


@functools.cache
def _memory() -> float:
    big = torch.ones(2**22)
    return torch.get_num_threads() * 2 * big.nbytes / _fastest(big.clone)


def _fastest(work: Callable[[], object], span: float = 0.1) -> float:
    """Seconds of one thread's processor time, at least twice: the first one also sets up what it needs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        least, total, times = float("inf"), 0.0, 0
        while times < 2 or total < span:
            start = time.thread_time()
            work()
            taken = time.thread_time() - start
            least, total, times = min(least, taken), total + taken, times + 1
    finally:
        torch.set_num_threads(threads)
    return max(least, 1e-9)
