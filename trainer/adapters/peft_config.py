"""`adapter_config.json`, which PEFT writes beside `adapter_model.safetensors`: it alone holds the scales of the layers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.base.tensorfile import Tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # begins every key that PEFT saves


def renamed(tensors: Tensors, prefix: str) -> Tensors:
    """A component's tensors under PEFT's own keys. tensors: under diffusers' keys. prefix: stands before the layers' names in
    the module that PEFT wraps."""
    keys = {key: key.partition(".")[2].replace("_vector.weight", "_vector") for key in tensors}
    return {f"{PREFIX}{prefix}{keys[key]}": tensor for key, tensor in tensors.items()}


def config_bytes(fields: Mapping[str, Any], prefix: str) -> bytes:
    """The text of an `adapter_config.json`. fields: LoraConfig's, from `lora_config`. prefix: stands before
    the layers' names in the module that PEFT wraps."""
    patterns = ("rank_pattern", "alpha_pattern")
    renames: dict[str, object] = {"target_modules": [prefix + name for name in fields["target_modules"]]}
    renames |= {key: {f"^{prefix}{name[1:]}": value for name, value in fields[key].items()} for key in patterns}
    config = {"peft_type": "LORA", "bias": "none", "lora_dropout": 0.0, "inference_mode": True} | dict(fields) | renames
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def is_peft_folder(folder: Path) -> bool:
    """Whether PEFT's `save_pretrained` made it."""
    return (folder / CONFIG).exists()
