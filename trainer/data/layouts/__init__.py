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
    if source.references and (hf.is_dataset(source.path) or shards.is_shards(source.path)):
        why = f"references = {source.references!r}: they are found for a folder of photos, not for this; leave it out"
        return Listing([], problems=[f"{printable(source.path)}: {why}"])
    if why := misplaced(source):
        return Listing([], problems=[why])
    if hf.is_dataset(source.path):
        return hf.listing(source)
    return shards.listing(source) if shards.is_shards(source.path) else folder.listing(source, owned)
