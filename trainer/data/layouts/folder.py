"""A folder of images, with captions beside them, in tables, or in the names of folders. Subfolders are searched too."""

import os
import sys
from collections import Counter

from trainer.base.console import printable
from trainer.data.images import plugins
from trainer.data.images.kinds import CAPTIONS, IMAGES, MASK_ENDINGS, TABLES
from trainer.data.layouts import kohya
from trainer.data.layouts.beside import NO_IMAGE, Companions, readable, sort_out, why_no_photo
from trainer.data.layouts.records import JsonCaption
from trainer.data.layouts.references import BESIDE, References, refuse_differing, unused, within
from trainer.data.layouts.table import FILE_NAMES, ImageTable, looks_like_one, read_table
from trainer.data.layouts.walk import Folder, Tree
from trainer.data.sources import CaptionPlace, FoundPhoto, Listing, Source

NO_CAPTION = "no caption"
CAPTION_PLACES = f"{', '.join(CAPTIONS)} beside it, or a row of metadata"


def listing(source: Source) -> Listing:
    """A folder's photos and captions. path: the folder, or a table in it. If there is a table, the images that it names are
    used, else every image.

    With `captions = "auto"` the caption of an image is the first of these that exists: the text of its row, the file beside
    it (CAPTIONS), the words of the kohya folder around it.
    """
    path = source.path or "."
    is_table = os.path.splitext(path)[1].lower() in TABLES
    if os.path.isdir(path):
        return Reading(source, Folder(path)).listing()
    if not os.path.exists(path):
        problem = "no such file" if is_table else "no such folder"
    elif os.path.splitext(path)[1].lower() in IMAGES:
        problem = f"one photo; give the folder that holds your photos ({printable(os.path.dirname(path) or '.')})"
    elif is_table:
        root, name = os.path.split(path)
        return Reading(source, Folder(root or "."), name).listing()
    else:
        problem = f"not a folder, and not a table of images ({', '.join(TABLES)})"
    return Listing([], problems=[f"{printable(path)}: {problem}"])


class Reading:
    """Lists one source, once. table: the only one that is read, by its name in the tree; else each folder may have one."""

    def __init__(self, source: Source, tree: Tree, table: str = "") -> None:
        self.source, self.tree, self.root, self.only_table = source, tree, tree.root, table
        self.title = printable(tree.title)
        self.found: list[FoundPhoto] = []
        self.left_out: list[tuple[str, str]] = []
        self.problems: list[str] = []
        self.origins: Counter[str] = Counter()  # of captions
        self.kohya: Counter[tuple[str, int]] = Counter()  # images by folder's name and repeats
        self.tables: dict[str, ImageTable] = {}  # by folder
        self.shown: set[str] = set()  # the references that a photo has
        self.other_files: Counter[str] = Counter()  # by suffix
        self.undecodable: dict[str, list[str]] = {}  # images of which there is no readable one of the same name, by reason

    def listing(self) -> Listing:
        """What the folder holds, sorted by name."""
        for folder, files in self.tree.walk(self._leave_out, self.problems):
            self._read_folder(folder, files)
        self.found.sort(key=lambda found: found.name)
        for table in self.tables.values():
            self.problems += table.problems
            self._refuse_rows(table)
        self._refuse_idle_columns()
        self._refuse_undecodable()
        if self.source.references not in (None, BESIDE):
            self.left_out += unused(self.source.references, self.shown, self.problems)
        self.problems += refuse_differing(self.found)
        others = ", ".join(f"{count} {printable(suffix)}" for suffix, count in self.other_files.most_common(5))
        if not self.found and not self.problems:
            but = f"; it holds other files: {others}" if others else ""
            but += f"; for the archives give {os.path.join(self.title, '*.tar')}" if self.other_files[".tar"] else ""
            reasons = {why for _, why in self.left_out}
            but += "".join(f"; {lacks}" for lacks in plugins.lacking().values() if lacks in reasons)
            self.problems.append(f"{self.title}: no images in it ({readable()}){but}")
        return Listing(self.found, self.left_out, self.problems, self._notes(others) if self.found else ())

    def _leave_out(self, name: str, why: str) -> None:
        self.left_out.append((os.path.join(self.root, name), why))

    def _read_folder(self, folder: str, files: list[str]) -> None:
        if within(os.path.join(self.root, folder), self.source):
            return
        files, table = self._find_table(folder, files)
        references = References(self.source, self.tree, folder, files)
        contents, around = (
            sort_out(name for name in files if name not in references.beside),
            kohya.folder_of(self.root, folder),
        )
        captions = Companions(contents.captions, contents.images, CAPTIONS)
        masks = Companions(contents.masks, contents.images, MASK_ENDINGS)
        rest, not_trained = contents.rest, contents.unread
        if table is not None:
            table.adopt([folder + image for image in contents.images])
        for image in contents.images:
            name, row = folder + image, None
            if table is not None:
                row = table.rows.pop(name, None)
                if row is None:
                    rest.append((image, f"no row of {printable(table.name)} names it"))
                    not_trained.append(image)
                    continue
            caption, origin = self._caption(folder, image, row[1] if row else None, captions, around)
            self.origins[origin or table.name] += 1
            mask = masks.take(image)
            if around:
                self.kohya[around[:2]] += 1
            self.found.append(
                FoundPhoto(
                    source=self.source,
                    name=name,
                    image=self.tree.place(name),
                    caption=caption,
                    mask=self.tree.place(folder + mask) if mask else None,
                    references=references.take(image) if self.source.references else (),
                    repeats=around[1] if around else 1,
                    caption_from="" if origin == NO_CAPTION else origin or table.name,
                )
            )
        by_name = f'captions = "{self.source.captions}"'
        instead = by_name if self.source.captions != "auto" else f"{printable(table.name)} is used instead" if table else ""
        rest += captions.rest(not_trained, instead) + masks.rest(not_trained) + references.rest(not_trained)
        self.shown |= {folder + name for name in references.taken}
        self.problems += references.problems
        readable_stems = {os.path.splitext(image)[0] for image in contents.images}
        for name in contents.unread:
            stem, suffix = os.path.splitext(name)
            if stem not in readable_stems and suffix.lower() in IMAGES:
                self.undecodable.setdefault(plugins.lacking()[IMAGES[suffix.lower()]], []).append(folder + name)
        for name, why in sorted(rest):
            self.other_files[os.path.splitext(name)[1].lower() or "without a suffix"] += 1
            self._leave_out(folder + name, why)

    def _caption(
        self, folder: str, image: str, text: str | None, captions: Companions, around: tuple[str, int, str] | None
    ) -> tuple[CaptionPlace | str | None, str]:
        """(caption, where it was found). text: of the image's row; the origin "" stands for the row's table."""
        if self.source.captions == "filename":
            return _words(os.path.splitext(image)[0]), "file names"
        if self.source.captions == "folder":
            return _words(around[2] if around else folder_name(self.root, folder)), "folder names"
        if self.source.captions == "none":
            return None, NO_CAPTION
        if text is not None:
            return text, ""
        beside = captions.take(image)
        if beside is None:
            return (around[2], "kohya's folder names") if around else (None, NO_CAPTION)
        file, suffix = self.tree.place(folder + beside), sys.intern(os.path.splitext(beside)[1].lower())
        return JsonCaption(file, self.source.caption_column) if suffix == ".json" else file, suffix

    def _find_table(self, folder: str, files: list[str]) -> tuple[list[str], ImageTable | None]:
        """(the other files, the table that counts for the folder: its own, else that of the nearest parent)."""
        mine = [name for name in files if name.lower() in FILE_NAMES] if not self.only_table else []
        mine = [self.only_table] if self.only_table and not folder else mine
        if len(mine) > 1:
            path = printable(os.path.join(self.root, folder))
            self.problems.append(f"{path}: has {' and '.join(mine)}; keep one, or give its path")
        if mine:
            self.tables[folder] = read_table(self.root, folder + mine[0], self.source)
        while folder and folder not in self.tables:
            folder = folder[: folder.rfind("/", 0, -1) + 1]
        return [name for name in files if name not in mine], self.tables.get(folder)

    def _refuse_rows(self, table: ImageTable) -> None:
        """Report the rows for which no image was found."""
        found = {found.name for found in self.found} if table.rows else set()
        for name, (number, _) in table.rows.items():
            path = os.path.join(self.root, name)
            if name in found:
                why = "the metadata of its own subfolder names it too; remove one of the rows"
            elif any(part.startswith(".") for part in name.split("/")):
                why = "hidden; give it another name"
            elif os.path.exists(path):
                why = why_no_photo(name, plugins.lacking()) or "no file of exactly this name"
                why += f" ({readable()})" if why == NO_IMAGE else ""
            else:
                why = "no such file; correct or remove the row"
            self.problems.append(f"{printable(os.path.join(self.root, table.name))}: row {number} names {name!r}: {why}")

    def _refuse_idle_columns(self) -> None:
        key = f"data.sources.{self.source.index}"
        none = f"has no effect: {self.title} has no table of images (metadata.jsonl, .csv, .parquet)"
        if self.source.image_column and not self.tables:
            self.problems.append(f"{key}.image_column = {self.source.image_column!r} {none}; leave it out")
        if self.source.caption_column and not self.tables and not self.origins[".json"]:
            self.problems.append(
                f"{key}.caption_column = {self.source.caption_column!r} {none} and no .json captions; leave it out"
            )

    def _refuse_undecodable(self) -> None:
        """Report photos for which a plug-in is missing, where others of the source can be read: else a few train for all."""
        for why, names in self.undecodable.items() if self.found else ():
            few = ", ".join(map(printable, names[:3])) + (", ..." if len(names) > 3 else "")
            self.problems.append(f"{self.title}: {len(names)} of its {len(names) + len(self.found)} photos ({few}): {why}")

    def _notes(self, others: str) -> list[str]:
        """Where captions were found, the tables, and the kohya folders."""
        taken = {origin: count for origin, count in sorted(self.origins.items()) if origin != NO_CAPTION}
        counts, none = ", ".join(f"{count} from {origin}" for origin, count in taken.items()), self.origins[NO_CAPTION]
        few = f"; {none} images have none" if taken and none else ""
        lines = [f"captions of {self.title}: {counts or 'none'}{few}"]
        if self.source.captions == "none":
            lines[0] += ' (captions = "none")'
        elif not taken:
            lines[0] += (
                f". Looked for {', '.join(CAPTIONS)} beside the images and for metadata; found {others or 'no other files'}. "
                'captions = "filename" or "folder" uses names as captions; "none" trains without captions'
            )
        if misnamed := self._misnamed_tables():
            lines.append(f"warning: {misnamed}")
        for table in self.tables.values():
            column = f"column {table.caption_column}" if table.caption_column else "no caption column"
            lines.append(f"{printable(os.path.join(self.root, table.name))}: names the images, {column}")
        lines += [f"{printable(name)}: {repeats} repeats of {count} images" for (name, repeats), count in self.kohya.items()]
        return lines

    def _misnamed_tables(self) -> str:
        """What to rename, where there is no table of images, but files that look like one by their first row; else ""."""
        if self.tables or self.only_table:
            return ""
        for path, _ in self.left_out:
            suffix = os.path.splitext(path)[1].lower()
            if suffix in TABLES and looks_like_one(path):
                return f"{printable(path)} is not read; rename it to metadata{suffix}, and its rows give the captions"
        return ""


def folder_name(root: str, folder: str) -> str:
    """The folder's own name; of an archive without its suffix."""
    return os.path.basename(os.path.abspath(os.path.join(root, folder))).removesuffix(".tar")


def _words(name: str) -> str:
    """A name as a caption: underscores are spaces."""
    return " ".join(name.replace("_", " ").split())
