"""The photos of sources, read by every layout that there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.data import layouts
from trainer.data import scan as scanning
from trainer.data.layouts.apart import Apart
from trainer.data.layouts.walk import NO_OWNERS
from trainer.data.memo import Memo
from trainer.data.sources import Listing, Scanned, Source
from workbench.sources import LAYOUTS


def listing(source: Source, owned: Apart = NO_OWNERS) -> Listing:
    """The contents of a source."""
    return layouts.listing(source, owned, LAYOUTS)


def survey(sources: Sequence[Source], **keys: Any) -> Scanned:
    """The sound photos of the sources, and all problems of the others."""
    return scanning.survey(sources, **{"memo": Memo(layouts=LAYOUTS)} | keys)


def scan(sources: Sequence[Source], **keys: Any) -> Scanned:
    """Every photo of the sources. Raises UserError if any has a problem."""
    scanned = survey(sources, **keys)
    scanning.refuse_damaged(scanned)
    return scanned
