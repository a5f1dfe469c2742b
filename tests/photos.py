"""The photos of sources, read by every layout that there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.base.account import Heading
from trainer.base.types import Occurrence
from trainer.data import layouts
from trainer.data import scan as scanning
from trainer.data.batches import sampler
from trainer.data.batches.ahead import draw_order, numbered
from trainer.data.buckets import ReferenceLayout
from trainer.data.examples import Example
from trainer.data.layouts.walk import NO_EXCLUSIONS, Exclusions
from trainer.data.memo import Memo
from trainer.data.sources import Listing, Scanned, Source
from workbench.sources import LAYOUTS


def listing(source: Source, exclusions: Exclusions = NO_EXCLUSIONS) -> Listing:
    """The contents of a source."""
    return layouts.listing(source, exclusions, LAYOUTS, set())


def survey(sources: Sequence[Source], **keys: Any) -> Scanned:
    """The sound photos of the sources, and all problems of the others."""
    return scanning.survey(sources, **{"memo": Memo(layouts=LAYOUTS)} | keys)


def scan(sources: Sequence[Source], **keys: Any) -> Scanned:
    """Every photo of the sources. Raises UserError if any has a problem."""
    scanned = survey(sources, **keys)
    scanning.refuse_damaged(scanned)
    return scanned


def notes_of(scanned: Scanned) -> tuple[str, ...]:
    """The lines of the account that are about what is used."""
    warnings = (f"{Heading.WARNING}: {entry}" for entry in scanned.account.entries(Heading.WARNING))
    return (*map(str, scanned.account.entries(Heading.NOTE)), *warnings)


def epoch_order(examples: Sequence[Example], *, seed: int, epoch: int) -> list[tuple[Occurrence, ReferenceLayout]]:
    """Every (example, repeat) of an epoch, sorted by its draw, with its layout."""
    return list(sampler.occurrences(numbered(examples), epoch, draw_order(examples, seed, epoch)))


def epoch_batches(
    examples: Sequence[Example], *, seed: int, epoch: int, batch_size: int, fill: bool = False
) -> list[sampler.MicroBatch]:
    """An epoch's micro-batches, as many as the sampler says."""
    batches = list(sampler.epoch_batches(examples, epoch_order(examples, seed=seed, epoch=epoch), batch_size, fill))
    assert len(batches) == sampler.batches_per_epoch(examples, batch_size=batch_size)
    return batches
