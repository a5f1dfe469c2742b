"""Facts about other trainers, as data. A list of names is one string, separated by blanks."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainer.base.files import read_json


@cache
def programs() -> dict[str, Any]:
    """programs.json: the options that identify a program (signs: one of each group; refused: two of them, and the remedy)
    and kohya_ss's names. By program: options that are only renamed here, with their kind (plain); options that need no key
    beside those read (ignored); options of its data without an effect on the photos (idle); the options of a LoKr (lokr)."""
    return read_json(Path(__file__).with_name("programs.json"))


@cache
def facts() -> SimpleNamespace:
    """facts.json: where a config there differs from one here.

    defaults, defaults_at, unlooked_defaults: by program, the values of options that its config leaves out, the version they
    were looked up in, and the options that were not looked up. targets: by program and family, the layers adapted by default.
    layer_presets, flavours, model_names: by family, OneTrainer's parts of layers' names, SimpleTuner's names of models ("":
    its default), a pattern of all models' names. times, guidance, layers_option: by program, its names for these. optimizers:
    names and defaults of options there. differs: by program and family ("": all), differences that no option controls.
    """
    return SimpleNamespace(**read_json(Path(__file__).with_name("facts.json")))
