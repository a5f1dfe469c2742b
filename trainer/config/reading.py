"""Reads TOML into the config's tables, and writes it back. No other file parses TOML."""

from __future__ import annotations

import hashlib
import re
import tomllib
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainer.base import patterns
from trainer.base.console import without_keys
from trainer.base.errors import UserError
from trainer.base.text import decoded
from trainer.config import mistakes
from trainer.config.keys import drop_removed, flatten
from trainer.config.kinds import expand_home
from trainer.config.tables import Config

ODD_QUOTES = "\u2018\u2019\u201a\u201c\u201d\u201e\u00ab\u00bb\uff02\uff07"
AUTO, LONGEST = "auto", 120  # of run.output_dir: the value, and the most letters of the folder's name
# Prefixes of keys that may differ between two starts of one run; run.name is in the folder's name already.
NO_OTHER_RUN = ("run.name", "run.output_dir", "run.stop_after", "run.lost_after", "checkpoint.", "logging.")
CONFIG_FOLDER = Path(__file__).resolve().parent.parent.parent / "configs"


def load(path: str, overrides: list[str]) -> Config:
    """The config at `path` (or the bare name of a file in configs/) with `table.key=VALUE` overrides. run.output_dir = "auto"
    becomes a folder named by the overrides. Raises UserError for a missing file, bad TOML and what `parse` refuses."""
    tree = read_toml(path, "--config")
    if "variant" in tree:
        raise UserError(f"--config {path}: this compares variants of a config; write --compare {path}")
    before = flatten(tree)
    keys = override(tree, overrides)
    loaded = parse(tree)
    if loaded.run.output_dir != AUTO:
        return loaded
    after = flatten(tree)
    texts = dict(zip(keys, (override.partition("=")[2].strip() for override in overrides), strict=True))
    changed = [key for key in sorted(texts) if before.get(key, AUTO) != after.get(key) and not key.startswith(NO_OTHER_RUN)]
    words = [loaded.run.name, *(f"{key.rpartition('.')[2]}={texts[key]}" for key in changed)]
    name = re.sub(r"[^A-Za-z0-9._=-]+", "_", "-".join(words))
    short = f"{name[:LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return with_values(loaded, {"run.output_dir": f"outputs/{name if len(name) <= LONGEST else short}"})


def read_toml(path: str, option: str) -> dict[str, Any]:
    """The tree of a TOML file. path, option: of the command line; a bare name may be in configs/. Raises UserError."""
    file = Path(expand_home(path, option))
    if not file.exists() and file.name == path and (CONFIG_FOLDER / path).exists():
        file = CONFIG_FOLDER / path
    text = ""
    try:
        text = decoded(file.read_bytes(), utf16=False).lstrip("\ufeff")
        return tomllib.loads(text)
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        compares = option == "--compare"
        names = sorted(p.name for p in CONFIG_FOLDER.glob("*.toml") if p.name.startswith("compare_") == compares)
        paths = {Path(name).stem: name for name in names} | {p.stem: str(p) for p in sorted(file.parent.glob("*.toml"))}
        remedy = "docs/compare.md tells how to write one" if compares else "python train.py --new PHOTOS writes one"
        if near := patterns.near(file.stem, paths, cutoff=0.8):
            remedy = f"did you mean {paths[near]}?"
        raise UserError(f"{option} {path}: {error.strerror}; {remedy}\nin configs/: {', '.join(names)}") from None
    except tomllib.TOMLDecodeError as error:
        kind, remedy = file.suffix[1:].upper(), _remedy(text, error)
        if kind in ("YAML", "YML", "JSON"):
            command = f"python scripts/import_config.py {file}"
            remedy += f"\na config is TOML, not {kind}; {command} makes one of another trainer's"
        raise UserError(f"{option} {path}: not valid TOML: {error}{remedy}") from error
    except ValueError as error:
        raise UserError(f"{option} {path}: {error}") from error


def _remedy(text: str, error: tomllib.TOMLDecodeError) -> str:
    """The remedy for a Windows path in double quotes, and for a word processor's quotes and spaces; else ""."""
    place = re.search(r"at line (\d+)", str(error))
    line = [*text.split("\n"), ""][int(place[1]) - 1] if place else ""
    if path := re.search(r'"([^"]*\\[^"]*)"', line):
        return f"\nwrite that path with /, or in single quotes: '{path[1]}'"
    odd = sorted({char for char in line if char in ODD_QUOTES or not (char.isprintable() or char in "\t\r")})
    names = ", ".join(f"U+{ord(char):04X} ({unicodedata.name(char, 'a control character').lower()})" for char in odd)
    return f"\nthat line has {names}: write plain quotes and spaces" if odd else ""


def parse(tree: dict[str, Any]) -> Config:
    """A checked Config from a plain tree. Raises UserError with one line for each mistake."""
    try:
        return Config.model_validate(drop_removed(tree))
    except ValidationError as error:
        raise UserError(mistakes.explain(error.errors(include_url=False))) from None  # the message has all of it


def literal(value: Any) -> str:
    """A TOML value on one line."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{literal(key)} = {literal(item)}' for key, item in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    import tomli_w

    return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip("\n")


def dumps(config: Config) -> str:
    """The config as TOML, defaults included; optional keys without a value are left out."""
    import tomli_w

    return tomli_w.dumps(tree(config))


def read_resolved(path: Path) -> dict[str, Any]:
    """The plain tree of a run's `config.toml`. Raises UserError if it is damaged."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); restore it, or choose another run.output_dir") from error


def tree(config: Config) -> dict[str, Any]:
    """The config as a plain tree of TOML values, defaults included; optional keys without a value are left out."""
    return config.model_dump(exclude_none=True, mode="json", by_alias=True)


def override(tree: dict[str, Any], overrides: Iterable[str]) -> list[str]:
    """Apply --set overrides to a tree in place; returns their keys. Raises UserError for one that is no `table.key=VALUE`."""
    return [_apply(tree, text, f"--set {without_keys(repr(text))}") for text in overrides]


def _apply(tree: dict[str, Any], override: str, option: str) -> str:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise UserError(f"{option}: write it as table.key=VALUE, for example --set run.seed=3")
    remove = not text.strip()
    try:
        value = None if remove else tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError as error:
        value = text.strip()  # a bare word is a string
        remedy = _remedy(text, error)
        if remedy or (len(value) > 1 and value[0] == value[-1] == '"'):
            raise UserError(f"{option}: not valid TOML: {error}{remedy}") from error
    *tables, last = key.strip().split(".")
    node: Any = tree
    for part in tables:
        node = _child(node, part, option)
    if isinstance(node, list):
        _child(node, last, option)
        node[int(last)] = value
    elif remove:
        node.pop(last, None)
    else:
        node[last] = value
    return key.strip()


def _child(node: Any, part: str, option: str) -> Any:
    if isinstance(node, dict):
        child = node.setdefault(part, {})
        if not isinstance(child, (dict, list)):
            raise UserError(f"{option}: {part!r} is a value, not a table")
        return child
    if not part.isdigit() or int(part) >= len(node):
        raise UserError(f"{option}: {part!r} is not an index into a list of {len(node)}")
    return node[int(part)]


def with_values(config: Config, keys: Mapping[str, Any]) -> Config:
    """The config with other values for keys `table.key`; unchecked."""
    for key, value in keys.items():
        table, name = key.split(".")
        config = config.model_copy(update={table: getattr(config, table).model_copy(update={name: value})})
    return config
