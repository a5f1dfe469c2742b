"""The errors of a run and their exit statuses. Imports next to nothing, so that the command line starts fast."""

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
OWN, STANDARD = str(Path(__file__).parents[1]), sysconfig.get_path("stdlib")  # folders of our code and Python's
PACKAGES = {"site-packages", "dist-packages"}
AGAIN = "download or copy it again"

# Remedies for OSErrors that the user can fix.
LIMIT = "raise the limit of open files (ulimit -n 4096)"
REMEDIES = {
    errno.EMFILE: LIMIT, errno.ENFILE: LIMIT, errno.ELOOP: "mend the link, which leads to itself",
    errno.ENAMETOOLONG: "give a shorter name", errno.EADDRINUSE: "give another port",
}  # fmt: skip
STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG}


def one_line(error: BaseException) -> str:
    """The error's message in one line, or its class name if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


class UserError(ValueError):
    """A mistake that the user can fix. The message names the offending value and the remedy."""

    status = 2


class NotTrained(UserError):
    """No update has reached the adapter: every B is zero."""


class NonFiniteError(RuntimeError):
    """A latent, loss or gradient is NaN or infinite, and the policy is to stop, or its limit is reached."""

    status = 4


class OutOfMemory(RuntimeError):
    """A step did not fit in memory; the message says what was computed and what would need less."""

    status = 5


class DataError(RuntimeError):
    """Data that was readable at the start cannot be read any more, or its reader died."""

    status = 6


class NotWritten(RuntimeError):
    """Samples or adapter files could not be written, because of the OSError `reason`. The trained state is intact."""

    def __init__(self, reason: OSError | str) -> None:
        super().__init__(str(reason))
        self.reason = reason


class Interrupted(Exception):
    """SIGTERM, SIGINT or SIGHUP arrived. signum: which one. state: the part of the run that is kept, as a phrase."""

    def __init__(
        self, signum: int, state: str = "before the first step of this start", remedy: str = "go on with --resume_from auto"
    ) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} {state}; {remedy}")
        self.signum, self.status, self.state = signum, 128 + signum, state


class PeerStopped(RuntimeError):
    """Another process of the run has ended, so this one ends too, with the same exit status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


TOO_LARGE = (
    "out of memory: start a new run (another run.output_dir) with a lower data.batch_size or data.resolution, "
    "or with memory.gradient_checkpointing = true"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, by Python's or torch's exception or by the message of a library's untyped one."""
    untyped = ("can't allocate memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")
    torch = sys.modules.get("torch")  # if torch is not loaded, it has raised nothing
    kinds = (MemoryError,) if torch is None else (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or any(text in str(error) for text in untyped)


def ending(error: BaseException) -> tuple[int, str]:
    """(exit status, message for the user) of an exception that ends the program; status 1 if it was not foreseen."""
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
            # A signal handler reports a worker's death, in the middle of any code.
            return 6, f"{text}\nstart again with --resume_from auto; a lower data.num_workers needs less memory"
        case RuntimeError():
            return (5, f"{text}\n{TOO_LARGE}") if is_out_of_memory(error) else (1, text)
    return 1, text


def error_text(error: BaseException, message: str) -> str:
    """The last lines that a program prints. message: from `ending`; its first line is marked as an error."""
    if isinstance(error, (Interrupted, KeyboardInterrupt)):  # a stop is no error
        return message
    first, *rest = message.splitlines() or [""]
    return "\n".join([f"error: {first}", *(f"       {line}" for line in rest)])


@contextmanager
def reading(file: Path | str, part: str = "", *, remedy: str = AGAIN) -> Iterator[None]:
    """Turn errors of reading `file`, which others wrote, into UserErrors with the file, `part` and remedy: exceptions raised
    by libraries, and ValueErrors, which our own readers raise for bad contents. Other errors of our code, and OSErrors with
    a number, pass. part: the key or row that is read. remedy: "" if the ValueErrors name theirs."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    # Any exception: readers of a dozen formats raise many kinds, tokenizers' even a bare Exception.
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None or not raised_by_file(error):
            raise
        line = f"{file}: {f'{part}: ' if part else ''}{reason_of(error)}"
        raise UserError(f"{line}; {remedy}" if remedy else line) from error


def reason_of(error: BaseException) -> str:
    """The message of a library's exception in one line, at most 300 characters, with the class unless that is clear."""
    text = one_line(error)[:300]
    plain = isinstance(error, (ValueError, OSError)) or text == type(error).__name__
    return text if plain else f"{text} ({type(error).__name__})"


def raised_by_file(error: BaseException) -> bool:
    """Whether the file that was read is at fault: the exception came out of a library's code, or is a ValueError. Rust code
    leaves no frame, and raises a bare Exception."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    # Frames of generated code ("<...>", as a dataclass makes) count as their caller's.
    place = next((file for file in reversed(files) if not file.startswith("<")), "")
    library = place.startswith(STANDARD) or not PACKAGES.isdisjoint(Path(place).parts)
    return isinstance(error, ValueError) or type(error) is Exception or (library and not place.startswith(OWN))


def converted(convert: Callable[..., T], value: object, should_be: str) -> T:
    """convert(value) for a value from a file. Raises ValueError, naming the value and what it should be."""
    try:
        return convert(value)
    except (TypeError, ValueError, OverflowError, ArithmeticError) as error:
        raise ValueError(f"{shown(value)} should be {should_be}") from error


def number_in(variable: str, default: int, *, least: int = 0, most: int = 2**31) -> int:
    """The whole number in an environment variable, or `default` if it is not set. Raises UserError."""
    with reading(variable, remedy="set it to one, or unset it"):
        number = converted(int, text := os.environ.get(variable) or default, range_text := f"a number from {least} to {most}")
        if not least <= number <= most:
            raise ValueError(f"{shown(text)} should be {range_text}")
    return number


def shown(value: object, most: int = 80) -> str:
    """A value's repr for a message, cut to `most` characters."""
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
    """The reason why a run ended, in a few words, for readers outside of it."""
    if isinstance(error, Interrupted):
        return f"stopped by {signal.Signals(error.signum).name}"
    return next((words for kinds, words in CAUSES.items() if isinstance(error, kinds)), "an error")
