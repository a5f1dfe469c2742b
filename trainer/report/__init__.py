"""report.html: one self-contained page about a run, made only from what the run left on disk and its outcome table.

The page loads nothing from anywhere (its own content security policy forbids it), so it can be opened from a file,
mailed or printed. Light to import: PIL and the tensor writer are imported when a page is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.report import page
from trainer.report.curves import read_metrics
from trainer.report.samples import read_samples

# Section title -> {"columns": [...], "rows": [[...], ...], optionally "notes": [...]}.
Outcome = Mapping[str, Mapping[str, Any]]


def write_report(
    output_dir: Path, *, name: str, outcome: Outcome | None, check: Callable[[], None] = lambda: None
) -> Path:
    """Write `output_dir`/report.html atomically and return its path.

    Reads config.toml, metrics.jsonl, samples/step-*/*.png and adapters/*.safetensors; each of them may be missing.
    `outcome` is the "Did it take?" table, or None when the run has not reached its end.
    check: called between its parts; may raise, which leaves the page as it was.
    """
    from trainer.files import write_atomic

    output_dir = Path(output_dir)
    config_file = output_dir / "config.toml"
    html = page.render(
        name=name,
        config=config_file.read_text(encoding="utf-8", errors="replace") if config_file.exists() else None,
        metrics=read_metrics(output_dir / "metrics.jsonl"),
        samples=read_samples(output_dir / "samples", check),
        outcome=outcome,
        adapters=[
            page.AdapterFile.read(file, check) for file in sorted((output_dir / "adapters").glob("*.safetensors"))
        ],
    )
    check()
    path = output_dir / "report.html"
    write_atomic(path, [html.encode("utf-8", errors="replace")])
    return path
