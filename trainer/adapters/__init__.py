"""Adapters on a component: match targets, inject through PEFT, initialise, freeze, and hand out the trainable weights."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from trainer import draws, patterns
from trainer.errors import UserError

ADAPTER_NAME = "default"


@dataclass(frozen=True)
class Rule:
    """Overrides for the layers of `component` whose name matches `match`; None leaves the default."""

    component: str
    match: str
    rank: int | None = None
    alpha: float | None = None
    lr: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True)
class Target:
    """One layer to adapt, with everything that was resolved for it. lr and weight_decay None mean the optimizer's."""

    component: str
    name: str
    rank: int
    alpha: float
    lr: float | None = None
    weight_decay: float | None = None

    def scaling(self, rslora: bool) -> float:
        return self.alpha / (math.sqrt(self.rank) if rslora else self.rank)


def match_targets(
    layers: Mapping[str, Sequence[str]],
    *,
    denoiser: str,
    targets: str | Sequence[str],
    presets: Mapping[str, Sequence[str]],
    rules: Sequence[Rule],
    rank: int,
    alpha: float | None,
) -> tuple[Target, ...]:
    """Which layers are adapted, with which rank and alpha.

    layers: the adaptable (Linear and Conv2d) layer names of every component, in module order.
    targets: a preset's name or fnmatch patterns, on the denoiser's layer names. A rule that names another component adds
    its layers; on the denoiser, a rule changes what the targets chose and adds what they did not. Later rules win.
    alpha None means alpha = rank, per layer. Raises UserError where a preset is unknown or a pattern matches nothing.
    """
    if isinstance(targets, str):
        if targets not in presets:
            raise UserError(
                f"adapter.targets = {targets!r} is not a preset; use one of {', '.join(map(repr, presets))}, "
                "or a list of patterns"
            )
        wanted: Sequence[str] = presets[targets]
    else:
        wanted = targets
    chosen: dict[tuple[str, str], Target] = {}
    explicit: dict[tuple[str, str], float | None] = {}
    for pattern in wanted:
        names = [name for name in layers[denoiser] if fnmatchcase(name, pattern)]
        # A preset is written for the family: single patterns may have no layer in a small variant of the model.
        if not names and not isinstance(targets, str):
            raise _no_match("adapter.targets", pattern, denoiser, layers[denoiser])
        for name in names:
            chosen[denoiser, name] = Target(denoiser, name, rank, rank if alpha is None else alpha)
    for index, rule in enumerate(rules):
        if rule.component not in layers:
            raise UserError(
                f"adapter.rules[{index}].component = {rule.component!r} cannot be adapted; "
                f"use one of {', '.join(map(repr, layers))}"
            )
        names = [name for name in layers[rule.component] if fnmatchcase(name, rule.match)]
        if not names:
            raise _no_match(f"adapter.rules[{index}].match", rule.match, rule.component, layers[rule.component])
        for name in names:
            before = chosen.get((rule.component, name))
            new_rank = rule.rank or (before.rank if before else rank)
            # Where neither a rule nor the adapter names an alpha, it follows the rank.
            explicit[rule.component, name] = rule.alpha or explicit.get((rule.component, name), alpha)
            new_alpha = explicit[rule.component, name] or new_rank
            chosen[rule.component, name] = Target(
                rule.component,
                name,
                new_rank,
                new_alpha,
                rule.lr if rule.lr is not None else before.lr if before else None,
                rule.weight_decay if rule.weight_decay is not None else before.weight_decay if before else None,
            )
    order = {(component, name): i for component in layers for i, name in enumerate(layers[component])}
    if not chosen:
        raise UserError(f"adapter.targets = {targets!r} matches no layer of {denoiser}")
    return tuple(sorted(chosen.values(), key=lambda t: (list(layers).index(t.component), order[t.component, t.name])))


def _no_match(key: str, pattern: str, component: str, names: Sequence[str]) -> UserError:
    return UserError(
        f"{key}: the pattern {pattern!r} matches no layer of {component} (patterns are fnmatch on the whole dotted name); "
        + patterns.advice(pattern, names)
    )


def inject(
    components: Mapping[str, nn.Module],
    targets: Sequence[Target],
    *,
    linear_class: type[nn.Module],
    conv_class: type[nn.Module],
    dora: bool,
    rslora: bool,
    dropout: float,
    seed: int,
    advance: Callable[[int], object] = lambda count: None,
) -> Adapter:
    """Put one adapter on every target, in place; everything else is frozen.

    linear_class, conv_class: the frozen base layers (types.BaseLayer) that carry them.
    Raises UserError for a grouped convolution, whose rows see different inputs.
    A is drawn from U(-1/sqrt(K), 1/sqrt(K)) (kaiming_uniform with a = sqrt(5), PEFT's choice) by the layer's name, so that
    it does not depend on which other layers are adapted. B is zero, m is the norm of the dequantised weight.
    advance: gets every number of layers that have theirs; may raise.
    """
    from peft import LoraConfig, inject_adapter_in_model

    from trainer.adapters.layers import AdaptedConv2d, AdaptedLayer, AdaptedLinear

    for module in components.values():
        module.requires_grad_(False)
    for target in targets:
        groups = getattr(components[target.component].get_submodule(target.name), "groups", 1)
        if groups != 1:
            raise UserError(
                f"{target.component}.{target.name} is a grouped convolution (groups = {groups}), which cannot carry an "
                "adapter; leave it out of adapter.targets and adapter.rules"
            )
    layers: dict[str, AdaptedLayer] = {}
    for component in dict.fromkeys(target.component for target in targets):
        module = components[component]
        mine = {target.name: target for target in targets if target.component == component}
        by_layer = {id(module.get_submodule(name)): target for name, target in mine.items()}

        config = LoraConfig(
            r=1,
            # An exact match of whole names: a list would match suffixes.
            target_modules="|".join(re.escape(name) for name in mine),
            use_dora=dora,
            use_rslora=rslora,
            lora_dropout=dropout,
        )
        config._register_custom_module(
            {
                linear_class: _factory(AdaptedLinear, by_layer, advance),
                conv_class: _factory(AdaptedConv2d, by_layer, advance),
            }
        )
        inject_adapter_in_model(config, module, ADAPTER_NAME)
        for name, value in lora_config(list(mine.values()), dora=dora, rslora=rslora).items():
            setattr(config, name, value)
        for name in mine:
            layer = module.get_submodule(name)
            assert isinstance(layer, AdaptedLayer), name
            layers[f"{component}.{name}"] = layer
    for name, layer in layers.items():
        a = layer.lora_A[ADAPTER_NAME].weight
        bound = 1 / math.sqrt(a.flatten(1).shape[1])
        generator = draws.generator(seed, "init", name)
        with torch.no_grad():
            a.copy_(torch.empty(a.shape).uniform_(-bound, bound, generator=generator))
        layer.mark_stale()
    return Adapter(layers, {f"{t.component}.{t.name}": t for t in targets}, dora=dora, rslora=rslora)


def _factory(
    adapted_class: type, by_layer: Mapping[int, Target], advance: Callable[[int], object]
) -> Callable[..., nn.Module]:
    """What PEFT calls for each matched layer. Rank and alpha come from our own table: PEFT would try every pattern as a
    regular expression on every layer."""

    def build(base_layer, adapter_name, *, config, **rank_and_alpha):
        target = by_layer[id(base_layer)]
        layer = adapted_class(base_layer, adapter_name, config, target.rank, target.alpha)
        advance(1)
        return layer

    return build


def lora_config(targets: Sequence[Target], *, dora: bool, rslora: bool) -> dict[str, object]:
    """The LoraConfig fields of one component's targets: the commonest rank and alpha, the others as patterns."""
    rank = Counter(t.rank for t in targets).most_common(1)[0][0]
    alpha = Counter(t.alpha for t in targets).most_common(1)[0][0]
    return {
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {f"^{t.name}": t.rank for t in targets if t.rank != rank},
        "alpha_pattern": {f"^{t.name}": t.alpha for t in targets if t.alpha != alpha},
        "target_modules": sorted(t.name for t in targets),
        "use_dora": dora,
        "use_rslora": rslora,
    }


class Adapter:
    """The trainable part of a run: every adapted layer by its full name ("unet.down_blocks...to_q")."""

    def __init__(self, layers: Mapping, targets: Mapping[str, Target], *, dora: bool, rslora: bool) -> None:
        self.layers, self.targets, self.dora, self.rslora = dict(layers), dict(targets), dora, rslora

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """fp32 parameters as LAYER.lora_A.weight, LAYER.lora_B.weight, LAYER.lora_magnitude_vector, sorted by layer."""
        named: dict[str, nn.Parameter] = {}
        for name, layer in self.layers.items():
            named[f"{name}.lora_A.weight"] = layer.lora_A[ADAPTER_NAME].weight
            named[f"{name}.lora_B.weight"] = layer.lora_B[ADAPTER_NAME].weight
            if self.dora:
                named[f"{name}.lora_magnitude_vector"] = layer.lora_magnitude_vector[ADAPTER_NAME].weight
        return named

    def parameter_groups(self, *, lr: float, weight_decay: float) -> list[dict[str, object]]:
        """Optimizer groups, {"lr", "weight_decay", "params", "magnitudes"}: magnitudes apart, and never decayed."""
        groups: dict[tuple[float, float, bool], dict[str, object]] = {}
        for name, parameter in self.named_parameters().items():
            target = self.targets[name.partition(".lora_")[0]]
            magnitude = is_magnitude(name)
            decay = 0.0 if magnitude else weight_decay if target.weight_decay is None else target.weight_decay
            rate = lr if target.lr is None else target.lr
            group = groups.setdefault(
                (rate, decay, magnitude), {"lr": rate, "weight_decay": decay, "params": [], "magnitudes": magnitude}
            )
            group["params"].append(parameter)
        return list(groups.values())

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.named_parameters().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors in. Raises UserError where names or shapes differ."""
        mine = self.named_parameters()
        odd = sorted(state.keys() ^ mine.keys())
        if odd:
            where = "is missing from the saved adapter" if odd[0] in mine else "is not part of this run's adapter"
            raise UserError(f"the saved adapter does not fit this run: {odd[0]} {where}")
        for name, parameter in mine.items():
            saved = state[name]
            if (parameter.shape, parameter.dtype) != (saved.shape, saved.dtype):
                raise UserError(
                    f"the saved adapter does not fit this run: {name} is {saved.dtype} {tuple(saved.shape)}, "
                    f"here {parameter.dtype} {tuple(parameter.shape)}"
                )
            parameter.copy_(state[name])
        self.mark_stale()

    def mark_stale(self) -> None:
        """Due after every change of the parameters: DoRA's cached norms are recomputed before their next use."""
        for layer in self.layers.values():
            layer.mark_stale()

    def refresh_norms(self, advance: Callable[[int], object] = lambda count: None) -> None:
        """Recompute DoRA's stale norms now, where the base weights are resident; the next forward finds them fresh.

        advance: gets every number of layers that are fresh; may raise.
        """
        for layer in self.layers.values():
            layer.refresh_norm()
            advance(1)

    def share_inputs(self, component: str, groups: Sequence[Sequence[str]]) -> None:
        """Let Linears of `component` that are called with one tensor read it once.

        groups: endings of layer names; adapted layers of one group that differ in nothing else share. Adapters with dropout
        do not: each layer draws its own mask.
        """
        from trainer.adapters.layers import AdaptedLinear, SharedInput

        for endings in groups:
            sharing: dict[str, list] = {}
            for name, layer in self.layers.items():
                ending = next((e for e in endings if name.startswith(f"{component}.") and name.endswith(f".{e}")), None)
                if ending is not None and isinstance(layer, AdaptedLinear):
                    sharing.setdefault(name.removesuffix(ending), []).append(layer)
            for layers in sharing.values():
                if len(layers) > 1 and len({layer.get_base_layer().compute_dtype for layer in layers}) == 1:
                    SharedInput(layers)

    def refresh_before(self, owners: Mapping[str, nn.Module]) -> None:
        """Have the forward of each owner first refresh the stale norms of its adapted layers.

        owners: modules by full name ("unet", "unet.mid_block"); a layer belongs to the innermost one that contains it. There
        the base weights are resident, and the hook runs outside of what gradient checkpointing repeats.
        """
        owned: dict[str, list] = {}
        for name, layer in self.layers.items():
            inside = [owner for owner in owners if name.startswith(f"{owner}.")]
            owned.setdefault(max(inside, key=len), []).append(layer)
        for owner, layers in owned.items():

            def refresh(module, args, layers=layers) -> None:
                for layer in layers:
                    layer.refresh_norm()

            owners[owner].register_forward_pre_hook(refresh)

    @contextmanager
    def at_strength(self, strength: float) -> Iterator[None]:
        """Inside, every adapted layer gives base + strength * (adapted - base); 0 is the frozen base."""
        for layer in self.layers.values():
            layer.strength = strength
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer.strength = 1.0

    def dropout(self, seed: int) -> Callable[[int, int], AbstractContextManager[None]]:
        """(step, micro-batch) -> a context in which adapter dropout is on, seeded by (seed, step, micro-batch)."""
        dropping = [layer for layer in self.layers.values() if layer.drops]

        @contextmanager
        def within(step: int, micro_batch: int) -> Iterator[None]:
            if not dropping:
                yield
                return
            state = draws.generator(seed, "dropout", step, micro_batch).initial_seed()
            torch.manual_seed(state)
            for layer in dropping:
                layer.train()
            try:
                yield
            finally:
                for layer in dropping:
                    layer.eval()

        return within


def is_magnitude(parameter_name: str) -> bool:
    return parameter_name.endswith(".lora_magnitude_vector")
