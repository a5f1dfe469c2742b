"""A cache of the SHA-256 of large files: a model's files are hashed at every start, and T5 alone has 10 GB."""

import json
import os
import time
from pathlib import Path

from trainer.base.files import hash_file, remove_leftovers, write_atomic
from trainer.base.progress import QUIET, Phases

# A file written this recently may change again without a newer time stamp.
SETTLED_SECONDS = 2

Stamp = tuple[int, ...]  # size, inode, mtime and ctime in ns of a file; callers may append more


def stamp_of(status: os.stat_result) -> Stamp:
    """The stamp of a file, which changes with its contents."""
    return status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def is_settled(stamp: Stamp) -> bool:
    """Whether any later change gets a newer time stamp. Call it before reading the file."""
    return time.time_ns() - max(stamp[2:4]) > SETTLED_SECONDS * 10**9


class FileDigests:
    """Digests by path, valid while a file keeps its stamp. memory: the JSON file that stores them; None: none does."""

    def __init__(self, memory: Path | None = None, phases: Phases = QUIET) -> None:
        self.memory, self.phases = memory, phases
        self._entries: dict[str, list] = {}
        if memory is not None:
            remove_leftovers(memory.parent.glob(f".{memory.name}.*.tmp"))
            try:
                entries = json.loads(memory.read_text(encoding="utf-8"))
            except (FileNotFoundError, ValueError):  # missing or damaged: hash everything again
                entries = {}
            if isinstance(entries, dict):
                self._entries = {key: value for key, value in entries.items() if isinstance(value, list) and len(value) == 2}

    def of(self, path: Path) -> str:
        """The file's SHA-256, in hexadecimal."""
        stat, key = path.stat(), str(path.resolve())
        stamp = stamp_of(stat)
        if key in self._entries and self._entries[key][0] == [*stamp]:
            return self._entries[key][1]
        settled = is_settled(stamp)
        with self.phases(f"hashing {path.stem}", stat.st_size, "B") as phase:
            digest = hash_file(path, phase.advance)
        self._entries[key] = [[*stamp], digest]
        if self.memory is not None and settled:
            write_atomic(self.memory, [json.dumps(self._entries, indent=1, sort_keys=True).encode()])
        return digest
