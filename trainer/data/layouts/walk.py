"""The files of a folder and of its subfolders."""

import os
from collections.abc import Callable, Iterator
from typing import Protocol

from trainer.base.console import printable
from trainer.base.run_layout import holds_run, made_by_run
from trainer.data.layouts import apart
from trainer.data.layouts.apart import NO_EXCLUSIONS, Exclusions
from trainer.data.sources import File, Place

LeaveOut = Callable[[str, str, int], None]  # (name, reason, count of files)


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
    is read once. Files and folders of other programs (apart.py) and `exclusions` are left out."""

    def __init__(self, root: str, exclusions: Exclusions = NO_EXCLUSIONS) -> None:
        self.title, self.root, self._exclusions = root, root, exclusions

    def walk(self, leave_out: LeaveOut, problems: list[str]) -> Iterator[tuple[str, list[str]]]:
        pending, first_names = [""], {}
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
                    leave_out(folder, apart.RUN, _files_below(path))
                    continue
                for name, is_folder in names.items():
                    reason = apart.exclusion(name, is_folder=is_folder)
                    if reason := reason or (apart.RUN if of_a_run and made_by_run(name) else ""):
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
