"""Reads `adapter_config.json`, which PEFT writes beside `adapter_model.safetensors` (trainer/adapters/peft_config.py).

A layer's name is matched as by PEFT: as a whole or after a dot; the first expression that matches counts. Files are not
trusted: expressions whose search could take long are refused.
"""

import math
import re
from collections.abc import Callable, Collection
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainer.adapters.peft_config import CONFIG, PREFIX, WEIGHTS
from trainer.base.console import some
from trainer.base.errors import UserError, reading
from trainer.base.files import read_json
from trainer.base.text import refuse_stand_in

# Initialisations that keep the base model's weights. The others (pissa, olora, corda, loftq, lora_ga) change them.
INITS = ("gaussian", "eva", "orthogonal", "mica")
# keys.json: fields about a LoRA's origin or training, without an effect on its result; and the fields that are read.
_FIELDS = read_json(Path(__file__).with_name("keys.json"))["peft_config"]
KNOWN = {*_FIELDS["of_training"].split(), *_FIELDS["read"].split()}
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?:|.", re.DOTALL)
STEPS = 3 * 10**8  # limit for all expressions over all layers in the worst case: seconds
LONGEST = 300  # characters in an expression
AS_SAVED = "; take the folder as PEFT saved it"


class PeftConfig:
    """A config's alphas and ranks by the base model's layer names. layers: their count in the file. Raises UserError if it is
    no LoRA or DoRA over an unchanged model."""

    def __init__(self, path: Path, layers: int) -> None:
        self.path, self._steps = path, 0
        self._fields = self._read()
        self.dora, self.rslora = self._fields.get("use_dora", False), self._fields.get("use_rslora", False)
        self._rank, self._alpha = self._per_layer("r", "rank_pattern"), self._per_layer("lora_alpha", "alpha_pattern")
        self._is_target = self._targets()
        if self._steps * max(layers, 1) > STEPS:
            slow = "has expressions for names of layers that could take minutes to match"
            raise self.error(f"{slow}; write the names themselves")

    def alpha(self, stem: str, rank: int, *, dora: bool) -> float:
        """The alpha of a module. rank, dora: of the file. Raises UserError if the config differs: PEFT would not load the
        module, or only a part."""
        name = stem.removeprefix(PREFIX)
        if not self._is_target(name):
            raise self.error(f"has no {name!r} in its target_modules, and the file has its tensors{AS_SAVED}")
        if self._rank(name) != rank:
            raise self.error(f"gives {name!r} the rank {self._rank(name):g}, and the file has {rank}{AS_SAVED}")
        if self.dora != dora:
            has = ("says use_dora", "no magnitude") if self.dora else ("says no use_dora", "a magnitude")
            raise self.error(f"{has[0]}, and {name!r} has {has[1]}{AS_SAVED}")
        return self._alpha(name)

    def error(self, text: str) -> UserError:
        """The error about the config's file: its path, then `text`."""
        return UserError(f"{self.path} {text}")

    def _read(self) -> dict[str, Any]:
        if not self.path.is_file():  # reading a pipe may never end
            raise self.error(f"is no file{AS_SAVED}")
        with reading(self.path, remedy=""):
            refuse_stand_in(self.path.read_bytes())
        fields = read_json(self.path)
        if not isinstance(fields, dict):
            raise self.error(f"is not a JSON object{AS_SAVED}")
        if (kind := fields.get("peft_type")) != "LORA":
            raise self.error(f"is of another method (peft_type = {kind!r:.100}); LORA alone is read")
        if (bias := fields.get("bias", "none")) != "none":
            raise self.error(f"says bias = {bias!r:.100}: biases of the model were trained, which no LoRA file holds")
        init = fields.get("init_lora_weights", True)
        if not (isinstance(init, bool) or (isinstance(init, str) and init.lower() in INITS)):
            raise self.error(
                f"says init_lora_weights = {init!r:.100}, which changes the model's own weights before the training: over "
                "the model as it is the file means something else. Save it as a plain LoRA: "
                "save_pretrained(..., path_initial_model_for_weight_conversion=...) in PEFT"
            )
        odd = [f"{name} = {fields[name]!r:.60}" for name in sorted(fields.keys() - KNOWN) if fields[name]]
        if odd:
            raise self.error(f"sets {some(odd)}, which no LoRA or DoRA file can hold")
        for name in ("use_dora", "use_rslora"):
            if not isinstance(fields.get(name, False), bool):
                raise self.error(f"says {name} = {fields[name]!r:.100}, which is neither true nor false")
        return fields

    def _per_layer(self, key: str, patterns_key: str) -> Callable[[str], float]:
        whole, patterns = self._fields.get(key, 8), self._fields.get(patterns_key) or {}
        if not isinstance(patterns, dict):
            raise self.error(f"has a {patterns_key} that is no table")
        for name, number in {key: whole, **patterns}.items():
            if type(number) not in (int, float) or not 0 < abs(number) < 2**53:
                raise self.error(f"gives {name!r:.200} the {key} {number!r:.100}, which is no number to scale by")
        compiled = [(self._compiled(pattern, r"(.*\.)?({})"), float(number)) for pattern, number in patterns.items()]

        def number_of(name: str) -> float:
            return next((number for expression, number in compiled if expression.fullmatch(name)), float(whole))

        return number_of

    def _targets(self) -> Callable[[str], object]:
        names = self._fields.get("target_modules")
        if names == "all-linear":
            return lambda name: True
        if isinstance(names, str):
            return self._compiled(names).fullmatch
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self.error(f"has target_modules = {names!r:.100}, which are neither names nor an expression")
        ends = tuple(f".{name}" for name in names)
        return lambda name: f".{name}".endswith(ends)

    def _compiled(self, pattern: str, form: str = "{}") -> re.Pattern[str]:
        """The pattern inserted into `form`, compiled; counts its steps."""
        self._steps += self._steps_of(pattern)
        try:
            return re.compile(form.format(pattern))
        except (re.error, RecursionError, OverflowError) as error:
            raise self.error(f"has {pattern[:200]!r} for names of layers, which is no regular expression: {error}") from error

    def _steps_of(self, pattern: str) -> int:
        """The most ways a search may try in a name of 100 characters before it fails."""
        steps, open_groups = 1, [1]
        if len(pattern) > LONGEST:
            raise self.error(f"has an expression of {len(pattern)} characters for names of layers: {pattern[:200]!r}")
        for before, token in pairwise(["", *_TOKEN.findall(pattern)]):
            repeats = token in ("*", "+", "{")
            if token in ("(", "(?:"):
                open_groups.append(1)
            elif token == "|":
                open_groups[-1] += 1
            elif token == ")" and len(open_groups) > 1:
                steps *= open_groups.pop()
            elif (repeats and before == ")") or re.fullmatch(r"\\[1-9]", token) or (before, token) == ("(", "?"):
                unread = "groups that repeat, and signs behind (?, are not read"
                raise self.error(f"has {pattern[:200]!r} for names of layers: {unread}")
            elif repeats:
                steps *= 3 if before == r"\d" else 100  # no name has numbers of more digits
            elif token == "?":
                steps *= 2
        return min(steps * math.prod(open_groups), STEPS + 1)


def config_beside(file: Path, stems: Collection[str]) -> PeftConfig | None:
    """PEFT's config beside a file; None if it is not PEFT's file, or there is no config. stems: of the file's keys."""
    path = file.parent / CONFIG
    is_peft = file.name == WEIGHTS or any(stem.startswith(PREFIX) for stem in stems)
    return PeftConfig(path, len(stems)) if is_peft and path.exists() else None
