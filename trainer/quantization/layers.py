"""Frozen Linear and Conv2d over any storage format: the base-layer protocol of types.py.

Forward and input gradient are ours for every format. A weight whose stored dtype is not the compute dtype is converted
anew in the backward pass: saving the converted copy for it would undo the saving of memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from trainer.quantization.formats import Format


class FrozenLayer(nn.Module):
    """What FrozenLinear and FrozenConv2d share: storage and its conversions. Parameters never require a gradient.

    The payload is held in buffers `payload_weight` (+ `payload_scale`), the bias as an fp32 parameter. There is no
    `weight`: code of libraries that asks for `layer.weight.dtype` to cast activations must not meet a float8 tensor.
    """

    weight = None
    bias: nn.Parameter | None

    def __init__(self, shape: torch.Size, has_bias: bool, format: Format, compute_dtype: torch.dtype, device) -> None:
        super().__init__()
        self.format, self.compute_dtype, self.weight_shape = format, compute_dtype, torch.Size(shape)
        for name, tensor in format.empty_payload(self.weight_shape, device).items():
            self.register_buffer(f"payload_{name}", tensor)
        bias = torch.empty(shape[0], dtype=torch.float32, device=device) if has_bias else None
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        # The dense weight that stands in for base + adapter while an adapter is merged (fp32), else None.
        self.merged_weight: torch.Tensor | None = None
        self.direct = format.dtype == compute_dtype
        self._compute_bias: torch.Tensor | None = None

    @property
    def qweight(self) -> torch.Tensor:
        """The stored weight under the name by which PEFT looks for a quantised layer's device."""
        return self.payload_weight

    def payload(self) -> dict[str, torch.Tensor]:
        return {name.removeprefix("payload_"): t for name, t in self._buffers.items() if name.startswith("payload_")}

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        if self.merged_weight is not None:
            return self.merged_weight.to(dtype)
        return self.format.dequantize(self.payload(), dtype)

    def load_weight(self, weight: torch.Tensor) -> None:
        """Convert `weight` into the payload, in place."""
        self.format.quantize_into(weight, self.payload())

    def compute_weight(self) -> torch.Tensor:
        """The weight in `compute_dtype`: the payload itself where it is stored so, else converted anew."""
        if self.direct and self.merged_weight is None:
            return self._buffers["payload_weight"]
        return self.dequantize(self.compute_dtype)

    @property
    def compute_bias(self) -> torch.Tensor | None:
        """The bias in `compute_dtype`, cast once: it is frozen."""
        if self._compute_bias is None and self.bias is not None:
            self._compute_bias = self.broadcast(self.bias.detach().to(self.compute_dtype))
        return self._compute_bias

    def row_norms(self) -> torch.Tensor:
        """fp32 [N]: ||W_n|| of the dequantised weight, over all dimensions but the first."""
        return self.dequantize(torch.float32).flatten(1).norm(dim=1)

    def skinny(self, a_RK: torch.Tensor) -> torch.Tensor:
        """fp32 [N, R] = W A^T with W flattened to [N, K]."""
        return self.dequantize(torch.float32).flatten(1) @ a_RK.float().t()

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """The bias-free product in `compute_dtype`, differentiable in x."""
        x = x.to(self.compute_dtype)
        if self.direct and self.merged_weight is None:
            return self.product(x, self._buffers["payload_weight"])
        return _ConvertedProduct.apply(x, self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, bias = self.matmul(x), self.compute_bias
        # Added apart with a rounding of its own, exactly as under an adapter: at initialisation both are bit-equal.
        return y if bias is None else y.add_(bias)

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def product_input_grad(self, dy: torch.Tensor, weight: torch.Tensor, x_shape: torch.Size) -> torch.Tensor:
        raise NotImplementedError

    def broadcast(self, per_row: torch.Tensor) -> torch.Tensor:
        """[N] shaped so that it broadcasts over this layer's output."""
        raise NotImplementedError


class _ConvertedProduct(torch.autograd.Function):
    """x -> x W^T with W converted from its storage in the forward and again in the backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, layer: FrozenLayer) -> torch.Tensor:
        ctx.layer, ctx.x_shape = layer, x.shape
        return layer.product(x, layer.compute_weight())

    @staticmethod
    def backward(ctx, dy: torch.Tensor):
        layer = ctx.layer
        return layer.product_input_grad(dy, layer.compute_weight(), ctx.x_shape), None


class FrozenLinear(FrozenLayer):
    """y = x W^T + b, W [N, K] frozen in its storage format."""

    def __init__(self, in_features, out_features, *, bias, format, compute_dtype, device=None) -> None:
        super().__init__(torch.Size((out_features, in_features)), bias, format, compute_dtype, device)
        self.in_features, self.out_features = in_features, out_features

    def product(self, x, weight):
        return F.linear(x, weight)

    def product_input_grad(self, dy, weight, x_shape):
        return dy @ weight

    def input_grad(self, dy: torch.Tensor) -> torch.Tensor:
        """dy W, [M, N] -> [M, K], for adapters that write their backward out."""
        return dy @ self.compute_weight()

    def broadcast(self, per_row):
        return per_row

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.format.name} -> {self.compute_dtype}"


class FrozenConv2d(FrozenLayer):
    """A convolution with W [N, K/groups, kh, kw] frozen in its storage format."""

    def __init__(
        self, in_channels, out_channels, kernel_size, *, stride, padding, dilation, groups, bias, format, compute_dtype,
        device=None,
    ) -> None:  # fmt: skip
        super().__init__(
            torch.Size((out_channels, in_channels // groups, *kernel_size)), bias, format, compute_dtype, device
        )
        self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, kernel_size
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups

    def product(self, x, weight):
        return F.conv2d(x, weight, None, self.stride, self.padding, self.dilation, self.groups)

    def product_input_grad(self, dy, weight, x_shape):
        return torch.nn.grad.conv2d_input(
            x_shape, weight, dy, self.stride, self.padding, self.dilation, self.groups
        )  # fmt: skip

    def broadcast(self, per_row):
        return per_row.view(-1, 1, 1)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, {self.kernel_size}, {self.format.name} -> {self.compute_dtype}"
        )
