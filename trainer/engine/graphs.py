"""Micro-batches as CUDA graphs: the device's work for one is recorded once for each shape, and replayed in one launch.

A graph holds `Losses.of` and its backward, with the kernels and so the bytes of an eager step. Draws and copies to the device
come before it, the sum over processes and the optimizer after it. DoRA's norms and the casts of A and B depend on the
parameters alone: a graph of its own makes them once an update, in memory that the graphs of all shapes read.
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
from trainer.engine.step import Inputs, Losses, Replays, backward
from trainer.kernels.scratch import own_buffers
from trainer.runtime.compilation import programs_complete

# Eager micro-batches of a shape before its graph: in them libraries choose kernels, allocate workspaces, and fill caches.
WARM_UP = 3

T, P = TypeVar("T"), ParamSpec("P")


class Recorder(Protocol):
    """Records a function of no arguments, after running it in the same surroundings."""

    def warm(self, region: Callable[[], Tensor]) -> Tensor:
        """Run the function, on the stream that it will be recorded on."""

    def record(self, region: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """(replay, output): nothing is computed yet; each replay fills the output's tensors."""


class CudaGraphs:
    """Records CUDA graphs in one pool of memory: the output of one is read before the next runs."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream, self.pool = device, torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def warm(self, region: Callable[[], Tensor]) -> Tensor:
        """Run the function beside the current stream, which waits for it."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            output = region()
        current.wait_stream(self.stream)
        return output

    def record(self, region: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """(the graph's replay, its output). Raises what the region raises, as torch.OutOfMemoryError if memory runs out."""
        graph = torch.cuda.CUDAGraph()
        # Own buffers: the shared ones grow, and a graph would write to their old addresses. Thread-local: the loader's and
        # the checkpoint's threads go on meanwhile.
        recording = torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local")
        try:
            with own_buffers(), recording:
                output = region()
        except RuntimeError as error:
            # A recording that broke off raises an error of its own as it ends.
            if isinstance(error.__context__, RuntimeError):
                raise error.__context__ from None
            raise
        return graph.replay, output


class Recorded(NamedTuple):
    """A recorded micro-batch. inputs: the tensors that it reads. losses: the tensor that it fills."""

    replay: Callable[[], object]
    inputs: list[Tensor]
    losses: Tensor


@dataclass
class Pool:
    """The memory of all graphs, and their recorder. eager: counts micro-batches of each shape before its graph. refreshed:
    (the replay that makes norms and casts from the parameters, a function that lets the layers read them). fresh: whether it
    was replayed in this update."""

    recorder: Recorder
    eager: Counter[str] = field(default_factory=Counter)
    recorded: dict[str, Recorded] = field(default_factory=dict)
    refreshed: tuple[Callable[[], object], Callable[[], object]] | None = None
    fresh: bool = False


class Graphs:
    """`step.backward` of (micro-batch, occurrences of its global batch, share): by a graph, after WARM_UP micro-batches of a
    shape. If memory for a graph runs out, this micro-batch and all later ones are eager.

    parameters: all trained ones, with their gradients; if one moves in memory or stops training, all graphs are recorded
    again. recorder: makes a Recorder. say: prints a line of the run. attention: a context that selects the denoiser's
    attention. required: whether a micro-batch that cannot be recorded ends the run.
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
        required: bool = True,
    ) -> None:
        self.losses, self.parameters, self.adapter, self.attention = losses, parameters, adapter, attention
        self.new_recorder, self.say, self.required, self.off = recorder, say, required, False
        self.addresses: list[tuple[int, int, bool]] = []  # of parameters and gradients, at the last micro-batch
        self.pool = Pool(recorder())

    @property
    def recorded(self) -> dict[str, Recorded]:
        """The graphs that hold memory, by the shapes of their inputs."""
        return self.pool.recorded

    def clear(self) -> None:
        """Free the memory of all graphs; they are recorded again."""
        # In a new pool: tensors that the layers still hold keep the old one alive.
        self.pool = Pool(self.new_recorder())

    def give_up(self, reason: str) -> None:
        """Free all graphs, and be eager from now on."""
        sizes = len(self.recorded)
        self.say(f"step.graphs: {reason} ({sizes} sizes are recorded); the steps go on without, in the same bytes")
        self.off = True
        self.clear()

    def begin(self) -> None:
        """Start an update: the parameters may have changed."""
        self.pool.fresh = False

    def __call__(self, batch: Batch, update: Sequence[Occurrence], share: Tensor) -> Tensor:
        self._check_addresses()
        inputs = self.losses.inputs(batch, update)
        if self.off:
            return self._run(inputs, share)
        shapes, pool = shapes_of(inputs), self.pool
        if shapes not in pool.recorded:
            pool.eager[shapes] += 1
            if pool.eager[shapes] <= WARM_UP:
                return pool.recorder.warm(lambda: self._run(inputs, share))
            if (recorded := self._record(inputs, share)) is None:
                return self._run(inputs, share)
            pool.recorded[shapes] = recorded
            self.say(f"step.graphs: micro-batches of {batch.sized()} are a CUDA graph now")
        if pool.refreshed and not pool.fresh:
            pool.refreshed[0]()
            pool.fresh = True
        replay, static, losses = pool.recorded[shapes]
        for target, tensor in zip(static, tensors_of((inputs, share)), strict=True):
            target.copy_(tensor)
        replay()
        return losses.clone()

    def _run(self, inputs: Inputs, share: Tensor) -> Tensor:
        return backward(self.losses.of(inputs), share, self.attention())

    def _record(self, inputs: Inputs, share: Tensor) -> Recorded | None:
        """The micro-batch, recorded; None if it cannot be: a line says why, and all later ones are eager."""
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
            if self.required and not is_out_of_memory(error):
                error.add_note("while a micro-batch was recorded as a CUDA graph; step.graphs = false does without")
                raise
            reason = "memory ran out" if is_out_of_memory(error) else f"a micro-batch cannot be recorded ({error})"
        else:
            return Recorded(replay, tensors_of(static), losses)
        finally:
            self.adapter.mark_stale()  # only graphs may read the norms and casts in the graphs' memory
        self.give_up(reason)
        return None

    def _check_addresses(self) -> None:
        addresses = [(each.data_ptr(), each.grad.data_ptr(), each.requires_grad) for each in self.parameters]
        if addresses != self.addresses:
            self.addresses = addresses
            self.clear()


def retrying(graphs: Replays | None, work: Callable[P, T]) -> Callable[P, T]:
    """The work; if it runs out of memory while graphs hold some, these are freed and it runs again."""

    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return work(*args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if graphs is None or not graphs.recorded or not is_out_of_memory(error):
                raise
        graphs.clear()
        return work(*args, **kwargs)

    return wrapped


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a value, in a fixed order."""
    tensors: list[Tensor] = []
    each_tensor(value, tensors.append)
    return tensors


def shapes_of(value: Any) -> str:
    """A key: the value with the shape, strides and dtype of each tensor in the tensor's place."""
    return repr(each_tensor(value, lambda tensor: (*tensor.shape, tensor.stride(), tensor.dtype)))
