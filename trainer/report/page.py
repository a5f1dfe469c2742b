"""The page itself: HTML around page.css, no script. Every text from elsewhere passes through `escape`."""

import base64
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trainer.files import hash_file
from trainer.layout import Layout
from trainer.report import curves
from trainer.report.curves import History
from trainer.report.samples import Samples, read_samples

# Section title -> {"columns": [...], "rows": [[...], ...], optionally "notes": [...], "folded": True}; in place of a table
# "text", or "pictures": each {"jpeg": bytes or None, "title": ..., "lines": [...], "details": [...]}.
Outcome = Mapping[str, Mapping[str, Any]]

# Keys of config.toml worth a place at the top, with their labels.
CONFIG_FACTS = {
    "model.family": "Model family",
    "model.path": "Base model",
    "adapter.type": "Adapter",
    "adapter.rank": "Rank",
    "adapter.alpha": "Alpha",
    "adapter.targets": "Targets",
    "data.resolution": "Resolution, px",
    "data.batch_size": "Batch size",
    "optimizer.name": "Optimizer",
    "optimizer.lr": "Learning rate",
    "precision.compute": "Compute",
    "run.seed": "Seed",
}

CSS = Path(__file__).with_name("page.css")


def render(layout: Layout, *, name: str, outcome: Outcome | None, data: Outcome, check: Callable[[], None]) -> str:
    """The whole page as text, from the run's files; each of them may be missing. Arguments as of `write_report`."""
    config = layout.config.read_text(encoding="utf-8", errors="replace") if layout.config.exists() else None
    metrics = curves.read_metrics(layout.metrics)
    body = "\n".join(
        [
            f'<header><p class="kicker">Training report</p><h1>{escape(name)}</h1></header>',
            "<main>",
            _facts(config, metrics),
            _section("Curves", _curves(metrics)),
            _section("Samples", _samples(read_samples(layout.samples, check))),
            _section("Did it take?", _outcome(outcome)),
            *([_section("Data", _tables(data))] if data else []),
            _section("Adapter files", _adapters(layout, check)),
            _section("Configuration", _config(config)),
            "</main>",
        ]
    )
    return _document(name, "training report", body)


def render_data(*, name: str, data: Outcome) -> str:
    """A page about a run's data alone."""
    sections = [_section(title, _content(section)) for title, section in data.items()]
    header = f'<header><p class="kicker">Data report</p><h1>{escape(name)}</h1></header>'
    return _document(name, "data report", "\n".join([header, "<main>", *sections, "</main>"]))


def _document(name: str, kind: str, body: str) -> str:
    # The policy makes "loads nothing from elsewhere" a fact that the browser enforces.
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(name)} - {kind}</title>
<style>
{CSS.read_text(encoding="utf-8")}</style>
</head>
<body>
{body}
</body>
</html>
"""


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _facts(config: str | None, metrics: History) -> str:
    facts: list[tuple[str, str]] = []
    if metrics.rows:
        facts.append(("Steps", f"{metrics.rows[-1]['step']:,}"))
        if images := metrics.values("images"):
            facts.append(("Images seen", f"{images[-1]:,.0f}"))
        if epochs := metrics.values("epoch"):
            facts.append(("Epoch", f"{epochs[-1]:g}"))
        losses = metrics.values("loss")
        if window := curves.smoothing_window(len(losses)):
            known = [(float(i), loss) for i, loss in enumerate(losses)]
            facts.append(("Final loss, averaged", f"{curves.smooth(known, window)[-1][1]:.4f}"))
        elif losses:
            facts.append(("Final loss", f"{losses[-1]:.4f}"))
        if seconds := metrics.values("seconds"):
            facts.append(("Time in steps", duration(sum(seconds))))
            facts.append(("Median step", f"{statistics.median(seconds):.3g} s"))
        if times := metrics.values("time"):
            facts.append(("Last step", datetime.fromtimestamp(times[-1], UTC).strftime("%Y-%m-%d %H:%M UTC")))
    values = scalar_lines(config or "")
    facts += [(label, values[key]) for key, label in CONFIG_FACTS.items() if key in values]
    if not facts:
        return '<p class="soft">This run has recorded nothing yet.</p>'
    cells = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in facts)
    return f'<dl class="facts">{cells}</dl>'


def _curves(metrics: History) -> str:
    figures = curves.draw_all(metrics)
    note = ""
    if metrics.unreadable:
        note = f'<p class="soft">{metrics.unreadable} line(s) of metrics.jsonl could not be read and are left out.</p>'
    if not figures:
        return f'<p class="soft">No step has been recorded yet.</p>{note}'
    return f'<div class="charts">{"".join(figures)}</div>{note}'


def _samples(samples: Samples) -> str:
    if not samples.rows:
        return '<p class="soft">This run made no sample images.</p>'
    rows, known = [], any(row.truth for row in samples.rows)
    for row in samples.rows:
        detail = f'<div class="soft">{escape(row.detail)}</div>' if row.detail else ""
        cells = [f'<th scope="row">{escape(row.prompt)}{detail}</th>']
        shown = [(_step_name(s), (row.images[s], row.links[s]) if s in row.images else None) for s in samples.steps]
        for title, image in (*shown, *([("the truth", row.truth)] if known else [])):
            if image is None:
                cells.append('<td class="soft">none</td>')
                continue
            # The link is to the full file beside the page, for as long as the two stay together.
            uri, link = image[0], escape(quote(image[1]))
            cells.append(f'<td><a href="{link}"><img src="{uri}" alt="{escape(f"{row.prompt}, {title}")}"></a></td>')
        rows.append(cells)
    note = '<p class="soft">Shown reduced; each image links to its file.</p>' if samples.are_thumbnails else ""
    head = ["Prompt", *map(_step_name, samples.steps), *(["the truth"] if known else [])]
    return _grid([f'<th scope="col">{title}</th>' for title in head], rows, ' class="samples"') + note


def _step_name(step: int) -> str:
    return f"step {step:,}" if step else "before training"


def _outcome(outcome: Outcome | None) -> str:
    if not outcome:
        return '<p class="soft">Measured after the last step, when a run is closed; this one has not been.</p>'
    return _tables(outcome)


def _tables(sections: Outcome) -> str:
    return "".join(f"<h3>{escape(str(title))}</h3>{_content(section)}" for title, section in sections.items())


def _content(section: Mapping[str, Any]) -> str:
    parts = []
    if section.get("text"):
        parts.append(f"<pre>{escape(section['text'])}</pre>")
    if rows := section.get("rows"):
        table = _table(section["columns"], rows)
        count = f"{len(rows):,} row{'' if len(rows) == 1 else 's'}"
        parts.append(f"<details><summary>{count}</summary>{table}</details>" if section.get("folded") else table)
    parts += [f'<p class="soft">{escape(str(note))}</p>' for note in section.get("notes", ())]
    if section.get("pictures"):
        parts.append(f'<div class="photos">{"".join(map(_picture, section["pictures"]))}</div>')
    return "".join(parts)


def _picture(picture: Mapping[str, Any]) -> str:
    title, image = escape(picture["title"]), '<p class="soft">cannot be read any more</p>'
    if picture["jpeg"] is not None:
        image = f'<img src="data:image/jpeg;base64,{base64.b64encode(picture["jpeg"]).decode()}" alt="{title}">'
    lines = "".join(f"<p>{escape(line)}</p>" for line in picture["lines"])
    details = "".join(f'<p class="soft">{escape(line)}</p>' for line in picture["details"])
    return f'<figure class="photo">{image}<h4>{title}</h4>{lines}{details}</figure>'


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns whose cells are all numbers (or missing) are aligned to the right."""
    kinds = []
    for cells in zip(*rows, strict=True):
        given = [cell for cell in cells if cell is not None]
        kinds.append(' class="number"' if given and all(map(_is_number, given)) else "")
    head = [f'<th scope="col"{kind}>{escape(title)}</th>' for kind, title in zip(kinds, columns, strict=True)]
    return _grid(head, [[f"<td{k}>{escape(shown(v))}</td>" for k, v in zip(kinds, row, strict=True)] for row in rows])


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """A table of cells that are HTML already."""
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="wide"><table{kind}><thead><tr>{"".join(head)}</tr></thead><tbody>{body}</tbody></table></div>'


def _adapters(layout: Layout, check: Callable[[], None]) -> str:
    rows = []
    for file in sorted(layout.adapters.glob("*.safetensors")):
        link = f'<a href="{escape(quote(file.relative_to(layout.root).as_posix()))}">{escape(file.name)}</a>'
        sha256 = hash_file(file, lambda count: check())
        rows.append(
            [f"<td>{link}</td>", f'<td class="number">{size(file.stat().st_size)}</td>', f"<td><code>{sha256}</code></td>"]
        )
    if not rows:
        return '<p class="soft">No adapter file has been written yet.</p>'
    return _grid(
        ['<th scope="col">File</th>', '<th scope="col" class="number">Size</th>', '<th scope="col">SHA-256</th>'], rows
    )


def _config(config: str | None) -> str:
    if config is None:
        return '<p class="soft">There is no config.toml in this folder.</p>'
    return f"<details><summary>config.toml, every default written out</summary><pre>{escape(config)}</pre></details>"


def scalar_lines(config: str) -> dict[str, str]:
    """'table.key' -> value as written, quotes removed, for the one-line values of a resolved config.toml.

    A look at the text, not a TOML reader: the trainer writes this file one key a line. Lists over several lines and
    arrays of tables are left out.
    """
    values: dict[str, str] = {}
    table: str | None = ""
    for line in config.splitlines():
        line = line.strip()
        if line.startswith("["):
            table = line[1:-1] if line.endswith("]") and not line.startswith("[[") else None
        elif table and " = " in line:
            key, _, value = line.partition(" = ")
            if value not in ("[", "{"):
                values[f"{table}.{key}"] = value.strip("\"'")
    return values


def shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _is_number(value: Any) -> bool:
    """Numbers, and texts that are one number with or without a percent sign."""
    if isinstance(value, str):
        return re.fullmatch(r"[-+]?[\d.,]+(e[-+]?\d+)? ?%?", value) is not None
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def size(count: int) -> str:
    """Bytes in binary units, as file managers show them."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
