"""When a micro-batch is recorded, what it then reads, and what ends a recording. Replayed are tapes (tests/tape.py)."""

from __future__ import annotations

import re
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.tape import Running, Taping
from tests.unit.engine.test_step import OURS, batch
from trainer.base.errors import is_out_of_memory
from trainer.base.types import Batch
from trainer.engine.graphs import WARM_UP, CudaGraphs, Graphs, retrying, shapes_of
from trainer.engine.step import backward
from trainer.kernels.scratch import scratch


class Made:
    """Stands for Losses: a latent times a weight that is made of the parameter at its first use after an update."""

    def __init__(self) -> None:
        self.parameter, self.made = nn.Parameter(torch.ones(4)), None
        self.parameter.grad = torch.zeros(4)

    def inputs(self, batch: Batch, update) -> torch.Tensor:
        return batch.latents

    def refreshed(self):
        """As the adapter's."""
        if self.made is None:
            self.made = made = self.parameter.detach() * 2
        return lambda: setattr(self, "made", made)

    def of(self, latents: torch.Tensor) -> torch.Tensor:
        self.refreshed()
        return (latents * self.made.mean()).mean((1, 2, 3)) * self.parameter.sum()

    def mark_stale(self) -> None:
        self.made = None


def micro_batch(value: float, count: int = 2) -> Batch:
    made = batch(OURS[:count])
    return Batch(made.occurrences, made.latents * value, *list(vars(made).values())[2:])


def graphs_of(losses: Made, **more) -> tuple[Graphs, Taping, list[str]]:
    said: list[str] = []
    taping = Taping([losses.parameter])
    graphs = Graphs(losses, [losses.parameter], losses, recorder=lambda: taping, say=said.append, **more)
    return graphs, taping, said


def test_micro_batches_of_a_shape_are_eager_first_then_replayed_with_the_same_bytes() -> None:
    """Updates in between, other shares and another shape too."""
    one, other = Made(), Made()
    graphs, taping, said = graphs_of(one)
    for number in range(1, 11):
        share, given = torch.tensor(1 / number), micro_batch(number / 3, count=1 if number == 5 else 2)
        if number % 2:
            graphs.begin()
        losses = graphs(given, OURS, share)
        assert torch.equal(losses, backward(other.of(given.latents), share)) and not losses.requires_grad
        assert torch.equal(one.parameter.grad, other.parameter.grad), f"micro-batch {number}"
        if number % 2 == 0:
            for each in (one, other):
                with torch.no_grad():
                    each.parameter.sub_(each.parameter.grad, alpha=0.1)
                each.mark_stale()
    replays = 10 - WARM_UP - 1  # of micro-batches, and of what follows from the parameters in each of the updates 2 to 5
    assert taping.warmed == WARM_UP + 1 and len(taping.tapes) == 2 and taping.replayed == replays + 4
    assert said == ["step.graphs: micro-batches of 2 photo(s) of 96x64 are a CUDA graph now"]


def test_what_a_replay_gave_is_still_there_after_the_next() -> None:
    graphs, taping, _ = graphs_of(Made())
    found = [graphs(micro_batch(float(number)), OURS, torch.tensor(1.0)) for number in range(WARM_UP + 2)]
    assert taping.replayed == 2 + 1 and not torch.equal(found[-1], found[-2])


@pytest.mark.parametrize("change", ["frozen", "moved", "gradient moved"])
def test_parameters_that_are_others_are_recorded_anew(change: str) -> None:
    losses = Made()
    graphs, taping, _ = graphs_of(losses)
    for _ in range(WARM_UP + 1):
        graphs(micro_batch(1.0), OURS, torch.tensor(1.0))
    assert len(taping.tapes) == 2
    if change == "frozen":
        losses.parameter.requires_grad_(False)
        losses.other = nn.Parameter(torch.ones(()))  # else there is nothing to walk back to
        losses.of = lambda latents: latents.mean((1, 2, 3)) * losses.other
    elif change == "moved":
        losses.parameter.data = losses.parameter.data.clone()
    else:
        losses.parameter.grad = losses.parameter.grad.clone()
    for _ in range(WARM_UP + 1):
        graphs(micro_batch(1.0), OURS, torch.tensor(1.0))
    assert len(taping.tapes) == 4 and taping.warmed == 2 * WARM_UP


def test_nothing_is_recorded_of_what_failed_and_what_to_do_is_told() -> None:
    losses = Made()
    graphs, taping, _ = graphs_of(losses)
    for _ in range(WARM_UP):
        graphs(micro_batch(1.0), OURS, torch.tensor(1.0))

    def broken(region):
        raise RuntimeError("operation not permitted when stream is capturing")

    plain, taping.record = taping.record, broken
    with pytest.raises(RuntimeError, match="not permitted") as raised:
        graphs(micro_batch(1.0), OURS, torch.tensor(1.0))
    assert "step.graphs = false" in raised.value.__notes__[0] and losses.made is None
    taping.record = plain
    assert torch.isfinite(graphs(micro_batch(1.0), OURS, torch.tensor(1.0))).all() and len(taping.tapes) == 2


@pytest.mark.parametrize(
    ("required", "error"),
    [
        (True, torch.OutOfMemoryError("CUDA out of memory")), (False, torch.OutOfMemoryError("CUDA out of memory")),
        (False, RuntimeError("operation not permitted when stream is capturing")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("at", [1, 2], ids=["what follows from the parameters", "the micro-batch"])
def test_what_cannot_be_recorded_is_eager_from_then_on(required: bool, error: RuntimeError, at: int) -> None:
    """With the same bytes; where the config asks for graphs, only want of memory is a reason."""
    losses, other = Made(), Made()
    graphs, taping, said = graphs_of(losses, required=required)
    for _ in range(WARM_UP):
        graphs(micro_batch(1.0), OURS, torch.tensor(1.0))
    plain, asked = taping.record, []

    def broken(region):
        asked.append(region)
        if len(asked) == at:
            raise error
        return plain(region)

    taping.record = broken
    for _ in range(2):
        made = graphs(micro_batch(3.0), OURS, torch.tensor(1.0))
        assert torch.equal(made, other.of(micro_batch(3.0).latents))
    assert len(asked) == at and len(said) == 1 and not graphs.recorded and graphs.off
    assert said[0].startswith("step.graphs: ") and "go on without" in said[0]


class Compiled(Made):
    """Its product is compiled, for each power anew."""

    def __init__(self) -> None:
        super().__init__()
        self.power, self.programs = 1, 0
        torch.compiler.reset()
        self.product = torch.compile(self._product, backend=self._backend, fullgraph=True, dynamic=False)

    def _backend(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        self.programs += 1
        return graph.forward

    def _product(self, latents: torch.Tensor) -> torch.Tensor:
        return (latents * self.parameter.mean()).mean((1, 2, 3)) ** self.power

    def of(self, latents: torch.Tensor) -> torch.Tensor:
        return self.product(latents)


@pytest.mark.slow
@pytest.mark.parametrize("required", [False, True])
def test_where_a_program_is_not_made_yet_nothing_is_recorded_and_the_run_goes_on(required: bool) -> None:
    losses = Compiled()
    said: list[str] = []
    running = Running([losses.parameter])
    graphs = Graphs(
        losses, [losses.parameter], losses, recorder=lambda: running, say=said.append, required=required,
    )  # fmt: skip
    for count in (1, 2):  # a size whose programs are there, and one whose programs are others by the time
        for _ in range(WARM_UP):
            graphs(micro_batch(1.0, count), OURS, torch.tensor(1.0))
        assert losses.programs == count and len(graphs.recorded) == count - 1
        losses.power = count
        if count == 1:
            graphs(micro_batch(1.0, count), OURS, torch.tensor(1.0))
            assert losses.programs == 1 and len(said) == 1 and len(graphs.recorded) == 1
    if required:
        with pytest.raises(RuntimeError, match="a block would be compiled in it: .*self.power == 1") as raised:
            graphs(micro_batch(3.0), OURS, torch.tensor(1.0))
        assert losses.programs == 2 and "step.graphs = false" in raised.value.__notes__[0]
        return
    made = graphs(micro_batch(3.0), OURS, torch.tensor(1.0))
    assert torch.equal(made, losses._product(micro_batch(3.0).latents).detach()) and losses.programs == 3
    assert graphs.off and len(said) == 2 and not graphs.recorded
    assert re.match(
        r"step.graphs: a micro-batch cannot be recorded \(a block would be compiled in it: .*go on without", said[1]
    )


def test_work_beside_graphs_gets_their_memory_when_it_needs_it() -> None:
    losses = Made()
    graphs, taping, _ = graphs_of(losses)
    for _ in range(WARM_UP + 1):
        graphs(micro_batch(1.0), OURS, torch.tensor(1.0))

    def picture(size: int) -> int:
        if graphs.recorded:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return size

    assert retrying(graphs, picture)(7) == 7 and not graphs.off
    with pytest.raises(torch.OutOfMemoryError):
        retrying(None, lambda: retrying(graphs, next)(iter(broken())))()
    for _ in range(WARM_UP + 1):
        graphs(micro_batch(1.0), OURS, torch.tensor(1.0))
    assert len(graphs.recorded) == 1 and len(taping.tapes) == 4


def broken():
    raise torch.OutOfMemoryError("CUDA out of memory")
    yield


def test_a_key_tells_shapes_strides_dtypes_and_what_is_not_there() -> None:
    one = torch.zeros(2, 3)
    others = [torch.zeros(3, 2), torch.zeros(3, 2).t(), one.double(), None]
    keys = [shapes_of({"a": (each, one)}) for each in (one, *others)]
    assert len({*keys, shapes_of({"a": (one, None)})}) == 6 and shapes_of({"a": (one + 1, one)}) == keys[0]


@pytest.fixture
def cuda(monkeypatch) -> SimpleNamespace:
    """What torch.cuda.graph was called with, and whether it breaks off: the end of a recording then raises in its turn."""
    seen = SimpleNamespace(how=[], breaks=False)

    @contextmanager
    def recording(graph, **how):
        seen.how.append(how)
        try:
            yield
        finally:
            if seen.breaks:
                raise RuntimeError("operation failed due to a previous error during capture")

    pools = iter(("a pool", "another"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "a stream")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", recording)
    return seen


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("shapes")])
def test_what_broke_a_recording_off_is_told_as_such(cuda: SimpleNamespace, error: RuntimeError) -> None:
    def region() -> torch.Tensor:
        raise error

    cuda.breaks = True
    with pytest.raises(RuntimeError) as raised:
        CudaGraphs(torch.device("cuda")).record(region)
    assert raised.value is error and is_out_of_memory(raised.value) == isinstance(error, torch.OutOfMemoryError)


def test_all_graphs_share_a_pool_and_none_a_buffer_of_eager_micro_batches(cuda: SimpleNamespace) -> None:
    """Those may be replaced by larger ones, and a graph would write to where they were."""
    place, found = ((4,), torch.float32, torch.device("cpu")), []
    shared, graphs = scratch(*place), CudaGraphs(torch.device("cuda"))
    for _ in range(2):
        graphs.record(lambda: found.append(scratch(*place)) or found[-1])
    assert not any(tensor is shared for tensor in found) and scratch(*place) is shared
    assert [how["pool"] for how in cuda.how] == ["a pool"] * 2
