"""Opens the photos of a config, and the cache of their encodings."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from trainer.base.files import parse_size
from trainer.base.progress import Phases
from trainer.base.run_layout import Layout
from trainer.base.text import visible
from trainer.config import Config, DataTable, Resolutions, Table
from trainer.data.cache.entries import Cache, MemoryCache
from trainer.data.caption_rules import CaptionRules
from trainer.data.memo import Memo
from trainer.data.scan import survey
from trainer.data.sources import Scanned, Source, SourceReader


def sources_of(data: DataTable) -> tuple[Source, ...]:
    """The sources of the config; a key that a source does not set comes from [data]."""
    sources = []
    for index, table in enumerate(data.sources):
        rules = _shared_fields(CaptionRules, table)
        # Only here: paths and columns stay as they are on the disk.
        rules |= {name: visible(value) for name, value in rules.items() if isinstance(value, str)}
        source = Source(
            index=index,
            held_out_path=table.held_out,
            resolutions=resolutions(table.resolution or data.resolution),
            caption_rules=CaptionRules(lines=table.caption_lines, variants=data.caption_variants, **rules),
            **_shared_fields(Source, data, table),
        )
        sources.append(source)
    return tuple(sources)


def _shared_fields(cls: type, *tables: Table) -> dict[str, Any]:
    """A dataclass's fields that the tables set, by name; later tables win."""
    values = ((field.name, getattr(table, field.name, None)) for table in tables for field in fields(cls))
    return {name: value for name, value in values if value is not None}


def resolutions(value: Resolutions) -> tuple[int, ...]:
    """One or several, ascending."""
    return (value,) if isinstance(value, int) else tuple(sorted(value))


def cache_dir(config: Config) -> Path:
    """The folder of cached encodings."""
    return Path(config.data.cache_dir or Layout(Path(config.run.output_dir)).cache)


def open_memo(config: Config, *, trusted: bool, layouts: Sequence[SourceReader]) -> Memo:
    """The record of photos that earlier starts read. trusted: False: all are read again. layouts: besides folders."""
    return Memo(cache_dir(config) / "photos", trusted=trusted, layouts=layouts)


def read_sources(config: Config, phases: Phases, memo: Memo | None = None) -> Scanned:
    """Reads and checks all photos that `memo` does not know. Problems are in `damaged`."""
    data, folders = config.data, (config.run.output_dir, config.checkpoint.mirror, config.data.cache_dir)
    outputs = [folder for folder in folders if folder]
    sources = [part for source in sources_of(data) for part in source.with_held_out]
    return survey(sources, strict_captions=data.strict_captions, phases=phases, outputs=outputs, memo=memo)


def open_cache(
    data: DataTable, folder: Path, foresee: Callable[[int], object] = lambda size: None
) -> Cache | MemoryCache | None:
    """The cache of encodings; None for data.cache = "none". folder: on disk. foresee: gets the bytes to be written there."""
    if data.cache == "none":
        return None
    if data.cache == "memory":
        return MemoryCache()
    limit = None if data.cache_limit is None else parse_size(data.cache_limit)
    return Cache(folder, limit=limit, foresee=foresee)
