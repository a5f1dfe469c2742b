"""Entries of a cache, by their keys: on disk, or in this process's memory.

An entry is the bytes of a safetensors file, with a SHA-256 of its tensors and metadata. Many entries share one file, a pack,
which is written once, whole, and not synced: a damaged entry is noticed when it is first read, and made again at the next
start. Earlier caches have one file for each entry. Runs and processes may share a folder at the same time.
"""

import errno
import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import torch

from trainer.base.errors import DataError, UserError
from trainer.base.files import json_bytes, read_json, remove_leftovers, write_atomic
from trainer.base.progress import QUIET, Phases
from trainer.base.tensorfile import TensorFile, parse, serialize, write_tensors
from trainer.data.cache import pruning

Tensors = dict[str, torch.Tensor]

# The largest pack, the header of one entry, the longest time that a pack stays in memory, where a kill loses it.
PACK_BYTES, HEADER_BYTES, OPEN_SECONDS = 256 * 10**6, 200, 300
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)  # someone else's cache: it can be read all the same


class Cache:
    """Entries in `directory`, the most recently used ones also in memory, up to `memory_bytes`. Every entry is verified once
    in a process, when it is first read. Other processes see new entries after `flush`. limit: bytes of the directory; above
    it, files are deleted of which no running process uses an entry. foresee: called once the first missing entry is made,
    with an estimate of the bytes of all missing entries."""

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
        self.pruned = 0  # files that were deleted for the limit
        self._use: pruning.Use | None = None
        self.unprotected = ""  # the reason why other runs may delete entries that this one uses
        self.damaged: list[str] = []  # packs that cannot be read
        self._packs: dict[Path, TensorFile | None] = {}  # None: it is damaged
        self._places: dict[str, TensorFile] = {}  # by key
        self._open: dict[str, torch.Tensor] = {}  # entries of the next pack
        self._open_bytes, self._opened = 0, 0.0
        self._new_bytes = 0  # written since the directory was last scanned
        self._before_scan = 0 if limit is None else limit // 16  # bytes to write until the next scan
        self._shared = 0  # bits of the directory's mode: who else may write there
        self._memory: OrderedDict[str, Tensors] = OrderedDict()
        self._memory_used = 0
        self._verified: set[str] = set()
        self._not_finite: set[str] = set()

    def path(self, key: str) -> Path:
        """The file that holds an entry: a pack, or the entry's own."""
        return self._places[key].path if key in self._places else self.directory / key[:2] / f"{key}.safetensors"

    def claim(self, keys: Iterable[str]) -> None:
        """Protect these entries, if they exist, from pruning until this process ends."""
        self._begin_use()
        for path in dict.fromkeys(map(self.path, keys)):
            self._mark(path)

    def missing(self, keys: Iterable[str], phases: Phases = QUIET) -> list[str]:
        """The keys, each once and in order, that have no entry or a damaged one. Claims all keys."""
        absent, keys, marks = [], dict.fromkeys(keys), dict[Path, bool]()
        self._begin_use()
        with phases("reading the cache", len(keys), "entry") as phase:
            for key in keys:
                # Marked first: an entry that is pruned after that is seen as missing.
                path = self.path(key)
                marked = marks[path] if path in marks else marks.setdefault(path, self._mark(path))
                sound = marked and (key in self._places or self._read(key) is not None)
                if not sound and key not in self._open:
                    self._places.pop(key, None)
                    absent.append(key)
                phase.advance()
        self._absent = len(absent)
        return absent

    def put(self, key: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """Add an entry to the open pack. metadata: for people who look into the file."""
        described = {**(metadata or {}), "key": key}
        if not finite(tensors):
            described["finite"] = "no"
            self._not_finite.add(key)
        described["sha256"] = _digest(tensors, described)
        data = torch.frombuffer(bytearray(b"".join(serialize(tensors, described))), dtype=torch.uint8)
        most = PACK_BYTES if self.limit is None else min(PACK_BYTES, self._before_scan)
        if self._open_bytes + data.nbytes + HEADER_BYTES > most or time.monotonic() > self._opened + OPEN_SECONDS:
            self.flush()
        self._opened = self._opened if self._open else time.monotonic()
        self._open[key] = data
        self._open_bytes += data.nbytes + HEADER_BYTES
        self._verified.add(key)
        self._forget(key)
        absent, self._absent = self._absent, 0
        if absent:
            self.foresee(absent * data.nbytes)

    def flush(self) -> None:
        """Write the open pack, named by the digest of its keys: runs that make the same pack write one file."""
        if not self._open:
            return
        entries, self._open, self._open_bytes = self._open, {}, 0
        name = hashlib.sha256(" ".join(sorted(entries)).encode()).hexdigest()
        path = self.directory / pruning.PACKS / f"{name}.safetensors"
        about = {"not_finite": " ".join(sorted(self._not_finite & entries.keys()))}
        unsynced = partial(write_atomic, sync=False)
        try:
            write_tensors(path, entries, about, write=unsynced)
        except FileNotFoundError:  # a run in another container, where process numbers mean nothing, took it for a leftover
            write_tensors(path, entries, about, write=unsynced)
        path.with_suffix(".json").unlink(missing_ok=True)
        if self._shared:
            pruning.share(path.parent, self._shared)
            pruning.share(path, self._shared)
        self._packs[path] = pack = TensorFile(path)
        self._places |= dict.fromkeys(entries, pack)
        self._new_bytes += sum(map(len, entries.values()))
        if self.limit is not None and self._new_bytes > self._before_scan:
            self.keep_limit()

    def is_finite(self, key: str) -> bool:
        """Whether all values of an existing entry are finite."""
        return key not in self._not_finite

    def get(self, key: str) -> Tensors:
        """An entry's tensors, shared with later callers: do not change them. Raises DataError, naming the file."""
        if key in self._memory:
            self._memory.move_to_end(key)
            return self._memory[key]
        if key not in self._places and key not in self._open:
            self._index()
        tensors = self._read(key)
        if tensors is None:
            raise DataError(f"cache entry {key} ({self.path(key)}) is missing or damaged; {self._note_damage(key)}")
        size = sum(tensor.nbytes for tensor in tensors.values())
        if size <= self.memory_bytes:
            self._memory[key] = tensors
            self._memory_used += size
        while self._memory_used > self.memory_bytes:
            self._forget(next(iter(self._memory)))
        return tensors

    def origin(self, key: str) -> str:
        """How a message describes an entry that already existed."""
        return f"as the cache holds them ({self.path(key)}: delete it to encode anew)"

    def share_memory(self, count: int) -> None:
        """Divide the memory by the `count` copies of this cache on the machine."""
        self.memory_bytes //= count

    def keep_limit(self) -> None:
        """Delete entries that no running process uses, least recently used first, until the directory is within the limit."""
        assert self.limit is not None
        self._new_bytes = 0
        if self._use is None:
            return
        since = pruning.require_locks(self._use, "data.cache_limit")
        result = pruning.prune(self.directory, since, limit=self.limit)
        self.pruned += len(result.deleted)
        self.over_limit = max(0, result.left_bytes - self.limit)
        # In proportion to the directory's size: a run far above its limit scans no more often than one within it.
        self._before_scan = max(self.limit, result.left_bytes) // 16

    def _begin_use(self) -> None:
        """Mark the directory as used, before anything is written, and index its packs. Removes the leftovers of killed
        processes."""
        self._index()
        if self._use is not None:
            return
        try:
            remove_leftovers(self.directory.glob("*/.*.tmp"))
            self._use = pruning.Use(self.directory)
            self._shared = pruning.shared(self.directory)
        except OSError as error:
            self._note_read_only(error)
        if self.limit is not None and self._use is not None:
            pruning.require_locks(self._use, "data.cache_limit")

    def _index(self) -> None:
        for path in (self.directory / pruning.PACKS).glob("*.safetensors"):
            if path in self._packs:
                continue
            try:
                self._packs[path] = pack = TensorFile(path)
            except UserError as error:
                if path.exists():  # else it was pruned just now
                    self._packs[path] = None
                    self.damaged.append(f"{error} It is in the cache: its entries are made anew; delete it")
                continue
            noted = path.with_suffix(".json")
            damaged = set(read_json(noted)) if noted.exists() else set()
            self._not_finite |= {*pack.metadata.get("not_finite", "").split()}
            self._places |= {key: pack for key in pack.entries if key not in damaged}

    def _note_damage(self, key: str) -> str:
        """The remedy for a damaged entry. Notes all damaged entries of its pack, for the next start to make anew."""
        if (pack := self._places.get(key)) is None:
            return "start again and it is made anew"
        damaged = [entry for entry in pack.entries if self._read(entry) is None]
        try:
            write_atomic(pack.path.with_suffix(".json"), [json_bytes(damaged)], sync=False)
        except OSError as error:
            return f"have that file deleted ({error.strerror}) and start again"
        return f"start again, and {len(damaged)} of the {len(pack.entries)} entries in that file are made anew"

    def _mark(self, path: Path) -> bool:
        """Mark the file as used now; returns whether it exists."""
        try:
            os.utime(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._note_read_only(error)
        return True

    def _note_read_only(self, error: OSError) -> None:
        if error.errno not in READ_ONLY:
            raise error
        self.unprotected = self.unprotected or (
            f"this run may not write to {error.filename} ({error.strerror}), so it cannot mark which entries of the cache it "
            "uses: other runs and users may delete them. Ask their owner for the right to "
            f"write (chmod -R g+rwX {self.directory}), or set data.cache_dir to a folder of your own"
        )

    def _read(self, key: str) -> Tensors | None:
        """The entry if it exists and is sound. Its header is compared too, so every byte of it is checked."""
        path = self.path(key)
        try:
            data = self._open.get(key)
            if data is None and key in self._places:
                data = self._places[key].read(key)
            view = memoryview(bytearray(path.read_bytes()) if data is None else data.numpy())
            metadata, tensors = parse(view, path)
        except (UserError, FileNotFoundError):  # missing, truncated, malformed
            return None
        if key not in self._verified:
            described = dict(metadata)
            if described.pop("sha256", None) != _digest(tensors, described) or described.get("key") != key:
                return None
            header = next(serialize(tensors, metadata))
            if view[: len(header)] != header:
                return None
            self._verified.add(key)
            if "finite" in described:
                self._not_finite.add(key)
        return tensors

    def _forget(self, key: str) -> None:
        if key in self._memory:
            self._memory_used -= sum(tensor.nbytes for tensor in self._memory.pop(key).values())


class MemoryCache:
    """Entries in the memory of this process alone."""

    def __init__(self) -> None:
        self._entries: dict[str, Tensors] = {}

    def claim(self, keys: Iterable[str]) -> None:
        """Does nothing: no other process can prune them."""

    def missing(self, keys: Iterable[str], phases: Phases = QUIET) -> list[str]:
        return [key for key in dict.fromkeys(keys) if key not in self._entries]

    def put(self, key: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
        self._entries[key] = dict(tensors)

    def flush(self) -> None:
        """Does nothing: there is no file."""

    def is_finite(self, key: str) -> bool:
        return finite(self._entries[key])

    def get(self, key: str) -> Tensors:
        """An entry's tensors, shared with later callers: do not change them."""
        return self._entries[key]

    def origin(self, key: str) -> str:
        return "encoded already"

    def share_memory(self, count: int) -> None:
        """Does nothing: a forked process has its parent's memory."""


def finite(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether no floating-point value is NaN or infinite."""
    return all(bool(torch.isfinite(t).all()) for t in tensors.values() if t.is_floating_point())


def _digest(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 of the serialized file: names, dtypes, shapes, values and metadata."""
    digest = hashlib.sha256()
    for piece in serialize(tensors, metadata):
        digest.update(piece)
    return digest.hexdigest()
