"""report.html: one self-contained page about a run, made only from what the run left on disk and its outcome table.

The page loads nothing from anywhere (its own content security policy forbids it), so it can be opened from a file,
mailed or printed. Light to import: PIL and the tensor writer are imported when a page is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.layout import Layout
from trainer.report import page
from trainer.report.curves import read_metrics
from trainer.report.samples import read_samples

# Section title -> {"columns": [...], "rows": [[...], ...], optionally "notes": [...]}.
Outcome = Mapping[str, Mapping[str, Any]]


def write_report(layout: Layout, *, name: str, outcome: Outcome | None, check: Callable[[], None] = lambda: None) -> Path:
    """Write the run's report atomically, and return its path.

    Reads its config, metrics, samples and adapter files; each of them may be missing.
    `outcome` is the "Did it take?" table, or None when the run has not reached its end.
    check: called between its parts; may raise, which leaves the page as it was.
    """
    from trainer.files import write_atomic

    html = page.render(
        name=name,
        config=layout.config.read_text(encoding="utf-8", errors="replace") if layout.config.exists() else None,
        metrics=read_metrics(layout.metrics),
        samples=read_samples(layout.samples, check),
        outcome=outcome,
        adapters=[page.AdapterFile.read(file, layout.root, check) for file in sorted(layout.adapters.glob("*.safetensors"))],
    )
    check()
    write_atomic(layout.report, [html.encode("utf-8", errors="replace")])
    return layout.report
