"""PEFT's LoRA layer for our frozen base layers: PEFT matches, injects, names, switches and disables; the math is dora.py."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from trainer.adapters.dora import Part, Ready, adapted, divisor, joined_a, scale_rows
from trainer.adapters.kinds import MAGNITUDE, A, AdapterKind, B, file_kind


class Values(nn.Module):
    """Holds A, B, m or another parameter, fp32, under the name PEFT gives it in state dicts (`lora_A.NAME.weight`)."""

    def __init__(self, initial: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(initial)


class ActiveAdapter:
    """The active adapter of an AdaptedLayer. Apart from the module, whose attributes are slow to set and to find.

    part: the object that computes the forward; None while it is stale. active: (name, A, B, magnitude, dropout).
    rows: fp32 [R], factors for the rows of A in training (adapter.drawn_rows); None: no such dropout.
    """

    __slots__ = ("active", "part", "rows")

    def __init__(self) -> None:
        self.part: Part | None = None
        self.active: tuple | None = None
        self.rows: Tensor | None = None


class AdaptedLayer(nn.Module, LoraLayer):
    """A frozen base layer with one active adapter. A, B and m are fp32 in every mode. A kind with `factors` makes A
    and B in every forward.

    `current.part` caches values that only an update changes: A and s B in the compute dtype, and g = m / c for a DoRA, whose
    norm c = ||W + s B A||_row is in `norm`. They are non-persistent buffers. Code that changes A, B, m or the active adapter
    calls `mark_stale`; the next forward of the owning module (`Adapter.refresh_before`), or of the layer if called by itself,
    refreshes the cache where W is resident. So it is computed once for an update, not for each micro-batch, nor again when a
    checkpointed block is recomputed. It is not keyed on the tensors' version counter, which fused and 8-bit optimizers do not
    advance.
    """

    adapter_layer_names = LoraLayer.adapter_layer_names  # PEFT switches these on and off
    # None, like the base layer's: T5 casts its activations to `wo.weight.dtype`, which must not be a payload's.
    weight = None

    def __init__(self, base_layer: nn.Module, name: str, config, r: int, lora_alpha: float, kind: AdapterKind) -> None:
        super().__init__()
        LoraLayer.__init__(self, base_layer)
        self._active_adapter = name
        self.strength = 1.0
        self.shared: SharedInput | None = None
        self.current = ActiveAdapter()
        self.kinds: dict[str, AdapterKind] = {}
        for buffer in ("cast_A", "cast_B", "gain", "divisor", "base_norm_sq", "norm", "z_rows"):
            self.register_buffer(buffer, None, persistent=False)
        self.update_layer(name, r, lora_alpha, config, kind)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        # PEFT would warn of a layer type it does not know.
        return module.weight_shape[1], module.weight_shape[0]

    def update_layer(self, adapter_name: str, r: int, lora_alpha: float, config, kind=None, **kwargs) -> None:
        """Add PEFT's adapter of that name, with the parameters of its AdapterKind, all fp32. kind: None takes it from PEFT's
        config. Raises ValueError for a dropout that the kind refuses."""
        base, kind = self.get_base_layer(), kind or file_kind(magnitudes=bool(config.use_dora))
        if config.lora_dropout and "adapter.dropout" in kind.refuses:
            raise ValueError(f"adapter.dropout cannot be combined with {kind.word}")
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        self.use_rslora[adapter_name], self.use_dora[adapter_name] = config.use_rslora, kind.magnitudes
        shapes = kind.shapes(base.weight_shape, r)
        self.scaling[adapter_name] = kind.scaling(shapes, r, lora_alpha, config.use_rslora)
        self.lora_bias[adapter_name], self.kinds[adapter_name] = False, kind
        self.lora_dropout[adapter_name] = nn.Dropout(config.lora_dropout) if config.lora_dropout else nn.Identity()
        # B = 0 makes the adapter the identity; A = 0 until `inject` draws it keeps the first norm finite.
        for end, shape in shapes.items():
            if (key := end.removesuffix(".weight")) not in self._modules:
                self.add_module(key, nn.ModuleDict())
                self.adapter_layer_names = (*self.adapter_layer_names, key)
            self._modules[key][adapter_name] = Values(torch.zeros(shape, dtype=torch.float32, device=base.qweight.device))
        for end, value in kind.first(self, adapter_name).items():
            self.trained(adapter_name)[end].weight = nn.Parameter(value)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def trained(self, adapter_name: str) -> dict[str, Values]:
        """The modules of the adapter's parameters, by the ends of their names (`AdapterKind.shapes`)."""
        by_end = {end: self._modules.get(end.removesuffix(".weight"), {}) for end in self.kinds[adapter_name].ends}
        return {end: modules[adapter_name] for end, modules in by_end.items() if adapter_name in modules}

    def effective(self, adapter_name: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """(A, B, m or None) in their own shapes, with gradients."""
        return self.kinds[adapter_name].effective({end: values.weight for end, values in self.trained(adapter_name).items()})

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Choose the adapters that compute, and drop values derived from the others."""
        super().set_adapter(adapter_names, inference_mode)
        self.current.active = None
        self.mark_stale()

    def _apply(self, fn, recurse: bool = True):
        self.mark_stale()  # what follows from the parameters would stay where they were
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.mark_stale()

    def factors(self, adapter_name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A as [R, K] and B as [N, R] (a convolution's kernel flattened)."""
        a, b, _ = self.effective(adapter_name)
        return a.flatten(1), b.flatten(1)

    @property
    def stale(self) -> bool:
        """Whether A, B, m or the active adapter changed since `refresh`; never if every forward makes A and B."""
        return self.current.part is None and not self.kinds[(self.current.active or self.active())[0]].composes

    def mark_stale(self) -> None:
        """Have the next forward recompute values derived from A, B, m and the active adapter."""
        if self.shared is not None:
            self.shared.forget()
        self.current.part = None

    def snapshot(self) -> Callable[[], None]:
        """A function that restores the present derived values, in the same memory."""
        part, buffers, shared = self.current.part, dict(self._buffers), self.shared
        a_all = shared and shared.a_all

        def restore() -> None:
            self.current.part = part
            self._buffers.update(buffers)
            if shared is not None:
                shared.a_all = a_all

        return restore

    def current_norm(self, adapter_name: str) -> torch.Tensor:
        """c, fp32 [N], from the present A and B."""
        return self.norm_with(*self.factors(adapter_name), self.scaling[adapter_name])

    @torch.no_grad()
    def norm_with(self, a_RK: torch.Tensor, b_NR: torch.Tensor, scaling: float) -> torch.Tensor:
        """||W + s B A||_row, fp32 [N]."""
        base = self._modules["base_layer"]
        return base.kernels.adapted_norms([base.stored()], [self._buffers["base_norm_sq"]], [a_RK], [b_NR], [scaling])[0]

    @torch.no_grad()
    def adapted_weight(self, adapter_name: str) -> torch.Tensor:
        """The dense fp32 weight g * (W + s B A) in the base weight's shape; g = 1 for LoRA."""
        base = self.get_base_layer()
        a, b = self.factors(adapter_name)
        weight = base.dequantize(torch.float32)
        weight = weight + (self.scaling[adapter_name] * (b @ a)).view_as(weight)
        if (m := self.effective(adapter_name)[2]) is not None:
            g = scale_rows(m, self.current_norm(adapter_name))
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
            part, dropout = self.part(), self.current.active[4] if self.training else None
            if (rows := self.current.rows) is not None:
                part = Part(part.base, part.a * rows.view(-1, *[1] * (part.a.dim() - 1)), part.b, part.scaling)
            mask = None if dropout is None else dropout(torch.ones_like(x, dtype=base.compute_dtype))
            y = part.output(x, mask)
        return y if self.strength == 1 else torch.lerp(base(x), y, self.strength)

    def part(self) -> Any:
        """This layer as a fresh dora.Part, or as the part of its kind's own form (`Form.part`)."""
        part: Any = self.current.part
        if part is not None and torch.compiler.is_compiling():
            return part  # a graph reads its parameters and no others
        name, a, b, magnitude, _ = self.current.active or self.active()
        if part is None and self.kinds[name].composes:
            (a, b, m), scaling, c = self.effective(name), self.scaling[name], None
            if m is not None:
                c = self._buffers["norm"] = self.norm_with(a.flatten(1), b.flatten(1), scaling)
            return Part(self.get_base_layer(), a, b, scaling, m, c, self.z_rows)
        # Parameters may be swapped for others (torch.func.functional_call), and PEFT sets scalings.
        if (
            part is None
            or (a is None and not part.is_of(self.trained(name), self.scaling[name]))
            or (a is not None and part.a is not a._parameters["weight"])
            or (a is not None and part.b is not b._parameters["weight"])
            or (magnitude is not None and part.m is not magnitude._parameters["weight"])
            or part.scaling != self.scaling[name]
        ):
            self.mark_stale()
            refresh([self])
            part = self.current.part
            assert part is not None
        return part

    def active(self) -> tuple:
        """(name, A, B, magnitude or None, dropout or None) of the active adapter: the modules."""
        # They are looked up once: a step of a small model spends a tenth of its time on such look-ups.
        if self.current.active is None:
            if len(self.active_adapters) != 1:
                raise ValueError(f"one adapter can be active at a time, not {self.active_adapters}; use set_adapter")
            (name,) = self.active_adapters
            dropout = self.lora_dropout[name] if isinstance(self.lora_dropout[name], nn.Dropout) else None
            self.current.active = name, *map(self.trained(name).get, (A, B, MAGNITUDE)), dropout
        return self.current.active

    @property
    def dropout(self) -> nn.Dropout | None:
        """The active adapter's dropout, if it has one."""
        return self.active()[4]


@torch.inference_mode(False)  # later backward passes save these tensors
@torch.no_grad()
def refresh(layers: Iterable[AdaptedLayer]) -> None:
    """Recompute the derived values of the stale layers from their present A, B and m, with few operators for all of them."""
    stale = [layer for layer in layers if layer.stale]
    if formed := [layer for layer in stale if layer.kinds[layer.current.active[0]].form]:
        _refresh_formed(formed)
        stale = [layer for layer in stale if layer.current.part is None]
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
    row_values: list[tuple[Tensor | None, ...]] = [(None, None, None)] * len(stale)  # c, g and the divisor
    with_m = [n for n, m in enumerate(magnitudes) if m is not None]
    if with_m:
        args = [(bases[n].stored(), stale[n].base_norm_sq, a_s[n].flatten(1), b_s[n].flatten(1), scalings[n]) for n in with_m]
        norms = bases[with_m[0]].kernels.adapted_norms(*map(list, zip(*args, strict=True)))
        m_all, rows = torch.cat([magnitudes[n] for n in with_m]), [len(c_N) for c_N in norms]
        gains, divisors = scale_rows(m_all, torch.cat(norms)).split(rows), divisor(m_all).split(rows)
        for n, c_N, g_N, over_N in zip(with_m, norms, gains, divisors, strict=True):
            row_values[n] = c_N, g_N, over_N
            stale[n]._buffers.update(norm=c_N, gain=g_N, divisor=over_N)
    for n, (layer, (c_N, *of_m)) in enumerate(zip(stale, row_values, strict=True)):
        ready, z_rows = Ready(cast_a[n], cast_sb[n], *of_m), layer._buffers.get("z_rows")
        layer.current.part = Part(bases[n], a_s[n], b_s[n], scalings[n], magnitudes[n], c_N, z_rows, ready)
    for shared in {id(layer.shared): layer.shared for layer in stale if layer.shared is not None}.values():
        shared.join()


def _refresh_formed(layers: Sequence[AdaptedLayer]) -> None:
    """Refresh layers whose kind has a form: its matrices in the compute dtype, the first times s, and the part of them."""
    trained = [layer.trained(layer.active()[0]) for layer in layers]
    pairs = zip(layers, trained, strict=True)
    entries = [(layer, values.weight, place) for layer, by_end in pairs for place, values in enumerate(by_end.values())]
    scalings = [layer.scaling[layer.active()[0]] if place == 0 else 1.0 for layer, _, place in entries]
    cast = iter(_cast([layer for layer, *_ in entries], "", [weight.detach() for _, weight, _ in entries], scalings))
    for layer, by_end in zip(layers, trained, strict=True):
        (name, *_), weights = layer.active(), {end: values.weight for end, values in by_end.items()}
        part = layer.kinds[name].form.part
        layer.current.part = part(layer.get_base_layer(), weights, {end: next(cast) for end in by_end}, layer.scaling[name])


def _cast(layers: Sequence[AdaptedLayer], name: str, tensors: list[Tensor], scalings: list[float]) -> list[Tensor]:
    """s * tensor, computed in fp32, in the layer's compute dtype; a tensor that is that already is returned itself.

    New tensors are kept in the layers' buffers of that name ("": nowhere). They are new memory each time: a graph may hold
    the old ones.
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
    for place in {*scaled, *copied} if name else ():
        layers[place]._buffers[name] = tensors[place]
    return tensors


class SharedInput:
    """Adapted Linears that are called with one and the same tensor, as a block's q, k and v are.

    The first layer called computes the outputs of all; the others, called with the very same unchanged tensor, take theirs.
    Called with another tensor, a layer computes with that: a wrong guess about sharing costs time, not correctness. Compiled
    code, which knows no tensor version, must not change x between the calls.
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
        """Drop the values derived from the adapters' weights and from x."""
        self.key = self.x = self.a_all = None
        self.outputs = {}

    def join(self) -> None:
        """Build `a_all` once all layers are fresh."""
        parts = [layer.current.part for layer in self.layers]
        if all(part is not None for part in parts):
            self.a_all = joined_a([part.ready.a for part in parts])

    def applies(self, x: torch.Tensor) -> bool:
        """Whether all would compute alike on x: none is merged, disabled or drops anything, and a change of x would show."""
        for layer in self.layers:
            has_rows = layer.current.rows is not None
            if layer.merged_adapters or layer._disable_adapters or has_rows or layer.dropout is not None:
                return False
        return torch.compiler.is_compiling() or not x.is_inference()

    def output(self, layer: AdaptedLayer, x: torch.Tensor) -> torch.Tensor:
        """The output of `layer` for x. The first layer called computes the outputs of all."""
        key = None if torch.compiler.is_compiling() else (x._version, torch.is_grad_enabled())
        if x is not self.x or key != self.key or layer not in self.outputs:
            outputs = adapted(x, [member.part() for member in self.layers], a_all=self.a_all)
            self.x, self.key, self.outputs = x, key, dict(zip(self.layers, outputs, strict=True))
        y = self.outputs.pop(layer)
        if not self.outputs:
            self.key = self.x = None
        return y
