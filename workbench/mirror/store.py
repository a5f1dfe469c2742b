"""A copy of a run's files at any URL of fsspec. A checkpoint exists there exactly as long as its manifest.

run.json                      the owner; written first
checkpoints/step-00000500/    the files of a checkpoint and the log up to it; the manifest is written last, deleted first
samples/ adapters/ ...        the other files of steps and of the end, with their paths in the output folder

There are no retries here, and no error is known by its class: every backend raises its own.
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
INSIDE = Layout(Path())  # paths below the prefix are those below the output folder

# Extras of pyproject.toml, and the protocols of URLs that need them.
EXTRAS = {"s3": ("s3", "s3a"), "gcs": ("gs", "gcs"), "azure": ("az", "abfs", "abfss", "adl")}


def key_of(url: str) -> str:
    """The key and its value, for messages."""
    return f"checkpoint.mirror = {url!r}"


def check_library(url: str) -> None:
    """Raises UserError if fsspec, or its library for such a URL, is not installed."""
    protocol = url.partition("://")[0]
    try:
        import fsspec

        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        extra = next((extra for extra, protocols in EXTRAS.items() if protocol in protocols), None)
        remedy = f"pip install -e '.[{extra}]'" if extra else "install it"
        raise UserError(f"{key_of(url)} needs a library that is not there: {error}; {remedy}") from error
    except ValueError as error:
        names = ", ".join(name for protocols in EXTRAS.values() for name in protocols)
        raise UserError(f"{key_of(url)}: fsspec knows no {protocol}://; give one of {names}, file") from error


def open_mirror(url: str) -> Mirror:
    """The mirror at a URL. Raises its backend's errors, such as for missing keys."""
    from fsspec.core import url_to_fs

    # A separate instance without cached listings: others write there, too.
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    protocol = url.partition("://")[0]
    if protocol in ("file", "local"):
        options["auto_mkdir"] = True
    if protocol == "s3":  # botocore's retries would multiply with s3fs's: minutes without a message
        options["config_kwargs"] = {"retries": {"total_max_attempts": 1}}
    return Mirror(*url_to_fs(url, **options), url)


class Claimed(Exception):
    """Another start has claimed the place."""


class Mirror:
    """Files below one folder of a file system; names are relative to it, with "/". Every method may raise any error of the
    backend, and leaves no checkpoint that looks complete and is not."""

    def __init__(self, fs: Any, place: str, url: str) -> None:
        self.fs, self.place, self.url, self.key = fs, place.rstrip("/"), url, key_of(url)
        self._sent: set[str] = set()  # files of interrupted copies that need not be sent again
        self._claim: bytes | None = None  # RUN, as this start wrote it

    def _at(self, name: str) -> str:
        return f"{self.place}/{name}".rstrip("/")

    def listing(self, prefix: str = "") -> dict[str, int]:
        """The size in bytes of every file below a folder, by name; empty if there is no folder."""
        # fsspec's `find` would take a folder that could not be listed for an empty one.
        self.fs.invalidate_cache()
        folder, sizes = self._at(prefix), dict[str, int]()
        try:
            entries = self.fs.ls(folder, detail=True)
        except FileNotFoundError:
            return {}
        for entry in entries:
            name = f"{prefix}/{entry['name'].rstrip('/').rpartition('/')[2]}".lstrip("/")
            if entry["name"].strip("/") == folder.strip("/"):  # some stores represent a folder by an empty file
                continue
            if entry["type"] == "directory":
                sizes |= self.listing(name)
            else:
                sizes[name] = int(entry["size"])
        return sizes

    def read(self, name: str) -> bytes:
        """The content of a small file. Raises FileNotFoundError if there is none."""
        return self.fs.cat_file(self._at(name))

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, new or over the old one."""
        self.fs.pipe_file(self._at(name), data)

    def send(self, path: Path, name: str) -> None:
        """Upload a local file."""
        self.fs.put_file(str(path), self._at(name))

    def take(self, name: str, path: Path, size: int) -> None:
        """Download a file. Raises OSError if it arrives with another size."""
        self.fs.get_file(self._at(name), str(path))
        if path.stat().st_size != size:
            raise OSError(errno.EIO, f"of {name} {path.stat().st_size} of {size} bytes came")

    def remove(self, names: Iterable[str]) -> None:
        """Delete files in this order; missing ones are skipped."""
        for name in names:
            with suppress(FileNotFoundError):
                self.fs.rm_file(self._at(name))

    def try_out(self) -> None:
        """Write a file, read it and delete it. Raises the backend's error if any of them fails."""
        self.write(PROBE, b"may this run write here?\n")
        with suppress(FileNotFoundError):  # another start deleted it at the same moment
            self.read(PROBE)
        self.remove([PROBE])

    def owner(self) -> dict[str, str] | None:
        """{"run": its name, "id": of its output folder} of the run that is copied there, or None if empty. Raises UserError
        for other content."""
        try:
            owner = json.loads(self.read(RUN))
            return {"run": str(owner["run"]), "id": str(owner["id"])}
        except (FileNotFoundError, ValueError, KeyError, TypeError):  # perhaps truncated by a kill
            others = [name for name in self.listing() if name not in (RUN, PROBE)]
        if others:
            other = f"something else than a run ({sorted(others)[0]!r})"
            raise UserError(f"{self.key} holds {other}; give an empty place, or another prefix")
        return None

    def claim(self, owner: dict[str, str]) -> None:
        """Write the owner: of several starts the last one owns the mirror. Later calls are `hold`."""
        if self._claim is not None:
            return self.hold()
        claim = files.json_bytes(owner)
        self.write(RUN, claim)
        self._claim = claim

    def hold(self) -> None:
        """Check that the claim is still this start's, and renew a deleted one. Raises Claimed if another start has it."""
        if self._claim is None:
            return
        try:
            current = self.read(RUN)
        except FileNotFoundError:
            return self.write(RUN, self._claim)
        if current != self._claim:
            raise Claimed

    def steps(self) -> list[int]:
        """The steps of complete checkpoints, ascending."""
        return sorted(step for step, names in self._checkpoints().items() if MANIFEST in names)

    def _checkpoints(self) -> dict[int, dict[str, int]]:
        """The sizes of files by step and name, also of incomplete checkpoints."""
        files: dict[int, dict[str, int]] = {}
        for path, size in self.listing(INSIDE.checkpoints.as_posix()).items():
            folder, _, name = path.removeprefix(f"{INSIDE.checkpoints.as_posix()}/").partition("/")
            if (step := step_of(folder)) is not None:
                files.setdefault(step, {})[name] = size
        return files

    def put(self, folder: Path, step: int, log: bytes) -> None:
        """Upload a checkpoint and the log. A different one there loses its manifest first. Raises FileNotFoundError also if
        the folder is pruned meanwhile, and Claimed if another start claimed the mirror."""
        place = _place(step)
        present = self.listing(place)
        manifest = (folder / MANIFEST).read_bytes()
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != MANIFEST}

        def lacking(present: dict[str, int]) -> list[str]:
            return [name for name, size in sizes.items() if present.get(f"{place}/{name}") != size]

        if f"{place}/{MANIFEST}" in present:
            if self.read(f"{place}/{MANIFEST}") == manifest and not lacking(present):
                return
            self.remove([f"{place}/{MANIFEST}"])
        for name in sizes:
            if f"{place}/{name}" not in self._sent or name in lacking(present):
                self.send(folder / name, f"{place}/{name}")
                self._sent.add(f"{place}/{name}")
        self.write(f"{place}/{INSIDE.metrics.name}", log)
        if short := lacking(self.listing(place)):
            raise OSError(errno.EIO, f"{short[0]} did not arrive whole")
        self.hold()
        self.write(f"{place}/{MANIFEST}", manifest)

    def fetch(self, step: int, into: Path) -> None:
        """Download a checkpoint and its log into a folder, unverified: the store does that."""
        names = self._checkpoints()[step]
        for name in sorted(names, key=lambda name: name == MANIFEST):
            if Path(name).name == name:  # not a path that leads out of the folder: the mirror is not trusted
                self.take(f"{_place(step)}/{name}", into / name, names[name])

    def prune(self, keep_last: int) -> None:
        """Delete all but the newest `keep_last` checkpoints, and incomplete ones older than the newest."""
        checkpoints = self._checkpoints()
        complete = sorted(step for step, names in checkpoints.items() if MANIFEST in names)
        staying, newest = {*complete[-keep_last:]}, max(complete, default=-1)
        for step, names in sorted(checkpoints.items()):
            if step not in staying and step < newest:
                self.remove(f"{_place(step)}/{name}" for name in sorted(names, key=lambda name: name != MANIFEST))

    def set_aside(self, after: int) -> list[str]:
        """Rename the checkpoints after a step, which must not be taken for newer ones; returns their new names."""
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
        """Download the missing results of the run `name` up to `step`."""
        for path, size in self.listing().items():
            result_step, local = INSIDE.step_of_result(path, name), layout.root / path
            if result_step is not None and result_step <= step and not local.exists():
                data = self.read(path)
                if len(data) != size:
                    raise OSError(errno.EIO, f"of {path} {len(data)} of {size} bytes came")
                files.write_atomic(local, [data])


def adopt(root: Path, step: int, fill: Callable[[Path], object], keep: Callable[[Path], object]) -> str | None:
    """Add a checkpoint from elsewhere: `fill` writes its files into a temporary folder. Returns the reason if it is invalid,
    and removes it then; else None. keep: called with the complete folder before it is renamed. An existing checkpoint of that
    step is removed: it is invalid. Raises what both raise, and leaves the others untouched."""
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
