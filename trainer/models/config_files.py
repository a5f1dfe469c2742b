"""A model's JSON files: reading, and refusal of damaged values with the file, the key and the value."""

import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from trainer.base.console import shortlist
from trainer.base.errors import AGAIN, UserError, raised_by_file, reading, shown
from trainer.base.files import refuse_irregular
from trainer.base.text import decoded
from trainer.models.base import Component, Family
from trainer.models.names import ComponentConfig

PUBLISHED = Path(__file__).parent / "published"
# Names of a pipeline's index. A modular pipeline's parts may lie in other repositories.
INDEX, MODULAR_INDEX = "model_index.json", "modular_model_index.json"
RESTORE = "restore the file, as the model's repository has it"
NO_SIZE = re.compile(r"^_|_ids?$|^(architectures|model_type|torch_dtype|dtype)$")  # keys without effect on tensor shapes
MOST = 2**31  # bound of any whole number: no model counts so far
MOST_LAYERS = 1000  # bound of layers, and of lists with a value for each block: more would be built without end


@contextmanager
def blamed_on(file: Path | str, component: Component, culprit: Callable[[], str] = lambda: "") -> Iterator[None]:
    """A block in which a library's error about the component's config becomes a UserError that names the file. culprit: is
    called after an error, and gives the key at fault, as text."""
    try:
        with reading(file, f"describes no {component.class_name}", remedy=RESTORE):
            yield
    except UserError as error:
        raise UserError(str(error).replace(component.class_name, component.class_name + culprit(), 1)) from error


def culprit(config: ComponentConfig, library: str, class_name: str, build: Callable[[dict[str, Any]], object]) -> str:
    """The first value without which the class takes the config, as text. If there is none, all values that are no defaults of
    the class: they do not go together. build: makes the module of a config."""
    parameters = parameters_of(library, class_name)
    texts = {k: f"{k} = {shown(v)}" for k, v in config.items() if v != parameters.get(k, (None, None))[1]}
    nulls = [text for key, text in texts.items() if config[key] is None]  # left out as they are, so that the default counts
    for key, text in texts.items():
        try:
            build({other: value for other, value in config.items() if other != key})
        except Exception as error:
            if not raised_by_file(error):
                raise
        else:
            return f" ({', '.join(dict.fromkeys([text, *nulls]))})"
    return f" ({', '.join(texts.values())})"


def read_json(path: Path, instead: ComponentConfig | None = None) -> dict[str, Any]:
    """A JSON object; infinities are allowed, since schedulers' configs have them. instead: returned if the file is missing;
    None: raise."""
    try:
        refuse_irregular(path)
        tree = json.loads(decoded(path.read_bytes()))
    except FileNotFoundError as error:
        if instead is not None:
            return dict(instead)
        remedy = "complete the model folder, or point model.config (or the component's path) to one"
        raise UserError(f"{path} does not exist; {remedy}") from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(f"{path} is not valid JSON: {reason}; {AGAIN}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path} is not a JSON object; {AGAIN}")
    return tree


def index_of(folder: Path) -> Path:
    """The path of a folder's pipeline index, which may not exist."""
    modular = folder / MODULAR_INDEX
    return modular if modular.is_file() and not (folder / INDEX).is_file() else folder / INDEX


def is_whole(names: Container[str], family: Family) -> bool:
    """Whether a folder with these files is a whole model."""
    return INDEX in names or (MODULAR_INDEX in names and f"{family.denoiser}/config.json" in names)


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """A text encoder's config; taken out of a whole CLIP's or Qwen3-VL's, which transformers accepts as well."""
    text = config.get("text_config")
    return {**text, **{k: config[k] for k in ("projection_dim",) if k in config}} if isinstance(text, dict) else config


def read_of(family: Family, files: Iterable[str]) -> list[str]:
    """The files of a repository that are read besides weights."""
    configs = [INDEX, MODULAR_INDEX, *(f"{component.name}/config.json" for component in family.components)]
    folders = ("scheduler/", *(f"{name}/" for name in family.files.tokenizers))
    return [path for path in files if path in configs or path.startswith(folders)]


def shards(index: Path) -> list[str]:
    """The files named by an index of shards. Raises UserError for a file of another folder, or a missing one."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UserError(f"{index} has no weight_map from tensors to files; {AGAIN}")
    for name in names.values():
        if Path(name).name != name or "\\" in name:
            raise UserError(f"{index} names {name!r}, which is not a file beside it; {AGAIN}")
    if missing := sorted(name for name in set(names.values()) if not (index.parent / name).exists()):
        raise UserError(
            f"{index} names {shortlist(list(map(repr, missing)), 3)}, and there is no such file beside it; {AGAIN}"
        )
    return sorted(set(names.values()))


@cache
def published_config(labels: tuple[str, ...], component: str) -> dict[str, Any]:
    """A component's config.json in the first of these embedded folders that has one; {} if none has."""
    paths = (PUBLISHED / label / component / "config.json" for label in labels)
    return next((text_part(read_json(path)) for path in paths if path.is_file()), {})


def described(path: Path, config: ComponentConfig, usual: ComponentConfig) -> str:
    """A component's config file and its differences from the published config, for a message about weights that do not fit;
    "" for an embedded config, which is not the user's."""
    if PUBLISHED in path.parents:
        return ""
    odd = [key for key in usual if key in config and config[key] != usual[key] and not NO_SIZE.search(key)]
    values = ", ".join(f"{key} = {shown(config[key])} (there {shown(usual[key])})" for key in odd)
    return f"; the config is {path}" + (f", which differs from the published one: {values}" if odd else "")


@cache
def parameters_of(library: str, class_name: str) -> Mapping[str, tuple[Any, Any]]:
    """(annotation, default) by key of the config of a class of diffusers or transformers; {} if the library has no such
    class."""
    cls: Any = getattr(importlib.import_module(library), class_name, None)
    if cls is None:
        return {}
    if library == "transformers":
        return {field.name: (field.type, getattr(cls.config_class, field.name, None)) for field in fields(cls.config_class)}
    hints, signature = get_type_hints(cls.__init__), inspect.signature(cls.__init__).parameters
    return {key: (hints.get(key, Any), each.default) for key, each in signature.items() if each.default is not each.empty}


def strict_values(config: ComponentConfig, library: str, class_name: str) -> dict[str, Any]:
    """The config as a strict class takes it: 1 becomes 1.0 for a float; a null that the class does not take is left out."""
    parameters, values = parameters_of(library, class_name), {}
    for key, value in config.items():
        hint, default = parameters.get(key, (Any, None))
        if type(value) is int and (hint is float or type(default) is float):
            value = float(value)
        if value is not None or default is None or _fits(None, hint):
            values[key] = value
    return values


def check_values(
    file: Path, config: ComponentConfig, component: Component | None = None, usual: ComponentConfig = {}
) -> None:
    """Refuse a value of another kind than in the published config and in the library's class, and an impossible count.

    component: None: a scheduler. Its `defaults` are read by the family, and must not be null. usual: the published config.
    """
    library, class_name = (component.library, component.class_name) if component else ("diffusers", config.get("_class_name"))
    required = component.defaults if component else {}
    for key, value in config.items():
        expected = usual.get(key, required.get(key))
        alike = value in (None, False) if expected is None else _alike(value, expected) and _counts(key, value, expected)
        if key.startswith("_") or (alike and (key in usual or key in required)):
            continue
        parameters = parameters_of(library, class_name) if isinstance(class_name, str) else {}
        hint, default = parameters.get(key, (Any, None))
        expected = default if expected is None else expected
        equal = type(value) is type(expected) and value == expected  # an infinity, too, if the library has it
        if equal or (key not in parameters and expected is None):
            continue
        typed = key in parameters and hint is not Any  # a class without annotations takes what is like its default
        fits = key not in required if value is None else _alike(value, expected) or (typed and _fits(value, hint))
        if not fits or not _counts(key, value, expected):
            kind = hint.__name__ if isinstance(hint, type) else hint
            usual_value = f"others have {shown(expected)}" if expected is not None else f"{kind} is taken"
            raise UserError(f"{file}: {key} = {shown(value)}, where {usual_value}; {RESTORE}")


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number that a float can hold."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value is of the annotated type. Libraries annotate lists of any length as tuples of one."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is Literal:
        return value in inner
    if origin in (list, tuple) or hint in (list, tuple):
        types = [each for each in inner if each is not ...]
        return isinstance(value, list) and all(any(_fits(each, one) for one in types) for each in value if types)
    if hint is float:
        return is_number(value)
    if hint in (int, str, bool):
        return type(value) is hint
    return (value is None) == (hint is NoneType) if hint is NoneType or value is None else True


def _counts(key: str, value: Any, expected: Any) -> bool:
    """Whether whole numbers and lists are within bounds, and a number that is a size (no id) in other configs is above 0."""
    if isinstance(value, list):
        return (
            bool(value or not expected) and len(value) < MOST_LAYERS and all(_counts(key, each, expected) for each in value)
        )
    if isinstance(value, bool) or not isinstance(value, int):
        return True
    most, others = (
        MOST_LAYERS if "layers" in key else MOST,
        expected if isinstance(expected, list) and expected else [expected],
    )
    if key.endswith("_id") or not all(type(other) is int and other > 0 for other in others):
        return (0 if expected is None and not key.endswith("_id") else -MOST) <= value < most
    return 0 < value < most


def _alike(value: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return isinstance(value, list) and (not expected or all(_alike(each, expected[0]) for each in value))
    return is_number(value) if isinstance(expected, float) else type(value) is type(expected)
