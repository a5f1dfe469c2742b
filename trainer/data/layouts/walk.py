"""The files of a folder and of its subfolders. Left out are files and folders of systems, bins, runs and other programs."""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trainer.base.console import printable
from trainer.base.run_layout import holds_run, made_by_run
from trainer.data.images.kinds import TABLES
from trainer.data.sources import HUB, File, Place, Source

LeaveOut = Callable[[str, str, int], None]  # (name, reason, count of files)

# Windows, macOS, Linux, Android; NAS of Synology, QNAP, NetApp; Syncthing, GoodSync. Names that begin with a dot are hidden.
SYSTEM_FOLDERS = frozenset({
    "$recycle.bin", "recycler", "recycled", "system volume information", "found.000", "msdownld.tmp", "__macosx",
    "lost+found", "network trash folder", "temporary items", "lost.dir", "@eadir", "#recycle", "#snapshot", "@recycle",
    "@recently-snapshot", "@tmp", "@sharebin", "@sharesnap", "@__thumb", "@transcode", "~snapshot", "_gsdata_",
    "~stversions", "__pycache__", "node_modules",
})  # fmt: skip
KOHYA_ZERO = re.compile(r"0_\s*\S.*", re.DOTALL)
RUN = "the output of a training run"
OTHER_SOURCE = "read as data.sources."
MOVE_OUT = "move out what should not be trained"
# Photos that are trained and look unintended, by the name of a folder or the end of their own name.
COPIES = re.compile(
    r"logs?|wandb|tensorboard|grids?|validation(_\w+)?|(txt|img)2img-(images|grids)|step-\d+|old|bin|te?mp|"
    r"(recently )?deleted|papierkorb|corbeille|papelera|"
    r"(.*[-_. ])?(samples?|outputs?|previews?|backups?|thumb(nail)?s?|trash|recycle ?bin|rejected|discarded|duplicates?)"
    r"([-_. ].*)?",
    re.IGNORECASE | re.DOTALL,
)
MASKS = r"(alpha_?)?masks?|mask(label|_?image)s?|condlabels?|control(_?image|_?net)?s?|condition(s|ing(_?images?|_?data)?)?"
CONTROLS = (
    r"canny|depth(_?maps?)?|normal_?maps?|open_?pose|dw_?pose|line_?art|scribbles?|soft_?edges?|hed|mlsd|segmentations?|"
    r"seg(_?maps?)?|matte|alpha"
)
MASK_FOLDER = re.compile(rf"_*({MASKS})[-_ ]?\d*", re.IGNORECASE)
REGULARISATION = re.compile(
    r"(class|prior)s?([-_ ]?(images?|data|dir|photos))?|"
    r"(.*[-_ ])?(reg|regulari[sz]ation)s?((images?|data|dir|photos)|[-_ ].*)?",
    re.IGNORECASE | re.DOTALL,
)
LOOKS_LIKE_MASK = re.compile(
    rf"(.*[-_.]|\d+ )?({MASKS}|{CONTROLS})[-_ (]*\d*\)?|masks?[-_. (]+\d.*|masks?_.+|.*\.ref\d*", re.IGNORECASE | re.DOTALL
)


@dataclass(frozen=True)
class Exclusions:
    """Folders that a source does not read, by `inode`. owners: the reason; "" for a folder of the source's references or
    masks, whose files are counted elsewhere. outputs: folders of the run that is planned."""

    owners: Mapping[tuple[int, int] | None, str] = field(default_factory=dict)
    outputs: Collection[tuple[int, int] | None] = ()


NO_EXCLUSIONS = Exclusions()


def folder_of(source: Source) -> str:
    """The folder with the files of a source; for an archive its own path."""
    path = source.path.removeprefix(HUB) or "."
    if path != source.path and not os.path.exists(path):
        path = re.sub(r"(:[^:@/\\]+)?(@[^@/]+)?$", "", path)
    return os.path.dirname(path) or "." if path.lower().endswith(TABLES) and not os.path.isdir(path) else path


def exclusions_of(source: Source, sources: Sequence[Source], outputs: Sequence[str]) -> Exclusions:
    """The folders that `source` does not read: other sources, references, masks, and `outputs` of the run."""
    owners = {}
    for other in sources:
        if os.path.isdir(folder_of(other)) and other is not source:
            owners[inode(folder_of(other))] = f"{OTHER_SOURCE}{other.name} alone, and not with the source around it"
        for key, folder in other.folders.items():
            owners[inode(folder)] = "" if other.index == source.index else f"{key} of data.sources.{other.index}"
    root = inode(folder_of(source))
    owners = {key: reason for key, reason in owners.items() if key not in (None, root)}
    return Exclusions(owners, {inode(path) for path in outputs})


def exclusion(name: str, *, is_folder: bool) -> str:
    """Why a file or folder is left out, by its own name; "" if it is read."""
    if name.startswith("."):
        return "hidden"
    if not is_folder:
        return ""
    if name.casefold() in SYSTEM_FOLDERS or name.casefold().endswith(".lrdata"):
        return "thumbnails, settings or the bin of a system or a NAS"
    zero = "the folder's number is 0, which means no repeats (kohya's sd-scripts skips it, too); to train it, name it 1_NAME"
    return zero if KOHYA_ZERO.fullmatch(name) else ""


def exclusion_in_archive(path: str) -> str:
    """Why a file in an archive is left out, by its name and those of the folders around it; "" if it is read."""
    *folders, file = path.split("/")
    reasons = (exclusion(name, is_folder=True) for name in folders)
    return next(filter(None, reasons), exclusion(file, is_folder=False))


def inode(path: str) -> tuple[int, int] | None:
    """(device, inode) of a folder, the same by every path to it; None if it does not exist."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def looks_unintended(name: str, *, regularisation: bool) -> tuple[str, str] | None:
    """(why a photo looks unintended, by its name within the source; the remedy), or None. regularisation: of the source."""
    *folders, file = name.split("/")
    if LOOKS_LIKE_MASK.fullmatch(os.path.splitext(file)[0]) or any(map(LOOKS_LIKE_MASK.fullmatch, folders)):
        return "named like a mask, a reference or an image for a ControlNet, and trained as a photo", MOVE_OUT
    if any(map(COPIES.fullmatch, folders)):
        return "in a folder whose name means samples, copies or rejected photos, and trained", MOVE_OUT
    if not regularisation and any(map(REGULARISATION.fullmatch, folders)):
        reason = "in a folder whose name means regularisation images, and trained as photos of the subject"
        return reason, "give the folder a source of its own with regularisation = true"
    return None


class Tree(Protocol):
    """Files in folders. title: for people. root: names are relative to it; root and name joined are a path for people."""

    title: str
    root: str

    def walk(self, leave_out: LeaveOut, problems: list[str]) -> Iterator[tuple[str, list[str]]]:
        """(folder, the sorted names of its files) for every folder, a folder before its subfolders. A folder's name is
        relative to `root`, with slashes and one at its end; `root` itself is "". leave_out: called for everything else."""
        ...

    def place(self, name: str) -> Place:
        """The place of a file in the folder that `walk` yielded last. name: relative to `root`."""
        ...


class Folder:
    """A folder on the disk, listed once; no file is opened. Symbolic links are followed, and a folder that is reached twice
    is read once. Files and folders of other programs and `exclusions` are left out."""

    def __init__(self, root: str, exclusions: Exclusions = NO_EXCLUSIONS) -> None:
        self.title, self.root, self._exclusions = root, root, exclusions

    def walk(self, leave_out: LeaveOut, problems: list[str]) -> Iterator[tuple[str, list[str]]]:
        pending, first_names = [""], dict[tuple[int, int], str]()
        while pending:
            folder = pending.pop()
            path = os.path.join(self.root, folder) if folder else self.root
            files, inner = [], []
            try:
                status = os.stat(path)
                key = status.st_dev, status.st_ino
                first = first_names.setdefault(key, folder)
                if first != folder:
                    leave_out(folder, f"a link to the folder {printable(first or self.root)}, which is read already", 0)
                    continue
                if folder and key in self._exclusions.owners:
                    if reason := self._exclusions.owners[key]:
                        leave_out(folder, reason, 0)
                    continue
                with os.scandir(path) as entries:
                    names = {entry.name: _is_folder(entry) for entry in entries}
                of_a_run = key in self._exclusions.outputs or holds_run(names.keys())
                if folder and of_a_run:
                    leave_out(folder, RUN, _files_below(path))
                    continue
                for name, is_folder in names.items():
                    reason = exclusion(name, is_folder=is_folder)
                    if reason := reason or (RUN if of_a_run and made_by_run(name) else ""):
                        count = _files_below(os.path.join(path, name)) if is_folder else 1
                        leave_out(folder + name + "/" * is_folder, reason, count)
                    elif is_folder:
                        inner.append(folder + name + "/")
                    else:
                        files.append(name)
            except OSError as error:
                problems.append(f"{printable(path)}: {error.strerror}")
            pending += sorted(inner, key=lambda name: name[:-1], reverse=True)
            yield folder, sorted(files)

    def place(self, name: str) -> Place:
        return File(self.root, name)


def _files_below(path: str) -> int:
    return sum(len(files) for _, _, files in os.walk(path))


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # links in a circle: reading it as a file will say so
        return False
