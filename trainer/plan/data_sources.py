"""From the config to the photos of a run, and to the cache of their encodings."""

from pathlib import Path

from trainer.base.files import parse_size
from trainer.base.progress import Phases
from trainer.config import DataTable, Resolutions
from trainer.data.cache.entries import Cache, MemoryCache
from trainer.data.caption_rules import CaptionRules
from trainer.data.scan import survey
from trainer.data.sources import Scanned, Source


def sources_of(data: DataTable) -> tuple[Source, ...]:
    """The sources of the config; a key that a source does not set comes from [data]."""

    def own(value, otherwise):
        return otherwise if value is None else value

    return tuple(
        Source(
            index=index,
            path=table.path,
            repeats=table.repeats,
            captions=table.captions,
            image_column=table.image_column,
            caption_column=table.caption_column,
            flip=own(table.flip, data.flip),
            caption_dropout=own(table.caption_dropout, data.caption_dropout),
            resolutions=resolutions(own(table.resolution, data.resolution)),
            background=data.background,
            caption_rules=CaptionRules(
                lines=table.caption_lines,
                wildcards=table.wildcards,
                separator=table.separator,
                keep=table.keep,
                tag_dropout=table.tag_dropout,
                shuffle=table.shuffle,
                prefix=table.prefix,
                suffix=table.suffix,
                trigger=table.trigger,
                variants=data.caption_variants,
            ),
            crop_jitter=data.crop_jitter,
            colour_jitter=data.colour_jitter,
            image_variants=data.image_variants,
            masks=own(table.masks, data.masks),
            unmasked_weight=own(table.unmasked_weight, data.unmasked_weight),
            loss_weight=table.loss_weight,
            regularisation=table.regularisation,
        )
        for index, table in enumerate(data.sources)
    )


def resolutions(given: Resolutions) -> tuple[int, ...]:
    """One or several, ascending."""
    return (given,) if isinstance(given, int) else tuple(sorted(given))


def read_sources(data: DataTable, phases: Phases) -> Scanned:
    """All photos, read and checked. Problems are in `damaged`."""
    return survey(sources_of(data), strict_captions=data.strict_captions, phases=phases)


def open_cache(data: DataTable, folder: Path) -> Cache | MemoryCache | None:
    """folder: of a cache on disk. None: nothing is cached."""
    if data.cache == "none":
        return None
    if data.cache == "memory":
        return MemoryCache()
    return Cache(folder, limit=None if data.cache_limit is None else parse_size(data.cache_limit))
