"""report.html: one self-contained page about a run, made only from what the run left on disk and its outcome table.

The page loads nothing from anywhere (its own content security policy forbids it), so it can be opened from a file,
mailed or printed. Light to import: PIL is imported when a page is written.
"""

from collections.abc import Callable
from pathlib import Path

from trainer.files import write_atomic
from trainer.layout import Layout
from trainer.report.page import Outcome, render, render_data


def write_report(
    layout: Layout,
    *,
    name: str,
    outcome: Outcome | None,
    data: Outcome | None = None,
    check: Callable[[], None] = lambda: None,
) -> Path:
    """Write the run's report atomically, and return its path.

    Reads its config, metrics, samples and adapter files; each of them may be missing.
    `outcome` is the "Did it take?" table, or None when the run has not reached its end. data: of its data section.
    check: called between its parts; may raise, which leaves the page as it was.
    """
    html = render(layout, name=name, outcome=outcome, data=data or {}, check=check)
    check()
    write_atomic(layout.report, [html.encode("utf-8", errors="replace")])
    return layout.report


def write_data_report(path: Path, *, name: str, data: Outcome) -> None:
    """Write data_report.html, a page about the data alone, atomically."""
    write_atomic(path, [render_data(name=name, data=data).encode("utf-8", errors="replace")])
