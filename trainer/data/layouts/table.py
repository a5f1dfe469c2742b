"""Records with captions: rows of a table of images (https://huggingface.co/docs/datasets/image_dataset#imagefolder), which
name a file and its caption, and JSON files beside images."""

import csv
import json
import math
import os
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from trainer.base.console import printable
from trainer.base.errors import shown
from trainer.base.text import composed, decoded, opened, refuse_stand_in, spaced, visible
from trainer.data.images.kinds import TABLES
from trainer.data.sources import Source

FILE_NAMES = frozenset(f"metadata{suffix}" for suffix in TABLES)  # a folder's table has one of these names
IMAGE_COLUMN = "file_name"
MARKS = {",": "commas", ";": "semicolons", "\t": "tabs"}  # between the cells of CSV
FIELDS = ("caption", "text", "prompt")  # the first that exists is used


@dataclass(frozen=True, slots=True)
class ImageRow:
    """A row of a table: its number, and the caption, repeats and loss weight of an image."""

    number: int
    caption: str | None = None
    repeats: int = 1
    loss_weight: float = 1.0


@dataclass
class ImageTable:
    """A table that gives images their captions. name: within the source. rows: by the image's name within the source.
    forms: the names as `adopt` compares them, set when first needed."""

    name: str
    rows: dict[str, ImageRow] = field(default_factory=dict)
    caption_column: str | None = None
    problems: list[str] = field(default_factory=list)
    forms: dict[str, str] = field(default_factory=dict)

    def adopt(self, names: list[str]) -> None:
        """Rename rows after files whose names differ from theirs in the form of letters (a Mac's) or of spaces alone."""
        present, lacking = set(names), [name for name in names if name not in self.rows]
        self.forms = self.forms or ({spaced(composed(row)): row for row in self.rows} if lacking else {})
        for name in lacking:
            if (row := self.forms.get(spaced(composed(name)))) in self.rows and row not in present:
                self.rows[name] = self.rows.pop(row)


def first_row(path: str) -> dict[str, Any]:
    """The first row of a file; empty if it has none or cannot be read."""
    try:
        return next((row for _, row in _rows(Path(path))), {})
    except (OSError, ValueError, csv.Error):
        return {}


def read_table(root: str, name: str, source: Source) -> ImageTable:
    """Reads a table. `problems` gets the reasons why rows cannot be used."""
    table, path = ImageTable(name), os.path.join(root, name)
    column, folder = source.image_column or IMAGE_COLUMN, name[: name.rfind("/") + 1]

    def refuse(reason: str) -> None:
        table.problems.append(f"{printable(path)}: {reason}")

    try:
        for number, row in _rows(Path(path)):
            if column not in row:
                refuse(f"row {number} has no column {column} ({shown(list(row), 200)}); name it with image_column")
                if not table.rows:
                    return table  # the other rows will not have it either
                continue
            field = caption_field(row, source.caption_column)
            table.caption_column = table.caption_column or field
            try:
                image, caption = folder + _image_name(row[column], column), caption_in(row[field]) if field else None
                repeats = _number(row, "repeats", 1, "1 or more; to leave a photo out, remove its row")
                weight = _number(row, "loss_weight", 1e-6, "a number above 0")
                if repeats % 1:
                    raise ValueError(f"repeats = {repeats:g} is not a whole number")
            except ValueError as error:
                refuse(f"row {number}: {error}")
                continue
            first = table.rows.setdefault(image, ImageRow(number, caption, int(repeats), weight)).number
            if first != number:
                refuse(f"row {number} names {image!r} again, after row {first}; keep one of them")
    except OSError as error:
        refuse(f"cannot be read ({error.strerror or error})")
    except (ValueError, csv.Error) as error:
        refuse(str(error))
    if source.caption_column and table.rows and table.caption_column is None:
        refuse(f"no row has the column {source.caption_column} that caption_column names")
    return table


def _image_name(value: Any, column: str) -> str:
    """Relative to the table's folder, with slashes. Raises ValueError for anything else."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{column} is not a file name: {shown(value)}")
    name = posixpath.normpath(value.replace("\\", "/"))
    if name.startswith(("/", "../")) or name in (".", "..") or name[1:2] == ":":
        raise ValueError(f"{column} = {value!r} is not in the table's folder; name files in it, relative to it")
    return name


def _number(row: dict[str, Any], column: str, least: float, expected: str) -> float:
    """The number in a column; 1 if there is none. expected: for the ValueError."""
    if (value := row.get(column)) is None:
        return 1
    try:
        number = float(value)  # CSV's are text
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not least <= number < math.inf:
        raise ValueError(f"{column} = {shown(value)} is not {expected}")
    return number


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number from 1, row). Raises OSError, and ValueError or csv.Error if the file is not a table."""
    try:
        yield from {".jsonl": _json_rows, ".csv": _csv_rows, ".parquet": _parquet_rows}[path.suffix.lower()](path)
    except UnicodeDecodeError:
        decoded(path.read_bytes())  # says where, and how to save it
        raise


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            line = line.lstrip("\ufeff")
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"row {number} is not JSON ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f"row {number} is not a JSON object but {shown(row)}")
            yield number, row


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """An empty cell is no caption, as null is in other tables."""
    with opened(path, newline="") as file:
        separator = _separator(file)
        rows = csv.reader(file, strict=True, delimiter=separator)
        names = [visible(name) for name in next(rows, [])]
        for number, cells in enumerate(rows, start=1):
            if cells and len(cells) != len(names):
                counts = f"row {number} has {len(cells)} cells, the first line {len(names)}"
                raise ValueError(f"{counts}; put text that has {MARKS[separator]} in quotes")
            if cells:
                yield number, {name: cell or None for name, cell in zip(names, cells, strict=True)}


def _separator(file: TextIO) -> str:
    """The separator of the cells; leaves the file at the first row. The comma; without one in the first line a semicolon, as
    Excel writes it where the comma is for decimals, or a tab. Excel may name it in a line of its own ("sep=;")."""
    first = visible(file.readline()).strip("\r\n")
    if first[:4] == "sep=" and first[4:] in MARKS:
        return first[4:]
    file.seek(0)
    return next((mark for mark in MARKS if mark in first), ",")


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow.parquet  # takes tens of megabytes, so only if needed

    with path.open("rb") as beginning:
        refuse_stand_in(beginning.read(200))
    file, number = pyarrow.parquet.ParquetFile(path), 0
    packed = (pyarrow.types.is_binary, pyarrow.types.is_large_binary, pyarrow.types.is_struct)
    light = [column.name for column in file.schema_arrow if not any(kind(column.type) for kind in packed)]
    for batch in file.iter_batches(batch_size=1000, columns=light):
        for row in batch.to_pylist():
            number += 1
            yield number, row


def caption_field(names: Any, column: str | None) -> str | None:
    """The field of a record's caption: `column`, or the first of FIELDS; None if the record has none."""
    return next((field for field in ((column,) if column else FIELDS) if field in names), None)


def caption_in(value: Any) -> str | None:
    """The caption in a record; None for null. A list becomes lines. Raises ValueError with the reason."""
    if isinstance(value, list) and value and all(isinstance(line, str) for line in value):
        value = "\n".join(value)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"the caption is not text but {shown(value)}")
    try:
        return value if value is None else value.encode().decode().strip()
    except UnicodeEncodeError as error:
        raise ValueError(f"the caption is not Unicode (half a character at {error.start})") from error


def unwrapped(text: str, column: str | None) -> tuple[str, str]:
    """(the caption, its field) if the text is a JSON object; otherwise (the text, ""). Raises ValueError for an object
    without such a field: its braces would be trained."""
    try:
        record = json.loads(text) if text.lstrip()[:1] == "{" else None
    except (json.JSONDecodeError, RecursionError):
        return text, ""  # wildcards, or words in braces
    if not isinstance(record, Mapping):
        return text, ""
    field = caption_field(record, column) or caption_field(record, None)
    caption = caption_in(record[field]) if field else None
    if field is None or caption is None:
        raise ValueError(
            f"the caption is JSON without {' or '.join(FIELDS)} (it has {shown(list(record))}); write its text alone, or "
            'the object below "caption" in a .json file to train it as it stands'
        )
    return caption, field


def json_caption(text: str, column: str | None) -> str | None:
    """The caption in the text of a JSON file; None for null, as in a table. An object is trained as its JSON. Raises
    ValueError if there is no such field."""
    try:
        record = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(record, Mapping):
        raise ValueError("not a JSON object with a field for the caption")
    field = caption_field(record, column)
    if field is None:
        names = column or " or ".join(FIELDS)
        raise ValueError(f"has no field {names} (it has {shown(list(record))}); name the caption's field with caption_column")
    value = record[field]
    return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping) else caption_in(value)
