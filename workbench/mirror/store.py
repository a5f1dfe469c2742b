"""A second place for a run's files, behind any URL of fsspec. A checkpoint is there once its manifest is, and no longer.

run.json                      whose the place is; written first
checkpoints/step-00000500/    the files of a checkpoint and the log up to it; the manifest comes last, and goes first
samples/ adapters/ ...        what else steps and the end left, where it lies in the output folder, too

Nothing here is tried again, and no cause is known by its class: every backend raises its own.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.base import files
from trainer.base.errors import UserError
from trainer.base.run_layout import Layout, folder_name, step_of
from trainer.checkpoint import store
from trainer.checkpoint.store import MANIFEST

RUN = "run.json"
PROBE = "probe.tmp"  # written, read and deleted at a start
INSIDE = Layout(Path())  # places below the prefix are those below the output folder

# What to install for a URL (pyproject.toml), and the words that such URLs begin with.
EXTRAS = {"s3": ("s3", "s3a"), "gcs": ("gs", "gcs"), "azure": ("az", "abfs", "abfss", "adl")}


def key_of(url: str) -> str:
    """The key and its value, for messages."""
    return f"checkpoint.mirror = {url!r}"


def check_library(url: str) -> None:
    """Raises UserError where fsspec, or what it needs for such a URL, is not installed."""
    protocol = url.partition("://")[0]
    try:
        import fsspec

        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        ways = [f"pip install -e '.[{extra}]'" for extra, words in EXTRAS.items() if protocol in words]
        way = ways[0] if ways else "install it"
        raise UserError(f"{key_of(url)} needs a library that is not there: {error}; {way}") from error
    except ValueError as error:
        known = ", ".join(word for words in EXTRAS.values() for word in words)
        raise UserError(f"{key_of(url)}: fsspec knows no {protocol}://; give one of {known}, file") from error


def open_mirror(url: str) -> Mirror:
    """The mirror at a URL. Raises whatever its backend does where it finds no keys."""
    from fsspec.core import url_to_fs

    # Of its own, and without what it remembers of earlier listings: others write there, too.
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    protocol = url.partition("://")[0]
    if protocol in ("file", "local"):
        options["auto_mkdir"] = True
    if protocol == "s3":  # botocore's tries would multiply with s3fs's own: minutes without a word
        options["config_kwargs"] = {"retries": {"total_max_attempts": 1}}
    return Mirror(*url_to_fs(url, **options), url)


class Taken(Exception):
    """Another start has claimed the place."""


class Mirror:
    """Files below one place of a file system. Names are below it, with "/". Every method may raise whatever the backend
    does, and leaves no checkpoint that looks whole and is not."""

    def __init__(self, fs: Any, place: str, url: str) -> None:
        self.fs, self.place, self.url, self.key = fs, place.rstrip("/"), url, key_of(url)
        self._sent: set[str] = set()  # of checkpoints whose copy was cut off: what need not be sent again
        self._claim: bytes | None = None  # RUN, as this start wrote it

    def _at(self, name: str) -> str:
        return f"{self.place}/{name}".rstrip("/")

    def listing(self, below: str = "") -> dict[str, int]:
        """The bytes of every file below a folder, by name. Empty where nothing is there."""
        # Not fsspec's `find`: it takes a folder that could not be listed for an empty one.
        self.fs.invalidate_cache()
        folder, sizes = self._at(below), dict[str, int]()
        try:
            entries = self.fs.ls(folder, detail=True)
        except FileNotFoundError:
            return {}
        for entry in entries:
            name = f"{below}/{entry['name'].rstrip('/').rpartition('/')[2]}".lstrip("/")
            if entry["name"].strip("/") == folder.strip("/"):  # some stores have an empty file that stands for a folder
                continue
            if entry["type"] == "directory":
                sizes |= self.listing(name)
            else:
                sizes[name] = int(entry["size"])
        return sizes

    def read(self, name: str) -> bytes:
        """A small file. Raises FileNotFoundError where it is not there."""
        return self.fs.cat_file(self._at(name))

    def write(self, name: str, data: bytes) -> None:
        """A small file, new or in place of the old one."""
        self.fs.pipe_file(self._at(name), data)

    def send(self, path: Path, name: str) -> None:
        """Copy a file of this machine there."""
        self.fs.put_file(str(path), self._at(name))

    def take(self, name: str, path: Path, size: int) -> None:
        """Copy a file from there. Raises OSError where it came with another size."""
        self.fs.get_file(self._at(name), str(path))
        if path.stat().st_size != size:
            raise OSError(errno.EIO, f"of {name} {path.stat().st_size} of {size} bytes came")

    def remove(self, names: Iterable[str]) -> None:
        """Delete files in this order; one that is not there is gone already."""
        for name in names:
            with suppress(FileNotFoundError):
                self.fs.rm_file(self._at(name))

    def try_out(self) -> None:
        """Write a file, read it and delete it. Raises what stands in the way of any of them."""
        self.write(PROBE, b"may this run write here?\n")
        with suppress(FileNotFoundError):  # another start, at the same moment, deleted it
            self.read(PROBE)
        self.remove([PROBE])

    def owner(self) -> dict[str, str] | None:
        """{"run": its name, "id": of its output folder} of the run that is copied there, or None. Raises UserError for
        others."""
        try:
            owner = json.loads(self.read(RUN))
            return {"run": str(owner["run"]), "id": str(owner["id"])}
        except (FileNotFoundError, ValueError, KeyError, TypeError):  # half of it, perhaps, which a kill left
            others = [name for name in self.listing() if name not in (RUN, PROBE)]
        if others:
            other = f"something else than a run ({sorted(others)[0]!r})"
            raise UserError(f"{self.key} holds {other}; give an empty place, or another prefix")
        return None

    def claim(self, owner: dict[str, str]) -> None:
        """Say whose the place is: of several starts the last one has it. Once it is said, as `hold`."""
        if self._claim is not None:
            return self.hold()
        claim = files.json_bytes(owner)
        self.write(RUN, claim)
        self._claim = claim

    def hold(self) -> None:
        """See that what was claimed is still this start's; what somebody deleted is said again. Raises Taken."""
        if self._claim is None:
            return
        try:
            there = self.read(RUN)
        except FileNotFoundError:
            return self.write(RUN, self._claim)
        if there != self._claim:
            raise Taken

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are there, ascending."""
        return sorted(step for step, names in self._checkpoints().items() if MANIFEST in names)

    def _checkpoints(self) -> dict[int, dict[str, int]]:
        """The bytes of files by step and name, of half-copied ones, too."""
        files: dict[int, dict[str, int]] = {}
        for path, size in self.listing(INSIDE.checkpoints.as_posix()).items():
            folder, _, name = path.removeprefix(f"{INSIDE.checkpoints.as_posix()}/").partition("/")
            if (step := step_of(folder)) is not None:
                files.setdefault(step, {})[name] = size
        return files

    def put(self, folder: Path, step: int, log: bytes) -> None:
        """Copy a checkpoint, and the log beside it. What is not the same there loses its manifest first. Raises
        FileNotFoundError, too, where the folder is pruned meanwhile; Taken where another start claimed the place."""
        place = _place(step)
        there = self.listing(place)
        manifest = (folder / MANIFEST).read_bytes()
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != MANIFEST}

        def lacking(there: dict[str, int]) -> list[str]:
            return [name for name, size in sizes.items() if there.get(f"{place}/{name}") != size]

        if f"{place}/{MANIFEST}" in there:
            if self.read(f"{place}/{MANIFEST}") == manifest and not lacking(there):
                return
            self.remove([f"{place}/{MANIFEST}"])
        for name in sizes:
            if f"{place}/{name}" not in self._sent or name in lacking(there):
                self.send(folder / name, f"{place}/{name}")
                self._sent.add(f"{place}/{name}")
        self.write(f"{place}/{INSIDE.metrics.name}", log)
        if short := lacking(self.listing(place)):
            raise OSError(errno.EIO, f"{short[0]} did not arrive whole")
        self.hold()
        self.write(f"{place}/{MANIFEST}", manifest)

    def fetch(self, step: int, into: Path) -> None:
        """Copy a checkpoint and its log from there into a folder. Whether it is valid is for the store to say."""
        names = self._checkpoints()[step]
        for name in sorted(names, key=lambda name: name == MANIFEST):
            if Path(name).name == name:  # the place may hold what nobody of us wrote
                self.take(f"{_place(step)}/{name}", into / name, names[name])

    def prune(self, keep_last: int) -> None:
        """Delete all but the newest `keep_last` checkpoints, and what copies that were cut off left below the newest."""
        there = self._checkpoints()
        whole = sorted(step for step, names in there.items() if MANIFEST in names)
        staying, newest = {*whole[-keep_last:]}, max(whole, default=-1)
        for step, names in sorted(there.items()):
            if step not in staying and step < newest:
                self.remove(f"{_place(step)}/{name}" for name in sorted(names, key=lambda name: name != MANIFEST))

    def set_aside(self, after: int) -> list[str]:
        """Move checkpoints beyond a step, which must not overtake an earlier one, to another name; returns their new
        names."""
        moved = []
        for step, names in sorted(self._checkpoints().items()):
            if step > after:
                aside = f"{INSIDE.checkpoints.as_posix()}/superseded-{folder_name(step)}"
                for name in sorted(names, key=lambda name: name != MANIFEST):
                    self.fs.cp_file(self._at(f"{_place(step)}/{name}"), self._at(f"{aside}/{name}"))
                    self.remove([f"{_place(step)}/{name}"])
                moved.append(aside)
        return moved

    def fetch_results(self, layout: Layout, name: str, step: int) -> None:
        """Copy from there what the steps of the run `name` up to `step` left for good, as far as it is not here."""
        for path, size in self.listing().items():
            of_step, here = INSIDE.step_of_result(path, name), layout.root / path
            if of_step is not None and of_step <= step and not here.exists():
                data = self.read(path)
                if len(data) != size:
                    raise OSError(errno.EIO, f"of {path} {len(data)} of {size} bytes came")
                files.write_atomic(here, [data])


def adopt(root: Path, step: int, fill: Callable[[Path], object], keep: Callable[[Path], object]) -> str | None:
    """Take a checkpoint from elsewhere in: `fill` writes its files into a folder of another name. Returns None, or why it is
    not valid; then nothing is left of it. keep: called with the whole folder before it has its name. One of that step that
    is there goes: it is not valid. Raises what both raise, and leaves the others untouched."""
    files.make_folder(root)
    store.settle(root)
    final, temporary = root / folder_name(step), root / f".{folder_name(step)}.new.tmp"
    os.mkdir(temporary)
    try:
        fill(temporary)
        reason = store.problem(temporary)
        if reason is None and store.was_set_aside(root, step, temporary):
            reason = "the run went back from it, and set it aside here"
        if reason is None:
            keep(temporary)
            files.sync_tree(temporary)
            files.sync_folder(temporary)
            if final.exists():
                store.remove(root, step)
            os.replace(temporary, final)
            files.sync_folder(root)
        return reason
    finally:
        if temporary.exists():
            files.remove_folder(temporary, ignore_errors=True)


def _place(step: int) -> str:
    return f"{INSIDE.checkpoints.as_posix()}/{folder_name(step)}"
