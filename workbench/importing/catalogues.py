"""What is known of other trainers, as data: programs.json, and facts.json, what a config there and one here do not share:

defaults   by program, what an option is that its config leaves out; defaults_at: where that was looked up
unlooked_defaults  those of them that were not looked up
targets    by program and family, the layers that it adapts where its config does not say: a preset here, or patterns
layer_presets  by family, OneTrainer's names for parts of a layer's name
flavours   by family, SimpleTuner's names for models; "" is its default
times      by program, its names for distributions of times, and ours
guidance, layers_option  by program, the name of an option that has a family's name in it
model_names  by family, a pattern of the names that its models have
optimizers  what a library there calls an option of the one here; its defaults, by program and optimizer
differs    by program and family ("": all), what it does otherwise whatever its config says
"""

import json
from functools import cache
from importlib import resources
from types import SimpleNamespace
from typing import Any


@cache
def programs() -> dict[str, Any]:
    """programs.json: by what options a program is known (signs, one of each group; refused, two of them, and how to go on),
    kohya_ss's names, and of each program what a name in a table is here, and of what kind."""
    return _content("programs.json")


@cache
def facts() -> SimpleNamespace:
    """facts.json, a field for each table. Lists of names are written in one string, parted by blanks."""
    return SimpleNamespace(**_content("facts.json"))


def _content(name: str) -> dict[str, Any]:
    return json.loads((resources.files("workbench.importing") / name).read_text(encoding="utf-8"))
