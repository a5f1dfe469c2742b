"""Estimates the time of a step before it runs: a roofline over the operators of its trace, as a band.

The device's time of an operator is the longer of its FLOPs at the product rate and its bytes at the memory rate, plus a
launch. The host's time is that of Python, autograd and the driver. A card works beside its host: a step takes at best the
longer of both times, at worst their sum. A CPU is device and host one after the other, and is probed, as every host is. A
card's rates are its data sheet's; the share of them that a step reaches was measured on one H100
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

Range = tuple[float, float]  # the best and the worst end of a band
SINGLE = 4  # bytes of a number in fp32

# Shares of a card's data sheet that a step reaches. Products: one large one had 0.74 on the H100, layers of SDXL with their
# decoding up to 0.75, of Flux 0.57 to 0.68; flash attention has 0.35 there (arXiv 2407.08608), and is a quarter of Flux's
# FLOPs at 1024 px, which makes 0.45 in all. Memory: a copy had 0.90, our decoding of large weights 0.6 to 0.82; but a weight
# that was just decoded may still be in a cache.
CARD_PRODUCTS: Range = (0.80, 0.45)
CARD_MEMORY: Range = (1.0, 0.60)
# Seconds of the card for a launch: the smallest kernels took 5 us in a graph.
CARD_LAUNCH: Range = (0.0, 5e-6)
# Shares of a CPU's probe, whose product and copy have convenient sizes.
CPU_PRODUCTS: Range = (1.0, 0.4)
CPU_MEMORY: Range = (1.0, 0.4)

# The host's time for an operator of a step, in bare operators as the probe times one: a host that is twice as slow takes
# twice as long for all. benchmarks/host_time.py has 16 (Flux) to 37 us (SDXL) on a core on which a bare one takes 1.0 to 1.2.
# Compiled blocks and graphs launch fewer operators, and need less time for each: they have their own range.
ASKING: Range = (15, 37)
# A CPU's additional time for the operator itself, in bare operators: steps of tiny models take 22 to 47 in all.
CPU_LAUNCH: Range = (5, 10)
# Bytes a second from the host's pinned memory to a card: PCIe 5.0 and 4.0, 16 lanes. Common figures, not measured here.
BUS: Range = (50e9, 25e9)
# Seconds of the driver for a launch on a card. Common figures, not measured here.
DRIVER: Range = (2e-6, 8e-6)
# Time of compiled blocks, as a share of eager ones, where they saved least. The card's: Flux on an H200 at 1024 px (0.64 at
# 512 px). The host's: SDXL's DoRA (0.51 to 0.67 elsewhere, benchmarks/host_time.py). SDXL was not measured on a card.
COMPILED_CARD, COMPILED_HOST = 0.70, 0.69
# Seconds to compile for one size of micro-batch: Flux beside an H200 (docs/benchmarks/GPU-2026-11-26.json), the pocket Flux
# on a core of a CPU (docs/benchmarks/starts-compiled-CPU-2026-11-26.json).
COMPILING: Range = (43, 86)


@dataclass(frozen=True)
class Card:
    """A card's data sheet: dense products (no sparsity, fp32 sums) in TFLOP/s, and memory in GB/s. bits16: of bf16 and fp16.
    single: of fp32, not of TF32. bits8: of float8; None: not supported."""

    bits16: float
    single: float
    bits8: float | None
    memory: float


# By the name that CUDA reports. From NVIDIA's data sheets (H100, H200, A100, L40S, L4, T4, V100, RTX 6000 Ada, HGX B200) and
# architecture papers (GA102, Ada, RTX Blackwell), whose products are tensor cores x 128 FLOPs x boost clock; the RTX 3060,
# 4060 and 4070 by the same rule from their cores and clocks; the A10G, which has no sheet, from cloud providers' pages.
_SHEETS = json.loads((resources.files("workbench.planning") / "cards.json").read_text(encoding="utf-8"))
CARDS = {name: Card(**sheet) for name, sheet in _SHEETS.items()}


@dataclass(frozen=True)
class Speed:
    """The rates of a machine at one end of its band. products: FLOPs a second, by bytes of an element; the entry of 4 stands
    for missing ones. memory: bytes a second. launch: seconds of the device added to each operator. host: seconds of the host
    for each. bus: bytes a second from host to device memory."""

    products: Mapping[int, float]
    memory: float
    launch: float
    host: float
    bus: float = inf

    def device_seconds(self, cost: Cost, share: float) -> float:
        """The time of all operators, one after another. share: scales their tensors."""
        total = 0.0
        for work, count in cost.works.items():
            rate = self.products.get(work.width, self.products[SINGLE])
            total += count * (self.launch + share * max(work.flops / rate, (work.read + work.written) / self.memory))
        return total

    def host_seconds(self, cost: Cost) -> float:
        """The time to launch all operators, independent of their size."""
        return cost.launches * self.host


@dataclass(frozen=True)
class Machine:
    """A machine's speeds at both ends of its band. card: whether host and device work at the same time."""

    best: Speed
    worst: Speed
    card: bool

    def scaled(self, device: float, host: float) -> "Machine":
        """A machine whose device and host need these multiples of this one's time."""

        def scale(speed: Speed) -> Speed:
            products = {width: rate / device for width, rate in speed.products.items()}
            return Speed(products, speed.memory / device, speed.launch * device, speed.host * host, speed.bus)

        return Machine(scale(self.best), scale(self.worst), self.card)

    def seconds(self, cost: Cost, share: float = 1.0, copied: int = 0) -> Range:
        """The (least, most) time of these operators. share: scales their tensors (bytes and FLOPs). copied: bytes of streamed
        blocks, which go over the bus during computation."""
        device, host = self.best.device_seconds(cost, share), self.best.host_seconds(cost)
        at_most = self.worst.device_seconds(cost, share) + self.worst.host_seconds(cost)
        at_least = max(device, host) if self.card else device + host
        return max(at_least, copied / self.best.bus), max(at_most, copied / self.worst.bus)


@dataclass(frozen=True)
class Probe:
    """A CPU's rates without other load. products, memory: as of Speed, of all threads. operator: `bare_operator`."""

    products: Mapping[int, float]
    memory: float
    operator: float

    @staticmethod
    def of(dtype: torch.dtype) -> "Probe":
        """This process's CPU, with products in that dtype and in fp32: one thread, timed once, multiplied by all threads."""
        return Probe({d.itemsize: _products(d) for d in (dtype, torch.float32)}, _memory(), bare_operator())


def on_cpu(probe: Probe) -> Machine:
    """A CPU, which is host and device."""
    speeds = []
    for product, memory, launch, asking in zip(CPU_PRODUCTS, CPU_MEMORY, CPU_LAUNCH, ASKING, strict=True):
        products = {width: product * rate for width, rate in probe.products.items()}
        speeds.append(Speed(products, memory * probe.memory, launch * probe.operator, asking * probe.operator))
    return Machine(*speeds, card=False)


def on_card(name: str, operator: float) -> Machine | None:
    """A card with its host; None for a name that is not in the table. operator: `bare_operator` of that host."""
    card = CARDS.get(name)
    if card is None:
        return None
    tera = {width: rate for width, rate in ((SINGLE, card.single), (2, card.bits16), (1, card.bits8)) if rate is not None}
    speeds, ends = [], zip(CARD_PRODUCTS, CARD_MEMORY, CARD_LAUNCH, ASKING, DRIVER, BUS, strict=True)
    for product, memory, launch, asking, driver, bus in ends:
        products = {width: product * rate * 1e12 for width, rate in tera.items()}
        speeds.append(Speed(products, memory * card.memory * 1e9, launch, asking * operator + driver, bus))
    return Machine(*speeds, card=True)


def slow_in(dtype: torch.dtype) -> bool:
    """Whether products in that dtype take this CPU more than twice as long as in fp32: many lack instructions for it."""
    return 2 * _products(dtype) < _products(torch.float32)


@functools.cache
def bare_operator() -> float:
    """Seconds of this process's host for an operator that computes next to nothing, outside of autograd."""
    small = torch.ones(8)
    return _fastest(lambda: [small + small for _ in range(100)]) / 100  # a single one is as short as reading the clock


@functools.cache
def _products(dtype: torch.dtype) -> float:
    # Forward and backward of a layer: some CPUs have a fast 16-bit product for only one of them.
    x, w = torch.ones(64, 1280, dtype=dtype), torch.ones(1280, 1280, dtype=dtype)
    return torch.get_num_threads() * 4 * x.numel() * len(w) / _fastest(lambda: torch.nn.functional.linear(x, w) @ w)


@functools.cache
def _memory() -> float:
    big = torch.ones(2**22)
    return torch.get_num_threads() * 2 * big.nbytes / _fastest(big.clone)


def _fastest(work: Callable[[], object], span: float = 0.1) -> float:
    """The least CPU seconds of one thread, in at least two calls: the first one also initialises."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        least, total, calls = inf, 0.0, 0
        while calls < 2 or total < span:
            start = time.thread_time()
            work()
            seconds = time.thread_time() - start
            least, total, calls = min(least, seconds), total + seconds, calls + 1
    finally:
        torch.set_num_threads(threads)
    return max(least, 1e-9)
