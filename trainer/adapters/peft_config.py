"""`adapter_config.json`, which PEFT writes beside `adapter_model.safetensors`: the scales of its layers are there alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.base.tensorfile import Tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every key that PEFT saves


def renamed(tensors: Tensors, before: str) -> Tensors:
    """A component's tensors under PEFT's own keys. tensors: under those of diffusers. before: what stands before its layers'
    names in the module that they are for."""
    keys = {key: key.partition(".")[2].replace("_vector.weight", "_vector") for key in tensors}
    return {f"{PREFIX}{before}{keys[key]}": tensor for key, tensor in tensors.items()}


def written(fields: Mapping[str, Any], before: str) -> bytes:
    """The config of a file that is written. fields: of LoraConfig, as `lora_config` gives them. before: what stands before
    the layers' names in the module that it is for."""
    patterns = ("rank_pattern", "alpha_pattern")
    named: dict[str, object] = {"target_modules": [before + name for name in fields["target_modules"]]}
    named |= {key: {f"^{before}{name[1:]}": value for name, value in fields[key].items()} for key in patterns}
    config = {"peft_type": "LORA", "bias": "none", "lora_dropout": 0.0, "inference_mode": True} | dict(fields) | named
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def is_peft_folder(folder: Path) -> bool:
    """Whether PEFT's `save_pretrained` made it."""
    return (folder / CONFIG).exists()
