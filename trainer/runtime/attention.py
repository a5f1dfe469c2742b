"""Which of torch's kernels compute the denoiser's attention (step.attention), and attention over few tokens on a CPU.

Text encoders and the VAE have masks, fp32 and wide heads, which not every kernel takes. They, and the denoiser under "auto"
where cuDNN's is not the faster, have torch's own order: flash, memory-efficient, plain (precision.py leaves cuDNN's out of
it).
"""

import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer.base import memory
from trainer.base.errors import UserError
from trainer.base.protocols import Kernels
from trainer.kernels import dora_torch

# Queries up to which copies in fp32, and attention of these, are faster on a CPU than torch's attention in 16 bits (by up to
# 8 times, torch 2.13, docs/benchmarks/cpu.md), at every head size, forward and backward. Over many tokens the copies cost
# memory and, in bf16, more time than they save.
FEW = 128

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# The order of "auto" on a card of these compute capabilities (Hopper, and Blackwell in data centres), as torch prefers it.
CUDNN_FIRST, ORDER = (9, 10), ("cudnn", "flash", "efficient", "math")
# The first cuDNN that is tried. With 9.19 on an H100 the gradients of Flux were not finite, and a step read outside its
# memory, after which a process can do nothing more on the card.
CUDNN = 92000

# (queries, keys) that a kernel is tried with. cuDNN went wrong where half of a tile of 128 is left over.
TRIED = ((192, 192), (256, 77))
# Of a result of 16 bits, relative: four roundings, in the norm.
TOLERANCE = 2.0**-6


@dataclass(frozen=True)
class Attention:
    """What computes the denoiser's attention. kinds: of KERNELS; each call takes the first that can take it, and torch raises
    RuntimeError where none can; none named: torch's own order. note: why it is not what it could be."""

    kinds: tuple[str, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        return ", ".join(self.kinds) or OWN

    def used(self) -> AbstractContextManager[Any]:
        """A block in which all attention of the process is computed so: for a whole pass, as it takes a dozen calls into
        torch."""
        kernels = [KERNELS[kind] for kind in self.kinds]
        return sdpa_kernel(kernels, set_priority=True) if kernels else nullcontext()

    def taken(self, device: torch.device, dtype: torch.dtype, sizes: Collection[int], tokens: int) -> str:
        """What torch takes of these for an image of so many tokens, in training. sizes: of heads."""
        with self.used():
            drawn = (_drawn(device, dtype, tokens, tokens, size, 0)[:3] for size in sorted(sizes))
            chosen = [torch._fused_sdp_choice(*(tensor.requires_grad_() for tensor in each)) for each in drawn]
        return " and ".join(dict.fromkeys(SDPBackend(each).name.removesuffix("_ATTENTION").lower() for each in chosen))

    def give(
        self, denoiser: nn.Module, processor: Callable[..., Any], device: torch.device, kernels: Kernels = dora_torch
    ) -> None:
        """Have a denoiser on a device compute so. Blocks run again in a backward pass, outside the denoiser's forward: that
        pass has to be made in `used`. processor: `MemoryPart.attention` of the models."""
        attend = attention if device.type == "cpu" and not self.kinds else attention_once
        for layer in denoiser.modules():
            if hasattr(layer, "set_processor") and (ours := processor(layer, attend, kernels)) is not None:
                layer.set_processor(ours)
        if not self.kinds:
            return
        forward = denoiser.forward

        @wraps(forward)
        def inside(*args: Any, **keys: Any) -> Any:
            with self.used():
                return forward(*args, **keys)

        denoiser.forward = inside


OWN = "torch's own"  # as checkpoints have it, and those mean that say nothing
TORCHS_OWN = Attention()


def planned(asked: str) -> Attention:
    """`step.attention` where the card is not here."""
    return TORCHS_OWN if asked == "auto" else Attention((asked,))


def choose(
    asked: str, device: torch.device, dtype: torch.dtype, sizes: Callable[[], Collection[int]], tokens: int = 0
) -> Attention:
    """`step.attention` on a device. A kernel is tried before it is taken, for the denoiser's compute dtype, head sizes and
    tokens.

    Raises UserError for a kind that the device lacks; "auto" takes another order then, and its note says why.
    """
    if device.type == "cpu" and asked not in ("auto", "math"):
        raise UserError(f"step.attention = {asked!r} needs a GPU, and this run is on the CPU; use 'auto' or 'math'")
    if device.type != "cuda" or asked == "math":
        return planned(asked)
    name = torch.cuda.get_device_name(device)
    if asked != "auto":
        if why := fault(asked, device, dtype, sizes(), tokens):
            raise UserError(f"step.attention = {asked!r} is not for this model on {name}: {why}; use 'auto'")
        return Attention((asked,))
    if torch.cuda.get_device_capability(device)[0] not in CUDNN_FIRST:
        return TORCHS_OWN
    why = fault("cudnn", device, dtype, sizes(), tokens)
    return Attention(note=f"without cuDNN's: {why}") if why else Attention(ORDER)


def head_sizes(denoiser: nn.Module) -> set[int]:
    """The sizes of its attention layers' heads."""
    return {layer.inner_dim // layer.heads for layer in denoiser.modules() if hasattr(layer, "set_processor")}


def fault(kind: str, device: torch.device, dtype: torch.dtype, sizes: Collection[int], tokens: int = 0) -> str:
    """Why a kernel does not do for training there, in words; "" where it does: tried forward and backward, without a mask, as
    no family has one, against plain attention in fp32. sizes: of heads. tokens: of the run's largest image, where plain
    attention may be too large, and the results have to be finite; 0: not tried."""
    if kind == "cudnn" and (version := torch.backends.cudnn.version() or CUDNN) < CUDNN:
        return f"cuDNN {version // 10000}.{version // 100 % 100} was seen to give wrong gradients; install a newer torch"
    whole = [(tokens, tokens, -120)] if tokens else []
    for size in sorted(sizes):
        for queries, keys, score in [*((*pair, score) for pair in TRIED for score in (0, -120)), *whole]:
            if why := _fault_at(kind, score, *_drawn(device, dtype, queries, keys, size, score)):
                return f"{why} (head size {size})"
    return ""


def _drawn(
    device: torch.device, dtype: torch.dtype, queries: int, keys: int, size: int, score: int
) -> tuple[torch.Tensor, ...]:
    """Query, key, value and the output's gradient, [1, 2, tokens, size], as the denoisers have them in memory. score: about
    what is added to each. A softmax does not change by it, but exponents may leave fp32."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, tokens, 2, size) for tokens in (queries, keys, keys, queries)]
    query, key, value, upstream = (torch.randn(shape, generator=generator) for shape in shapes)
    if score:
        query[..., 0], key[..., 0] = 1, score * size**0.5
    return tuple(each.to(device, dtype).transpose(1, 2) for each in (query, key, value, upstream))


def _fault_at(kind: str, score: int, *given: torch.Tensor) -> str:
    def results(kind: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
        *inputs, upstream = (tensor.detach() for tensor in tensors)
        inputs = [tensor.requires_grad_() for tensor in inputs]
        with Attention((kind,)).used():
            out = nn.functional.scaled_dot_product_attention(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]

    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        try:
            outputs = results(kind, *given)
        except RuntimeError as error:  # torch has no kernel for it
            return _why_not(kind, given) or str(error).splitlines()[0]
    if not all(bool(torch.isfinite(each).all()) for each in outputs):
        return "its results are not finite where those of plain attention are"
    if score:
        return ""  # it multiplies a sum of next to nothing, which no 16 bits give exactly
    exact = results("math", *(tensor.float() for tensor in given))
    off = max(float((mine.float() - true).norm() / true.norm()) for mine, true in zip(outputs, exact, strict=True))
    return f"its results differ by {off:.2g} from those of plain attention" if off > TOLERANCE else ""


def _why_not(kind: str, given: tuple[torch.Tensor, ...]) -> str:
    """What torch says why it has no such kernel; "" where it says nothing."""
    query, key, value, _ = (tensor.detach().requires_grad_() for tensor in given)
    can_use = getattr(torch.backends.cuda, f"can_use_{kind}_attention")
    with Attention((kind,)).used(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        can_use(torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, False, False), True)
    return str(caught[0].message).partition(" (Triggered")[0].rstrip(".") if caught else ""


def only_plain() -> bool:
    """Whether attention is computed by torch's plain kernel just now, which keeps every score for its backward pass."""
    return torch.backends.cuda.math_sdp_enabled() and not torch.backends.cuda.flash_sdp_enabled()


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, **keys: Any
) -> torch.Tensor:
    """torch's scaled_dot_product_attention of [..., tokens, head size], in the query's dtype; up to FEW queries in fp32."""
    if query.shape[-2] > FEW or query.itemsize != 2:
        return attention_once(query, key, value, attn_mask, **keys)
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.float()
    return attention_once(query.float(), key.float(), value.float(), attn_mask, **keys).to(query.dtype)


def attention_once(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, **keys: Any
) -> torch.Tensor:
    """torch's scaled_dot_product_attention of [..., tokens, head size]. In a block that is recomputed but for attention
    (memory.gradient_checkpointing = "selective") a fused kernel's results are kept; plain ones, and with a mask, are not."""
    theirs = nn.functional.scaled_dot_product_attention
    if memory.recomputing():
        made = memory.saved_value()
        return theirs(query, key, value, attn_mask, **keys) if made is None else _Attended.apply(query, key, value, *made)
    fused = _fused(query, key, value) if memory.is_saving() and attn_mask is None and not keys else None
    if fused is None:
        memory.save_value(None)
        return theirs(query, key, value, attn_mask, **keys)
    made = fused.forward(query, key, value)
    memory.save_value((fused, *made))
    return made[0]


class _Fused(NamedTuple):
    """forward: (query, key, value) -> (the output, what else the backward pass reads). gradients: (the output's gradient,
    query, key, value, what forward gave) -> the gradients of query, key and value."""

    forward: Callable[..., tuple[Any, ...]]
    gradients: Callable[..., Sequence[torch.Tensor]]


def _fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> _Fused | None:
    """The kernel that torch takes for it; None for the plain one, and for heads that torch would pad."""
    if query.shape[-1] % 8 or only_plain():
        return None
    if query.device.type in ("cpu", "meta"):  # as a plan has it, where it stands for a card's (dry_run.py)
        return _ON_CPU if query.dim() == 4 else None
    return _ON_CARD.get(torch._fused_sdp_choice(query, key, value))


_ATEN = torch.ops.aten
_ON_CPU = _Fused(
    _ATEN._scaled_dot_product_flash_attention_for_cpu,
    lambda dy, q, k, v, out, lse: _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        dy, q, k, v, out, lse, 0.0, False
    ),
)
_ON_CARD = {
    SDPBackend.FLASH_ATTENTION.value: _Fused(
        lambda q, k, v: _ATEN._scaled_dot_product_flash_attention(q, k, v)[:8],
        lambda dy, q, k, v, out, lse, of_q, of_k, most_q, most_k, seed, offset: (
            _ATEN._scaled_dot_product_flash_attention_backward(
                dy, q, k, v, out, lse, of_q, of_k, most_q, most_k, 0.0, False, seed, offset
            )
        ),
    ),
    SDPBackend.CUDNN_ATTENTION.value: _Fused(
        lambda q, k, v: _ATEN._scaled_dot_product_cudnn_attention(q, k, v, None, True)[:8],
        lambda dy, q, k, v, out, lse, of_q, of_k, most_q, most_k, seed, offset: (
            _ATEN._scaled_dot_product_cudnn_attention_backward(
                dy, q, k, v, out, lse, seed, offset, None, of_q, of_k, most_q, most_k, 0.0, False
            )
        ),
    ),
    SDPBackend.EFFICIENT_ATTENTION.value: _Fused(
        lambda q, k, v: _ATEN._scaled_dot_product_efficient_attention(q, k, v, None, True),
        lambda dy, q, k, v, out, lse, seed, offset: _ATEN._scaled_dot_product_efficient_attention_backward(
            dy, q, k, v, None, out, lse, seed, offset, 0.0, [True, True, True, False]
        )[:3],
    ),
}


class _Attended(torch.autograd.Function):
    """Attention whose output is there already: its backward pass alone."""

    @staticmethod
    def forward(ctx, query, key, value, fused, out, *made):
        # Sizes, and places that are None, stand among the tensors.
        ctx.fused, ctx.others = fused, [torch.Tensor if isinstance(each, torch.Tensor) else each for each in made]
        ctx.save_for_backward(query, key, value, out, *(each for each in made if isinstance(each, torch.Tensor)))
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        query, key, value, out, *tensors = ctx.saved_tensors
        in_turn = iter(tensors)
        made = [next(in_turn) if each is torch.Tensor else each for each in ctx.others]
        return *ctx.fused.gradients(dy, query, key, value, out, *made), *[None] * (2 + len(made))
