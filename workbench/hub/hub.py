"""Model repositories on the Hugging Face hub: listing, and downloads into huggingface_hub's own cache.

huggingface_hub's own downloads start over after an interruption, and continue after a signal. Here a file grows as
`blobs/HASH.incomplete`, from which the next start resumes, and gets its name in the cache only if its hash is the listed one.
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

MAIN = "main"  # default branch
AT_ONCE = 4  # files
PIECE_BYTES = 2**20  # a partial file is read again in such pieces, to continue its hash
TIMEOUT = 10.0  # seconds without an answer
RETRIES, RETRY_AFTER = 5, 1.0  # attempts without a new byte; seconds
POLL = 0.1  # seconds between two checks for signals
HASH = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
PATIENCE = 1.0  # seconds for the threads to end after a signal


@dataclass(frozen=True)
class HubFile:
    """A listed file. hash: its name in the cache: SHA-256 of a large file, git's SHA-1 of a small one."""

    bytes: int | None
    hash: str | None


@dataclass(frozen=True)
class HubRepository:
    """A model repository as the hub lists it now, or as it is cached if the hub is unreachable.

    snapshot: folder of its files on this machine, as far as they are downloaded. revision: requested branch, tag or commit.
    unreachable: why the hub could not be asked; None if it was.
    """

    hub_id: str
    files: Mapping[str, HubFile]
    snapshot: Path
    revision: str = MAIN
    unreachable: str | None = None

    def listing(self, folder: str) -> dict[str, int]:
        """Bytes of the files directly in one of its folders, by name."""
        split = [(*path.rpartition("/"), file.bytes or 0) for path, file in self.files.items()]
        return {name: size for parent, _, name, size in split if parent == folder}

    def missing(self, names: Collection[str]) -> list[str]:
        """The listed files among `names` that are not on this machine, or have another size there: damaged ones."""
        return [name for name in names if name in self.files and not _is_whole(self.snapshot / name, self.files[name])]

    def to_fetch(self, names: Collection[str]) -> int:
        """Bytes that fetching `names` would still download, without those kept from an interruption."""
        return sum(file.bytes - _size(_partial(self.blobs, file)) for file in self._blobs_missing(names).values())

    @property
    def blobs(self) -> Path:
        """The cache's folder of contents, named by hash."""
        return self.snapshot.parent.parent / "blobs"

    def _blobs_missing(self, names: Collection[str]) -> dict[str, HubFile]:
        """One file for each missing content with a listed hash and size."""
        by_hash = {self.files[name].hash: name for name in self.missing(names)}
        return {
            name: self.files[name]
            for digest, name in by_hash.items()
            if digest is not None
            and self.files[name].bytes is not None
            and not _is_whole(self.blobs / digest, self.files[name])
        }

    def refusal(self) -> UserError:
        """The error that says why files are not available."""
        return _refused(self.hub_id, self.unreachable)

    def fetch(self, names: Collection[str], *, phases: Phases = QUIET) -> Path:
        """Download what is missing; returns the files' folder.

        Raises UserError if the hub does not give them, and OSError if the disk fails. Received bytes are kept in any case.
        """
        from huggingface_hub import snapshot_download

        if self.files and not self.missing(names):
            return self.snapshot
        if self.unreachable is not None:
            raise self.refusal()
        self._download(names, phases)
        with _transport_errors(self.hub_id):
            # The rest: names for the downloaded contents, and files without a listed hash. By commit, so that a push since
            # the listing changes nothing; the branch's name is then noted in the cache as well.
            commit = self.snapshot.name
            folder = Path(snapshot_download(self.hub_id, revision=commit, allow_patterns=list(names)))
        if self.revision != commit:
            files.write_atomic(self.blobs.parent / "refs" / self.revision, [commit.encode()])
        return folder

    def _download(self, names: Collection[str], phases: Phases) -> None:
        missing = self._blobs_missing(names)
        if not missing:
            return
        self.blobs.mkdir(parents=True, exist_ok=True)
        remaining, free = self.to_fetch(names), shutil.disk_usage(self.blobs).free
        if remaining > free:
            need = f"downloading {self.hub_id} takes {size_text(remaining)}, and only {size_text(free)} are free"
            raise OSError(errno.ENOSPC, need, str(self.blobs))
        total = sum(file.bytes for file in missing.values())
        blobs = [_Blob(self, name, file) for name, file in missing.items()]
        at_start = sum(blob.received for blob in blobs)
        queue = iter(blobs)  # a list's iterator gives no element to two threads
        stop, failures = threading.Event(), []

        def work() -> None:
            while not stop.is_set() and (blob := next(queue, None)):
                try:
                    blob.fetch(stop)
                except Exception as error:  # raised again by the waiting thread
                    failures.append(error)
                    stop.set()

        # Daemons: a connection that hangs must not delay the end of the process.
        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(AT_ONCE, len(blobs)))]
        for thread in threads:
            thread.start()
        try:
            with phases(f"downloading {self.hub_id}", total=remaining, unit="B") as phase:
                while alive := [thread for thread in threads if thread.is_alive()]:
                    alive[0].join(POLL)
                    phase.advance(sum(blob.received for blob in blobs) - at_start - phase.done)
                if failures:
                    self._raise(failures[0], sum(blob.received for blob in blobs), total)
        finally:
            stop.set()
            deadline = time.monotonic() + PATIENCE
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _raise(self, error: Exception, received: int, total: int) -> NoReturn:
        """Raise a thread's error, with the bytes that are kept. received, total: bytes."""
        progress = f"{size_text(received)} of {size_text(total)} are kept, and the next start goes on from there"
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, f"{error.strerror} while downloading {self.hub_id} ({progress})", error.filename)
        with _transport_errors(self.hub_id, progress if received else ""):
            raise error


class _Blob:
    """One file's download. received: bytes on the disk."""

    def __init__(self, repository: HubRepository, name: str, file: HubFile) -> None:
        self.repository, self.name, self.file = repository, name, file
        self.partial = _partial(repository.blobs, file)
        self.received = _size(self.partial)

    def fetch(self, stop: threading.Event) -> None:
        """Raises UserError, OSError, and the HTTP library's errors."""
        from huggingface_hub.utils import WeakFileLock

        blob = self.repository.blobs / self.file.hash
        # huggingface_hub's own lock for this file: another process may be fetching it, too.
        folder = blob.parent.parent
        lock = folder.parent / ".locks" / folder.name / f"{self.file.hash}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            if _is_whole(blob, self.file):
                self.received = self.file.bytes
                return
            with open(self.partial, "a+b", buffering=0) as out:
                resumed = os.fstat(out.fileno()).st_size > 0
                digest = self._receive(out, stop)
                if resumed and digest.hexdigest() != self.file.hash and not stop.is_set():
                    self._start_over(out)  # the kept bytes are not this file's
                    digest = self._receive(out, stop)
                with files.naming(self.partial):
                    os.fsync(out.fileno())
            if stop.is_set():
                return
            if digest.hexdigest() != self.file.hash:
                self.partial.unlink()
                self.received = 0
                raise UserError(
                    f"what arrived of {self.name} of {self.repository.hub_id} has another hash than the hub lists; it is "
                    "deleted: start again"
                )
            os.replace(self.partial, blob)

    def _receive(self, out, stop: threading.Event):
        """Append until the file is complete or `stop` is set; returns its digest."""
        digest = self._new_digest()
        self.received = out.seek(0, os.SEEK_END)
        out.seek(0)
        while (piece := out.read(PIECE_BYTES)) and not stop.is_set():
            digest.update(piece)
        if self.received > self.file.bytes:
            digest = self._start_over(out)
        attempts, farthest = 0, self.received
        while self.received < self.file.bytes and not stop.is_set():
            try:
                with self._opened() as response:
                    if self.received and response.status_code != 206:
                        digest = self._start_over(out)  # the server gives the whole file
                    for chunk in response.iter_raw():
                        if stop.is_set() or self.received == self.file.bytes:
                            break  # bytes beyond the listed size are never written: they may have no end
                        piece = chunk[: self.file.bytes - self.received]
                        self._append(out, piece)
                        digest.update(piece)
                failure: Exception = ConnectionError("the connection was closed before the file's end")
            except transport_error() as error:
                status = getattr(getattr(error, "response", None), "status_code", 500)
                if status < 500 and status != 429:
                    raise
                failure = error
            if self.received < self.file.bytes and not stop.is_set():
                # Without ranges each attempt starts over: only bytes beyond the farthest count as progress.
                attempts, farthest = 0 if self.received > farthest else attempts + 1, max(farthest, self.received)
                if attempts > RETRIES:
                    raise failure
                stop.wait(RETRY_AFTER if attempts else 0)
        return digest

    @contextmanager
    def _opened(self):
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        url = hf_hub_url(self.repository.hub_id, self.name, revision=self.repository.snapshot.name)
        # Uncompressed: ranges count the file's own bytes.
        headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes={self.received}-"}
        with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT, follow_redirects=True) as response:
            hf_raise_for_status(response)
            yield response

    def _append(self, out, piece: bytes) -> None:
        view = memoryview(piece)
        with files.naming(self.partial):
            while view:
                count = out.write(view)
                self.received, view = self.received + count, view[count:]

    def _start_over(self, out):
        out.truncate(0)
        self.received = 0
        return self._new_digest()

    def _new_digest(self):
        return hashlib.sha256() if len(self.file.hash) == 64 else git_blob(self.file.bytes)


def git_blob(size: int):
    """A digest to update with the content of a file of `size` bytes: git's, and so the hub's, name of a small file."""
    return hashlib.sha1(b"blob %d\0" % size)


def list_repository(hub_id: str, revision: str | None = None) -> HubRepository:
    """List a repository's files at a branch, tag or commit: from the hub, or from the cache if the hub is unreachable.

    Raises UserError for a name that cannot be a repository's, and for an unknown revision.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RevisionNotFoundError
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # they would mix with our own lines
    repository = partial(HubRepository, hub_id, revision=revision or MAIN)
    try:
        folder = Path(constants.HF_HUB_CACHE).expanduser() / repo_folder_name(repo_id=hub_id, repo_type="model")
        info = HfApi().model_info(hub_id, revision=revision, files_metadata=True, timeout=TIMEOUT)
    except RevisionNotFoundError as error:
        text = f"model.revision = {revision!r}: {hub_id} has no such branch, tag or commit; its page on the hub lists them "
        text += "(Files, then the name of the branch)"
        if revision is None:
            text = f"model.path = {hub_id!r}: the hub has no default branch ({MAIN}) of it; name one of its branches, tags "
            text += "or commits with model.revision"
        raise UserError(text) from error
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
        return repository(listed, folder / "snapshots" / info.sha)
    try:
        snapshot = Path(
            snapshot_download(hub_id, revision=revision, allow_patterns=["*model_index.json"], local_files_only=True)
        )
    except LocalEntryNotFoundError:
        return repository({}, folder / "snapshots" / "none", unreachable=reason)
    paths = (path for path in snapshot.rglob("*") if path.is_file())
    cached = {path.relative_to(snapshot).as_posix(): HubFile(path.stat().st_size, None) for path in paths}
    return repository(cached, snapshot, unreachable=reason)


@contextmanager
def _transport_errors(hub_id: str, progress: str = "") -> Iterator[None]:
    """A block in which errors of the hub or the connection become a UserError; the disk's own pass. progress: last line."""
    try:
        yield
    except (OSError, transport_error()) as error:
        if getattr(error, "errno", None) is not None:
            raise
        raise _refused(hub_id, _reason(error), progress) from error


def _refused(hub_id: str, reason: str, progress: str = "") -> UserError:
    text = f"model.path = {hub_id!r} is no local file or folder, and it could not be had from the hub: {reason}"
    return UserError(f"{text}\n{progress}" if progress else text)


def _reason(error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, and not all of its files are on this machine"
    if isinstance(error, GatedRepoError) or status == 403:
        return f"it is behind a licence ({text}): accept it on the model's page, and set HF_TOKEN to a token of that account"
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no such repository, or it is private and HF_TOKEN does not open it ({text})"
    return text


def transport_error() -> type[Exception]:
    """Base class of the HTTP library's errors, and so of the hub's own: httpx in huggingface_hub 1, httpx2 from 2 on."""
    from huggingface_hub.errors import HfHubHTTPError

    return next(base for base in HfHubHTTPError.__bases__ if base is not OSError)


def _partial(blobs: Path, file: HubFile) -> Path:
    return blobs / f"{file.hash}.incomplete"


def _is_whole(path: Path, file: HubFile) -> bool:
    """Whether a file of the cache is there, in the listed size."""
    return path.is_file() and file.bytes in (None, path.stat().st_size)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
