"""The one context in which files of others are read: configs, tokenizers, indexes, tables, captions, adapters, checkpoints.

What a library raises there is the file's fault, and becomes one sentence for its owner. What our own code raises is a fault
of ours, and stays what it is. A conversion of a value is a call of a function below, so that its error is the file's, too.
"""

import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from trainer.base.errors import UserError, one_line

T = TypeVar("T")
# Packages also lie where sys.path says: beside an environment that sees those of another.
LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {place for place in sys.path if place.endswith(("site-packages", "dist-packages"))}
)
AGAIN = "download or copy it again"


@contextmanager
def reading(file: Path | str, what: str = "", *, remedy: str = AGAIN) -> Iterator[None]:
    """A block that reads `file`, which others wrote. Raises UserError with the file, `what` and the remedy for what a
    library raises within, and for a ValueError, with which our own readers refuse what a file holds.

    what: the key, row or part that is read. An OSError with a number is the system's, and stays.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    # Any exception: the readers of a dozen formats raise many kinds, tokenizers' even a bare Exception.
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None or not raised_by_file(error):
            raise
        raise UserError(f"{file}: {f'{what}: ' if what else ''}{reason_of(error)}; {remedy}") from error


def reason_of(error: BaseException) -> str:
    """What an exception of a library says, in one line of at most 300 characters, with its kind where that is needed."""
    said = one_line(error)[:300]
    plain = isinstance(error, (ValueError, OSError)) or said == type(error).__name__
    return said if plain else f"{said} ({type(error).__name__})"


def raised_by_file(error: BaseException) -> bool:
    """Whether an exception came out of a library's code, or is a ValueError: so that what was read is at fault."""
    return isinstance(error, ValueError) or _innermost(error.__traceback__).startswith(LIBRARIES)


def _innermost(traceback: TracebackType | None) -> str:
    """The file of the code that raised; of code without one (a dataclass makes some), of what called that."""
    file = ""
    while traceback is not None:
        name, traceback = traceback.tb_frame.f_code.co_filename, traceback.tb_next
        file = file if name.startswith("<") else name
    return file


def converted(convert: Callable[..., T], value: object, should_be: str) -> T:
    """convert(value), of a file's value. Raises ValueError that names the value and what it should be."""
    try:
        return convert(value)
    except (TypeError, ValueError, OverflowError, ArithmeticError) as error:
        text = repr(value)
        shown = text if len(text) <= 80 else f"{text[:77]}..."
        raise ValueError(f"{shown} should be {should_be}") from error
