"""A model's JSON files: read, and refused with the file, the key and the value where they are damaged."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError, one_line
from trainer.base.files import refuse_irregular
from trainer.models.base import Component, Family
from trainer.models.hub import Repository
from trainer.models.names import ComponentConfig

PUBLISHED = Path(__file__).parent / "published"
# What the libraries raise where a value of a config makes no module. They check few values: most fail as whatever computes
# with them. So no code of ours but what infers a config from a file's shapes runs where these are taken for the file's.
UNBUILDABLE = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


@contextmanager
def blamed_on(where: Path | str, component: Component, config: ComponentConfig) -> Iterator[None]:
    """A block in which an error that a value of the config causes is the user's: with the file, and the key where it can
    be told."""
    try:
        yield
    except UserError:
        raise
    except UNBUILDABLE as error:
        said = one_line(error)[:300]
        named = [f"{key} = {value!r}" for key, value in config.items() if isinstance(value, str) and value and value in said]
        what = f"{where} describes no {component.class_name}{f' ({named[0]})' if named else ''}"
        raise UserError(f"{what}: {said}; restore the file, as the model's repository has it") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Unlike `files.read_json` it takes infinities, which schedulers' configs have.

    Raises UserError where the file is missing or holds something else.
    """
    try:
        refuse_irregular(path)
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"{path} does not exist; complete the model folder, or point model.config (or the component's path) to one"
        ) from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(f"{path} is not valid JSON: {reason}; download or copy it again") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path} is not a JSON object; download or copy it again")
    return tree


def read_of(family: Family, repository: Repository) -> list[str]:
    """The files of a repository that are read besides weights."""
    configs = ["model_index.json", *(f"{component.name}/config.json" for component in family.components)]
    folders = ("scheduler/", *(f"{name}/" for name in family.tokenizers))
    return [path for path in repository.files if path in configs or path.startswith(folders)]


def shards(index: Path) -> list[str]:
    """The files that an index of shards names, which lie beside it. Raises UserError for a name of another folder."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UserError(f"{index} has no weight_map from tensors to files; download or copy it again")
    for name in names.values():
        if Path(name).name != name or "\\" in name:
            raise UserError(f"{index} names {name!r}, which is not a file beside it; download or copy it again")
    return sorted(set(names.values()))


@cache
def published_config(labels: tuple[str, ...], component: str) -> dict[str, Any]:
    """A component's config.json in the first of these embedded folders that has one; empty where none has."""
    places = (PUBLISHED / label / component / "config.json" for label in labels)
    return next((read_json(place) for place in places if place.is_file()), {})


def check_values(where: Path | str, config: ComponentConfig, usual: ComponentConfig, needed: ComponentConfig) -> None:
    """Refuse a value of another kind than the published model's, where that has one.

    usual: the published config. needed: what the family reads, which must not be null. A list of values may stand for one.
    """
    for key, value in config.items():
        wanted = usual.get(key, needed.get(key))
        if wanted is None or key.startswith("_"):
            continue
        listed = isinstance(value, list) or not isinstance(needed.get(key), list)
        if (value is None and key in needed) or (value is not None and not (listed and _alike(value, wanted))):
            raise UserError(
                f"{where}: {key} = {_shown(value)}, where others have {_shown(wanted)}; restore the file, as the model's "
                "repository has it"
            )


def _alike(value: Any, wanted: Any) -> bool:
    if isinstance(value, list):
        return not isinstance(wanted, dict) and all(_alike(each, wanted) for each in value)
    if isinstance(wanted, list):
        return not wanted or _alike(value, wanted[0])
    if isinstance(value, float) and not abs(value) < float("inf"):
        return False
    number = isinstance(wanted, int | float) and not isinstance(wanted, bool)
    return isinstance(value, int | float) and not isinstance(value, bool) if number else isinstance(value, type(wanted))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
