"""Files that exist whole or not at all: the only primitives that a checkpoint's safety rests on."""

import contextlib
import errno
import filecmp
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from trainer.base.errors import UserError

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None


# Progress callback: called with the count of units (bytes, layers) just done. Raising cancels the work.
Advance = Callable[[int], object]
Write = Callable[[Path | str, Iterable[memoryview | bytes], Advance], tuple[str, int]]  # `write_atomic`, `FileGroup.write`

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)  # a file system without record locks
CHUNK_BYTES = 2**25  # of large files, per read or write: short enough to react to a signal in between


def no_progress(count: int) -> None:
    """The progress callback that does nothing."""


def write(
    path: Path, pieces: Iterable[memoryview | bytes], advance: Advance = no_progress, *, sync: bool = True
) -> tuple[str, int]:
    """Write a new file and sync it; returns (sha256, bytes). The mode follows the umask. sync: False for files verified when
    they are read, which can be made again. Raises OSError (FileExistsError, too), naming the file; a part written stays."""
    digest, count = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    with naming(path):
        try:
            for piece in pieces:
                view = memoryview(piece)
                while view:  # after a short write the rest follows, or the next call raises the reason
                    size = os.write(descriptor, view[:CHUNK_BYTES])
                    digest.update(view[:size])
                    count, view = count + size, view[size:]
                    advance(size)
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return digest.hexdigest(), count


def open_regular(path: Path) -> IO[bytes]:
    """Open an untrusted file for reading. Raises OSError if it is no regular file: opening a pipe could block forever."""
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    kind = os.fstat(number).st_mode
    if not stat.S_ISREG(kind):
        os.close(number)
        code = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
        raise OSError(code, os.strerror(code) if stat.S_ISDIR(kind) else "not a regular file", str(path))
    return open(number, "rb")


def hash_file(path: Path, advance: Advance = no_progress) -> str:
    """The file's SHA-256, in hexadecimal."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(CHUNK_BYTES, path.stat().st_size + 1)))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            advance(count)
    return digest.hexdigest()


def write_atomic(
    path: Path | str, pieces: Iterable[memoryview | bytes], advance: Advance = no_progress, *, sync: bool = True
) -> tuple[str, int]:
    """Write `pieces` to `path` through a temporary file and a rename; returns (sha256, bytes). sync: see `write`. An
    exception leaves neither the file nor the temporary."""
    with FileGroup() as group:
        return group.write(path, pieces, advance, sync=sync)


def refuse_taken(path: Path, copy: Path | None = None, *, place: str = "OUT") -> None:
    """Raises UserError if `path` exists and is not a file with the bytes of `copy`. place: the argument to change."""
    if os.path.lexists(path) and not (copy is not None and path.is_file() and filecmp.cmp(copy, path, shallow=False)):
        raise UserError(f"{path} exists; remove it, or give another {place}")


class FileGroup:
    """Files that belong together, written in a `with` block. All get their names at its end; if it raises, none does, and
    the earlier files stay. Between two renames nothing is written and no signal is handled; only a kill there leaves some
    old and some new files. keep: raises UserError if one of the places is taken (`refuse_taken`)."""

    def __init__(self, *, keep: bool = False) -> None:
        self._named: list[tuple[Path, Path]] = []
        self._old: list[Path] = []
        self._keep = keep

    def write(
        self, path: Path | str, pieces: Iterable[memoryview | bytes], advance: Advance = no_progress, *, sync: bool = True
    ) -> tuple[str, int]:
        """Write a file that gets its name at the end of the block; returns (sha256, bytes). Raises OSError."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary(path)
        self._named.append((temporary, path))
        return write(temporary, pieces, advance, sync=sync)

    def remove(self, path: Path) -> None:
        """Delete a file, if it exists, at the end of the block."""
        self._old.append(path)

    def __enter__(self) -> "FileGroup":
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        try:
            if kind is None:
                for temporary, path in self._named if self._keep else ():
                    refuse_taken(path, temporary)
                while self._named:
                    os.replace(*self._named[0])
                    del self._named[0]
                for path in self._old:
                    path.unlink(missing_ok=True)
        finally:
            for temporary, _ in self._named:
                with contextlib.suppress(OSError):  # the first error is the one to report
                    temporary.unlink()


@contextlib.contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A new folder that gets its name at the end of the block, and is deleted if that raises. A kill leaves a temporary."""
    temporary = _temporary(folder)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _temporary(path: Path) -> Path:
    """A temporary name. The process id alone is not unique: in two containers that share a folder both may be 1."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def leftovers_of(path: Path) -> list[Path]:
    """The temporaries of this file or folder, of running and of killed writers."""
    return list(path.parent.glob(f".{glob.escape(path.name)}.*.tmp"))


def make_folder(folder: Path, key: str | None = None) -> None:
    """Create a folder and its missing parents durably: existing ones are synced too, as their creator may have been killed
    before the sync. key: the config key that names the folder; with it, raises UserError if the folder cannot be made. A
    full or broken disk stays an OSError."""
    try:
        if not folder.is_dir():
            for parent in reversed(folder.parents):
                if not parent.is_dir():
                    parent.mkdir(exist_ok=True)
                    sync_folder(parent.parent)
                else:  # best effort: unreadable folders, and file systems without a sync, hold no new names
                    with contextlib.suppress(OSError):
                        sync_folder(parent.parent)
            folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)
    except (FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError) as error:
        if key is None:
            raise
        raise UserError(f"{key} = {str(folder)!r} cannot be made: {error.strerror}; give another folder") from error


def check_folder(folder: Path, key: str) -> None:
    """Raises UserError if `make_folder` would foreseeably do so; OSError if the file system is read-only."""
    existing = next((parent for parent in (folder, *folder.absolute().parents) if os.path.lexists(parent)), None)
    if existing is not None and not existing.is_dir():  # or a broken link
        code = errno.EEXIST if existing == folder else errno.ENOTDIR
    elif existing is not None and not os.access(existing, os.W_OK | os.X_OK):
        code = errno.EACCES
        if hasattr(os, "statvfs") and os.statvfs(existing).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder))
    else:
        return
    raise UserError(f"{key} = {str(folder)!r} cannot be made: {os.strerror(code)}; give another folder")


def others_may_write(folder: Path) -> bool:
    """Whether another user may write to `folder` or replace it. A group with the owner's id is the owner alone. False on
    Windows, whose modes do not say. Raises OSError."""
    for parent in (folder, *folder.parents) if os.name != "nt" else ():
        status = parent.stat()
        shared = status.st_mode & (stat.S_IWOTH | (stat.S_IWGRP if status.st_gid != status.st_uid else 0))
        if status.st_uid not in (0, os.getuid()) or (shared and (parent == folder or not status.st_mode & stat.S_ISVTX)):
            return True
    return False


@contextlib.contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Lock a folder for this process by a record lock on `path` in it. The lock ends with the process, and workers do not
    inherit it. shared: a shared lock, which excludes exclusive ones. Raises UserError if another process holds the lock.
    Does nothing where there are no record locks (Windows, some network mounts)."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.lockf(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise UserError(
                f"another run writes to {str(path.parent)!r}: wait for its end, or choose another run.output_dir"
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield
    finally:
        os.close(descriptor)


def lock_byte(file: IO[bytes], byte: int) -> bool:
    """Take a shared lock on one byte of an open file, until the file is closed or the process ends. Returns False if there
    are no record locks. They belong to the process: closing the same path anywhere in it releases them."""
    try:
        fcntl.lockf(file, fcntl.LOCK_SH, 1, byte)
    except (AttributeError, OSError) as error:  # AttributeError: Windows
        if isinstance(error, OSError) and error.errno not in NO_LOCKS:
            raise
        return False
    return True


def first_locked(file: IO[bytes], limit: int) -> int | None:
    """The lowest byte below `limit` that another process has locked (`lock_byte`), or None."""

    def is_locked(end: int) -> bool:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, end, 0)
        except (BlockingIOError, PermissionError):
            return True
        fcntl.lockf(file, fcntl.LOCK_UN, end, 0)
        return False

    index = bisect_left(range(1, limit + 1), True, key=is_locked)
    return index if index < limit else None


def sync_tree(folder: Path) -> None:
    """Make a folder and the files in it durable, whoever wrote them."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDWR)
        with naming(path):
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable. A no-op where folders cannot be opened (Windows) or synced (some mounts)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    with naming(folder):
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
                raise
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to an OSError of a call on a descriptor, which does not name its file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def remove_leftovers(temporaries: Iterable[Path], *, idle: float = 0) -> None:
    """Delete temporaries whose writers have ended. Must not run while this process writes there. idle: minimum seconds since
    the last write; above 0 in folders shared with other machines or containers, whose process ids say nothing."""
    for path in temporaries:
        owner = re.fullmatch(r"\..*\.(\d+)\.[0-9a-f]+\.tmp", path.name)
        # Our own id may be that of a killed run: in a container every run has the same.
        if not owner or (int(owner[1]) != os.getpid() and _is_running(int(owner[1]))):
            continue
        try:
            if time.time() - path.lstat().st_mtime >= idle:
                remove_folder(path)
        except FileNotFoundError:  # removed by another start meanwhile
            continue


def _is_running(pid: int) -> bool:
    """Whether a process with this id runs here; always True on Windows, where signal 0 would be Ctrl-C."""
    try:
        if os.name != "nt":
            os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's; or no valid id, so not for us to judge
        return True
    return True


def remove_folder(folder: Path, *, ignore_errors: bool = False) -> None:
    """Delete a folder that nobody else writes to, perhaps partly deleted before; of a file or link only the name goes.
    Raises OSError, naming the folder."""
    with naming(folder), contextlib.suppress(OSError) if ignore_errors else contextlib.nullcontext():
        if folder.is_symlink() or not folder.is_dir():
            folder.unlink()
        else:
            shutil.rmtree(folder, ignore_errors=ignore_errors)


def parse_size(text: str) -> int:
    """The bytes of a size text: "20GB" is 20 * 10**9, "20GiB" is 20 * 2**30. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMGT]?)(i?)B", text.strip())
    if match is None or (match[3] and not match[2]):
        raise ValueError('write a number and its unit, for example "20GB" or "500MiB"')
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " "))


def json_bytes(tree: Any) -> bytes:
    """Canonical JSON: equal trees give equal bytes. Raises ValueError for NaN and infinity."""
    return (json.dumps(tree, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def refuse_irregular(path: Path) -> None:
    """Raises UserError if `path` is a pipe, socket or device, which could be read without end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{path} is a pipe, a socket or a device; give a file")


def read_json(path: Path) -> Any:
    """The tree in a JSON file. Raises UserError, naming it, if it is missing, unreadable or not what `json_bytes` writes."""
    try:
        tree = json.loads(path.read_bytes())
        # The parser accepts NaN, 1e999 and lone surrogates, which fail when the tree is written or printed.
        json.dumps(tree, allow_nan=False, ensure_ascii=False).encode()
        return tree
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON; nested a thousand deep
        raise UserError(f"{path} is damaged: it is not JSON ({error})") from error
