"""Names of files and folders that are no photos of the person: of systems, bins, runs and other programs."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from trainer.data.images.kinds import TABLES
from trainer.data.sources import HUB, Source

# Windows, macOS, Linux, Android; NAS of Synology, QNAP, NetApp; Syncthing, GoodSync. Names that begin with a dot are hidden.
SYSTEM_FOLDERS = frozenset({
    "$recycle.bin", "recycler", "recycled", "system volume information", "found.000", "msdownld.tmp", "__macosx",
    "lost+found", "network trash folder", "temporary items", "lost.dir", "@eadir", "#recycle", "#snapshot", "@recycle",
    "@recently-snapshot", "@tmp", "@sharebin", "@sharesnap", "@__thumb", "@transcode", "~snapshot", "_gsdata_",
    "~stversions", "__pycache__", "node_modules",
})  # fmt: skip
KOHYA_ZERO = re.compile(r"0_\s*\S.*", re.DOTALL)
RUN = "the output of a training run"
OWNED = "read as data.sources."
# What is trained and looks unintended, by the name of a folder or the end of a photo's name.
COPIES = re.compile(
    r"(samples?|logs?|wandb|tensorboard|outputs?|grids?|previews?|validation(_\w+)?|(txt|img)2img-(images|grids)|step-\d+|backups?|old|thumbs?|"
    r"thumbnails?|trash|bin|recycle ?bin|deleted|rejected|discarded|duplicates?)",
    re.IGNORECASE,
)
MASKS = (
    r"(alpha_?)?masks?|mask(labels?|_?images?)|condlabels?|control(s|_?images?|_?nets?)?|condition(s|ing(_?images?|_?data)?)?"
)
CONTROLS = (
    r"canny|depth(_?maps?)?|normal_?maps?|open_?pose|dw_?pose|line_?art|scribbles?|soft_?edges?|hed|mlsd|segmentations?|"
    r"seg_?maps?|alpha"
)
MASK_FOLDER = re.compile(rf"_*({MASKS})[-_ ]?\d*", re.IGNORECASE)
LOOKS_LIKE_MASK = re.compile(rf"(.*[-_.])?({MASKS}|{CONTROLS})\d*|.*\.ref\d*", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Apart:
    """Folders with an owner, by device and inode. owners: the reason to leave out a folder whose files another source counts;
    "" for a folder of references, which are counted elsewhere. outputs: of the run that is planned."""

    owners: Mapping[tuple[int, int] | None, str] = field(default_factory=dict)
    outputs: Collection[tuple[int, int] | None] = ()


def folder_of(source: Source) -> str:
    """The folder whose files are the source's; of an archive or a single file none, but a path that is no folder."""
    path = source.path.removeprefix(HUB) or "."
    return os.path.dirname(path) or "." if path.lower().endswith(TABLES) and not os.path.isdir(path) else path


def owned(source: Source, sources: Sequence[Source], outputs: Sequence[str]) -> Apart:
    """What lies below a source and is not its own. sources: all of them. outputs: folders of the run."""
    owners = {}
    for other in sources:
        if os.path.isdir(folder_of(other)) and other is not source:
            owners[inode(folder_of(other))] = f"{OWNED}{other.index} alone, and not with the source around it"
        if other.references and other.references != "files":
            owners[inode(other.references)] = "" if other is source else f"references of data.sources.{other.index}"
    own = inode(folder_of(source))
    return Apart({key: why for key, why in owners.items() if key not in (None, own)}, {inode(path) for path in outputs})


def why(name: str, *, is_folder: bool) -> str:
    """Why a file or folder is left out, by its own name; "" if it is read."""
    if name.startswith("."):
        return "hidden"
    if is_folder and name.casefold() in SYSTEM_FOLDERS:
        return "thumbnails, settings or the bin of a system or a NAS"
    if is_folder and KOHYA_ZERO.fullmatch(name):
        return "the folder's number is 0: no repeats, as with kohya's sd-scripts"
    return ""


def why_path(path: str) -> str:
    """The same of a file in an archive, or of a folder around it."""
    *folders, file = path.split("/")
    return next((reason for name in folders if (reason := why(name, is_folder=True))), why(file, is_folder=False))


def inode(path: str) -> tuple[int, int] | None:
    """What a folder is known by, however it is reached; None if it is not there."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def files_below(path: str) -> int:
    """The number of files in a folder that is left out, links to folders not followed."""
    return sum(len(files) for _, _, files in os.walk(path))


def looks_unintended(name: str) -> str:
    """Why a photo looks as if it should not be trained, by its name within the source; "" if it does not."""
    *folders, file = name.split("/")
    if LOOKS_LIKE_MASK.fullmatch(os.path.splitext(file)[0]) or any(map(LOOKS_LIKE_MASK.fullmatch, folders)):
        return "named like a mask, a reference or an image for a ControlNet, and trained as a photo"
    if any(map(COPIES.fullmatch, folders)):
        return "in a folder whose name means samples, copies or rejected photos, and trained"
    return ""
