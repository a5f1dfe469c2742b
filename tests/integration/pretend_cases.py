"""The code of a run on an accelerator that is not there (tests/pretend.py), at the published sizes. See test_pretend.py."""

from __future__ import annotations

import importlib.util
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.nn.attention import SDPBackend
from torch.utils import backend_registration

from tests import pretend
from tests.harness import DENOISER, PHOTOS
from tests.integration.test_full_size import sparse_model
from tests.proofs import support_matrix as matrix
from tests.tape import Trace
from trainer import config as configs
from trainer import kernels
from trainer.base import draws
from trainer.engine import graphs, step
from trainer.kernels import dora_torch
from trainer.kernels.scratch import own_buffers
from trainer.plan.run_plan import make_plan, open_source, resolve
from trainer.quantization import FORMATS
from trainer.quantization.table import ALL_FORMATS
from workbench.planning import dry_run
from workbench.planning.dry_run import Rehearsal
from workbench.planning.estimate import STEP, forecast
from workbench.planning.op_trace import Trace as Bytes

# What is adapted where a run is not shown as a whole: each further layer of a kind only takes time.
FEW = {"sdxl": ["*attn1.to_q", "*ff.net.2"], "flux": ["*attn.to_q", "*proj_out"]}
TRITON = importlib.util.find_spec("triton") is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("without-weights")


@contextmanager
def rehearsed(folder: Path, family: str, *, size: str, triton: bool = False, **changes) -> Iterator[Rehearsal]:
    """A run over a model of that size (make_model.py), on the pretend accelerator. changes: config keys, dots as `__`."""
    model = folder / f"{family}-{size}"
    if not model.exists():
        with pytest.MonkeyPatch.context() as monkeypatch:
            sparse_model(monkeypatch, model, size=size, family=family, layout="diffusers")
    tree = {
        "run": {"name": "x", "output_dir": str(folder / "out"), "max_steps": 10},
        "model": {"family": family, "path": str(model), "components": {DENOISER[family]: {"dtype": "fp8_e4m3"}}},
        "adapter": {"type": "dora", "rank": 16, "targets": FEW[family], "kernels": "triton" if triton else "torch"},
        "data": {"resolution": 1024, "sources": [{"path": str(PHOTOS)}]},
        "memory": {"gradient_checkpointing": True},
        "validation": {"every_steps": 1, "prompts": ["a plush bear"], "steps": 2},
    }
    for key, value in changes.items():
        *tables, leaf = key.split("__")
        node = tree
        for table in tables:
            node = node.setdefault(table, {})
        node[leaf] = value
    config = configs.parse(tree)
    source = open_source(config)
    plan = make_plan(resolve(config, source), source, processes=1)
    with pretend.accelerator(triton) as device:
        yield Rehearsal(plan, device=device, kernels=kernels.choose(config.adapter.kernels, device), step=pretend.Updating)


def micro_batches(run: Rehearsal, *sizes: tuple[int, int]):
    run.encode_images(*sizes[0], 1)
    told = run.encode_prompts(["a plush bear"]) if run.plan.model.cache_text else None
    return [run.batch((size,), told, 1, first=index) for index, size in enumerate(sizes)]


def update(run: Rehearsal, *sizes: tuple[int, int], broken: Callable[[], None] = lambda: None) -> None:
    """One update, in which the host waits for the device once. broken: what is called right before it."""
    reads, read = [], pretend.Updating.read

    def counted(step, told, norm):
        reads.append(told.device)
        return read(step, told, norm)

    batches = micro_batches(run, *sizes)
    run.trained  # noqa: B018
    broken()
    with patch.object(pretend.Updating, "read", counted), pretend.no_waiting():
        result = run.step(batches)
    assert result.updated
    assert reads == [run.device], "loss and flags are read once, from the device"


@pytest.mark.parametrize("name", [pretend.REGISTER, pretend.MODULE])
def test_torch_still_has_what_the_pretend_accelerator_is_made_of(name: str) -> None:
    assert hasattr(backend_registration, name), f"torch {torch.__version__} has no {name}: tests/pretend.py needs another way"


def kernels_of(kind: str) -> tuple[pytest.MarkDecorator, ...]:
    missing = pytest.mark.skipif(kind == "triton" and not TRITON, reason="needs Triton")
    return (missing,)


@pytest.mark.parametrize(
    ("size", "family", "kind", "adapter"),
    [
        pytest.param("short", "sdxl", "torch", "dora"),
        *(
            pytest.param("full", *cell, marks=(pytest.mark.proof, *kernels_of(cell[1])))
            for cell in itertools.product(("sdxl", "flux"), ("torch", "triton"), ("lora", "dora"))
        ),
    ],
)
def test_a_run_from_its_first_photo_to_a_sample(folder: Path, size: str, family: str, kind: str, adapter: str) -> None:
    with rehearsed(
        folder,
        family,
        size=size,
        triton=kind == "triton",
        adapter__type=adapter,
        adapter__targets="attention+mlp" if size == "full" else FEW[family],
    ) as run:
        told, latents = run.encode_prompts(["a plush bear"]), run.encode_images(1024, 1024, 1)
        assert latents.shape == run.batch(((1024, 1024),), told, 1).latents.shape
        run.components.unload(run.plan.model.family.text_encoders)
        update(run, (1024, 1024), (832, 1216))
        image = run.sample(run.plan.data.requests[0], told, told)
        assert image.shape == (1, 3, 1024, 1024) and image.device == run.device
        adapter_now, _, optimizer, _, _ = run.trained
        tensors = [*adapter_now.state_dict().values()]
        assert {tensor.device for tensor in tensors} == {run.device} and len(tensors) == (
            3 if adapter == "dora" else 2
        ) * len(run.plan.model.targets)
        assert optimizer.state_dict()


def test_the_host_waits_for_no_copy_of_a_streamed_block(folder: Path) -> None:
    with rehearsed(folder, "flux", size="short", memory__offload="blocks", memory__resident_blocks=0) as run:
        update(run, (1024, 1024))
        streamer = run.components.streamers[run.plan.model.family.denoiser]
        before = streamer.copies
        assert {slot.device for slot in streamer.slots} == {run.device}
        assert {block.master.device.type for block in streamer.streamed.values()} == {"cpu"}
        update(run, (1024, 1024))
        assert streamer.copies - before == 2 * (len(streamer.streamed) - 2)


class Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.ops.aten.silu(x)

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(*ctx.saved_tensors)


@pytest.mark.parametrize("family", [pytest.param("sdxl", marks=pytest.mark.proof), "flux"])
def test_a_step_over_a_streamed_base_takes_what_was_foretold(folder: Path, monkeypatch, family: str) -> None:
    """Bytes alive at the worst moment of a second step, against the plan's. Every block is there before it is entered: a copy
    that is started as a block is entered is of a later one, and blocks are used in the order that was foreseen.

    With attention, RMSNorm and SiLU as the one operator each that a card has, as in the plan.
    """
    streamed = {"memory__offload": "blocks", "memory__resident_blocks": 0, "adapter__targets": "attention+mlp"}
    keys = streamed | {"data__enlarge": True, "validation__every_steps": 0}
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", dry_run._fused_attention)
    monkeypatch.setattr(torch.nn.functional, "rms_norm", dry_run.fused_rms_norm)
    monkeypatch.setattr(torch.nn.functional, "silu", lambda x, inplace=False: Silu.apply(x))
    with rehearsed(folder, family, size="short", **keys) as run:
        update(run, (1024, 1024))  # the optimizer has its state from here on
        streamer = run.components.streamers[run.plan.model.family.denoiser]
        batches, entered, enter = micro_batches(run, (1024, 1024)), [], streamer.enter
        run.components.unload([*run.plan.model.family.text_encoders, run.plan.model.family.vae])

        def watched(place: int, way: int) -> None:
            block = streamer.streamed[place]
            # The first resnets of SDXL are not on the way back: no gradient goes there.
            assert streamer.in_slot[block.slot] is block or not entered, f"block {place} is not there yet"
            entered.append(place)
            enter(place, way)

        monkeypatch.setattr(streamer, "enter", watched)
        (module,), (*_, step), trace = run.components.model.modules.values(), run.trained, Bytes()
        states = [value for state in step.optimizer.state.values() for value in state.values()]
        held = (*module.parameters(), *module.buffers(), *streamer.slots, *(p.grad for p in step.parameters), *states)
        trace.enter(tensor for tensor in held if tensor.device == run.device)
        trace.reset()
        with trace:
            assert run.step(batches).updated
        forward, back = entered[: len(streamer.streamed)], entered[len(streamer.streamed) :]
        assert forward == [*streamer.streamed] and [*dict.fromkeys(back)] == forward[::-1][: len({*back})]
        plan = run.plan
    (phase,) = [each for each in forecast(plan, dora_torch).phases if each.name.startswith(f"{STEP} 1024x1024")]
    print(f"{family}: {trace.peak / 2**20:.1f} MiB, foretold {phase.peak / 2**20:.1f}")
    assert trace.peak == pytest.approx(phase.peak, rel=0.02)


BF16 = {"unet": {"dtype": "bf16"}}
CELLS = [(format.dtype_name, format.backend) for format in ALL_FORMATS]


def test_every_storage_is_among_the_cells() -> None:
    assert {dtype for dtype, _ in CELLS} == set(FORMATS)


def storages() -> Iterator[Any]:
    """Each over both families: one with the plain kernels, one with Triton's. In --all: a format of each backend that packs
    its bits in its own way, and nf4 with Triton's.
    """
    some = [("fp8_e4m3", "native"), ("int8", "bitsandbytes"), ("fp4", "bitsandbytes"), ("int2", "quanto")]
    for dtype, backend in CELLS:
        yield pytest.param("sdxl", dtype, backend, "torch", marks=() if (dtype, backend) in some else pytest.mark.proof)
        more = () if dtype == "nf4" else (pytest.mark.proof,)
        yield pytest.param("flux", dtype, backend, "triton", marks=(*more, *kernels_of("triton")))


@pytest.mark.parametrize(("family", "dtype", "backend", "kind"), storages())
def test_each_storage_at_the_published_widths(folder: Path, family: str, dtype: str, backend: str, kind: str) -> None:
    storage = {DENOISER[family]: {"dtype": dtype, "backend": backend}}
    with rehearsed(folder, family, size="short", triton=kind == "triton", model__components=storage) as run:
        update(run, (512, 512))


# Choices that do not look at each other share a run.
VARIANTS = {
    "fp16, an 8-bit optimizer, an adapted text encoder": {
        "precision__compute": "fp16", "optimizer__name": "adamw8bit",
        "adapter__rules": [{"component": "text_encoder", "match": "*q_proj"}],
        "objective": {
            "loss": "huber", "t_range": [0.1, 0.9], "timesteps": "power", "power": 2.0, "stratified": True,
            "input_perturbation": 0.1,
        },
    },
    "float8 products, dropout, no checkpointing": {
        "precision__matmul": "fp8", "adapter__type": "lora", "adapter__dropout": 0.1, "memory__gradient_checkpointing": False,
    },
    "convolutions, noise and weighting": {
        "adapter__targets": ["*resnets.0.conv?", "*resnets.0.conv_shortcut", "*samplers.0.conv"],
        "objective": {"weighting": "p2", "multires_noise_iterations": 6, "loss": "smooth_l1"},
    },
}  # fmt: skip
# They would be refused.
NOT_OF_FLUX = ("convolutions, noise and weighting",)


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        pytest.param(family, variant, marks=() if family == "sdxl" else pytest.mark.proof)
        for family, variant in itertools.product(("sdxl", "flux"), VARIANTS)
        if family == "sdxl" or variant not in NOT_OF_FLUX
    ],
)
def test_each_choice_at_the_published_widths(folder: Path, family: str, variant: str) -> None:
    with rehearsed(folder, family, size="short", **VARIANTS[variant]) as run:
        update(run, (512, 512), (512, 512))


def test_a_tensor_left_on_the_cpu_is_found(folder: Path, monkeypatch) -> None:
    """The cached conditioning is left out of what the step moves."""
    plain = step.each_tensor

    def forgetful(inputs, new):
        moved = plain(inputs, new)
        return replace(moved, batch=replace(moved.batch, conditioning=inputs.batch.conditioning))

    with (
        rehearsed(folder, "sdxl", size="short", model__components=BF16) as run,
        pytest.raises(RuntimeError, match="at least two devices, cpu and pretend:0"),
    ):
        update(run, (512, 512), broken=lambda: monkeypatch.setattr(step, "each_tensor", forgetful))


@pytest.mark.parametrize("read", ["item", "cpu", "bool"])
def test_a_read_in_the_middle_of_a_step_is_found(folder: Path, monkeypatch, read: str) -> None:
    """The loss is read before the backward: as `.item()`, as a copy, or by a question."""
    from trainer.objectives import base as module

    plain = module.sample_losses

    def reading(*arguments, **keys):
        losses = plain(*arguments, **keys)
        loss = losses.sum()
        {"item": loss.item, "cpu": loss.cpu, "bool": loss.isnan().__bool__}[read]()
        return losses

    monkeypatch.setattr(module, "sample_losses", reading)
    found = DataDependentOutputException if read == "item" else pretend.Waited
    with rehearsed(folder, "sdxl", size="short", model__components=BF16) as run, pytest.raises(found):
        update(run, (512, 512))


# Of step.graphs: what is adapted of tiny models, in all three of their components that steps compute with.
GRAPHED = {"sdxl": ["*attn1.to_?", "*ff.net.2", "*resnets.0.conv1"], "flux": ["*attn.to_?", "*proj_out"]}
QUERIES = {"sdxl": ("*.0.*q_proj", "*.0.*q_proj"), "flux": ("*.0.*q_proj", "*.0.*.q")}


class Guarding:
    """A Recorder (trainer/engine/graphs.py) that looks whether a CUDA graph could hold it. traces: of what was recorded."""

    def __init__(self) -> None:
        self.sizes: set[int] = set()
        self.traces: list[list[str]] = []

    def warm(self, region: Callable[[], torch.Tensor]) -> torch.Tensor:
        with own_buffers(), pretend.OnDevice() as seen:
            made = region()
        self.sizes |= seen.taken
        return made

    def record(self, region: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        # What follows from the parameters is rehearsed with a micro-batch, whose larger buffers it shares there.
        rehearsed = self.sizes if self.traces and len(self.traces) % 2 else None
        with own_buffers(), pretend.capturable(rehearsed), Trace() as trace:
            made = region()
        self.traces.append(trace.operators)
        return lambda: None, made


class Recorded:
    """Records the micro-batches of a run, as step.graphs would, one by one."""

    def __init__(self, run: Rehearsal) -> None:
        adapter, *_, step = run.trained
        self.guard, self.batches = Guarding(), micro_batches(run, (64, 64), (64, 64))
        self.occurrences = [occurrence for batch in self.batches for occurrence in batch.occurrences]
        self.share = torch.ones((), device=run.device)
        parameters, said = list(adapter.named_parameters().values()), []
        self.graphs = graphs.Graphs(
            step.losses, parameters, adapter, recorder=lambda: self.guard,
            say=said.append,
        )  # fmt: skip
        self.graphs._check_addresses = lambda: None  # they have no addresses here
        with patch.object(graphs, "WARM_UP", 1):
            self.graphs(self.batches[0], self.occurrences, self.share)

    def traces(self) -> list[list[str]]:
        """Of each micro-batch, recorded anew, with what follows from the parameters before it."""
        self.guard.traces.clear()
        for batch in self.batches:
            self.graphs.recorded.clear()
            self.graphs.pool.refreshed = None
            with patch.object(graphs, "WARM_UP", 1):
                self.graphs(batch, self.occurrences, self.share)
        return [made + micro_batch for made, micro_batch in zip(self.guard.traces[::2], self.guard.traces[1::2], strict=True)]


@contextmanager
def to_be_recorded(folder: Path, family: str, adapter: str, storage: dict[str, str], triton: bool) -> Iterator[Recorded]:
    encoders = ("text_encoder", "text_encoder_2")
    rules = [{"component": name, "match": match} for name, match in zip(encoders, QUERIES[family], strict=True)]
    with rehearsed(
        folder, family, size="tiny", triton=triton, adapter__type=adapter, adapter__targets=GRAPHED[family],
        adapter__rules=rules, adapter__alpha=8.0, data__resolution=64,
        model__components=dict.fromkeys((DENOISER[family], *encoders), storage),
        # Either way of a block with either kind of kernel and of adapter.
        memory__gradient_checkpointing=(adapter == "dora") == triton and ("selective" if family == "flux" else True),
    ) as run, patch.object(torch, "_fused_sdp_choice", lambda *given: SDPBackend.FLASH_ATTENTION.value):  # fmt: skip
        yield Recorded(run)


def graph_cells() -> Iterator[Any]:
    """The support matrix, family x adapter x storage, over Flux with either kind of kernel; not in --all but for some."""
    some = [("flux", "dora", "fp8_e4m3", "native", "triton"), ("flux", "lora", "nf4", "bitsandbytes", "torch")]
    for family, adapter, (dtype, backend), kind in itertools.product(
        ("sdxl", "flux"), ("lora", "dora"), CELLS, ("triton", "torch")
    ):
        if (family, kind) == ("sdxl", "torch"):
            continue
        cell = family, adapter, dtype, backend, kind
        yield pytest.param(*cell, marks=(*(() if cell in some else (pytest.mark.proof,)), *kernels_of(kind)))


@pytest.mark.parametrize(("family", "adapter", "dtype", "backend", "kind"), graph_cells())
def test_a_graph_could_hold_any_micro_batch_and_two_of_a_bucket_are_the_same(
    folder: Path, family: str, adapter: str, dtype: str, backend: str, kind: str
) -> None:
    storage = {"dtype": dtype, "backend": backend}
    with to_be_recorded(folder, family, adapter, storage, kind == "triton") as recorded:
        one, other = recorded.traces()
    assert len(one) > 1000
    assert one == other


def test_the_graph_cells_are_the_support_matrix() -> None:
    """Its own cells are each in every compute dtype, too, of which no operator is another's."""
    told = {tuple(cell.values[:4]) for cell in graph_cells()}
    kinds = {f"{dtype}-{backend}" for _, _, dtype, backend in told}
    assert kinds == set(matrix.STORAGE)
    assert told == {(f, k, *s.split("-", 1)) for f in matrix.FAMILIES for k in matrix.KINDS for s in matrix.STORAGE}


def test_what_a_graph_could_not_hold_is_found(folder: Path, monkeypatch) -> None:
    """Each fault is put beside the loss. A graph holds the last one, a number of Python's, and would have it again."""
    from trainer.objectives import base as module

    counted = itertools.count(1)
    faults: dict[str, tuple[Callable[[torch.Tensor], Any], type[Exception], str]] = {
        "a read": (lambda x: x.sum().item(), DataDependentOutputException, "local_scalar_dense"),
        "a copy to the host": (lambda x: x.cpu(), pretend.Uncapturable, "tensor of the host"),
        "a question": (lambda x: bool(x.sum()), pretend.Waited, "asked a question"),
        "a copy to the device": (lambda x: torch.zeros(3).to(x.device), pretend.Uncapturable, "tensor of the host"),
        "a wait": (lambda x: torch.accelerator.synchronize(), pretend.Uncapturable, "the host waits"),
        "a keyed draw": (lambda x: draws.uniform(7, "timestep", 1), pretend.Uncapturable, "a draw of the host"),
        "a draw of Python's": (lambda x: random.random(), pretend.Uncapturable, "a generator of the host"),
        "a draw of the device": (torch.rand_like, pretend.Uncapturable, "draws"),
        "a buffer that grows": (
            lambda x: torch.empty(10**6 + next(counted), device=x.device), pretend.Uncapturable, "of another size",
        ),
        "a number": (lambda x: x * next(counted), AssertionError, "differ"),
    }  # fmt: skip
    plain = module.sample_losses
    with to_be_recorded(folder, "flux", "lora", {"dtype": "bf16", "backend": "native"}, False) as recorded:
        for name, (fault, error, message) in faults.items():

            def losses(*arguments, fault=fault, **keys):
                found = plain(*arguments, **keys)
                fault(found.detach())
                return found

            with monkeypatch.context() as patched, pytest.raises(error, match=message):
                patched.setattr(module, "sample_losses", losses)
                one, other = recorded.traces()
                assert one == other, f"{name}: the traces differ"
        one, other = recorded.traces()
        assert one == other, "without a fault"
