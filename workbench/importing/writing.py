"""The draft of a translated config, checked against the keys that there are, and as text with a reason on every line."""

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
    """Write the config that `file` of another trainer becomes, and return its path and the draft with its notes.

    out: None writes NAME.toml here, NAME the run's. data: the files of its photos or samples, where they do not lie where it
    says. overrides: as of --set. Raises UserError, with nothing written, for a file of no trainer that is known, for what
    would train something else here, and where `out` is there.
    """
    if missing := [path for path in data if not path.is_file()]:
        raise UserError(f"--data {missing[0]}: there is no such file")
    draft = drafted(file, data=data, overrides=overrides)
    config = checked(draft, file)
    note_missing(draft, config)
    path = out or Path(f"{config.run.name}.toml")
    if path.exists():
        raise UserError(f"{path} is there; give another file as --out, or move it out of the way")
    write_atomic(path, [text_of(draft, file).encode()])
    return path, draft


def drafted(file: Path, *, data: Sequence[Path] = (), overrides: Sequence[str] = ()) -> Draft:
    """The draft of a file. Raises UserError for all that cannot be done, in one message."""
    trainer, program, tree = read(file)
    fixed: dict[str, Any] = {}
    for override in overrides:
        one: dict[str, Any] = {}
        (key,) = configs.override(one, [override])
        *tables, last = key.split(".")
        fixed[key] = reduce(lambda node, part: node[part], tables, one).get(last)
    draft = Draft(trainer, program, fixed)
    TRANSLATIONS[trainer].translate(draft, Options(tree, file, facts().defaults[trainer]), file, data)
    common.note_differences(draft)
    if draft.refusals:
        raise UserError(f"{file} ({trainer}) cannot be brought along:\n" + "\n".join(f"  {each}" for each in draft.refusals))
    for entry in (draft.keys, *(entry for entries in draft.lists.values() for entry in entries)):
        entry |= {key: (common.place_here(key, value), why) for key, (value, why) in entry.items()}
    common.suit_optimizer(draft)
    _fix(draft)
    return draft


def note_missing(draft: Draft, config: Config) -> None:
    """Say which files and folders that the config names are not on this machine."""
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


def _fix(draft: Draft) -> None:
    for key, value in draft.fixed.items():
        parts = key.split(".")
        if key.startswith("data.sources.") and len(parts) == 4:
            if not parts[2].isdigit() or int(parts[2]) >= len(draft.sources):
                raise UserError(f"--set {key}: there are {len(draft.sources)} sources, from data.sources.0 on")
            draft.sources[int(parts[2])][parts[3]] = (value, SET)
        elif value is None:
            draft.keys.pop(key, None)
        else:
            draft.keys[key] = (value, SET)
    if "validation.prompts" in draft.fixed:
        draft.samples.clear()
    lengths = {"run.max_steps", "run.epochs"} & draft.fixed.keys()
    if len(lengths) == 1:
        draft.keys.pop(({"run.max_steps", "run.epochs"} - lengths).pop(), None)


def checked(draft: Draft, file: Path) -> Config:
    """The config of the draft, out of which it takes what has no effect here, and says so. Raises UserError."""
    for _ in range(len(draft.keys)):
        try:
            config = configs.parse(tree_of(draft))
            optimizer_rules.check(config)
        except UserError as error:
            raise UserError(f"{file} ({draft.trainer}) gives a config that is refused here:\n{error}") from error
        if not _take_out(draft, config):
            return config
    raise AssertionError("every pass takes out a key")


def _take_out(draft: Draft, config: Config) -> bool:
    """Remove what nothing reads; whether there was such a thing."""
    unread = unread_keys(config, FAMILIES[config.model.family])
    before = sum(map(len, (draft.keys, *draft.sources, *draft.samples)))
    for key, lack in sorted(unread.items()):
        for kept in [name for name in draft.keys if configs.generic(name) == configs.generic(key)]:
            value, why = draft.keys.pop(kept)
            if why == SET:
                raise UserError(f"--set {kept}={value}: it has no effect {lack}")
            draft.note(ABSENT, f"{why}: {kept} has no effect {lack.partition(';')[0]}")
        for name, entries in draft.lists.items():
            table, _, last = key.rpartition(".")
            for place, entry in enumerate(entries):
                if table in (f"{name}.*", f"{name}.{place}") and last in entry:
                    _, why = entry.pop(last)
                    draft.note(ABSENT, f"{why}: {last} has no effect {lack.partition(';')[0]}")
    return sum(map(len, (draft.keys, *draft.sources, *draft.samples))) < before


def tree_of(draft: Draft) -> dict[str, Any]:
    """The draft as the plain tree of its values."""
    tree: dict[str, Any] = {key: value for key, (value, _) in draft.keys.items()}
    for name, entries in draft.lists.items():
        tree |= {name: [{key: value for key, (value, _) in entry.items()} for entry in entries]} if entries else {}
    return nested(tree)


def text_of(draft: Draft, file: Path) -> str:
    """The draft as TOML: what is to be known of it as a whole at its head, and each line's reason behind it."""
    known = facts()
    commit = other_trainers.tables().commits[draft.trainer]
    lines = [
        f"# Made of {printable(os.fspath(file))} ({draft.program}) by scripts/import_config.py.",
        "# The reason of each line stands behind it.",
        f"# Names: {draft.trainer} {commit}. Its defaults: {known.defaults_at[draft.trainer]}.",
        "# All other keys have their defaults; docs/keys.md has every key.",
    ]
    names, reasons = known.unlooked_defaults[draft.trainer].split(), "\n".join(why for _, why in draft.keys.values())
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
    written = [(f"{key} = {tomlkit.item(value).as_string()}", why) for key, (value, why) in table.items()]
    width = max([len(line) for line, _ in written if len(line) < COMMENT_AT] + [0])
    return [f"{line:<{width}}  # {printable(why)}" for line, why in written]
