"""The kind of model in a file or a folder, so that a model of another kind is refused under its own name.

A file is recognised by the names and shapes of the tensors in its header, a folder by the classes in its model_index.json and
config.json. catalogue.json has the known kinds, each a name for people or a family that is trained here:
trained, pipelines: family -> its name for people, its usual pipeline.
classes: beginning of a class's name -> kind; the longest match counts.
tensors: kind and patterns of names, all of which a file has, or lacks if behind a "!"; the first match counts.
unets: channels that a UNet's cross attention reads -> kind.
parts: files without a denoiser: kind, beginning of their class names, pattern.
schedulers: beginning of a class's name -> kind.
names: family -> what neither tensors nor classes show: words in the name of a file or a folder, and their meaning; if a key
says it too, also how the model is trained without that key, and the key.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError
from trainer.base.tensorfile import is_safetensors
from trainer.models.base import Component
from trainer.models.config_files import index_of, read_json
from trainer.models.names import Shape


@dataclass(frozen=True)
class ModelKind:
    """A kind of model. name: for people. family: the one that trains it; None: untrained here. part: beginning of the class
    names of a file without a denoiser."""

    name: str
    family: str | None = None
    part: str = ""


_CATALOGUE = json.loads(Path(__file__).with_name("catalogue.json").read_text(encoding="utf-8"))
TRAINED: Mapping[str, str] = _CATALOGUE["trained"]
PIPELINES: Mapping[str, str] = _CATALOGUE["pipelines"]
ANY_TRAINED = " or ".join([", ".join([*TRAINED.values()][:-1]), [*TRAINED.values()][-1]])
CLASSES: Mapping[str, str] = _CATALOGUE["classes"]
TENSORS: Sequence[Sequence[str]] = _CATALOGUE["tensors"]
PARTS: Sequence[Sequence[str]] = _CATALOGUE["parts"]
SCHEDULERS: Mapping[str, str] = _CATALOGUE["schedulers"]
NAMES: Mapping[str, Sequence[Sequence[str]]] = _CATALOGUE["names"]
UNETS = {int(context): ModelKind(name) for context, name in _CATALOGUE["unets"].items()}
CONTROLNET = re.compile(r"ControlNet\w*Model$")
CROSS = re.compile(r"(input_blocks|down_blocks)\..*\.attn2\.to_k\.weight$")
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")  # people write vPred, VPRED, v_pred
INPUT = re.compile(r"(^|\.)(input_blocks\.0\.0|conv_in)\.weight$")


def kind_of(shapes: Mapping[str, Shape]) -> ModelKind | None:
    """The kind of a file with these tensors; None if unknown."""
    names = "\n".join(shapes)

    def has(part: str) -> bool:
        return (re.search(part.removeprefix("!"), names, re.MULTILINE) is None) == part.startswith("!")

    def columns(pattern: re.Pattern[str], dimensions: int) -> int | None:
        return next((s[1] for key, s in shapes.items() if pattern.search(key) and len(s) == dimensions), None)

    for kind, *parts in TENSORS:
        if all(map(has, parts)):
            return _named(kind)
    if (context := columns(CROSS, 2)) is not None:
        kind = UNETS.get(context) or (_named("sdxl") if has("label_emb.|add_embedding.") else None)
        return ModelKind(f"{kind.name}, for inpainting") if kind and kind.family is None and columns(INPUT, 4) == 9 else kind
    return next((ModelKind(name, part=part) for name, part, pattern in PARTS if has(pattern)), None)


def _named(kind: str) -> ModelKind:
    return ModelKind(TRAINED[kind], kind) if kind in TRAINED else ModelKind(kind)


def kind_of_class(name: str) -> ModelKind | None:
    """The kind of a pipeline or a part, by its class in diffusers; None if the class's name does not say."""
    if CONTROLNET.search(name):
        return ModelKind("a ControlNet")
    beginnings = [beginning for beginning in CLASSES if name.startswith(beginning)]
    return _named(CLASSES[max(beginnings, key=len)]) if beginnings else None


def kind_of_folder(folder: Path) -> ModelKind | None:
    """The kind of a folder with a pipeline's index: its pipeline's, unless its denoiser is of another kind."""
    index = read_json(index_of(folder))
    pipeline = class_in(index)
    kind, denoiser, config = kind_of_class(pipeline), None, {}
    for part in ("transformer", "unet"):
        path = folder / part / "config.json"
        config = read_json(path) if path.is_file() else config
        named = class_in(config) or _last(index.get(part))
        denoiser = denoiser or (kind_of_class(named) if named else None)
    if kind is None:
        return denoiser or (ModelKind(f"a model of {pipeline} (model_index.json: _class_name)") if pipeline else None)
    if kind.family == "sdxl" and index.get("text_encoder") == [None, None]:
        return UNETS[1280]
    if kind.name == CLASSES["StableDiffusion"]:
        context = config.get("cross_attention_dim")
        kind = UNETS.get(context, kind) if isinstance(context, int) else kind
        return ModelKind(f"{kind.name}, for inpainting") if config.get("in_channels") == 9 else kind
    return denoiser if kind.family and denoiser and denoiser.family != kind.family else kind


def class_in(config: Mapping[str, Any]) -> str:
    """The class that a model_index.json or config.json names, or ""."""
    return _last(config.get("_class_name"))


def _last(entry: Any) -> str:
    """The class in an entry of an index, which may name its library, too."""
    last = entry[-1] if isinstance(entry, list) and entry else entry
    return last if isinstance(last, str) else ""


def named_kinds(family: str, name: str) -> list[Sequence[str]]:
    """The meanings (`names` of the catalogue) of words in the name of a file, folder or repository of the family."""
    last = name.rpartition("/")[2]
    words = f"{last} {'-'.join(WORD.findall(last))}".lower()
    return [kind for word, *kind in NAMES.get(family, ()) if re.search(rf"((?<![a-z])|xl|flux)({word})(?![a-z])", words)]


class OfAnotherFamily(UserError):
    """A model that another family trains."""


def refuse_other(key: str, family: str, kind: ModelKind | None) -> None:
    """Refuse a model of a known kind that is not the family's. key: the config key with its value, for the message."""
    if kind is None or family not in TRAINED or kind.family == family:
        return
    if kind.part:
        remedy = "it belongs into the path of its own component, for example model.components.vae.path"
        raise UserError(f"{key} is {kind.name}: {remedy}; model.path names the file with the unet or transformer")
    if kind.family is not None:
        raise OfAnotherFamily(f"{key} is {kind.name}, and model.family = {family!r}; set model.family = {kind.family!r}")
    raise UserError(f"{key} is {kind.name}, which is not trained here; give {ANY_TRAINED}")


def refuse_part(file: Path, config: Mapping[str, Any], component: Component) -> None:
    """Refuse a component whose config.json, `file`, names another class."""
    named = class_in(config)
    if named not in ("", component.class_name):
        kind = kind_of_class(named)
        of = f", of {kind.name}, which is not trained here" if kind is not None and kind.family is None else ""
        raise UserError(f"{file}: _class_name = {named!r}{of}; the {component.name} is a {component.class_name}")


def instead_of_a_model(names: Collection[str], read: Callable[[str], dict[str, Any]], *, on_the_hub: bool = False) -> str:
    """The content of a folder or repository without model_index.json, and the remedy, for a message. names: its files."""
    if not {"adapter_config.json", "pytorch_lora_weights.safetensors"}.isdisjoint(names):
        return "it holds an adapter; give the model that it is for (to start a run from it, set adapter.init_from)"
    config = next((name for name in ("config.json", "modular_model_index.json") if name in names), None)
    content = read(config) if config else {}
    if named := class_in(content):
        kind = kind_of_class(named)
        if kind is not None and kind.family is None:
            return f"it holds {kind.name} ({named}), which is not trained here; give {ANY_TRAINED}"
        if config != "config.json":
            return f"it holds a modular pipeline, {named}, without all of its parts; complete the folder"
        return f"it holds one part of a model, {named}; give its folder in model.components.NAME.path, and the model here"
    if isinstance(named := content.get("architectures"), list) and named:
        return f"it holds {named[0]}; give {ANY_TRAINED}"
    if files := sorted(name for name in names if is_safetensors(name)):
        remedy = "download one, and give the file's path" if on_the_hub else "give the path of the file"
        return f"it holds {', '.join(files[:3])}{' and more' if len(files) > 3 else ''}; {remedy}"
    return "it lacks model_index.json; give a whole diffusers folder, a .safetensors file or a hub id"
