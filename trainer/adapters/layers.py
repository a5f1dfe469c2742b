"""PEFT's LoRA layer for our frozen base layers: PEFT matches, injects, names, switches and disables; the math is dora.py."""

import math
from collections.abc import Iterable, Sequence

import torch
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from trainer.adapters.dora import Part, Ready, adapted, divisor, is_drowned, joined_a, scale_rows
from trainer.adapters.limits import thinned


class Values(nn.Module):
    """Holds A, B or DoRA's m, fp32, under the name PEFT gives it in state dicts (`lora_A.NAME.weight`)."""

    def __init__(self, initial: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(initial)


class Now:
    """What an AdaptedLayer knows of its active adapter. Apart from the module, whose attributes are slow to set and to find.

    part: what its forward computes with; None while it is stale. active: (name, A, B, magnitude, dropout). rows: in training,
    what multiplies the rows of A (limits.drawn_rows); None: nothing.
    """

    __slots__ = ("active", "part", "rows")

    def __init__(self) -> None:
        self.part: Part | None = None
        self.active: tuple | None = None
        self.rows: Tensor | None = None


class AdaptedLayer(nn.Module, LoraLayer):
    """A frozen base layer with one active adapter. A, B and m are fp32 in every mode.

    `now.part` has what changes with an update only: A and s B in the compute dtype, and of a DoRA g = m / c, whose norm
    c = ||W + s B A||_row is in `norm`. They are non-persistent buffers. Whatever changes A, B, m, or which adapter is
    active calls `mark_stale`; the next forward of the owning module (`Adapter.refresh_before`), or of the layer where it is
    called by itself, refreshes it where W is resident. So it is made once for an update, not for each micro-batch, nor again
    when a checkpointed block is recomputed. It is not keyed on the tensors' version counter, which fused and 8-bit optimizers
    do not advance.
    """

    # As of the base layer: T5 casts its activations to `wo.weight.dtype`, which must not be a payload's.
    weight = None

    def __init__(self, base_layer: nn.Module, adapter_name: str, config, r: int, lora_alpha: float, **kwargs) -> None:
        super().__init__()
        LoraLayer.__init__(self, base_layer)
        self._active_adapter = adapter_name
        self.strength = 1.0
        self.shared: SharedInput | None = None
        self.now = Now()
        for name in ("cast_A", "cast_B", "gain", "divisor"):
            self.register_buffer(name, None, persistent=False)
        self.update_layer(adapter_name, r, lora_alpha, config)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        # PEFT would warn of a layer type it does not know.
        return module.weight_shape[1], module.weight_shape[0]

    def update_layer(self, adapter_name: str, r: int, lora_alpha: float, config, **kwargs) -> None:
        """Add PEFT's adapter of that name: A, B and, for DoRA, the magnitude m = ||W||, all fp32. Raises ValueError for a
        DoRA with dropout."""
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
                z_rows = drowned.nonzero().flatten() if drowned.any() else None
                self.register_buffer("z_rows", z_rows, persistent=False)
            self.lora_magnitude_vector[adapter_name] = Values(self.current_norm(adapter_name))
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Choose the adapters that compute, and drop what followed from the others."""
        super().set_adapter(adapter_names, inference_mode)
        self.now.active = None
        self.mark_stale()

    def _apply(self, fn, recurse: bool = True):
        self.mark_stale()  # what follows from the parameters would stay where they were
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.mark_stale()

    def factors(self, adapter_name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A as [R, K] and B as [N, R] (a convolution's kernel flattened)."""
        return self.lora_A[adapter_name].weight.flatten(1), self.lora_B[adapter_name].weight.flatten(1)

    @property
    def stale(self) -> bool:
        """Whether A, B, m or the active adapter changed since `refresh`."""
        return self.now.part is None

    def mark_stale(self) -> None:
        """A, B, m or the active adapter changed: the next forward makes anew what follows from them."""
        if self.shared is not None:
            self.shared.forget()
        self.now.part = None

    def current_norm(self, adapter_name: str) -> torch.Tensor:
        """c, fp32 [N], from the present A and B."""
        return self.norm_with(*self.factors(adapter_name), self.scaling[adapter_name])

    @torch.no_grad()
    def norm_with(self, a_RK: torch.Tensor, b_NR: torch.Tensor, scaling: float) -> torch.Tensor:
        """||W + s B A||_row, fp32 [N]."""
        base = self._modules["base_layer"]
        given = base.stored(), self._buffers["base_norm_sq"], a_RK, b_NR, scaling
        return base.kernels.adapted_norms(*([each] for each in given))[0]

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
        """Compute with the frozen weight again, and the adapter beside it."""
        self.get_base_layer().merged_weight = None
        self.merged_adapters.clear()
        self.mark_stale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output in compute_dtype: base + strength * (adapted - base)."""
        base = self._modules["base_layer"]
        if self._disable_adapters and self.merged_adapters:
            self.unmerge()
        if self._disable_adapters or self.merged_adapters or self.strength == 0:
            return base(x)
        if self.shared is not None and self.shared.applies(x):
            y = self.shared.output(self, x)
        else:
            part, dropout = self.part(), self.now.active[4] if self.training else None
            if self.now.rows is not None:
                part = thinned(part, self.now.rows)
            mask = None if dropout is None else dropout(torch.ones_like(x, dtype=base.compute_dtype))
            (y,) = adapted(x, [part], mask)
        return y if self.strength == 1 else torch.lerp(base(x), y, self.strength)

    def part(self) -> Part:
        """This layer as dora.py takes it, fresh."""
        part = self.now.part
        if part is not None and torch.compiler.is_compiling():
            return part  # a graph reads its parameters and no others
        name, a, b, magnitude, _ = self.now.active or self.active()
        # Parameters may be swapped for others (torch.func.functional_call), and PEFT sets scalings.
        if (
            part is None
            or part.a is not a._parameters["weight"]
            or part.b is not b._parameters["weight"]
            or (part.m is not None and part.m is not magnitude._parameters["weight"])
            or part.scaling != self.scaling[name]
        ):
            self.mark_stale()
            refresh([self])
            part = self.now.part
            assert part is not None
        return part

    def active(self) -> tuple:
        """(name, A, B, magnitude or None, dropout or None) of the active adapter: the modules."""
        # They are looked up once: a step of a small model spends a tenth of its time on such look-ups.
        if self.now.active is None:
            if len(self.active_adapters) != 1:
                raise ValueError(f"one adapter can be active at a time, not {self.active_adapters}; use set_adapter")
            (name,) = self.active_adapters
            magnitude = self.lora_magnitude_vector[name] if self.use_dora[name] else None
            dropout = self.lora_dropout[name] if isinstance(self.lora_dropout[name], nn.Dropout) else None
            self.now.active = name, self.lora_A[name], self.lora_B[name], magnitude, dropout
        return self.now.active

    @property
    def dropout(self) -> nn.Dropout | None:
        """The active adapter's, where it has any."""
        return self.active()[4]


@torch.inference_mode(False)  # what is made is saved for backward passes later
@torch.no_grad()
def refresh(layers: Iterable[AdaptedLayer]) -> None:
    """Make what follows from the present A, B and m of those layers that are stale: as far as it can, of all at once."""
    stale = [layer for layer in layers if layer.stale]
    bases, scalings, a_s, b_s, magnitudes = [], [], [], [], []
    for layer in stale:
        name, a, b, magnitude, _ = layer.active()
        bases.append(layer._modules["base_layer"])
        scalings.append(layer.scaling[name])
        a_s.append(a._parameters["weight"])
        b_s.append(b._parameters["weight"])
        magnitudes.append(None if magnitude is None else magnitude._parameters["weight"])
    cast_a = _cast(stale, "cast_A", [a.detach() for a in a_s], [1.0] * len(stale))
    cast_sb = _cast(stale, "cast_B", [b.detach().flatten(1) for b in b_s], scalings)
    made: list[tuple[Tensor | None, ...]] = [(None, None, None)] * len(stale)  # c, g and the divisor
    doras = [place for place, m in enumerate(magnitudes) if m is not None]
    if doras:
        norms = bases[doras[0]].kernels.adapted_norms(
            [bases[place].stored() for place in doras],
            [stale[place]._buffers["base_norm_sq"] for place in doras],
            [a_s[place].flatten(1) for place in doras],
            [b_s[place].flatten(1) for place in doras],
            [scalings[place] for place in doras],
        )
        m_all, rows = torch.cat([magnitudes[place] for place in doras]), [len(c_N) for c_N in norms]
        gains, divisors = scale_rows(m_all, torch.cat(norms)).split(rows), divisor(m_all).split(rows)
        for place, c_N, g_N, over_N in zip(doras, norms, gains, divisors, strict=True):
            made[place] = c_N, g_N, over_N
            stale[place]._buffers.update(norm=c_N, gain=g_N, divisor=over_N)
    for place, (layer, (c_N, *of_rows)) in enumerate(zip(stale, made, strict=True)):
        ready, z_rows = Ready(cast_a[place], cast_sb[place], *of_rows), layer._buffers.get("z_rows")
        layer.now.part = Part(bases[place], a_s[place], b_s[place], scalings[place], magnitudes[place], c_N, z_rows, ready)
    for shared in {id(layer.shared): layer.shared for layer in stale if layer.shared is not None}.values():
        shared.join()


def _cast(layers: Sequence[AdaptedLayer], name: str, tensors: list[Tensor], scalings: list[float]) -> list[Tensor]:
    """s * tensor, made in fp32, in the layer's compute dtype; a tensor that is that already stands for itself.

    New ones are kept in the layers' buffers of that name. They are new memory each time: a graph may hold the old ones.
    """
    dtypes = [layer._modules["base_layer"].compute_dtype for layer in layers]
    scaled = [place for place, scaling in enumerate(scalings) if scaling != 1]
    if scaled:
        products = torch._foreach_mul([tensors[place] for place in scaled], [scalings[place] for place in scaled])
        for place, product in zip(scaled, products, strict=True):
            tensors[place] = product
    copied = [place for place, dtype in enumerate(dtypes) if tensors[place].dtype != dtype]
    if copied:
        copies = [torch.empty_like(tensors[place], dtype=dtypes[place]) for place in copied]
        torch._foreach_copy_(copies, [tensors[place] for place in copied])
        for place, copy in zip(copied, copies, strict=True):
            tensors[place] = copy
    for place in {*scaled, *copied}:
        layers[place]._buffers[name] = tensors[place]
    return tensors


class SharedInput:
    """Adapted Linears that are called with one and the same tensor, as a block's q, k and v are.

    The first of them to be called computes the outputs of all; the others, called with the very same tensor, unchanged, take
    theirs. Called with another tensor, a layer computes with that: to be wrong about who shares costs time, not truth. Only
    compiled, x must not change between them: a compiler knows no version.
    """

    def __init__(self, layers: Sequence[AdaptedLayer]) -> None:
        self.layers = tuple(layers)
        self.key: tuple | None = None
        self.x: torch.Tensor | None = None
        self.outputs: dict[AdaptedLayer, torch.Tensor] = {}
        self.a_all: torch.Tensor | None = None
        for layer in layers:
            layer.shared = self

    def forget(self) -> None:
        """All that follows from the adapters' weights, and from x."""
        self.key = self.x = self.a_all = None
        self.outputs = {}

    def join(self) -> None:
        """Make `a_all`, where all layers are fresh: at the last of them that is made so."""
        parts = [layer.now.part for layer in self.layers]
        if all(part is not None for part in parts):
            self.a_all = joined_a([part.ready.a for part in parts])

    def applies(self, x: torch.Tensor) -> bool:
        """Whether all would compute on x alike: none is merged, disabled or drops anything; a change of x would be seen."""
        for layer in self.layers:
            if layer.merged_adapters or layer._disable_adapters or layer.now.rows is not None or layer.dropout is not None:
                return False
        return torch.compiler.is_compiling() or not x.is_inference()

    def output(self, layer: AdaptedLayer, x: torch.Tensor) -> torch.Tensor:
        """The output of `layer` for x, which is computed for all layers at the first of them."""
        key = None if torch.compiler.is_compiling() else (x._version, torch.is_grad_enabled())
        if x is not self.x or key != self.key or layer not in self.outputs:
            parts = [each.part() for each in self.layers]
            outputs = adapted(x, parts, a_all=self.a_all)
            self.x, self.key, self.outputs = x, key, dict(zip(self.layers, outputs, strict=True))
        y = self.outputs.pop(layer)
        if not self.outputs:
            self.key = self.x = None
        return y
