"""A file of another trainer, read: whose it is, and its options by name."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomlkit
import yaml
from tomlkit.exceptions import TOMLKitError

from trainer.base.errors import UserError
from trainer.base.text import decoded

# Options by which a config is known as that of a program: one of each group. Of those, no other program has the last group's.
SIGNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "ai-toolkit": (("job",), ("config.process",)),
    "SimpleTuner": (
        ("model_family", "data_backend_config", "lora_type", "base_model_precision", "checkpoint_step_interval",
         "validation_resolution", "validation_guidance", "validation_num_inference_steps", "validation_step_interval",
         "aspect_bucket_alignment", "caption_dropout_probability", "flow_schedule_shift"),
    ),
    "OneTrainer": (("training_method", "base_model_name"), ("model_type", "concept_file_name")),
    "sd-scripts": (
        ("script", "config_file", "network_module", "network_dim", "network_args", "network_weights", "dataset_config",
         "reg_data_dir", "optimizer_type", "max_train_epochs", "output_name", "sample_prompts"),
    ),
}  # fmt: skip
OF_A_WINDOW = ("LoRA_type", "max_resolution")  # names of kohya_ss's own
SCRIPT = re.compile(r"([\w./\\-]*?)(\w*train_network)\.py\b")
VARIABLE = re.compile(r"^[ \t]*(?:export[ \t]+)?(\w+)=('[^']*'|\"[^\"$]*\"|[^\s'\"$]*)[ \t]*$", re.MULTILINE)  # of a shell
PROMPT_FLAG = re.compile(r"\s--?(\w+)\s")


def read(path: Path) -> tuple[str, dict[str, Any]]:
    """(the trainer, its config as a tree) of the file. Raises UserError for one that is nobody's, or cannot be read."""
    tree = read_tree(path)
    names = _names(tree)
    if names.intersection(OF_A_WINDOW):
        raise UserError(
            f"{path}: the settings of kohya_ss's window, which calls options by other names; let it print the training "
            "command, and give a file with that"
        )
    for trainer, groups in SIGNS.items():
        if all(names.intersection(group) for group in groups):
            return trainer, tree
    top = ", ".join(sorted(tree)[:6]) if isinstance(tree, Mapping) and tree else "nothing that has a name"
    hint = ""
    if names >= {"run", "model"}:
        hint = "; it is a config of this program: train with it (train.py --config)"
    elif isinstance(tree, list) or "datasets" in names:
        hint = "; it describes data alone: give the config that names it, and this file as --data"
    raise UserError(f"{path}: no config of sd-scripts, OneTrainer, ai-toolkit or SimpleTuner: it has {top}{hint}")


def _names(tree: Any) -> set[str]:
    """The names of a tree's first two floors, with and without their table."""
    if not isinstance(tree, Mapping):
        return set()
    inner = {f"{name}.{key}" for name, table in tree.items() if isinstance(table, Mapping) for key in table}
    return {*map(str, tree), *inner, *(name.rpartition(".")[2] for name in inner if name.partition(".")[0] != "config")}


def read_text(path: Path) -> str:
    """The text of a file. Raises UserError."""
    if not path.is_file():
        raise UserError(f"{path} {'is a folder' if path.is_dir() else 'is not there'}; give the file of a config")
    try:
        return decoded(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def read_tree(path: Path) -> Any:
    """What a TOML, YAML or JSON file holds, or a command line in a file of any other kind. Raises UserError."""
    text = read_text(path)
    if not text.strip():
        raise UserError(f"{path} is empty; give the file of a config")
    readers = {".toml": _toml, ".yaml": yaml.safe_load, ".yml": yaml.safe_load, ".json": json.loads}
    try:
        tree = _plain(readers.get(path.suffix.lower(), _command_line)(text))
    except (TOMLKitError, yaml.YAMLError, ValueError) as error:
        first = " ".join(str(error).split())
        raise UserError(f"{path} cannot be read: {first}") from error
    except RecursionError as error:
        raise UserError(f"{path} cannot be read: its lists or tables stand too deep in one another") from error
    if isinstance(tree, dict) and "_metadata" in tree and isinstance(tree.get("config"), dict):
        tree = tree["config"]
    if isinstance(tree, dict) and any(str(key).startswith("--") for key in tree):
        return {str(key).lstrip("-"): value for key, value in tree.items()}
    return tree


def _plain(tree: Any) -> Any:
    """The tree with text for its names and for what JSON has no kind of, such as a date."""
    if isinstance(tree, dict):
        return {str(name): _plain(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_plain(value) for value in tree]
    return tree if tree is None or isinstance(tree, (str, int, float)) else str(tree)


def _toml(text: str) -> dict[str, Any]:
    return tomlkit.parse(text).unwrap()


def _command_line(text: str) -> dict[str, Any]:
    """The options of the command that runs a script for networks, by their names. Empty where there is none."""
    joined = re.sub(r"[\\^`][ \t]*\r?\n", " ", text)
    known = {name: value.strip("'\"") for name, value in VARIABLE.findall(joined)}
    for line in joined.splitlines():
        found = SCRIPT.search(line)
        if not found or line.lstrip().startswith("#"):
            continue
        said = re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda name: known.get(name[1] or name[2], name[0]), line[found.end() :])
        options = _options(shlex.split(said, comments=True))
        if unset := [name for name, value in options.items() if "$" in str(value)]:
            raise ValueError(f"--{unset[0]} {options[unset[0]]}: the file does not say what that is; write the value there")
        return {"script": found[2], **options}
    return {}


def _options(words: Sequence[str]) -> dict[str, Any]:
    """`--name value ...` by name; without a value true, with several a list; each a text, as it stands."""
    options: dict[str, Any] = {}
    values: list[Any] = []
    name = ""
    for word in [*words, "--"]:
        if word.startswith("--"):
            if name:
                options[name] = values[0] if len(values) == 1 else values or True
            name, equals, value = word[2:].partition("=")
            values = [value] if equals else []
        elif name:
            values.append(word)
    return options


def literal(word: str) -> Any:
    """A number or a truth value where the word is one, else the word."""
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return word


def find_beside(name: str, config: Path, given: Iterable[Path]) -> Path | None:
    """A file that a config names: one of `given` if it has that name or is alone, else from here, else near the config."""
    given = list(given)
    last = Path(name.replace("\\", "/"))
    named = [path for path in given if path.name == last.name] or (given if len(given) == 1 else [])
    near = [
        last,
        *(folder / last for folder in config.absolute().parents),
        config.parent / last.name,
        config.parent.parent / last.name,
    ]
    return next((path for path in [*named, *near] if path.is_file()), None)


def prompt_line(line: str) -> tuple[str, dict[str, Any]]:
    """(the prompt, its flags by name) of a prompt with flags behind it: `a dog --w 512 --d 7`."""
    text, *parts = PROMPT_FLAG.split(f" {line.strip()} ")
    flags = {flag: value.strip() for flag, value in zip(parts[::2], parts[1::2], strict=True)}
    return text.strip(), {flag: value if flag == "n" else literal(value) for flag, value in flags.items()}
