"""Resolves and checks [optimizer] and [schedule]: the library's defaults, and combinations that are refused."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from trainer.base.errors import UserError
from trainer.config import Config, OptimizerTable
from trainer.optim import options
from trainer.optim.table import OptimizerKind, optimizer_named


def resolve(table: OptimizerTable) -> OptimizerTable:
    """The table with the library's betas and eps and the presets written out."""
    entry = optimizer_named(table.name)
    return table.model_copy(
        update={
            "betas": table.betas or entry.betas,
            "eps": table.eps or entry.eps,
            "options": {**entry.presets, **table.options},
        }
    )


@dataclass(frozen=True)
class Exclusion:
    """A setting that some optimizers exclude. concerns: whether an optimizer does. what: in words, for docs/optimizers.md.
    breaks: the setting as a config has it, or a false value. refusal: the message, formatted with config, entry, breaks."""

    concerns: Callable[[OptimizerKind], object]
    what: Callable[[OptimizerKind], str]
    breaks: Callable[[Config, OptimizerKind], object]
    refusal: str


def check(config: Config) -> None:
    """Raises UserError for a key that the optimizer does not take, and for settings that exclude each other."""
    table, entry = config.optimizer, optimizer_named(config.optimizer.name)
    for exclusion in EXCLUSIONS:
        if exclusion.concerns(entry) and (breaks := exclusion.breaks(config, entry)):
            raise UserError(exclusion.refusal.format(config=config, entry=entry, breaks=breaks))
    options.check(table.name, betas=table.betas, eps=table.eps, options=table.options)


def does_not_go_with(name: str) -> list[str]:
    """The settings that `check` refuses with an optimizer, in Markdown."""
    entry = optimizer_named(name)
    return [exclusion.what(entry) for exclusion in EXCLUSIONS if exclusion.concerns(entry)]


def _unsupported(key: str) -> Exclusion:
    """The exclusion of a key for libraries without such a keyword."""

    def text(config: Config, entry: OptimizerKind) -> object:
        value = getattr(config.optimizer, key)
        return None if value is None else repr(list(value) if isinstance(value, tuple) else value)

    return Exclusion(
        lambda entry: getattr(entry, key) is None,
        lambda entry: f"`optimizer.{key}`",
        text,
        f"optimizer.{key} = {{breaks}} has no effect with optimizer.name = {{config.optimizer.name!r}}; leave it out",
    )


_finds, _modes = attrgetter("finds"), attrgetter("modes")
EXCLUSIONS = (
    Exclusion(
        _finds,
        lambda entry: f"`lr` outside {entry.finds.lr[0]:g} to {entry.finds.lr[1]:g}",  # type: ignore
        lambda config, entry: not entry.finds.lr[0] <= config.optimizer.lr <= entry.finds.lr[1],  # type: ignore
        "optimizer.lr = {config.optimizer.lr:g}: {config.optimizer.name} finds the rate itself, and this is a factor of it; "
        "set optimizer.lr = 1.0 (its own default), or a value near it",
    ),
    Exclusion(
        _finds,
        lambda entry: "`lora_plus`, `text_encoder_lr`, `magnitude_lr` or a rule's `lr` that differ: it takes one rate",
        lambda config, entry: ", ".join(_other_rates(config)),
        "{config.optimizer.name} takes one rate, which it finds for all parameters together; leave out {breaks}",
    ),
    Exclusion(
        _finds,
        lambda entry: "a rule's `stop_step`",
        lambda config, entry: ", ".join(
            f"adapter.rules[{n}].stop_step" for n, rule in enumerate(config.adapter.rules) if rule.stop_step is not None
        ),
        "{config.optimizer.name} estimates one rate over all parameters to the end; leave out {breaks}",
    ),
    Exclusion(
        _finds,
        lambda entry: "`weight_decouple = false` with a decay: it has no effect",
        lambda config, entry: config.optimizer.weight_decay and not config.optimizer.options.get("weight_decouple", True),
        "optimizer.options.weight_decouple = false with optimizer.name = {config.optimizer.name!r}: its library adds the "
        "decay to a gradient that it has used already, so nothing decays; leave it out, or set optimizer.weight_decay = 0",
    ),
    Exclusion(
        lambda entry: entry.schedules is not None,
        lambda entry: f"schedules other than {' and '.join(entry.schedules or ())}",
        lambda config, entry: (
            config.schedule.name not in (entry.schedules or ()) and " or ".join(map(repr, entry.schedules or ()))
        ),
        "schedule.name = {config.schedule.name!r} with optimizer.name = {config.optimizer.name!r}: its average takes the "
        "place of a falling rate; under both the weights would stand still too early; set schedule.name = {breaks} (a "
        "warm-up is fine)",
    ),
    Exclusion(
        _modes,
        lambda entry: "EMA: it keeps an average itself",
        lambda config, entry: config.ema.kind != "none",
        "ema.kind = {config.ema.kind!r} cannot be combined with optimizer.name = {config.optimizer.name!r}: its weights for "
        "use are an average already, and those it trains with are not meant for use; set ema.kind = 'none', or choose "
        "another optimizer",
    ),
    Exclusion(
        _modes,
        lambda entry: "`adapter.max_norm`: it would scale one of two sequences",
        lambda config, entry: config.adapter.max_norm is not None,
        "adapter.max_norm = {config.adapter.max_norm:g} cannot be combined with optimizer.name = {config.optimizer.name!r}: "
        "it would scale the weights that train, and neither those for use nor the sequence they are averaged from; leave it "
        "out, or choose another optimizer",
    ),
    _unsupported("betas"),
    _unsupported("eps"),
)


def _other_rates(config: Config) -> Iterator[str]:
    table = config.optimizer
    if table.lora_plus != 1:
        yield f"optimizer.lora_plus = {table.lora_plus:g}"
    rates = {f"optimizer.{key}": getattr(table, key) for key in ("text_encoder_lr", "magnitude_lr")}
    rates |= {f"adapter.rules[{index}].lr": rule.lr for index, rule in enumerate(config.adapter.rules)}
    yield from (f"{key} = {rate:g}" for key, rate in rates.items() if rate is not None and rate != table.lr)
