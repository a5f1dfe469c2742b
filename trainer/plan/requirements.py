"""Refuses config keys that are set and would have no effect."""

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

from trainer import config as configs
from trainer import objectives
from trainer.adapters.kinds import KINDS, kind_named
from trainer.base.errors import UserError
from trainer.config import Config, ObjectiveTable
from trainer.config.kinds import ReadWith
from trainer.data.examples import Example
from trainer.models.base import Family
from trainer.models.loading import ModelSource
from trainer.optim import OPTIMIZERS

REFERENCES = ("data.sources.*.references", "validation.samples.*.references")
CFG = "validation.samples.*.cfg"
# Key -> the models that read it.
FAMILY_KEYS = {
    "model.prediction": "models that predict either noise or v",
    "model.allow_distilled": "models that have a distilled twin",
    "model.zero_terminal_snr": "models with a noise schedule that may end at zero SNR",
    **dict.fromkeys(objectives.KEYS, "diffusion and flow matching models"),
    **dict.fromkeys(("objective.shift", "objective.mode_scale"), "flow matching models"),
    **dict.fromkeys(
        (
            "objective.weighting", "objective.min_snr_gamma", "objective.p2_gamma", "objective.p2_k",
            "objective.noise_offset", "objective.multires_noise_iterations", "objective.multires_noise_discount",
        ),
        "diffusion models with a noise schedule",
    ),
    "objective.guidance": "models with a guidance embedding",
    "data.weighted_captions": "models whose denoiser reads the tokens of CLIP encoders alone",
    "data.clip_chunks": "models whose denoiser reads the tokens of a CLIP encoder",
    "data.text_length": "models with a text encoder whose length can be chosen",
    "validation.samples.*.negative": "models that are sampled with a negative prompt",
    CFG: "models with a guidance of their own beside it",
    **dict.fromkeys(REFERENCES, "models that edit reference images"),
}  # fmt: skip

# Key -> why an adapter kind excludes it that computes A and B from other parameters.
COMPOSED = {
    "adapter.max_norm": "it scales A and B as they are trained, and this kind trains others",
    "step.compile": "this kind makes A and B in every forward, which no compiled block was tried with",
}
MAGNITUDE_KEYS = ("optimizer.magnitude_lr", "export.dora_scale")


def with_magnitudes() -> ReadWith:
    """The condition of `MAGNITUDE_KEYS`: an adapter kind with magnitudes."""
    return ReadWith("adapter.type", tuple(name for name, kind in KINDS.items() if kind.magnitudes))


def check_kind(config: Config) -> None:
    """Raises UserError for an unknown kind of adapter, and for a key that the kind excludes."""
    kind = kind_named(config.adapter.type)
    for key, reason in {**kind.refuses, **(COMPOSED if kind.composes else {})}.items():
        default, value = configs.known_keys()[key], reduce(getattr, key.split("."), config)
        if value not in (default, "auto"):  # "auto" then resolves to the default
            remedy = "leave it out" if default is None else f"set {key} = {default!r}"
            conflict = f"{key} = {value!r} cannot be combined with adapter.type = {kind.name!r}"
            raise UserError(f"{conflict}: {reason}; {remedy} or adapter.type = 'lora'")


def refuse_unread(config: Config, family: Family) -> None:
    """Raises UserError, a line for each key that is set and has no effect: with this family, or with the other keys."""
    check_kind(config)
    kind, formats = kind_named(config.adapter.type), config.export.formats
    if not family.file_formats(kind.in_files, formats):
        reason = f"diffusers' loader of {family.name} takes no {kind.word}"
        raise UserError(f"export.formats = {list(formats)} would leave no file: {reason}; add 'comfyui'")
    if kind.form and (components := [r.component for r in config.adapter.rules if r.component in family.adapters.peft]):
        raise UserError(
            f"a rule adapts {components[0]}, whose files are a folder of PEFT's, and no {kind.word} is written there; "
            "leave the rule out, or take adapter.type = 'lora'"
        )
    timesteps, allowed = config.objective.timesteps, family.images.timesteps
    if timesteps != "auto" and "objective.timesteps" in family.reads and timesteps not in allowed:
        raise UserError(f"objective.timesteps = {timesteps!r} is not for {family.name}; use {', '.join(map(repr, allowed))}")
    _refuse(config, unread_keys(config, family))


def unread_keys(config: Config, family: Family) -> dict[str, str]:
    """Key ("*": all entries of a list) -> reason and remedy, for every key, set or not, that has no effect."""
    absent = FAMILY_KEYS.keys() - set(family.reads)
    by_family = {key: f"on {family.name}; leave it out (only {FAMILY_KEYS[key]} read it)" for key in absent}
    without_cfg = f"on {family.name} without cfg; leave it out, or set cfg above 1"
    for index, sample in enumerate(config.validation.samples if CFG in family.reads else ()):
        if sample.cfg is None:
            by_family[f"validation.samples.{index}.negative"] = without_cfg
    if not any(rule.component in family.text_encoders for rule in config.adapter.rules):
        by_family["optimizer.text_encoder_lr"] = "where no rule of the adapter names a text encoder; leave it out, or add one"
    if not family.memory.blocks:
        keys = ("memory.gradient_checkpointing", "memory.offload", "memory.shard", "step.compile")
        by_family |= dict.fromkeys(keys, f"on {family.name}, which names no blocks for it; leave it out")
    return unread_beside_others(config) | _unread_objective(config.objective, family) | by_family


def unread_beside_others(config: Config) -> dict[str, str]:
    """Key -> reason and remedy, for every key that has no effect because of other keys."""
    components, unread = config.model.components, configs.unread(config)
    if "fp16" not in {config.precision.compute, *(component.compute for component in components.values())}:
        reason = "in a run that computes nothing in fp16; leave it out, or set precision.compute = 'fp16'"
        unread["precision.loss_scale"] = reason
    if (no_magnitudes := with_magnitudes().without(lambda key: config.adapter.type)) is not None:
        unread |= dict.fromkeys(MAGNITUDE_KEYS, no_magnitudes)
    if config.adapter.decompose == "none":
        keys = ("adapter.rank", "adapter.alpha", "adapter.rslora", "adapter.rules.*.rank", "adapter.rules.*.alpha")
        unread |= dict.fromkeys(keys, "with adapter.decompose = 'none', whose matrices are whole; leave it out")
    unread |= _unread_optimizer(config)
    for key in ("flip", "caption_dropout", "masks", "unmasked_weight"):
        if all(getattr(source, key) is not None for source in config.data.sources):
            unread[f"data.{key}"] = f"beside sources that all set {key} themselves; leave it out"
    if config.data.cache == "none" and config.data.cache_text is True:
        unread["data.cache_text"] = "with data.cache = 'none'; leave it out, or set data.cache = 'memory'"
    masks = [config.data.masks if source.masks is None else source.masks for source in config.data.sources]
    weights = [f"data.sources.{index}.unmasked_weight" for index, kind in enumerate(masks) if kind == "none"]
    weights += ["data.unmasked_weight"] if len(weights) == len(masks) else []
    unread |= dict.fromkeys(weights, "without masks; leave it out, or set masks = 'files' or 'alpha'")
    if not any(source.shuffle or source.tag_dropout or source.wildcards for source in config.data.sources):
        reason = "where no source has shuffle, tag_dropout or wildcards; leave it out, or set one of them in a source"
        unread["data.caption_variants"] = reason
    return unread


def _unread_optimizer(config: Config) -> dict[str, str]:
    table, name = config.optimizer, config.optimizer.name
    if name not in OPTIMIZERS or not OPTIMIZERS[name].betas_of_magnitudes or kind_named(config.adapter.type).magnitudes:
        return {}
    # A resolved config has the library's own values.
    changed = [f"optimizer.{key}" for key in ("betas", "eps") if getattr(table, key) != getattr(OPTIMIZERS[name], key)]
    setting = f"with optimizer.name = {name!r} and adapter.type = {config.adapter.type!r}"
    return dict.fromkeys(changed, f"{setting}: they are of magnitudes alone; leave it out")


def _unread_objective(objective: ObjectiveTable, family: Family) -> dict[str, str]:
    choices, unread = family.images.timesteps, {}
    timesteps = choices[0] if objective.timesteps == "auto" and choices else objective.timesteps
    reads = {name: times.reads for name, times in objectives.DISTRIBUTIONS.items()}
    for name, keys in reads.items():  # the message names the first distribution that reads a key
        reason = f"with {timesteps} timesteps; leave it out, or set objective.timesteps = {name!r}"
        unread = {f"objective.{key}": reason for key in keys} | unread
    effective = {f"objective.{key}" for key in reads.get(timesteps, ())}
    return {key: reason for key, reason in unread.items() if key not in effective}


def refuse_unread_by_model(config: Config, source: ModelSource) -> None:
    """Raises UserError for keys that only other models of the family read, according to model files and model.variant."""
    _refuse(config, unread_by_model(source))


def unread_by_model(source: ModelSource) -> dict[str, str]:
    """Key -> reason and remedy, for every key that has no effect on this model of its family."""
    unread, family, variants = {}, source.family, source.family.variants
    guidance = "objective.guidance"
    if guidance in family.reads and not source.config(family.denoiser).get("guidance_embeds"):
        reason = f"on this model; leave it out (only {FAMILY_KEYS[guidance]} read it)"
        unread |= {guidance: reason, "validation.samples.*.guidance": reason}
    if variants.editing and source.variant.name != variants.editing:
        reason = f"on this model; leave it out, or set model.variant = {variants.editing!r} if it edits reference images"
        unread |= dict.fromkeys(REFERENCES, reason)
    return unread


def preserve_as(config: Config) -> str | None:
    """The text that replaces the trigger in preserved captions; None without objective.preserve."""
    return config.objective.preserve_as if config.objective.preserve else None


def check_preserved(config: Config, *, cache_text: bool) -> None:
    """Raises UserError if objective.preserve is set and cannot work."""
    if not config.objective.preserve:
        return
    key = f"objective.preserve = {config.objective.preserve:g}"
    if paths := [source.path for source in config.data.sources if not (source.trigger or source.regularisation)]:
        raise UserError(
            f"{key}: the source {paths[0]!r} has no trigger: its captions would be both learned and preserved; set its "
            "trigger, or leave the key out"
        )
    if not cache_text:
        raise UserError(
            f"{key} needs captions that are encoded ahead by frozen text encoders; leave out rules for text encoders and "
            "data.cache_text = false"
        )


def check_edits(source: ModelSource, examples: Iterable[Example]) -> None:
    """Raises UserError if an editing model would be trained without references, and model.variant does not ask for it."""
    variants, variant = source.family.variants, source.variant
    if variants.editing == variant.name is not None and not any(example.references for example in examples):
        raise UserError(
            f"the model is {variant.name}, as {variant.reason}, which is shown a reference beside each photo, and no source "
            f"has any; set references in a source, or model.variant = {variants.names[0]!r} to train it without"
        )


def _refuse(config: Config, unread: Mapping[str, str]) -> None:
    """Raises UserError, a line for each key of `unread` that is set. unread: key, with "*" or an index -> reason, remedy."""
    defaults, tree, lines = configs.known_keys(), configs.tree(config), []
    for key, value in configs.flatten(tree).items():
        name, parent = configs.generic(key), configs.whole(key)
        if parent != key and {parent, configs.generic(parent)} & unread.keys():  # a list of values is one key
            key, name = parent, configs.generic(parent)
            value = reduce(lambda node, part: node[int(part) if isinstance(node, list) else part], key.split("."), tree)
        reason = unread.get(key, unread.get(name))
        if reason is not None and value != defaults.get(name):
            lines.append(f"{key} = {value!r} has no effect {reason}")
    if lines:
        raise UserError("\n".join(dict.fromkeys(lines)))


def family_options(config: Config, family: Family) -> dict[str, Any]:
    """Last name -> value of the family's keys, except samples' keys. adapter.under undoes a distillation, and allows it."""
    single = [key.split(".") for key in family.reads if "*" not in key]
    options = {path[-1]: reduce(getattr, path, config) for path in single}
    if "allow_distilled" in options:
        options["allow_distilled"] |= config.adapter.under is not None
    return options
