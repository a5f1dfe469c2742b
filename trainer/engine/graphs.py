"""Micro-batches as CUDA graphs: what the device does for one is recorded once a shape, and replayed in one launch.

What is recorded is `Losses.of` and its backward, with the kernels and so the bytes of an eager step. Draws and copies to the
device come before it, the sum over processes and the optimizer after it. DoRA's norms and the casts of A and B follow from
the parameters alone: a graph of its own makes them once an update, in memory that the graphs of all shapes read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from trainer.adapters import Adapter
from trainer.base.errors import is_out_of_memory
from trainer.base.types import Batch, Occurrence, each_tensor
from trainer.engine.step import Inputs, Losses, backward
from trainer.kernels.scratch import own_buffers
from trainer.runtime.compilation import programs_complete

# Micro-batches of a shape that are eager before one is recorded: libraries choose kernels and take workspaces in them, and
# tensors that are made once are made.
WARM_UP = 3

T, P = TypeVar("T"), ParamSpec("P")


class Recorder(Protocol):
    """What records a function of no arguments, and runs it beforehand in the same surroundings."""

    def warm(self, region: Callable[[], Tensor]) -> Tensor:
        """Run it, on the stream that it will be recorded on."""

    def record(self, region: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """(what runs it over the same memory, what it gave, whose tensors are then filled). Nothing has happened yet."""


class CudaGraphs:
    """Records as CUDA graphs in one pool of memory: what one leaves is read before the next runs."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream, self.pool = device, torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def warm(self, region: Callable[[], Tensor]) -> Tensor:
        """Run it beside the stream that is current, which waits for it."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            made = region()
        current.wait_stream(self.stream)
        return made

    def record(self, region: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """(the graph's replay, its output). Raises what the region does: torch.OutOfMemoryError where there is no memory."""
        graph = torch.cuda.CUDAGraph()
        # Its own buffers: the shared ones grow, and a graph would write to where they were. Other threads go on meanwhile,
        # the loader's and that of a checkpoint.
        recording = torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local")
        try:
            with own_buffers(), recording:
                made = region()
        except RuntimeError as error:
            # A recording that broke off complains of that as it ends.
            if isinstance(error.__context__, RuntimeError):
                raise error.__context__ from None
            raise
        return graph.replay, made


class Recorded(NamedTuple):
    """A recorded micro-batch. given: the tensors that it reads. losses: the tensor that it fills."""

    replay: Callable[[], object]
    given: list[Tensor]
    losses: Tensor


@dataclass
class Pool:
    """The memory of all graphs, and their recorder. met: micro-batches of each shape. refreshed: (the replay of what follows
    from the parameters, what puts that back). fresh: whether it was replayed in this update."""

    recorder: Recorder
    met: Counter[str] = field(default_factory=Counter)
    recorded: dict[str, Recorded] = field(default_factory=dict)
    refreshed: tuple[Callable[[], object], Callable[[], object]] | None = None
    fresh: bool = False


class Graphs:
    """`step.backward` of the losses of (a micro-batch, the occurrences of its global batch, a sample's share): after WARM_UP
    micro-batches of a shape by a graph. Where the memory of a graph is not there, this and all later ones are eager.

    parameters: all that are trained, with their gradients; where one moves in memory, or gets no gradient any more, all is
    recorded anew. recorder: makes what records. say: prints a line of the run. attention: as a Step has it. needed: whether a
    micro-batch that cannot be recorded ends the run.
    """

    def __init__(
        self,
        losses: Losses,
        parameters: Sequence[Tensor],
        adapter: Adapter,
        *,
        recorder: Callable[[], Recorder],
        say: Callable[[str], object],
        attention: Callable[[], AbstractContextManager[Any]] = nullcontext,
        needed: bool = True,
    ) -> None:
        self.losses, self.parameters, self.adapter, self.attention = losses, parameters, adapter, attention
        self.new_recorder, self.say, self.needed, self.off = recorder, say, needed, False
        self.places: list[tuple[int, int, bool]] = []  # as they were at the last micro-batch
        self.pool = Pool(recorder())

    @property
    def recorded(self) -> dict[str, Recorded]:
        """The graphs that hold memory, by the shapes of their inputs."""
        return self.pool.recorded

    def let_go(self) -> None:
        """Free the memory of all graphs; they are recorded anew."""
        # With a pool of its own: what the layers still hold keeps the old one alive.
        self.pool = Pool(self.new_recorder())

    def give_up(self, reason: str) -> None:
        """Be eager from now on."""
        sizes = len(self.recorded)
        self.say(f"step.graphs: {reason} ({sizes} sizes are recorded); the steps go on without, in the same bytes")
        self.off = True
        self.let_go()

    def begin(self) -> None:
        """An update begins: the parameters may be others than before."""
        self.pool.fresh = False

    def __call__(self, batch: Batch, update: Sequence[Occurrence], share: Tensor) -> Tensor:
        self._look_at_parameters()
        inputs = self.losses.inputs(batch, update)
        if self.off:
            return self._run(inputs, share)
        shapes, pool = shapes_of(inputs), self.pool
        if shapes not in pool.recorded:
            pool.met[shapes] += 1
            if pool.met[shapes] <= WARM_UP:
                return pool.recorder.warm(lambda: self._run(inputs, share))
            if (recorded := self._record(inputs, share)) is None:
                return self._run(inputs, share)
            pool.recorded[shapes] = recorded
            self.say(f"step.graphs: micro-batches of {batch.sized()} are a CUDA graph now")
        if pool.refreshed and not pool.fresh:
            pool.refreshed[0]()
            pool.fresh = True
        replay, given, losses = pool.recorded[shapes]
        for static, tensor in zip(given, tensors_of((inputs, share)), strict=True):
            static.copy_(tensor)
        replay()
        return losses.clone()

    def _run(self, inputs: Inputs, share: Tensor) -> Tensor:
        return backward(self.losses.of(inputs), share, self.attention())

    def _record(self, inputs: Inputs, share: Tensor) -> Recorded | None:
        """The micro-batch, recorded; None where it cannot be, which is said, and nothing is recorded any more."""
        pool = self.pool
        try:
            static = each_tensor((inputs, share), torch.clone)
            if pool.refreshed is None:
                self.adapter.mark_stale()
                pool.refreshed = pool.recorder.record(self.adapter.refreshed)
            pool.refreshed[1]()
            with programs_complete():
                replay, losses = pool.recorder.record(lambda: self._run(*static))
        except RuntimeError as error:
            if self.needed and not is_out_of_memory(error):
                error.add_note("while a micro-batch was recorded as a CUDA graph; step.graphs = false does without")
                raise
            reason = "memory ran out" if is_out_of_memory(error) else f"a micro-batch cannot be recorded ({error})"
        else:
            return Recorded(replay, tensors_of(static), losses)
        finally:
            self.adapter.mark_stale()  # nothing else is to take from there what the graph makes
        self.give_up(reason)
        return None

    def _look_at_parameters(self) -> None:
        places = [(each.data_ptr(), each.grad.data_ptr(), each.requires_grad) for each in self.parameters]
        if places != self.places:
            self.places = places
            self.let_go()


def beside(graphs: Graphs | None, work: Callable[P, T]) -> Callable[P, T]:
    """The work, done again without the recorded graphs where it runs out of memory beside them."""

    def done(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return work(*args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if graphs is None or not graphs.recorded or not is_out_of_memory(error):
                raise
        graphs.let_go()
        return work(*args, **kwargs)

    return done


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in it, in one order."""
    tensors: list[Tensor] = []
    each_tensor(value, tensors.append)
    return tensors


def shapes_of(value: Any) -> str:
    """The value with shape, strides and dtype in the place of each tensor, as a key."""
    return repr(each_tensor(value, lambda tensor: (*tensor.shape, tensor.stride(), tensor.dtype)))
