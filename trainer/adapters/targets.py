"""The layers to adapt, with rank, alpha, learning rate and weight decay."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from trainer.adapters.kinds import MAGNITUDE, AdapterKind, B
from trainer.base import patterns
from trainer.base.errors import UserError
from trainer.base.types import Link


def adaptable_layers(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Weight shapes of the layers that can have an adapter, by name, in module order: Linear, and Conv2d of one group."""
    return {
        name: tuple(layer.weight.shape)
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1)
    }


@dataclass(frozen=True)
class Rule:
    """Overrides for the layers of `component` whose name matches `match`; None leaves the default."""

    component: str
    match: str
    rank: int | None = None
    alpha: float | None = None
    lr: float | None = None
    weight_decay: float | None = None
    stop_step: int | None = None


@dataclass(frozen=True)
class Rates:
    """The optimizer's rates and weight decay; rules override them.

    lora_plus: B's rate over A's (Hayou et al., LoRA+, 2024). Another rate of None means lr. text_encoders: components.
    """

    lr: float
    weight_decay: float
    lora_plus: float = 1.0
    text_encoder_lr: float | None = None
    magnitude_lr: float | None = None
    text_encoders: Sequence[str] = ()

    @classmethod
    def read(cls, optimizer: Mapping[str, Any], text_encoders: Sequence[str]) -> "Rates":
        """The rates in a config. optimizer: that table; an older checkpoint's may lack keys that were added later."""
        keys = ("lr", "weight_decay", "lora_plus", "text_encoder_lr", "magnitude_lr")
        return cls(**{key: optimizer[key] for key in keys if key in optimizer}, text_encoders=text_encoders)

    def of(self, target: "Target", parameter: str) -> tuple[float, float, bool]:
        """(rate, weight decay, is a magnitude) of a parameter of that layer. A magnitude is never decayed."""
        magnitude = parameter.endswith(f".{MAGNITUDE}")
        special = self.text_encoder_lr if target.component in self.text_encoders else None
        special = self.magnitude_lr if magnitude and self.magnitude_lr is not None else special
        rate = next(rate for rate in (target.lr, special, self.lr) if rate is not None)
        if parameter.endswith(f".{B}"):
            rate *= self.lora_plus
        decay = self.weight_decay if target.weight_decay is None else target.weight_decay
        return rate, 0.0 if magnitude else decay, magnitude


@dataclass(frozen=True)
class Target:
    """One layer to adapt, with its resolved settings. lr and weight_decay None mean the optimizer's.

    stop_step: the last step that trains it; None: all do.
    """

    component: str
    name: str
    rank: int
    alpha: float
    lr: float | None = None
    weight_decay: float | None = None
    stop_step: int | None = None

    def scaling(self, rslora: bool) -> float:
        """The factor of B A: alpha / rank, or alpha / sqrt(rank) for rsLoRA."""
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
    """The layers to adapt, with rank and alpha.

    layers: the adaptable (Linear and Conv2d) layer names of every component, in module order.
    targets: a preset's name or fnmatch patterns, on the denoiser's layer names. A rule that names another component adds
    its layers; on the denoiser, a rule changes what the targets chose and adds what they did not. Later rules win.
    alpha None means alpha = rank, per layer. Raises UserError if a preset is unknown or a pattern matches nothing.
    """
    if isinstance(targets, str) and targets not in presets:
        options = ", ".join(map(repr, presets))
        raise UserError(f"adapter.targets = {targets!r} is not a preset; use one of {options}, or a list of patterns")
    sizes: dict[tuple[str, str], tuple[int, float | None]] = {}  # (component, layer) -> rank, and alpha or None: the rank
    for pattern in presets[targets] if isinstance(targets, str) else targets:
        names = [name for name in layers[denoiser] if fnmatchcase(name, pattern)]
        # A preset is written for the family: single patterns may have no layer in a small variant of the model.
        if not names and not isinstance(targets, str):
            raise _no_match("adapter.targets", pattern, denoiser, layers[denoiser])
        sizes |= {(denoiser, name): (rank, alpha) for name in names}
    for index, rule in enumerate(rules):
        if rule.component not in layers:
            raise UserError(
                f"adapter.rules[{index}].component = {rule.component!r} cannot be adapted; "
                f"use one of {', '.join(map(repr, layers))}"
            )
        names = [name for name in layers[rule.component] if fnmatchcase(name, rule.match)]
        if not names:
            raise _no_match(f"adapter.rules[{index}].match", rule.match, rule.component, layers[rule.component])
        for key in ((rule.component, name) for name in names):
            previous_rank, previous_alpha = sizes.get(key, (rank, alpha))
            sizes[key] = rule.rank or previous_rank, rule.alpha or previous_alpha
    if not sizes:
        raise UserError(f"adapter.targets = {targets!r} matches no layer of {denoiser}")
    in_order = ((component, name) for component, names in layers.items() for name in names)
    resolved = ((key, *sizes[key]) for key in in_order if key in sizes)
    return with_rates([Target(*key, size, strength or size) for key, size, strength in resolved], rules)


def with_rates(targets: Iterable[Target], rules: Sequence[Rule]) -> tuple[Target, ...]:
    """The targets with the lr, weight_decay and stop_step of these rules. Later rules win."""
    rated = []
    for target in targets:
        rates: dict[str, Any] = {"lr": None, "weight_decay": None, "stop_step": None}
        for rule in rules:
            if rule.component == target.component and fnmatchcase(target.name, rule.match):
                rates |= {field: value for field in rates if (value := getattr(rule, field)) is not None}
        rated.append(replace(target, **rates))
    return tuple(rated)


def grouped(
    names: Iterable[str], targets: Mapping[str, Target], rates: Rates
) -> dict[tuple[float, float, bool, int | None], list[str]]:
    """Parameter names grouped by (rate, decay, is a magnitude, stop_step). targets: by full name."""
    groups: dict[tuple[float, float, bool, int | None], list[str]] = {}
    for name in names:
        parts = name.split(".")
        target = next(filter(None, (targets.get(".".join(parts[:end])) for end in range(len(parts), 0, -1))))
        groups.setdefault((*rates.of(target, name), target.stop_step), []).append(name)
    # Groups that stop first come last: an optimizer may read values of its first group (Prodigy its rate) to the end.
    return dict(sorted(groups.items(), key=lambda group: -(group[0][3] or math.inf)))


def _no_match(key: str, pattern: str, component: str, names: Sequence[str]) -> UserError:
    return UserError(
        f"{key}: the pattern {pattern!r} matches no layer of {component} (patterns are fnmatch on the whole dotted name); "
        + patterns.advice(pattern, names)
    )


def lora_config(targets: Sequence[Target], kind: AdapterKind, *, rslora: bool) -> dict[str, object]:
    """The LoraConfig fields of one component's targets: the commonest rank and alpha, the others as patterns."""
    rank = Counter(t.rank for t in targets).most_common(1)[0][0]
    alpha = Counter(t.alpha for t in targets).most_common(1)[0][0]
    return {
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {f"^{t.name}": t.rank for t in targets if t.rank != rank},
        "alpha_pattern": {f"^{t.name}": t.alpha for t in targets if t.alpha != alpha},
        "target_modules": sorted(t.name for t in targets),
        "use_dora": kind.magnitudes,
        "use_rslora": rslora,
    }


def fused_modules(links: Sequence[Link]) -> list[Link]:
    """The modules of the original layout that hold several layers (Flux's qkv, linear1), one layer's rows after another's.
    links: a family's links of parameters."""
    return [
        Link(link.original.removesuffix(".weight"), tuple(part.removesuffix(".weight") for part in link.parts), link.op)
        for link in links
        if link.original.endswith(".weight")
    ]


def fused_with(adapted: Mapping[str, object], fused: Mapping[str, Sequence[Link]]) -> list[str]:
    """Full names of the layers without an adapter that one module holds together with adapted ones. adapted: by full name.
    fused: modules by component."""
    names = []
    for component, modules in fused.items():
        for module in modules:
            parts = [f"{component}.{part}" for part in module.parts]
            absent = [name for name in parts if name not in adapted]
            names += absent if len(absent) < len(parts) else []
    return names
