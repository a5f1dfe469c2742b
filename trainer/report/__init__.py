"""report.html: one self-contained page about a run, made from what the run left on disk and what it tells of itself.

The page loads nothing from anywhere (its own content security policy forbids it), so it can be opened from a file,
mailed or printed. Light to import: PIL is imported when a page is written.
"""

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.base.errors import Interrupted, PeerStopped
from trainer.base.files import write_atomic
from trainer.monitoring.course import BLOCKS
from trainer.report.history import START, STOP
from trainer.report.live import CAUSES, LiveReport, first_page
from trainer.report.page import ReportedRun, render_audit, render_data
from trainer.report.tables import Sections

__all__ = ["BLOCKS", "START", "STOP", "LiveReport", "ReportedRun", "cause", "first_page", "write_audit", "write_data_report"]


def write_data_report(path: Path, *, name: str, data: Sections) -> None:
    """Write data_report.html, a page about the data alone, atomically."""
    write_atomic(path, [render_data(name=name, data=data).encode("utf-8", errors="replace")])


def write_audit(path: Path, *, name: str, parts: Sections, remaining: Mapping[str, Sequence[float]]) -> None:
    """Write audit.html, a page about what storage formats cost a model, atomically."""
    write_atomic(path, [render_audit(name=name, parts=parts, remaining=remaining).encode("utf-8", errors="replace")])


def cause(error: BaseException) -> str:
    """What ended a run, in a few words, for who reads it from outside."""
    match error:
        case Interrupted():
            return f"stopped by {signal.Signals(error.signum).name}"
        case KeyboardInterrupt():
            return "stopped at once"
        case PeerStopped():
            return "another process of the run has ended"
    return next((words for kinds, words in CAUSES.items() if isinstance(error, kinds)), "an error")
