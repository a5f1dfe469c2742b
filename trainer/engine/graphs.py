"""Micro-batches as CUDA graphs: what the device does for one is recorded once a shape, and replayed in one launch.

Where a card waits for Python, that takes the waiting away. The kernels are those of an eager step, and so are the bytes.
What is recorded is `Losses.of` and its backward: it follows from the shapes of its inputs, and reads nothing back. Draws and
copies to the device come before it, the sum over processes and the optimizer after it.

DoRA's norms and the casts of A and B are made anew in each graph, from the parameters: so nothing that an update makes anew
has to lie where a graph expects it. An eager update makes them once for all of its micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from trainer.base.types import Batch, Occurrence, each_tensor
from trainer.engine.step import Inputs, Losses, backward
from trainer.kernels.scratch import own_buffers

# Micro-batches of a shape that are eager before one is recorded: libraries choose kernels and take workspaces in them, and
# tensors that are made once are made.
WARM_UP = 3


class Recorder(Protocol):
    """What records a function of no arguments, and runs it beforehand in the same surroundings."""

    def warm(self, region: Callable[[], Tensor]) -> Tensor:
        """Run it, on the stream that it will be recorded on."""

    def record(self, region: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """(what runs it again over the same memory, the tensor that it then fills). Nothing of it has happened yet."""


class CudaGraphs:
    """Records as CUDA graphs, which share one pool of memory: they run one after the other, and what one leaves is read
    before the next."""

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

    def record(self, region: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """(the graph's replay, its output). Raises torch.OutOfMemoryError where its memory is not there."""
        graph = torch.cuda.CUDAGraph()
        # Its own buffers: the shared ones grow, and a graph would write to where they were. Other threads go on meanwhile,
        # the loader's and that of a checkpoint.
        recording = torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local")
        try:
            with own_buffers(), recording:
                made = region()
        except RuntimeError as error:
            # A recording that broke off complains of that as it ends.
            if isinstance(error.__context__, torch.OutOfMemoryError):
                raise error.__context__ from None
            raise
        return graph.replay, made


class Recorded(NamedTuple):
    """A recorded micro-batch. given: the tensors that it reads. losses: the tensor that it fills."""

    replay: Callable[[], object]
    given: list[Tensor]
    losses: Tensor


class Graphs:
    """(a micro-batch, the occurrences of its global batch, a sample's share in the gradient) -> the losses' values, fp32 [B].

    Their gradient is added to the parameters'. As `step.backward` of `losses`; after WARM_UP micro-batches of a shape, by a
    graph.

    parameters: all that are trained; they and their gradients stay where they are in memory. Where one does not, or gets no
    gradient any more, all is recorded anew. stale: marks what follows from the parameters as to be made anew. recorder: makes
    what records. say: prints a line of the run. attention: as a Step has it.
    """

    def __init__(
        self,
        losses: Losses,
        parameters: Sequence[Tensor],
        *,
        stale: Callable[[], object],
        recorder: Callable[[], Recorder],
        say: Callable[[str], object],
        attention: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.losses, self.parameters, self.stale, self.say, self.attention = losses, parameters, stale, say, attention
        self.recorder, self.new_recorder = recorder(), recorder
        self.places: list[tuple[int, int, bool]] = []  # as they were at the last micro-batch
        self.met: dict[str, int] = {}
        self.recorded: dict[str, Recorded] = {}

    def __call__(self, batch: Batch, update: Sequence[Occurrence], share: Tensor) -> Tensor:
        self._look_at_parameters()
        inputs = self.losses.inputs(batch, update)
        shapes = shapes_of(inputs)
        if shapes not in self.recorded:
            self.met[shapes] = self.met.get(shapes, 0) + 1
            self.stale()  # so that what follows from the parameters is made within the graph, and in rehearsing it
            if self.met[shapes] <= WARM_UP:
                return self.recorder.warm(lambda: self._run(inputs, share))
            self.recorded[shapes] = self._record(inputs, share)
            self.say(f"step.graphs: micro-batches of {batch.sized()} are a CUDA graph now")
        replay, given, losses = self.recorded[shapes]
        for static, tensor in zip(given, tensors_of((inputs, share)), strict=True):
            static.copy_(tensor)
        replay()
        return losses.clone()

    def _run(self, inputs: Inputs, share: Tensor) -> Tensor:
        return backward(self.losses.of(inputs), share, self.attention())

    def _record(self, inputs: Inputs, share: Tensor) -> Recorded:
        static = each_tensor((inputs, share), torch.clone)
        try:
            replay, losses = self.recorder.record(lambda: self._run(*static))
        except RuntimeError as error:
            error.add_note("while a micro-batch was recorded as a CUDA graph; step.graphs = false does without")
            raise
        finally:
            self.stale()  # nothing else is to take from there what the graph makes
        return Recorded(replay, tensors_of(static), losses)

    def _look_at_parameters(self) -> None:
        places = [(each.data_ptr(), each.grad.data_ptr(), each.requires_grad) for each in self.parameters]
        if places != self.places:
            # With a pool of its own: what the layers still hold keeps the old one alive.
            self.places, self.met, self.recorded, self.recorder = places, {}, {}, self.new_recorder()


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in it, in one order."""
    tensors: list[Tensor] = []
    each_tensor(value, tensors.append)
    return tensors


def shapes_of(value: Any) -> str:
    """The value with shape, strides and dtype in the place of each tensor, as a key."""
    return repr(each_tensor(value, lambda tensor: (*tensor.shape, tensor.stride(), tensor.dtype)))
