"""The settings of kohya_ss's window (its JSON) as the options that it gives sd-scripts. The names are in programs.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.importing.catalogues import programs
from workbench.importing.command_line import words

UNSET = (None, "", False, "none", "None")


def as_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """sd-scripts' options. What the window leaves empty, and a 0 that means so there, is left out. Raises ValueError."""
    names = programs()["kohya_gui"]
    zeros, hidden = names["zeros"].split(), names["window"].split()
    kinds = [kind for kind in names["scripts"] if _on(given.get(kind))]
    kinds += names["kinds"].get(str(given.get("LoRA_type")), "").split()
    hidden += [*names["scripts"], *" ".join(names["arguments"].values()).split()]
    noise = "Multires" if str(given.get("noise_offset_type")).startswith("Multi") else "Original"
    parts = names["only"] | names["noise"]
    hidden += [name for kind, own in parts.items() if kind not in (*kinds, noise) for name in own.split()]
    for switch, values, settings in names["idle_unless"]:  # always saved, and read beside these values alone
        hidden += settings.split() if str(given.get(switch)).lower() not in values.split() else []
    rest = {
        names["renames"].get(name, name): value
        for name, value in given.items()
        if name not in hidden and value not in UNSET and (name in zeros or not _zero(value))
    }
    options = {"script": names["scripts"][kinds[0]] if kinds else "train_network", **rest}
    options.setdefault("optimizer_type", "AdamW8bit" if _on(options.pop("use_8bit_adam", False)) else "AdamW")
    _network(options, given, names)
    _length(options)
    _rates(options)
    if isinstance(rest.get("sample_prompts"), str):
        options["sample_prompts"] = rest["sample_prompts"].splitlines()
    if isinstance(rest.get("xformers"), str):
        options[options.pop("xformers")] = True
    said = {name: value for name, value in options.items() if value != ""}
    return said | words(str(given.get("additional_parameters") or ""))


def _zero(value: Any) -> bool:
    return str(value).strip() in ("0", "0.0")


def _on(value: Any) -> bool:
    return str(value).lower() == "true"


def _network(options: dict[str, Any], given: Mapping[str, Any], names: Mapping[str, Any]) -> None:
    kind = str(given.get("LoRA_type") or ("Standard" if "network_dim" in given else "full"))
    module, *words = names["types"].get(kind, f"other algo={kind.replace(' ', '_')}").split()
    words += [f"preset={given['LyCORIS_preset']}"] if module.startswith("lycoris") and given.get("LyCORIS_preset") else []
    fixed = [name for name in words if "=" in name]
    values = {name: given.get(name) for name in [*words, *names["arguments"].get(module, "").split()] if name not in fixed}
    pairs = [f"{name}={value}" for name, value in values.items() if value not in UNSET and not _zero(value)]
    options |= {"network_module": module, "network_args": [*fixed, *pairs]}


def _length(options: dict[str, Any]) -> None:
    """Its own steps or epochs, where neither of sd-scripts' is given; a warm-up in percent of them."""
    epochs = options.pop("epoch", "")
    if not {"max_train_steps", "max_train_epochs", "dataset_config"} & options.keys():
        options["max_train_epochs"] = epochs or 1
    if warmup := options.pop("lr_warmup", ""):
        options.setdefault("lr_warmup_steps", f"{warmup}%")


def _rates(options: dict[str, Any]) -> None:
    """A rate of 0 for one of both trains the other alone; where one is given, learning_rate is not read there."""
    text, denoiser = ("" if _zero(options.get(name, 0)) else options[name] for name in ("text_encoder_lr", "unet_lr"))
    if denoiser and not text:
        options["network_train_unet_only"] = True
    if text and not denoiser:
        options["network_train_text_encoder_only"] = True
    options |= {"text_encoder_lr": text, "unet_lr": denoiser}
