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
MOVE_OUT = "move out what should not be trained"
# What is trained and looks unintended, by the name of a folder or the end of a photo's name.
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
class Apart:
    """Folders with an owner, by `inode`. owners: the reason to leave a folder out; "" for one of the source's references
    or masks, which are counted elsewhere. outputs: of the run that is planned."""

    owners: Mapping[tuple[int, int] | None, str] = field(default_factory=dict)
    outputs: Collection[tuple[int, int] | None] = ()


def folder_of(source: Source) -> str:
    """The folder whose files are the source's; of an archive its own path."""
    path = source.path.removeprefix(HUB) or "."
    if path != source.path and not os.path.exists(path):
        path = re.sub(r"(:[^:@/\\]+)?(@[^@/]+)?$", "", path)
    return os.path.dirname(path) or "." if path.lower().endswith(TABLES) and not os.path.isdir(path) else path


def owned(source: Source, sources: Sequence[Source], outputs: Sequence[str]) -> Apart:
    """What lies below a source and is not its own."""
    owners = {}
    for other in sources:
        if os.path.isdir(folder_of(other)) and other is not source:
            owners[inode(folder_of(other))] = f"{OWNED}{other.name} alone, and not with the source around it"
        for key, folder in other.folders.items():
            owners[inode(folder)] = "" if other is source else f"{key} of data.sources.{other.index}"
    node = inode(folder_of(source))
    return Apart({key: why for key, why in owners.items() if key not in (None, node)}, {inode(path) for path in outputs})


def why(name: str, *, is_folder: bool) -> str:
    """Why a file or folder is left out, by its own name; "" if it is read."""
    if name.startswith("."):
        return "hidden"
    if not is_folder:
        return ""
    if name.casefold() in SYSTEM_FOLDERS or name.casefold().endswith(".lrdata"):
        return "thumbnails, settings or the bin of a system or a NAS"
    zero = "the folder's number is 0, which means no repeats (kohya's sd-scripts skips it, too); to train it, name it 1_NAME"
    return zero if KOHYA_ZERO.fullmatch(name) else ""


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


def looks_unintended(name: str, *, regularisation: bool) -> tuple[str, str] | None:
    """(why a photo looks unintended, by its name within the source; the remedy), or None. regularisation: of the source."""
    *folders, file = name.split("/")
    if LOOKS_LIKE_MASK.fullmatch(os.path.splitext(file)[0]) or any(map(LOOKS_LIKE_MASK.fullmatch, folders)):
        return "named like a mask, a reference or an image for a ControlNet, and trained as a photo", MOVE_OUT
    if any(map(COPIES.fullmatch, folders)):
        return "in a folder whose name means samples, copies or rejected photos, and trained", MOVE_OUT
    if not regularisation and any(map(REGULARISATION.fullmatch, folders)):
        why = "in a folder whose name means regularisation images, and trained as photos of the subject"
        return why, "give the folder a source of its own with regularisation = true"
    return None
