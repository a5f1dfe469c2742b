"""Lists what a source's path contains: one module for each layout."""

from trainer.base.console import printable
from trainer.data.layouts import folder, hf, shards
from trainer.data.layouts.apart import Apart
from trainer.data.layouts.references import misplaced
from trainer.data.layouts.walk import NO_OWNERS
from trainer.data.sources import Listing, Source

CAPTIONS_OF_NAMES = (folder.OF_FILE, folder.OF_FOLDER, folder.OF_KOHYA)


def caption_places(source: Source) -> str:
    """The places where captions of the source's photos are looked for, in words."""
    if hf.is_dataset(source.path):
        return hf.caption_places(source)
    return shards.CAPTION_PLACES if shards.is_shards(source.path) else folder.CAPTION_PLACES


def listing(source: Source, owned: Apart = NO_OWNERS) -> Listing:
    """The contents of `source`, in the order of names. Reads no image. owned: folders that are not the source's own."""
    layout = hf if hf.is_dataset(source.path) else shards if shards.is_shards(source.path) else None
    why = misplaced(source)
    apart = {"references": source.references} | source.folders
    for key, given in apart.items() if layout else ():
        if given:
            rest = "they are found for a folder of photos, not for this; leave it out"
            why = f"{printable(source.path)}: {key} = {given!r}: {rest}"
    if why:
        return Listing([], problems=[why])
    return shards.listing(source) if layout is shards else (layout or folder).listing(source, owned)
