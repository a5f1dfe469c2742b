"""Lists what a source's path contains: a folder, or what a part on top of the core reads (artifacts/ports.py)."""

from collections.abc import Sequence

from trainer.base.console import printable
from trainer.data.layouts import folder
from trainer.data.layouts.apart import Apart
from trainer.data.layouts.beside import misplaced
from trainer.data.layouts.walk import NO_OWNERS
from trainer.data.sources import Listing, Source, SourceReader

CAPTIONS_OF_NAMES = (folder.OF_FILE, folder.OF_FOLDER, folder.OF_KOHYA)


def caption_places(source: Source, layouts: Sequence[SourceReader] = ()) -> str:
    """The places where captions of the source's photos are looked for, in words. layouts: besides folders."""
    layout = next((each for each in layouts if each.reads(source.path)), None)
    return folder.CAPTION_PLACES if layout is None else layout.caption_places(source)


def listing(source: Source, owned: Apart = NO_OWNERS, layouts: Sequence[SourceReader] = ()) -> Listing:
    """The contents of `source`, in the order of names. Reads no image. owned: folders that are not the source's own. layouts:
    besides folders."""
    layout = next((each for each in layouts if each.reads(source.path)), None)
    why = misplaced(source)
    apart = {"references": source.references} | source.folders
    for key, given in apart.items() if layout else ():
        if given:
            rest = "they are found for a folder of photos, not for this; leave it out"
            why = f"{printable(source.path)}: {key} = {given!r}: {rest}"
    return Listing([], problems=[why]) if why else (layout or folder).listing(source, owned)
