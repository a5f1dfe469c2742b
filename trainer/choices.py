"""The config keys that not every family reads: one that is set and not read is refused, for it would be ignored."""

from __future__ import annotations

from functools import reduce
from typing import Any

from trainer import config as configs
from trainer.config import Config
from trainer.errors import UserError
from trainer.models.base import Family

# By the key, what a family that does not read it has not.
FAMILY_KEYS = {
    "model.prediction": "choice of what is predicted",
    "model.zero_terminal_snr": "noise schedule that could end at zero SNR",
    "objective.timesteps": "choice of timesteps",
    "objective.shift": "shift of its timesteps (flow matching has one)",
    "objective.logit_mean": "logit-normal timesteps (flow matching has them)",
    "objective.logit_std": "logit-normal timesteps (flow matching has them)",
    "objective.min_snr_gamma": "min-SNR weights (diffusion over a noise schedule has them)",
    "objective.guidance": "guidance as an input of its denoiser",
    "data.text_length": "text encoder whose length can be chosen",
    "validation.samples.*.negative": "negative prompts",
}


def refuse_unread(config: Config, family: Family) -> None:
    """Raises UserError, a line for each key that is set, differs from its default, and is not read by the family."""
    defaults = configs.known_keys()
    lines = []
    for key, value in configs.flatten(configs.tree(config)).items():
        name = configs.generic(key)
        if name in FAMILY_KEYS and name not in family.reads and value != defaults[name]:
            lines.append(f"{key} = {value!r}: {family.name} has no {FAMILY_KEYS[name]}; leave it out")
    if lines:
        raise UserError("\n".join(lines))


def chosen(config: Config, family: Family) -> dict[str, Any]:
    """The values of the keys that the family reads, by their last names; of each sample's own keys none."""
    single = [key.split(".") for key in family.reads if "*" not in key]
    return {path[-1]: reduce(getattr, path, config) for path in single}
