"""SHA-256 of large files, remembered: a model's files are hashed at every start, and T5 alone has ten gigabytes."""

import json
import os
import time
from pathlib import Path

from trainer.base.files import hash_file, remove_leftovers, write_atomic
from trainer.base.progress import QUIET, Phases

# A file that was written this recently may be written again without a newer time stamp.
SETTLED_SECONDS = 2

Stamp = tuple[int, ...]  # a file's size, inode, and times of contents and of the inode, in nanoseconds; then what else counts


def stamp_of(status: os.stat_result) -> Stamp:
    """What changes with a file's contents."""
    return status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def is_settled(stamp: Stamp) -> bool:
    """Whether a change after this moment has a newer time. Asked before the file is read."""
    return time.time_ns() - max(stamp[2:4]) > SETTLED_SECONDS * 10**9


class FileDigests:
    """Digests by path, each good as long as the file keeps its stamp. memory: a JSON file that is read now and written with
    every new digest; None: this process alone remembers them."""

    def __init__(self, memory: Path | None = None, phases: Phases = QUIET) -> None:
        self.memory, self.phases = memory, phases
        self._known: dict[str, list] = {}
        if memory is not None:
            remove_leftovers(memory.parent.glob(f".{memory.name}.*.tmp"))
            try:
                read = json.loads(memory.read_text(encoding="utf-8"))
            except (FileNotFoundError, ValueError):  # missing or damaged: all is hashed again
                read = {}
            if isinstance(read, dict):
                self._known = {key: value for key, value in read.items() if isinstance(value, list) and len(value) == 2}

    def of(self, path: Path) -> str:
        """The file's SHA-256, in hexadecimal."""
        stat, key = path.stat(), str(path.resolve())
        stamp = stamp_of(stat)
        if key in self._known and self._known[key][0] == [*stamp]:
            return self._known[key][1]
        settled = is_settled(stamp)
        with self.phases(f"hashing {path.stem}", stat.st_size, "B") as phase:
            digest = hash_file(path, phase.advance)
        self._known[key] = [[*stamp], digest]
        if self.memory is not None and settled:
            write_atomic(self.memory, [json.dumps(self._known, indent=1, sort_keys=True).encode()])
        return digest
