"""The caption in a record: a row of a table, or a JSON file beside an image."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.base.errors import shown
from trainer.base.text import decoded
from trainer.data.sources import Place

FIELDS = ("caption", "text", "prompt")  # the first that exists is used


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


@dataclass(frozen=True, slots=True)
class JsonCaption:
    """A field of a JSON file. Null is no caption, as in a table. An object is trained as its JSON."""

    file: Place
    field: str | None

    def __str__(self) -> str:
        return str(self.file)

    def read(self) -> str | None:
        """Raises OSError, and ValueError if the file has no such field."""
        try:
            record = json.loads(decoded(self.file.read()))
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"not JSON ({error})") from error
        if not isinstance(record, Mapping):
            raise ValueError("not a JSON object with a field for the caption")
        field = caption_field(record, self.field)
        if field is None:
            names = self.field or " or ".join(FIELDS)
            raise ValueError(
                f"has no field {names} (it has {shown(list(record))}); name the caption's field with caption_column"
            )
        value = record[field]
        return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping) else caption_in(value)
