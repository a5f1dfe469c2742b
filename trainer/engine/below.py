"""A frozen adapter below the trained one, as if its file had been merged into W: W x + U x + the trained adapter's output.

U = s B A; A and s B are buffers of W's layer, in its compute dtype. Samples are drawn without it, and no file contains it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear

from trainer.adapters.portable import Factors, Portable
from trainer.base.errors import UserError

A, SB = "below_a", "below_sb"  # buffers of the frozen layers


class FrozenAdapter:
    """A frozen LoRA over a module's layers. portable: its layers by full name; on the meta device none of their values is
    read. path: its file, for messages. Raises UserError for a value that is not finite, and for a grouped convolution."""

    def __init__(self, module: nn.Module, portable: Portable, device: torch.device, path: str | None = None) -> None:
        self.on, key = True, f"adapter.under = {path!r}"
        for name, factors in portable.layers.items():
            layer = module.get_submodule(name.partition(".")[2])
            base = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
            if base.groups != 1:
                raise UserError(f"{key}: {name} is a grouped convolution, which carries no adapter; take another file")
            for buffer, tensor in _in_compute_dtype(name, factors, base.compute_dtype, device, key).items():
                base.register_buffer(buffer, tensor, persistent=False)
            layer.register_forward_hook(lambda _, inputs, y, base=base: self._added(base, inputs[0], y) if self.on else y)

    @contextmanager
    def off(self) -> Iterator[None]:
        """A context in which the frozen adapter adds nothing."""
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before

    @staticmethod
    def _added(base: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """y + U x, in y's dtype. Differentiable in x and y; x is not saved, as A and B are frozen."""
        a, sb_NR = (base.get_buffer(name).to(y.dtype) for name in (A, SB))
        x = x.to(y.dtype)
        return y + (linear(linear(x, a), sb_NR) if a.dim() == 2 else conv2d(base.product(x, a), sb_NR[:, :, None, None]))


def _in_compute_dtype(
    name: str, factors: Factors, dtype: torch.dtype, device: torch.device, key: str
) -> Mapping[str, Tensor]:
    """A [R, K] or [R, K, kh, kw] and s B [N, R] by their buffers' names, each rounded once."""
    if device.type == "meta":
        shapes = {A: factors.a.shape, SB: (factors.rows, factors.rank)}
        return {buffer: torch.empty(shape, dtype=dtype, device=device) for buffer, shape in shapes.items()}
    wide = torch.promote_types(dtype, torch.float32)
    tensors = {A: factors.a.make().to(wide), SB: factors.b.make().flatten(1).to(wide) * factors.scaling}
    for buffer, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise UserError(f"{key}: {buffer} of {name} is not finite; take another file")
    return {buffer: tensor.to(device, dtype) for buffer, tensor in tensors.items()}
