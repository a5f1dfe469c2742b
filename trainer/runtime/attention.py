"""Selects torch's kernels for the denoiser's attention (step.attention), and computes attention over few tokens on a CPU.

Text encoders and the VAE have masks, fp32 and wide heads, which not every kernel supports. They, and the denoiser under
"auto" unless cuDNN's kernel is faster, use torch's own order: flash, memory-efficient, plain (precision.py removes cuDNN's
from it).
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

# Up to so many queries, attention of fp32 copies is faster on a CPU than torch's attention in 16 bits (by up to 8 times,
# torch 2.13, docs/benchmarks/cpu.md), at every head size, forward and backward. Over many tokens the copies cost memory and,
# in bf16, more time than they save.
FEW = 128

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# The order of "auto" on GPUs of these compute capabilities (Hopper, and Blackwell in data centres), as torch prefers it.
CUDNN_FIRST, ORDER = (9, 10), ("cudnn", "flash", "efficient", "math")
# The oldest cuDNN that is tried. With 9.19 on an H100 the gradients of Flux were not finite, and a step read outside its
# memory, after which a process can do nothing more on the GPU.
CUDNN = 92000

# (queries, keys) of a kernel's trial. cuDNN failed if half of a tile of 128 was left over.
TRIED = ((192, 192), (256, 77))
# The allowed relative error, in the norm, of a result in 16 bits: four roundings.
TOLERANCE = 2.0**-6


@dataclass(frozen=True)
class Attention:
    """The kernels for the denoiser's attention. kinds: keys of KERNELS; each call uses the first that supports it, and torch
    raises RuntimeError if none does; empty: torch's own order. note: why a faster choice is not used."""

    kinds: tuple[str, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        return ", ".join(self.kinds) or OWN

    def used(self) -> AbstractContextManager[Any]:
        """A context, for a whole pass, in which all attention uses these kernels. To enter costs a dozen calls into torch."""
        kernels = [KERNELS[kind] for kind in self.kinds]
        return sdpa_kernel(kernels, set_priority=True) if kernels else nullcontext()

    def selected(self, device: torch.device, dtype: torch.dtype, sizes: Collection[int], tokens: int) -> str:
        """The kernels that torch selects for an image of so many tokens, in training. sizes: of heads."""
        with self.used():
            inputs = (_trial_tensors(device, dtype, tokens, tokens, size, 0)[:3] for size in sorted(sizes))
            kernels = [torch._fused_sdp_choice(*(tensor.requires_grad_() for tensor in each)) for each in inputs]
        return " and ".join(dict.fromkeys(SDPBackend(each).name.removesuffix("_ATTENTION").lower() for each in kernels))

    def give(
        self, denoiser: nn.Module, processor: Callable[..., Any], device: torch.device, kernels: Kernels = dora_torch
    ) -> None:
        """Set these kernels for a denoiser on a device. A backward pass must run in `used`: it recomputes blocks outside the
        denoiser's forward. processor: `MemoryPart.attention` of the models."""
        attend = attention if device.type == "cpu" and not self.kinds else attention_once
        for layer in denoiser.modules():
            if hasattr(layer, "set_processor") and (ours := processor(layer, attend, kernels)) is not None:
                layer.set_processor(ours)
        if not self.kinds:
            return
        forward = denoiser.forward

        @wraps(forward)
        def wrapped(*args: Any, **keys: Any) -> Any:
            with self.used():
                return forward(*args, **keys)

        denoiser.forward = wrapped


OWN = "torch's own"  # as in checkpoints; one without this entry means the same
TORCHS_OWN = Attention()


def planned(kind: str) -> Attention:
    """The kernels of `step.attention` = kind, for a GPU that is not in this machine."""
    return TORCHS_OWN if kind == "auto" else Attention((kind,))


def choose(
    kind: str, device: torch.device, dtype: torch.dtype, sizes: Callable[[], Collection[int]], tokens: int = 0
) -> Attention:
    """The kernels of `step.attention` = kind on a device, tried first for the denoiser's compute dtype, head sizes and
    tokens. Raises UserError for a kind that fails; "auto" then uses another order, and its note says why."""
    if device.type == "cpu" and kind not in ("auto", "math"):
        raise UserError(f"step.attention = {kind!r} needs a GPU, and this run is on the CPU; use 'auto' or 'math'")
    if device.type != "cuda" or kind == "math":
        return planned(kind)
    name = torch.cuda.get_device_name(device)
    if kind != "auto":
        if reason := fault(kind, device, dtype, sizes(), tokens):
            raise UserError(f"step.attention = {kind!r} is not for this model on {name}: {reason}; use 'auto'")
        return Attention((kind,))
    if torch.cuda.get_device_capability(device)[0] not in CUDNN_FIRST:
        return TORCHS_OWN
    reason = fault("cudnn", device, dtype, sizes(), tokens)
    return Attention(note=f"without cuDNN's: {reason}") if reason else Attention(ORDER)


def head_sizes(denoiser: nn.Module) -> set[int]:
    """The head sizes of a denoiser's attention layers."""
    return {layer.inner_dim // layer.heads for layer in denoiser.modules() if hasattr(layer, "set_processor")}


def fault(kind: str, device: torch.device, dtype: torch.dtype, sizes: Collection[int], tokens: int = 0) -> str:
    """Why a kernel is unfit for training on a device, in words; "" if it is fit. The trial: forward and backward, without a
    mask, as no family has one, against plain attention in fp32. sizes: of heads. tokens: of the run's largest image, whose
    results must only be finite, as plain attention may be too large there; 0: not tried."""
    if kind == "cudnn" and (version := torch.backends.cudnn.version() or CUDNN) < CUDNN:
        return f"cuDNN {version // 10000}.{version // 100 % 100} was seen to give wrong gradients; install a newer torch"
    largest = [(tokens, tokens, -120)] if tokens else []
    for size in sorted(sizes):
        for queries, keys, score in [*((*pair, score) for pair in TRIED for score in (0, -120)), *largest]:
            if reason := _fault_at(kind, score, *_trial_tensors(device, dtype, queries, keys, size, score)):
                return f"{reason} (head size {size})"
    return ""


def _trial_tensors(
    device: torch.device, dtype: torch.dtype, queries: int, keys: int, size: int, score: int
) -> tuple[torch.Tensor, ...]:
    """Query, key, value and the output's gradient, [1, 2, tokens, size], in the denoisers' memory layout. score: roughly
    added to each attention score, which leaves a softmax unchanged, but its exponents may leave fp32."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, tokens, 2, size) for tokens in (queries, keys, keys, queries)]
    query, key, value, upstream = (torch.randn(shape, generator=generator) for shape in shapes)
    if score:
        query[..., 0], key[..., 0] = 1, score * size**0.5
    return tuple(each.to(device, dtype).transpose(1, 2) for each in (query, key, value, upstream))


def _fault_at(kind: str, score: int, *trial: torch.Tensor) -> str:
    def results(kind: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
        *inputs, upstream = (tensor.detach() for tensor in tensors)
        inputs = [tensor.requires_grad_() for tensor in inputs]
        with Attention((kind,)).used():
            out = nn.functional.scaled_dot_product_attention(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]

    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        try:
            outputs = results(kind, *trial)
        except RuntimeError as error:  # torch has no kernel for it
            return _torchs_reason(kind, trial) or str(error).splitlines()[0]
    if not all(bool(torch.isfinite(each).all()) for each in outputs):
        return "its results are not finite where those of plain attention are"
    if score:
        return ""  # the large score multiplies sums near 0, which 16 bits do not give exactly
    exact = results("math", *(tensor.float() for tensor in trial))
    difference = max(float((mine.float() - true).norm() / true.norm()) for mine, true in zip(outputs, exact, strict=True))
    return f"its results differ by {difference:.2g} from those of plain attention" if difference > TOLERANCE else ""


def _torchs_reason(kind: str, trial: tuple[torch.Tensor, ...]) -> str:
    """Torch's warning about why it has no such kernel; "" without one."""
    query, key, value, _ = (tensor.detach().requires_grad_() for tensor in trial)
    can_use = getattr(torch.backends.cuda, f"can_use_{kind}_attention")
    with Attention((kind,)).used(), warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        can_use(torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, False, False), True)
    return str(messages[0].message).partition(" (Triggered")[0].rstrip(".") if messages else ""


def only_plain() -> bool:
    """Whether attention now uses torch's plain kernel, which saves every score for its backward pass."""
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
    """torch's scaled_dot_product_attention of [..., tokens, head size]. Under memory.gradient_checkpointing = "selective" a
    block saves a fused kernel's results and does not recompute them; plain ones, and those with a mask, it recomputes."""
    torchs = nn.functional.scaled_dot_product_attention
    if memory.recomputing():
        saved = memory.saved_value()
        return torchs(query, key, value, attn_mask, **keys) if saved is None else _Attended.apply(query, key, value, *saved)
    fused = _fused(query, key, value) if memory.is_saving() and attn_mask is None and not keys else None
    if fused is None:
        memory.save_value(None)
        return torchs(query, key, value, attn_mask, **keys)
    results = fused.forward(query, key, value)
    memory.save_value((fused, *results))
    return results[0]


class _Fused(NamedTuple):
    """A fused kernel. forward: (query, key, value) -> (output, further values for the backward pass). gradients: (the
    output's gradient, query, key, value, *forward's results) -> the gradients of query, key and value."""

    forward: Callable[..., tuple[Any, ...]]
    gradients: Callable[..., Sequence[torch.Tensor]]


def _fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> _Fused | None:
    """The kernel that torch selects; None for the plain one, and for head sizes that torch would pad."""
    if query.shape[-1] % 8 or only_plain():
        return None
    if query.device.type in ("cpu", "meta"):  # in a plan these stand for a GPU's (dry_run.py)
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
    """Attention with a saved output: its backward pass alone."""

    @staticmethod
    def forward(ctx, query, key, value, fused, out, *others):
        # Sizes and None stand among the tensors.
        ctx.fused, ctx.others = fused, [torch.Tensor if isinstance(each, torch.Tensor) else each for each in others]
        ctx.save_for_backward(query, key, value, out, *(each for each in others if isinstance(each, torch.Tensor)))
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        query, key, value, out, *tensors = ctx.saved_tensors
        remaining = iter(tensors)
        others = [next(remaining) if each is torch.Tensor else each for each in ctx.others]
        return *ctx.fused.gradients(dy, query, key, value, out, *others), *[None] * (2 + len(others))
