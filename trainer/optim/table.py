"""The table of optimizers. A new optimizer is an entry here, and the functions that it names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.base import patterns
from trainer.base.errors import UserError
from trainer.optim import libraries
from trainer.optim.libraries import Finds, Groups, StateLayout, imported
from trainer.optim.parameters import flatten, matrices


@dataclass(frozen=True)
class OptimizerKind:
    """One entry of the table.

    library: imports the library, and returns the optimizer's class.
    layouts: (shape, group) -> layouts that a parameter's state may have; the first update makes the first.
    make: (class, groups, keywords) -> the optimizer. groups: {"params", "lr", "weight_decay", "magnitudes"}, laid out as
    `flat` says.
    betas, eps: the library's defaults of `optimizer.betas` and `optimizer.eps`; None: it has no such keyword.
    presets: options with another default here than in the library. fixed: keywords that are no options.
    flat: each group's parameters are one flat tensor; False: they are matrices, as the optimizer needs shapes.
    shared: keys of a flat parameter's state with one value, not one for each block of ALIGNMENT elements.
    group_keys: values of a group that an update changes and a later one reads, as Prodigy's "d"; without "lr", which the
    schedule sets after every update. derived: values that it changes and no later one reads.
    paged: CUDA may page its state. betas_of_magnitudes: betas and eps belong to a part that trains magnitudes alone.
    cpu_scratch: bytes that an update allocates temporarily on a CPU, for each element of its largest parameter.
    modes: it has train() and eval(), as schedule-free optimizers, whose gradients are taken at other weights than those for
    use. Both methods change parameters, and no state.
    finds: how it finds its rate, the same for all groups, of which optimizer.lr is a factor; None: it does not.
    schedules: the ones that it supports; None: all.
    """

    library: Callable[[], type]
    layouts: Callable[[torch.Size, Mapping[str, Any]], Sequence[StateLayout]]
    make: Callable[[type, Groups, dict[str, Any]], torch.optim.Optimizer] = libraries.plain
    betas: tuple[float, ...] | None = (0.9, 0.999)
    eps: float | None = 1e-8
    presets: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    flat: bool = True
    shared: tuple[str, ...] = ("step",)
    group_keys: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
    paged: bool = False
    betas_of_magnitudes: bool = False
    cpu_scratch: int = 0
    modes: bool = False
    finds: Finds | None = None
    schedules: tuple[str, ...] | None = None


def _blockwise(name: str, states: int, **more: Any) -> OptimizerKind:
    """An optimizer of bitsandbytes with `states` moments. On a CPU an update decodes and encodes the whole state."""
    shared = ("step", *(f"qmap{i + 1}" for i in range(states)))
    library, keeps = imported("bitsandbytes.optim", name), libraries.blockwise_keeps(states)
    return OptimizerKind(library, keeps, libraries.blockwise, shared=shared, **more)


OPTIMIZERS = {
    "adamw": OptimizerKind(lambda: torch.optim.AdamW, libraries.adamw_keeps, fixed={"fused": True}),
    "adamw8bit": _blockwise("AdamW8bit", 2, cpu_scratch=20),
    "paged_adamw8bit": _blockwise("PagedAdamW8bit", 2, paged=True, cpu_scratch=20),
    "lion": OptimizerKind(
        imported("pytorch_optimizer", "Lion"), libraries.keeps("exp_avg"), libraries.counting, betas=(0.9, 0.99), eps=None,
        group_keys=("step",), cpu_scratch=4,
    ),
    "lion8bit": _blockwise("Lion8bit", 1, betas=(0.9, 0.99), eps=None, cpu_scratch=20),
    # With its scale_parameter a matrix moves in proportion to its size: B, which starts at zero, would hardly move.
    "adafactor": OptimizerKind(
        imported("transformers.optimization", "Adafactor"), libraries.adafactor_keeps, betas=None, eps=None,
        flat=False, presets={"scale_parameter": False}, fixed={"relative_step": False, "warmup_init": False}, cpu_scratch=8,
    ),
    # The presets are its author's advice for diffusion models (github.com/konstmish/prodigy).
    "prodigy": OptimizerKind(
        imported("pytorch_optimizer", "Prodigy"), libraries.keeps("s", "p0", "exp_avg", "exp_avg_sq"), libraries.prodigy,
        presets={"safeguard_warmup": True, "bias_correction": True}, group_keys=("step", "d", "d_max", "d_numerator"),
        derived=("d_de_nom", "d_hat"), finds=Finds(), cpu_scratch=4,
    ),
    "schedulefree_adamw": OptimizerKind(
        imported("schedulefree", "AdamWScheduleFree"), libraries.keeps("z", "exp_avg_sq"),
        group_keys=("k", "weight_sum", "lr_max"), derived=("scheduled_lr",), modes=True, schedules=("constant",),
        cpu_scratch=4,
    ),
    "came": OptimizerKind(
        imported("pytorch_optimizer", "CAME"), libraries.came_keeps, libraries.counting, betas=(0.9, 0.999, 0.9999),
        eps=None, flat=False, group_keys=("step",), cpu_scratch=8,
    ),
    # With match_rms_adamw an update of a matrix is as large as AdamW's: one optimizer.lr for both parts (arXiv 2502.16982).
    "muon": OptimizerKind(
        lambda: torch.optim.Muon, libraries.muon_keeps, libraries.muon, flat=False,
        presets={"adjust_lr_fn": "match_rms_adamw"}, betas_of_magnitudes=True, cpu_scratch=8,
    ),
}  # fmt: skip


def optimizer_named(name: str) -> OptimizerKind:
    """The table's entry. Raises UserError, with the name that was probably meant, for an unknown one."""
    if name not in OPTIMIZERS:
        raise UserError(f"optimizer.name = {name!r} is not known; {patterns.suggestion(name, OPTIMIZERS)}")
    return OPTIMIZERS[name]


def in_8_bits(name: str) -> str | None:
    """The name of the optimizer with 8-bit state in place of 32; None if there is none."""
    smaller = f"{name}8bit"
    return smaller if smaller in OPTIMIZERS else None


def levers(name: str) -> str:
    """The keys that make an optimizer's updates larger or smaller."""
    finds = optimizer_named(name).finds
    return f"optimizer.options.{finds.start} or {finds.factor}" if finds else "optimizer.lr"


def build_optimizer(
    name: str,
    groups: Groups,
    *,
    betas: Sequence[float] | None = None,
    eps: float | None = None,
    options: Mapping[str, Any] = {},
) -> torch.optim.Optimizer:
    """The optimizer `name`. groups: as for `OptimizerKind.make`, but not laid out. betas, eps: None: the library's. options:
    override the presets. The parameters get gradients, which must be zeroed in place, never set to None."""
    entry = optimizer_named(name)
    keys = {**entry.presets, **options, **entry.fixed}
    keys |= {} if betas is None else {"betas": tuple(betas)}
    keys |= {} if eps is None else {"eps": eps}
    laid_out = []
    for group in groups:
        params, magnitudes = group["params"], group["magnitudes"]
        laid_out.append({**group, "params": flatten(params) if entry.flat else matrices(params, magnitudes=magnitudes)})
    optimizer = entry.make(entry.library(), laid_out, keys)
    if entry.modes:
        optimizer.train()  # type: ignore[attr-defined]
    return optimizer
