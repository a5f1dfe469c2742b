"""Lists the photos of a source: of a folder, or of a layout that a part on top of the core reads (artifacts/ports.py)."""

from collections.abc import Sequence

from trainer.base.console import printable
from trainer.data.layouts import folder
from trainer.data.layouts.beside import misplaced
from trainer.data.layouts.walk import Exclusions
from trainer.data.sources import Listing, Source, SourceReader

CAPTIONS_OF_NAMES = (folder.OF_FILE, folder.OF_FOLDER, folder.OF_KOHYA)


def _layout(source: Source, layouts: Sequence[SourceReader]) -> SourceReader | None:
    return next((layout for layout in layouts if layout.reads(source.path)), None)


def caption_places(source: Source, layouts: Sequence[SourceReader]) -> str:
    """The places where captions of the source's photos are looked for, in words. layouts: other layouts than folders."""
    layout = _layout(source, layouts)
    return folder.CAPTION_PLACES if layout is None else layout.caption_places(source)


def listing(source: Source, exclusions: Exclusions, layouts: Sequence[SourceReader], used_apart: set[str]) -> Listing:
    """The contents of a source, in the order of names. Reads no image. layouts: other layouts than folders. used_apart: for
    folder.Reading."""
    layout, problem = _layout(source, layouts), misplaced(source)
    settings = {"references": source.references} | source.folders
    for key, value in settings.items() if layout else ():
        if value:
            remedy = "they are found for a folder of photos, not for this; leave it out"
            problem = f"{printable(source.path)}: {key} = {value!r}: {remedy}"
    if problem:
        return Listing([], problems=[problem])
    return layout.listing(source, exclusions) if layout else folder.listing(source, exclusions, used_apart)
