"""The config keys that not every run reads: one that is set and not read is refused, for it would be ignored."""

from __future__ import annotations

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
    """Raises UserError, a line for each key that is set and not read: by the family, or with uniform timesteps."""
    absent = FAMILY_KEYS.keys() - set(family.reads)
    unread = {key: f"{family.name}; leave it out (only {FAMILY_KEYS[key]} read it)" for key in absent}
    if config.objective.timesteps == "uniform":
        remedy = "uniform timesteps; leave it out, or set objective.timesteps = 'logit_normal'"
        unread = {"objective.logit_mean": remedy, "objective.logit_std": remedy} | unread
    _refuse(config, unread)


def refuse_unread_by_model(config: Config, source: ModelSource) -> None:
    """As `refuse_unread`, of a key that only some models of the family read, by what their configs say."""
    key = "objective.guidance"
    if not source.config(source.family.denoiser).get("guidance_embeds"):
        _refuse(config, {key: f"this model; leave it out (only {FAMILY_KEYS[key]} read it)"})


def _refuse(config: Config, unread: Mapping[str, str]) -> None:
    """unread: by the key, on what it has no effect, and the remedy. A default that is written out is no mistake."""
    defaults = configs.known_keys()
    lines = []
    for key, value in configs.flatten(configs.tree(config)).items():
        name = configs.generic(key)
        if name in unread and value != defaults[name]:
            lines.append(f"{key} = {value!r} has no effect on {unread[name]}")
    if lines:
        raise UserError("\n".join(lines))


def chosen(config: Config, family: Family) -> dict[str, Any]:
    """The values of the keys that the family reads, by their last names; of each sample's own keys none."""
    single = [key.split(".") for key in family.reads if "*" not in key]
    return {path[-1]: reduce(getattr, path, config) for path in single}
