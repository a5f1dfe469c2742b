"""PEFT's LoRA layer for our frozen base layers: PEFT matches, injects, names, switches and disables; the math is dora.py."""

import math
from collections.abc import Sequence

import torch
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import nn

from trainer.adapters.dora import Part, adapted, is_drowned, scale_rows
from trainer.kernels.decode import squares_and_product
from trainer.memory import known


class Values(nn.Module):
    """Holds A, B or DoRA's m, fp32, under the name PEFT gives it in state dicts (`lora_A.NAME.weight`)."""

    def __init__(self, initial: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(initial)


class AdaptedLayer(nn.Module, LoraLayer):
    """A frozen base layer with one active adapter. A, B and m are fp32 in every mode.

    `norm` holds c = ||W + s B A||_row of the active adapter, a non-persistent fp32 buffer. Whatever changes A, B, or which
    adapter is active calls `mark_stale`; the next forward of the owning block (`Adapter.refresh_before`), or of the layer
    where it is called by itself, refreshes it where W is resident. So it is computed once for an update, not for each
    micro-batch, nor again when a checkpointed block is recomputed. It is not keyed on the tensors' version counter, which
    fused and 8-bit optimizers do not advance.
    """

    # As of the base layer: T5 casts its activations to `wo.weight.dtype`, which must not be a payload's.
    weight = None

    def __init__(self, base_layer: nn.Module, adapter_name: str, config, r: int, lora_alpha: float, **kwargs) -> None:
        super().__init__()
        LoraLayer.__init__(self, base_layer)
        self._active_adapter = adapter_name
        self.strength = 1.0
        self.stale = False
        self.shared: SharedInput | None = None
        self._looked_up: tuple | None = None
        self.update_layer(adapter_name, r, lora_alpha, config)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        # PEFT would warn of a layer type it does not know.
        return module.weight_shape[1], module.weight_shape[0]

    def update_layer(self, adapter_name: str, r: int, lora_alpha: float, config, **kwargs) -> None:
        base, dora = self.get_base_layer(), bool(config.use_dora)
        if dora and config.lora_dropout:
            raise ValueError("adapter.dropout cannot be combined with DoRA")
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        self.use_rslora[adapter_name], self.use_dora[adapter_name] = config.use_rslora, dora
        self.scaling[adapter_name] = lora_alpha / (math.sqrt(r) if config.use_rslora else r)
        self.lora_bias[adapter_name] = False
        dropout = nn.Dropout(config.lora_dropout) if config.lora_dropout else nn.Identity()
        self.lora_dropout[adapter_name] = dropout
        rows, *columns = base.weight_shape
        # B = 0 makes the adapter the identity; A = 0 until `inject` draws it keeps the first norm finite.
        for factors, shape in (self.lora_A, (r, *columns)), (self.lora_B, (rows, r, *(1 for _ in columns[1:]))):
            factors[adapter_name] = Values(torch.zeros(shape, dtype=torch.float32, device=base.qweight.device))
        if dora:
            if "base_norm_sq" not in self._buffers:
                base_norm_sq = base.kernels.row_squares(base.stored())
                self.register_buffer("base_norm_sq", base_norm_sq, persistent=False)
                self.register_buffer("norm", torch.empty_like(base_norm_sq), persistent=False)
                drowned = is_drowned(base_norm_sq, base.bias_N)
                z_rows = drowned.nonzero().flatten() if known(drowned.any(), False) else None
                self.register_buffer("z_rows", z_rows, persistent=False)
            self.lora_magnitude_vector[adapter_name] = Values(self.current_norm(adapter_name))
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        super().set_adapter(adapter_names, inference_mode)
        self._looked_up = None
        self.mark_stale()

    def factors(self, adapter_name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A as [R, K] and B as [N, R] (a convolution's kernel flattened)."""
        return self.lora_A[adapter_name].weight.flatten(1), self.lora_B[adapter_name].weight.flatten(1)

    def mark_stale(self) -> None:
        """A, B or the active adapter changed: the next forward recomputes c (DoRA), and nothing computed before is used."""
        if self.shared is not None:
            self.shared.forget()
        self.stale = any(self.use_dora.get(name) for name in self.active_adapters)

    @torch.no_grad()
    def current_norm(self, adapter_name: str) -> torch.Tensor:
        """c, fp32 [N], from the present A and B."""
        base = self.get_base_layer()
        a, b = self.factors(adapter_name)
        return base.kernels.adapted_norm(base.stored(), self.base_norm_sq, a, b, self.scaling[adapter_name])

    def refresh_norm(self) -> None:
        """Recompute c where it is stale."""
        if self.stale:
            self.norm.copy_(self.current_norm(self.active()[0]))
            self.stale = False

    @torch.no_grad()
    def adapted_weight(self, adapter_name: str) -> torch.Tensor:
        """The dense fp32 weight g * (W + s B A) in the base weight's shape; g = 1 for LoRA."""
        base = self.get_base_layer()
        a, b = self.factors(adapter_name)
        weight = base.dequantize(torch.float32)
        weight = weight + (self.scaling[adapter_name] * (b @ a)).view_as(weight)
        if self.use_dora[adapter_name]:
            g = scale_rows(self.lora_magnitude_vector[adapter_name].weight, self.current_norm(adapter_name))
            weight = weight * g.view(-1, *([1] * (weight.dim() - 1)))
        return weight

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        """adapted weight - W, fp32, in the base weight's shape."""
        return self.adapted_weight(adapter) - self.get_base_layer().dequantize(torch.float32)

    @torch.no_grad()
    def change(self, adapter_name: str) -> tuple[float, float]:
        """(||dW||, ||W||) with dW = g (W + s B A) - W, without making either: W is read once, in pieces.

        ||dW_n||^2 = (g - 1)^2 ||W_n||^2 + 2 s g (g - 1) (B . W A^T)_n + s^2 g^2 (B A A^T . B)_n, summed in fp64, because the
        terms cancel where an adapter scales rows and adds to them the other way.
        """
        base, scaling = self.get_base_layer(), self.scaling[adapter_name]
        a_RK, b_NR = (factor.double() for factor in self.factors(adapter_name))
        w_sq_N, wa_NR = squares_and_product(base.stored(), a_RK)
        g_N = torch.ones_like(w_sq_N)
        if self.use_dora[adapter_name]:
            m_N = self.lora_magnitude_vector[adapter_name].weight
            g_N = scale_rows(m_N, self.current_norm(adapter_name)).double()
        cross_N, own_N = (b_NR * wa_NR).sum(1), ((b_NR @ (a_RK @ a_RK.t())) * b_NR).sum(1)
        d_sq_N = (g_N - 1).square() * w_sq_N + 2 * scaling * g_N * (g_N - 1) * cross_N + (scaling * g_N).square() * own_N
        return float(d_sq_N.clamp_min(0).sum().sqrt()), float(w_sq_N.sum().sqrt())

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Compute with a dense fp32 copy of base + adapter. The payload is left alone, so `unmerge` is exact."""
        for name in check_adapters_to_merge(self, adapter_names):
            if self.merged_adapters:
                raise ValueError(f"{self.merged_adapters[0]} is merged already; unmerge it first, one adapter at a time")
            weight = self.adapted_weight(name)
            if safe_merge and not torch.isfinite(weight).all():
                raise ValueError(f"NaNs detected in the merged weights. The adapter {name} seems to be broken")
            self.get_base_layer().merged_weight = weight
            self.merged_adapters.append(name)
            self.mark_stale()

    def unmerge(self) -> None:
        self.get_base_layer().merged_weight = None
        self.merged_adapters.clear()
        self.mark_stale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self._modules["base_layer"]
        if self._disable_adapters and self.merged_adapters:
            self.unmerge()
        if self._disable_adapters or self.merged_adapters or self.strength == 0:
            return base(x)
        if self.shared is not None and self.shared.applies(x):
            y = self.shared.output(self, x)
        else:
            dropout = self.dropout if self.training else None
            mask = None if dropout is None else dropout(torch.ones_like(x, dtype=base.compute_dtype))
            (y,) = adapted(x, [self.part()], mask)
        return y if self.strength == 1 else torch.lerp(base(x), y, self.strength)

    def part(self) -> Part:
        """This layer as dora.py takes it, its norm fresh."""
        self.refresh_norm()
        name, a, b, magnitude, _ = self.active()
        base, a, b = self._modules["base_layer"], a._parameters["weight"], b._parameters["weight"]
        if magnitude is None:
            return Part(base, a, b, self.scaling[name])
        m, c, z_rows = magnitude._parameters["weight"], self._buffers["norm"], self._buffers["z_rows"]
        return Part(base, a, b, self.scaling[name], m, c, z_rows)

    def active(self) -> tuple:
        """(name, A, B, magnitude or None, dropout or None) of the active adapter: the modules."""
        # They are looked up once: a step of a small model spends a tenth of its time on such look-ups.
        if self._looked_up is None or [self._looked_up[0]] != self.active_adapters:
            if len(self.active_adapters) != 1:
                raise ValueError(f"one adapter can be active at a time, not {self.active_adapters}; use set_adapter")
            (name,) = self.active_adapters
            magnitude = self.lora_magnitude_vector[name] if self.use_dora[name] else None
            dropout = self.lora_dropout[name] if isinstance(self.lora_dropout[name], nn.Dropout) else None
            self._looked_up = name, self.lora_A[name], self.lora_B[name], magnitude, dropout
        return self._looked_up

    @property
    def dropout(self) -> nn.Dropout | None:
        """The active adapter's, where it has any."""
        return self.active()[4]


class SharedInput:
    """Adapted Linears that are called with one and the same tensor, as a block's q, k and v are.

    The first of them to be called computes the outputs of all; the others, called with the very same tensor, unchanged, take
    theirs. Called with another tensor, a layer computes with that: to be wrong about who shares costs time, not truth.
    """

    def __init__(self, layers: Sequence[AdaptedLayer]) -> None:
        self.layers = tuple(layers)
        self.key: tuple | None = None
        self.x: torch.Tensor | None = None
        self.outputs: dict[AdaptedLayer, torch.Tensor] = {}
        for layer in layers:
            layer.shared = self

    def forget(self) -> None:
        self.key = self.x = None
        self.outputs = {}

    def applies(self, x: torch.Tensor) -> bool:
        """Whether all would compute on x alike: none is merged, disabled or drops inputs, and a change of x would be seen."""
        return not x.is_inference() and not any(
            layer.merged_adapters or layer._disable_adapters or layer.dropout is not None for layer in self.layers
        )

    def output(self, layer: AdaptedLayer, x: torch.Tensor) -> torch.Tensor:
        key = x._version, torch.is_grad_enabled()
        if x is not self.x or key != self.key or layer not in self.outputs:
            outputs = adapted(x, [each.part() for each in self.layers])
            self.x, self.key, self.outputs = x, key, dict(zip(self.layers, outputs, strict=True))
        y = self.outputs.pop(layer)
        if not self.outputs:
            self.forget()
        return y
