"""A compiled block is the block: one program for forward, recomputation and backward, and the numbers of an ordinary one."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock
from torch import Tensor, nn

from tests.harness import pairs
from trainer.adapters import Method, inject, match_targets
from trainer.adapters.adapter import ADAPTER_NAME
from trainer.adapters.kinds import KINDS
from trainer.adapters.layers import AdaptedLayer
from trainer.base.memory import checkpoint_blocks
from trainer.kernels import decode, dora_torch
from trainer.models import FAMILIES
from trainer.plan.storage import Storage
from trainer.quantization import FORMATS, FrozenLinear
from trainer.runtime.attention import TORCHS_OWN, Attention
from trainer.runtime.compilation import Compiler

CPU = torch.device("cpu")
AOT = "aot_eager"  # torch traces and differentiates, without a code generator
# Large enough for the ratio of two errors to be one of the program, not of a few roundings.
WIDTH, HEADS, TOKENS, TEXT, RANK = 64, 2, 64, 24, 16
SIZES = {"num_attention_heads": HEADS, "attention_head_dim": WIDTH // HEADS}
BLOCKS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "double": ("flux", lambda: FluxTransformerBlock(dim=WIDTH, **SIZES)),
    "single": ("flux", lambda: FluxSingleTransformerBlock(dim=WIDTH, **SIZES)),
    "sdxl": ("sdxl", lambda: BasicTransformerBlock(WIDTH, **SIZES, cross_attention_dim=24)),
}
STORAGES = ("bf16", "fp8_e4m3", "int8", "nf4")
FACTORS = (tuple(BLOCKS), ("lora", "dora", "lokr"), STORAGES)
# A double block has nothing that a single one and SDXL's have not, at twice their time.
FEW = {("double", "dora", "fp8_e4m3"), *pairs(("single", "sdxl"), *FACTORS[1:])}


@dataclass
class Built:
    """A block and what is trained in it, by name. refresh: due before a forward, as a denoiser sees to it."""

    kind: str
    block: nn.Module
    parameters: dict[str, Tensor]
    dtype: torch.dtype
    refresh: Callable[[], object] = lambda: None

    def results(self) -> dict[str, Tensor]:
        """Outputs and gradients of a forward and backward, by name."""
        self.refresh()
        for parameter in self.parameters.values():
            parameter.grad = None
        given = inputs(self.kind, self.dtype)
        outputs = self.block(**given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        generator = torch.Generator().manual_seed(3)
        sum((y * torch.randn(y.shape, generator=generator).to(y.dtype)).sum() for y in outputs).backward()
        made = {f"output {place}": y.detach() for place, y in enumerate(outputs)}
        made |= {name: t.grad for name, t in given.items() if isinstance(t, Tensor) and t.requires_grad}
        return made | {name: parameter.grad for name, parameter in self.parameters.items()}


def inputs(kind: str, dtype: torch.dtype, tokens: int = TOKENS) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(dtype).requires_grad_()

    if kind == "sdxl":
        return {"hidden_states": drawn(2, tokens, WIDTH), "encoder_hidden_states": drawn(2, TEXT, 24)}
    hidden, text, time = drawn(2, tokens, WIDTH), drawn(2, TEXT, WIDTH), drawn(2, WIDTH)
    rotary = torch.randn(2, TEXT + tokens, WIDTH // HEADS, generator=generator).to(torch.promote_types(dtype, torch.float32))
    return {"hidden_states": hidden, "encoder_hidden_states": text, "temb": time, "image_rotary_emb": tuple(rotary)}


def built(kind: str, adapter: str, storage: str) -> Built:
    """In bf16, with the same weights at every call."""
    family = FAMILIES[BLOCKS[kind][0]]
    name = family.denoiser
    with torch.device("meta"):
        denoiser = nn.Module()
        denoiser.blocks = nn.ModuleList([BLOCKS[kind][1]()])
    Storage(name, FORMATS[storage], torch.bfloat16).swap(denoiser, kernels=dora_torch)
    denoiser.to_empty(device=CPU)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in denoiser.parameters():
            parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
        linears = {path: layer for path, layer in denoiser.named_modules() if isinstance(layer, FrozenLinear)}
        for layer in linears.values():
            layer.load_weight(torch.randn(layer.weight_shape, generator=generator).mul_(layer.in_features**-0.5).bfloat16())
    targets = match_targets(
        {name: list(linears)},
        denoiser=name,
        targets="attention+mlp",
        presets=family.adapters.presets,
        rules=(),
        rank=RANK,
        alpha=8.0,
    )
    made = inject({name: denoiser}, targets, method=Method(KINDS[adapter]), bases=(FrozenLinear,), seed=0)
    denoiser.eval()
    with torch.no_grad():
        for path, parameter in made.named_parameters().items():
            if "magnitude" in path:
                parameter.mul_(1 + 0.1 * torch.rand(parameter.shape, generator=generator))
            else:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    made.share_inputs(name, family.memory.shared_inputs[name])
    TORCHS_OWN.give(denoiser, family.memory.attention, CPU)
    return Built(
        kind, denoiser.blocks[0], made.named_parameters(), torch.bfloat16, lambda: made.mark_stale() or made.refresh()
    )


class Exact(nn.Module):
    """An adapted layer as the papers have it, in fp64: of the dense weight g * (W + s B A)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        adapted = isinstance(layer, AdaptedLayer)
        base = layer.get_base_layer() if adapted else layer
        self.w, self.bias, self.of = base.dequantize(torch.float32).double(), base.bias_N, [None, None, None]
        if adapted:
            _, *modules, _ = layer.active()
            self.of = [None if each is None else each.weight.detach().double().requires_grad_() for each in modules]
            self.scaling = layer.scaling[ADAPTER_NAME]

    def forward(self, x: Tensor) -> Tensor:
        v, (a, b, m) = self.w, self.of
        if a is not None:
            v = v + self.scaling * b @ a
        if m is not None:
            v = v * (m / v.detach().norm(dim=1))[:, None]
        return nn.functional.linear(x, v, None if self.bias is None else self.bias.double())


def exactly(of: Built) -> Built:
    """The same block in fp64."""
    block, parameters = BLOCKS[of.kind][1]().double(), {}
    block.load_state_dict(
        {name: t.double() for name, t in of.block.named_parameters() if name in block.state_dict()}, strict=False
    )
    for path, layer in of.block.named_modules():
        if isinstance(layer, (AdaptedLayer, FrozenLinear)) and not path.endswith("base_layer"):
            exact = Exact(layer)
            block.set_submodule(path, exact)
            names = [name for name in of.parameters if f".blocks.0.{path}." in name]
            parameters |= dict(zip(names, exact.of, strict=False))
    return Built(of.kind, block, {name: parameters[name] for name in of.parameters}, torch.float64)


def compiled(of: Built, folder: Path, monkeypatch: pytest.MonkeyPatch, backend: str, *, recomputed: bool = True) -> Compiler:
    """Have the block recomputed within a program, by another backend of torch.compile."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    lookup = torch._dynamo.lookup_backend
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: lookup(backend))
    compiler = Compiler(folder, "", lambda line: None)
    checkpoint_blocks({"0": of.block}, recomputed, compiled=("0",))
    assert compiler.compile({"0": of.block}) == 1
    return compiler


@pytest.mark.parametrize(
    ("kind", "adapter", "storage"),
    [pytest.param(*cell, marks=pytest.mark.slow if cell in FEW else pytest.mark.proof) for cell in product(*FACTORS)],
)
def test_traced_and_differentiated_a_block_has_the_same_bytes(tmp_path, monkeypatch, kind, adapter, storage) -> None:
    """In one program, which an update of the adapter does not make anew."""
    ordinary, other = (built(kind, adapter, storage) for _ in range(2))
    compiler = compiled(other, tmp_path, monkeypatch, AOT)
    for _ in range(2):
        expected, got = ordinary.results(), other.results()
        assert all(torch.equal(expected[name], got[name]) for name in expected), kind
        assert expected.keys() == got.keys() and all(t.abs().sum() > 0 for t in got.values())
        with torch.no_grad():
            other.block(**inputs(kind, other.dtype))  # as samples, and a held-out loss, come in between
            for of in (ordinary, other):
                for parameter in of.parameters.values():
                    parameter.mul_(1.25)
    assert compiler.log_fields() == {"compiled": 1}


@pytest.mark.slow
def test_a_program_recomputes_what_it_was_told_to(tmp_path, monkeypatch) -> None:
    """Of a block's activations none is kept for its backward, where they are recomputed."""
    kept = []
    for recomputed in (True, False):
        of = built("single", "lora", "bf16")
        compiled(of, tmp_path, monkeypatch, AOT, recomputed=recomputed)
        of.refresh()
        given = inputs(of.kind, of.dtype)
        outputs = of.block(**given)
        program = outputs[0].grad_fn.next_functions[0][0]  # it gave what the outputs are slices of
        first = {2, 2 * (TEXT + TOKENS)}  # the sizes that activations begin with
        kept.append(len([t for t in program.saved_tensors if t.shape[0] in first]))
    assert kept[0] == 3 < kept[1]  # the block's inputs


class Attends(nn.Module):
    """A block of nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.slow
def test_a_program_of_another_attention_is_not_taken(tmp_path, monkeypatch) -> None:
    """It calls the kernel that was set when it was made, whatever is set now."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found, counters = [], torch._dynamo.utils.counters["aot_autograd"]
    for kind in ("flash", "math", "math"):
        of, before = Attends(), counters["autograd_cache_hit"]
        Compiler(tmp_path, kind, lambda line: None).compile({"0": of})
        with Attention((kind,)).used():
            of(torch.ones(1, 1, 16, 8, requires_grad=True)).sum().backward()
        found.append(counters["autograd_cache_hit"] - before)
    assert found == [0, 0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["cut off", "a file", "shared", "shared above"])
def test_a_cache_that_cannot_be_trusted_counts_as_empty(tmp_path, monkeypatch, fault: str) -> None:
    """It is named, and what is computed is the same. What others may write would be run as this user."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    said, counters, folder = [], torch._dynamo.utils.counters["aot_autograd"], tmp_path / "cache" / "compiled"

    def run() -> Tensor:
        of = Attends()
        Compiler(folder, "math", said.append).compile({"0": of})
        with Attention(("math",)).used():
            return of(torch.ones(1, 1, 16, 8, requires_grad=True))

    assert torch.equal(first := run(), run()) and not said
    if fault == "cut off":
        for file in folder.rglob("*.*"):
            if file.suffix in (".so", ".py"):
                part = file.read_bytes()[:100]
                file.unlink()  # this process has it loaded
                file.write_bytes(part)
    elif fault == "a file":
        folder.rename(tmp_path / "aside")
        folder.write_text("")
    else:
        (folder if fault == "shared" else folder.parent).chmod(0o777)
    torch._inductor.codecache.PyCodeCache.cache_clear()
    hits = counters["autograd_cache_hit"]
    assert torch.equal(run(), first) and (fault == "cut off" or counters["autograd_cache_hit"] == hits)
    (line,) = said
    assert line.startswith(f"warning: compiled code in {folder} counts as none (")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] != str(folder)
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).stat().st_mode & 0o777 == 0o700


def test_a_large_weight_is_one_loop_of_a_program() -> None:
    """Its pieces, which suit a CPU's cache, would each be written out: thousands in a block of Flux."""
    layer = FrozenLinear(
        1024, 2048, bias=False, format=FORMATS["fp8_e4m3"], compute_dtype=torch.bfloat16, kernels=dora_torch, device=CPU
    )
    layer.load_weight(torch.randn(2048, 1024, generator=torch.Generator().manual_seed(0)))
    weight, programs = layer.stored(), []

    def backend(graph: torch.fx.GraphModule, given: list[Tensor]) -> Callable:
        programs.append(graph)
        return graph.forward

    torch.compiler.reset()
    made = torch.compile(lambda: dora_torch.upcast(weight, torch.bfloat16), backend=backend, fullgraph=True)()
    assert len(list(decode.pieces(weight.shape, CPU))) == 4 and torch.equal(made, dora_torch.upcast(weight, torch.bfloat16))
    (program,) = programs
    assert sum(node.target == "bitwise_left_shift_" for node in program.graph.nodes) == 1


def envelope(kind: str, adapter: str, storage: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary, other = (built(kind, adapter, storage) for _ in range(2))
    compiled(other, folder, monkeypatch, "inductor")
    exact, expected, got = exactly(ordinary).results(), ordinary.results(), other.results()
    ratios = []
    for name, truth in exact.items():
        of_eager, of_compiled = ((results[name].double() - truth).norm() for results in (expected, got))
        assert of_eager < 0.1 * truth.norm(), name
        ratios.append(float(of_compiled / of_eager))
    assert max(ratios) <= 1.5 and statistics.median(ratios) <= 1.1, ratios


@pytest.mark.slow
def test_compiled_it_errs_no_more_than_an_ordinary_one(tmp_path, monkeypatch) -> None:
    """From fp64, tensor by tensor."""
    envelope("single", "lora", "bf16", tmp_path, monkeypatch)


@pytest.mark.proof
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("adapter", ["lora", "dora"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_compiled_any_block_errs_no_more_than_an_ordinary_one(tmp_path, monkeypatch, kind, adapter, storage) -> None:
    envelope(kind, adapter, storage, tmp_path, monkeypatch)
