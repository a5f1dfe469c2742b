"""The page itself: HTML and CSS, no script. Every text that did not originate in this file passes through `escape`."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trainer.files import hash_file
from trainer.report import curves
from trainer.report.curves import History
from trainer.report.samples import Samples

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

CSS = """
:root{color-scheme:light dark;--bg:#fcfcfb;--panel:#fff;--ink:#1c1e21;--soft:#5f6670;--line:#dfe2e6;--raw:#a9c3e3;
--mean:#1f5fae;--accent:#1f5fae}
@media(prefers-color-scheme:dark){:root{--bg:#15171a;--panel:#1d2024;--ink:#e7e9ec;--soft:#a0a7b1;--line:#343941;
--raw:#41618a;--mean:#7fb4f5;--accent:#8dbcf7}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:32px 24px 64px;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:28px;line-height:1.2;margin:0 0 2px;overflow-wrap:anywhere}
h2{font-size:19px;margin:40px 0 12px;padding-bottom:6px;border-bottom:1px solid var(--line)}
h3{font-size:15px;margin:22px 0 8px}
p{margin:6px 0}
a{color:var(--accent)}
.soft,.unit,.legend{color:var(--soft)}
.kicker{color:var(--soft);margin:0 0 4px}
dl.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(168px,1fr));gap:1px;background:var(--panel);
border:1px solid var(--line);border-radius:8px;overflow:hidden;margin:16px 0}
dl.facts div{padding:9px 13px;box-shadow:0 0 0 1px var(--line)}
dt{font-size:12px;color:var(--soft)}
dd{margin:0;font-weight:600;overflow-wrap:anywhere;font-variant-numeric:tabular-nums}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(460px,100%),1fr));gap:16px}
figure{margin:0}
figure.chart{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:12px 12px 6px;
break-inside:avoid;max-width:720px}
figcaption{font-size:14px;margin:0 4px 6px;display:flex;flex-wrap:wrap;gap:0 8px;align-items:baseline}
.unit,.legend{font-size:12px}
.legend{margin-left:auto}
.legend i{display:inline-block;width:16px;height:0;border-top:3px solid;vertical-align:middle;margin:0 5px 2px 10px}
.legend i.raw{border-color:var(--raw)}.legend i.mean{border-color:var(--mean)}
svg{display:block;width:100%;height:auto}
svg text{font:11.5px system-ui,sans-serif;fill:var(--soft);font-variant-numeric:tabular-nums}
svg .grid{stroke:var(--line)}svg .axis{stroke:var(--soft)}
svg polyline{fill:none;stroke-linejoin:round;vector-effect:non-scaling-stroke}
svg polyline.raw{stroke:var(--raw);stroke-width:1.2}svg polyline.mean{stroke:var(--mean);stroke-width:2}
svg circle.raw{fill:var(--raw)}svg circle.mean{fill:var(--mean)}
.wide{overflow-x:auto;border:1px solid var(--line);border-radius:8px;background:var(--panel)}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{padding:7px 12px;text-align:left;vertical-align:top;border-top:1px solid var(--line)}
thead th{border-top:0;color:var(--soft);font-weight:600;font-size:13px;white-space:nowrap}
td.number,th.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.wide:has(>table.samples){width:fit-content;max-width:100%}
table.samples{width:auto}
table.samples tbody th{position:sticky;left:0;background:var(--panel);min-width:150px;max-width:210px;font-weight:500;
overflow-wrap:anywhere}
table.samples img{display:block;width:200px;height:auto;border-radius:4px}
code,pre{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
td code{overflow-wrap:anywhere}
summary{cursor:pointer;color:var(--accent)}
pre{overflow-x:auto;background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:14px;margin:10px 0}
@media print{:root{color-scheme:light;--bg:#fff;--panel:#fff;--ink:#000;--soft:#444;--line:#ccc;--raw:#a9c3e3;
--mean:#1f5fae;--accent:#000}
body{max-width:none;padding:0;font-size:11pt}h2,h3{break-after:avoid}tr{break-inside:avoid}
.wide{overflow:visible;border:0}table.samples img{width:110px}table.samples tbody th{position:static;min-width:90px}
.charts{grid-template-columns:1fr 1fr}a{text-decoration:none}pre{white-space:pre-wrap}}
"""


@dataclass(frozen=True)
class AdapterFile:
    """path: below the page's folder."""

    path: Path
    bytes: int
    sha256: str

    @staticmethod
    def read(path: Path, root: Path, check: Callable[[], None] = lambda: None) -> AdapterFile:
        return AdapterFile(path.relative_to(root), path.stat().st_size, hash_file(path, lambda count: check()))


def render(
    *,
    name: str,
    config: str | None,
    metrics: History,
    samples: Samples,
    outcome: Mapping[str, Mapping[str, Any]] | None,
    adapters: Sequence[AdapterFile],
) -> str:
    """The whole page as text."""
    body = "\n".join(
        [
            f'<header><p class="kicker">Training report</p><h1>{escape(name)}</h1></header>',
            "<main>",
            _facts(config, metrics),
            _section("Curves", _curves(metrics)),
            _section("Samples", _samples(samples)),
            _section("Did it take?", _outcome(outcome)),
            _section("Adapter files", _adapters(adapters)),
            _section("Configuration", _config(config)),
            "</main>",
        ]
    )
    # The policy makes "loads nothing from elsewhere" a fact that the browser enforces.
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(name)} - training report</title>
<style>{CSS}</style>
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
        if (images := metrics.last("images")) is not None:
            facts.append(("Images seen", f"{images:,.0f}"))
        if (epoch := metrics.last("epoch")) is not None:
            facts.append(("Epoch", f"{epoch:g}"))
        losses = metrics.values("loss")
        if window := curves.smoothing_window(len(losses)):
            known = [(float(i), loss) for i, loss in enumerate(losses)]
            facts.append(("Final loss, averaged", f"{curves.smooth(known, window)[-1][1]:.4f}"))
        elif losses:
            facts.append(("Final loss", f"{losses[-1]:.4f}"))
        if seconds := metrics.values("seconds"):
            facts.append(("Time in steps", duration(sum(seconds))))
            facts.append(("Median step", f"{statistics.median(seconds):.3g} s"))
        if (end := metrics.last("time")) is not None:
            facts.append(("Last step", datetime.fromtimestamp(end, UTC).strftime("%Y-%m-%d %H:%M UTC")))
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
    head = "".join(f'<th scope="col">{_step_name(step)}</th>' for step in samples.steps)
    rows = []
    for row in samples.rows:
        cells = []
        for step in samples.steps:
            if step not in row.images:
                cells.append('<td class="soft">none</td>')
                continue
            alt = escape(f"{row.prompt}, {_step_name(step)}")
            # The link is to the full file beside the page, for as long as the two stay together.
            link = escape(quote(row.links[step]))
            cells.append(f'<td><a href="{link}"><img src="{row.images[step]}" alt="{alt}"></a></td>')
        detail = f'<div class="soft">{escape(row.detail)}</div>' if row.detail else ""
        rows.append(f'<tr><th scope="row">{escape(row.prompt)}{detail}</th>{"".join(cells)}</tr>')
    note = '<p class="soft">Shown reduced; each image links to its file.</p>' if samples.are_thumbnails else ""
    return (
        f'<div class="wide"><table class="samples"><thead><tr><th scope="col">Prompt</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{note}"
    )


def _step_name(step: int) -> str:
    return f"step {step:,}" if step else "before training"


def _outcome(outcome: Mapping[str, Mapping[str, Any]] | None) -> str:
    if not outcome:
        return '<p class="soft">Measured at the end of a run; this one has not reached it.</p>'
    parts = []
    for title, table in outcome.items():
        parts.append(f"<h3>{escape(str(title))}</h3>")
        if table.get("rows"):
            parts.append(_table(table["columns"], table["rows"]))
        parts += [f'<p class="soft">{escape(str(note))}</p>' for note in table.get("notes", ())]
    return "".join(parts)


def _table(columns: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    """Columns whose cells are all numbers (or missing) are aligned to the right."""
    numeric = [
        all(_is_number(row[i]) or row[i] is None for row in rows if i < len(row))
        and any(i < len(row) and _is_number(row[i]) for row in rows)
        for i in range(len(columns))
    ]

    def cell(tag: str, index: int, text: str) -> str:
        kind = ' class="number"' if index < len(numeric) and numeric[index] else ""
        scope = ' scope="col"' if tag == "th" else ""
        return f"<{tag}{scope}{kind}>{escape(text)}</{tag}>"

    head = "".join(cell("th", i, str(column)) for i, column in enumerate(columns))
    body = "".join("<tr>" + "".join(cell("td", i, shown(v)) for i, v in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _adapters(adapters: Sequence[AdapterFile]) -> str:
    if not adapters:
        return '<p class="soft">No adapter file has been written yet.</p>'
    rows = "".join(
        f'<tr><td><a href="{escape(quote(file.path.as_posix()))}">{escape(file.path.name)}</a></td>'
        f'<td class="number">{size(file.bytes)}</td><td><code>{file.sha256}</code></td></tr>'
        for file in adapters
    )
    return (
        '<div class="wide"><table><thead><tr><th scope="col">File</th><th scope="col" class="number">Size</th>'
        f'<th scope="col">SHA-256</th></tr></thead><tbody>{rows}</tbody></table></div>'
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
