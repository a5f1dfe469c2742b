"""The files of one folder: images, and the captions, masks and references that belong to them by name, beside them or in a
folder of their own."""

import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from trainer.base import text
from trainer.base.console import printable
from trainer.data.images import plugins
from trainer.data.images.kinds import CAPTIONS, IMAGES, MASK_ENDINGS, PROBABLE_MASK_ENDINGS, UNREAD_IMAGES, VIDEOS
from trainer.data.layouts.walk import Folder, LeaveOut, Tree
from trainer.data.sources import File, Place, Source

NO_IMAGE, NO_NAMESAKE = "not an image", "no image has its name"
# OneTrainer's further masks and its images of a condition: they belong to a photo and are not trained.
FURTHER = re.compile(r"(.+)[-_.](mask\d+|masklabel\d+|condlabel\d*)", re.IGNORECASE | re.DOTALL)
BESIDE = {"references": "NAME.ref.png", "masks": "NAME.mask.png"}  # the names that are looked for beside a photo
_NUMBERED = re.compile(r"(.+)\.ref([1-9]\d*)?", re.DOTALL | re.IGNORECASE)


@dataclass
class Contents:
    """The files of a folder by kind. rest: (name, reason) of all other files. unread: images among the rest."""

    images: list[str] = field(default_factory=list)
    captions: list[str] = field(default_factory=list)
    masks: list[str] = field(default_factory=list)
    rest: list[tuple[str, str]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


def sort_out(files: Collection[str], photos: Collection[str] = ()) -> Contents:
    """A folder's files by kind. files: names without hidden ones, sorted. photos: names of photos, even if they look like
    masks."""
    contents, lacking = Contents(), plugins.lacking()
    images, captioned = ({folded(_stem(name)) for name in files if _suffix(name) in kind} for kind in (IMAGES, CAPTIONS))
    for name in files:
        suffix = _suffix(name)
        further = FURTHER.fullmatch(_stem(name)) if suffix in IMAGES else None
        plain = name in photos or not captioned.isdisjoint((folded(_stem(name)), folded(name)))
        if suffix in CAPTIONS:
            contents.captions.append(name)
        elif name.lower().endswith(MASK_ENDINGS) or not plain and folded(without_mask_ending(name)) in images:
            contents.masks.append(name)
        elif further and not plain and folded(further[1]) in images:
            contents.rest.append((name, "a further mask or a condition image of the photo beside it"))
        elif reason := why_no_photo(name, lacking):
            contents.rest.append((name, reason))
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
    """Why a file is not a photo to train on, by its name; "" if it is one. lacking: of `plugins.lacking`."""
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


def pairs(names: Iterable[str], endings: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(stem, name) of every name with one of these endings, in any letter case. The first ending counts most."""
    for ending in endings:
        matches = [name for name in names if name.lower().endswith(ending)]
        for name in sorted(matches, key=lambda name: not name.endswith(ending)):
            yield name[: -len(ending)], name


class Companions:
    """Files that belong to images by name, in any letter case and either form of its letters (a Mac's): 0.txt to 0.png, else
    0.png.txt. pairs: (stem, name) of the files, the preferred ones first."""

    def __init__(self, pairs: Iterable[tuple[str, str]], images: Iterable[str]) -> None:
        self._names: dict[str, list[str]] = {}  # by stem
        for stem, name in pairs:
            self._names.setdefault(stem, []).append(name)
        # A file with exactly an image's name belongs to that image alone. True: such a name; False: a folded one.
        self._images = {name for image in images for name in (image, _stem(image))}
        self._by_image: dict[tuple[str, bool], list[str]] = {}
        for stem, names in reversed(self._names.items()):
            key = (stem, True) if stem in self._images else (folded(stem), False)
            self._by_image.setdefault(key, []).extend(names)
        self._used: dict[str, str] = {}  # the file by the image's name, also without its suffix

    def of_name(self, name: str) -> list[str]:
        """All files of this name, the preferred one first."""
        return [*self._by_image.get((name, True), ()), *self._by_image.get((folded(name), False), ())]

    def take(self, image: str) -> str | None:
        """The preferred file of an image; None if there is none. Two images of one name share it."""
        for name in (_stem(image), image):
            file = next(iter(self.of_name(name)), "")
            # Programs that download photos write 0.png.json about each: it is seldom a caption.
            if file and not (name == image and file.lower().endswith(".json")):
                self._used |= {_stem(image): file, image: file}
                return file
        return None

    def rest(self, left_out: Iterable[str], unread: str = "", alone: str = NO_NAMESAKE) -> list[tuple[str, str]]:
        """(name, reason) of all files that are not used. left_out: images that are not trained on. unread: the reason for
        files whose image took none. alone: the reason for files without an image."""
        unused = {folded(name) for image in left_out for name in (image, _stem(image))}
        images, used = {folded(name) for name in self._images}, set(self._used.values())
        by_folded, reasons = {folded(image): name for image, name in self._used.items()}, []
        for stem, names in self._names.items():
            if instead := self._used.get(stem) or by_folded.get(folded(stem)):
                reason = f"{instead[len(stem) :].lower() if instead in names else printable(instead)} is used instead"
            elif folded(stem) in unused:
                reason = "its image is left out"
            else:
                reason = (folded(stem) in images and unread) or alone
            reasons += [(name, reason) for name in names if name not in used]
        return reasons


class References:
    """The images that the model is shown beside each photo of one folder: NAME.ref.png, NAME.ref2.png, ... beside the photos,
    or in a folder of their own, where the first may have the photo's own name; or one in each of several folders, under the
    photo's name."""

    def __init__(self, source: Source, tree: Tree, folder: str, files: Sequence[str], problems: list[str]) -> None:
        """folder: within the source, with a slash at its end. files: in it. problems: gets missing and doubled references."""
        self._roots = [root for key, root in source.folders.items() if key.startswith("references")]
        self._tree, self._folder, self._problems = tree, folder, problems
        self.used: set[str] = set()  # paths
        several, by_number = len(self._roots) > 1, dict[int, tuple[str, list[tuple[str, str]]]]()
        for place, root in enumerate(self._roots or [""] * bool(source.references), 1):
            for name in listed(root, folder, problems) if root else files:
                stem, suffix = os.path.splitext(name)
                numbered = None if several else _NUMBERED.fullmatch(stem)
                if suffix.lower() in IMAGES and not name.startswith(".") and (numbered or root):
                    base, number = (numbered[1], int(numbered[2] or 1)) if numbered else (stem, place)
                    by_number.setdefault(number, (root, []))[1].append((base, name))
        images = [name for name in files if _suffix(name) in IMAGES]
        self._by_number = {number: (root, Companions(named, images)) for number, (root, named) in sorted(by_number.items())}
        self.beside = {name for root, named in by_number.values() if not root for _, name in named}

    def take(self, image: str) -> tuple[Place, ...]:
        """The references of a photo, in order; none if one is missing. image: its name in the folder."""
        stem = _stem(image)
        matches = {n: (root, names) for n, (root, files) in self._by_number.items() if (names := files.of_name(stem))}
        photo, places = printable(str(self._tree.place(self._folder + image))), []
        for number, (root, names) in matches.items():
            name = self._folder + names[0]
            places.append(File(root, name) if root else self._tree.place(name))
            self.used |= {os.path.join(root or self._tree.root, self._folder, name) for name in names}
            if len(names) > 1:
                listing = printable(", ".join(names))
                self._problems.append(f"{photo}: {listing} are all its reference {number}; keep one")
        if not matches:
            folders = " and ".join(printable(os.path.join(root, self._folder)) for root in self._roots)
            looked = f".* in {folders}" if folders else ".ref.png beside it"
            self._problems.append(f"{photo}: no reference image for it ({printable(stem)}{looked})")
        elif (first := next(n for n in itertools.count(1) if n not in matches)) <= max(len(self._roots), *matches):
            lacking = f"reference {first}" + (f" (in {printable(self._roots[first - 1])})" if len(self._roots) > 1 else "")
            self._problems.append(f"{photo}: it has reference {max(matches)}, and {lacking} is missing")
            return ()
        return tuple(places)

    def rest(self, left_out: Collection[str]) -> list[tuple[str, str]]:
        """(name, reason) of references beside the photos that no photo has. left_out: images that are not trained on."""
        beside = [files for root, files in self._by_number.values() if not root]
        rest = [entry for files in beside for entry in files.rest(left_out, alone=f"a reference, and {NO_NAMESAKE}")]
        return [(name, reason) for name, reason in rest if os.path.join(self._tree.root, self._folder, name) not in self.used]


def listed(root: str, folder: str, problems: list[str]) -> list[str]:
    """The files of a folder within `root`, sorted; none if it does not exist, which is reported photo by photo."""
    path = os.path.join(root, folder)
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{printable(path)}: {error.strerror}")
        return []


def unused_apart(root: str, used: Collection[str], leave_out: LeaveOut, problems: list[str], noun: str) -> None:
    """Leave out the files in a folder of references or masks that no photo has. used: paths. noun: the kind of the files."""
    for folder, files in Folder(root).walk(lambda name, *reason: leave_out(os.path.join(root, name), *reason), problems):
        for name in files:
            if (path := os.path.join(root, folder + name)) not in used:
                reason = why_no_photo(name, plugins.lacking()) or f"a {noun}, and {NO_NAMESAKE}"
                leave_out(path, reason, 1)


def misplaced(source: Source) -> str:
    """Why the folder of the references or of the masks is refused; "" if it is not."""
    for key, folder in source.folders.items():
        setting = f"{printable(source.path)}: {key} = {folder!r}"
        if not os.path.isdir(folder):
            return f"{setting}: no such folder; 'files' takes {BESIDE[key.partition('[')[0]]} beside each photo"
        inner, outer = (os.path.join(os.path.realpath(path), "") for path in (source.path, folder))
        if inner.startswith(outer):
            return f"{setting} holds the photos themselves; give a folder of {key} alone, or 'files'"
    return ""


def folded(name: str) -> str:
    """A name as it is compared with others."""
    return text.spaced(text.folded(name))


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()
