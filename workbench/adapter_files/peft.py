"""What `adapter_config.json` says, which PEFT writes beside `adapter_model.safetensors` (trainer/adapters/peft_config.py).

PEFT matches a layer's name against the regular expressions of `rank_pattern` and `alpha_pattern`, as a whole or behind a dot;
the first that fits counts. Here it is the same. A file from elsewhere must not keep its reader busy forever, so expressions
whose search could take long are refused.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainer.adapters.peft_config import CONFIG, PREFIX, WEIGHTS
from trainer.base.console import some
from trainer.base.errors import UserError, reading
from trainer.base.files import read_json
from trainer.base.text import refuse_stand_in

# Beginnings that leave the base model's weights as they are. The others (pissa, olora, corda, loftq, lora_ga) change them.
INITS = ("gaussian", "eva", "orthogonal", "mica")
# What says where a LoRA came from, or how it was trained, and not what it computes.
OF_TRAINING = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type", "velora_config",
}  # fmt: skip
READ = {
    "alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern", "target_modules",
    "use_dora", "use_rslora",
}  # fmt: skip
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?:|.", re.DOTALL)
STEPS = 3 * 10**8  # that all expressions over all layers may take at worst: seconds
LONGEST = 300  # characters of an expression


@dataclass(frozen=True)
class PeftConfig:
    """What the config says of its layers. Names are the base model's own: the keys' without `base_model.model.`."""

    path: Path
    dora: bool
    rslora: bool
    _rank: Callable[[str], float]
    _alpha: Callable[[str], float]
    _is_target: Callable[[str], bool]

    def alpha(self, stem: str, rank: int, *, dora: bool) -> float:
        """The alpha of a module. rank, dora: as the file has them.

        Raises UserError where the config says otherwise: PEFT would not load the module, or not all of it.
        """
        name = stem.removeprefix(PREFIX)
        if not self._is_target(name):
            raise self.wrong(f"has no {name!r} in its target_modules, and the file has its tensors")
        if self._rank(name) != rank:
            raise self.wrong(f"gives {name!r} the rank {self._rank(name):g}, and the file has {rank}")
        if self.dora != dora:
            has = ("says use_dora", "no magnitude") if self.dora else ("says no use_dora", "a magnitude")
            raise self.wrong(f"{has[0]}, and {name!r} has {has[1]}")
        return self._alpha(name)

    def wrong(self, what: str) -> UserError:
        """The error that says `what` of the config's file."""
        return UserError(f"{self.path} {what}; take the folder as PEFT saved it")


def config_beside(file: Path, stems: Collection[str]) -> PeftConfig | None:
    """What PEFT wrote beside a file of its own; None where it is none, or nothing is there.

    stems: of the file's keys. Raises UserError for what is no LoRA or DoRA over an unchanged model.
    """
    path = file.parent / CONFIG
    own = file.name == WEIGHTS or any(stem.startswith(PREFIX) for stem in stems)
    return _read(path, len(stems)) if own and path.exists() else None


def _read(path: Path, layers: int) -> PeftConfig:

    def wrong(what: str) -> UserError:
        return UserError(f"{path} {what}")

    if not path.is_file():  # to read a pipe may never end
        raise wrong("is no file; take the folder as PEFT saved it")
    with reading(path, remedy=""):
        refuse_stand_in(path.read_bytes())
    fields = read_json(path)
    if not isinstance(fields, dict):
        raise wrong("is not a JSON object; take the folder as PEFT saved it")
    if (kind := fields.get("peft_type")) != "LORA":
        raise wrong(f"is of another method (peft_type = {kind!r:.100}); LORA alone is read")
    if fields.get("bias", "none") != "none":
        raise wrong(f"says bias = {fields['bias']!r:.100}: biases of the model were trained, which no LoRA file holds")
    init = fields.get("init_lora_weights", True)
    if not (isinstance(init, bool) or (isinstance(init, str) and init.lower() in INITS)):
        raise wrong(
            f"says init_lora_weights = {init!r:.100}, which changes the model's own weights before the training: over "
            "the model as it is the file means something else. Save it as a plain LoRA: "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...) in PEFT"
        )
    odd = sorted(name for name in fields.keys() - READ - OF_TRAINING if fields[name])
    if odd:
        raise wrong(f"sets {some([f'{name} = {fields[name]!r:.60}' for name in odd])}, which no LoRA or DoRA file can hold")
    for name in ("use_dora", "use_rslora"):
        if not isinstance(fields.get(name, False), bool):
            raise wrong(f"says {name} = {fields[name]!r:.100}, which is neither true nor false")
    rank, rank_steps = _per_layer(fields, "r", 8, "rank_pattern", wrong)
    alpha, alpha_steps = _per_layer(fields, "lora_alpha", 8, "alpha_pattern", wrong)
    is_target, target_steps = _targets(fields.get("target_modules"), wrong)
    if (rank_steps + alpha_steps + target_steps) * max(layers, 1) > STEPS:
        raise wrong("has expressions for names of layers that could take minutes to match; write the names themselves")
    return PeftConfig(path, fields.get("use_dora", False), fields.get("use_rslora", False), rank, alpha, is_target)


def _per_layer(
    fields: Mapping[str, Any], key: str, default: int, patterns_key: str, wrong: Callable[[str], UserError]
) -> tuple[Callable[[str], float], int]:
    """(name of a layer -> its number, steps that finding it may take)."""
    patterns = fields.get(patterns_key) or {}
    if not isinstance(patterns, dict):
        raise wrong(f"has a {patterns_key} that is no table")
    whole = fields.get(key, default)
    for name, number in {key: whole, **patterns}.items():
        if type(number) not in (int, float) or not 0 < abs(number) < 2**53:
            raise wrong(f"gives {name!r:.200} the {key} {number!r:.100}, which is no number to scale by")
    steps = sum(_steps(pattern, wrong) for pattern in patterns)
    compiled = [(_compiled(rf"(.*\.)?({pattern})", wrong), float(number)) for pattern, number in patterns.items()]

    def number_of(name: str) -> float:
        return next((number for expression, number in compiled if expression.fullmatch(name)), float(whole))

    return number_of, steps


def _targets(said: object, wrong: Callable[[str], UserError]) -> tuple[Callable[[str], bool], int]:
    """(name of a layer -> whether PEFT adapts it, steps that finding it may take)."""
    if said == "all-linear":
        return lambda name: True, 1
    if isinstance(said, str):
        steps, expression = _steps(said, wrong), _compiled(said, wrong)
        return lambda name: expression.fullmatch(name) is not None, steps
    if not isinstance(said, list) or not all(isinstance(name, str) for name in said):
        raise wrong(f"has target_modules = {said!r:.100}, which are neither names nor an expression")
    ends = tuple(f".{name}" for name in said)
    return lambda name: f".{name}".endswith(ends), 1


def _compiled(pattern: str, wrong: Callable[[str], UserError]) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise wrong(f"has {pattern[:200]!r} for names of layers, which is no regular expression: {error}") from error


def _steps(pattern: str, wrong: Callable[[str], UserError]) -> int:
    """How many ways a search may go in a name of 100 characters before it gives up, at most."""
    steps, open_groups = 1, [1]
    if len(pattern) > LONGEST:
        raise wrong(f"has an expression of {len(pattern)} characters for names of layers: {pattern[:200]!r}")
    for before, token in pairwise(["", *_TOKEN.findall(pattern)]):
        if token in ("(", "(?:"):
            open_groups.append(1)
        elif token == "|":
            open_groups[-1] += 1
        elif token == ")" and len(open_groups) > 1:
            steps *= open_groups.pop()
        elif token in ("*", "+", "{") and before == ")" or re.fullmatch(r"\\[1-9]", token) or (token, before) == ("?", "("):
            raise wrong(f"has {pattern[:200]!r} for names of layers: groups that repeat, and signs behind (?, are not read")
        elif token in ("*", "+", "{"):
            steps *= 3 if before == r"\d" else 100  # no name has numbers of more digits
        elif token == "?":
            steps *= 2
    return min(steps * math.prod(open_groups), STEPS + 1)
