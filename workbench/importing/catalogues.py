"""What is known of other trainers, as data."""

import json
from functools import cache
from importlib import resources
from types import SimpleNamespace
from typing import Any


@cache
def programs() -> dict[str, Any]:
    """programs.json: by what options a program is known (signs, one of each group; refused, two of them, and how to go on),
    kohya_ss's names; by program what a name is here, and of what kind (plain), what says nothing beside what is read
    (passed_by), and of its data what has no effect on the photos (idle)."""
    return _content("programs.json")


@cache
def facts() -> SimpleNamespace:
    """facts.json, what a config there and one here do not share. Lists of names are one string, parted by blanks.

    defaults, defaults_at, unlooked_defaults: by program, what an option is that its config leaves out, where that was looked
    up, and where it was not. targets: by program and family, the layers adapted where the config does not say. layer_presets,
    flavours, model_names: by family, OneTrainer's parts of layers' names, SimpleTuner's names of models ("": its default), a
    pattern of all models' names. times, guidance, layers_option: by program, its names for these. optimizers: names and
    defaults of options there. differs: by program and family ("": all), what it does otherwise whatever its config says.
    """
    return SimpleNamespace(**_content("facts.json"))


def _content(name: str) -> dict[str, Any]:
    return json.loads((resources.files("workbench.importing") / name).read_text(encoding="utf-8"))
