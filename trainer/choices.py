"""The config keys that not every run reads: one that is set and not read is refused, for it would be ignored."""

from collections.abc import Mapping
from functools import reduce
from typing import Any

from trainer import config as configs
from trainer.config import Config
from trainer.errors import UserError
from trainer.models.base import Family
from trainer.models.loading import ModelSource

# By the key, the models that read it.
FAMILY_KEYS = {
    "model.prediction": "models that predict either noise or v",
    "model.zero_terminal_snr": "models with a noise schedule that may end at zero SNR",
    "objective.timesteps": "models with a choice of timesteps",
    "objective.shift": "flow matching models",
    "objective.logit_mean": "flow matching models",
    "objective.logit_std": "flow matching models",
    "objective.min_snr_gamma": "diffusion models with a noise schedule",
    "objective.guidance": "models with a guidance embedding",
    "data.text_length": "models with a text encoder whose length can be chosen",
    "validation.samples.*.negative": "models that are sampled with a negative prompt",
}


def refuse_unread(config: Config, family: Family) -> None:
    """Raises UserError, a line for each key that is set and not read: by the family, or beside the other keys."""
    absent = FAMILY_KEYS.keys() - set(family.reads)
    by_family = {key: f"on {family.name}; leave it out (only {FAMILY_KEYS[key]} read it)" for key in absent}
    if not family.blocks:
        by_family["memory.gradient_checkpointing"] = f"on {family.name}, which names no blocks to recompute; leave it out"
    _refuse(config, unread_beside_others(config) | by_family)


def unread_beside_others(config: Config) -> dict[str, str]:
    """By the key: with what other choice it has no effect, and the remedy."""
    components, unread = config.model.components, {}
    if config.objective.timesteps == "uniform":
        remedy = "with uniform timesteps; leave it out, or set objective.timesteps = 'logit_normal'"
        unread |= {"objective.logit_mean": remedy, "objective.logit_std": remedy}
    if "fp16" not in {config.precision.compute, *(component.compute for component in components.values())}:
        remedy = "in a run that computes nothing in fp16; leave it out, or set precision.compute = 'fp16'"
        unread |= {"precision.loss_scale": remedy, "precision.loss_scale_growth_interval": remedy}
    if config.step.non_finite == "stop":
        unread["step.max_skipped"] = "with step.non_finite = 'stop'; leave it out, or set step.non_finite = 'skip'"
    if config.adapter.type == "lora":
        unread["export.dora_scale"] = "with adapter.type = 'lora'; leave it out, or set adapter.type = 'dora'"
    elif "comfyui" not in config.export.formats:
        unread["export.dora_scale"] = "without the ComfyUI file; leave it out, or add 'comfyui' to export.formats"
    if not config.optimizer.name.endswith("8bit"):
        unread["optimizer.min_8bit_size"] = (
            f"with optimizer.name = {config.optimizer.name!r}; leave it out, or choose adamw8bit"
        )
    for name, component in components.items():
        if component.dtype in ("fp32", "bf16", "fp16"):
            unread[f"model.components.{name}.exclude.0"] = (
                f"with dtype = {component.dtype!r}, which quantises nothing; leave it out"
            )
    for index, sample in enumerate(config.validation.samples):
        if sample.guidance is not None and sample.guidance <= 1:
            key = f"validation.samples.{index}.negative"
            unread[key] = f"with guidance = {sample.guidance:g}; leave it out, or raise guidance above 1"
    return unread


def refuse_unread_by_model(config: Config, source: ModelSource) -> None:
    """As `refuse_unread`, of the keys that only some models of the family read, by what their configs say."""
    embedded = "objective.guidance"
    if embedded in source.family.reads and not source.config(source.family.denoiser).get("guidance_embeds"):
        remedy = f"on this model; leave it out (only {FAMILY_KEYS[embedded]} read it)"
        _refuse(config, {embedded: remedy, "validation.samples.*.guidance": remedy})


def _refuse(config: Config, unread: Mapping[str, str]) -> None:
    """unread: by the key (of all entries of a list, "*", or of one), where it has no effect, and the remedy.

    A default that is written out is no mistake.
    """
    defaults = configs.known_keys()
    lines = []
    for key, value in configs.flatten(configs.tree(config)).items():
        name = configs.generic(key)
        effect = unread.get(key, unread.get(name))
        if effect is not None and value != defaults.get(name):
            lines.append(f"{key} = {value!r} has no effect {effect}")
    if lines:
        raise UserError("\n".join(lines))


def chosen(config: Config, family: Family) -> dict[str, Any]:
    """The values of the keys that the family reads, by their last names; of each sample's own keys none."""
    single = [key.split(".") for key in family.reads if "*" not in key]
    return {path[-1]: reduce(getattr, path, config) for path in single}
