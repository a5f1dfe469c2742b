"""The files of one folder: images, and the captions and masks that belong to them by name."""

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from trainer.base import text
from trainer.base.console import printable
from trainer.data.images import plugins
from trainer.data.images.kinds import CAPTIONS, IMAGES, MASK_ENDINGS, PROBABLE_MASK_ENDINGS, UNREAD_IMAGES, VIDEOS

NO_IMAGE, NO_NAMESAKE = "not an image", "no image has its name"
# OneTrainer's further masks and its images of a condition: they belong to a photo, and are none.
FURTHER = re.compile(r"(.+)[-_.](mask\d+|masklabel\d+|condlabel\d*)", re.IGNORECASE | re.DOTALL)


@dataclass
class Contents:
    """The files of a folder by kind. rest: (name, reason) of all other files. unread: images among the rest."""

    images: list[str] = field(default_factory=list)
    captions: list[str] = field(default_factory=list)
    masks: list[str] = field(default_factory=list)
    rest: list[tuple[str, str]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


def sort_out(files: Collection[str], wanted: Collection[str] = ()) -> Contents:
    """A folder's files by what they are. files: names without hidden ones, sorted. wanted: photos in any case."""
    contents, lacking = Contents(), plugins.lacking()
    images, captioned = ({folded(_stem(name)) for name in files if _suffix(name) in kind} for kind in (IMAGES, CAPTIONS))
    for name in files:
        suffix = _suffix(name)
        further = FURTHER.fullmatch(_stem(name)) if suffix in IMAGES else None
        plain = name in wanted or not captioned.isdisjoint((folded(_stem(name)), folded(name)))
        if suffix in CAPTIONS:
            contents.captions.append(name)
        elif name.lower().endswith(MASK_ENDINGS) or not plain and folded(without_mask_ending(name)) in images:
            contents.masks.append(name)
        elif further and not plain and folded(further[1]) in images:
            contents.rest.append((name, "a further mask or a condition image of the photo beside it"))
        elif why := why_no_photo(name, lacking):
            contents.rest.append((name, why))
            if suffix in IMAGES or suffix in UNREAD_IMAGES:
                contents.unread.append(name)
        else:
            contents.images.append(name)
    return contents


def without_mask_ending(name: str) -> str:
    """The name of the image whose mask it probably is, without a suffix; "" if it does not look like a mask."""
    lower = name.lower()
    if not lower.endswith(PROBABLE_MASK_ENDINGS):
        return ""
    return name[: -len(next(ending for ending in PROBABLE_MASK_ENDINGS if lower.endswith(ending)))]


def why_no_photo(name: str, lacking: Mapping[str, str]) -> str:
    """Why a file is not a photo to train on, by its name; "" if it is one. lacking: see plugins.py."""
    suffix = _suffix(name)
    if name.lower().endswith(MASK_ENDINGS):
        return "a mask"
    if suffix in IMAGES:
        return lacking.get(IMAGES[suffix], "")
    if suffix in UNREAD_IMAGES:
        return f"{suffix} images are not read; convert them to PNG or JPEG"
    if suffix == ".tar":
        return "an archive; give its path, or a pattern such as *.tar"
    return "a video" if suffix in VIDEOS else NO_IMAGE


def readable() -> str:
    """The suffixes of images that can be read on this machine."""
    lacking = plugins.lacking()
    return ", ".join(sorted(suffix for suffix, format in IMAGES.items() if format not in lacking))


class Companions:
    """Finds the caption or mask of each image by its name, in any letter case and either form of its letters (a Mac's): of
    0.png it is 0.txt, else 0.png.txt. endings: of the companions' names; the first counts most."""

    def __init__(self, files: Iterable[str], images: Iterable[str], endings: tuple[str, ...]) -> None:
        self._by_stem: dict[str, list[tuple[str, str]]] = {}  # (name, ending), the preferred first
        for ending in endings:
            mine = [name for name in files if name.lower().endswith(ending)]
            for name in sorted(mine, key=lambda name: not name.endswith(ending)):
                self._by_stem.setdefault(name[: -len(ending)], []).append((name, ending))
        # A companion whose image has exactly its name belongs to that image alone.
        self._images = {name for image in images for name in (image, _stem(image))}
        self._by_folded = {folded(stem): stem for stem in self._by_stem if stem not in self._images}
        self._taken: dict[str, str] = {}  # by the image's name, also without its suffix, the companion's without its ending

    def take(self, image: str) -> str | None:
        """The companion's name; None if there is none. Two images of one name share it."""
        for name in (_stem(image), image):
            files = self._by_stem.get(stem := name if name in self._by_stem else self._by_folded.get(folded(name), ""))
            # Programs that download photos write 0.png.json about each: it is seldom a caption.
            if files and not (name == image and files[0][1] == ".json"):
                self._taken |= {_stem(image): stem, image: stem}
                return files[0][0]
        return None

    def rest(self, left_out: Iterable[str], why: str = "") -> list[tuple[str, str]]:
        """(name, reason) of all companions that are not used. left_out: images that are not trained on. why: the reason for
        companions of other images, for which none was taken."""
        unused = {folded(name) for image in left_out for name in (image, _stem(image))}
        taken = {folded(image): self._by_stem[stem][0][0] for image, stem in self._taken.items()}
        used, done, reasons = {folded(stem) for stem in self._images}, set(self._taken.values()), []
        for stem, files in self._by_stem.items():
            name_folded = folded(stem)
            instead = files[0][1] if stem in done else printable(taken.get(name_folded, ""))
            if instead:
                reason = f"{instead} is used instead"
            elif name_folded in unused:
                reason = "its image is left out"
            else:
                reason = (name_folded in used and why) or NO_NAMESAKE
            reasons += [(name, reason) for name, _ in files[stem in done :]]
        return reasons


def folded(name: str) -> str:
    """A name as it is compared with others."""
    return text.spaced(text.folded(name))


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()
