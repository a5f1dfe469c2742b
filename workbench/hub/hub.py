"""Models on the hub: what a repository holds, and its files on this machine, in huggingface_hub's own cache.

huggingface_hub's own downloads start over when they were interrupted, and go on after a signal. Here a file grows as
`blobs/HASH.incomplete`, which the next start goes on from, and gets its name in the cache only with the hash that is listed.
"""

import errno
import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from trainer.base import files
from trainer.base.errors import UserError, reason_of, shown
from trainer.base.progress import QUIET, Phases
from trainer.base.tensorfile import size_text

MAIN = "main"  # the branch that is taken where no revision is asked for
AT_ONCE = 4  # files
PIECE_BYTES = 2**20  # of a partial file, read again to go on with its hash
TIMEOUT = 10.0  # seconds without an answer
RETRIES, RETRY_AFTER = 5, 1.0  # without a byte in between; seconds
POLL = 0.1  # seconds between two looks at signals
HASH = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
PATIENCE = 1.0  # seconds for the threads to end after a signal


@dataclass(frozen=True)
class HubFile:
    """A file that the hub lists. hash: SHA-256 of a large file, git's SHA-1 of a small one: its name in the cache."""

    bytes: int | None
    hash: str | None


@dataclass(frozen=True)
class HubRepository:
    """A model repository as the hub lists it now, or where it cannot be asked, as it lies in the cache.

    snapshot: folder of its files on this machine, as far as they are here. revision: the branch, tag or commit that was asked
    for. unreachable: why the hub could not be asked.
    """

    hub_id: str
    files: Mapping[str, HubFile]
    snapshot: Path
    revision: str = MAIN
    unreachable: str | None = None

    def listing(self, folder: str) -> dict[str, int]:
        """The names and bytes of the files in one of its folders."""
        paths = {path: file.bytes or 0 for path, file in self.files.items() if path.rpartition("/")[0] == folder}
        return {path.rpartition("/")[2]: count for path, count in paths.items()}

    def missing(self, names: Collection[str]) -> list[str]:
        """The names of its files that are not here yet."""
        return [name for name in names if name in self.files and not (self.snapshot / name).is_file()]

    def to_fetch(self, names: Collection[str]) -> int:
        """Bytes that fetching `names` would take, without what came before an interruption."""
        return sum(file.bytes - _size(_partial(self.blobs, file)) for file in self._blobs_missing(names).values())

    @property
    def blobs(self) -> Path:
        """The folder of the cache's contents, by their hashes."""
        return self.snapshot.parent.parent / "blobs"

    def _blobs_missing(self, names: Collection[str]) -> dict[str, HubFile]:
        wanted = {self.files[name].hash: name for name in self.missing(names)}
        return {
            name: self.files[name]
            for known, name in wanted.items()
            if known is not None and self.files[name].bytes is not None and not (self.blobs / known).exists()
        }

    def refusal(self) -> UserError:
        """Why what is not here cannot be had."""
        return _refused(self.hub_id, self.unreachable)

    def fetch(self, names: Collection[str], *, phases: Phases = QUIET) -> Path:
        """The folder in which these files now are.

        Raises UserError where the hub does not give them, and OSError where the disk does not take them. What came so far is
        kept, whoever raises.
        """
        from huggingface_hub import snapshot_download

        if self.files and not self.missing(names):
            return self.snapshot
        if self.unreachable is not None:
            raise self.refusal()
        self._download(names, phases)
        with _told(self.hub_id):
            # Whatever is left: names for what came, and files of which the hub lists no hash.
            # Of this commit, whatever was pushed since it was listed. Only a branch's name is noted in the cache.
            commit = self.snapshot.name
            folder = Path(snapshot_download(self.hub_id, revision=commit, allow_patterns=list(names)))
        if self.revision != commit:
            files.write_atomic(self.blobs.parent / "refs" / self.revision, [commit.encode()])
        return folder

    def _download(self, names: Collection[str], phases: Phases) -> None:
        wanted = self._blobs_missing(names)
        if not wanted:
            return
        self.blobs.mkdir(parents=True, exist_ok=True)
        left, free = self.to_fetch(names), shutil.disk_usage(self.blobs).free
        if left > free:
            why = f"downloading {self.hub_id} takes {size_text(left)}, and only {size_text(free)} are free"
            raise OSError(errno.ENOSPC, why, str(self.blobs))
        total = sum(file.bytes for file in wanted.values())
        blobs = [_Blob(self, name, file) for name, file in wanted.items()]
        began = sum(blob.done for blob in blobs)
        waiting = iter(blobs)  # of a list: two threads get no element twice
        stop, failures = threading.Event(), []

        def work() -> None:
            while not stop.is_set() and (blob := next(waiting, None)):
                try:
                    blob.fetch(stop)
                except Exception as error:  # raised again by the thread that waits
                    failures.append(error)
                    stop.set()

        # Daemons: a connection that hangs must not hold up the end of the process.
        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(AT_ONCE, len(blobs)))]
        for thread in threads:
            thread.start()
        try:
            with phases(f"downloading {self.hub_id}", total=left, unit="B") as phase:
                while alive := [thread for thread in threads if thread.is_alive()]:
                    alive[0].join(POLL)
                    phase.advance(sum(blob.done for blob in blobs) - began - phase.done)
                if failures:
                    self._tell(failures[0], sum(blob.done for blob in blobs), total)
        finally:
            stop.set()
            deadline = time.monotonic() + PATIENCE
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _tell(self, error: Exception, done: int, total: int) -> NoReturn:
        kept = f"{size_text(done)} of {size_text(total)} are kept, and the next start goes on from there"
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, f"{error.strerror} while downloading {self.hub_id} ({kept})", error.filename)
        with _told(self.hub_id, kept if done else ""):
            raise error


class _Blob:
    """One file on its way. done: bytes of it that are on the disk."""

    def __init__(self, repository: HubRepository, name: str, file: HubFile) -> None:
        self.repository, self.name, self.file = repository, name, file
        self.partial = _partial(repository.blobs, file)
        self.done = _size(self.partial)

    def fetch(self, stop: threading.Event) -> None:
        """Raises what `_told` tells, and OSError."""
        from huggingface_hub.utils import WeakFileLock

        blob = self.repository.blobs / self.file.hash
        # Where huggingface_hub has its own lock for this file: another process may be fetching it, too.
        folder = blob.parent.parent
        lock = folder.parent / ".locks" / folder.name / f"{self.file.hash}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            if blob.exists():
                self.done = self.file.bytes
                return
            with open(self.partial, "a+b", buffering=0) as out:
                went_on = os.fstat(out.fileno()).st_size > 0
                digest = self._receive(out, stop)
                if went_on and digest.hexdigest() != self.file.hash and not stop.is_set():
                    self._start_over(out)  # what was kept of it is not this file
                    digest = self._receive(out, stop)
                with files.naming(self.partial):
                    os.fsync(out.fileno())
            if stop.is_set():
                return
            if digest.hexdigest() != self.file.hash:
                self.partial.unlink()
                self.done = 0
                raise UserError(
                    f"what arrived of {self.name} of {self.repository.hub_id} has another hash than the hub lists; it is "
                    "deleted: start again"
                )
            os.replace(self.partial, blob)

    def _receive(self, out, stop: threading.Event):
        """Append until the file is whole or `stop` is set; returns its hash."""
        digest = self._new_digest()
        self.done = out.seek(0, os.SEEK_END)
        out.seek(0)
        while (piece := out.read(PIECE_BYTES)) and not stop.is_set():
            digest.update(piece)
        if self.done > self.file.bytes:
            digest = self._start_over(out)
        tries, farthest = 0, self.done
        while self.done < self.file.bytes and not stop.is_set():
            try:
                with self._opened() as response:
                    if self.done and response.status_code != 206:
                        digest = self._start_over(out)  # the server gives the whole file
                    for received in response.iter_raw():
                        if stop.is_set() or self.done == self.file.bytes:
                            break  # what follows the listed size is never written: it may have no end
                        piece = received[: self.file.bytes - self.done]
                        self._append(out, piece)
                        digest.update(piece)
                lost: Exception = ConnectionError("the connection was closed before the file's end")
            except transport_error() as error:
                status = getattr(getattr(error, "response", None), "status_code", 500)
                if status < 500 and status != 429:
                    raise
                lost = error
            if self.done < self.file.bytes and not stop.is_set():
                # A server that knows no ranges and always breaks off comes no farther, either.
                tries, farthest = 0 if self.done > farthest else tries + 1, max(farthest, self.done)
                if tries > RETRIES:
                    raise lost
                stop.wait(RETRY_AFTER if tries else 0)
        return digest

    @contextmanager
    def _opened(self):
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        url = hf_hub_url(self.repository.hub_id, self.name, revision=self.repository.snapshot.name)
        # Not compressed: the ranges are those of the file.
        headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes={self.done}-"}
        with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT, follow_redirects=True) as response:
            hf_raise_for_status(response)
            yield response

    def _append(self, out, piece: bytes) -> None:
        view = memoryview(piece)
        with files.naming(self.partial):
            while view:
                written = out.write(view)
                self.done, view = self.done + written, view[written:]

    def _start_over(self, out):
        out.truncate(0)
        self.done = 0
        return self._new_digest()

    def _new_digest(self):
        if len(self.file.hash) == 64:
            return hashlib.sha256()
        return git_blob(self.file.bytes)


def git_blob(size: int):
    """The digest, to be fed with the content, by which git and so the hub knows a small file of `size` bytes."""
    return hashlib.sha1(b"blob %d\0" % size)


def look(hub_id: str, revision: str | None = None) -> HubRepository:
    """What the hub lists of a branch, tag or commit, or what of it is in the cache.

    Raises UserError for a name that cannot be a repository's, and for a revision that the repository has not.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RevisionNotFoundError
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # they would stand between our own lines
    opened = partial(HubRepository, hub_id, revision=revision or MAIN)
    try:
        folder = Path(constants.HF_HUB_CACHE).expanduser() / repo_folder_name(repo_id=hub_id, repo_type="model")
        info = HfApi().model_info(hub_id, revision=revision, files_metadata=True, timeout=TIMEOUT)
    except RevisionNotFoundError as error:
        said = f"model.revision = {revision!r}: {hub_id} has no such branch, tag or commit; its page on the hub lists them "
        said += "(Files, then the name of the branch)"
        if revision is None:
            said = f"model.path = {hub_id!r}: the hub has no default branch ({MAIN}) of it; name one of its branches, tags "
            said += "or commits with model.revision"
        raise UserError(said) from error
    except HFValidationError as error:
        raise _refused(hub_id, _reason(error)) from error
    except (OSError, transport_error()) as error:
        reason = _reason(error)
    except (ValueError, TypeError, LookupError, AttributeError) as error:  # a web page, say, of whoever gives the network
        reason = f"what answers is no hub ({reason_of(error)})"
    else:
        listed = {file.rfilename: HubFile(file.size, file.lfs.sha256 if file.lfs else file.blob_id) for file in info.siblings}
        # They become names of files below the cache.
        for name in (info.sha, *(file.hash for file in listed.values() if file.hash is not None)):
            if not HASH.fullmatch(str(name)):
                raise _refused(hub_id, f"it lists {shown(name)} as a commit or hash, which is none; is HF_ENDPOINT right?")
        return opened(listed, folder / "snapshots" / info.sha)
    try:
        snapshot = Path(
            snapshot_download(hub_id, revision=revision, allow_patterns=["*model_index.json"], local_files_only=True)
        )
    except LocalEntryNotFoundError:
        return opened({}, folder / "snapshots" / "none", unreachable=reason)
    found = (path for path in snapshot.rglob("*") if path.is_file())
    here = {path.relative_to(snapshot).as_posix(): HubFile(path.stat().st_size, None) for path in found}
    return opened(here, snapshot, unreachable=reason)


@contextmanager
def _told(hub_id: str, kept: str = "") -> Iterator[None]:
    """What the hub answered, or the way to it, becomes the user's message. A disk's own errors pass."""
    try:
        yield
    except (OSError, transport_error()) as error:
        if getattr(error, "errno", None) is not None:
            raise
        raise _refused(hub_id, _reason(error), kept) from error


def _refused(hub_id: str, reason: str, kept: str = "") -> UserError:
    return UserError(
        f"model.path = {hub_id!r} is no local file or folder, and it could not be had from the hub: {reason}"
        + (f"\n{kept}" if kept else "")
    )


def _reason(error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else type(error).__name__
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, and not all of its files are on this machine"
    if isinstance(error, GatedRepoError) or status == 403:
        return f"it is behind a licence ({said}): accept it on the model's page, and set HF_TOKEN to a token of that account"
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no such repository, or it is private and HF_TOKEN does not open it ({said})"
    return said


def transport_error() -> type[Exception]:
    """What the HTTP library raises, httpx in huggingface_hub 1, httpx2 from 2 on: the hub's own errors derive from it."""
    from huggingface_hub.errors import HfHubHTTPError

    return next(base for base in HfHubHTTPError.__bases__ if base is not OSError)


def _partial(blobs: Path, file: HubFile) -> Path:
    return blobs / f"{file.hash}.incomplete"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
