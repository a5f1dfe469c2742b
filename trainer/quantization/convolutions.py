"""A frozen Conv2d over any storage format: protocols.BaseLayer."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from trainer.quantization.layers import FrozenLayer


class Geometry(NamedTuple):
    """The arguments of torch's convolution functions."""

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1


class FrozenConv2d(FrozenLayer):
    """A convolution with W [N, K/groups, kh, kw] frozen in its storage format. shape: of W."""

    def __init__(self, shape, geometry: Geometry, *, bias, format, compute_dtype, kernels, device=None) -> None:
        super().__init__(torch.Size(shape), bias, format, compute_dtype, kernels, device)
        self.in_channels, self.out_channels, self.kernel_size = shape[1] * geometry.groups, shape[0], tuple(shape[2:])
        self.stride, self.padding, self.dilation, self.groups = self.geometry = geometry

    def product(self, x, weight):
        if x.device.type == "cpu" and self.in_channels == 1 and self.stride != (1, 1):
            # torch 2.13 reads out of bounds for one channels-last channel whose rows give one pixel each.
            x = x.clone(memory_format=torch.contiguous_format)
        return F.conv2d(x, weight, None, *self.geometry)

    def output_shape(self, x_shape):
        """The shape of the output for an input of `x_shape` (formula: torch.nn.Conv2d's documentation)."""
        axes = zip(x_shape[2:], self.kernel_size, self.stride, self.padding, self.dilation, strict=True)
        return x_shape[0], self.out_channels, *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes)

    def product_input_grad(self, dy, weight, x_shape, add_to=None):
        dx = torch.nn.grad.conv2d_input(x_shape, weight, dy, *self.geometry)
        return dx if add_to is None else add_to.add_(dx)

    def product_weight_grad(self, dy, x, weight_shape):
        if x.device.type == "cpu" and self.kernel_size == (1, 1) and self.stride != (1, 1):
            # torch 2.13 misreads channels-last pixels for such a kernel with a stride, and writes out of bounds.
            x = x.clone(memory_format=torch.contiguous_format)
        return torch.nn.grad.conv2d_weight(x, weight_shape, dy, *self.geometry)

    def collapsed(self, x):
        return x

    def expanded(self, y, x_shape):
        return y

    def rows(self, y):
        return y.movedim(1, -1).reshape(-1, y.shape[1])

    def put_rows(self, y_MN, y):
        # Rows are a view if all pixels of a channel, or all channels of a pixel, are contiguous.
        if y.shape[0] > 1 and y.shape[1] > 1 and y.stride(1) != 1:
            y.copy_(self.from_rows(y_MN, y.shape))

    def from_rows(self, y_MN, like):
        return y_MN.view(like[0], *like[2:], y_MN.shape[1]).movedim(-1, 1)

    def broadcast(self, per_row):
        """[N, 1, 1], which broadcasts over [B, N, H, W]."""
        return per_row.view(-1, 1, 1)
