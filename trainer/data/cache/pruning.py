"""Prunes a cache's folder: deletes the least recently used files of entries, and none that a running process uses.

A file's time of modification is that of the last request for one of its entries. A process that uses the folder locks, until
it ends, one byte of a file, whose offset is the time when the process began. So every file that was requested since the first
running process began is in use. All times are the file system's own, in milliseconds.
"""

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from trainer.base import files
from trainer.base.errors import UserError
from trainer.base.run_layout import in_use

PACKS = "packs"  # the folder of files with many entries; a file of one entry lies in a folder of its key's first letters
AGES = {"h": 3600, "d": 86400, "w": 604800}
NOBODY = 2**53  # milliseconds: after every use
NO_LOCKS = "there are no file locks here, so it is unknown which entries a run uses"


class Use:
    """Marks the folder as used by this process until it ends. since: in milliseconds; None if there are no locks."""

    def __init__(self, folder: Path) -> None:
        path = in_use(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.touch()
            for mine in (path.parent, path):
                share(mine, shared(folder))
        self._file: IO[bytes] = open(path, "a+b", buffering=0)  # noqa: SIM115
        os.utime(path)
        since = _milliseconds(os.fstat(self._file.fileno()))
        self.since = since if files.lock_byte(self._file, since) else None

    def first(self) -> int | None:
        """The time at which the first running process that uses the folder began; None if there are no locks."""
        if self.since is None:
            return None
        earlier = files.first_locked(self._file, self.since)
        return self.since if earlier is None else earlier


def shared(folder: Path) -> int:
    """The bits of a folder's mode that let its group and others write there. New entries get the same."""
    return folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def share(path: Path, bits: int) -> None:
    """Give the rights of `shared` to a file or folder, if it belongs to this user."""
    mode = path.stat().st_mode
    new_mode = mode | bits | bits << 1 | (bits >> 1 if stat.S_ISDIR(mode) else 0)
    if new_mode != mode:
        with contextlib.suppress(PermissionError):  # another user's; `Cache.unprotected` reports it if needed
            path.chmod(stat.S_IMODE(new_mode))


def look(folder: Path) -> int | None:
    """The time since which entries are in use, in milliseconds; None if unknown. Writes nothing."""
    path = in_use(folder)
    if not path.exists():
        return NOBODY
    try:
        with open(path, "r+b", buffering=0) as file:
            first = files.first_locked(file, NOBODY)
    except (OSError, AttributeError):  # not ours to open, a read-only disk, no locks
        return None
    return NOBODY if first is None else first


@dataclass(frozen=True)
class CacheEntry:
    """An entry's file. used: the time of the last request for it, in milliseconds."""

    path: Path
    bytes: int
    used: int


@dataclass(frozen=True)
class Pruned:
    """The result of pruning. entries: all before it. deleted: these were deleted, or would be. in_use: the count in use."""

    entries: tuple[CacheEntry, ...]
    deleted: tuple[CacheEntry, ...]
    in_use: int

    @property
    def left_bytes(self) -> int:
        """The bytes of the entries that stay."""
        return size(self.entries) - size(self.deleted)


def size(entries: tuple[CacheEntry, ...]) -> int:
    """The bytes of all entries."""
    return sum(entry.bytes for entry in entries)


def date(entry: CacheEntry) -> str:
    """The local time at which the entry was last used, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used / 1000))


def prune(
    folder: Path, used_since: int, *, limit: int | None = None, older_than: float | None = None, dry_run: bool = False
) -> Pruned:
    """Delete entries not used for `older_than` seconds, then the least recently used ones until `limit` bytes are left.
    used_since: in milliseconds; entries that were requested since then stay. dry_run: delete nothing."""
    present = tuple(sorted(entries(folder), key=lambda entry: entry.used))
    too_old = 0 if older_than is None else (time.time() - older_than) * 1000
    excess = 0 if limit is None else size(present) - limit
    deleted = []
    idle = [entry for entry in present if entry.used < used_since]
    for entry in idle:
        if entry.used >= too_old and excess <= 0:
            break
        if dry_run or _remove(entry):
            deleted.append(entry)
            excess -= entry.bytes
    return Pruned(present, tuple(deleted), len(present) - len(idle))


def entries(folder: Path) -> Iterator[CacheEntry]:
    """All entries, in no order. Other processes may delete entries meanwhile."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as groups:
        for group in groups:
            if re.fullmatch(f"[0-9a-f]{{2}}|{PACKS}", group.name) and group.is_dir():
                with os.scandir(group) as names:
                    for name in names:
                        if re.fullmatch(r"[0-9a-f]{64}\.safetensors", name.name):
                            with contextlib.suppress(FileNotFoundError):
                                status = name.stat()
                                yield CacheEntry(Path(name.path), status.st_size, _milliseconds(status))


def parse_age(text: str) -> float:
    """Seconds in "12h", "30d" or "8w". Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([hdw])", text.strip())
    if match is None:
        raise ValueError('write a number of hours, days or weeks, for example "12h", "30d" or "8w"')
    return float(match[1]) * AGES[match[2]]


def require_locks(use: Use, key: str) -> int:
    """The time since which entries are in use, in milliseconds. Raises UserError, naming the config key, if unknown."""
    first = use.first()
    if first is None:
        raise UserError(f"{key}: {NO_LOCKS}; delete the folder when no run uses it")
    return first


def _remove(entry: CacheEntry) -> bool:
    """Delete the entry, unless a run that just started has requested it; returns whether it was deleted."""
    aside = entry.path.with_name(f".{entry.path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")  # if killed: a leftover
    try:
        if _milliseconds(entry.path.stat()) != entry.used:
            return False
        os.replace(entry.path, aside)
        if _milliseconds(aside.stat()) != entry.used:
            os.replace(aside, entry.path)
            return False
        aside.unlink()
    except FileNotFoundError:  # someone else deleted it
        return False
    return True


def _milliseconds(status: os.stat_result) -> int:
    return status.st_mtime_ns // 1_000_000
