"""report.html: one self-contained page about a run, made from what the run left on disk and what it tells of itself.

The page loads nothing from anywhere (its own content security policy forbids it), so it can be opened from a file,
mailed or printed. Light to import: PIL is imported when a page is written.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.base.files import write_atomic
from trainer.monitoring.course import BLOCKS
from workbench.pages.live import LiveReport, first_page
from workbench.pages.page import ReportedRun, render_audit, render_data
from workbench.pages.tables import Sections

__all__ = ["BLOCKS", "LiveReport", "ReportedRun", "first_page", "write_audit", "write_data_report"]


def write_data_report(path: Path, *, name: str, data: Sections) -> None:
    """Write data_report.html, a page about the data alone, atomically."""
    write_atomic(path, [render_data(name=name, data=data).encode("utf-8", errors="replace")])


def write_audit(path: Path, *, name: str, parts: Sections, remaining: Mapping[str, Sequence[float]]) -> None:
    """Write audit.html, a page about what storage formats cost a model, atomically."""
    write_atomic(path, [render_audit(name=name, parts=parts, remaining=remaining).encode("utf-8", errors="replace")])
