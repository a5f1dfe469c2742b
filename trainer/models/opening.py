"""From `model.path` to a ModelSource: a diffusers folder, a single file, or a hub id."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trainer.base.console import shortlist
from trainer.base.errors import UserError
from trainer.base.protocols import Hub, Repository
from trainer.base.tensorfile import PICKLES, TensorFile, is_safetensors, refuse_other_format
from trainer.base.types import Recognised
from trainer.models import kinds, variants
from trainer.models.base import Family
from trainer.models.config_files import PUBLISHED, is_whole, read_json, read_of
from trainer.models.loading import ModelSource
from trainer.models.weight_sets import ANY, PLAIN, SHARD, Wanted
from trainer.models.weights import Recognise


def open_model(
    family: Family,
    path: str,
    *,
    hub: Hub | None = None,
    config: str | None = None,
    component_paths: Mapping[str, str] = {},
    wanted: Wanted = ANY,
    recognise: Recognise = lambda entries: Recognised({}, frozenset()),
) -> ModelSource:
    """Resolve `path`: a diffusers folder, a single .safetensors file, or else a hub id, whose configs and tokenizers are
    downloaded; if that fails, a published model's embedded configs are taken.

    hub: lists a hub id's files; None: a hub id is refused. config: a folder of component configs, scheduler and tokenizers
    for a single file; None: the folder beside the file with its stem as name, else the published models' embedded configs.
    recognise: finds the weights that a file holds quantised (quantization.recognise).
    """
    overrides = {name: Path(value) for name, value in component_paths.items()}
    for name, override in overrides.items():
        if not override.exists():
            raise UserError(f"model.components.{name}.path = {str(override)!r} does not exist")
        _refuse_file(f"model.components.{name}.path", override)
    local = Path(path)
    _refuse_file("model.path", local)
    if wanted.variant in family.variants.every:
        wanted = replace(wanted, variant=None, distillation=wanted.variant)
    opened = partial(ModelSource, family, recognise=recognise, overrides=overrides, wanted=wanted)
    if config and not local.is_file():
        raise UserError(f"model.config = {config!r} belongs to a single file; {path!r} brings its own configs, leave it out")
    if wanted.revision and local.exists():
        raise UserError(
            f"model.revision = {wanted.revision!r} belongs to a hub id; model.path = {path!r} is here, leave it out"
        )
    if local.is_dir():
        source = _of_folder(opened, family, path)
    elif local.is_file():
        source = _of_file(opened, family, path, config)
    else:
        _check_hub_id(path, family)
        if hub is None:
            raise UserError(
                f"model.path = {path!r} is no local file or folder; a hub id is read by 'hub', a part that this run was "
                "opened without; from Python give all parts: from workbench import PORTS, Session.open(config, ports=PORTS); "
                "or give a diffusers folder or a .safetensors file"
            )
        source = _of_repository(opened, family, path, hub.list_repository(path, wanted.revision))
    _check_variant(source, path)
    return source


def _of_folder(opened: Callable[..., ModelSource], family: Family, path: str) -> ModelSource:
    local = Path(path)
    files = {str(path.relative_to(local)) for path in (*local.glob("*.json"), *local.glob("*/config.json"))}
    if not is_whole(files, family):
        content = kinds.instead_of_a_model(os.listdir(local), lambda name: read_json(local / name))
        raise UserError(f"model.path = {path!r} is not a diffusers folder (no model_index.json); {content}")
    kinds.refuse_other(f"model.path = {path!r}", family.name, kinds.kind_of_folder(local))
    return opened(root=local)


def _of_file(opened: partial[ModelSource], family: Family, path: str, config: str | None) -> ModelSource:
    local = Path(path)
    file = TensorFile(local)
    kinds.refuse_other(f"model.path = {path!r}", family.name, kinds.kind_of(file.shapes))
    root = Path(config) if config else local.with_suffix("")
    if config and not root.is_dir():
        raise UserError(f"model.config = {config!r} is not a folder")
    place = variants.place_of(root, root.name, None, file, embedded=not root.is_dir())
    variant = variants.variant_of(family, opened.keywords["wanted"].distillation, place)
    label = None if config else family.files.published(set(file.entries), variant.name)
    published = PUBLISHED / label if label else None
    if not root.is_dir() and published is None:
        raise UserError(f"model.path = {path!r}: no configs of {family.name} are embedded; give them with model.config")
    return opened(root=root if root.is_dir() else published, single_file=file, published=published)


def _check_hub_id(path: str, family: Family) -> None:
    """Refuse the path of a missing file or folder."""
    local = Path(path)
    no_id = is_safetensors(local) or path.count("/") != 1 or path.startswith((".", "/"))
    if no_id or (local.parent.is_dir() and path not in family.files.hub_ids):
        hint = "give a diffusers folder, a .safetensors file or a hub id"
        if local.parent.is_dir() and local.parent != Path():
            names = shortlist(sorted(entry.name for entry in local.parent.iterdir()), 5) or "nothing"
            hint = f"the folder {str(local.parent)!r} holds {names}"
            hint += "" if no_id else ". The hub is not asked for a name that begins with a folder here"
        raise UserError(f"model.path = {path!r} does not exist; {hint}")


def _of_repository(opened: Callable[..., ModelSource], family: Family, path: str, repository: Repository) -> ModelSource:
    embedded = None
    if repository.files and not is_whole(repository.files, family):

        def read(name: str) -> dict[str, Any]:
            try:
                return read_json(repository.fetch([name]) / name)
            except UserError:  # behind a licence, for one: to accept it would not help
                return {}

        content = kinds.instead_of_a_model(repository.files, read, on_the_hub=True)
        raise UserError(
            f"model.path = {path!r}: this repository is not in diffusers' layout (no model_index.json); {content}"
        )
    try:
        root = repository.fetch(read_of(family, repository.files))
    except UserError as error:
        if path not in family.files.hub_ids:
            raise
        root, embedded = PUBLISHED / family.files.hub_ids[path], str(error)
    kinds.refuse_other(f"model.path = {path!r}", family.name, kinds.kind_of_folder(root))
    source = opened(root=root, repository=repository, fetched=False, embedded=embedded)
    unlisted = any(source.unlisted(component.name) for component in family.components)
    fetched = embedded is None and not unlisted and not repository.missing(source.weight_names())
    return replace(source, fetched=fetched)


def _check_variant(source: ModelSource, path: str) -> None:
    variant = source.wanted.variant
    if variant is None:
        return
    choices = [source.weight_choice(component.name) for component in source.family.components]
    variants_there = [choice.files.variant for choice in choices if choice is not None]
    listed = source.repository is None or source.repository.unreachable is None
    if listed and (None if variant == PLAIN else variant) not in variants_there:
        names = "diffusion_pytorch_model.VARIANT.safetensors, model.VARIANT.safetensors"
        raise UserError(f"model.variant = {variant!r}: no component of {path!r} has such files ({names}); leave it out")


def _refuse_file(key: str, path: Path) -> None:
    """Refuse a file that is not named as safetensors, or is one of several shards."""
    if path.is_file() or path.suffix.lower() in PICKLES:
        refuse_other_format(key, path)
    if (match := SHARD.search(path.stem)) and int(match[2]) > 1 and path.is_file():
        remedy = "the folder of all shards, their index and config.json in model.components.NAME.path"
        which = f"shard {int(match[1])} of {int(match[2])} alone"
        raise UserError(f"{key} = {str(path)!r} is {which}; give the whole diffusers folder, or {remedy}")
