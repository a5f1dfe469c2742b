"""What is said of a mistake in a config: the key's full name, the offending value, the remedy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from trainer.base import other_trainers, patterns
from trainer.base.console import without_keys
from trainer.config.keys import REMOVED, flatten, generic, known_keys

# What pydantic calls a type, in words.
TYPES = {
    "bool": "true or false", "int": "a whole number", "float": "a number", "string": "text in quotes", "dict": "a table",
    "model": "a table", "tuple": "a list", "list": "a list",
}  # fmt: skip


def explain(errors: Sequence[Any]) -> str:
    """All of pydantic's errors, a line for each key."""
    keys = dict.fromkeys(map(_key, errors))
    # A list whose items are refused is told as too short, too, and as none of the other things that it may be.
    inner = [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]
    tables = [_key(item) for item in errors if item["type"] == "value_error"]
    groups = ([item for item in errors if _key(item) == key] for key in keys if key in inner or key in tables)
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
    if item["type"] == "value_error" and isinstance(value, dict):  # of a table: it names the keys itself
        return "\n".join(item["msg"].removeprefix("Value error, ") for item in items)
    return f"{key} = {without_keys(repr(value))}: {_remedy(key, value, items)}"


def _remedy(key: str, value: Any, items: Sequence[Any]) -> str:
    """What to write in place of the value. items: one for each kind of value that the key takes, and why it is none."""
    other = [item for item in items if item["type"] != "literal_error" and _kind(item) not in TYPES]
    if other:  # it is of one of the kinds
        return "; ".join(dict.fromkeys(_in_words(key, item) for item in other))
    literals = [item["ctx"]["expected"] for item in items if item["type"] == "literal_error"]  # 'a', 'b' or 'c'
    choices = [choice for each in literals for choice in re.findall(r"'([^']*)'", each)]
    listed = ", ".join(map(repr, choices))
    if why := other_trainers.why_absent(key, value):
        return f"{why}; use one of {listed}"
    if (meant := patterns.likely(value, choices)) is not None:
        return f"did you mean {meant!r}? The values are {listed}"
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
    """'int' of int_type, int_parsing and int_from_float."""
    return re.sub("_(type|parsing|from_float)$", "", item["type"])


def _in_words(key: str, item: Any) -> str:
    """Of a value that is of the right kind."""
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
    """The value as the key takes it, where only its quotes or its point are too many."""
    if isinstance(value, float) and value.is_integer() and "int" in kinds:
        return f"{value:.0f} without a point"
    if isinstance(value, str):
        read = {"int": int, "float": float, "bool": {"true": True, "false": False}.__getitem__}
        for kind in kinds:
            with suppress(ValueError, KeyError):
                read[kind](value)
                return f"{value} without quotes"
    return None


def _list_of(key: str, value: Any, kinds: Sequence[str]) -> str:
    if isinstance(value, dict):
        return f"a list of tables, [[{key}]]"
    if isinstance(value, str) and kinds == ["tuple"]:
        return f'a list, for example ["{value}"]'
    return "a list, in brackets"


def _key(item: Any) -> str:
    # pydantic names the tried member of a union in the location: 'bool', 'constrained-int', "literal['auto']", ...
    parts = map(str, item["loc"])
    return ".".join(part for part in parts if not re.match(r"(bool|int|float|str)$|constrained-|.*[\[(]", part))


# What a pattern of the tables takes, by key.
PATTERNS = {
    "run.name": "use letters, digits, '.', '_' and '-', a letter or digit first; files are named by it",
    "variant.*.name": "use letters, digits, '.', '_' and '-', a letter or digit first; folders are named by it",
    "model.revision": "write a branch, a tag or a commit of the repository, for example main",
    "model.variant": "use letters, digits, '_' and '-', for example fp16",
    "data.background": 'write a colour as "#rrggbb", for example "#ffffff"',
}


def hint(key: str) -> str:
    """What to write in place of a key that there is not."""
    meant = REMOVED[key][1] if key in REMOVED else near_miss(key) or "see docs/keys.md for the keys that there are"
    return meant if " " in meant else f"did you mean {meant}?"


def _unknown_table(name: str, table: dict[str, Any]) -> str:
    """Of a table that there is not: where what stands in it belongs, as far as that can be said."""
    leaves = {key.rpartition(".")[2]: key for key in flatten(table)}
    meanings = {leaf: other_trainers.key_for(f"{name}.{key}") or near_miss(leaf) for leaf, key in leaves.items()}
    keys = ", ".join(f"{meant} for {key}" for key, meant in meanings.items() if meant and " " not in meant)
    hints = [f"for {key}: {meant}" for key, meant in meanings.items() if meant and " " in meant]
    if near_miss(name) is not None or not (keys or hints):
        return f"unknown key {name}; {hint(name)}"
    return f"unknown table {name}; " + "; ".join([*([f"write {keys}"] if keys else []), *hints])


def near_miss(key: str) -> str | None:
    """The known key that `key` was probably meant to be, or a sentence (trainer/base/other_trainers.json), or None."""
    table, _, leaf = key.rpartition(".")
    known = list(known_keys())
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == generic(table)}
    elsewhere = [name for name in known if name.rpartition(".")[2] == leaf and "." in name]  # the key of another table
    alias = other_trainers.key_for(key)
    if alias is not None and alias != key and not (table and siblings and alias.endswith(f".{leaf}")):
        return alias
    swapped = next((name for name in siblings if sorted(name) == sorted(leaf)), None)  # letters of a short name: rl for lr
    if elsewhere and not table:  # which of them is nearest says nothing without a table: the first of the contract
        return _with_places(elsewhere[0])
    if close := swapped or patterns.near(leaf, siblings, cutoff=0.85 if elsewhere else 0.6):
        return f"{table}.{close}" if table else close
    # Of the whole name: the table may be the misspelt part. The last part must be near, too: a table's names all begin alike.
    spelt = patterns.near(leaf, [name.rpartition(".")[2] for name in known], cutoff=0.75)
    alike = [name for name in known if name.rpartition(".")[2] == spelt]
    close = patterns.near(generic(key), elsewhere or alike, cutoff=0.0 if elsewhere else 0.75)
    return close and _with_places(close)


def _with_places(key: str) -> str:
    return key.replace("components.*", "components.unet").replace("*", "0")
