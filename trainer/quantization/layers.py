"""Frozen layers over any storage format (protocols.BaseLayer): their common base, and Linear.

Forward and input gradient are ours for every format. A weight whose stored dtype is not the compute dtype is converted
into one shared buffer at each use, in the forward and again in the backward pass: a saved copy would undo the saving of
memory.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from trainer.base import memory
from trainer.base.protocols import Kernels
from trainer.base.types import HeldWeight, StoredWeight
from trainer.kernels import scaled_matmul_pays
from trainer.kernels.scratch import scratch
from trainer.quantization.formats import Format, relative_error

Payload = Mapping[str, torch.Tensor]


class Home(Protocol):
    """The storage of a streamed layer's payload while its block is not on the device (runtime/streaming.py).

    payload: the layer's tensors meanwhile, by name: the payload itself, or tensors of its form on the meta device.
    digests: the SHA-256 of each tensor, if the payload itself is not at hand.
    """

    payload: Payload
    digests: Mapping[str, str]

    def whole(self) -> Payload:
        """The payload on the device that computes; no streamed block overwrites it."""

    def fill(self, payload: Payload) -> None:
        """Store the payload, from any device."""


class FrozenLayer(nn.Module):
    """Storage and its conversions, for FrozenLinear and FrozenConv2d. Parameters never require a gradient.

    Subclasses add `product`, its gradients and the methods on rows (protocols.BaseLayer); `output_shape` for an input shape;
    and `broadcast`: [N] shaped so that it broadcasts over the layer's output.

    Buffers `payload_NAME` hold the payload, an fp32 parameter the bias. There is no `weight`: library code that casts
    activations to `layer.weight.dtype` must not meet a float8 tensor.
    """

    weight = None
    groups = 1
    bias: nn.Parameter | None
    # Whether no backward pass reads the output: a recomputation leaves the product out (memory.checkpoint_blocks).
    unread: bool = False

    def __init__(
        self, shape: torch.Size, has_bias: bool, format: Format, compute_dtype: torch.dtype, kernels: Kernels, device
    ) -> None:
        super().__init__()
        self.format, self.compute_dtype, self.weight_shape = format, compute_dtype, torch.Size(shape)
        self.kernels = kernels
        for name, tensor in format.empty_payload(self.weight_shape, device).items():
            self.register_buffer(f"payload_{name}", tensor)
        bias = torch.empty(shape[0], dtype=torch.float32, device=device) if has_bias else None
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        # From the conversion: bytes of the weight as it was read, its relative error, and its row norms before (fp32 [N], on
        # the CPU); None for a payload copied as it is, the last two also if nothing is quantised.
        self.bytes_before: int | None = None
        self.relative_error: float | None = None
        self.original_norms: torch.Tensor | None = None
        self.merged_weight: torch.Tensor | None = None  # fp32 base + adapter while an adapter is merged
        self._cast_bias: tuple[torch.Tensor, torch.Tensor] | None = None
        self._plain = False  # StoredWeight.plain, determined once when the payload is filled
        self._stored = self._described(self._buffers)  # (its buffer, the description)
        # For a streamed payload: its home; its buffers there and on the device; and `_stored` for either.
        self._home: Home | None = None
        self._places: tuple[Payload, ...] | None = None
        self._stored_at: tuple[tuple[torch.Tensor, StoredWeight], ...] = ()

    @property
    def qweight(self) -> torch.Tensor:
        """The stored weight on the computing device, by the name under which PEFT looks for a quantised layer's device."""
        return self.payload_weight if self._places is None else self._places[1]["payload_weight"]

    def payload(self) -> dict[str, torch.Tensor]:
        """The payload's tensors by name; on the meta device if no process has it whole."""
        return _payload(self._buffers)

    def whole_payload(self) -> Payload:
        """The payload's tensors by name, fetched if necessary."""
        return self.payload() if self._home is None else self._home.whole()

    @property
    def digests(self) -> Mapping[str, str]:
        """The SHA-256 of the payload's tensors by name, taken as they were filled; empty if the tensors are at hand."""
        return {} if self._home is None else self._home.digests

    def stored(self) -> StoredWeight:
        """The frozen weight itself, also while an adapter is merged; a copy if the layer's block is not on the device."""
        # Cached: a step asks six times for it. Buffers may be swapped for others; a compiled program reads its own.
        if self._stored[0] is not self._buffers["payload_weight"] and not torch.compiler.is_compiling():
            self._stored = self._described(self._buffers)
        stored = self._stored[1]
        if self._home is not None and stored.device != self.qweight.device:
            return self._described(_buffers(self._home.whole()))[1]
        return stored

    def _described(self, buffers: Mapping[str, torch.Tensor | None]) -> tuple[torch.Tensor, StoredWeight]:
        rows = self.weight_shape[0]
        stored = self.format.stored(_payload(buffers), (rows, self.weight_shape.numel() // rows))
        return buffers["payload_weight"], replace(stored, plain=True) if self._plain else stored

    def stream(self, home: Home, passing: Payload) -> None:
        """Keep the payload, which is not filled yet, in `home` from now on, and in `passing`, on the device, while the block
        is there (`bind`)."""
        self._home, self._places = home, (_buffers(home.payload), _buffers(passing))
        self._stored_at = tuple(map(self._described, self._places))
        self.bind(False)

    def bind(self, passing: bool) -> None:
        """Compute with the payload on the device (`passing`), or with the one at home."""
        assert self._places is not None
        self._buffers.update(self._places[passing])
        self._stored = self._stored_at[passing]

    def end_stream(self) -> None:
        """Drop the payload."""
        self._home = self._places = None
        self._stored_at = ()
        for name in _payload(self._buffers):
            del self._buffers[f"payload_{name}"]
        del self._stored

    def in_use(self) -> StoredWeight:
        """The weight that the layer computes with: the frozen one, or base + adapter while that is merged."""
        if self.merged_weight is None:
            return self.stored()
        rows = self.merged_weight.flatten(1)
        return StoredWeight(rows, (rows.shape[0], rows.shape[1]))

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return self.kernels.upcast(self.stored(), dtype).view(self.weight_shape)

    def _apply(self, fn, recurse=True):
        del self._stored  # it would keep what moves
        applied = super()._apply(fn, recurse)
        self._stored = self._described(self._buffers)
        return applied

    def load_weight(self, weight: torch.Tensor) -> None:
        """Convert `weight` into the payload, in place."""
        payload = self.payload()
        if weight.device != payload["weight"].device:
            # Streamed. A device rounds in its own way: convert where it would happen without streaming.
            payload = {name: torch.empty_like(tensor, device=weight.device) for name, tensor in payload.items()}
        self.format.quantize_into(weight, payload)
        self._fill(payload)
        self.bytes_before = weight.nbytes
        if self.format.quantised:
            stored = self._described(_buffers(payload))[1]
            self.relative_error = relative_error(weight, stored)
            # On the CPU: the export alone uses them.
            rows = StoredWeight(weight.reshape(stored.shape), stored.shape)
            self.original_norms = self.kernels.row_squares(rows).sqrt().float().cpu()

    def load_payload(self, payload: Payload) -> None:
        """Copy in a payload of this layer's format as it is."""
        self._fill({name: payload[name].view(tensor.shape) for name, tensor in self.payload().items()})

    def load_held(self, weight: HeldWeight, payload: Payload) -> None:
        """Copy in a file's quantised weight, or convert it if this layer is stored in another format."""
        if self.format.dtype_name == weight.dtype:
            self.load_payload(payload)
        else:
            self.load_weight(weight.dequantize(payload, self.weight_shape))

    def _fill(self, payload: Payload) -> None:
        if self._home is not None:
            self._home.fill(payload)
        else:
            copy_payload(payload, self.payload())
        self._plain = self.kernels.has_plain_codes(self._described(_buffers(payload))[1])
        self._stored = self._described(self._buffers)
        self._stored_at = tuple(map(self._described, self._places or ()))

    def compute_weight(self, g_N: torch.Tensor | None = None, *, again: bool = False) -> torch.Tensor:
        """W, or g * W row by row, in `compute_dtype`: the payload itself if it is that, else in the shared buffer. again: the
        backward pass of a recomputed block will ask for it too, so that it is decoded once for both."""
        weight = self.in_use()
        if g_N is None and weight.is_dense(self.compute_dtype):
            return weight.codes.view(self.weight_shape)
        once = memory.recompute_cache()
        if g_N is None and once and (decoded := once.pop(self, None)) is not None:
            return decoded
        keep = again and once is not None
        out = None if keep else scratch(weight.shape, self.compute_dtype, weight.device)
        decoded = self.kernels.upcast(weight, self.compute_dtype, g_N, out).view(self.weight_shape)
        if keep:
            once[self] = decoded
        return decoded

    def cast_bias(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The bias rounded to `compute_dtype`: in that dtype, shaped for this layer's output, and as fp32 [N]."""
        if self.bias is None:
            return None, None
        cast = self._cast_bias
        if cast is None or cast[1].device != self.bias.device:
            rounded = self.bias.detach().to(self.compute_dtype)
            cast = self.broadcast(rounded), rounded.to(torch.promote_types(rounded.dtype, torch.float32))
            # Cached: it is frozen. A compiled graph must not leave its tensors behind here.
            if not torch.compiler.is_compiling():
                self._cast_bias = cast
        return cast

    @property
    def bias_N(self) -> torch.Tensor | None:
        return self.cast_bias()[1]

    def row_norms(self) -> torch.Tensor:
        """||W_n|| of the dequantised weight, over all dimensions but the first, fp32 [N]; `original_norms` are those before
        the conversion."""
        return self.kernels.row_squares(self.stored()).sqrt()

    def matmul(self, x: torch.Tensor, *, again: bool = False) -> torch.Tensor:
        """The bias-free product of x, in `compute_dtype`. Only a weight stored in that dtype lets autograd through. again:
        for `compute_weight`."""
        weight = self.in_use()
        if weight.is_dense(self.compute_dtype):  # at once: a small layer takes less time than the calls around it
            return self.product(x, weight.codes.view(self.weight_shape))
        return self.converted_product(x, again)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + b, in compute_dtype, differentiable in x; the bias is added with a rounding of its own."""
        x, bias = x.to(self.compute_dtype), self.cast_bias()[0]
        # A streamed weight is looked up again in the backward pass: autograd would save the buffer of the forward pass.
        weight = self.in_use()
        itself = weight.is_dense(self.compute_dtype) and not self.unread and self._places is None
        y = self.product(x, weight.codes.view(self.weight_shape)) if itself else _Product.apply(x, self)
        # The bias has a rounding of its own, exactly as under an adapter: at initialisation both are bit-equal.
        if bias is None:
            return y
        # In place, but not when compiling: traced, the product of a tensor with gaps is a view that must not be changed.
        return y + bias if torch.compiler.is_compiling() else y.add_(bias)

    def input_grad(
        self, dy: torch.Tensor, x_shape: torch.Size, g_N: torch.Tensor | None = None, add_to: torch.Tensor | None = None
    ) -> torch.Tensor:
        if g_N is not None and self.in_use().is_dense(self.compute_dtype) and dy.numel() < self.weight_shape.numel():
            # g * G and g * W have equal errors: compute the smaller. A weight that is converted anyway takes g along.
            dy = torch.mul(dy, self.broadcast(g_N), out=scratch(dy.shape, dy.dtype, dy.device))
            g_N = None
        return self.product_input_grad(dy, self.compute_weight(g_N), x_shape, add_to)

    def converted_product(self, x: torch.Tensor, again: bool) -> torch.Tensor:
        """The product with a weight that is not stored in `compute_dtype`."""
        return self.product(x, self.compute_weight(again=again))

    def extra_repr(self) -> str:
        """The shape, the format and the compute dtype, in torch's print of a module."""
        return f"{list(self.weight_shape)}, {self.format.name} -> {self.compute_dtype}"


def copy_payload(payload: Payload, into: Payload) -> None:
    """Copy each tensor of a payload into one of the same name and form, which may be itself."""
    for name, tensor in into.items():
        if tensor is not payload[name]:
            tensor.copy_(payload[name])


def _payload(buffers: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("payload_"): t for name, t in buffers.items() if t is not None and name.startswith("payload_")}


def _buffers(payload: Payload) -> dict[str, torch.Tensor]:
    return {f"payload_{name}": tensor for name, tensor in payload.items()}


class _Product(torch.autograd.Function):
    """x -> x W^T with W converted from its storage in the forward and again in the backward. Nothing is saved."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, layer: FrozenLayer) -> torch.Tensor:
        ctx.layer, ctx.x_shape = layer, x.shape
        if layer.unread and memory.recomputing():
            # NaN: nearly every reader after all makes the gradient not finite, and the step is refused.
            return x.new_full(layer.output_shape(x.shape), torch.nan)
        return layer.matmul(x, again=ctx.needs_input_grad[0])

    @staticmethod
    def backward(ctx, dy: torch.Tensor):
        return ctx.layer.input_grad(dy, ctx.x_shape), None


class FrozenLinear(FrozenLayer):
    """y = x W^T + b, W [N, K] frozen in its storage format.

    scaled_matmul: multiply in float8 where W is stored as e4m3 codes q_W with a scale s_W for each row, unmerged, and the
    shape pays (kernels.scaled_matmul_pays). q and s of x and of the gradient are made row by row, that is by token:

        x W^T = (q_x q_W^T) * s_x * s_W        (g * G) W = (q_d q_W) * s_d,  d = G * (g * s_W) column by column

    The gradient is multiplied by s_W before it is quantised, since s_W belongs to the dimension that is summed over, and with
    it by DoRA's g at no cost. In the forward a g folded into s_W would save nothing: `compose` multiplies by g in the
    registers that it passes z0 through anyway.
    """

    scaled_matmul: bool = False

    def __init__(self, in_features, out_features, *, bias, format, compute_dtype, kernels, device=None) -> None:
        super().__init__(torch.Size((out_features, in_features)), bias, format, compute_dtype, kernels, device)
        self.in_features, self.out_features = in_features, out_features

    def scaled_weight(self, rows: int) -> StoredWeight | None:
        """The weight for a float8 product with `rows` rows; None if the product is not in float8."""
        if not (self.scaled_matmul and scaled_matmul_pays(rows, self.out_features, self.in_features)):
            return None
        weight = self.in_use()
        by_row = weight.scale is not None and weight.block == self.in_features
        return weight if by_row and weight.codes.dtype == torch.float8_e4m3fn else None

    def converted_product(self, x, again):
        weight = self.scaled_weight(x.numel() // self.in_features)
        if weight is None:
            return super().converted_product(x, again)
        # Layers that share x quantise it once each: 3 bytes an element, next to which their products are long.
        z_MN = self.kernels.scaled_product(*self.kernels.quantize_rows(self.rows(x)), weight, self.compute_dtype)
        return self.expanded(z_MN, x.shape)

    def input_grad(self, dy, x_shape, g_N=None, add_to=None):
        dy_MN = self.rows(dy)
        weight = self.scaled_weight(len(dy_MN))
        if weight is None:
            return super().input_grad(dy, x_shape, g_N, add_to)
        by_N = weight.scale if g_N is None else weight.scale * g_N
        dx_MK = self.kernels.scaled_input_grad(*self.kernels.quantize_rows(dy_MN, by_N), weight, self.compute_dtype)
        dx = dx_MK.view(x_shape)
        # A float8 product cannot accumulate into a tensor: the sum is rounded once more, to 16 bits.
        return dx if add_to is None else add_to.add_(dx)

    # Both products by rows: for a slice of a longer sequence torch would run a batched product, and copy the weight for it.

    def product(self, x, weight):
        return self.expanded(F.linear(self.rows(x), weight), x.shape)

    def expanded(self, y, x_shape):
        # As F.linear does. Autograd would refuse the in-place sum with the bias on a view from a Function.
        return y if len(x_shape) == 2 else torch.ops.aten._unsafe_view(y, (*x_shape[:-1], y.shape[1]))

    def product_input_grad(self, dy, weight, x_shape, add_to=None):
        if add_to is None:
            return self.expanded(self.rows(dy) @ weight, x_shape)
        self.rows(add_to).addmm_(self.rows(dy), weight)
        return add_to

    def product_weight_grad(self, dy, x, weight_shape):
        return self.rows(dy).t() @ self.rows(x)

    def output_shape(self, x_shape):
        """The shape of the output for an input of `x_shape`."""
        return (*x_shape[:-1], self.out_features)

    def rows(self, y):
        return y if y.dim() == 2 else y.reshape(-1, y.shape[-1])

    collapsed = rows

    def put_rows(self, y_MN, y):
        """No work: the rows of a contiguous output are a view."""

    def from_rows(self, y_MN, like):
        return y_MN if len(like) == 2 else y_MN.view(*like[:-1], y_MN.shape[1])

    def broadcast(self, per_row):
        """[N], which broadcasts over [..., N]."""
        return per_row
