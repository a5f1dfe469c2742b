"""Files that are there whole or not at all. What a checkpoint's safety rests on is here alone."""

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
CHUNK_BYTES = 2**25  # of large files: read, hashed and written fast enough to hear of a signal in between


def unheard(count: int) -> None:
    """An Advance for work that nobody watches."""


def write(
    path: Path, pieces: Iterable[memoryview | bytes], advance: Advance = unheard, *, sync: bool = True
) -> tuple[str, int]:
    """Write a new file and sync it; returns (sha256, bytes). The file's mode follows the umask. sync: False for what is
    verified when it is read, and can be made again.

    Raises OSError, naming the file, and leaves what was written so far; FileExistsError where there is one already.
    """
    digest, count = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    with naming(path):
        try:
            for piece in pieces:
                view = memoryview(piece)
                while view:  # a short write is none: what is left follows, or the next call says why it cannot
                    written = os.write(descriptor, view[:CHUNK_BYTES])
                    digest.update(view[:written])
                    count, view = count + written, view[written:]
                    advance(written)
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return digest.hexdigest(), count


def open_regular(path: Path) -> IO[bytes]:
    """Open a file to be read that anybody may have put there. Raises OSError for what is no regular file: a pipe, say, would
    be waited for without end."""
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    kind = os.fstat(number).st_mode
    if not stat.S_ISREG(kind):
        os.close(number)
        code = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
        raise OSError(code, os.strerror(code) if stat.S_ISDIR(kind) else "not a regular file", str(path))
    return open(number, "rb")


def hash_file(path: Path, advance: Advance = unheard) -> str:
    """The file's SHA-256, in hexadecimal."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(CHUNK_BYTES, path.stat().st_size + 1)))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            advance(count)
    return digest.hexdigest()


def write_atomic(
    path: Path | str, pieces: Iterable[memoryview | bytes], advance: Advance = unheard, *, sync: bool = True
) -> tuple[str, int]:
    """Write `pieces` to `path` through a temporary file and a rename; returns (sha256, bytes). sync: as `write` has it. An
    exception leaves neither the file nor the temporary."""
    with FileGroup() as one:
        return one.write(path, pieces, advance, sync=sync)


def refuse_taken(path: Path, made: Path | None = None, *, place: str = "OUT") -> None:
    """Raises UserError where there is something at `path`, other than a file with the bytes of `made`. place: the argument
    that names another."""
    if os.path.lexists(path) and not (made is not None and path.is_file() and filecmp.cmp(made, path, shallow=False)):
        raise UserError(f"{path} exists; remove it, or give another {place}")


class FileGroup:
    """Files that belong together, written one after another in a `with` block: all get their names at its end, or, where it
    raises, none does, and those of before stay. Between two names nothing is written and no signal heard; only a kill there
    leaves some of the old and some of the new. keep: raises UserError where the place of one of them is taken
    (`refuse_taken`)."""

    def __init__(self, *, keep: bool = False) -> None:
        self._named: list[tuple[Path, Path]] = []
        self._old: list[Path] = []
        self._keep = keep

    def write(
        self, path: Path | str, pieces: Iterable[memoryview | bytes], advance: Advance = unheard, *, sync: bool = True
    ) -> tuple[str, int]:
        """The (sha256, bytes) of a file that gets its name at the end of the block. Raises OSError."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary(path)
        self._named.append((temporary, path))
        return write(temporary, pieces, advance, sync=sync)

    def remove(self, path: Path) -> None:
        """A file that may be there, at the end of the block."""
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
                with contextlib.suppress(OSError):  # the first failure is the one to tell
                    temporary.unlink()


@contextlib.contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A new folder to fill in a `with` block, which gets its name at its end, or is gone where the block raises. Of a kill it
    leaves what `leftovers_of` gives."""
    temporary = _temporary(folder)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _temporary(path: Path) -> Path:
    """A name to write under. Not by the process's number alone: two containers that share a folder may both be number 1."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def leftovers_of(path: Path) -> list[Path]:
    """What writers of this file or folder have under another name: those at work, and those that were killed."""
    return list(path.parent.glob(f".{glob.escape(path.name)}.*.tmp"))


def make_folder(folder: Path, key: str | None = None) -> None:
    """Create a folder and what is missing above it, and see to it that a power failure cannot take its name away: who made
    what is there already may have been killed before the sync. key: of the config, that names the folder. Raises UserError
    then where it cannot be made; a full or broken disk stays an OSError."""
    try:
        if not folder.is_dir():
            for parent in reversed(folder.parents):
                if not parent.is_dir():
                    parent.mkdir(exist_ok=True)
                    sync_folder(parent.parent)
                else:  # as far as it goes: folders that may not be read, and file systems without a sync, hold no new names
                    with contextlib.suppress(OSError):
                        sync_folder(parent.parent)
            folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)
    except (FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError) as error:
        if key is None:
            raise
        raise UserError(f"{key} = {str(folder)!r} cannot be made: {error.strerror}; give another folder") from error


def check_folder(folder: Path, key: str) -> None:
    """Raises UserError, as `make_folder` would, where it can be seen without making it that it cannot be made; OSError where
    the file system takes no writes at all."""
    there = next((parent for parent in (folder, *folder.absolute().parents) if os.path.lexists(parent)), None)
    if there is not None and not there.is_dir():  # a link to nowhere, too
        why = errno.EEXIST if there == folder else errno.ENOTDIR
    elif there is not None and not os.access(there, os.W_OK | os.X_OK):
        why = errno.EACCES
        if hasattr(os, "statvfs") and os.statvfs(there).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder))
    else:
        return
    raise UserError(f"{key} = {str(folder)!r} cannot be made: {os.strerror(why)}; give another folder")


def others_may_write(folder: Path) -> bool:
    """Whether another user may put files into `folder`, or another folder into its place. A group with its owner's number is
    the owner alone. False on Windows, where modes do not tell. Raises OSError."""
    for each in (folder, *folder.parents) if os.name != "nt" else ():
        about = each.stat()
        shared = about.st_mode & (stat.S_IWOTH | (stat.S_IWGRP if about.st_gid != about.st_uid else 0))
        if about.st_uid not in (0, os.getuid()) or (shared and (each == folder or not about.st_mode & stat.S_ISVTX)):
            return True
    return False


@contextlib.contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold a folder for this process alone, by a record lock on `path` in it, which ends with the process, however it ends,
    and which workers do not inherit. shared: hold it beside others who share it, which keeps those away who want it alone.
    Raises UserError where another holds it. Nothing is held where there are no such locks (Windows, some network mounts)."""
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
    """Hold one byte of an open file, beside others who do, until it is closed or the process ends, however it ends.

    Returns False where there are no such locks. They belong to the process: closing the path once more there ends them.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_SH, 1, byte)
    except (AttributeError, OSError) as error:  # AttributeError: Windows
        if isinstance(error, OSError) and error.errno not in NO_LOCKS:
            raise
        return False
    return True


def first_locked(file: IO[bytes], before: int) -> int | None:
    """The lowest byte below `before` that another process holds (`lock_byte`); None where none does."""

    def is_locked(end: int) -> bool:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, end, 0)
        except (BlockingIOError, PermissionError):
            return True
        fcntl.lockf(file, fcntl.LOCK_UN, end, 0)
        return False

    place = bisect_left(range(1, before + 1), True, key=is_locked)
    return place if place < before else None


def sync_tree(folder: Path) -> None:
    """Make a folder of files durable, whoever wrote them."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDWR)
        with naming(path):
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable. A no-op where folders cannot be opened (Windows), and on file systems that know no
    such sync (some network mounts)."""
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
    """An OSError of a call on a descriptor does not say which file it was: this one does."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def remove_leftovers(temporaries: Iterable[Path], *, idle: float = 0) -> None:
    """Delete those of the temporaries of `write_atomic` and `appearing` whose writers are gone. Not while this process writes
    there. idle: seconds since the last write, at least. More than 0 in a folder that other machines or containers may share:
    there a process's number says nothing."""
    for path in temporaries:
        owner = re.fullmatch(r"\..*\.(\d+)\.[0-9a-f]+\.tmp", path.name)
        # Our own number may be that of a killed run: in a container every run has the same.
        if not owner or (int(owner[1]) != os.getpid() and _is_running(int(owner[1]))):
            continue
        try:
            if time.time() - path.lstat().st_mtime >= idle:
                remove_folder(path)
        except FileNotFoundError:  # another start has removed it meanwhile
            continue


def _is_running(pid: int) -> bool:
    """Whether a process of this number exists here. Windows cannot ask without harm (signal 0 is Ctrl-C there)."""
    try:
        if os.name != "nt":
            os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # someone else's; or no process number at all, so not for us to judge
        return True
    return True


def remove_folder(folder: Path, *, ignore_errors: bool = False) -> None:
    """Delete a folder that nobody else writes to; it may be gone in part already. Of a file, and of a link to elsewhere, only
    the name goes. Raises OSError, naming the folder."""
    with naming(folder), contextlib.suppress(OSError) if ignore_errors else contextlib.nullcontext():
        if folder.is_symlink() or not folder.is_dir():
            folder.unlink()
        else:
            shutil.rmtree(folder, ignore_errors=ignore_errors)


def parse_size(text: str) -> int:
    """Bytes, of a number with a unit: "20GB" is 20 * 10**9, "20GiB" is 20 * 2**30. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMGT]?)(i?)B", text.strip())
    if match is None or (match[3] and not match[2]):
        raise ValueError('write a number and its unit, for example "20GB" or "500MiB"')
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " "))


def json_bytes(tree: Any) -> bytes:
    """One form for every tree, so that equal trees are equal bytes. Raises ValueError for NaN and infinity."""
    return (json.dumps(tree, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def refuse_irregular(path: Path) -> None:
    """Refuse what is there and is neither a file nor a folder: a pipe or a device may be read without end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{path} is a pipe, a socket or a device; give a file")


def read_json(path: Path) -> Any:
    """Raises UserError, naming the file, where it is missing, unreadable or no JSON that `json_bytes` could have written."""
    try:
        tree = json.loads(path.read_bytes())
        # The parser takes NaN, 1e999 and half of a surrogate pair; whoever writes or prints the tree would trip over them.
        json.dumps(tree, allow_nan=False, ensure_ascii=False).encode()
        return tree
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON; nested a thousand deep
        raise UserError(f"{path} is damaged: it is not JSON ({error})") from error
