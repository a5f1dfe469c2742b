"""From TOML to the tables and back. The only file that knows TOML.

What can be said without looking at a model is refused here, with the key's full name, the offending value and, for a near
miss, the key that was probably meant.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from trainer.config.tables import Config, Table, expand_home
from trainer.errors import UserError

CONFIG_FOLDER = Path(__file__).resolve().parent.parent.parent / "configs"


def load(path: str, overrides: list[str]) -> Config:
    """Read the config at `path` (or the bare name of a file in configs/) and apply `table.key=VALUE` overrides.

    Raises UserError for a missing file, bad TOML, an unknown key, a wrong type or an impossible combination.
    """
    file = Path(expand_home(path, "--config"))
    if not file.exists() and file.name == path and (CONFIG_FOLDER / path).exists():
        file = CONFIG_FOLDER / path
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        known = ", ".join(sorted(p.name for p in CONFIG_FOLDER.glob("*.toml")))
        raise UserError(f"--config {path}: {error.strerror}. Files in configs/: {known}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--config {path}: not UTF-8 at byte {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"--config {path}: not valid TOML: {error}") from error
    for override in overrides:
        _apply(tree, override)
    return parse(tree)


def parse(tree: dict[str, Any]) -> Config:
    """A checked Config from a plain tree. Raises UserError with one line for each mistake."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        items = error.errors(include_url=False)
        # A list whose items are refused is told as too short, too.
        inner = {item["loc"][:size] for item in items for size in range(len(item["loc"]))}
        lines = [_explain(item) for item in items if not (item["type"] == "too_short" and item["loc"] in inner)]
        raise UserError("\n".join(dict.fromkeys(lines))) from error


def dumps(config: Config) -> str:
    """The resolved config as TOML: every default written out, optional keys without a value left out."""
    import tomli_w

    return tomli_w.dumps(tree(config))


def read_resolved(path: Path) -> dict[str, Any]:
    """The plain tree of a `config.toml` that a run wrote. Raises UserError if it was damaged."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); restore it, or choose another run.output_dir") from error


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{'a': {'b': [1]}} -> {'a.b.0': 1}; empty tables and lists are kept as values."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    flat = {k: v for key, value in items for k, v in flatten(value, f"{prefix}{key}.").items()}
    return flat if flat or not prefix else {prefix[:-1]: tree}


def tree(config: Config) -> dict[str, Any]:
    """The resolved config as a plain tree of TOML values, optional keys without a value left out."""
    return config.model_dump(exclude_none=True, mode="json")


def _apply(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise UserError(f"--set {override!r}: write it as table.key=VALUE, for example --set run.seed=3")
    remove = not text.strip()
    try:
        value = None if remove else tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string
    *tables, last = key.strip().split(".")
    node: Any = tree
    for part in tables:
        node = _child(node, part, override)
    if isinstance(node, list):
        _child(node, last, override)
        node[int(last)] = value
    elif remove:
        node.pop(last, None)
    else:
        node[last] = value


def _child(node: Any, part: str, override: str) -> Any:
    if isinstance(node, dict):
        child = node.setdefault(part, {})
        if not isinstance(child, (dict, list)):
            raise UserError(f"--set {override!r}: {part!r} is a value, not a table")
        return child
    if not part.isdigit() or int(part) >= len(node):
        raise UserError(f"--set {override!r}: {part!r} is not an index into a list of {len(node)}")
    return node[int(part)]


def _explain(item: Any) -> str:
    """One pydantic error as one line: full key, value, remedy."""
    key = ".".join(str(part) for part in item["loc"] if not _is_union_tag(str(part)))
    if item["type"] == "extra_forbidden":
        meant = near_miss(key)
        return f"unknown key {key}" + (f"; did you mean {meant}?" if meant else "; see configs/ for the keys there are")
    if item["type"] == "missing":
        return f"{key} is required"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error" and isinstance(item["input"], dict):  # of a table: it names the keys itself
        return message
    return f"{key} = {item['input']!r}: {message[0].lower()}{message[1:]}"


def _is_union_tag(part: str) -> bool:
    # pydantic names the tried member of a union in the location: 'bool', 'constrained-int', "literal['auto']", ...
    return part in ("bool", "int", "float", "str") or "[" in part or part.startswith("constrained-") or "(" in part


def near_miss(key: str) -> str | None:
    """The known key that `key` was probably meant to be, or None."""
    table, _, leaf = key.rpartition(".")
    known = list(known_keys())
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == generic(table)}
    close = difflib.get_close_matches(leaf, list(siblings), n=1, cutoff=0.6)
    if close:
        return f"{table}.{close[0]}" if table else close[0]
    # The right key in the wrong table, or a misspelt table.
    by_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    close = difflib.get_close_matches(generic(key), by_leaf or known, n=1, cutoff=0.0 if by_leaf else 0.75)
    return close[0] if close else None


def generic(key: str) -> str:
    """`key` with list items and component names written as '*'."""
    parts = ["*" if part.isdigit() else part for part in key.split(".")]
    if parts[:2] == ["model", "components"] and len(parts) > 2:
        parts[2] = "*"
    return ".".join(parts)


def known_keys(table: type[Table] | None = None, prefix: str = "") -> dict[str, Any]:
    """Every key of the contract (or of one table in it), as `generic` writes it, and its default."""
    keys = {}
    for name, field in (table or Config).model_fields.items():
        keys[prefix + name] = field.default
        for nested in _tables_in(field.annotation):
            repeated = nested is not field.annotation
            keys |= known_keys(nested, f"{prefix}{name}." + ("*." if repeated else ""))
    return keys


def _tables_in(annotation: Any) -> list[type[Table]]:
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return [annotation]
    return [table for argument in get_args(annotation) for table in _tables_in(argument)]
