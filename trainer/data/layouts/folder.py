"""A folder of images, with captions beside them, in tables, or in the names of folders. Subfolders are searched too."""

import os
import re
import sys
from collections import Counter
from functools import partial
from typing import NamedTuple

from trainer.base.account import Account, Heading, counted
from trainer.base.console import printable
from trainer.base.text import composed, spaced
from trainer.data.images import plugins
from trainer.data.images.kinds import CAPTIONS, IMAGES, JSON, MASK_ENDINGS, PROBABLE_MASK_ENDINGS, TABLES
from trainer.data.layouts import beside, walk
from trainer.data.layouts import table as metadata
from trainer.data.layouts.beside import Companions, References, folded, pairs, readable, sort_out, why_no_photo
from trainer.data.layouts.table import ImageRow, ImageTable, caption_field
from trainer.data.layouts.walk import Exclusions, Folder, Tree
from trainer.data.sources import File, ListedPhoto, Listing, Place, Source

OF_FILE, OF_FOLDER, OF_KOHYA = "file names", "folder names", "kohya's folder names"
CAPTION_PLACES = f"{', '.join(CAPTIONS)} beside it, or a row of metadata"
ALL_MASK_ENDINGS = MASK_ENDINGS + PROBABLE_MASK_ENDINGS

# kohya's folders, archives among them: `10_sks dog` holds photos of "sks dog", with 10 repeats. Four digits are probably a
# year, and a leading zero a running number. KOHYA_LARGE: more digits, and no year.
KOHYA_NAME = re.compile(r"([1-9][0-9]{0,2})_\s*(\S.*?)\s*(\.tar)?")
KOHYA_LARGE = re.compile(r"(?<![^/])(?!(19|20)\d\d_)[1-9]\d{3,}_\s*[^\s/]")


class KohyaFolder(NamedTuple):
    """The name of a kohya folder, and what it says: the repeats of its photos, and their caption."""

    name: str
    repeats: int
    words: str


def listing(source: Source, exclusions: Exclusions, used_apart: set[str]) -> Listing:
    """A folder's photos and captions. The source's path: the folder, or a table in it. If there is a table, the images that
    it names are used, else every image. With `captions = "auto"` the caption is the first of these that exists: the text of
    the image's row, the file beside it (CAPTIONS), the words of the kohya folder around it."""
    path = source.path or "."
    root, name = os.path.split(path)
    suffix = os.path.splitext(name)[1].lower()
    if os.path.isdir(path):
        return Reading(source, Folder(path, exclusions), used_apart=used_apart).listing()
    if not os.path.exists(path):
        problem = "no such file" if suffix in TABLES else "no such folder"
    elif suffix in TABLES:
        return Reading(source, Folder(root or ".", exclusions), name, used_apart).listing()
    elif suffix in IMAGES:
        problem = f"one photo; give the folder that holds your photos ({printable(root or '.')})"
    else:
        problem = f"not a folder, and not a table of images ({', '.join(TABLES)})"
        if suffix == ".json":
            line = '{"file_name": "01.png", "text": "..."}'
            problem += f"; of sd-scripts' metadata for fine-tuning make a metadata.jsonl, with a line for each photo: {line}"
    return Listing([], problems=[f"{printable(path)}: {problem}"])


class Reading:
    """Lists one source, once. table: the name in the tree of the only table to read; "": each folder may have one.
    used_apart: the paths of references and masks in folders of their own that photos have. Held-out photos are listed first
    and add theirs: they share the folders of their source, which reports the unused files."""

    def __init__(self, source: Source, tree: Tree, table: str = "", used_apart: set[str] | None = None) -> None:
        self.source, self.tree, self.root, self.only_table = source, tree, tree.root, table
        self.title = printable(tree.title)
        self.photos: list[ListedPhoto] = []
        self.account = Account()
        self.problems: list[str] = []
        self.kohya: dict[str, KohyaFolder | None] = {}  # by folder
        self.tables: dict[str, ImageTable] = {}  # by folder
        self.used_apart = set[str]() if used_apart is None else used_apart
        self.other_files: Counter[str] = Counter()  # by suffix
        self.undecodable: dict[str, list[str]] = {}  # images without a readable one of the same name, by reason

    def listing(self) -> Listing:
        """The contents of the folder, sorted by name."""
        for folder, files in self.tree.walk(self._leave_out, self.problems):
            self._read_folder(folder, files)
        self.photos.sort(key=lambda photo: photo.name)
        if self.source.captions != "folder":  # else a folder named "masks" is the caption of photos of masks
            self._leave_out_folders_of_masks()
        for table in self.tables.values():
            self.problems += table.problems
            self._refuse_rows(table)
        self._refuse_idle_columns()
        self._refuse_undecodable()
        for key, root in () if self.source.is_held_out else self.source.folders.items():
            noun = key.partition("[")[0].removesuffix("s")
            beside.unused_apart(root, self.used_apart, self._count_out, self.problems, noun)
        self._refuse_differing_references()
        others = ", ".join(f"{count} {printable(suffix)}" for suffix, count in self.other_files.most_common(5))
        if self.photos:
            self._note(others)
        elif not self.problems:
            hints = [f"it holds other files: {others}"] if others else []
            hints += [f"for the archives give {os.path.join(self.title, '*.tar')}"] if self.other_files[".tar"] else []
            dataset = not self.other_files.keys().isdisjoint((".parquet", ".arrow"))
            hints += [f"for the dataset in them give hf:{self.title}"] if dataset else []
            reasons = {entry.reason for entry in self.account.entries(Heading.LEFT_OUT)}
            hints += [lacks for lacks in plugins.lacking().values() if lacks in reasons]
            self.problems.append("; ".join([f"{self.title}: no images in it ({readable()})", *hints]))
        return Listing(self.photos, self.account, self.problems)

    def _leave_out(self, name: str, reason: str, count: int = 1) -> None:
        self._count_out(os.path.join(self.root, name), reason, count)

    def _count_out(self, path: str, reason: str, count: int) -> None:
        heading, noun = (Heading.WARNING, "folder") if reason.startswith(walk.OTHER_SOURCE) else (Heading.LEFT_OUT, "file")
        self.account.add(heading, reason, [path], count=None if heading is Heading.WARNING else count, noun=noun)

    def _leave_out_folders_of_masks(self) -> None:
        """Leave out an image without a caption of its own in a folder named like masks, if a photo elsewhere has its name."""
        probable = {
            photo.name
            for photo in self.photos
            if any(map(walk.MASK_FOLDER.fullmatch, photo.name.split("/")[:-1]))
            and (photo.caption is None or isinstance(photo.caption, str))
            and not (photo.mask or photo.references or self._table_of(_folder(photo.name)))
        }
        stems = {_stem(photo.name) for photo in self.photos if photo.name not in probable} if probable else set()
        out = {name for name in probable if _stem(name) in stems or _stem(f"{beside.without_mask_ending(name)}.") in stems}
        reason = "in a folder of masks, with the name of a photo; put masks beside the photos: NAME.mask.png"
        for name in sorted(out):
            self._leave_out(name, reason)
        self.photos = [photo for photo in self.photos if photo.name not in out]

    def _read_folder(self, folder: str, files: list[str]) -> None:
        files, table = self._find_table(folder, files)
        references = References(self.source, self.tree, folder, files, self.problems)
        in_table = {name for name in files if folder + name in table.rows} if table else ()
        contents = sort_out([name for name in files if name not in references.beside], in_table)
        kohya = self.kohya[folder] = _kohya_folder(self.root, folder)
        captions = Companions(pairs(contents.captions, CAPTIONS), contents.images)
        masks = Companions(pairs(contents.masks, ALL_MASK_ENDINGS), contents.images)
        mask_root = self.source.folders.get("masks")
        names = beside.listed(mask_root, folder, self.problems) if mask_root else []
        masks_apart = Companions(pairs(names, ALL_MASK_ENDINGS + tuple(IMAGES)), contents.images)
        rest, not_trained = contents.rest, contents.unread
        if table is not None:
            table.adopt([folder + image for image in contents.images])
        forms = Counter(map(composed, contents.images))
        if twins := [os.path.join(self.root, folder, image) for image in contents.images if forms[composed(image)] > 1]:
            note = "names that look the same (Unicode's NFC and NFD): each is trained, with a caption of exactly its own name"
            self.account.add(Heading.WARNING, note, twins, noun="photo", remedy="rename or remove one of them")
        for image in contents.images:
            name = folder + image
            if table is not None and name not in table.rows:
                rest.append((image, f"no row of {printable(table.name)} names it"))
                not_trained.append(image)
                continue
            row = ImageRow(0) if table is None else table.rows.pop(name)
            caption, origin = self._caption(folder, image, captions, row, table)
            mask = None
            if mask_root and (mask_name := masks_apart.take(image)):
                mask = File(mask_root, folder + mask_name)
                self.used_apart.add(mask.path)
            elif self.source.masks == "files" and (mask_name := masks.take(image)):
                mask = self.tree.place(folder + mask_name)
            places = references.take(image) if self.source.references else ()
            repeats, place = (kohya.repeats if kohya else 1) * row.repeats, self.tree.place(name)
            self.photos.append(ListedPhoto(self.source, name, place, caption, mask, places, repeats, origin, row.loss_weight))
        by_name = f'captions = "{self.source.captions}"'
        instead = by_name if self.source.captions != "auto" else f"{printable(table.name)} is used instead" if table else ""
        rest += captions.rest(not_trained, instead) + references.rest(not_trained)
        rest += masks.rest(not_trained, f'a mask, and masks = "{self.source.masks}"')
        self.used_apart |= references.used
        readable_stems = {os.path.splitext(image)[0] for image in contents.images}
        for name in contents.unread:
            stem, suffix = os.path.splitext(name)
            if stem not in readable_stems and (format := IMAGES.get(suffix.lower())):
                self.undecodable.setdefault(plugins.lacking()[format], []).append(folder + name)
        for name, reason in sorted(rest):
            self.other_files[os.path.splitext(name)[1].lower() or "without a suffix"] += 1
            self._leave_out(folder + name, reason)

    def _caption(
        self, folder: str, image: str, captions: Companions, row: ImageRow, table: ImageTable | None
    ) -> tuple[Place | str | None, str]:
        """(caption, its origin; "" without one)."""
        kohya = self.kohya[folder]
        if self.source.captions == "filename":
            return _words(os.path.splitext(image)[0]), OF_FILE
        if self.source.captions == "folder":
            last = os.path.basename(os.path.abspath(os.path.join(self.root, folder)))
            return _words(kohya.words if kohya else last.removesuffix(".tar")), OF_FOLDER
        if self.source.captions == "none":
            return None, ""
        if table is not None and row.caption is not None:
            return row.caption, table.name
        name = captions.take(image)
        if name is None:
            return (kohya.words, OF_KOHYA) if kohya else (None, "")
        return self.tree.place(folder + name), sys.intern(os.path.splitext(name)[1].lower())

    def _find_table(self, folder: str, files: list[str]) -> tuple[list[str], ImageTable | None]:
        """(the other files, the table that counts for the folder: its own, else that of the nearest parent)."""
        if self.only_table:
            tables = [] if folder else [self.only_table]
        else:
            tables = [name for name in files if name.lower() in metadata.FILE_NAMES]
        if len(tables) > 1:
            path = printable(os.path.join(self.root, folder))
            self.problems.append(f"{path}: has {' and '.join(tables)}; keep one, or give its path")
        if tables:
            self.tables[folder] = metadata.read_table(self.root, folder + tables[0], self.source)
        return [name for name in files if name not in tables], self._table_of(folder)

    def _table_of(self, folder: str) -> ImageTable | None:
        while folder and folder not in self.tables:
            folder = folder[: folder.rfind("/", 0, -1) + 1]
        return self.tables.get(folder)

    def _refuse_rows(self, table: ImageTable) -> None:
        """Report the rows for which no image was found."""
        names = {photo.name for photo in self.photos} if table.rows else set()
        out = tuple(name for entry in self.account for name in entry.names if name.endswith("/"))
        title = printable(os.path.join(self.root, table.name))
        for name, row in table.rows.items():
            path = os.path.join(self.root, name)
            if name in names:
                reason = "the metadata of its own subfolder names it too; remove one of the rows"
            elif any(part.startswith(".") for part in name.split("/")):
                reason = "hidden; give it another name"
            elif path.startswith(out):
                reason = "its folder is left out; remove the row"
            elif os.path.exists(path):
                reason = why_no_photo(name, plugins.lacking()) or "no file of exactly this name"
                reason += f" ({readable()})" if reason == beside.NO_IMAGE else ""
            else:
                reason = "no such file; correct or remove the row"
            self.problems.append(f"{title}: row {row.number} names {name!r}: {reason}")

    def _refuse_differing_references(self) -> None:
        """Report photos with another count of references than most of the source: batches have one layout."""
        counts = {photo.image: len(photo.references) for photo in self.photos if photo.references}
        usual = next((count for count, _ in Counter(counts.values()).most_common(1)), 0)
        rest = f"and most photos of its source have {usual}; give all the same number, or make two sources of them"
        differing = {image: count for image, count in counts.items() if count != usual}
        self.problems += [f"{image}: {counted(count, 'reference')}, {rest}" for image, count in differing.items()]

    def _refuse_idle_columns(self) -> None:
        """Report column names in the config that nothing reads."""
        if self.tables:
            return
        json = any(photo.caption_from == JSON for photo in self.photos)
        no_table = f"has no effect: {self.title} has no table of images (metadata.jsonl, .csv, .parquet)"
        idle = {"image_column": no_table, "caption_column": "" if json else f"{no_table} and no .json captions"}
        for key, reason in idle.items():
            if reason and (column := getattr(self.source, key)):
                self.problems.append(f"data.sources.{self.source.index}.{key} = {column!r} {reason}; leave it out")

    def _refuse_undecodable(self) -> None:
        """Report photos for which a plug-in is missing if others of the source can be read: else a few train for all."""
        for reason, names in self.undecodable.items() if self.photos else ():
            few = ", ".join(map(printable, names[:3])) + (", ..." if len(names) > 3 else "")
            count = len(names) + len(self.photos)
            self.problems.append(f"{self.title}: {len(names)} of its {count} photos ({few}): {reason}")

    def _note(self, others: str) -> None:
        """Enter the files that are used: captions by their origin, masks, references, tables, kohya's folders."""
        note, warn = partial(self.account.add, Heading.NOTE), partial(self.account.add, Heading.WARNING)
        looked = (
            f"Looked for {', '.join(CAPTIONS)} beside the images and for metadata; found {others or 'no other files'}. "
            'captions = "filename" or "folder" uses names as captions; "none" trains without captions'
        )
        origins = Counter(photo.caption_from for photo in self.photos)
        note(captions_note(self.title, self.source.captions, origins, looked))
        if "masks" in self.source.folders and (bare := [str(photo.image) for photo in self.photos if photo.mask is None]):
            note("no mask of its name in the folder of masks, so it counts everywhere", bare, noun="photo")
        for table in self.tables.values():
            column = f"column {table.caption_column}" if table.caption_column else "no caption column"
            note(f"{printable(os.path.join(self.root, table.name))}: names the images, {column}")
        files = Counter(photo.caption for photo in self.photos if not isinstance(photo.caption, str | None))
        masks = {photo.mask for photo in self.photos if photo.mask}
        references = {place for photo in self.photos for place in photo.references}
        used = {"caption file": files, "mask": masks, "table of images": self.tables, "reference": references}
        for noun, items in used.items():
            self.account.add(Heading.USED, "", count=len(items), noun=noun)
        if shared := [str(photo.image) for photo in self.photos if files[photo.caption] > 1]:
            warn("one caption file for two photos of one name", shared, noun="photo", remedy="rename one of them")
        self._warn_of_unused_captions(origins)
        for photo in self.photos:
            if odd := walk.looks_unintended(photo.name, regularisation=self.source.regularisation):
                warn(odd[0], [str(photo.image)], noun="photo", remedy=odd[1])
        self._note_kohya()

    def _note_kohya(self) -> None:
        folders = {_folder(photo.name) for photo in self.photos}
        numbered = Counter(kohya[:2] for photo in self.photos if (kohya := self.kohya[_folder(photo.name)]))
        for (name, repeats), count in numbered.items():
            self.account.add(Heading.NOTE, f"{printable(name)}: {repeats} repeats of {count} images")
        rest = [folder for folder, kohya in self.kohya.items() if folder in folders and not kohya]
        if odd := [os.path.join(self.root, folder) for folder in rest if numbered or KOHYA_LARGE.search(folder)]:
            reason = "the name has no number of 1 to 999 before it, so its photos count once"
            remedy = "for 10 repeats name it 10_NAME (kohya's sd-scripts reads any number, and skips a folder without one)"
            self.account.add(Heading.WARNING, reason, odd, noun="folder", remedy=remedy)

    def _warn_of_unused_captions(self, origins: Counter[str]) -> None:
        """Warn of files that look like the captions of photos that have none. origins: the counts of photos by the origin of
        their captions."""
        reasons, left_out = (beside.NO_IMAGE, beside.NO_NAMESAKE), self.account.entries(Heading.LEFT_OUT)
        unused, without = [], origins[""] + origins[OF_KOHYA]
        for path in (name for entry in left_out if entry.reason in reasons for name in entry.names):
            suffix = os.path.splitext(path)[1].lower()
            row = metadata.first_row(path) if suffix in TABLES else {}
            if metadata.IMAGE_COLUMN in row and not (self.tables or self.only_table):
                warning = f"{printable(path)} is not read; rename it to metadata{suffix}, and its rows give the captions"
                return self.account.add(Heading.WARNING, warning)
            unused += [path] if suffix in CAPTIONS or caption_field(row, self.source.caption_column) else []
        if unused and without and self.source.captions == "auto":
            counts = f"{counted(without, 'photo')} without a caption file, and {counted(len(unused), 'caption file')}"
            remedy = "put NAME.txt beside NAME.png, or give a table as path, with image_column and caption_column"
            warning = f"{self.title}: {counts} without a photo of the same name beside it"
            self.account.add(Heading.WARNING, warning, sorted(unused), count=0, remedy=remedy)


def captions_note(title: str, captions: str, origins: Counter[str], looked: str) -> str:
    """The line that counts photos by the origin of their captions. captions: the key of the source. origins: the counts; ""
    counts photos without a caption. looked: added if no photo has one."""
    counts = ", ".join(f"{count} from {origin}" for origin, count in sorted(origins.items()) if origin)
    without = f"; {origins['']} images have none" if counts and origins[""] else ""
    line = f"captions of {title}: {counts or 'none'}{without}"
    if captions == "none":
        return f'{line} (captions = "none")'
    return line if counts else f"{line}. {looked}"


def _kohya_folder(root: str, folder: str) -> KohyaFolder | None:
    """The innermost kohya folder around the files of `folder`, a folder within `root`."""
    names = [os.path.basename(os.path.abspath(root)), *folder.split("/")[:-1]]
    matches = ((name, KOHYA_NAME.fullmatch(name)) for name in reversed(names))
    return next((KohyaFolder(name, int(match[1]), match[2]) for name, match in matches if match), None)


def _folder(name: str) -> str:
    """The folder of a file within the source, with a slash at its end; "" for the source's own."""
    return name[: name.rfind("/") + 1]


def _stem(name: str) -> str:
    return folded(os.path.splitext(os.path.basename(name))[0])


def _words(name: str) -> str:
    """A name as a caption: with spaces for underscores."""
    return spaced(name.replace("_", " "))
