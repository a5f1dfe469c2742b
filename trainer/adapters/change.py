"""How far training moved an adapted layer from where it began. W is read once, in pieces, and nothing dense is made.

V = g (W + s B A) now, and V' = g' (W + s B' A') at the start: W, or the weights of adapter.init_from. With F = [A; A'], the
rows of A above those of A', all rows have one form, u W + E F:

    V - V':  u = g - g',  E = [s g B, -s g' B']        V':  u = g',  E = [0, s g' B']
    ||u W + E F||^2 = u^2 ||W||^2 + 2 u (E . W F^T) + ((E F F^T) . E)  of each row

summed in fp64, because the terms cancel where an adapter scales rows and adds to them the other way.

The norm of a DoRA's row of V is |m|. So a row moves by ||m| - |m'|| at least: what magnitudes do is in ||V - V'||.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.adapters.adapter import ADAPTER_NAME
from trainer.adapters.dora import is_lost, scale_rows
from trainer.kernels.decode import squares_and_product
from trainer.kernels.dora_torch import TINY


@dataclass(frozen=True)
class StartFactors:
    """An adapter of one layer, on any device: A fp32 [R, K...], B fp32 [N, R...], m fp32 [N] or None."""

    a: Tensor
    b: Tensor
    m: Tensor | None


@dataclass(frozen=True)
class LayerChange:
    """How far one layer is from its start. moved: ||V - V'||. size: ||V'||. Frobenius norms. drift: the largest |m / m' - 1|
    of a row; lost: how many rows have a wrong dm (`is_lost`). Both are 0 for a LoRA.

    A row of zeros has no magnitude to be compared with, so it has no drift.
    """

    moved: float
    size: float
    drift: float
    lost: int = 0


@torch.no_grad()
def change(layer, start: StartFactors | None = None) -> LayerChange:
    """How far an AdaptedLayer is from its start. start: None: g' = 1 and B' = 0, as a fresh adapter has them."""
    base, scaling, kind = layer.get_base_layer(), layer.scaling[ADAPTER_NAME], layer.kinds[ADAPTER_NAME]
    if start is None and kind.form is not None:
        moved = kind.form.norm({end: held.weight for end, held in layer.trained(ADAPTER_NAME).items()})
        return LayerChange(scaling * moved, float(base.row_norms().double().norm()), 0.0)
    a, b = layer.factors(ADAPTER_NAME)
    if start is None:
        a_then, b_then = a[:0], b[:, :0]
    else:
        a_then, b_then = start.a.to(a.device).flatten(1), start.b.to(b.device).flatten(1)
    f = torch.cat([a, a_then]).double()
    w_sq_N, wf = squares_and_product(base.stored(), f)
    ff = f @ f.t()

    def rows_sq(u_N: Tensor, e: Tensor) -> Tensor:
        terms_N = u_N.square() * w_sq_N + 2 * u_N * (e * wf).sum(1) + ((e @ ff) * e).sum(1)
        return terms_N.clamp_min(0)

    g_N = g_then_N = torch.ones_like(w_sq_N)
    drift, lost = 0.0, 0
    if (m_N := layer.effective(ADAPTER_NAME)[2]) is not None:
        m_then_N = layer.base_norm_sq.sqrt()
        lost = int(is_lost(m_N, base.bias_N, layer.z_rows, base.compute_dtype).sum())
        g_N = scale_rows(m_N, layer.norm_with(a, b, scaling)).double()
        if start is not None:
            assert start.m is not None
            m_then_N = start.m.to(m_N.device)
            g_then_N = scale_rows(m_then_N, layer.norm_with(a_then, b_then, scaling)).double()
        known_N = m_then_N.abs() >= TINY
        ratios = m_N[known_N].double() / m_then_N[known_N].double()
        drift = float((ratios - 1).abs().max()) if len(ratios) else 0.0
    now, then = scaling * g_N[:, None] * b.double(), scaling * g_then_N[:, None] * b_then.double()
    moved = rows_sq(g_N - g_then_N, torch.cat([now, -then], 1)).sum().sqrt()
    size = rows_sq(g_then_N, torch.cat([torch.zeros_like(now), then], 1)).sum().sqrt()
    return LayerChange(float(moved), float(size), drift, lost)
