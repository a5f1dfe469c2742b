"""Messages for mistakes in a config: the key's full name, the offending value, the remedy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from trainer.base import other_trainers, patterns
from trainer.base.console import without_keys
from trainer.config.keys import REMOVED, flatten, generic, known_keys

# pydantic's names of types, in words.
TYPES = {
    "bool": "true or false", "int": "a whole number", "float": "a number", "string": "text in quotes", "dict": "a table",
    "model": "a table", "tuple": "a list", "list": "a list",
}  # fmt: skip


def explain(errors: Sequence[Any]) -> str:
    """All of pydantic's errors, a line for each key."""
    keys = dict.fromkeys(map(_key, errors))
    # A list with wrong items has errors of its own, too: too short, or no other member of its union.
    innermost = [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]
    tables = [_key(item) for item in errors if item["type"] == "value_error"]
    groups = ([item for item in errors if _key(item) == key] for key in keys if key in innermost or key in tables)
    return "\n".join(map(_explain, groups))


def _explain(items: Sequence[Any]) -> str:
    """pydantic's errors about one key as one line: full key, value, remedy."""
    item = items[0]
    key, value = _key(item), item["input"]
    if item["type"] == "extra_forbidden":
        return _unknown_table(key, value) if isinstance(value, dict) else f"unknown key {key}; {hint(key)}"
    if item["type"] == "missing":
        whole, _, last = key.rpartition(".")
        return f"{whole} = {value!r}: give one more value" if last.isdigit() else f"{key} is required"
    if item["type"] == "value_error" and isinstance(value, dict):  # a table's own check names the keys
        return "\n".join(item["msg"].removeprefix("Value error, ") for item in items)
    return f"{key} = {without_keys(repr(value))}: {_remedy(key, value, items)}"


def _remedy(key: str, value: Any, items: Sequence[Any]) -> str:
    """The correction of a value. items: pydantic's errors, one for each type that the key takes."""
    other = [item for item in items if item["type"] != "literal_error" and _kind(item) not in TYPES]
    if other:  # the type is right
        return "; ".join(dict.fromkeys(_in_words(key, item) for item in other))
    literals = [item["ctx"]["expected"] for item in items if item["type"] == "literal_error"]  # 'a', 'b' or 'c'
    choices = [choice for literal in literals for choice in re.findall(r"'([^']*)'", literal)]
    listed = ", ".join(map(repr, choices))
    if reason := other_trainers.why_absent(key, value):
        return f"{reason}; use one of {listed}"
    if (near := patterns.likely(value, choices)) is not None:
        return f"did you mean {near!r}? The values are {listed}"
    kinds = [_kind(item) for item in items if item["type"] != "literal_error"]
    if not kinds:
        return f"use one of {listed}"
    if bare := _bare(value, kinds):
        return f"write {bare}"
    words = [_list_of(key, value, kinds) if TYPES[kind] == "a list" else TYPES[kind] for kind in kinds]
    if "float" in kinds:
        words = [word for word in words if word != TYPES["int"]]
    return "give " + ", or ".join(dict.fromkeys([*map(repr, choices), *words]))


def _kind(item: Any) -> str:
    """'int' for int_type, int_parsing and int_from_float."""
    return re.sub("_(type|parsing|from_float)$", "", item["type"])


def _in_words(key: str, item: Any) -> str:
    """An error about a value of the right type."""
    if item["type"] == "string_pattern_mismatch":
        return PATTERNS[generic(key)]
    if item["type"] == "too_short":
        least = item["ctx"]["min_length"]
        return "give at least one" if least == 1 else f"give at least {least} values, not {item['ctx']['actual_length']}"
    if item["type"] == "too_long":
        return f"give at most {item['ctx']['max_length']} values, not {item['ctx']['actual_length']}"
    message = item["msg"].removeprefix("Value error, ").replace("Input should", "must")
    message = message.replace("String should have at least 1 character", "must not be empty")
    return f"{message[0].lower()}{message[1:]}"


def _bare(value: Any, kinds: Sequence[str]) -> str | None:
    """The value without its quotes or its point, if the key takes that."""
    if isinstance(value, float) and value.is_integer() and "int" in kinds:
        return f"{value:.0f} without a point"
    if isinstance(value, str):
        parsers = {"int": int, "float": float, "bool": {"true": True, "false": False}.__getitem__}
        for kind in kinds:
            with suppress(ValueError, KeyError):
                parsers[kind](value)
                return f"{value} without quotes"
    return None


def _list_of(key: str, value: Any, kinds: Sequence[str]) -> str:
    if isinstance(value, dict):
        return f"a list of tables, [[{key}]]"
    if isinstance(value, str) and kinds == ["tuple"]:
        return f'a list, for example ["{value}"]'
    return "a list, in brackets"


def _key(item: Any) -> str:
    # pydantic's location includes the member of a union: 'bool', 'constrained-int', "literal['auto']", ...
    parts = map(str, item["loc"])
    return ".".join(part for part in parts if not re.match(r"(bool|int|float|str)$|constrained-|.*[\[(]", part))


# Key -> the values that its pattern takes.
PATTERNS = {
    "run.name": "use letters, digits, '.', '_' and '-', a letter or digit first; files are named by it",
    "variant.*.name": "use letters, digits, '.', '_' and '-', a letter or digit first; folders are named by it",
    "model.revision": "write a branch, a tag or a commit of the repository, for example main",
    "model.variant": "use letters, digits, '_' and '-', for example fp16",
    "data.background": 'write a colour as "#rrggbb", for example "#ffffff"',
}


def hint(key: str) -> str:
    """The remedy for an unknown key."""
    remedy = REMOVED[key][1] if key in REMOVED else near_miss(key) or "see docs/keys.md for the keys that there are"
    return remedy if " " in remedy else f"did you mean {remedy}?"


def _unknown_table(name: str, table: dict[str, Any]) -> str:
    """The message for an unknown table: the known keys for its contents, if any."""
    leaves = {key.rpartition(".")[2]: key for key in flatten(table)}
    meanings = {leaf: other_trainers.key_for(f"{name}.{key}") or near_miss(leaf) for leaf, key in leaves.items()}
    keys = ", ".join(f"{meaning} for {key}" for key, meaning in meanings.items() if meaning and " " not in meaning)
    hints = [f"for {key}: {meaning}" for key, meaning in meanings.items() if meaning and " " in meaning]
    if near_miss(name) is not None or not (keys or hints):
        return f"unknown key {name}; {hint(name)}"
    return f"unknown table {name}; " + "; ".join([*([f"write {keys}"] if keys else []), *hints])


def near_miss(key: str) -> str | None:
    """The known key that `key` probably stands for, or a sentence (trainer/base/other_trainers.json), or None."""
    table, _, leaf = key.rpartition(".")
    keys = list(known_keys())
    siblings = {name.rpartition(".")[2]: name for name in keys if name.rpartition(".")[0] == generic(table)}
    elsewhere = [name for name in keys if name.rpartition(".")[2] == leaf and "." in name]  # the key of another table
    alias = other_trainers.key_for(key)
    if alias is not None and alias != key and not (table and siblings and alias.endswith(f".{leaf}")):
        return alias
    swapped = next((name for name in siblings if sorted(name) == sorted(leaf)), None)  # letters of a short name: rl for lr
    if elsewhere and not table:  # without a table none is nearer than the others: the first
        return _with_places(elsewhere[0])
    if close := swapped or patterns.near(leaf, siblings, cutoff=0.85 if elsewhere else 0.6):
        return f"{table}.{close}" if table else close
    # The table may be the misspelt part. The last part must be near, too: the names of a table all begin alike.
    near_leaf = patterns.near(leaf, [name.rpartition(".")[2] for name in keys], cutoff=0.75)
    candidates = [name for name in keys if name.rpartition(".")[2] == near_leaf]
    close = patterns.near(generic(key), elsewhere or candidates, cutoff=0.0 if elsewhere else 0.75)
    return close and _with_places(close)


def _with_places(key: str) -> str:
    return key.replace("components.*", "components.unet").replace("*", "0")
