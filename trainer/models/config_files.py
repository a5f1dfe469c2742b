"""A model's JSON files: read, and refused with the file, the key and the value where they are damaged."""

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
# Names of a pipeline's index. The parts of a modular pipeline may lie in other repositories.
INDEX, MODULAR_INDEX = "model_index.json", "modular_model_index.json"
RESTORE = "restore the file, as the model's repository has it"
NO_SIZE = re.compile(r"^_|_ids?$|^(architectures|model_type|torch_dtype|dtype)$")  # keys that no tensor's shape depends on
MOST = 2**31  # of any whole number: no model counts so far
MOST_LAYERS = 1000  # of layers, and of what a list tells of each block: more would be built without end


@contextmanager
def blamed_on(where: Path | str, component: Component, named: Callable[[], str] = lambda: "") -> Iterator[None]:
    """A block in which what a library raises about the component's config is the user's error, with the file. named: gives
    the key that is at fault, as text, once something was raised."""
    try:
        with reading(where, f"describes no {component.class_name}", remedy=RESTORE):
            yield
    except UserError as error:
        raise UserError(str(error).replace(component.class_name, component.class_name + named(), 1)) from error


def culprit(config: ComponentConfig, library: str, class_name: str, build: Callable[[dict[str, Any]], object]) -> str:
    """The first value without which the class takes the config, as text; all that others need not have, where there is none
    such: they do not go together. build: makes the module of a config."""
    taken = parameters_of(library, class_name)
    own = {k: f"{k} = {shown(v)}" for k, v in config.items() if v != taken.get(k, (None, None))[1]}
    nulls = [said for key, said in own.items() if config[key] is None]  # left out as they are, so that the default counts
    for key, said in own.items():
        try:
            build({other: value for other, value in config.items() if other != key})
        except Exception as error:
            if not raised_by_file(error):
                raise
        else:
            return f" ({', '.join(dict.fromkeys([said, *nulls]))})"
    return f" ({', '.join(own.values())})"


def read_json(path: Path, instead: ComponentConfig | None = None) -> dict[str, Any]:
    """A JSON object, infinities too, which schedulers' configs have. instead: returned where the file is missing; None:
    raise."""
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
    """The pipeline's index in a folder, whether it is there or not."""
    modular = folder / MODULAR_INDEX
    return modular if modular.is_file() and not (folder / INDEX).is_file() else folder / INDEX


def is_whole(names: Container[str], family: Family) -> bool:
    """Whether a folder of these files is a model's, whose parts lie in it."""
    return INDEX in names or (MODULAR_INDEX in names and f"{family.denoiser}/config.json" in names)


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a text encoder, out of that of a whole CLIP or Qwen3-VL, which transformers reads alike."""
    text = config.get("text_config")
    return {**text, **{k: config[k] for k in ("projection_dim",) if k in config}} if isinstance(text, dict) else config


def read_of(family: Family, files: Iterable[str]) -> list[str]:
    """The files of a repository that are read besides weights."""
    configs = [INDEX, MODULAR_INDEX, *(f"{component.name}/config.json" for component in family.components)]
    folders = ("scheduler/", *(f"{name}/" for name in family.files.tokenizers))
    return [path for path in files if path in configs or path.startswith(folders)]


def shards(index: Path) -> list[str]:
    """The files that an index of shards names. Raises UserError for one of another folder, or that is not there."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UserError(f"{index} has no weight_map from tensors to files; {AGAIN}")
    for name in names.values():
        if Path(name).name != name or "\\" in name:
            raise UserError(f"{index} names {name!r}, which is not a file beside it; {AGAIN}")
    if lost := sorted(name for name in set(names.values()) if not (index.parent / name).exists()):
        raise UserError(f"{index} names {shortlist(list(map(repr, lost)), 3)}, and there is no such file beside it; {AGAIN}")
    return sorted(set(names.values()))


@cache
def published_config(labels: tuple[str, ...], component: str) -> dict[str, Any]:
    """A component's config.json in the first of these embedded folders that has one; empty where none has."""
    places = (PUBLISHED / label / component / "config.json" for label in labels)
    return next((text_part(read_json(place)) for place in places if place.is_file()), {})


def described(path: Path, config: ComponentConfig, usual: ComponentConfig) -> str:
    """The file of a component's config, and where it differs from the published one, for weights that it does not fit; "" of
    an embedded one, which nobody gave."""
    if PUBLISHED in path.parents:
        return ""
    odd = [key for key in usual if key in config and config[key] != usual[key] and not NO_SIZE.search(key)]
    values = ", ".join(f"{key} = {shown(config[key])} (there {shown(usual[key])})" for key in odd)
    return f"; the config is {path}" + (f", which differs from the published one: {values}" if odd else "")


@cache
def parameters_of(library: str, class_name: str) -> Mapping[str, tuple[Any, Any]]:
    """(annotation, default) of each value that a class of diffusers or transformers takes from its config; empty where the
    library has no class of that name."""
    cls: Any = getattr(importlib.import_module(library), class_name, None)
    if cls is None:
        return {}
    if library == "transformers":
        own = cls.config_class
        return {field.name: (field.type, getattr(own, field.name, None)) for field in fields(own)}
    hints, signature = get_type_hints(cls.__init__), inspect.signature(cls.__init__).parameters
    return {key: (hints.get(key, Any), each.default) for key, each in signature.items() if each.default is not each.empty}


def as_taken(config: ComponentConfig, taken: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    """The config as a strict class takes it: 1 is 1.0 where that is wanted, and null is left out where it is no value."""
    given = {}
    for key, value in config.items():
        hint, default = taken.get(key, (Any, None))
        if type(value) is int and (hint is float or type(default) is float):
            value = float(value)
        if value is not None or default is None or _fits(None, hint):
            given[key] = value
    return given


def check_values(
    where: Path, config: ComponentConfig, library: str, class_name: object, *, usual: ComponentConfig = {},
    needed: ComponentConfig = {},
) -> None:  # fmt: skip
    """Refuse a value of another kind than both the published model's and what the library's class takes, and a count that
    none can be. usual: the published config. needed: what the family reads, which must not be null."""
    for key, value in config.items():
        wanted = usual.get(key, needed.get(key))
        alike = value in (None, False) if wanted is None else _alike(value, wanted) and _counts(key, value, wanted)
        if key.startswith("_") or (alike and (key in usual or key in needed)):
            continue
        taken = parameters_of(library, class_name) if isinstance(class_name, str) else {}
        hint, default = taken.get(key, (Any, None))
        wanted = default if wanted is None else wanted
        same = type(value) is type(wanted) and value == wanted  # an infinity, too, where the library has it
        if same or (key not in taken and wanted is None):
            continue
        typed = key in taken and hint is not Any  # a class without annotations takes what is like its default
        fits = key not in needed if value is None else _alike(value, wanted) or (typed and _fits(value, hint))
        if not fits or not _counts(key, value, wanted):
            kind = hint.__name__ if isinstance(hint, type) else hint
            should = f"others have {shown(wanted)}" if wanted is not None else f"{kind} is taken"
            raise UserError(f"{where}: {key} = {shown(value)}, where {should}; {RESTORE}")


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number that a float can hold."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is of the annotated type. Libraries annotate lists of any length as tuples of one."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is Literal:
        return value in inner
    if origin in (list, tuple) or hint in (list, tuple):
        among = [each for each in inner if each is not ...]
        return isinstance(value, list) and all(any(_fits(each, one) for one in among) for each in value if among)
    if hint is float:
        return is_number(value)
    if hint in (int, str, bool):
        return type(value) is hint
    return (value is None) == (hint is NoneType) if hint is NoneType or value is None else True


def _counts(key: str, value: Any, wanted: Any) -> bool:
    """Whether whole numbers and lists are below the most, and a count that others have is one: a size, not an id."""
    if isinstance(value, list):
        return bool(value or not wanted) and len(value) < MOST_LAYERS and all(_counts(key, each, wanted) for each in value)
    if isinstance(value, bool) or not isinstance(value, int):
        return True
    most, others = MOST_LAYERS if "layers" in key else MOST, wanted if isinstance(wanted, list) and wanted else [wanted]
    if key.endswith("_id") or not all(type(other) is int and other > 0 for other in others):
        return (0 if wanted is None and not key.endswith("_id") else -MOST) <= value < most
    return 0 < value < most


def _alike(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return isinstance(value, list) and (not wanted or all(_alike(each, wanted[0]) for each in value))
    if isinstance(wanted, float):
        return is_number(value)
    return type(value) is type(wanted)
