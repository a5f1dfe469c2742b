"""The files of a folder and of its subfolders."""

import os
from collections.abc import Callable, Iterator
from typing import Protocol

from trainer.base.console import printable
from trainer.base.run_layout import holds_run, made_by_run
from trainer.data.layouts import apart
from trainer.data.layouts.apart import Apart
from trainer.data.sources import File, Place

LeaveOut = Callable[[str, str, int], None]
NO_OWNERS = Apart()


class Tree(Protocol):
    """Files in folders. title: for people. root: names are relative to it; root and name together are a path to show."""

    title: str
    root: str

    def walk(self, leave_out: LeaveOut, problems: list[str]) -> Iterator[tuple[str, list[str]]]:
        """(its name, the sorted names of its files) of every folder, a folder before its subfolders.

        A folder's name is relative to `root`, with slashes and one at its end; `root` itself is "".
        leave_out: called with (name, reason, count of files) for everything that is not among them.
        """
        ...

    def place(self, name: str) -> Place:
        """The place of a file in the folder that `walk` gave last. name: relative to `root`."""
        ...


class Folder:
    """A Tree that is a folder on the disk, listed once; no file is opened. Symbolic links are followed, and a folder that is
    reached twice is read once. Left out is what is not of the person (apart.py), and what is `owned`."""

    def __init__(self, root: str, owned: Apart = NO_OWNERS) -> None:
        self.title = self.root = root
        self._owned = owned

    def walk(self, leave_out: LeaveOut, problems: list[str]) -> Iterator[tuple[str, list[str]]]:
        ahead, seen = [""], {}
        while ahead:
            folder = ahead.pop()
            path = os.path.join(self.root, folder) if folder else self.root
            files, inner = [], []
            try:
                status = os.stat(path)
                key = status.st_dev, status.st_ino
                first = seen.setdefault(key, folder)
                if first != folder:
                    leave_out(folder, f"a link to the folder {printable(first or self.root)}, which is read already", 0)
                    continue
                if folder and key in self._owned.owners:
                    if self._owned.owners[key]:
                        leave_out(folder, self._owned.owners[key], 0)
                    continue
                with os.scandir(path) as entries:
                    names = {entry.name: _is_folder(entry) for entry in entries}
                of_a_run = key in self._owned.outputs or holds_run(names.keys())
                if folder and of_a_run:
                    leave_out(folder, apart.RUN, _files_below(path))
                    continue
                for name, is_folder in names.items():
                    why = apart.why(name, is_folder=is_folder) or (apart.RUN if of_a_run and made_by_run(name) else "")
                    if why:
                        count = _files_below(os.path.join(path, name)) if is_folder else 1
                        leave_out(folder + name + "/" * is_folder, why, count)
                    elif is_folder:
                        inner.append(folder + name + "/")
                    else:
                        files.append(name)
            except OSError as error:
                problems.append(f"{printable(path)}: {error.strerror}")
            ahead += sorted(inner, key=lambda name: name[:-1], reverse=True)
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
