"""How a run can fail, and the exit status that tells it. Imports next to nothing, so that the command line starts at once."""

import errno
import os
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
OWN, STANDARD = str(Path(__file__).parents[1]), sysconfig.get_path("stdlib")  # folders of code: ours, Python's
PACKAGES = {"site-packages", "dist-packages"}
AGAIN = "download or copy it again"

# What the system refuses, for a reason that the user can mend.
LIMIT = "raise the limit of open files (ulimit -n 4096)"
REMEDIES = {
    errno.EMFILE: LIMIT, errno.ENFILE: LIMIT, errno.ELOOP: "mend the link, which leads to itself",
    errno.ENAMETOOLONG: "give a shorter name", errno.EADDRINUSE: "give another port",
}  # fmt: skip
STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG}


def one_line(error: BaseException) -> str:
    """What the error says in one line, or its kind where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


class UserError(ValueError):
    """Something the user can mend. The message names the offending value and the remedy."""

    status = 2


class NotTrained(UserError):
    """No update has reached the adapter: every B is zero."""


class NonFiniteError(RuntimeError):
    """A latent, loss or gradient is NaN or infinite, and the policy is to stop or its limit is reached."""

    status = 4


class OutOfMemory(RuntimeError):
    """A step did not fit; the message says what was computed and what would lower it."""

    status = 5


class DataError(RuntimeError):
    """Data that was checked when the run started cannot be read any more, or what reads it died."""

    status = 6


class NotWritten(RuntimeError):
    """Samples or adapter files could not be written, because of the OSError `reason`. What was trained is whole."""

    def __init__(self, reason: OSError | str) -> None:
        super().__init__(str(reason))
        self.reason = reason


class Interrupted(Exception):
    """SIGTERM, SIGINT or SIGHUP arrived; `signum` says which, `where` what of the run is kept."""

    def __init__(
        self, signum: int, where: str = "before the first step of this start", remedy: str = "go on with --resume_from auto"
    ) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} {where}; {remedy}")
        self.signum, self.status, self.where = signum, 128 + signum, where


class PeerStopped(RuntimeError):
    """Another process of the run has ended or is gone, so this one ends too: with the same exit status, `status`."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


TOO_LARGE = (
    "out of memory: start a new run (another run.output_dir) with a lower data.batch_size or data.resolution, "
    "or with memory.gradient_checkpointing = true"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out: Python's, torch's allocator's, or an untyped one of a library's."""
    untyped = ("can't allocate memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")
    torch = sys.modules.get("torch")  # what was not loaded has raised nothing
    kinds = (MemoryError,) if torch is None else (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or any(text in str(error) for text in untyped)


def ending(error: BaseException) -> tuple[int, str]:
    """(exit status, what the user is told) where an exception ends the program; status 1 for what nobody foresaw."""
    text = str(error)
    match error:
        case NotWritten():
            return ending(error.reason) if isinstance(error.reason, OSError) else (6, text)
        case UserError() | NonFiniteError() | OutOfMemory() | DataError() | Interrupted() | PeerStopped():
            return error.status, text
        case KeyboardInterrupt():
            return 128 + signal.SIGINT, "stopped at once"
        case PermissionError() | NotADirectoryError() | FileExistsError() | IsADirectoryError():
            return 2, f"{error.filename}: {error.strerror}; give a path that this user may write to"
        case OSError() if error.errno in REMEDIES:
            return 2, f"{f'{error.filename}: ' if error.filename else ''}{error.strerror}; {REMEDIES[error.errno]}"
        case FileNotFoundError() if error.filename is None and "temporary directory" in text:
            return 2, f"{error.strerror}; let TMPDIR name a folder that this user may write to"
        case MemoryError():
            return 5, TOO_LARGE
        case OSError() if error.errno in STORAGE_ERRORS:
            remedy = "give a folder that can be written to" if error.errno == errno.EROFS else "free space or mend the disk"
            return 6, f"storage: {error}; {remedy}, then start again with --resume_from auto"
        case RuntimeError() if text.startswith("DataLoader worker"):
            # A worker's death is told by a signal, in the middle of whatever was done.
            return 6, f"{text}\nstart again with --resume_from auto; a lower data.num_workers needs less memory"
        case RuntimeError():
            return (5, f"{text}\n{TOO_LARGE}") if is_out_of_memory(error) else (1, text)
    return 1, text


def told(error: BaseException, said: str) -> str:
    """The last words of a program, where `ending` says what the user is told. The first line names an error as one."""
    if isinstance(error, (Interrupted, KeyboardInterrupt)):  # to be stopped is no error
        return said
    first, *rest = said.splitlines() or [""]
    return "\n".join([f"error: {first}", *(f"       {line}" for line in rest)])


@contextmanager
def reading(file: Path | str, what: str = "", *, remedy: str = AGAIN) -> Iterator[None]:
    """A block that reads `file`, which others wrote. Raises UserError with the file, `what` and the remedy for what a
    library raises within, and for a ValueError, with which our own readers refuse what a file holds; other errors of our
    code, and an OSError with a number, stay. what: the key, row or part that is read. remedy: "" where the ValueErrors have
    their own."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    # Any exception: the readers of a dozen formats raise many kinds, tokenizers' even a bare Exception.
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None or not raised_by_file(error):
            raise
        line = f"{file}: {f'{what}: ' if what else ''}{reason_of(error)}"
        raise UserError(f"{line}; {remedy}" if remedy else line) from error


def reason_of(error: BaseException) -> str:
    """What an exception of a library says, in one line of at most 300 characters, with its kind where that is needed."""
    text = one_line(error)[:300]
    plain = isinstance(error, (ValueError, OSError)) or text == type(error).__name__
    return text if plain else f"{text} ({type(error).__name__})"


def raised_by_file(error: BaseException) -> bool:
    """Whether an exception came out of a library's code, or is a ValueError: so that what was read is at fault. Code in
    Rust leaves no place, and raises a bare Exception."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    # Code without a file (a dataclass makes some) is its caller's.
    place = next((file for file in reversed(files) if not file.startswith("<")), "")
    library = place.startswith(STANDARD) or not PACKAGES.isdisjoint(Path(place).parts)
    return isinstance(error, ValueError) or type(error) is Exception or (library and not place.startswith(OWN))


def converted(convert: Callable[..., T], value: object, should_be: str) -> T:
    """convert(value), of a file's value. Raises ValueError that names the value and what it should be."""
    try:
        return convert(value)
    except (TypeError, ValueError, OverflowError, ArithmeticError) as error:
        raise ValueError(f"{shown(value)} should be {should_be}") from error


def number_in(variable: str, otherwise: int, *, least: int = 0, most: int = 2**31) -> int:
    """The whole number that an environment variable gives; `otherwise` where it is not set. Raises UserError."""
    with reading(variable, remedy="set it to one, or unset it"):
        number = converted(int, given := os.environ.get(variable) or otherwise, wanted := f"a number from {least} to {most}")
        if not least <= number <= most:
            raise ValueError(f"{shown(given)} should be {wanted}")
    return number


def shown(value: object, most: int = 80) -> str:
    """A value for a message, in at most so many characters."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


CAUSES: Mapping[Any, str] = {
    KeyboardInterrupt: "stopped at once",
    PeerStopped: "another process of the run has ended",
    NonFiniteError: "a value was not finite",
    (OutOfMemory, MemoryError): "out of memory",
    DataError: "data could not be read",
    (NotWritten, OSError): "a file could not be written or read",
}


def cause(error: BaseException) -> str:
    """What ended a run, in a few words, for who reads it from outside."""
    if isinstance(error, Interrupted):
        return f"stopped by {signal.Signals(error.signum).name}"
    return next((words for kinds, words in CAUSES.items() if isinstance(error, kinds)), "an error")
