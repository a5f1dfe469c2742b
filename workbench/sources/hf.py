"""A dataset of the library `datasets`, from the Hugging Face hub or from this disk: each row has an image and its caption
(https://huggingface.co/docs/datasets/image_dataset)."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.base.account import Account, Entry, Heading
from trainer.base.console import printable
from trainer.base.errors import one_line, reading, shown
from trainer.base.text import refuse_stand_in
from trainer.data.images.kinds import IMAGES, TABLES
from trainer.data.layouts import walk
from trainer.data.layouts.folder import captions_note
from trainer.data.layouts.table import FIELDS, FILE_NAMES, caption_field, caption_in
from trainer.data.layouts.walk import NO_EXCLUSIONS, Exclusions, Folder, LeaveOut
from trainer.data.sources import HUB as PREFIX
from trainer.data.sources import File, ListedPhoto, Listing, Source

# NAME, or with a configuration or a split: NAME:CONFIGURATION@SPLIT. The first spelling whose NAME is a path that exists
# is used, else the last, which no path with "@" matches.
SPELLINGS = (
    r"(?P<name>.+)",
    r"(?P<name>.+)@(?P<split>[^@/]+)",
    r"(?P<name>.+):(?P<configuration>[^:@/\\]+)(?:@(?P<split>[^@/]+))?",
    r"(?P<name>[^@]+?)(?::(?P<configuration>[^:@/\\]+))?(?:@(?P<split>[^@/]+))?",
)
OF_TRAIN = re.compile(r"(?<![a-z])train(ing)?(?![a-z])")  # a folder or a file that is in the split on purpose
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
IMAGE_COLUMN = "image"


def reads(path: str) -> bool:
    """Whether a source's path names a dataset."""
    return path.startswith(PREFIX)


def caption_places(source: Source) -> str:
    """The columns where captions of the source's photos are looked for, in words."""
    if source.caption_column:
        return f"column {source.caption_column} of its row"
    return f"column {' or '.join(FIELDS)} of its row; caption_column names another"


def listing(source: Source, exclusions: Exclusions) -> Listing:
    """A dataset's photos and captions; samples are named by their rows, from 0 on. Its path: hf:NAME for the hub, or hf:PATH
    for a folder or file that `datasets` reads or `save_to_disk` wrote."""
    try:
        return _listing(source, exclusions)
    except ValueError as error:
        return Listing([], problems=[f"{printable(source.path)}: {error}"])


@dataclass(frozen=True, slots=True)
class Images:
    """A dataset's images. dataset: the one column `column`, with undecoded images. roots: folders whose files its rows may
    name: its own and the library's caches."""

    title: str
    dataset: Any = field(repr=False)
    column: str
    roots: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RowImage:
    """The image of a row. Threads and processes may read it at the same time: the dataset is memory-mapped."""

    images: Images = field(repr=False)
    number: int

    def __str__(self) -> str:
        return f"{printable(self.images.title)}, row {self.number}"

    def read(self) -> bytes:
        """Raises OSError, and ValueError if the row has no image."""
        value = self.images.dataset[self.number][self.images.column]
        if value is None or (value["bytes"] is None and not value["path"]):
            raise ValueError("the row has no image")
        return value["bytes"] if value["bytes"] is not None else self._file(value["path"]).read()

    def stamp(self) -> None:
        """No stamp: only reading a row shows whether it changed."""

    def _file(self, path: str) -> File:
        whole = os.path.normpath(os.path.join(self.images.roots[0], path))
        for root in self.images.roots:
            if whole.startswith(os.path.join(root, "")):
                return File(root, os.path.relpath(whole, root))
        raise ValueError(f"names {path!r}, a file outside of the dataset; save it with its images (save_to_disk does)")


def _listing(source: Source, exclusions: Exclusions) -> Listing:
    name, configuration, requested = _parse_path(source.path)
    if source.captions in ("filename", "folder"):
        raise ValueError(f'captions = "{source.captions}" has no effect: its images are not files; set caption_column')
    account = Account()
    loaded, files = _load(name, configuration, requested, account, exclusions)
    rows, split = _split(loaded, requested)
    _enter_the_rest(account, name, loaded, files, split, exclusions)
    for path in filter(_is_image, files.get(split, ())):
        if odd := walk.looks_unintended(os.path.relpath(path, name), regularisation=source.regularisation):
            account.add(Heading.WARNING, odd[0], [path], noun="photo", remedy=odd[1])
    dataset, column = _image_column(rows, source.image_column)
    field = caption_field([each for each in rows.column_names if each != column], source.caption_column)
    if source.caption_column and field is None:
        raise ValueError(f"has no column {source.caption_column} for captions ({shown(rows.column_names, 200)})")
    images, problems = Images(source.path, dataset, column, _roots(name)), []
    captions = _captions(rows, field, problems, source.path) if source.captions == "auto" and field else {}
    photos, of_column = [], f"column {field}"
    for number in range(len(dataset)):
        origin = of_column if number in captions else ""
        photos.append(ListedPhoto(source, str(number), RowImage(images, number), captions.get(number), caption_from=origin))
    looked = f"Its columns: {printable(', '.join(rows.column_names))}. caption_column names another one"
    title, part = printable(source.path), f"split {printable(split)}, " if split else ""
    line = captions_note(title, source.captions, Counter(photo.caption_from for photo in photos), looked)
    notes = (line, f"{title}: {part}images of column {printable(column)}")
    return Listing(photos, Account(Entry(Heading.NOTE, note) for note in notes) + account, problems)


def _enter_the_rest(
    account: Account, name: str, loaded: Any, files: Mapping[str, list[str]], split: str, exclusions: Exclusions
) -> None:
    """Enter the rows of other splits, or the files of a folder on this disk, that are not trained on."""
    splits = {path: other for other, paths in files.items() for path in paths}
    account.add(Heading.USED, "", count=sum(not _is_image(path) for path in files.get(split, ())), noun="data file")

    def leave_out(file: str, reason: str, count: int) -> None:
        account.add(Heading.LEFT_OUT, reason, [os.path.join(name, file)], count=count)

    for path in _paths(name, leave_out, exclusions) if files else ():
        if (other := splits.get(os.path.abspath(path))) != split:
            leave_out(os.path.relpath(path, name), f"in the split {other}" if other else "in no split", 1)
    if isinstance(loaded, Mapping) and not any(map(_is_image, splits)):
        for other, rows in loaded.items():
            if other != split:
                account.add(Heading.LEFT_OUT, "in another split", [f"split {other}"], count=len(rows), noun="row")


def _paths(root: str, leave_out: LeaveOut = lambda *_: None, exclusions: Exclusions = NO_EXCLUSIONS) -> Iterator[str]:
    """The files of a folder on this disk, as `walk` finds them."""
    for folder, files in Folder(root, exclusions).walk(leave_out, []):
        yield from (os.path.join(root, folder + file) for file in files)


def _parse_path(path: str) -> tuple[str, str | None, str | None]:
    """(name, configuration, split). A path that exists may hold "@" and ":" itself. Raises ValueError."""
    for spelling in SPELLINGS:
        match = re.fullmatch(spelling, path.removeprefix(PREFIX))
        if match and (spelling is SPELLINGS[-1] or os.path.exists(match["name"])):
            groups = match.groupdict()
            return groups["name"], groups.get("configuration"), groups.get("split")
    raise ValueError("write hf:NAME, hf:NAME@SPLIT or hf:NAME:CONFIGURATION@SPLIT")


def _load(
    name: str, configuration: str | None, requested: str | None, account: Account, exclusions: Exclusions
) -> tuple[Any, Mapping[str, list[str]]]:
    """(a dataset, or several by split; the files of a folder on this disk by split). Raises ValueError with the reason."""
    local = os.path.exists(name)
    if not local and not HUB_NAME.fullmatch(name):
        raise ValueError("no such folder or file, and not a valid name of a dataset on the hub")
    import datasets  # takes seconds and a hundred megabytes, so only if needed

    for path in [name] if os.path.isfile(name) else _paths(name) if local else ():
        if path.lower().endswith((*TABLES, ".json", ".arrow", ".tar", ".zip")) and os.access(path, os.R_OK):
            with reading(printable(path), remedy=""), open(path, "rb") as file:
                refuse_stand_in(file.read(200))
    saved = [file for file in ("dataset_dict.json", "state.json") if os.path.exists(os.path.join(name, file))]
    if saved and configuration:
        raise ValueError(f"was written by save_to_disk, which knows no configurations; leave out :{configuration}")
    if saved:
        return _call(local, datasets.load_from_disk, name), {}
    if os.path.isfile(name):
        folder, file = os.path.split(os.path.abspath(name))
        return _call(local, datasets.load_dataset, folder, configuration, data_files=file), {}
    if not local:
        return _call(local, datasets.load_dataset, name, configuration), {}
    config = _call(local, datasets.load_dataset_builder, name, configuration).config
    theirs, root = config.data_files or {}, os.path.abspath(name)
    ours = set(map(os.path.realpath, _paths(root, exclusions=exclusions)))
    files = {split: [path for path in paths if os.path.realpath(path) in ours] for split, paths in theirs.items()}
    if requested is None and config.name == "default" and not _split_on_purpose(root, files):
        # The library takes "test tubes.png" for one of a split "test", and loses what has no such word.
        kinds = {_suffix(path) for paths in files.values() for path in paths}
        endings = (*kinds, *FILE_NAMES)
        files = {"train": [path for path in _paths(root, exclusions=exclusions) if path.lower().endswith(endings)]}
        note = "the folder is read whole: 'train' or 'test' in a file name does not divide it"
        account.add(Heading.NOTE, f"{printable(name)}: {note}; {PREFIX}{printable(name)}@train reads one split")
    split = requested or "train"
    # A split of photos is read alone: the library takes a table of captions in all splits, or in none.
    read = {split: files[split]} if any(map(_is_image, files.get(split, ()))) else files
    return _call(local, datasets.load_dataset, name, configuration, data_files=None if read == theirs else read), files


def _call(local: bool, call: Callable[..., Any], *values: Any, **named: Any) -> Any:
    action, remedy = "read as a dataset", "repair its files, or write it again with save_to_disk or to_parquet"
    if not local:
        action = "fetched from the hub, and there is no such folder"
        remedy = "without a network, fetch it elsewhere, write it with save_to_disk, and give that folder"
    try:
        return call(*values, **named)
    except MemoryError:
        raise
    # Any exception: the readers of a dozen formats raise many kinds, also AttributeError for a malformed file.
    except Exception as error:
        raise ValueError(f"cannot be {action} ({_message(error)}); {remedy}") from error


def _split_on_purpose(root: str, files: Mapping[str, list[str]]) -> bool:
    """Whether a folder's splits are intended: splits of photos by folders, of other data by names of files; or one split
    alone has all files."""
    in_splits = {path for mine in files.values() for path in mine}
    of_photos = any(map(_is_image, in_splits))
    names = [os.path.relpath(path, root).lower() for path in files.get("train", ())]
    if names and all(OF_TRAIN.search(os.path.dirname(name) if of_photos else name) for name in names):
        return True
    suffixes = set(map(_suffix, in_splits))
    left_over = any(path not in in_splits and _suffix(path) in suffixes for path in _paths(root))
    return not left_over and (len(files) == 1 or not of_photos)


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def _is_image(path: str) -> bool:
    return _suffix(path) in IMAGES


def _message(error: BaseException) -> str:
    """The message in one line, with the cause if the library only says that something went wrong."""
    text = printable(one_line(error))
    cause = error.__cause__ or error.__context__
    more = f": {_message(cause)}" if cause is not None and text.startswith("An error occurred while generating") else ""
    return f"{type(error).__name__}: {text}{more}"


def _split(loaded: Any, requested: str | None) -> tuple[Any, str]:
    """(the dataset, the name of its split; "" if it has none)."""
    if not isinstance(loaded, Mapping):
        name = "" if loaded.split is None else str(loaded.split)
        if requested not in (None, name):
            has = f"it is the split {name}" if name else "it has no splits"
            raise ValueError(f"has no split {requested}, {has}; leave out @{requested}")
        return loaded, name
    split = requested or ("train" if "train" in loaded or len(loaded) != 1 else next(iter(loaded)))
    if split not in loaded:
        raise ValueError(f"has no split {split}; name one of its own with @: {printable(', '.join(map(str, loaded)))}")
    return loaded[split], split


def _image_column(loaded: Any, requested: str | None) -> tuple[Any, str]:
    """(the dataset's column of images alone, the column's name)."""
    import datasets

    columns = [name for name, kind in loaded.features.items() if isinstance(kind, datasets.Image)]
    columns = columns or [name for name in loaded.column_names if name == IMAGE_COLUMN]
    column = requested or (columns[0] if len(columns) == 1 else None)
    if column not in loaded.column_names:
        which = f"no column {requested}" if requested else "several columns of images" if columns else "no column of images"
        raise ValueError(f"has {which} ({shown(loaded.column_names, 200)}); name it with image_column")
    try:
        return loaded.select_columns([column]).cast_column(column, datasets.Image(decode=False)), column
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(f"column {column} holds no images ({loaded.features[column]}); name it with image_column") from error


def _captions(loaded: Any, column: str, problems: list[str], title: str) -> dict[int, str]:
    captions: dict[int, str | None] = {}
    batches = loaded.select_columns([column]).iter(batch_size=1000)
    for number, value in enumerate(value for rows in batches for value in rows[column]):
        try:
            captions[number] = caption_in(value)
        except ValueError as error:
            problems.append(f"{printable(title)}, row {number}: {error}")
    return {number: caption for number, caption in captions.items() if caption is not None}


def _roots(name: str) -> tuple[str, ...]:
    """`Images.roots`, the dataset's own folder first: a relative name in a row is relative to it."""
    from datasets import config

    caches = (config.HF_DATASETS_CACHE, config.HF_CACHE_HOME)  # of what it prepared, and of all that it fetched
    root = [os.path.dirname(name) if os.path.isfile(name) else name] if os.path.exists(name) else []
    return tuple(os.path.abspath(os.path.expanduser(folder)) for folder in (*root, *caches))
