"""A compiled block is the block: one program for forward, recomputation and backward, and the numbers of an ordinary one."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock
from torch import Tensor, nn

from trainer.adapters import Adapter, Method, inject, match_targets
from trainer.base.memory import checkpoint_blocks
from trainer.kernels import dora_torch
from trainer.models import FAMILIES
from trainer.plan.storage import Storage
from trainer.quantization import FORMATS, FrozenConv2d, FrozenLayer, FrozenLinear
from trainer.quantization.formats import Dense
from trainer.runtime.attention import few_tokens_in_fp32
from trainer.runtime.compilation import Compiler

CPU = torch.device("cpu")
AOT = "aot_eager"  # torch traces and differentiates, without a code generator
WIDTH, HEADS, TOKENS, TEXT = 32, 2, 9, 5
SIZES = {"num_attention_heads": HEADS, "attention_head_dim": WIDTH // HEADS}
BLOCKS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "double": ("flux", lambda: FluxTransformerBlock(dim=WIDTH, **SIZES)),
    "single": ("flux", lambda: FluxSingleTransformerBlock(dim=WIDTH, **SIZES)),
    "sdxl": ("sdxl", lambda: BasicTransformerBlock(WIDTH, **SIZES, cross_attention_dim=24)),
}
STORAGES = ("bf16", "fp8_e4m3", "int8", "nf4")
EXACT = Dense("fp64", torch.float64)


@dataclass
class Built:
    """A block with its adapter, alone in a denoiser."""

    kind: str
    block: nn.Module
    adapter: Adapter
    dtype: torch.dtype

    def results(self) -> dict[str, Tensor]:
        """Outputs and gradients of a forward and backward, by name. The adapter is refreshed before, as a denoiser's is."""
        self.adapter.mark_stale()
        self.adapter.refresh()
        parameters = self.adapter.named_parameters()
        for parameter in parameters.values():
            parameter.grad = None
        given = inputs(self.kind, self.dtype)
        outputs = self.block(**given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        generator = torch.Generator().manual_seed(3)
        sum((y * torch.randn(y.shape, generator=generator).to(y.dtype)).sum() for y in outputs).backward()
        made = {f"output {place}": y.detach() for place, y in enumerate(outputs)}
        made |= {name: t.grad for name, t in given.items() if isinstance(t, Tensor) and t.requires_grad}
        return made | {name: parameter.grad for name, parameter in parameters.items()}


def inputs(kind: str, dtype: torch.dtype, tokens: int = TOKENS) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(dtype).requires_grad_()

    if kind == "sdxl":
        return {"hidden_states": drawn(2, tokens, WIDTH), "encoder_hidden_states": drawn(2, TEXT, 24)}
    hidden, text, time = drawn(2, tokens, WIDTH), drawn(2, TEXT, WIDTH), drawn(2, WIDTH)
    rotary = torch.randn(2, TEXT + tokens, WIDTH // HEADS, generator=generator).to(torch.promote_types(dtype, torch.float32))
    return {"hidden_states": hidden, "encoder_hidden_states": text, "temb": time, "image_rotary_emb": tuple(rotary)}


def built(kind: str, adapter: str, storage: str, *, exact: Built | None = None) -> Built:
    """The same weights at every call. exact: of which the numbers are taken over, in fp64."""
    family = FAMILIES[BLOCKS[kind][0]]
    name, dtype = family.denoiser, torch.bfloat16 if exact is None else torch.float64
    torch.manual_seed(0)
    with torch.device("meta"):
        denoiser = nn.Module()
        denoiser.blocks = nn.ModuleList([BLOCKS[kind][1]()])
    Storage(name, FORMATS[storage] if exact is None else EXACT, dtype).swap(denoiser, kernels=dora_torch)
    denoiser.to_empty(device=CPU)
    theirs = {} if exact is None else dict(exact.block.named_modules(prefix="blocks.0"))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in denoiser.parameters():
            parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator).bfloat16())
        for path, layer in denoiser.named_modules():
            if isinstance(layer, FrozenLayer):
                drawn = torch.randn(layer.weight_shape, generator=generator) * layer.weight_shape[1] ** -0.5
                there = theirs.get(path)
                there = getattr(there, "base_layer", there)
                layer.load_weight(drawn.bfloat16() if there is None else there.dequantize(torch.float32).double())
    linears = [path for path, layer in denoiser.named_modules() if isinstance(layer, FrozenLayer)]
    targets = match_targets(
        {name: linears}, denoiser=name, targets="attention+mlp", presets=family.presets, rules=(), rank=4, alpha=2.0
    )
    made = inject({name: denoiser}, targets, method=Method(adapter == "dora"), bases=(FrozenLinear, FrozenConv2d), seed=0)
    denoiser.eval()
    if exact is not None:
        denoiser.double()
    with torch.no_grad():
        for parameter_name, parameter in sorted(made.named_parameters().items()):
            if exact is not None:
                parameter.copy_(exact.adapter.named_parameters()[parameter_name])
            elif "magnitude" in parameter_name:
                parameter.mul_(1 + 0.1 * torch.rand(parameter.shape, generator=generator))
            else:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    made.share_inputs(name, family.shared_inputs[name])
    few_tokens_in_fp32(denoiser, family.attention, CPU)
    return Built(kind, denoiser.blocks[0], made, dtype)


def compiled(of: Built, folder: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> Compiler:
    """Have the block recomputed within a program, by another backend of torch.compile."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    lookup = torch._dynamo.lookup_backend
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: lookup(backend))
    compiler = Compiler(folder, lambda line: None)
    checkpoint_blocks({"0": of.block}, True, compiled=("0",))
    assert compiler.compile({"0": of.block}) == 1
    return compiler


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("adapter", ["lora", "dora"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_traced_and_differentiated_a_block_has_the_same_bytes(tmp_path, monkeypatch, kind, adapter, storage) -> None:
    """In one program, which an update of the adapter does not make anew."""
    ordinary, other = (built(kind, adapter, storage) for _ in range(2))
    compiler = compiled(other, tmp_path, monkeypatch, AOT)
    for _ in range(2):
        expected, got = ordinary.results(), other.results()
        assert all(torch.equal(expected[name], got[name]) for name in expected), kind
        assert expected.keys() == got.keys() and all(t.abs().sum() > 0 for t in got.values())
        with torch.no_grad():
            for of in (ordinary, other):
                for parameter in of.adapter.named_parameters().values():
                    parameter.mul_(1.25)
    assert compiler.told() == {"compiled": 1}


def envelope(kind: str, adapter: str, storage: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary, other = (built(kind, adapter, storage) for _ in range(2))
    compiled(other, folder, monkeypatch, "inductor")
    exact, expected, got = built(kind, adapter, storage, exact=ordinary).results(), ordinary.results(), other.results()
    ratios = []
    for name, truth in exact.items():
        of_eager, of_compiled = ((results[name].double() - truth).norm() for results in (expected, got))
        assert of_eager < 0.1 * truth.norm(), name
        ratios.append(float(of_compiled / of_eager))
    assert max(ratios) <= 1.5 and statistics.median(ratios) <= 1.1, ratios


@pytest.mark.slow
def test_compiled_it_errs_no_more_than_an_ordinary_one(tmp_path, monkeypatch) -> None:
    """From fp64, tensor by tensor."""
    envelope("single", "dora", "fp8_e4m3", tmp_path, monkeypatch)


@pytest.mark.proof
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("adapter", ["lora", "dora"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_compiled_any_block_errs_no_more_than_an_ordinary_one(tmp_path, monkeypatch, kind, adapter, storage) -> None:
    envelope(kind, adapter, storage, tmp_path, monkeypatch)
