"""The keys of [optimizer] and [schedule] together: what is left to the library, what is refused, what is warned of."""

from collections.abc import Iterator

from trainer.config import Config, OptimizerTable
from trainer.errors import UserError
from trainer.optim import options
from trainer.optim.table import optimizer_named


def resolve(table: OptimizerTable) -> OptimizerTable:
    """With the library's betas and eps and the table's presets written out."""
    entry = optimizer_named(table.name)
    return table.model_copy(
        update={
            "betas": table.betas or entry.betas,
            "eps": table.eps or entry.eps,
            "options": {**entry.presets, **table.options},
        }
    )


def check(config: Config) -> None:
    """Raises UserError for what the optimizer does not take, and for what cannot work together."""
    chosen, entry = config.optimizer, optimizer_named(config.optimizer.name)
    options.check(chosen.name, betas=chosen.betas, eps=chosen.eps, options=chosen.options)
    if entry.rates is not None:
        low, high = entry.rates
        if not low <= chosen.lr <= high:
            raise UserError(
                f"optimizer.lr = {chosen.lr:g}: {chosen.name} finds the rate itself, and this is a factor of it; set "
                "optimizer.lr = 1.0 (its own default), or a value near it"
            )
        differing = list(_other_rates(config))
        if differing:
            raise UserError(
                f"{chosen.name} takes one rate, which it finds for all parameters together; leave out {', '.join(differing)}"
            )
        stopping = [f"adapter.rules[{i}].stop_step" for i, r in enumerate(config.adapter.rules) if r.stop_step is not None]
        if stopping:
            raise UserError(
                f"{chosen.name} estimates one rate over all parameters to the end; leave out {', '.join(stopping)}"
            )
    name = config.schedule.name
    if entry.schedules is not None and name not in entry.schedules:
        allowed = " or ".join(map(repr, entry.schedules))
        raise UserError(
            f"schedule.name = {name!r} with optimizer.name = {chosen.name!r}: its average takes the place of a falling rate; "
            f"under both the weights would stand still too early; set schedule.name = {allowed} (a warm-up is fine)"
        )


def _other_rates(config: Config) -> Iterator[str]:
    chosen = config.optimizer
    if chosen.lora_plus != 1:
        yield f"optimizer.lora_plus = {chosen.lora_plus:g}"
    for key in ("text_encoder_lr", "magnitude_lr"):
        rate = getattr(chosen, key)
        if rate is not None and rate != chosen.lr:
            yield f"optimizer.{key} = {rate:g}"
    for index, rule in enumerate(config.adapter.rules):
        if rule.lr is not None and rule.lr != chosen.lr:
            yield f"adapter.rules[{index}].lr = {rule.lr:g}"


def told(config: Config) -> list[str]:
    """For the start print: rates and options beyond the usual ones, and warnings. config: as `resolve` gives."""
    chosen = config.optimizer
    rates = [f"{key} {rate:g}" for key in ("text_encoder_lr", "magnitude_lr") if (rate := getattr(chosen, key)) is not None]
    rates += [f"lora_plus {chosen.lora_plus:g} (B's rate over A's)"] if chosen.lora_plus != 1 else []
    options = [f"{key} = {value!r}" for key, value in chosen.options.items()]
    return [*(", ".join(each) for each in (rates, options) if each), *(f"warning: {line}" for line in warnings(config))]


def warnings(config: Config) -> list[str]:
    """Of what works together, and badly. config: as `resolve` gives."""
    chosen, entry = config.optimizer, optimizer_named(config.optimizer.name)
    lines = []
    if "safeguard_warmup" in entry.presets and not chosen.options.get("safeguard_warmup"):
        low = "schedule.warmup" if config.schedule.warmup else ""
        low = low or ("schedule.name = 'cosine_restarts'" if config.schedule.name == "cosine_restarts" else "")
        if low:
            lines.append(
                f"{low} with optimizer.options.safeguard_warmup = false: the estimate of {chosen.name} divides by the low "
                "rates and grows too far; set it to true"
            )
    if chosen.name.startswith("paged"):
        lines.append(f"{chosen.name} pages its state only on CUDA; on a CPU it is {chosen.name.removeprefix('paged_')}")
    return lines
