"""Prints other libraries' messages as lines of this program, and silences their progress bars."""

import logging
import os
import sys
import warnings
from pathlib import Path

from trainer.base.console import write


def quiet_libraries() -> None:
    """Print libraries' messages as lines of this program, without their bars, whose work its own bars show.

    Notices about other features, or about later versions of a library, are hidden; errors are still printed.
    """
    for library in ("TRANSFORMERS", "DIFFUSERS", "DATASETS", "HF_HUB"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    for bars in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):
        os.environ.setdefault(bars, "1")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    logging.lastResort = _Lines(logging.WARNING)
    if not sys.warnoptions:  # `python -W` overrides this
        for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
    warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step.*")
    warnings.filterwarnings("ignore", message="bf16 and fp16 are mixed")  # a compiler's, of a base stored in the other
    warnings.showwarning = _show_warning


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        write(f"{record.levelname.lower()}: {record.name}: {' '.join(record.getMessage().split())}", sys.stderr)


def _show_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, file=None, line=None) -> None:
    """Replaces warnings.showwarning. The library is the folder below site-packages."""
    _, installed, path = filename.replace(os.sep, "/").rpartition("/site-packages/")
    library = path.partition("/")[0] if installed else Path(filename).name
    write(f"warning: {library}: {' '.join(str(message).split())}", sys.stderr)
