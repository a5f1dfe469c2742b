"""All decisions about dtypes: storage and compute dtypes of components, loss scaling, capabilities of a device.

Nothing runs under autocast, which fails for four of the nine storage x compute pairs of fp32, bf16 and fp16: each frozen
layer casts its input and its weight to its component's compute dtype at use (quantization/layers.py).
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from trainer.base.errors import UserError
from trainer.base.protocols import Kernels
from trainer.kernels import multiplies_float8

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Suggested storage of frozen weights for a run that does not fit: the formats of 8 and of 4 bits that cost least learning.
SMALLER_DTYPES = ("fp8_e4m3", "nf4")
SMALLER_VAE = "bf16"  # the VAE's; in fp16 the stock one overflows
# The allowed difference of a photo's latents under vae.encode = "fast" from fp32, relative, in the norm.
FAST = 1e-3
GROWTH_INTERVAL = 2000  # updates without an overflow, after which the loss scale doubles


def prepare_device(device: torch.device, compute: set[str]) -> None:
    """Turn off TF32 and sums in 16 bits; refuse a compute dtype that the device would only emulate. A CPU has all."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    # Else cuBLAS sums the parts of a product split along K in 16 bits: on an H100 dB was off by 30 times the bound in fp32.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    # With cuDNN's attention, torch's first choice on Hopper, the gradients of Flux were not finite in bf16, and at full size
    # a step read outside its memory (torch 2.11, cuDNN 9.19, H100; SDXL was correct). Only the denoiser uses it, and only a
    # newer one that passes its trial (attention.py).
    torch.backends.cuda.enable_cudnn_sdp(False)
    if device.type == "cuda" and "bf16" in compute and torch.cuda.get_device_capability(device) < (8, 0):
        raise UserError(
            f"precision.compute = 'bf16' needs an Ampere or newer GPU, this is {torch.cuda.get_device_name(device)}; "
            "set precision.compute = 'fp16'"
        )


def check_scaled_matmul(matmul: str, kernels: Kernels, device: torch.device) -> None:
    """Refuse float8 products on a GPU that would only emulate them. A CPU computes them, too, without gain."""
    if matmul == "fp8" and device.type == "cuda" and not multiplies_float8(kernels, device):
        raise UserError(
            f"precision.matmul = 'fp8': with the {kernels.name} kernels {torch.cuda.get_device_name(device)} does not "
            "multiply float8 by rows (compute capability 8.9 or newer and adapter.kernels = 'auto' do); use 'compute'"
        )


def check_encoding(encode: str, device: torch.device) -> None:
    """Refuse TF32 on a device without it."""
    if encode == "fast" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
        raise UserError(
            f"vae.encode = 'fast' needs the TF32 of an Ampere or newer GPU, and this run is on {name}; leave it out"
        )


@contextmanager
def in_tf32() -> Iterator[None]:
    """A context in which a GPU rounds the factors of fp32 products to TF32's 10 bits of fraction, and sums in fp32."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


def keep_activations(module: nn.Module, compute: torch.dtype) -> None:
    """Make every other submodule with parameters return `compute` activations; frozen Linear and Conv2d layers cast already.

    The fused norms of torch compute their statistics in fp32, but on CUDA weight and input must have one dtype: their fp32
    parameters are cast at use. Any other module computes as its library wrote it, and its output is cast.
    """
    for child in module.modules():
        if isinstance(child, (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)):
            if child.weight is not None:
                child.__class__ = _cast_norm(type(child))
        elif compute != torch.float32 and any(p.is_floating_point() for p in child.parameters(recurse=False)):
            child.register_forward_hook(OutputCast(compute))


@dataclass
class OutputCast:
    """A forward hook that casts a module's output."""

    compute: torch.dtype

    def __call__(self, child: nn.Module, args, output):
        return output.to(self.compute) if isinstance(output, torch.Tensor) and output.is_floating_point() else output


@cache
def _cast_norm(norm_class: type) -> type:
    """A subclass of a torch norm whose parameters are cast to the input's dtype at use."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cast = self.__dict__.get("_cast_parameters")  # kept beside the fp32 parameters, which are frozen
        if cast is None or cast[0].dtype != x.dtype or cast[0].device != self.weight.device:
            wide = self.weight, getattr(self, "bias", None)
            cast = self.__dict__["_cast_parameters"] = [None if each is None else each.detach().to(x.dtype) for each in wide]
        weight, bias = cast
        if isinstance(self, nn.RMSNorm):
            return nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)
        if isinstance(self, nn.GroupNorm):
            return nn.functional.group_norm(x, self.num_groups, weight, bias, self.eps)
        return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)

    return type(norm_class.__name__, (norm_class,), {"forward": forward})


# Sizes of cuBLAS's workspace for which NVIDIA promises equal bits, as torch documents.
CUBLAS_WORKSPACES = (":4096:8", ":16:8")


def be_deterministic() -> None:
    """Let torch use only algorithms that give the same bytes on the same GPU and versions. Call it before any use of CUDA.

    An operation without one raises RuntimeError: there is no fall-back. Our own kernels have one order of sums each, no
    atomics and no tuning at run time. Raises UserError for a CUBLAS_WORKSPACE_CONFIG without that promise.
    """
    # cuBLAS reads it at its first use. Torch from 2.10 on no longer checks it, so a wrong one would go unnoticed.
    workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACES[0])
    if workspace not in CUBLAS_WORKSPACES:
        raise UserError(
            f"run.deterministic = true, but the environment has CUBLAS_WORKSPACE_CONFIG = {workspace!r}; unset it, or use "
            + " or ".join(map(repr, CUBLAS_WORKSPACES))
        )
    # Without `warn_only`, under which the backward passes of flash and memory-efficient attention keep their atomics.
    torch.use_deterministic_algorithms(True)
    # Else every new tensor is filled with NaN, to show reads of unwritten memory; test_deterministic.py finds those.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    # The only attention whose backward torch does not make deterministic (2.11 to 2.13). Under the first flag torch refuses
    # it itself, also as step.attention = "cudnn"; a later version that allows it would have to be proven first. The others:
    # flash and memory-efficient attention order their sums under that flag, plain attention is products and a softmax.
    torch.backends.cuda.enable_cudnn_sdp(False)


@dataclass
class ScalerState:
    """A loss scaler as a piece of the checkpoint; empty if it is off."""

    scaler: torch.amp.GradScaler

    def state_dict(self) -> dict[str, Any]:
        """The loss scale, the steps since it changed, and the scaler's settings."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the state. Raises ValueError unless it is of a scaler with these settings, on or off like this one."""
        current = self.scaler.state_dict()
        settings = current.keys() - {"scale", "_growth_tracker"}
        kinds, expected = ({key: type(value) for key, value in each.items()} for each in (state, current))
        if kinds != expected or any(state[key] != current[key] for key in settings):
            raise ValueError(f"{state}, not like {current}")
        if state:
            fp32 = torch.finfo(torch.float32)
            in_range = fp32.tiny <= state["scale"] <= fp32.max
            if not in_range or not 0 <= state["_growth_tracker"] <= state["growth_interval"]:
                raise ValueError(f"{state}")
            self.scaler.load_state_dict(state)


def needs_scaling(compute: Iterable[torch.dtype]) -> bool:
    """Whether the loss is scaled. compute: dtypes of the components that gradients pass through."""
    return torch.float16 in compute


def loss_scaler(enabled: bool, device: torch.device, *, initial_scale: float) -> torch.amp.GradScaler:
    """torch's GradScaler; enabled if gradients pass through fp16. It only unscales gradients of fp32 adapters."""
    scaler = torch.amp.GradScaler(device.type, init_scale=initial_scale, growth_interval=GROWTH_INTERVAL, enabled=enabled)
    # Its tensors are made when it first scales a loss; a process without a micro-batch in its first step scales none, but
    # unscales the gradients of the others.
    scaler.scale(torch.zeros((), device=device))
    return scaler
