"""The keys of [optimizer] and [schedule] together: what is left to the library, and what is refused."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
    """What some optimizers do not go with.

    concerns: which, by their entries. what: of such an entry, for the table of docs/optimizers.md.
    refusal: what is said of a config of such an optimizer; "" where nothing is in its way.
    """

    concerns: Callable[[OptimizerKind], bool]
    what: Callable[[OptimizerKind], str]
    refusal: Callable[[Config, OptimizerKind], str]


def check(config: Config) -> None:
    """Raises UserError for what the optimizer does not take, and for what cannot work together."""
    table, entry = config.optimizer, optimizer_named(config.optimizer.name)
    for exclusion in EXCLUSIONS:
        if exclusion.concerns(entry) and (refusal := exclusion.refusal(config, entry)):
            raise UserError(refusal)
    options.check(table.name, betas=table.betas, eps=table.eps, options=table.options)


def does_not_go_with(name: str) -> list[str]:
    """What `check` refuses beside an optimizer, in Markdown."""
    entry = optimizer_named(name)
    return [exclusion.what(entry) for exclusion in EXCLUSIONS if exclusion.concerns(entry)]


def _finds(entry: OptimizerKind) -> bool:
    return entry.finds is not None


def _modes(entry: OptimizerKind) -> bool:
    return entry.modes


def _unlike_a_factor(config: Config, entry: OptimizerKind) -> str:
    table, (low, high) = config.optimizer, entry.finds.lr  # type: ignore[union-attr]
    if low <= table.lr <= high:
        return ""
    return (
        f"optimizer.lr = {table.lr:g}: {table.name} finds the rate itself, and this is a factor of it; set "
        "optimizer.lr = 1.0 (its own default), or a value near it"
    )


def _decays_nothing(config: Config, entry: OptimizerKind) -> str:
    table = config.optimizer
    if not table.weight_decay or table.options.get("weight_decouple", True):
        return ""
    return (
        f"optimizer.options.weight_decouple = false with optimizer.name = {table.name!r}: its library adds the decay to a "
        "gradient that it has used already, so nothing decays; leave it out, or set optimizer.weight_decay = 0"
    )


def _differing_rates(config: Config, entry: OptimizerKind) -> str:
    differing = ", ".join(_other_rates(config))
    one = f"{config.optimizer.name} takes one rate, which it finds for all parameters together"
    return f"{one}; leave out {differing}" if differing else ""


def _stopping(config: Config, entry: OptimizerKind) -> str:
    rules = ", ".join(f"adapter.rules[{i}].stop_step" for i, r in enumerate(config.adapter.rules) if r.stop_step is not None)
    one = f"{config.optimizer.name} estimates one rate over all parameters to the end"
    return f"{one}; leave out {rules}" if rules else ""


def _falling(config: Config, entry: OptimizerKind) -> str:
    name, allowed = config.schedule.name, entry.schedules or ()
    if name in allowed:
        return ""
    return (
        f"schedule.name = {name!r} with optimizer.name = {config.optimizer.name!r}: its average takes the place of a falling "
        "rate; under both the weights would stand still too early; set schedule.name = "
        f"{' or '.join(map(repr, allowed))} (a warm-up is fine)"
    )


def _averaged(config: Config, entry: OptimizerKind) -> str:
    if config.ema.kind == "none":
        return ""
    return (
        f"ema.kind = {config.ema.kind!r} cannot be combined with optimizer.name = {config.optimizer.name!r}: its weights for "
        "use are an average already, and those it trains with are not meant for use; set ema.kind = 'none', or choose "
        "another optimizer"
    )


def _limited(config: Config, entry: OptimizerKind) -> str:
    if config.adapter.max_norm is None:
        return ""
    return (
        f"adapter.max_norm = {config.adapter.max_norm:g} cannot be combined with optimizer.name = {config.optimizer.name!r}: "
        "it would scale the weights that train, and neither those for use nor the sequence they are averaged from; leave it "
        "out, or choose another optimizer"
    )


def _without(key: str) -> Exclusion:
    """Of a library that has no such keyword."""

    def refusal(config: Config, entry: OptimizerKind) -> str:
        value = getattr(config.optimizer, key)
        value = list(value) if isinstance(value, tuple) else value
        unread = f"optimizer.{key} = {value!r} has no effect with optimizer.name = {config.optimizer.name!r}; leave it out"
        return "" if value is None else unread

    return Exclusion(lambda entry: getattr(entry, key) is None, lambda entry: f"`optimizer.{key}`", refusal)


EXCLUSIONS = (
    Exclusion(
        _finds,
        lambda entry: f"`lr` outside {entry.finds.lr[0]:g} to {entry.finds.lr[1]:g}",
        _unlike_a_factor,  # type: ignore
    ),
    Exclusion(
        _finds,
        lambda entry: "`lora_plus`, `text_encoder_lr`, `magnitude_lr` or a rule's `lr` that differ: it takes one rate",
        _differing_rates,
    ),
    Exclusion(_finds, lambda entry: "a rule's `stop_step`", _stopping),
    Exclusion(_finds, lambda entry: "`weight_decouple = false` with a decay: it has no effect", _decays_nothing),
    Exclusion(
        lambda entry: entry.schedules is not None,
        lambda entry: f"schedules other than {' and '.join(entry.schedules or ())}",
        _falling,
    ),
    Exclusion(_modes, lambda entry: "EMA: it keeps an average itself", _averaged),
    Exclusion(_modes, lambda entry: "`adapter.max_norm`: it would scale one of two sequences", _limited),
    _without("betas"),
    _without("eps"),
)


def _other_rates(config: Config) -> Iterator[str]:
    table = config.optimizer
    if table.lora_plus != 1:
        yield f"optimizer.lora_plus = {table.lora_plus:g}"
    for key in ("text_encoder_lr", "magnitude_lr"):
        rate = getattr(table, key)
        if rate is not None and rate != table.lr:
            yield f"optimizer.{key} = {rate:g}"
    for index, rule in enumerate(config.adapter.rules):
        if rule.lr is not None and rule.lr != table.lr:
            yield f"adapter.rules[{index}].lr = {rule.lr:g}"
