"""The config keys that not every family reads: one that is set and not read is refused, for it would be ignored."""

from __future__ import annotations

from functools import reduce
from typing import Any

from trainer import config as configs
from trainer.config import Config
from trainer.errors import UserError
from trainer.models.base import Family

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
    """Raises UserError, a line for each key that is set, differs from its default, and is not read by the family."""
    defaults = configs.known_keys()
    lines = []
    for key, value in configs.flatten(configs.tree(config)).items():
        name = configs.generic(key)
        if name in FAMILY_KEYS and name not in family.reads and value != defaults[name]:
            lines.append(f"{key} = {value!r} has no effect on {family.name}; leave it out (only {FAMILY_KEYS[name]} read it)")
    if lines:
        raise UserError("\n".join(lines))


def chosen(config: Config, family: Family) -> dict[str, Any]:
    """The values of the keys that the family reads, by their last names; of each sample's own keys none."""
    single = [key.split(".") for key in family.reads if "*" not in key]
    return {path[-1]: reduce(getattr, path, config) for path in single}
