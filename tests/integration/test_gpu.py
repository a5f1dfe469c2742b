"""Training on a CUDA device: the fused kernels inside whole models. Run by scripts/gpu_suite.sh (`pytest -m gpu`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.bench_attention import SHAPES
from tests.harness import DENOISER, ROOT, Workbench, built, take_step
from tests.numerics.test_step_oracle import GRADIENT_TOLERANCE
from trainer import config as configs
from trainer import kernels
from trainer.base.errors import UserError
from trainer.checkpoint import state, store
from trainer.runtime import attention, precision, streaming
from workbench.commands import launch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = "cuda"


def config_of(
    bench: Workbench, family: str, storage: str, compute: str, kernels: str, name: str, matmul: str = "compute",
    attention: str = "auto",
):  # fmt: skip
    return bench.config(
        family, run__device=DEVICE, run__output_dir=str(bench.tmp / name), adapter__type="dora", adapter__targets="all",
        adapter__kernels=kernels, precision__compute=compute, precision__matmul=matmul,
        memory__gradient_checkpointing=True, step__attention=attention,
        model__components={DENOISER[family]: {"dtype": storage}},
    )  # fmt: skip


def gradients(
    config,
    watched: AbstractContextManager[Any] = nullcontext(),  # noqa: B008
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, gradient by parameter) of the first micro-batch, from an adapter that is not at its start. watched: around
    it."""
    with built(config) as run:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in run.adapter.named_parameters().items():
                jitter = torch.randn(parameter.shape, generator=generator).to(run.context.processes.device)
                if name.endswith("lora_B.weight"):
                    parameter.add_(0.05 * jitter)
                elif name.endswith("magnitude_vector"):
                    parameter.mul_(1 + 0.1 * jitter)
        run.adapter.mark_stale()
        batch = run.reader[next(run.updates())[0]]
        with watched:
            loss = run.step.losses(batch).mean()
            with run.step.attention():
                loss.backward()
        named = run.adapter.named_parameters().items()
        return loss.detach().cpu(), {name: p.grad.double().cpu() for name, p in named}


@pytest.mark.parametrize("family", ["sdxl", "flux"])
@pytest.mark.parametrize("storage", ["bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "nf4"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_fused_kernels_equal_the_plain_ones(bench: Workbench, family: str, storage: str, compute: str) -> None:
    """One micro-batch through the whole model, Triton against plain PyTorch, both on the device."""
    fused_loss, fused = gradients(config_of(bench, family, storage, compute, "triton", "fused"))
    plain_loss, plain = gradients(config_of(bench, family, storage, compute, "torch", "plain"))
    # fp32 as in test_step_oracle.py. bf16: both round at the same places but sum in another order, so that single
    # roundings (2^-9 on average) fall the other way; over some hundred layers those add up like a random walk.
    tolerance = GRADIENT_TOLERANCE if compute == "fp32" else 2 * 100**0.5 * 2**-9
    assert torch.allclose(fused_loss, plain_loss, rtol=tolerance)
    off = sum(float((fused[name] - plain[name]).square().sum()) for name in plain) ** 0.5
    size = sum(float(plain[name].square().sum()) for name in plain) ** 0.5
    assert off <= tolerance * size, f"{off / size:.2e}"


@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_float8_products_in_a_whole_model(bench: Workbench, monkeypatch, family: str) -> None:
    """precision.matmul = "fp8", fused and plain: they differ by float8's own error at most, in loss and gradients.

    Not by less: where one 16-bit rounding falls the other way, now and then a code does after it, an eighth away, and within
    some layers the codes are as good as drawn anew. Two independent draws differ by sqrt(2) times the error of one, which is
    4 % (Flux) and 7 % (SDXL) of the gradient in these models, measured on a CPU.
    """
    monkeypatch.setattr(kernels, "FP8_MIN_WEIGHTS", 1)
    monkeypatch.setattr(kernels, "FP8_MIN_ROWS", 1)
    monkeypatch.setattr(precision, "check_scaled_matmul", lambda *_: None)  # it refuses the plain kernels on CUDA: slow
    fused_loss, fused = gradients(config_of(bench, family, "fp8_e4m3", "bf16", "triton", "fused", "fp8"))
    plain_loss, plain = gradients(config_of(bench, family, "fp8_e4m3", "bf16", "torch", "plain", "fp8"))
    _, without = gradients(config_of(bench, family, "fp8_e4m3", "bf16", "torch", "without"))

    def off(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
        return sum(float((one[name] - other[name]).square().sum()) for name in other) ** 0.5

    size = off(plain, {name: torch.zeros_like(g) for name, g in plain.items()})
    assert 0.02 * size < off(plain, without) < 0.15 * size
    assert off(fused, plain) < 1.5 * off(plain, without)
    assert torch.allclose(fused_loss, plain_loss, rtol=0.02)


# What torch calls for each kind of step.attention.
OPERATORS = {
    "flash": "aten::_scaled_dot_product_flash_attention",
    "cudnn": "aten::_scaled_dot_product_cudnn_attention",
    "efficient": "aten::_scaled_dot_product_efficient_attention",
    "math": "aten::_scaled_dot_product_attention_math",
}


@pytest.mark.parametrize("family", ["sdxl", "flux"])
@pytest.mark.parametrize("kind", ["auto", *OPERATORS])
def test_each_attention_is_itself_alone_and_gives_the_gradients(bench: Workbench, family: str, kind: str) -> None:
    """Recomputed, too. A kind that the card or the model's heads do not suit is refused before a weight is read."""
    config = config_of(bench, family, "bf16", "bf16", "torch", kind, attention=kind)
    watched = profile(activities=[ProfilerActivity.CPU])
    try:
        loss, found = gradients(config, watched)
    except UserError as error:
        assert kind in ("cudnn", "efficient") and f"step.attention = '{kind}' is not for this model on" in str(error)
        return
    called = {event.key for event in watched.key_averages()} & {*OPERATORS.values()}
    plain_loss, plain = gradients(config_of(bench, family, "bf16", "bf16", "torch", "plain", attention="math"))
    assert called and (kind == "auto" or called == {OPERATORS[kind]})
    # Roundings of 16 bits in each attention, which add up like a random walk.
    tolerance = 2 * 100**0.5 * 2**-9
    assert torch.allclose(loss, plain_loss, rtol=tolerance)
    off = sum(float((found[name] - plain[name]).square().sum()) for name in plain) ** 0.5
    size = sum(float(plain[name].square().sum()) for name in plain) ** 0.5
    assert off <= tolerance * size, f"{off / size:.2e}"


@pytest.mark.parametrize("kind", ["flash", "cudnn"])
def test_a_kernel_of_16_bits_is_refused_in_fp32(bench: Workbench, kind: str) -> None:
    with (
        pytest.raises(UserError, match=rf"step\.attention = '{kind}' is not for this model on .*; use 'auto'"),
        built(config_of(bench, "flux", "bf16", "fp32", "torch", kind, attention=kind)),
    ):
        pass


@pytest.mark.parametrize("kind", ["auto", "flash", "efficient"])
@pytest.mark.parametrize(("heads", "queries", "keys", "size"), [row for rows in SHAPES.values() for row in rows])
def test_attention_at_the_published_shapes_is_plain_attention(
    kind: str, heads: int, queries: int, keys: int, size: int
) -> None:
    """What the trial at the start does in small, at full size: one head of each shape, forward and backward."""
    device = torch.device(DEVICE)
    chosen = attention.choose(kind, device, torch.bfloat16, lambda: {size})
    results = []
    for used, dtype in ((chosen, torch.bfloat16), (attention.planned("math"), torch.float32)):
        generator = torch.Generator().manual_seed(0)
        drawn = (torch.randn(1, tokens, 1, size, generator=generator).bfloat16() for tokens in (queries, keys, keys, queries))
        *inputs, upstream = (each.to(device, dtype).transpose(1, 2) for each in drawn)
        inputs = [each.detach().requires_grad_() for each in inputs]
        with used.used():
            out = torch.nn.functional.scaled_dot_product_attention(*inputs)
        results.append([out.detach(), *torch.autograd.grad(out, inputs, upstream)])
    for found, exact in zip(*results, strict=True):
        assert (found.float() - exact).norm() <= attention.TOLERANCE * exact.norm()


@pytest.mark.parametrize("family", ["sdxl", "flux"])
@pytest.mark.parametrize("storage", ["bf16", "fp8_e4m3", "nf4"])
@pytest.mark.parametrize("memory", [{}, {"offload": "blocks", "resident_blocks": 0}], ids=["resident", "streamed"])
def test_trains_and_resumes(bench: Workbench, family: str, storage: str, memory: dict[str, Any]) -> None:
    """Three steps with clipping, accumulation and recomputed blocks, streamed ones, too (ai-toolkit #1054): finite, every
    tensor with a gradient moved; and a resume goes on."""
    tree = config_of(bench, family, storage, "bf16", "auto", "run").model_dump(exclude_none=True, mode="json")
    tree["optimizer"] = {"name": "adamw8bit", "lr": 1e-3}
    tree["step"]["accumulation"] = 2
    tree["memory"] |= memory
    for steps in (2, 3):
        tree["run"]["max_steps"] = steps
        launch.train(configs.parse(tree), resume_from="auto")
    folder, _ = store.find(bench.tmp / "run" / "checkpoints", "latest")
    assert folder is not None and folder.name == "step-00000003"
    adapter = state.Saved(folder, state.PIECES).state("adapter")
    assert all(torch.isfinite(t).all() for t in adapter.values())
    still = [name for name, t in adapter.items() if name.endswith("lora_B.weight") and not t.any()]
    assert not still, still


def test_masters_take_no_more_of_the_hosts_memory_than_their_bytes() -> None:
    """AnimaLora #511: what is streamed took up to twice its bytes."""
    masters = [torch.empty(2**26 + 2**20 * number, dtype=torch.uint8) for number in range(8)]
    torch.zeros(1, device=DEVICE)
    process = psutil.Process()
    before = process.memory_info().rss
    streaming._pin(masters)
    taken = process.memory_info().rss - before
    streaming._unpin(masters)
    assert taken <= 1.03 * sum(master.nbytes for master in masters)


@pytest.mark.parametrize("offload", ["none", "blocks"])
def test_reserved_memory_does_not_grow_with_changes_of_size(bench: Workbench, offload: str) -> None:
    """AnimaLora #506: another size each step let the allocator keep more and more."""
    sizes = {"run__device": DEVICE, "run__max_steps": 200, "data__resolution": [48, 64, 80], "data__batch_size": 1}
    reserved, shapes = [], []
    with built(bench.config("flux", **sizes, precision__compute="bf16", memory={"offload": offload})) as run:
        for step, update in zip(range(1, 201), run.updates(), strict=False):
            take_step(run, step, update)
            reserved.append(torch.cuda.memory_reserved())
            shapes.append(run.reader[update[0]].latents.shape)
    assert sum(one != other for one, other in pairwise(shapes)) > 60
    assert max(reserved[100:]) == max(reserved[:100])


def deterministic_tree(bench: Workbench, family: str, adapter: str, optimizer: str, out: str) -> dict[str, Any]:
    """Five steps over photos of 512 px, whose attention and sums are long enough to be divided among programs."""
    tree = bench.tree(
        family, run__device=DEVICE, run__deterministic=True, run__max_steps=5, data__resolution=512,
        run__output_dir=str(bench.tmp / f"{adapter}-{optimizer}-{out}"), data__cache_dir=str(bench.tmp / f"cache-{out}"),
        precision__compute="bf16", adapter__type=adapter, adapter__targets="all", step__accumulation=2,
        memory__gradient_checkpointing=True, model__components={DENOISER[family]: {"dtype": "fp8_e4m3"}},
        optimizer__name=optimizer, optimizer__lr=1.0 if optimizer == "prodigy" else 1e-3,
        validation__prompts=["a bear"], validation__steps=2,
        **({"optimizer__options": {"d0": 1e-4}} if optimizer == "prodigy" else {}),
    )  # fmt: skip
    if adapter == "lora":
        query = {"sdxl": "*.q_proj", "flux": "*.q"}[family]
        tree["adapter"] |= {"dropout": 0.2, "rules": [{"component": "text_encoder_2", "match": query}]}
    return tree


def run_elsewhere(bench: Workbench, name: str, trees: list[dict[str, Any]]) -> str:
    """Train each of `trees`, in one process of their own: run.deterministic sets what belongs to the process. Returns what
    they said."""
    path = bench.tmp / f"{name}.json"
    path.write_text(json.dumps(trees))
    environment = {key: value for key, value in os.environ.items() if key != "CUBLAS_WORKSPACE_CONFIG"}
    command = [sys.executable, "-m", "tests.integration.test_gpu", str(path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    ("family", "cells"),
    [
        ("sdxl", [("lora", "adamw"), ("dora", "adamw8bit")]),
        ("flux", [("lora", "adamw8bit"), ("dora", "adamw")]),
        ("sdxl", [("dora", "lion"), ("lora", "prodigy")]),
        ("flux", [("dora", "came"), ("lora", "schedulefree_adamw")]),
        ("sdxl", [("dora", "muon"), ("lora", "paged_adamw8bit")]),
        ("flux", [("dora", "adafactor"), ("lora", "lion8bit")]),
    ],
)
def test_deterministic_runs_end_in_the_same_bytes(bench: Workbench, family: str, cells: list[tuple[str, str]]) -> None:
    """Two runs, each with a cache of its own, and one that was stopped and resumed, in three processes. Cells: pairwise."""
    stopped = [deterministic_tree(bench, family, *cell, "resumed") for cell in cells]
    for tree in stopped:
        tree["run"]["stop_after"] = 3
    run_elsewhere(bench, "first", [deterministic_tree(bench, family, *cell, "whole") for cell in cells])
    run_elsewhere(bench, "second", [*stopped, *(deterministic_tree(bench, family, *cell, "again") for cell in cells)])
    for tree in stopped:
        del tree["run"]["stop_after"]
    run_elsewhere(bench, "third", stopped)
    differing = [
        (adapter, optimizer, out, file)
        for adapter, optimizer in cells
        for out in ("again", "resumed")
        for file in ("adapter.safetensors", "optimizer.safetensors")
        if len({
            (bench.tmp / f"{adapter}-{optimizer}-{each}" / "checkpoints" / "step-00000005" / file).read_bytes()
            for each in ("whole", out)
        }) > 1
    ]  # fmt: skip
    assert not differing


@pytest.mark.parametrize(
    ("family", "adapter", "optimizer"),
    [("sdxl", "dora", "adamw"), ("flux", "dora", "adamw8bit"), ("sdxl", "lora", "adamw8bit"), ("flux", "lora", "adamw")],
)
def test_graphs_leave_the_bytes_of_eager_steps(bench: Workbench, family: str, adapter: str, optimizer: str) -> None:
    """Samples before them, an adapted text encoder, dropped ranks; stopped and resumed, with graphs and without."""

    def tree(out: str, *, graphs: bool) -> dict[str, Any]:
        made = deterministic_tree(bench, family, adapter, optimizer, out)
        made["run"]["max_steps"], made["step"]["graphs"] = 10, graphs
        if made["adapter"].pop("dropout", None):
            made["adapter"]["rank_dropout"] = 0.2
        return made

    half = [tree(out, graphs=True) for out in ("graphs to graphs", "graphs to eager")]
    for each in half:
        each["run"]["stop_after"] = 6
    said = run_elsewhere(bench, "whole", [tree("eager", graphs=False), tree("graphs", graphs=True), *half])
    assert said.count("are a CUDA graph now") >= 3
    run_elsewhere(
        bench, "resumed", [tree(out, graphs=out.endswith("graphs")) for out in ("graphs to graphs", "graphs to eager")]
    )
    left = {
        (out, file): (
            bench.tmp / f"{adapter}-{optimizer}-{out}" / "checkpoints" / "step-00000010" / f"{file}.safetensors"
        ).read_bytes()
        for out in ("eager", "graphs", "graphs to graphs", "graphs to eager")
        for file in ("adapter", "optimizer")
    }
    assert not [(out, file) for (out, file), content in left.items() if content != left["eager", file]]


@pytest.mark.parametrize(
    ("family", "storage", "adapter", "resident"),
    [
        ("sdxl", "fp8_e4m3", "dora", 0),
        ("flux", "fp8_e4m3", "dora", 1),
        ("sdxl", "nf4", "lora", 1),
        ("flux", "bf16", "lora", 0),
    ],
)
def test_streamed_blocks_leave_the_bytes_of_resident_ones(
    bench: Workbench, family: str, storage: str, adapter: str, resident: int
) -> None:
    """Blocks that a card's own copy engine brings in, beside what computes; stopped and resumed, streamed and not."""

    def tree(out: str, *, streamed: bool) -> dict[str, Any]:
        made = deterministic_tree(bench, family, adapter, "adamw", out)
        made["model"]["components"][DENOISER[family]]["dtype"] = storage
        if streamed:
            made["memory"] |= {"offload": "blocks", "resident_blocks": resident}
        return made

    half = [tree(out, streamed=True) for out in ("streamed to streamed", "streamed to resident")]
    for each in half:
        each["run"]["stop_after"] = 3
    said = run_elsewhere(bench, "whole", [tree("resident", streamed=False), tree("streamed", streamed=True), *half])
    assert said.count("blocks are streamed") >= 3
    run_elsewhere(
        bench, "resumed",
        [tree(out, streamed=out.endswith("streamed")) for out in ("streamed to streamed", "streamed to resident")],
    )  # fmt: skip
    left = {
        (out, file): (
            bench.tmp / f"{adapter}-adamw-{out}" / "checkpoints" / "step-00000005" / f"{file}.safetensors"
        ).read_bytes()
        for out in ("resident", "streamed", "streamed to streamed", "streamed to resident")
        for file in ("adapter", "optimizer")
    }
    assert not [(out, file) for (out, file), content in left.items() if content != left["resident", file]]


@pytest.mark.parametrize("family", ["sdxl", "flux"])
@pytest.mark.parametrize("offload", ["none", "blocks"])
def test_compiled_blocks_give_the_gradients_of_eager_ones(bench: Workbench, family: str, offload: str) -> None:
    """Programs that torch.compile makes for a card, over float8, resident and streamed."""
    eager = config_of(bench, family, "fp8_e4m3", "bf16", "triton", "eager")
    tree = eager.model_dump(exclude_none=True, mode="json")
    tree["run"]["output_dir"] = str(bench.tmp / "compiled")
    tree["step"]["compile"] = "blocks"
    if offload == "blocks":
        tree["memory"] |= {"offload": "blocks", "resident_blocks": 0}
    loss, plain = gradients(eager)
    compiled_loss, found = gradients(configs.parse(tree))
    tolerance = 2 * 100**0.5 * 2**-9  # as above: both round to 16 bits, not at the same places
    assert torch.allclose(compiled_loss, loss, rtol=tolerance)
    off = sum(float((found[name] - plain[name]).square().sum()) for name in plain) ** 0.5
    size = sum(float(plain[name].square().sum()) for name in plain) ** 0.5
    assert off <= tolerance * size, f"{off / size:.2e}"


if __name__ == "__main__":
    for each in json.loads(Path(sys.argv[1]).read_text()):
        launch.train(configs.parse(each), resume_from="auto")
