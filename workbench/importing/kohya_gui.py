"""Translates the settings of kohya_ss's window (JSON) to the options that it gives sd-scripts, by programs.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.importing.catalogues import programs
from workbench.importing.command_line import words

UNSET = (None, "", False, "none", "None")


def as_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """sd-scripts' options, without empty settings and zeros that mean empty. Raises ValueError."""
    names = programs()["kohya_gui"]
    zeros, hidden = names["zeros"].split(), names["window"].split()
    kinds = [kind for kind in names["scripts"] if _on(settings.get(kind))]
    kinds += names["kinds"].get(str(settings.get("LoRA_type")), "").split()
    hidden += [*names["scripts"], *" ".join(names["arguments"].values()).split()]
    noise = "Multires" if str(settings.get("noise_offset_type")).startswith("Multi") else "Original"
    parts = names["only"] | names["noise"]
    hidden += [name for kind, row in parts.items() if kind not in (*kinds, noise) for name in row.split()]
    for switch, values, idle in names["idle_unless"]:  # always saved, but read only beside these values
        hidden += idle.split() if str(settings.get(switch)).lower() not in values.split() else []
    rest = {
        names["renames"].get(name, name): value
        for name, value in settings.items()
        if name not in hidden and value not in UNSET and (name in zeros or not _zero(value))
    }
    options = {"script": names["scripts"][kinds[0]] if kinds else "train_network", **rest}
    options.setdefault("optimizer_type", "AdamW8bit" if _on(options.pop("use_8bit_adam", False)) else "AdamW")
    _network(options, settings, names)
    _length(options)
    _rates(options)
    if isinstance(rest.get("sample_prompts"), str):
        options["sample_prompts"] = rest["sample_prompts"].splitlines()
    if isinstance(rest.get("xformers"), str):
        options[options.pop("xformers")] = True
    options = {name: value for name, value in options.items() if value != ""}
    return options | words(str(settings.get("additional_parameters") or ""))


def _zero(value: Any) -> bool:
    return str(value).strip() in ("0", "0.0")


def _on(value: Any) -> bool:
    return str(value).lower() == "true"


def _network(options: dict[str, Any], settings: Mapping[str, Any], names: Mapping[str, Any]) -> None:
    kind = str(settings.get("LoRA_type") or ("Standard" if "network_dim" in settings else "full"))
    module, *words = names["types"].get(kind, f"other algo={kind.replace(' ', '_')}").split()
    if module.startswith("lycoris") and settings.get("LyCORIS_preset"):
        words.append(f"preset={settings['LyCORIS_preset']}")
    pairs = [word for word in words if "=" in word]
    arguments = [word for word in (*words, *names["arguments"].get(module, "").split()) if word not in pairs]
    values = {name: value for name in arguments if (value := settings.get(name)) not in UNSET and not _zero(value)}
    options |= {"network_module": module, "network_args": [*pairs, *(f"{name}={value}" for name, value in values.items())]}


def _length(options: dict[str, Any]) -> None:
    """The window's own epochs, unless sd-scripts' steps or epochs are set; a warm-up in percent."""
    epochs = options.pop("epoch", "")
    if not {"max_train_steps", "max_train_epochs", "dataset_config"} & options.keys():
        options["max_train_epochs"] = epochs or 1
    if warmup := options.pop("lr_warmup", ""):
        options.setdefault("lr_warmup_steps", f"{warmup}%")


def _rates(options: dict[str, Any]) -> None:
    """A rate of 0 for one part trains the other alone; if either is given, learning_rate is not read there."""
    text, denoiser = ("" if _zero(options.get(name, 0)) else options[name] for name in ("text_encoder_lr", "unet_lr"))
    if denoiser and not text:
        options["network_train_unet_only"] = True
    if text and not denoiser:
        options["network_train_text_encoder_only"] = True
    options |= {"text_encoder_lr": text, "unet_lr": denoiser}
