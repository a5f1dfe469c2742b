"""What other libraries say, told as lines of ours."""

import logging
import os
import sys
import warnings
from pathlib import Path

from trainer.base.console import write


def quiet_libraries() -> None:
    """What libraries say becomes lines of ours, and their bars are off: ours tell of the same work.

    Notices about what they could also do, or will do in a later version, are not the user's business; errors still show.
    """
    for library in ("TRANSFORMERS", "DIFFUSERS", "DATASETS", "HF_HUB"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    for bars in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):
        os.environ.setdefault(bars, "1")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    logging.lastResort = _Told(logging.WARNING)
    if not sys.warnoptions:  # python -W asks for them
        for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
    warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step.*")
    warnings.filterwarnings("ignore", message="bf16 and fp16 are mixed")  # a compiler's, of a base stored in the other
    warnings.showwarning = _warned


class _Told(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        write(f"{record.levelname.lower()}: {record.name}: {' '.join(record.getMessage().split())}", sys.stderr)


def _warned(message: Warning | str, category: type[Warning], filename: str, lineno: int, file=None, line=None) -> None:
    """As warnings.showwarning. The library is the folder below site-packages."""
    _, installed, inside = filename.replace(os.sep, "/").rpartition("/site-packages/")
    library = inside.partition("/")[0] if installed else Path(filename).name
    write(f"warning: {library}: {' '.join(str(message).split())}", sys.stderr)
