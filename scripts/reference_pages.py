"""Write docs/keys.md, docs/other_trainers.md and docs/pictures/floors.svg, from what the program has.

    python scripts/reference_pages.py

Each fact stands once: a key's type, range, default and meaning in the tables of trainer/config, which families read it
in trainer/models, the names of other trainers in trainer/base/other_trainers.json, who imports whom in the files of trainer/.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.floors import drawing
from trainer.adapters.kinds import KINDS
from trainer.base import other_trainers
from trainer.config import Config, choices, fields
from trainer.models import FAMILIES
from trainer.optim import OPTIMIZERS
from trainer.plan.requirements import FAMILY_KEYS, MAGNITUDE_KEYS, with_magnitudes

DOCS = Path(__file__).resolve().parent.parent / "docs"
HEAD = "<!-- Written by scripts/reference_pages.py. Change what it reads, and run it again. -->\n\n"

# Where a table is told in full.
PAGES = {
    "model": "models.md", "model.components.NAME": "precision.md", "precision": "precision.md",
    "adapter": "adapter_options.md", "data": "data.md", "data.sources": "data.md", "objective": "objectives.md",
    "memory": "memory.md",
    "optimizer": "optimizers.md", "schedule": "optimizers.md", "ema": "ema.md", "checkpoint": "resume.md",
    "export": "adapter_files.md", "validation": "verdict.md",
}  # fmt: skip
# Keys whose values are the entries of a table elsewhere.
VALUES = {"model.family": FAMILIES, "optimizer.name": OPTIMIZERS, "adapter.type": KINDS}
NUMBERS = {"integer": "a whole number", "number": "a number"}


INTRODUCTION = """# Every key

A config is a TOML file of these tables. A key that you leave out has its default. Where that is "-", leaving it out is a
choice of its own, which the description names. An unknown key, a wrong type and an impossible combination are refused before
any weight is read.

The last column says which model families read a key. A key that is set and that nothing reads is refused, too.

Paths are relative to the working directory, and `~` is your home folder. Patterns are those of `fnmatch`, on the whole dotted
name of a layer. The files in `configs/` show the keys in use.
"""
NAMES = """# Keys of other trainers

You come from another trainer. Here is what its keys are called in this one, by subject. If you write the other name into a
config, the message says the same. Where there is no such key here, the first column says why, or what to do instead.

A name may stand in a table of the other trainer (`train.lr`). "-" means that we know of no such key there. The names follow
the documentation and the sources of those trainers; not every key of theirs is here.

`scripts/import_config.py` turns a whole config of theirs into one of ours ([import.md](import.md)).

[data.md](data.md#coming-from-another-trainer) has the layouts of their data sets. [conventions.md](conventions.md) says which
numbers mean something else there: `alpha` above all.
"""
LOOKED_UP = """
The names were looked up among the options in the sources of these programs: {commits}. A name in *italics* is not looked up:
it is not among them, but from their documentation, an option of a network's or a data set's own table, or what people write.
"""
SPELT = """
## Values

A value may be spelt in another way, too. Case does not matter in this list, and `-` is read as `_`.

| here | elsewhere |
|---|---|"""


def key_page() -> str:
    schema = Config.model_json_schema()
    needed = {
        _plain(key): [*([with_magnitudes()] if key in MAGNITUDE_KEYS else []), *choices(field)] for key, field in fields()
    }
    lines = [INTRODUCTION.rstrip()]
    for heading, name, table in _tables(schema):
        lines += [f"\n## `{heading}`\n", _flat(table["description"])]
        if name in PAGES:
            lines[-1] += f" More: [{PAGES[name]}]({PAGES[name]})."
        lines += ["\n| key | value | default | what it does | read by |", "|---|---|---|---|---|"]
        for key, field in table["properties"].items():
            full = f"{name}.{key}"
            required = key in table.get("required", ())
            what = " ".join([_flat(field["description"]), *(f"Read only with {choice}." for choice in needed[_plain(full)])])
            lines.append(_row(f"`{key}`", _value(full, field), _default(field, required), what, _read_by(full)))
    return HEAD + "\n".join(lines) + "\n"


def names_page() -> str:
    tables = other_trainers.tables()
    commits = ", ".join(f"{name} {commit}" for name, commit in tables.commits.items())
    lines = [NAMES.rstrip(), LOOKED_UP.format(commits=commits).rstrip()]
    for subject, rows in tables.names.items():
        lines += [f"\n## {subject}\n", _row("here", *tables.trainers), "|---" * (len(tables.trainers) + 1) + "|"]
        for row in rows:
            meant = row["here"]
            here = meant.replace("*", r"\*") if " " in meant else f"`{meant}`"
            cells = (_quoted(row.get(trainer, ""), tables.not_looked_up[trainer].split()) for trainer in tables.trainers)
            lines.append(_row(here, *(cell or "-" for cell in cells)))
    lines += [SPELT, *(_row(f"`{ours}`", _quoted(others)) for ours, others in tables.values.items())]
    return HEAD + "\n".join(lines) + "\n"


def _quoted(names: str, doubtful: Collection[str] = ()) -> str:
    """The names as code; those of `doubtful` in italics."""
    return ", ".join(f"*`{name}`*" if name in doubtful else f"`{name}`" for name in names.split())


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _tables(schema: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(as it is written in TOML, its dotted name, its schema) of each table, in order; one in a list after its own."""
    for name, field in schema["properties"].items():
        table = _resolved(schema, field)
        yield f"[{name}]", name, table
        for key, inner in table["properties"].items():
            if "items" in inner and "$ref" in inner["items"]:
                yield f"[[{name}.{key}]]", f"{name}.{key}", _resolved(schema, inner["items"])
            elif isinstance(entry := inner.get("additionalProperties"), dict):
                yield f"[{name}.{key}.NAME]", f"{name}.{key}.NAME", _resolved(schema, entry)


def _resolved(schema: dict[str, Any], field: dict[str, Any]) -> dict[str, Any]:
    return schema["$defs"][field["$ref"].rpartition("/")[2]]


def _value(key: str, field: dict[str, Any]) -> str:
    """A key's type and range in words."""
    if key in VALUES:
        return ", ".join(f'`"{value}"`' for value in VALUES[key])
    kinds = [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]
    return ", or ".join(dict.fromkeys(map(_kind, kinds)))


def _kind(kind: dict[str, Any]) -> str:
    if "enum" in kind or "const" in kind:
        return ", ".join(f'`"{value}"`' for value in kind.get("enum", [kind.get("const")]))
    match kind["type"]:
        case "boolean":
            return "true or false"
        case "string":
            return 'a colour, `"#rrggbb"`' if kind.get("pattern", "").startswith("^#") else "text"
        case "object":
            return "a table"
        case "array" if "$ref" in kind.get("items", {}):
            return "a list of tables"
        case "array" if "prefixItems" in kind:
            return f"a list of {len(kind['prefixItems'])}: {_kind(kind['prefixItems'][0])} each"
        case "array":
            return f"a list: {_kind(kind['items'])} each"
        case number:
            return NUMBERS[number] + _range(kind)


def _range(kind: dict[str, Any]) -> str:
    low = f"from {kind['minimum']:g}" if "minimum" in kind else ""
    low = f"above {kind['exclusiveMinimum']:g}" if "exclusiveMinimum" in kind else low
    # The largest seed is the largest whole number that TOML holds.
    bounded = kind.get("exclusiveMaximum", 0) < 2**62
    high = f"below {kind['exclusiveMaximum']:g}" if "exclusiveMaximum" in kind and bounded else ""
    high = f"to {kind['maximum']:g}" if "maximum" in kind else high
    parts = [" ".join(filter(None, (low, high)))]
    if "multipleOf" in kind:
        parts.append(f"a multiple of {kind['multipleOf']:g}")
    return "".join(f", {part}" for part in parts if part)


def _default(field: dict[str, Any], required: bool) -> str:
    if required:
        return "required"
    default = field["default"]
    if default is None or (default in ([], {}) and "anyOf" not in field and _kind(field) in ("a list of tables", "a table")):
        return "-"
    return f"`{json.dumps(default)}`"


def _plain(key: str) -> str:
    """A key of the contract without what stands for an entry of a list, or for a part of the model."""
    return key.replace(".*", "").replace(".NAME", "")


def _read_by(key: str) -> str:
    generic = key.replace("validation.samples.", "validation.samples.*.").replace("data.sources.", "data.sources.*.")
    if generic not in FAMILY_KEYS:
        return "all"
    return ", ".join(f"`{name}`" for name, family in FAMILIES.items() if generic in family.reads)


def _flat(text: str) -> str:
    return " ".join(text.split())


WRITTEN = {"keys.md": key_page, "other_trainers.md": names_page, "pictures/floors.svg": drawing}


def main() -> int:
    for name, page in WRITTEN.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
