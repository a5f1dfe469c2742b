"""Attention over few tokens on a CPU is computed in fp32: as exactly as 16 bits hold, and in a recomputation alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import apply_rotary_emb, get_1d_rotary_pos_embed
from diffusers.models.transformers.transformer_flux import FluxAttention
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from trainer.base.memory import checkpoint_blocks, recomputing
from trainer.kernels import dora_torch
from trainer.models import FAMILIES
from trainer.models.shared.attention import rotated
from trainer.runtime import attention

CPU = torch.device("cpu")


def results(call: Callable[..., Tensor], given: list[Tensor], upstream: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The output and the gradients of query, key and value, in fp64."""
    inputs = [tensor.to(dtype).requires_grad_() for tensor in given]
    out = call(*inputs)
    return [each.detach().double() for each in (out, *torch.autograd.grad(out, inputs, upstream.to(dtype)))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("queries", "keys", "size"), [(4, 77, 16), (16, 16, 64), (128, 77, 32), (128, 128, 128)])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_no_less_exact_than_in_16_bits(dtype: torch.dtype, queries: int, keys: int, size: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(queries + keys + size)
    shapes = (2, 3, queries, size), (2, 3, keys, size), (2, 3, keys, size), (2, 3, queries, size)
    *given, upstream = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    mask = torch.randn(2, 1, queries, keys, generator=generator).to(dtype) if masked else None

    def theirs(*inputs: Tensor) -> Tensor:
        return scaled_dot_product_attention(*inputs, None if mask is None else mask.to(inputs[0].dtype))

    truth = results(theirs, given, upstream, torch.float64)
    ours = results(lambda *inputs: attention.attention(*inputs, mask), given, upstream, dtype)
    low = results(theirs, given, upstream, dtype)
    for exact, mine, other in zip(truth, ours, low, strict=True):
        # Rounded once at the end, which no result in that dtype can be without.
        rounding = (exact.to(dtype).double() - exact).norm()
        assert (mine - exact).norm() <= min((other - exact).norm(), 1.01 * rounding)


def test_other_arguments_and_other_tensors_are_torchs() -> None:
    """Many tokens, and fp32: torch's own call. A mask of booleans, causal order, a scale and grouped heads are handed on."""
    query, key = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    allowed = torch.ones(6, 6, dtype=torch.bool).tril()
    for keys in ({"is_causal": True}, {"attn_mask": allowed}, {"scale": 0.3}):
        keys |= {"enable_gqa": True}
        expected = scaled_dot_product_attention(query, key, key, **keys)
        given = (tensor.bfloat16() for tensor in (query, key, key))
        found = attention.attention(*given, **keys)
        assert found.dtype == torch.bfloat16 and torch.allclose(found.float(), expected, atol=0.02)
    seen = []

    def noted(query, *others, **keys):
        seen.append(query.dtype)
        return scaled_dot_product_attention(query, *others, **keys)

    with patch.object(nn.functional, "scaled_dot_product_attention", noted):
        for tokens, dtype in ((attention.FEW, torch.bfloat16), (attention.FEW + 1, torch.bfloat16), (4, torch.float64)):
            attention.attention(*(torch.randn(1, 1, tokens, 8, dtype=dtype) for _ in range(3)))
    assert seen == [torch.float32, torch.bfloat16, torch.float64]


def block(kind: str, **options: Any) -> tuple[nn.Module, Tensor]:
    """An attention layer of diffusers in bf16, and an input."""
    torch.manual_seed(0)
    layer = (
        Attention(32, heads=2, dim_head=16, **options)
        if kind == "sdxl"
        else FluxAttention(32, heads=2, dim_head=16, **options)
    )
    return nn.ModuleList([layer.bfloat16()]), torch.randn(2, 6, 32, dtype=torch.bfloat16, requires_grad=True)


def given_processors(kind: str, layers: nn.Module, device: torch.device = CPU) -> None:
    attention.TORCHS_OWN.give(layers, FAMILIES[kind].memory.attention, device)


def angles(tokens: int) -> tuple[Tensor, Tensor]:
    turn = torch.rand(tokens, 16)
    return turn.cos(), turn.sin()


# How the families' denoisers call their layers: (options of the layer, what it gets beside the tokens).
CALLS = {
    "sdxl": [
        ({}, {}),
        ({"cross_attention_dim": 24}, {"encoder_hidden_states": torch.randn(2, 5, 24)}),
        ({}, {"attention_mask": torch.randn(2, 1, 6)}),
        ({"rescale_output_factor": 2.0, "bias": True}, {}),
        ({"residual_connection": True, "norm_num_groups": 4}, {}),
        ({"qk_norm": "layer_norm"}, {}),
    ],
    "flux": [
        ({"pre_only": True}, {"image_rotary_emb": angles(6)}),
        ({"added_kv_proj_dim": 32}, {"encoder_hidden_states": torch.randn(2, 5, 32), "image_rotary_emb": angles(11)}),
    ],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("kind", "options", "more"), [(kind, *call) for kind, calls in CALLS.items() for call in calls])
def test_our_processors_compute_what_diffusers_do(kind: str, options: dict, more: dict, dtype: torch.dtype) -> None:
    """Outputs and gradients, bit for bit, where the attention itself is the same."""
    given, found = {key: value.to(dtype) if isinstance(value, Tensor) else value for key, value in more.items()}, []
    for ours in (False, True):
        (layer,), x = block(kind, **options)
        layer.to(dtype)
        x = x.detach().to(dtype).requires_grad_()
        if (
            ours
            and (processor := FAMILIES[kind].memory.attention(layer, scaled_dot_product_attention, dora_torch)) is not None
        ):
            layer.set_processor(processor)
        out = layer(x, **given)
        outs = out if isinstance(out, tuple) else (out,)
        found.append([*outs, *torch.autograd.grad([each.float().square().sum() for each in outs], [x, *layer.parameters()])])
    assert all(map(torch.equal, *found))


def test_layers_with_more_than_products_keep_their_processor() -> None:
    for options, _ in CALLS["sdxl"]:
        (layer,), _ = block("sdxl", **options)
        plain = not options.keys() & {"residual_connection", "qk_norm"}
        assert (FAMILIES["sdxl"].memory.attention(layer, attention.attention, dora_torch) is not None) == plain


@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_a_recomputation_computes_alike(kind: str) -> None:
    """Forward and recomputation call fp32 attention; the gradients are those without recomputation, bit for bit."""
    seen: list[tuple[torch.dtype, bool]] = []

    def noted(query, *others, **keys):
        seen.append((query.dtype, recomputing()))
        return scaled_dot_product_attention(query, *others, **keys)

    gradients = []
    for recomputed in (False, True):
        layers, x = block(kind)
        given_processors(kind, layers)
        if recomputed:
            checkpoint_blocks({"0": layers[0]}, True)
        with patch.object(nn.functional, "scaled_dot_product_attention", noted):
            gradients.append(torch.autograd.grad(layers[0](x).sum(), x)[0])
    assert seen == [(torch.float32, False), (torch.float32, False), (torch.float32, True)]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_torchs_function_stays_everybody_elses(kind: str) -> None:
    """Another model in the process and an accelerator's keep torch's attention, and torch's function is never another."""
    theirs, (layers, x), (others, _) = nn.functional.scaled_dot_product_attention, block(kind), block(kind)
    plain, seen = others[0](x), []
    given_processors(kind, layers, torch.device("cuda"))
    assert torch.equal(layers[0](x), plain)
    given_processors(kind, layers)
    others[0].to_v.register_forward_hook(lambda *_: seen.append(nn.functional.scaled_dot_product_attention))
    layers[0].to_v.register_forward_hook(lambda *_: seen.append(nn.functional.scaled_dot_product_attention))
    assert not torch.equal(layers[0](x), plain) and torch.equal(others[0](x), plain)
    assert seen == [theirs, theirs]


@settings(deadline=None, max_examples=25)
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]), batch=st.integers(1, 2), tokens=st.integers(1, 40),
    heads=st.integers(1, 3), size=st.sampled_from([2, 6, 16, 128]), seed=st.integers(0, 99),
    scale=st.sampled_from([1e-6, 1, 300]),
)  # fmt: skip
def test_a_rotation_is_bit_for_bit_the_librarys_pieces(dtype, batch, tokens, heads, size, seed, scale) -> None:
    """And so is its gradient."""
    generator = torch.Generator().manual_seed(seed)
    shape = batch, tokens, heads, size
    given, upstream = ([scale * torch.randn(shape, generator=generator).to(dtype) for _ in "qk"] for _ in range(2))
    angles = get_1d_rotary_pos_embed(size, torch.arange(tokens), repeat_interleave_real=True, use_real=True)
    theirs, ours = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    expected = [apply_rotary_emb(x, angles, sequence_dim=1) for x in theirs]
    turned = rotated(*ours, angles, dora_torch)
    torch.autograd.backward(expected, upstream), torch.autograd.backward(turned, upstream)
    with torch.no_grad():
        again = rotated(*given, angles, dora_torch)
    for at in range(2):
        assert torch.equal(turned[at], expected[at]) and torch.equal(again[at], expected[at])
        assert torch.equal(ours[at].grad, theirs[at].grad)
