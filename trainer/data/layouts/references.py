"""Reference images: those that the model is shown beside each photo, found by the photo's name."""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from trainer.base.account import counted
from trainer.base.console import printable
from trainer.data.images import plugins
from trainer.data.images.kinds import IMAGES
from trainer.data.layouts.beside import folded, why_no_photo
from trainer.data.layouts.walk import Folder, LeaveOut, Tree
from trainer.data.sources import File, FoundPhoto, Place, Source

ALONE = {"references": "NAME.ref.png", "masks": "NAME.mask.png"}  # what is looked for beside the photos
_NUMBERED = re.compile(r"(.+)\.ref([1-9]\d*)?", re.DOTALL | re.IGNORECASE)


class References:
    """Finds the references of the photos of one folder: NAME.ref.png, NAME.ref2.png, ... beside them, or in a folder of
    their own, where the first may have the photo's own name; or in a folder for each, under the photo's name."""

    def __init__(self, source: Source, tree: Tree, folder: str, files: Sequence[str], problems: list[str]) -> None:
        """folder: within the source, with a slash at its end. files: in it. problems: get what is missing or doubled."""
        self.roots = [root for key, root in source.folders.items() if key.startswith("references")]
        self.problems = problems
        self._tree, self._folder = tree, folder
        self.taken: set[tuple[str, str]] = set()  # (root or "", name within it)
        # One whose photo has exactly its name belongs to that photo alone; of others the letters' case does not count.
        self._images = {stem for stem, suffix in map(os.path.splitext, files) if suffix.lower() in IMAGES}
        # By the photo's name, and whether it is exact; then by the reference's number.
        self._by_name: dict[tuple[str, bool], dict[int, list[tuple[str, str]]]] = {}
        if self.roots:
            for place, root in enumerate(self.roots, 1):
                self._sort_in(root, listed(root, folder, problems), place)
        elif source.references:
            self._sort_in("", files, 0)

    def _sort_in(self, root: str, names: Iterable[str], place: int) -> None:
        """place: of the root among the folders; 0: beside the photos, where each name has a number."""
        for name in names:
            stem, suffix = os.path.splitext(name)
            numbered = _NUMBERED.fullmatch(stem) if len(self.roots) < 2 else None
            if suffix.lower() in IMAGES and not name.startswith(".") and (numbered or place):
                base, number = (numbered[1], int(numbered[2] or 1)) if numbered else (stem, place)
                key = (base, True) if base in self._images else (folded(base), False)
                self._by_name.setdefault(key, {}).setdefault(number, []).append((root, self._folder + name))

    @property
    def beside(self) -> set[str]:
        """The files of the photos' own folder that are references."""
        found = (each for numbered in self._by_name.values() for names in numbered.values() for each in names)
        return {os.path.basename(name) for root, name in found if not root}

    def take(self, image: str) -> tuple[Place, ...]:
        """The references of a photo, in order. image: its name in the folder."""
        stem = os.path.splitext(image)[0]
        by_number: dict[int, list[tuple[str, str]]] = {}
        for key in ((stem, True), (folded(stem), False)):
            for number, names in self._by_name.get(key, {}).items():
                by_number.setdefault(number, []).extend(names)
        self.taken |= {name for names in by_number.values() for name in names}
        where = printable(str(self._tree.place(self._folder + image)))
        if not by_number:
            places = " and ".join(printable(os.path.join(root, self._folder)) for root in self.roots)
            place = f".* in {places}" if places else ".ref.png beside it"
            self.problems.append(f"{where}: no reference image for it ({printable(stem)}{place})")
        elif missing := set(range(1, max(len(self.roots), *by_number) + 1)) - by_number.keys():
            first = min(missing)
            lacking = f"reference {first}" + (f" (in {printable(self.roots[first - 1])})" if len(self.roots) > 1 else "")
            self.problems.append(f"{where}: it has reference {max(by_number)}, and {lacking} is missing")
        for number, names in by_number.items():
            if len(names) > 1:
                all_names = ", ".join(printable(os.path.basename(name)) for _, name in names)
                self.problems.append(f"{where}: {all_names} are all its reference {number}; keep one")
        firsts = [by_number[number][0] for number in sorted(by_number)]
        return tuple(File(root, name) if root else self._tree.place(name) for root, name in firsts)

    def rest(self, left_out: Iterable[str]) -> list[tuple[str, str]]:
        """(name, reason) of references beside the photos that no photo has. left_out: images that are not trained on."""
        unused = {folded(os.path.splitext(image)[0]) for image in left_out}
        return [
            (
                os.path.basename(name),
                "its image is left out" if folded(stem) in unused else "a reference, and no image has its name",
            )
            for (stem, _), by_number in self._by_name.items()
            for names in by_number.values()
            for root, name in names
            if not root and (root, name) not in self.taken
        ]


def listed(root: str, folder: str, problems: list[str]) -> list[str]:
    """The files of a folder within `root`; none where it is not there, which is said of each photo."""
    path = os.path.join(root, folder)
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{printable(path)}: {error.strerror}")
        return []


def unused(root: str, taken: Collection[tuple[str, str]], leave_out: LeaveOut, problems: list[str], noun: str) -> None:
    """Leave out the files in a folder of references or masks that no photo has. taken: (root, name within it).
    noun: what a file is."""
    for folder, files in Folder(root).walk(lambda name, *why: leave_out(os.path.join(root, name), *why), problems):
        for name in files:
            if (root, folder + name) not in taken:
                why = why_no_photo(name, plugins.lacking()) or f"a {noun}, and no image has its name"
                leave_out(os.path.join(root, folder + name), why, 1)


def misplaced(source: Source) -> str:
    """Why the folder of the references or of the masks cannot be that; "" where it can."""
    for key, folder in source.folders.items():
        given = f"{printable(source.path)}: {key} = {folder!r}"
        if not os.path.isdir(folder):
            return f"{given}: no such folder; 'files' takes {ALONE[key.partition('[')[0]]} beside each photo"
        inner, outer = (os.path.join(os.path.realpath(path), "") for path in (source.path, folder))
        if inner.startswith(outer):
            return f"{given} holds the photos themselves; give a folder of {key} alone, or 'files'"
    return ""


def refuse_differing(photos: Iterable[FoundPhoto]) -> list[str]:
    """A problem for each photo with another count of references than most of its source: batches have one layout."""
    counts = {photo.image: len(photo.references) for photo in photos if photo.references}
    usual = next((count for count, _ in Counter(counts.values()).most_common(1)), 0)
    rest = f"and most photos of its source have {usual}; give all the same number, or make two sources of them"
    return [f"{image}: {counted(count, 'reference')}, {rest}" for image, count in counts.items() if count != usual]
