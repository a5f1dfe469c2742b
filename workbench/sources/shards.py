"""WebDataset shards: .tar archives of images with captions and masks beside them, read without unpacking them
(https://github.com/webdataset/webdataset#the-webdataset-format)."""

import errno
import glob
import itertools
import math
import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from trainer.base.console import printable
from trainer.base.digests import Stamp
from trainer.data.images.kinds import CAPTIONS, IMAGES, MASK_ENDINGS
from trainer.data.layouts import walk
from trainer.data.layouts.folder import Reading
from trainer.data.layouts.table import FILE_NAMES
from trainer.data.layouts.walk import Exclusions, LeaveOut
from trainer.data.sources import ARCHIVE, MAX_BYTES, Listing, Source, stamp_of_file, too_large
from workbench.sources import tar

BRACES = re.compile(r"\{([^{}]*)\}")
MAX_NAMES = 100_000  # that braces may expand to


def reads(path: str) -> bool:
    """Whether it is the path of an archive, or a pattern of archives."""
    return ARCHIVE.fullmatch(path) is not None and not os.path.isdir(path)


def caption_places(source: Source) -> str:
    """The places where captions of the source's photos are looked for, in words."""
    return f"{', '.join(CAPTIONS)} beside it in the archive"


def listing(source: Source, exclusions: Exclusions) -> Listing:
    """The photos and captions of tar archives, read like folders; samples are named by archive and member. The path: an
    archive, or a pattern with `*`, `?`, `[...]`, and as in WebDataset `{000..003}` and `{a,b}`."""
    problems: list[str] = []
    try:
        paths = _archives(source.path, problems)
    except ValueError as error:
        problems.append(f"{printable(source.path)}: {error}")
    if problems:
        return Listing([], problems=problems)
    root = os.path.dirname(source.path if os.path.exists(source.path) else re.split(r"[*?\[{]", source.path)[0]) or "."
    return Reading(source, Archives(source.path, root, sorted(os.path.relpath(path, root) for path in paths))).listing()


@dataclass(frozen=True, slots=True)
class Archived:
    """A member of an archive. archive: relative to `root`. offset, size: of the member's bytes. Every read opens the archive,
    so that threads and processes share no file position."""

    root: str
    archive: str
    name: str
    offset: int
    size: int

    def __str__(self) -> str:
        return printable(os.path.join(self.root, self.archive, self.name))

    def read(self) -> bytes:
        """Raises OSError."""
        if self.size > MAX_BYTES:
            raise too_large(self.size, str(self))
        with open(os.path.join(self.root, self.archive), "rb", buffering=0) as file:
            file.seek(self.offset)
            data = bytearray()
            while more := file.read(self.size - len(data)):
                data += more
        if len(data) < self.size:
            raise OSError(errno.EIO, f"its archive ends after {len(data):,} of its {self.size:,} bytes", str(self))
        return bytes(data)

    def stamp(self) -> Stamp:
        """The archive's stamp, with the member's place in it. Raises OSError."""
        return *stamp_of_file(os.path.join(self.root, self.archive)), self.offset, self.size


class Archives:
    """A tree of the files in archives: an archive is a folder of its name. archives: relative to `root`, in reading order."""

    def __init__(self, title: str, root: str, archives: list[str]) -> None:
        self.title, self.root, self.archives = title, root, archives
        self._places: dict[str, Archived] = {}  # by name in the tree; the archive that `walk` is reading

    def walk(self, leave_out: LeaveOut, problems: list[str]) -> Iterator[tuple[str, list[str]]]:
        """Reads the headers of one archive after the other."""
        for archive in self.archives:
            self._places, folders = {}, defaultdict(list)
            for name in self._index(archive, leave_out, problems):
                folder, slash, file = name.rpartition("/")
                folders[folder + slash].append(file)
            for folder in sorted(folders):
                yield folder, _images_of_samples(folder, sorted(folders[folder]), leave_out)
        self._places = {}

    def place(self, name: str) -> Archived:
        return self._places[name]

    def _index(self, archive: str, leave_out: LeaveOut, problems: list[str]) -> Iterator[str]:
        """The names of an archive's files; fills `_places`."""
        path = os.path.join(self.root, archive)
        try:
            with open(path, "rb", opener=_opener) as file:
                for member in tar.members(file, os.fstat(file.fileno()).st_size):
                    parts = [part for part in member.name.split("/") if part not in ("", ".")]
                    name = "/".join((archive, *parts))
                    if member.unread is not None:
                        leave_out(f"{archive}/{member.name}", member.unread, 1)
                    elif ".." in parts or not parts or member.name.startswith("/"):
                        leave_out(f"{archive}/{member.name}", "its name leads out of the archive", 1)
                    elif reason := walk.exclusion_in_archive("/".join(parts)):
                        leave_out(name, reason, 1)
                    elif parts[-1].lower() in FILE_NAMES:
                        leave_out(name, "a table in an archive is not read; put captions beside the images", 1)
                    elif name in self._places:
                        problems.append(f"{printable(path)}: holds {printable('/'.join(parts))} twice; keep one of them")
                    else:
                        self._places[name] = Archived(self.root, archive, "/".join(parts), member.offset, member.size)
                        yield name
        except OSError as error:
            problems.append(f"{printable(path)}: cannot be read ({error.strerror})")
        except ValueError as error:
            problems.append(f"{printable(path)}: {printable(error)}")


def _images_of_samples(folder: str, files: list[str], leave_out: LeaveOut) -> list[str]:
    """The files without images that are no photos: beside 01.jpg, 01.depth.png is another part of WebDataset's sample 01."""
    stems = {stem for stem, suffix in map(os.path.splitext, files) if suffix.lower() in IMAGES}
    members = []
    for name in files:
        stem, suffix = os.path.splitext(name)
        is_part = "." in stem and suffix.lower() in IMAGES and stem.partition(".")[0] in stems
        if is_part and not name.lower().endswith(MASK_ENDINGS):
            leave_out(folder + name, "another part of a sample that has a photo", 1)
        else:
            members.append(name)
    return members


def _opener(path: str, flags: int) -> int:
    """Opens a regular file; raises OSError for any other: opening a named pipe would wait for ever."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    return os.open(path, flags)


def _archives(path: str, problems: list[str]) -> list[str]:
    """The archives that match the pattern `path`, or `path` itself if it exists. Raises ValueError for too many."""
    if os.path.exists(path):
        return [path]
    paths: set[str] = set()
    for name in _expand(path):
        matches = glob.glob(name, recursive=True)
        if not matches:
            problems.append(f"{printable(name)}: no {'archive of this pattern' if glob.has_magic(name) else 'such file'}")
        paths.update(matches)
    return sorted(paths)


def _expand(pattern: str) -> Iterator[str]:
    choices = [[part] if index % 2 == 0 else _choices(part) for index, part in enumerate(BRACES.split(pattern))]
    if (count := math.prod(map(len, choices))) > MAX_NAMES:
        raise ValueError(f"expands to {count:,} archives, the limit is {MAX_NAMES:,}")
    return map("".join, itertools.product(*choices))


def _choices(braces: str) -> list[str]:
    match = re.fullmatch(r"(\d{1,12})\.\.(\d{1,12})", braces)
    if match is None:
        return braces.split(",") if "," in braces else ["{" + braces + "}"]
    first, last = match.groups()
    count = int(last) - int(first) + 1
    if not 0 < count <= MAX_NAMES:
        limit = f"{count:,} archives, the limit is {MAX_NAMES:,}" if count > 0 else "no archive"
        raise ValueError(f"{{{braces}}} expands to {limit}")
    width = max(len(first), len(last)) if "0" in (first[0], last[0]) else 0
    return [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]
