"""Reads another trainer's file: which program wrote it, and its options by name."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import tomlkit
import yaml

from trainer.base.errors import UserError, reading
from trainer.base.text import decoded
from workbench.importing import kohya_gui
from workbench.importing.catalogues import programs
from workbench.importing.command_line import command_options, variables

# Options that identify a program's config: one of each group. No other program has the last group's.
SIGNS: dict[str, list[list[str]]] = programs()["signs"]
WINDOW = {"LoRA_type", "max_resolution"}  # options of kohya_ss's window alone
WINDOWS_PATH = re.compile(r'"[A-Za-z]:\\(?![\\/])[^"\n]*"')
READERS: dict[str, Callable[[str], Any]] = {
    ".toml": lambda text: tomlkit.parse(text).unwrap(), ".yaml": yaml.safe_load, ".yml": yaml.safe_load, ".json": json.loads
}  # fmt: skip
VALUES = 100_000  # limit for a tree: a few anchors of YAML can expand to any number
LETTERS = 100_000  # limit for a script with a command
PROMPT_FLAG = re.compile(r"\s--?(\w+)\s")


def read(path: Path) -> tuple[str, str, dict[str, Any]]:
    """(the trainer, the program that wrote the file, the trainer's config as a tree). Raises UserError for other files."""
    tree = read_tree(path)
    names = _names(tree)
    if names & WINDOW:
        with reading(path, "additional_parameters", remedy="correct it in the file"):
            return "sd-scripts", "kohya_ss's window, which starts sd-scripts", kohya_gui.as_options(tree)
    for trainer, row in programs()["refused"].items():
        if len(names.intersection(row["names"].split())) > 1:
            raise UserError(f"{path}: a config of {trainer}, which is not read here; {row['go on']}")
    for trainer, groups in SIGNS.items():
        if all(names.intersection(group) for group in groups):
            return trainer, trainer, tree
    words = ", ".join(sorted(tree)[:6]) if isinstance(tree, Mapping) and tree else "nothing that has a name"
    if names >= {"run", "model"}:
        words += "; it is a config of this program: train with it (train.py --config)"
    elif isinstance(tree, list) or "datasets" in names:
        words += "; it describes data alone: give the config that names it, and this file as --data"
    raise UserError(f"{path}: no config of sd-scripts, OneTrainer, ai-toolkit or SimpleTuner: it has {words}")


def _names(tree: Any) -> set[str]:
    """The names in a tree's first two levels, with and without their table."""
    if not isinstance(tree, Mapping):
        return set()
    inner = {f"{name}.{key}" for name, table in tree.items() if isinstance(table, Mapping) for key in table}
    return {*map(str, tree), *inner, *(name.rpartition(".")[2] for name in inner if name.partition(".")[0] != "config")}


def read_text(path: Path) -> str:
    """The text of a file. Raises UserError."""
    if not path.is_file():
        raise UserError(f"{path} {'is a folder' if path.is_dir() else 'is not there'}; give the file of a config")
    with reading(path, remedy=""):
        return decoded(path.read_bytes()).replace("\r\n", "\n").replace("\r", "\n")


def read_tree(path: Path) -> Any:
    """The content of a TOML, YAML or JSON file, or of a command line in any other file. Raises UserError."""
    text = read_text(path)
    if not text.strip():
        raise UserError(f"{path} is empty; give the file of a config")
    reader = READERS.get(path.suffix.lower())
    with reading(path, remedy="correct it in the file"):
        try:
            # A path of Windows whose backslashes are not doubled means them literally.
            escaped = WINDOWS_PATH.sub(lambda match: match[0].replace("\\", r"\\"), text)
            if reader is not None:
                tree = _plain(reader(escaped), count())
            elif len(text) > LETTERS:
                raise ValueError(f"{len(text):,} letters, and {LETTERS:,} are the most of a script")
            else:
                tree = command_options(text, path) or dict.fromkeys(variables(text), "")
        except RecursionError as error:
            raise ValueError("its lists or tables stand too deep in one another") from error
    if isinstance(tree, dict) and "_metadata" in tree and isinstance(tree.get("config"), dict):
        tree = tree["config"]
    if isinstance(tree, dict) and any(str(key).startswith("--") for key in tree):
        return {str(key).lstrip("-"): value for key, value in tree.items()}
    return tree


def _plain(tree: Any, counter: Iterator[int]) -> Any:
    """The tree with names and values that JSON lacks as text. counter: of its values, up to VALUES."""
    if next(counter) >= VALUES:
        raise ValueError(f"it holds more than {VALUES:,} values")
    if isinstance(tree, dict):
        return {str(name): _plain(value, counter) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_plain(value, counter) for value in tree]
    return tree if tree is None or isinstance(tree, (str, int, float)) else str(tree)


def literal(word: str) -> Any:
    """A number or truth value if the word is one, else the word."""
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return word


def as_number(value: Any) -> int | float | None:
    """A finite number, also from text; None for other values."""
    number = literal(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not abs(number) <= sys.float_info.max:
        return None
    return number


def as_share(value: Any) -> float | None:
    """N / 100 for the text `N%`; None for other values."""
    number = as_number(value[:-1]) if isinstance(value, str) and value.endswith("%") else None
    return None if number is None else number / 100


def local_path(path: str) -> str:
    """A Windows path as WSL has it: `C:\\a` is /mnt/c/a, other places are below /mnt. On Windows every path stays."""
    path = path.strip().strip("\"'").removeprefix("file:///")
    if os.name == "nt" or os.path.exists(path):
        return path
    slashed = re.sub(r"^//[?.]/(?:UNC(?=/))?", "", path.replace("\\", "/"))
    if drive := re.match(r"([A-Za-z]):/*(.*)", slashed):
        return f"/mnt/{drive[1].lower()}/{drive[2]}".rstrip("/")
    if share := re.match(r"//+(wsl\$|wsl\.localhost)/[^/]+(/.*)", slashed, re.I):
        return share[2]
    if slashed.startswith("//") or path.startswith("\\"):
        return f"/mnt/{slashed.lstrip('/')}"
    return f"~{slashed[13:]}" if slashed.upper().startswith("%USERPROFILE%") else slashed


def find_beside(name: str, config: Path, data: Iterable[Path]) -> Path | None:
    """A file that a config names: one of `data` if it has that name or is alone, else from here, else near the config."""
    data, last, folder = list(data), Path(local_path(name)), config.parent
    matches = [path for path in data if path.name == last.name] or (data if len(data) == 1 else [])
    above = [parent / last for parent in config.absolute().parents]
    near = [last, *above, folder / last.name, folder.parent / last.name]
    return next((path for path in [*matches, *near] if path.is_file()), None)


def prompt_line(line: str) -> tuple[str, dict[str, Any]]:
    """(prompt, flags by name) of a line such as `a dog --w 512 --d 7`."""
    text, *parts = PROMPT_FLAG.split(f" {line.strip()} ")
    flags = {flag: value.strip() for flag, value in zip(parts[::2], parts[1::2], strict=True)}
    return text.strip(), {flag: value if flag == "n" else literal(value) for flag, value in flags.items()}
