"""The types of the data: sources, the images in them, and photos that were read."""

import errno
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from trainer.base.account import Account, Heading
from trainer.base.console import printable
from trainer.base.digests import Stamp, stamp_of
from trainer.base.files import open_regular
from trainer.data.caption_rules import CaptionRules

HUB = "hf:"  # prefix of the path of a dataset of the library datasets
ARCHIVE = re.compile(r".*\.(tar(\.\w+)?|tgz|tbz2?|txz|tzst)", re.IGNORECASE | re.DOTALL)  # a path of archives
MAX_BYTES = 2 << 30  # of one file: the largest photo that is read has 200 million pixels, of at most 8 bytes


@dataclass(frozen=True)
class Source:
    """One [[data.sources]] of the config, completed by the keys of [data].

    index: its place in the config; the names of its samples begin with it.
    captions: their origin: "auto", "filename", "folder" or "none".
    image_column, caption_column: names in metadata or a dataset that differ from the usual ones.
    background: the colour behind transparent parts of a photo, "#rrggbb".
    flip: mirror an appearance with probability 0.5. caption_dropout: the probability of training on the empty caption.
    resolutions: the sizes at which each photo is trained, in pixels.
    crop: "centre", or "none": the whole photo is scaled to its bucket.
    crop_jitter: how far a crop may be from the centre, and zoom in, as a share of the bucket's sides.
    colour_jitter: the share by which brightness, contrast and saturation may differ. image_variants: variants of each photo.
    masks: "none"; "files" beside the photos; "alpha": their transparency; else the masks' folder.
    unmasked_weight: the weight of a mask's black parts.
    references: the images that the model is shown beside each photo: "files" beside it, their folder, or one folder for each
    reference of a photo; None: no references.
    held_out_path: the path of the photos that are not trained on. is_held_out: whether this is the source of such photos.
    loss_weight: multiplies the loss of each photo. regularisation: the photos do not show the subject; they preserve what the
    model knew before.
    """

    index: int
    path: str
    repeats: int = 1
    captions: str = "auto"
    image_column: str | None = None
    caption_column: str | None = None
    background: str = "#ffffff"
    flip: bool = False
    caption_dropout: float = 0.0
    resolutions: tuple[int, ...] = (1024,)
    caption_rules: CaptionRules = CaptionRules()
    crop: str = "centre"
    crop_jitter: float = 0.0
    colour_jitter: float = 0.0
    image_variants: int = 4
    masks: str = "none"
    references: str | tuple[str, ...] | None = None
    unmasked_weight: float = 0.0
    held_out_path: str | None = None
    is_held_out: bool = False
    loss_weight: float = 1.0
    regularisation: bool = False

    @property
    def name(self) -> str:
        """The beginning of its samples' names, and its place in the config below data.sources."""
        return f"{self.index}.held_out" if self.is_held_out else str(self.index)

    @property
    def with_held_out(self) -> list["Source"]:
        """The source, and the source of its held-out photos if it has any. A loss at fixed draws reads no mask."""
        if self.held_out_path is None:
            return [self]
        return [self, replace(self, path=self.held_out_path, is_held_out=True, masks="none")]

    @property
    def folders(self) -> dict[str, str]:
        """The folders of its references and masks, by key; several folders of references by `references[0]` and so on."""
        several = self.references if isinstance(self.references, tuple) else ()
        settings = {"references": None if several else self.references, "masks": self.masks}
        settings |= {f"references[{place}]": path for place, path in enumerate(several)}
        return {key: path for key, path in settings.items() if path not in (None, "none", "files", "alpha")}

    @property
    def jitters(self) -> bool:
        """Whether the views of its photos are drawn at random beyond flips."""
        return self.crop_jitter > 0 or self.colour_jitter > 0


class Place(Protocol):
    """The place of bytes: a photo, a caption file, a mask, a reference. Its text is for people."""

    def read(self) -> bytes:
        """Raises OSError; ValueError with the reason, if the file that contains them is damaged."""
        ...

    def stamp(self) -> Stamp | None:
        """A value that changes with the bytes; None if only reading them tells. Raises OSError."""
        ...


@dataclass(frozen=True, slots=True)
class File:
    """A file on the disk. root: of the source; a hundred thousand files share one. name: relative to it, with slashes."""

    root: str
    name: str

    @property
    def path(self) -> str:
        """Root and name."""
        return os.path.join(self.root, self.name)  # pathlib would keep every part of it

    def __str__(self) -> str:
        return printable(self.path)

    def read(self) -> bytes:
        """Raises OSError, also for a named pipe or a device, which might never end, and for more than MAX_BYTES."""
        with open_regular(Path(self.path)) as file:
            if (size := os.fstat(file.fileno()).st_size) > MAX_BYTES:
                raise too_large(size, self.path)
            return file.read()

    def stamp(self) -> Stamp:
        """Raises OSError. The file is opened: a network file system then asks its server."""
        return stamp_of_file(self.path)


def stamp_of_file(path: str) -> Stamp:
    """The stamp of an opened file. Raises OSError."""
    with open_regular(Path(path)) as file:
        return stamp_of(os.fstat(file.fileno()))


def too_large(size: int, path: str) -> OSError:
    """The error for a file of more than MAX_BYTES bytes."""
    return OSError(errno.EFBIG, f"{size:,} bytes, more than the limit of {MAX_BYTES:,}", path)


@dataclass(frozen=True, slots=True)
class ListedPhoto:
    """An image of a source, not read yet. name: within the source, with slashes. caption: its place or its text; None: it has
    none. caption_from: the origin of the caption, for people; "" without one. repeats, loss_weight: multiply those of the
    source."""

    source: Source
    name: str
    image: Place
    caption: Place | str | None
    mask: Place | None = None
    references: tuple[Place, ...] = ()
    repeats: int = 1
    caption_from: str = ""
    loss_weight: float = 1.0

    @property
    def sample(self) -> str:
        """The photo's name in the run: its source's name, and its own within the source."""
        return f"{self.source.name}/{self.name}"


@dataclass(frozen=True)
class Listing:
    """The contents of a source. photos: the reader removes them one by one. account: all other files. problems: lines on what
    has to be repaired before a run."""

    photos: list[ListedPhoto]
    account: Account = field(default_factory=Account)
    problems: Sequence[str] = ()


class SourceReader(Protocol):
    """Lists sources whose paths are no folders. A module may implement it."""

    def reads(self, path: str) -> bool:
        """Whether a source's path is of this kind."""
        ...

    def caption_places(self, source: Source) -> str:
        """The places where captions of the source's photos are looked for, in words."""
        ...

    def listing(self, source: Source, exclusions: Any) -> Listing:
        """The contents of the source, in the order of names. Reads no image. exclusions: of layouts/walk.py."""
        ...


@dataclass(frozen=True, slots=True)
class Mask:
    """The mask of a photo: its place, and the digest of its bytes."""

    place: Place
    sha256: str


@dataclass(frozen=True, slots=True)
class Extras:
    """Further inputs of a photo. mask: None: the photo counts everywhere. references: images that the model is shown, in
    order. loss_weight: multiplies that of the source."""

    mask: Mask | None = None
    references: tuple["Photo", ...] = ()
    loss_weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Photo:
    """One training image and its caption; or a reference, which has no caption.

    sample: "INDEX/name/within/the/source", the key of every draw for it. size: (width, height) in pixels, after the EXIF
    orientation is applied. caption: stripped text, "" if there is none; caption_from: its origin, for people. repeats: how
    often the photo appears in an epoch. sha256: of the image's bytes; choices: further inputs of its pixels (decode.Decoded).
    look: its perceptual hash (near_duplicates.py). notes: for people.
    """

    sample: str
    source: Source
    image: Place
    size: tuple[int, int]
    caption: str
    repeats: int
    sha256: str
    choices: tuple[str, ...] = ()
    extras: Extras = Extras()
    look: bytes = b""
    caption_from: str = ""
    notes: tuple[str, ...] = ()

    @property
    def aspect(self) -> float:
        """The long side over the short one."""
        return max(self.size) / min(self.size)

    @property
    def mask(self) -> Mask | None:
        """Its mask; None: it counts everywhere."""
        return self.extras.mask

    @property
    def loss_weight(self) -> float:
        """The factor of its loss: the source's weight times its own."""
        return self.source.loss_weight * self.extras.loss_weight

    @property
    def contents(self) -> str | list[str]:
        """The digests of its pixels, its mask and its references, and its own loss weight. The digest of the bytes alone if
        it has nothing else, as in earlier runs."""
        more = [*self.choices, *((f"mask {self.mask.sha256}",) if self.mask else ())]
        more += [f"reference {' '.join((each.sha256, *each.choices))}" for each in self.extras.references]
        more += [f"loss weight {self.extras.loss_weight!r}"] if self.extras.loss_weight != 1 else []
        return [self.sha256, *more] if more else self.sha256


@dataclass(frozen=True)
class Scanned:
    """The checked contents of all sources, and the account of their files. damaged: the files that have to be repaired before
    a run, each with the reason in one line."""

    photos: tuple[Photo, ...]
    account: Account = field(default_factory=Account)
    damaged: tuple[str, ...] = ()

    @property
    def left_out(self) -> tuple[tuple[str, str], ...]:
        """(file or folder, reason) of everything that is not used."""
        return tuple((name, entry.reason) for entry in self.account.entries(Heading.LEFT_OUT) for name in entry.names)
