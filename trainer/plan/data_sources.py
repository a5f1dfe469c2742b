"""From the config to the photos of a run, and to the cache of their encodings."""

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
    return tuple(
        Source(
            index=index,
            held_out_path=table.held_out,
            resolutions=resolutions(table.resolution or data.resolution),
            caption_rules=CaptionRules(
                lines=table.caption_lines, variants=data.caption_variants, **_of_the_same_name(CaptionRules, table)
            ),
            **_of_the_same_name(Source, table, data),
        )
        for index, table in enumerate(data.sources)
    )


def _of_the_same_name(made: type, *tables: Table) -> dict[str, Any]:
    """What the tables, the first before the second, set of a dataclass's fields."""
    given = {field.name: [getattr(table, field.name, None) for table in tables] for field in fields(made)}
    last = {name: value for name, values in given.items() for value in values[::-1] if value is not None}
    if made is CaptionRules:  # paths and columns stay as they are on the disk
        last |= {name: visible(value) for name, value in last.items() if isinstance(value, str)}
    return last


def resolutions(given: Resolutions) -> tuple[int, ...]:
    """One or several, ascending."""
    return (given,) if isinstance(given, int) else tuple(sorted(given))


def cache_dir(config: Config) -> Path:
    """The folder of cached encodings."""
    return Path(config.data.cache_dir or Layout(Path(config.run.output_dir)).cache)


def open_memo(config: Config, *, trusted: bool, layouts: Sequence[SourceReader]) -> Memo:
    """What earlier starts of this cache read of the photos. trusted: False: all are read again. layouts: besides folders."""
    return Memo(cache_dir(config) / "photos", trusted=trusted, layouts=layouts)


def read_sources(config: Config, phases: Phases, memo: Memo | None = None) -> Scanned:
    """All photos, read and checked, but for those that `memo` knows. Problems are in `damaged`."""
    data, written = config.data, (config.run.output_dir, config.checkpoint.mirror, config.data.cache_dir)
    outputs = [folder for folder in written if folder]
    sources = [each for source in sources_of(data) for each in source.with_held_out]
    return survey(sources, strict_captions=data.strict_captions, phases=phases, outputs=outputs, memo=memo)


def open_cache(
    data: DataTable, folder: Path, foresee: Callable[[int], object] = lambda size: None
) -> Cache | MemoryCache | None:
    """The cache of encodings; None where nothing is cached. folder: of a cache on disk. foresee: is given the bytes that will
    be written there, once they are known."""
    if data.cache == "none":
        return None
    if data.cache == "memory":
        return MemoryCache()
    limit = None if data.cache_limit is None else parse_size(data.cache_limit)
    return Cache(folder, limit=limit, foresee=foresee)
