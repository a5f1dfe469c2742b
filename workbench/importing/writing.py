"""Checks a translated config against the keys that exist here, and writes it with a reason on every line."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path, PurePath
from typing import Any

import tomlkit

from trainer import config as configs
from trainer.base import other_trainers
from trainer.base.console import printable
from trainer.base.errors import UserError
from trainer.base.files import write_atomic
from trainer.base.tensorfile import PICKLES, is_safetensors
from trainer.config import Config
from trainer.models import FAMILIES
from trainer.plan import optimizer_rules
from trainer.plan.requirements import unread_keys
from workbench.importing import ai_toolkit, common, onetrainer, sd_scripts, simpletuner
from workbench.importing.catalogues import facts
from workbench.importing.draft import ABSENT, DIFFERS, FILL, Draft, Line, Options, nested
from workbench.importing.reading import read

TRANSLATIONS = {"sd-scripts": sd_scripts, "OneTrainer": onetrainer, "ai-toolkit": ai_toolkit, "SimpleTuner": simpletuner}
SET = "as --set said"
COMMENT_AT = 40  # the column where a short line's reason begins


def import_config(
    file: Path, out: Path | None, *, data: Sequence[Path] = (), overrides: Sequence[str] = ()
) -> tuple[Path, Draft]:
    """Translate `file`, another trainer's config; returns the new config's path and the draft with its notes.

    out: None writes NAME.toml here, NAME the run's. data: files of its photos or samples that are not where it says.
    overrides: of --set. Raises UserError, with nothing written, for a file of no known trainer, for a config that would train
    something else here, and if `out` exists.
    """
    if missing := [path for path in data if not path.is_file()]:
        raise UserError(f"--data {missing[0]}: there is no such file")
    draft = draft_of(file, data=data, overrides=overrides)
    config = config_of(draft, file)
    note_missing(draft, config)
    path = out or Path(f"{config.run.name}.toml")
    if path.exists():
        raise UserError(f"{path} is there; give another file as --out, or move it out of the way")
    write_atomic(path, [text_of(draft, file).encode()])
    return path, draft


def draft_of(file: Path, *, data: Sequence[Path] = (), overrides: Sequence[str] = ()) -> Draft:
    """The draft of a file. Raises UserError with all refusals in one message."""
    trainer, program, options = read(file)
    values: dict[str, Any] = {}
    for override in overrides:
        tree: dict[str, Any] = {}
        (key,) = configs.override(tree, [override])
        *tables, last = key.split(".")
        values[key] = reduce(lambda node, part: node[part], tables, tree).get(last)
    draft = Draft(trainer, program, values)
    TRANSLATIONS[trainer].translate(draft, Options(options, file, facts().defaults[trainer]), file, data)
    common.note_differences(draft)
    if draft.refusals:
        raise UserError(f"{file} ({trainer}) cannot be brought along:\n" + "\n".join(f"  {text}" for text in draft.refusals))
    for entry in (draft.keys, *(entry for entries in draft.lists.values() for entry in entries)):
        entry |= {key: (common.local_value(key, value), reason) for key, (value, reason) in entry.items()}
    common.suit_optimizer(draft)
    _override(draft)
    return draft


def note_missing(draft: Draft, config: Config) -> None:
    """Note the files and folders in the config that are not on this machine."""
    for key, value in configs.flatten(configs.tree(config)).items():
        if not isinstance(value, str) or not common.is_path(key) or os.path.exists(value):
            continue
        place = PurePath(value)
        if place.suffix.lower() in PICKLES:
            draft.note(FILL, f"{key}: {value}: a pickle, which is not read here; save it as .safetensors")
        if key == "run.output_dir":
            if place.parts[:2] == ("/", "mnt") and not Path(*place.parts[:3]).exists():
                draft.note(FILL, f"{key}: {value}: there is no {Path(*place.parts[:3])} here")
        elif key != "model.path" or place.is_absolute() or is_safetensors(place) or len(place.parts) != 2:
            draft.note(FILL, f"{key}: {value} is not on this machine")


def _override(draft: Draft) -> None:
    for key, value in draft.overrides.items():
        parts = key.split(".")
        if key.startswith("data.sources.") and len(parts) == 4:
            if not parts[2].isdigit() or int(parts[2]) >= len(draft.sources):
                raise UserError(f"--set {key}: there are {len(draft.sources)} sources, from data.sources.0 on")
            draft.sources[int(parts[2])][parts[3]] = (value, SET)
        elif value is None:
            draft.keys.pop(key, None)
        else:
            draft.keys[key] = (value, SET)
    if "validation.prompts" in draft.overrides:
        draft.samples.clear()
    lengths = {"run.max_steps", "run.epochs"} & draft.overrides.keys()
    if len(lengths) == 1:
        draft.keys.pop(({"run.max_steps", "run.epochs"} - lengths).pop(), None)


def config_of(draft: Draft, file: Path) -> Config:
    """The draft's config; keys without an effect are removed from the draft, with a note. Raises UserError."""
    for _ in range(len(draft.keys)):
        try:
            config = configs.parse(tree_of(draft))
            optimizer_rules.check(config)
        except UserError as error:
            raise UserError(f"{file} ({draft.trainer}) gives a config that is refused here:\n{error}") from error
        if not _remove_unread(draft, config):
            return config
    raise AssertionError("every pass removes a key")


def _remove_unread(draft: Draft, config: Config) -> bool:
    """Remove keys that nothing reads; returns whether there were any."""
    unread = unread_keys(config, FAMILIES[config.model.family])
    before = sum(map(len, (draft.keys, *draft.sources, *draft.samples)))
    for key, lack in sorted(unread.items()):
        for name in [name for name in draft.keys if configs.generic(name) == configs.generic(key)]:
            value, reason = draft.keys.pop(name)
            if reason == SET:
                raise UserError(f"--set {name}={value}: it has no effect {lack}")
            draft.note(ABSENT, f"{reason}: {name} has no effect {lack.partition(';')[0]}")
        for name, entries in draft.lists.items():
            table, _, last = key.rpartition(".")
            for place, entry in enumerate(entries):
                if table in (f"{name}.*", f"{name}.{place}") and last in entry:
                    _, reason = entry.pop(last)
                    draft.note(ABSENT, f"{reason}: {last} has no effect {lack.partition(';')[0]}")
    return sum(map(len, (draft.keys, *draft.sources, *draft.samples))) < before


def tree_of(draft: Draft) -> dict[str, Any]:
    """The draft's values as a tree."""
    tree: dict[str, Any] = {key: value for key, (value, _) in draft.keys.items()}
    for name, entries in draft.lists.items():
        tree |= {name: [{key: value for key, (value, _) in entry.items()} for entry in entries]} if entries else {}
    return nested(tree)


def text_of(draft: Draft, file: Path) -> str:
    """The draft as TOML: notes at its head, and a reason behind each line."""
    commit = other_trainers.tables().commits[draft.trainer]
    lines = [
        f"# Made of {printable(os.fspath(file))} ({draft.program}) by scripts/import_config.py.",
        "# The reason of each line stands behind it.",
        f"# Names: {draft.trainer} {commit}. Its defaults: {facts().defaults_at[draft.trainer]}.",
        "# All other keys have their defaults; docs/keys.md has every key.",
    ]
    names, reasons = facts().unlooked_defaults[draft.trainer].split(), "\n".join(reason for _, reason in draft.keys.values())
    if unlooked := [name for name in names if re.search(rf"(^|\s){name} is left out", reasons)]:
        draft.note(DIFFERS, f"from the documentation, not looked up, are the defaults there of {', '.join(unlooked)}")
    for heading, notes in draft.notes.items():
        if notes:
            lines += ["#", f"# {heading}:", *(f"# - {printable(note)}" for note in notes)]
    tables: dict[str, dict[str, Line]] = {}
    for key, line in draft.keys.items():
        table, _, last = key.rpartition(".")
        tables.setdefault(table, {})[last] = line
    for top in Config.model_fields:
        for table in [name for name in tables if name.partition(".")[0] == top]:
            lines += ["", f"[{table}]", *_lines(tables[table])]
        for name, entries in draft.lists.items():
            if name.partition(".")[0] == top:
                for entry in entries:
                    lines += ["", f"[[{name}]]", *_lines(entry)]
    return "\n".join(lines) + "\n"


def _lines(table: Mapping[str, Line]) -> list[str]:
    lines = [(f"{key} = {tomlkit.item(value).as_string()}", reason) for key, (value, reason) in table.items()]
    width = max([len(line) for line, _ in lines if len(line) < COMMENT_AT] + [0])
    return [f"{line:<{width}}  # {printable(reason)}" for line, reason in lines]
