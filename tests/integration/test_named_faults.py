"""Faults that named trainers shipped, each under the conditions in which it appeared there.

Elsewhere: PEFT's merge over quanto, which changes nothing (numerics/test_adapted_layers.py), and the captions that
diffusers' Flux cache pairs with the latents of another photo (unit/data/batches/test_loader.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import DENOISER, Workbench, built, metrics_of, take_step
from tests.integration.test_export import inputs_for
from trainer import config as configs
from trainer.adapters import ADAPTER_NAME, Method, Target, inject
from trainer.adapters.kinds import KINDS
from trainer.base.tensorfile import TensorFile, tensor_sha256, write_tensors
from trainer.checkpoint import store
from trainer.engine.step import StepResult
from trainer.kernels import dora_torch
from trainer.models import FAMILIES
from trainer.quantization import ALL_FORMATS, FORMATS, FrozenConv2d, FrozenLinear, Geometry
from trainer.run import run as runs
from trainer.runtime import precision
from trainer.runtime.jobs import Position
from workbench.commands import main as cli

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# A few layers of each kind: what is tested does not grow with their number.
FEW = {"sdxl": ["*attn1.to_q", "*attn2.to_v"], "flux": ["*.attn.to_q", "single_transformer_blocks.*.proj_out"]}


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    """One cache for all tests here; its entries are found by what went into them."""
    return str(tmp_path_factory.mktemp("cache"))


def small(bench: Workbench, cache: str, family: str, **overrides) -> dict:
    """A config tree of few adapted layers; T5 reads 16 tokens, which fp16 on a CPU notices."""
    length = {"data__text_length": 16} if family == "flux" else {}
    return bench.tree(family, **{"data__cache_dir": cache, "adapter__targets": FEW[family]} | length | overrides)


def launch(bench: Workbench, tree: dict, *arguments: str, **run) -> int:
    """The exit status of the command line on `tree`, with `run` in its [run] table."""
    return cli.main(["--config", str(bench.write(tree | {"run": tree["run"] | run})), *arguments])


def prepared(bench: Workbench, cache: str, family: str, **overrides) -> AbstractContextManager[runs.Run]:
    """`built` on a small tree: a run before its loop."""
    return built(configs.parse(small(bench, cache, family, **overrides)))


def steps(run: runs.Run, count: int) -> Iterator[StepResult]:
    """The results of the run's first steps, one by one."""
    for step, update in zip(range(1, count + 1), run.updates(), strict=False):
        yield take_step(run, step, update)


def checkpoint(out: Path, step: int) -> Path:
    folder = out / "checkpoints" / store.folder_name(step)
    assert store.problem(folder) is None
    return folder


def same_state(one: Path, other: Path, step: int) -> bool:
    """Whether the checkpoints of two output folders hold the same adapter and optimizer, byte for byte."""
    return all(
        (checkpoint(one, step) / name).read_bytes() == (checkpoint(other, step) / name).read_bytes()
        for name in ("adapter.safetensors", "optimizer.safetensors", "quantization.json")
    )


def files_of(folder: Path) -> dict[str, bytes]:
    """Their bytes; but for config.toml, in which a resume may change what a run may."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "config.toml")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def copied_model(bench: Workbench, family: str) -> Path:
    return shutil.copytree(bench.models / family, bench.tmp / "model")


def change_tensors(model: Path, component: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    (file,) = (model / component).glob("*.safetensors")
    tensors = TensorFile(file).read_all()
    change(tensors)
    write_tensors(file, tensors)


@torch.no_grad()
def jitter(run: runs.Run) -> None:
    """Move every B and magnitude off its start, where the first gradient of A is exactly zero."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in run.adapter.named_parameters().items():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("lora_B.weight"):
            parameter.add_(0.05 * noise)
        elif name.endswith("magnitude_vector"):
            parameter.mul_(1 + 0.1 * noise)
    run.adapter.mark_stale()


def gradients(run: runs.Run, batch) -> dict[str, torch.Tensor]:
    for flat in run.step.parameters:
        flat.grad.zero_()
    run.step.losses(batch).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in run.adapter.named_parameters().items()}


# --- sd-scripts 1078 --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype", "compute"), [("sdxl", "fp8_e4m3", "bf16"), ("flux", "fp8_e5m2", "fp16")])
def test_sd_scripts_1078_state_is_saved_over_a_float8_base(bench: Workbench, cache, family, dtype, compute) -> None:
    """`fp8_base` with `save_state` ended in the writer of its checkpoint: KeyError: torch.float8_e4m3fn."""
    tree = small(
        bench, cache, family, model__components={DENOISER[family]: {"dtype": dtype}}, precision__compute=compute,
        run__max_steps=2, checkpoint__every_steps=1,
    )  # fmt: skip
    assert launch(bench, tree) == 0
    for step in (1, 2):
        folder = checkpoint(bench.tmp / "out", step)
        stored = json.loads((folder / "quantization.json").read_text())
        payloads = [layer["tensors"] for layer in stored.values() if layer.get("format") == dtype]
        kinds = {payload[name]["dtype"] for payload in payloads for name in ("weight", "scale")}
        assert kinds == {{"fp8_e4m3": "F8_E4M3", "fp8_e5m2": "F8_E5M2"}[dtype], "F32"}
        assert {e.dtype for e in TensorFile(folder / "adapter.safetensors").entries.values()} == {torch.float32}


def test_sd_scripts_1078_every_dtype_of_a_payload_is_read_back_bit_equal(tmp_path: Path) -> None:
    """The writer knew no float8; here the payload of every format goes through ours and comes back, bit for bit."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    for format in ALL_FORMATS:
        linear = FrozenLinear(40, 24, bias=False, format=format, compute_dtype=torch.bfloat16, kernels=dora_torch)
        linear.load_weight(torch.randn(24, 40, generator=generator))
        conv = FrozenConv2d((6, 4, 3, 3), Geometry((1, 1), (1, 1), (1, 1), 1), bias=False, format=format,
            compute_dtype=torch.bfloat16, kernels=dora_torch,
        )  # fmt: skip
        conv.load_weight(torch.randn(6, 4, 3, 3, generator=generator))
        for kind, layer in (("linear", linear), ("conv", conv)):
            tensors |= {f"{format.name} {kind} {role}": tensor for role, tensor in layer.payload().items()}
    # Every code there is, the NaNs too.
    for dtype in FLOAT8:
        tensors[f"codes of {dtype}"] = torch.arange(256, dtype=torch.uint8).view(dtype)
    assert {tensor.dtype for tensor in tensors.values()} == {
        torch.float32, torch.bfloat16, torch.float16, *FLOAT8, torch.int8, torch.uint8
    }  # fmt: skip
    write_tensors(tmp_path / "payloads.safetensors", tensors)
    for read in (TensorFile(tmp_path / "payloads.safetensors").read_all(), load_file(tmp_path / "payloads.safetensors")):
        assert read.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape), name
            assert tensor_sha256(read[name]) == tensor_sha256(tensor), name


# --- OneTrainer 442 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp8_e4m3", pytest.param("fp8_e5m2", marks=pytest.mark.slow)])
def test_onetrainer_442_dora_trains_over_a_float8_base(bench: Workbench, cache, dtype) -> None:
    """SDXL, DoRA and float8 weights ended in the first step: Promotion for Float8 Types is not supported."""
    tree = small(
        bench, cache, "sdxl", adapter__type="dora", adapter__targets=["*attn1.to_q", "*.conv1"],
        model__components={"unet": {"dtype": dtype}}, precision__compute="bf16", optimizer__lr=1e-2,
        checkpoint__every_steps=1,
    )  # fmt: skip
    assert launch(bench, tree) == 0
    first, last = (TensorFile(checkpoint(bench.tmp / "out", step) / "adapter.safetensors").read_all() for step in (1, 3))
    magnitudes = [name for name in first if name.endswith("magnitude_vector")]
    assert any("conv1" in name for name in magnitudes) and any("to_q" in name for name in magnitudes)
    for name in magnitudes:
        assert torch.isfinite(last[name]).all()
        assert (last[name] - first[name]).norm() > 1e-4 * first[name].norm(), name
    exported = load_file(bench.tmp / "out" / "adapters" / "bear.safetensors")
    assert sum("magnitude_vector" in name for name in exported) == len(magnitudes)


# --- DiffSynth-Studio 450 ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_diffsynth_450_a_float8_denoiser_beside_an_fp32_clip(bench: Workbench, cache) -> None:
    """One float8 dtype was given to all components, the CLIP encoder too, which could not run in it."""
    components = {"transformer": {"dtype": "fp8_e4m3", "compute": "bf16"}, "text_encoder": {"dtype": "fp32"}}
    with prepared(
        bench, cache, "flux", model__components=components, precision__compute="bf16", data__cache_text=False
    ) as run:
        clip, transformer = run.model.modules["text_encoder"], run.model.modules["transformer"]
        assert {t.dtype for t in clip.state_dict().values() if t.is_floating_point()} == {torch.float32}
        assert torch.float8_e4m3fn in {t.dtype for t in transformer.state_dict().values()}
        seen = set()

        def note(module, args, output) -> None:
            if isinstance(output, torch.Tensor):
                seen.add(output.dtype)

        for module in clip.modules():
            module.register_forward_hook(note)
        assert all(0 < step.loss < 10 for step in steps(run, 2))
        assert seen == {torch.float32}


class NoFloat8Arithmetic(TorchDispatchMode):
    """Refuses every operation on a float8 tensor but those that move it, convert it, or read its codes as bytes."""

    MOVES = {
        torch.ops.aten._to_copy, torch.ops.aten.view, torch.ops.aten._unsafe_view, torch.ops.aten.slice,
        torch.ops.aten.detach, torch.ops.aten.alias,
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.converted = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(t.dtype in FLOAT8 for t in given):
            packet = function.overloadpacket
            copied_out = packet is torch.ops.aten.copy_ and given[0].dtype not in FLOAT8
            assert packet in self.MOVES or copied_out, f"{function} on a float8 tensor"
            as_bytes = function is torch.ops.aten.view.dtype
            self.converted += packet is torch.ops.aten._to_copy or copied_out or as_bytes
        return function(*args, **(kwargs or {}))


@pytest.mark.slow
def test_diffsynth_450_a_float8_component_with_convolutions(bench: Workbench, cache) -> None:
    """A float8 convolution reached cuDNN: getCudnnDataTypeFromScalarType() not supported for Float8_e4m3fn."""
    components = {name: {"dtype": "fp8_e4m3"} for name in ("unet", "text_encoder", "text_encoder_2")}
    with prepared(
        bench, cache, "sdxl", model__components=components, precision__compute="bf16", data__cache_text=False,
        adapter__type="dora", adapter__targets=["*attn1.to_q", "*.conv1"],
        adapter__rules=[{"component": "text_encoder", "match": "*0.self_attn.q_proj"}],
    ) as run:  # fmt: skip
        layers = 0
        for name in components:
            module = run.model.modules[name]
            for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
                if tensor.dtype in FLOAT8:
                    owner, _, leaf = key.rpartition(".")
                    layer = module.get_submodule(owner)
                    assert isinstance(layer, (FrozenLinear, FrozenConv2d)) and leaf == "payload_weight", key
                    layers += 1
            for key, child in module.named_modules():
                if isinstance(child, torch.nn.Embedding) or "norm" in type(child).__name__.lower():
                    assert {p.dtype for p in child.parameters(recurse=False)} <= {torch.float32}, key
        convolutions = [
            layer for layer in run.model.modules["unet"].modules()
            if isinstance(layer, FrozenConv2d) and layer.payload_weight.dtype in FLOAT8
        ]  # fmt: skip
        assert len(convolutions) > 10 and layers > 100
        with NoFloat8Arithmetic() as mode:
            (step,) = steps(run, 1)
        # Each layer is converted at least once: the mode saw them all.
        assert mode.converted > layers and 0 < step.loss < 10


@pytest.mark.parametrize(
    ("dtype", "backend"), [("fp8_e4m3", "native"), pytest.param("fp8_e5m2", "quanto", marks=pytest.mark.slow)]
)
def test_diffsynth_450_a_float8_vae_is_refused_by_name(bench: Workbench, cache, capsys, dtype, backend) -> None:
    """What has no quantised forward was quantised all the same; here it is refused before anything is written."""
    tree = small(bench, cache, "sdxl", model__components={"vae": {"dtype": dtype, "backend": backend}})
    assert launch(bench, tree) == 2
    error = capsys.readouterr().err
    assert f"model.components.vae.dtype = '{dtype}': the VAE is not quantised" in error and "Traceback" not in error
    assert not (bench.tmp / "out").exists()


# --- SimpleTuner 751 --------------------------------------------------------------------------------------------------

LINEAR_751 = "time_text_embed.timestep_embedder.linear_1"


def flux_over_quanto(bench: Workbench, cache: str, out: str, **overrides) -> dict:
    return small(
        bench, cache, "flux", model__components={"transformer": {"dtype": "int8", "backend": "quanto"}},
        adapter__type="dora", optimizer__lr=1e-2, run__output_dir=str(bench.tmp / out), run__max_steps=4,
        precision__compute="bf16", **overrides,
    )  # fmt: skip


@pytest.mark.slow
def test_simpletuner_751_flux_over_quanto_resumes(bench: Workbench, cache) -> None:
    """A resume ended in KeyError 'time_text_embed.timestep_embedder.linear_1.weight._data'."""
    tree = flux_over_quanto(bench, cache, "out")
    assert launch(bench, tree, max_steps=2, stop_after=1) == 0
    stored = json.loads((checkpoint(bench.tmp / "out", 1) / "quantization.json").read_text())
    sensitive = FAMILIES["flux"].component("transformer").sensitive
    exempt = any(fnmatchcase(LINEAR_751, pattern) for pattern in sensitive)
    assert stored[f"transformer.{LINEAR_751}"]["format"] == ("bf16" if exempt else "int8")
    assert launch(bench, tree, "--resume_from", "latest", max_steps=2) == 0
    assert json.loads((checkpoint(bench.tmp / "out", 2) / "quantization.json").read_text()) == stored


@dataclass
class Stopped:
    """A run over quanto with checkpoints at its steps 1 and 2, in a folder of the test's own."""

    bench: Workbench
    tree: dict
    model: Path

    def resume(self, step: int | None = None) -> int:
        start = "auto" if step is None else str(checkpoint(self.bench.tmp / "out", step))
        return launch(self.bench, self.tree, "--resume_from", start)


@pytest.fixture(scope="module")
def stopped_run(models: Path, cache: str, tmp_path_factory) -> tuple[Path, dict]:
    bench = Workbench(models, tmp_path_factory.mktemp("stopped"))
    model = copied_model(bench, "flux")
    tree = flux_over_quanto(bench, cache, "out", model__path=str(model), checkpoint__every_steps=1)
    assert launch(bench, tree, stop_after=2) == 0
    return bench.tmp, tree


@pytest.fixture
def stopped(stopped_run, bench: Workbench, capsys) -> Iterator[Stopped]:
    folder, tree = stopped_run
    shutil.copytree(folder / "out", bench.tmp / "out")
    shutil.copytree(folder / "model", folder / "unchanged")
    yield Stopped(bench, tree | {"run": tree["run"] | {"output_dir": str(bench.tmp / "out")}}, folder / "model")
    shutil.rmtree(folder / "model")
    (folder / "unchanged").rename(folder / "model")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "start"), [("single_transformer_blocks.0.proj_mlp", None), ("single_transformer_blocks.0.proj_mlp", 1),
                         (LINEAR_751, None)],
)  # fmt: skip
def test_simpletuner_751_resume_over_a_changed_base_is_refused(stopped: Stopped, capsys, layer, start) -> None:
    """It loaded a state into a differently built model; here the tensor that differs is named, and nothing is lost."""
    out = stopped.bench.tmp / "out"
    before = files_of(out)
    change_tensors(stopped.model, "transformer", lambda tensors: tensors[f"{layer}.weight"].neg_())
    assert stopped.resume(start) == 2
    error = capsys.readouterr().err
    assert f"transformer.{layer}" in error and "Traceback" not in error
    after = files_of(out)
    assert after.keys() == before.keys() and all(after[name] == before[name] for name in before)


# --- diffusers 6086, 7330, 10752 --------------------------------------------------------------------------------------


def fp16(bench: Workbench, cache: str, family: str, out: str = "out", **overrides) -> dict:
    """fp16 everywhere, a clipping that always bites, and a scale that overflows at once."""
    return small(
        bench, cache, family, **{
            "adapter__type": "dora", "precision__compute": "fp16", "step__max_grad_norm": 1e-3,
            "model__components": {DENOISER[family]: {"dtype": "fp16"}}, "optimizer__lr": 1e-2,
            "precision__loss_scale": 2.0**20, "run__max_steps": 6,
            "run__output_dir": str(bench.tmp / out),
        } | overrides,
    )  # fmt: skip


@pytest.mark.slow
def test_diffusers_6086_fp16_with_clipping_resume_and_validation(bench: Workbench, cache, monkeypatch) -> None:
    """ValueError: Attempting to unscale FP16 gradients; again after a resume, and after a validation."""
    monkeypatch.setattr(precision, "GROWTH_INTERVAL", 1)
    family = "flux"
    assert launch(bench, fp16(bench, cache, family, "whole")) == 0
    whole = metrics_of(bench.tmp / "whole")
    scales, skipped = [entry["loss_scale"] for entry in whole], [entry["skipped"] for entry in whole]
    assert any(skipped) and not all(skipped)
    assert any(b < a for a, b in zip(scales, scales[1:], strict=False)), "the scale never fell"
    assert any(b > a for a, b in zip(scales, scales[1:], strict=False)), "the scale never rose"
    # More than the limit, so clipped; and not still scaled.
    assert all(1e-3 < entry["grad_norm"] < 10 for entry in whole if not entry["skipped"])

    # Samples between all steps and a stop change no bit of it.
    parts = fp16(
        bench, cache, family, "parts", validation__every_steps=1, validation__prompts=["a bear"], validation__steps=1
    )  # fmt: skip
    assert launch(bench, parts, stop_after=3) == 0
    assert launch(bench, parts, "--resume_from", "latest") == 0
    assert len(list((bench.tmp / "parts" / "samples").glob("step-*/00.png"))) == 7
    assert metrics_of(bench.tmp / "parts") == whole
    assert same_state(bench.tmp / "whole", bench.tmp / "parts", 6)
    for name in ("adapter.safetensors", "optimizer.safetensors"):
        entries = TensorFile(checkpoint(bench.tmp / "parts", 6) / name).entries
        assert {entry.dtype for entry in entries.values()} == {torch.float32}


@pytest.mark.parametrize("family", [pytest.param("sdxl", marks=pytest.mark.slow), "flux"])
def test_diffusers_7330_validation_leaves_the_adapter_as_it_is(bench: Workbench, cache, family) -> None:
    """Drawing samples cast the trained adapter to fp16 by `pipeline.to(dtype)`; the next unscaling raised."""
    tree = fp16(
        bench, cache, family, validation__every_steps=1, validation__prompts=["a bear"], validation__steps=1,
        precision__loss_scale=256.0,
    )  # fmt: skip
    with built(configs.parse(tree)) as run:
        list(steps(run, 1))
        named = run.adapter.named_parameters()

        def state() -> dict:
            return {
                name: (p, p.data_ptr(), p.dtype, p.requires_grad, p.grad.data_ptr(), p.grad.dtype)
                for name, p in named.items()
            }

        before, values = state(), {name: (p.detach().clone(), p.grad.clone()) for name, p in named.items()}
        frozen = {name: t.dtype for name, t in run.model.modules[DENOISER[family]].state_dict().items()}
        run.artifacts().draw_samples(Position(run.progress.step, run.plan.length.max_steps))
        assert all(run.adapter.named_parameters()[name] is named[name] for name in named)
        assert state() == before
        for name, (value, grad) in values.items():
            assert torch.equal(named[name], value) and torch.equal(named[name].grad, grad), name
            assert named[name].dtype == torch.float32 and named[name].requires_grad
        assert frozen == {name: t.dtype for name, t in run.model.modules[DENOISER[family]].state_dict().items()}
        list(steps(run, 1))
        assert not any(torch.equal(named[name], values[name][0]) for name in named if "lora_B" in name)


AOT = "aot_eager"  # torch.compile traces and differentiates, without a code generator


def compiled_equals_eager(bench: Workbench, cache: str, family: str, part: str, **overrides) -> None:
    """Four steps with and without `part` of the denoiser compiled: scaled, overflowed, unscaled and clipped alike."""
    results = {}
    for out in ("eager", "compiled"):
        # One shape, so that one graph does.
        tree = fp16(
            bench, cache, family, out, precision__loss_scale=2.0**22, data__bucket_step=64, data__batch_size=1, **overrides
        )  # fmt: skip
        with built(configs.parse(tree)) as run:
            if out == "compiled":
                torch._dynamo.reset()
                run.model.modules[DENOISER[family]].get_submodule(part).compile(backend=AOT)
            jitter(run)
            scales, clipped = [], {}
            for step in steps(run, 4):
                scales.append((not step.updated, step.loss_scale))
                # Of the first update alone: Adam makes whole steps of the signs of gradients near zero.
                if step.updated and not clipped:
                    clipped = {name: p.grad.clone() for name, p in run.adapter.named_parameters().items()}
            results[out] = scales, clipped
    (scales, expected), (others, got) = results["eager"], results["compiled"]
    assert scales == others and {skipped for skipped, _ in scales} == {True, False}
    assert torch.stack([gradient.norm() for gradient in got.values()]).norm() == pytest.approx(1e-3, rel=1e-3)
    for name, gradient in expected.items():
        # Mostly the very same; where the trace computes otherwise, 400 roundings of 2^-11 add up like a random walk.
        assert (got[name] - gradient).norm() <= 20 * 2**-11 * gradient.norm(), name


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("flux", "single_transformer_blocks.0.proj_out"),
        pytest.param("sdxl", "mid_block.attentions.0.transformer_blocks.0", marks=pytest.mark.slow),
    ],
)
def test_diffusers_10752_fp16_with_clipping_where_a_part_is_compiled(bench: Workbench, cache, family, part) -> None:
    """Attempting to unscale FP16 gradients, once more, where the denoiser was compiled."""
    compiled_equals_eager(bench, cache, family, part)


@pytest.mark.proof
def test_diffusers_10752_fp16_with_clipping_over_a_compiled_denoiser(bench: Workbench, cache) -> None:
    """The same with the whole denoiser, over a float8 base, with every attention layer adapted."""
    family = "flux"
    components = {DENOISER[family]: {"dtype": "fp8_e4m3"}}
    compiled_equals_eager(
        bench, cache, family, "", model__components=components, adapter__targets="attention"
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["fp16", "fp8_e4m3"])
def test_diffusers_10752_a_frozen_layer_compiles_whatever_its_input(storage) -> None:
    """A compiled layer is given what the models give it: rows that do not lie one after the other."""
    layer = FrozenLinear(8, 6, bias=True, format=FORMATS[storage], compute_dtype=torch.float16, kernels=dora_torch)
    generator = torch.Generator().manual_seed(0)
    layer.load_weight(torch.randn(6, 8, generator=generator))
    layer.bias.data.normal_(generator=generator)
    results = []
    for function in (torch.compile(layer, backend=AOT), layer):
        x = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(1)).half().requires_grad_()
        y = function(x.permute(0, 2, 1))
        y.float().square().sum().backward()
        results.append((y.detach(), x.grad))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


# --- diffusers: adapters in bf16 --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_diffusers_adapters_stay_fp32_under_bf16_and_small_updates_arrive(bench: Workbench, cache) -> None:
    """Adapters were kept in bf16 under bf16, where an update a ten-thousandth of its weight vanishes."""
    with prepared(
        bench, cache, "flux", model__components={"transformer": {"dtype": "bf16"}}, precision__compute="bf16",
        adapter__type="dora", optimizer__lr=1e-6,
    ) as run:  # fmt: skip
        jitter(run)
        named = run.adapter.named_parameters()
        before = {name: parameter.detach().clone() for name, parameter in named.items()}
        list(steps(run, 1))
        state = [t for values in run.step.optimizer.state.values() for t in values.values() if torch.is_tensor(t)]
        assert {t.dtype for t in (*named.values(), *state)} == {torch.float32}
        for name, parameter in named.items():
            moved = parameter.detach() - before[name]
            # Adam's first update: lr, and less where the gradient is as small as eps.
            gradient, start = parameter.grad.double(), before[name].double()
            decay = 0.0 if name.endswith("magnitude_vector") else 0.01
            due = -1e-6 * (gradient / (gradient.abs() + 1e-8) + decay * start)
            assert ((moved.double() - due).abs() <= 2**-23 * start.abs() + 1e-11).all(), name
            if not name.endswith("lora_B.weight"):
                lost = (before[name].bfloat16() + moved.bfloat16()) == before[name].bfloat16()
                assert lost.float().mean() > 0.95, "the test's updates are too large to show the fault"


# --- LyCORIS, SimpleTuner: DoRA that is none --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        ("int8", "quanto"),
        *(pytest.param(*cell, marks=pytest.mark.slow) for cell in (("int4", "quanto"), ("nf4", "bitsandbytes"))),
    ],
)
def test_lycoris_simpletuner_dora_over_a_quantised_base_is_not_lora(bench: Workbench, cache, dtype, backend) -> None:
    """LyCORIS trained plain LoRA over a quantised base, SimpleTuner switched DoRA off over quanto; neither said so."""
    outputs, factors = {}, {}
    for kind in ("dora", "lora"):
        with prepared(
            bench, cache, "flux", model__components={"transformer": {"dtype": dtype, "backend": backend}},
            adapter__type=kind, optimizer__lr=1e-2, run__output_dir=str(bench.tmp / kind),
        ) as run:  # fmt: skip
            start = {name: parameter.detach().clone() for name, parameter in run.adapter.named_parameters().items()}
            list(steps(run, 3))
            with torch.no_grad():
                outputs[kind] = run.model.modules["transformer"](**inputs_for("flux", run)).sample
            factors[kind] = {name: t.clone() for name, t in run.adapter.state_dict().items()}
            assert all(layer.get_base_layer().format.dtype_name == dtype for layer in run.adapter.layers.values())
            if kind == "dora":
                magnitudes = [name for name in start if name.endswith("magnitude_vector")]
                assert len(magnitudes) == len(run.adapter.layers)
                for name in magnitudes:
                    moved = (factors[kind][name] - start[name]).abs() / start[name]
                    # fp32 rounds to 2^-24 of the value; a step at this rate is some 1e-2 of it.
                    assert (moved > 1e-4).float().mean() > 0.9, name
                exported = load_file(run.artifacts().export("bear")["diffusers"])
                assert sum("magnitude_vector" in name for name in exported) == len(magnitudes)
    assert factors["lora"].keys() < factors["dora"].keys()
    for name in factors["lora"]:
        apart = (factors["lora"][name] - factors["dora"][name]).norm()
        assert apart > 1e-3 * factors["lora"][name].norm(), name
    assert (outputs["lora"] - outputs["dora"]).norm() > 1e-3 * outputs["lora"].norm()


# --- ai-toolkit: DoRA without alpha -----------------------------------------------------------------------------------


def test_ai_toolkit_dora_depends_on_alpha_over_rank() -> None:
    """Its DoRA left alpha / rank out, so that alpha changed nothing."""
    weights = {}
    for alpha in (2.0, 8.0):
        layer = FrozenLinear(12, 10, bias=True, format=FORMATS["fp32"], compute_dtype=torch.float32, kernels=dora_torch)
        generator = torch.Generator().manual_seed(0)
        layer.load_weight(torch.randn(10, 12, generator=generator))
        layer.bias.data.zero_()
        adapter = inject(
            {"net": torch.nn.Sequential(layer)},
            [Target("net", "0", 4, alpha)],
            bases=(FrozenLinear, FrozenConv2d),
            method=Method(KINDS["dora"]),
            seed=0,
        )
        (adapted,) = adapter.layers.values()
        b = adapted.lora_B[ADAPTER_NAME].weight
        b.data.normal_(generator=generator)
        adapter.mark_stale()
        x = torch.eye(12)
        a = adapted.lora_A[ADAPTER_NAME].weight
        direction = layer.dequantize(torch.float64) + alpha / 4 * b.double() @ a.double()
        norm = layer.dequantize(torch.float64).norm(dim=1, keepdim=True)
        weights[alpha] = adapted(x).t().detach()
        expected = norm * direction / direction.norm(dim=1, keepdim=True)
        assert torch.allclose(weights[alpha].double(), expected, rtol=1e-5, atol=1e-6)
    assert (weights[2.0] - weights[8.0]).norm() > 0.1 * weights[2.0].norm()


# --- bitsandbytes: a no-grad forward that changes the weights ---------------------------------------------------------


@pytest.mark.parametrize("family", ["flux", pytest.param("sdxl", marks=pytest.mark.slow)])
def test_bitsandbytes_nf4_gradients_are_the_same_after_a_validation(bench: Workbench, cache, family) -> None:
    """One forward without gradients on a CPU made its 4-bit layers repack their weights; gradients were zero from then."""
    with prepared(
        bench, cache, family, model__components={DENOISER[family]: {"dtype": "nf4"}}, precision__compute="bf16",
        adapter__type="dora", validation__every_steps=1, validation__steps=2, validation__prompts=["a bear"],
    ) as run:  # fmt: skip
        jitter(run)
        batch = run.reader[next(run.updates())[0]]
        before = gradients(run, batch)
        run.artifacts().draw_samples(Position(run.progress.step, run.plan.length.max_steps))
        after = gradients(run, batch)
        assert all(gradient.norm() > 0 for gradient in before.values())
        assert all(torch.equal(after[name], gradient) for name, gradient in before.items())


# --- optimum-quanto: missing keys -------------------------------------------------------------------------------------


def test_optimum_quanto_a_base_without_one_tensor_is_refused(bench: Workbench, cache, capsys) -> None:
    """`requantize` accepted a state with missing keys and went on with what it found in memory."""
    model = copied_model(bench, "flux")
    name = "transformer_blocks.0.attn.to_k.weight"
    change_tensors(model, "transformer", lambda tensors: tensors.pop(name))
    assert launch(bench, flux_over_quanto(bench, cache, "out", model__path=str(model))) == 2
    error = capsys.readouterr().err
    assert f"'{name}' of component 'transformer' is missing" in error and "Traceback" not in error
    assert not (bench.tmp / "out").exists()


@pytest.mark.parametrize("file", ["adapter.safetensors", "optimizer.safetensors", "quantization.json"])
def test_optimum_quanto_a_checkpoint_without_one_tensor_is_refused(stopped: Stopped, capsys, file) -> None:
    """The same for what a checkpoint holds, where its manifest was made to match."""
    out = stopped.bench.tmp / "out"
    folder = checkpoint(out, 2)
    if file == "quantization.json":
        stored = json.loads((folder / file).read_text())
        gone = sorted(stored)[0]
        del stored[gone]
        (folder / file).write_text(json.dumps(stored))
    else:
        tensors = TensorFile(folder / file).read_all()
        gone = sorted(tensors)[0]
        del tensors[gone]
        write_tensors(folder / file, tensors)
    assert store.problem(folder) is not None
    store.save(out / "checkpoints", 2, {k: [v] for k, v in files_of(folder).items() if k != store.MANIFEST})
    before = files_of(out)
    assert stopped.resume() == 2
    error = capsys.readouterr().err
    assert gone.removesuffix(".weight") in error and "Traceback" not in error
    assert files_of(out) == before
