"""The distance of an adapted layer from its start. W is read once, in pieces, and nothing dense is made.

V = g (W + s B A) now, and V' = g' (W + s B' A') at the start: W, or the weights of adapter.init_from. With F = [A; A'], the
rows of A above those of A', all rows have one form, u W + E F:

    V - V':  u = g - g',  E = [s g B, -s g' B']        V':  u = g',  E = [0, s g' B']
    ||u W + E F||^2 = u^2 ||W||^2 + 2 u (E . W F^T) + ((E F F^T) . E)  of each row

summed in fp64, because the terms cancel where an adapter scales rows and adds to them the other way.

The norm of a DoRA's row of V is |m|. So a row moves by ||m| - |m'|| at least: ||V - V'|| includes changes of magnitudes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.adapters.adapter import ADAPTER_NAME
from trainer.adapters.dora import is_lost, scale_rows
from trainer.adapters.kinds import LayerState
from trainer.kernels.decode import squares_and_product
from trainer.kernels.dora_torch import TINY


@dataclass(frozen=True)
class LayerChange:
    """One layer's distance from its start. moved: ||V - V'||; size: ||V'||; Frobenius norms. drift: the largest |m / m' - 1|
    of a row; lost: number of rows with a wrong dm (`is_lost`). Both are 0 for a LoRA.

    A row of zeros has no magnitude to compare with, so it has no drift.
    """

    moved: float
    size: float
    drift: float
    lost: int = 0


@torch.no_grad()
def change(layer, start: LayerState | None = None) -> LayerChange:
    """The distance of an AdaptedLayer from its start. start: its parameters then, on any device; None: a fresh adapter, whose
    g' = 1 and B' = 0."""
    base, scaling, kind = layer.get_base_layer(), layer.scaling[ADAPTER_NAME], layer.kinds[ADAPTER_NAME]
    if start is None and kind.form is not None:
        moved = kind.form.norm({end: values.weight for end, values in layer.trained(ADAPTER_NAME).items()})
        return LayerChange(scaling * moved, float(base.row_norms().double().norm()), 0.0)
    a, b, m_N = layer.effective(ADAPTER_NAME)
    a, b = a.flatten(1), b.flatten(1)
    a_0, b_0, m_0_N = (a[:0], b[:, :0], None) if start is None else kind.effective(start)
    a_0, b_0 = (factor.to(a.device).flatten(1) for factor in (a_0, b_0))
    f = torch.cat([a, a_0]).double()
    w_sq_N, wf = squares_and_product(base.stored(), f)
    ff = f @ f.t()

    def rows_sq(u_N: Tensor, e: Tensor) -> Tensor:
        terms_N = u_N.square() * w_sq_N + 2 * u_N * (e * wf).sum(1) + ((e @ ff) * e).sum(1)
        return terms_N.clamp_min(0)

    g_N = g_0_N = torch.ones_like(w_sq_N)
    drift, wrong_rows = 0.0, 0
    if m_N is not None:
        wrong_rows = int(is_lost(m_N, base.bias_N, layer.z_rows, base.compute_dtype).sum())
        g_N = scale_rows(m_N, layer.norm_with(a, b, scaling)).double()
        if m_0_N is None:
            m_0_N = layer.base_norm_sq.sqrt()
        else:
            m_0_N = m_0_N.to(a.device)
            g_0_N = scale_rows(m_0_N, layer.norm_with(a_0, b_0, scaling)).double()
        nonzero_N = m_0_N.abs() >= TINY
        ratios = m_N[nonzero_N].double() / m_0_N[nonzero_N].double()
        drift = float((ratios - 1).abs().max()) if len(ratios) else 0.0
    present, past = scaling * g_N[:, None] * b.double(), scaling * g_0_N[:, None] * b_0.double()
    moved = rows_sq(g_N - g_0_N, torch.cat([present, -past], 1)).sum().sqrt()
    size = rows_sq(g_0_N, torch.cat([torch.zeros_like(present), past], 1)).sum().sqrt()
    return LayerChange(float(moved), float(size), drift, wrong_rows)
