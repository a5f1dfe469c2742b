"""The files of a folder and of its subfolders."""

import os
from collections.abc import Callable, Iterator
from typing import Protocol

from trainer.base.console import printable
from trainer.data.sources import File, Place

LeaveOut = Callable[[str, str], None]


class Tree(Protocol):
    """Files in folders. title: for people. root: names are relative to it; root and name together are a path to show."""

    title: str
    root: str

    def walk(self, leave_out: LeaveOut, problems: list[str]) -> Iterator[tuple[str, list[str]]]:
        """(its name, the sorted names of its files) of every folder, a folder before its subfolders.

        A folder's name is relative to `root`, with slashes and one at its end; `root` itself is "".

        leave_out: called with (name, reason) for everything that is not among them.
        """
        ...

    def place(self, name: str) -> Place:
        """The place of a file in the folder that `walk` gave last. name: relative to `root`."""
        ...


class Folder:
    """A Tree that is a folder on the disk."""

    def __init__(self, root: str) -> None:
        self.title = self.root = root

    def walk(self, leave_out: LeaveOut, problems: list[str]) -> Iterator[tuple[str, list[str]]]:
        return walk(self.root, leave_out, problems)

    def place(self, name: str) -> Place:
        return File(self.root, name)


def walk(root: str, leave_out: LeaveOut, problems: list[str]) -> Iterator[tuple[str, list[str]]]:
    """(name, sorted names of its files) of `root` and every folder below it, a folder before its subfolders.

    A name is relative to `root`, with slashes and one at its end. Symbolic links are followed; a folder that is reached twice
    is read once. Each folder is listed once, and no file is opened.
    leave_out: called for hidden files and folders, and for a folder that was read before.
    """
    ahead, seen = [""], {}
    while ahead:
        folder = ahead.pop()
        path = os.path.join(root, folder) if folder else root
        files, inner = [], []
        try:
            status = os.stat(path)
            first = seen.setdefault((status.st_dev, status.st_ino), folder)
            if first != folder:
                leave_out(folder, f"a link to the folder {printable(first or root)}, which is read already")
                continue
            with os.scandir(path) as entries:
                for entry in entries:
                    name = folder + entry.name
                    is_folder = _is_folder(entry)
                    if entry.name.startswith("."):
                        leave_out(name + "/" * is_folder, "hidden")
                    elif is_folder:
                        inner.append(name + "/")
                    else:
                        files.append(entry.name)
        except OSError as error:
            problems.append(f"{printable(path)}: {error.strerror}")
        ahead += sorted(inner, key=lambda name: name[:-1], reverse=True)
        yield folder, sorted(files)


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # links in a circle: reading it as a file will say so
        return False
