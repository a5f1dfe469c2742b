"""Entries of a cache, by their keys: on disk, one safetensors file each, or in this process's memory.

An entry's file holds, in its metadata, a SHA-256 of its tensors and metadata: a damaged one counts as missing and is made
again. A folder of entries may be shared by runs and processes, at the same time.
"""

import errno
import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from trainer.base.errors import DataError, UserError
from trainer.base.files import remove_leftovers
from trainer.base.progress import QUIET, Phases
from trainer.base.tensorfile import TensorFile, serialize, write_tensors
from trainer.data.cache import pruning

Tensors = dict[str, torch.Tensor]

READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)  # someone else's cache: it can be read all the same


class Cache:
    """Entries in `directory`, the most recently used ones also in memory, up to `memory_bytes`.

    Every entry is verified once in a process, when it is first read or asked for in `missing`.
    limit: bytes of the directory; above it, entries that no running process uses are deleted. foresee: takes the bytes that
    all missing entries will have, once the first one is there.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        memory_bytes: int = 2**30,
        limit: int | None = None,
        foresee: Callable[[int], object] = lambda size: None,
    ) -> None:
        self.directory, self.foresee, self._absent = Path(directory), foresee, 0
        self.memory_bytes, self.limit = memory_bytes, limit
        self.over_limit = 0  # bytes in use above the limit, when it was last enforced
        self.pruned = 0  # entries that were deleted for the limit
        self._use: pruning.Use | None = None
        self.unprotected = ""  # why other runs may delete entries that this one uses
        self._written = 0
        self._before_scan = 0 if limit is None else limit // 16  # bytes to write until the directory is looked at again
        self._shared = 0  # bits of the directory's mode: who else may write there
        self._memory: OrderedDict[str, Tensors] = OrderedDict()
        self._memory_used = 0
        self._verified: set[str] = set()
        self._not_finite: set[str] = set()

    def path(self, key: str) -> Path:
        """The file of an entry."""
        return self.directory / key[:2] / f"{key}.safetensors"

    def claim(self, keys: Iterable[str]) -> None:
        """Nobody prunes those of these entries that exist until this process ends."""
        self._begin_use()
        for key in keys:
            self._mark(key)

    def missing(self, keys: Iterable[str], phases: Phases = QUIET) -> list[str]:
        """The keys, each once and in order, that have no entry or a damaged one. All given keys are claimed."""
        absent, keys = [], dict.fromkeys(keys)
        self._begin_use()
        with phases("reading the cache", len(keys), "entry") as phase:
            for key in keys:
                # Marked first: what is pruned after that is seen as missing.
                if key not in self._verified and not (self._mark(key) and self._read(key) is not None):
                    absent.append(key)
                phase.advance()
        self._absent = len(absent)
        return absent

    def put(self, key: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """Write an entry, atomically. `metadata` is for people who look into the file."""
        described = {**(metadata or {}), "key": key}
        if not finite(tensors):
            described["finite"] = "no"
            self._not_finite.add(key)
        described["sha256"] = _digest(tensors, described)
        try:
            write_tensors(self.path(key), tensors, described)
        except FileNotFoundError:  # a run in another container, where process numbers mean nothing, took it for a leftover
            write_tensors(self.path(key), tensors, described)
        if self._shared:
            pruning.share(self.path(key).parent, self._shared)
            pruning.share(self.path(key), self._shared)
        self._verified.add(key)
        self._forget(key)
        self._written += (size := sum(tensor.nbytes for tensor in tensors.values()))
        absent, self._absent = self._absent, 0
        if absent:
            self.foresee(absent * size)
        if self.limit is not None and self._written > self._before_scan:
            self.keep_limit()

    def is_finite(self, key: str) -> bool:
        """Whether all of a verified entry's values are."""
        assert key in self._verified
        return key not in self._not_finite

    def get(self, key: str) -> Tensors:
        """An entry's tensors, shared with later callers: do not change them. Raises DataError, naming the file."""
        if key in self._memory:
            self._memory.move_to_end(key)
            return self._memory[key]
        tensors = self._read(key)
        if tensors is None:
            raise DataError(f"cache entry {self.path(key)} is missing or damaged; start again and it is made anew")
        self._remember(key, tensors)
        return tensors

    def origin(self, key: str) -> str:
        """How a message describes an entry that already existed."""
        return f"as the cache holds them ({self.path(key)}: delete it to encode anew)"

    def share_memory(self, count: int) -> None:
        """This is one of `count` copies on the machine: each keeps its part in memory."""
        self.memory_bytes //= count

    def keep_limit(self) -> None:
        """Delete entries that no running process uses, least recently used first, until the directory is within the limit."""
        assert self.limit is not None
        self._written = 0
        if self._use is None:
            return
        since = pruning.require_locks(self._use, "data.cache_limit")
        done = pruning.prune(self.directory, since, limit=self.limit)
        self.pruned += len(done.deleted)
        self.over_limit = max(0, done.left_bytes - self.limit)
        # In proportion to the directory's size: a run far above its limit scans no more often than one within it.
        self._before_scan = max(self.limit, done.left_bytes) // 16

    def _begin_use(self) -> None:
        """Start to use the directory, before anything is written. Removes what killed processes left."""
        if self._use is not None:
            return
        try:
            remove_leftovers(self.directory.glob("*/.*.tmp"))
            self._use = pruning.Use(self.directory)
            self._shared = pruning.shared(self.directory)
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise
            self._warn(error)
        if self.limit is not None and self._use is not None:
            pruning.require_locks(self._use, "data.cache_limit")

    def _mark(self, key: str) -> bool:
        """Stamp the entry as used now; returns whether it exists."""
        try:
            os.utime(self.path(key))
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise
            self._warn(error)
        return True

    def _warn(self, error: OSError) -> None:
        self.unprotected = self.unprotected or (
            f"this run may not write to {error.filename} ({error.strerror}), so it cannot mark which entries of the cache it "
            "uses: other runs and users may delete them. Ask their owner for the right to "
            f"write (chmod -R g+rwX {self.directory}), or set data.cache_dir to a folder of your own"
        )

    def _read(self, key: str) -> Tensors | None:
        """The entry if it is there and sound. Its header is compared too, so every byte of the file is checked."""
        try:
            file = TensorFile(self.path(key))
            tensors = file.read_all()
        except UserError:  # missing, truncated, malformed
            return None
        if key not in self._verified:
            described = dict(file.metadata)
            if described.pop("sha256", None) != _digest(tensors, described) or described.get("key") != key:
                return None
            header = bytes(next(serialize(tensors, file.metadata)))
            with open(file.path, "rb") as raw:
                if raw.read(len(header)) != header:
                    return None
            self._verified.add(key)
            if "finite" in described:
                self._not_finite.add(key)
        return tensors

    def _remember(self, key: str, tensors: Tensors) -> None:
        size = sum(tensor.nbytes for tensor in tensors.values())
        if size > self.memory_bytes:
            return
        self._memory[key] = tensors
        self._memory_used += size
        while self._memory_used > self.memory_bytes:
            self._forget(next(iter(self._memory)))

    def _forget(self, key: str) -> None:
        if key in self._memory:
            self._memory_used -= sum(tensor.nbytes for tensor in self._memory.pop(key).values())


class MemoryCache:
    """Entries of this process alone. Nothing is written, and nothing is left when it ends."""

    def __init__(self) -> None:
        self._entries: dict[str, Tensors] = {}

    def claim(self, keys: Iterable[str]) -> None:
        """Nobody else can prune them."""

    def missing(self, keys: Iterable[str], phases: Phases = QUIET) -> list[str]:
        """The keys, each once and in order, that have no entry."""
        return [key for key in dict.fromkeys(keys) if key not in self._entries]

    def put(self, key: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
        self._entries[key] = dict(tensors)

    def is_finite(self, key: str) -> bool:
        return finite(self._entries[key])

    def get(self, key: str) -> Tensors:
        """An entry's tensors, shared with later callers: do not change them."""
        return self._entries[key]

    def origin(self, key: str) -> str:
        """How a message describes an entry that already existed."""
        return "encoded already"

    def share_memory(self, count: int) -> None:
        """Copies share it already: a forked process has its parent's memory."""


def finite(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether no value of floating point is NaN or infinite."""
    return all(bool(torch.isfinite(t).all()) for t in tensors.values() if t.is_floating_point())


def _digest(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 of the file these would make: names, dtypes, shapes, values and metadata."""
    digest = hashlib.sha256()
    for piece in serialize(tensors, metadata):
        digest.update(piece)
    return digest.hexdigest()
