"""Row norms: an adapter file needs no more of the frozen weights. Each checkpoint keeps them (norms.safetensors).

A DoRA is trained over a weight as it lies in memory, W. Its file is applied to the model's own, W16, whose rows have other
norms: by a few per mille if W has 8 bits, by an eighth if it has 2. So that the file gives g (W16 + s B A), with
g = m / c as trained and c = ||W + s B A||_row, it holds

    g ||W16||                             for readers that divide by ||W16||
    g sqrt(c^2 + ||W16||^2 - ||W||^2)     for readers that divide by ||W16 + s B A||

The first is exact. Under the root of the second, 2 s rowsum(B * ((W16 - W) A^T)) is missing: W16 is gone by then. Both are
||W16|| before training; if W is W16 they are m ||W|| / c and m.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from trainer.adapters.adapter import Adapter
from trainer.base.errors import UserError
from trainer.base.files import Advance, no_progress
from trainer.base.protocols import BaseLayer
from trainer.kernels.dora_torch import TINY

TOLERANCE = 1e-5  # relative: sums of another device or thread count differ in their last bits


@dataclass(frozen=True)
class RowNorms:
    """The norms of one layer's rows, fp32 [N], on the CPU. Saved as LAYER.FIELD_norm.

    base: ||W||. original: ||W16||; None if W is dense, or lies quantised in the model's file. adapted: c; None for a layer
    without an adapter.
    """

    base: torch.Tensor
    original: torch.Tensor | None
    adapted: torch.Tensor | None

    @property
    def reader(self) -> torch.Tensor:
        """The norms of the weight that the adapter file will be applied to."""
        return self.base if self.original is None else self.original


def released_scale(m_N: torch.Tensor, norms: RowNorms) -> torch.Tensor:
    """g ||W16||, fp32 [N]."""
    assert norms.adapted is not None
    return torch.where(norms.adapted > 0, m_N * norms.reader / norms.adapted.clamp_min(TINY), m_N)


def magnitude(m_N: Tensor, a_RK: Tensor, b_NR: Tensor, scaling: float, norms: RowNorms) -> Tensor:
    """g ||W16 + s B A||, fp32 [N], estimated from norms: g sqrt(c^2 + ||W16||^2 - ||W||^2).

    This plain sum assumes that W16 - W is orthogonal to s B A. It is not if s B A takes away most of a row and W is longer
    than W16; the sum is then far too small or negative. W is then W16 with noise on it, so the part of s B A along W counts
    for W16 by ||W16||^2 / ||W||^2 only. That shared sum is never negative. The result passes from the plain to the shared
    sum while the plain one falls from a half to a quarter of the shared one.
    """
    if norms.original is None:
        return m_N
    assert norms.adapted is not None
    a, b, m, c = (tensor.double() for tensor in (a_RK, b_NR, m_N, norms.adapted))
    c_sq, original_sq, base_sq = c.square(), norms.original.double().square(), norms.base.double().square()
    added_sq = scaling**2 * (b @ (a @ a.t())).mul_(b).sum(1)
    share = (original_sq / base_sq.clamp_min(TINY**2)).clamp_max(1)
    plain = c_sq + original_sq - base_sq
    shared = original_sq + added_sq + share * (c_sq - base_sq - added_sq)
    passed = (2 - 4 * plain / shared.clamp_min(TINY**2)).clamp(0, 1)
    norm_sq = torch.lerp(plain, shared, passed).clamp_min(0)
    return torch.where(c > 0, m / c.clamp_min(TINY) * norm_sq.sqrt(), m).float()


class Norms:
    """The norms that a DoRA's adapter files need, the piece "norms" of a checkpoint; empty for a LoRA, whose files need none.

    beside: layers without an adapter that the original layout fuses with adapted ones, by full name.
    held: storage of the components whose files hold them quantised, by name. advance: counts layers read.
    used: a context in which the adapter has the weights of its files: for most optimizers those being trained.
    """

    used: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(
        self, adapter: Adapter, beside: Mapping[str, BaseLayer], held: Mapping[str, str], advance: Advance = no_progress
    ) -> None:
        self.adapted = adapter.layers if adapter.kind.magnitudes else {}
        self.held = dict(held)
        self.frozen: dict[str, RowNorms] = {}
        for name, layer in self.adapted.items():
            base = layer.get_base_layer()
            self.frozen[name] = RowNorms(layer.base_norm_sq.sqrt().cpu(), base.original_norms, None)
        for name, base in beside.items() if adapter.kind.magnitudes else ():
            self.frozen[name] = RowNorms(base.row_norms().cpu(), base.original_norms, None)
            advance(1)

    def now(self, advance: Advance = no_progress) -> dict[str, RowNorms]:
        """Every layer's norms with the present c, by name. Computes a stale c, which the next forward then uses."""
        norms = dict(self.frozen)
        for name, layer in self.adapted.items():
            layer.part()
            norms[name] = RowNorms(norms[name].base, norms[name].original, layer.norm.to("cpu", copy=True))
            advance(1)
        return norms

    def state_dict(self) -> dict[str, Any]:
        """The norms as tensors, with `held`."""
        with self.used():
            return {"held": self.held, **_tensors(self.now())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compare the saved norms with those of the frozen base, but for c, which follows from the adapter too. Raises
        UserError naming a difference."""
        saved, present = _tensors(read_norms(state)), _tensors(self.frozen)
        for key in sorted(key for key in present.keys() | saved.keys() if not key.endswith(".adapted_norm")):
            one, other = saved.get(key), present.get(key)
            if one is None or other is None:
                problem = "is not in the checkpoint" if one is None else "is not there now"
            elif (one.shape, one.dtype) == (other.shape, other.dtype) and torch.allclose(one, other, rtol=TOLERANCE, atol=0):
                continue
            else:
                problem = "differs"
            raise UserError(
                f"the model's row norms are not those of the checkpoint: {key} {problem}; restore the model, or start a new "
                "run"
            )
        if state["held"] != self.held:
            raise UserError(
                f"the checkpoint's adapter is for {made_for(state['held'])}, this run's for {made_for(self.held)}; "
                "restore the model, or start a new run"
            )


def _tensors(layers: Mapping[str, RowNorms]) -> dict[str, torch.Tensor]:
    by_key = {f"{name}.{kind}_norm": tensor for name, norms in layers.items() for kind, tensor in vars(norms).items()}
    return {key: tensor for key, tensor in by_key.items() if tensor is not None}


def read_norms(state: Mapping[str, Any]) -> dict[str, RowNorms]:
    """The norms in a `Norms.state_dict`, by layer: adapter files need no more of the model."""
    layers = [key.removesuffix(".base_norm") for key in state if key.endswith(".base_norm")]
    return {name: RowNorms(*(state.get(f"{name}.{field.name}_norm") for field in fields(RowNorms))) for name in layers}


def made_for(held: Mapping[str, str]) -> str:
    """Names the weights that a DoRA's files are for. held: storage of the components whose files are quantised."""
    if not held:
        return "the model's weights before they were quantised"
    components = ", ".join(f"{name}: {dtype}" for name, dtype in held.items())
    return f"the weights as the model's file holds them quantised ({components}); it has no others"
