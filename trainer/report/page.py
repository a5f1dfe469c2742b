"""The page itself: HTML around page.css and page.js. Every text from elsewhere passes through `escape`."""

from __future__ import annotations

import base64
import hashlib
import shlex
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from html import escape
from pathlib import Path
from urllib.parse import quote

from trainer.base.run_layout import Layout, step_of
from trainer.report import charts
from trainer.report.blocks import heat_map
from trainer.report.gallery import gallery, newest
from trainer.report.history import Events, History
from trainer.report.samples import Samples
from trainer.report.settings import configuration
from trainer.report.status import Judgement, State, figures
from trainer.report.tables import Sections, facts, folded, grid, place, section, sections, size, sorted_out

HERE = Path(__file__).parent
PARTS = "Samples", "Curves", "Your data", "The adapter", "Configuration", "Lineage", "Environment"
RELOAD_SECONDS = 15  # of a page whose run is alive
NOT_SEEN = "The run ended before its photos were looked at.", "The photos are being looked at."
INLINE = "'unsafe-inline'"  # a chart's labels have their places in their styles
PREPARING_SECONDS = 3600  # a first start may fetch a model of many gigabytes

# What a tone looks like beside its colour.
SIGNS = {"good": "\N{CHECK MARK}", "care": "!", "bad": "\N{MULTIPLICATION X}", "open": "\N{HORIZONTAL ELLIPSIS}"}


@dataclass(frozen=True, kw_only=True)
class PageContents:
    """All that a page shows. kicker: above the title. data: HTML of the data's sections. blocks: the change of each block
    of the adapter, and when that was measured. hashes: of the adapter files. written: Unix time; quiet: seconds after which
    a page whose run is alive ought to have been written again."""

    name: str
    kicker: str
    layout: Layout
    state: State
    history: History
    judgement: Judgement
    events: Events
    samples: Samples
    data: str | None
    outcome: Sections | None
    blocks: tuple[Mapping[str, float | None], str]
    hashes: Mapping[Path, str]
    lineage: Mapping[str, str]
    environment: Mapping[str, str]
    written: float
    quiet: float
    aside: tuple[Path, ...] = field(default=())


def render(contents: PageContents) -> str:
    """The whole page as text."""
    parts = (
        gallery(contents.samples),
        _curves(contents),
        contents.data if contents.data is not None else _soft(NOT_SEEN[contents.state.alive]),
        _adapter(contents),
        configuration(contents.layout.config),
        _lineage(contents),
        facts(contents.environment, "list") or _soft("Nothing is known of it."),
    )
    body = [
        _head(contents),
        "<main>",
        *(section(title, part) for title, part in zip(PARTS, parts, strict=True)),
        "</main>",
        f'<footer><p class="soft">Written {clock(contents.written)}.</p></footer>',
    ]
    state = contents.state
    told = f' data-written="{contents.written:.0f}" data-quiet="{contents.quiet:.0f}" data-reload="{RELOAD_SECONDS}"'
    return document(contents.name, "training report", "\n".join(body), told if state.alive else "")


def render_first(*, name: str) -> str:
    """The page of a run that has not begun: what it needs is loaded, fetched and encoded."""
    state = '<p class="state training" id="state"><i></i><span>Preparing: model and photos are read.</span></p>'
    head = f'<header><p class="kicker">Training report</p><h1>{escape(name)}</h1>{state}</header>'
    told = f' data-written="{time.time():.0f}" data-quiet="{PREPARING_SECONDS}" data-reload="{RELOAD_SECONDS}"'
    said = _soft("The first steps, your photos and the samples appear here by themselves.")
    return document(name, "training report", f"{head}\n<main>{said}</main>", told)


def render_data(*, name: str, data: Sections) -> str:
    """A page about a run's data alone: the photos, then what needs a look, then the counts and what the console said."""
    pictured, care, plain = sorted_out(data)
    ordered = pictured | care | plain
    parts = []
    for title, part in ordered.items():
        inner = sections({"": part})
        parts.append(section(title, folded("As the console says it", inner) if part.get("text") else inner))
    head = f'<header><p class="kicker">Data report</p><h1>{escape(name)}</h1><nav>{_links(ordered)}</nav></header>'
    return document(name, "data report", "\n".join([head, "<main>", *parts, "</main>"]), scripted=False)


@cache
def _resources() -> tuple[str, str, str]:
    """(style, script, the script's hash as a policy names it)."""
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return style, script, base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def policy(*, scripted: bool = True) -> str:
    """The content security policy of a page. It makes "loads nothing from elsewhere" a fact that the browser enforces. A
    sample's full file lies beside it. scripted: whether page.js may run; nothing else may."""
    script = f"; script-src 'sha256-{_resources()[2]}'" if scripted else ""
    return f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data: file: 'self'; style-src {INLINE}{script}"


def document(name: str, kind: str, body: str, told: str = "", *, scripted: bool = True) -> str:
    """told: attributes of the body, for the script."""
    style, script, _ = _resources()
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy(scripted=scripted)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(name)} - {kind}</title>
<style>
{style}</style>
</head>
<body{told}>
{body}
{f"<script>{script}</script>" if scripted else ""}
</body>
</html>
"""


def _head(contents: PageContents) -> str:
    state, history, judgement = contents.state, contents.history, contents.judgement
    share = state.share(history)
    said = [f"<p>{escape(text)}</p>" for text in (judgement.said, judgement.best) if text]
    if state.said:
        said.append(f'<p class="soft">The run said last: {escape(state.said)}</p>')
    return (
        f'<header><p class="kicker">{escape(contents.kicker)}</p><h1>{escape(contents.name)}</h1>'
        f'<p class="state {state.kind}" id="state"><i></i><span>{escape(state.sentence(history))}</span></p>'
        f'<div class="bar" role="img" aria-label="{share:.0%} of the steps"><i style="width:{share:.2%}"></i></div>'
        f'<div class="verdict {judgement.tone}"><div>'
        f"<h2><i>{SIGNS[judgement.tone]}</i><span>{escape(judgement.title)}</span></h2>{''.join(said)}</div>"
        f"{newest(contents.samples)}</div>{facts(figures(history, contents.blocks[0]))}<nav>{_links(PARTS)}</nav></header>"
    )


def _links(titles: Iterable[str]) -> str:
    return "".join(f'<a href="#{place(title)}">{escape(title)}</a>' for title in titles)


def _curves(contents: PageContents) -> str:
    history = contents.history
    drawn = charts.draw_all(history, contents.events)
    note = (
        _soft(f"{history.unreadable} line(s) of metrics.jsonl could not be read and are left out.")
        if history.unreadable
        else ""
    )
    return f'<div class="charts">{"".join(drawn)}</div>{note}' if drawn else _soft("No step has been recorded yet.") + note


def _adapter(contents: PageContents) -> str:
    changes, when = contents.blocks
    parts = [heat_map(changes, when) or _soft("How far its blocks have moved is measured after steps 16, 32, 64 and so on.")]
    if contents.outcome:
        parts.append(folded("Did it take? The numbers", sections(contents.outcome)))
    elif not contents.state.alive:
        parts.append(_soft("The whole table is measured after the last step, when a run is closed; this one has not been."))
    return "".join([*parts, _files(contents)])


def _files(contents: PageContents) -> str:
    rows = []
    for file, sha256 in contents.hashes.items():
        link = f'<a href="{escape(quote(file.relative_to(contents.layout.root).as_posix()))}">{escape(file.name)}</a>'
        cells = [f'<td class="number">{size(file.stat().st_size)}</td>', f"<td><code>{sha256}</code></td>"]
        rows.append([f"<td>{link}</td>", *cells])
    saved = _saved(contents.layout)
    if not rows:
        return _soft("No adapter file has been written yet.") + saved
    head = '<th scope="col">File</th>', '<th scope="col" class="number">Size</th>', '<th scope="col">SHA-256</th>'
    return folded(f"{len(rows)} adapter file{'' if len(rows) == 1 else 's'}", grid(head, rows), opened=len(rows) < 5) + saved


def _saved(layout: Layout) -> str:
    """How a step comes to files whose adapter lies in a checkpoint alone."""
    found = {step: folder for folder in layout.checkpoints.glob("*") if (step := step_of(folder.name)) is not None}
    if not found:
        return ""
    steps = ", ".join(f"{step:,}" for step in sorted(found))
    command = f"python scripts/adapter.py export {shlex.quote(str(found[max(found)]))} FOLDER"
    return f'<p class="soft">Checkpoints: step {steps}. To make the files of one: <code>{escape(command)}</code></p>'


def _lineage(contents: PageContents) -> str:
    marks = [f"<li>{escape(mark.said[:1].upper() + mark.said[1:])}</li>" for mark in contents.events.marks]
    for folder in contents.aside:
        after = folder.name.removeprefix("superseded-after-")
        marks.append(
            f"<li>Results of steps after {escape(after)} were set aside when the run went on from there, and are not in this "
            f"page: <code>{escape(folder.name)}</code></li>"
        )
    told = facts(contents.lineage, "list") + (f'<ul class="plain">{"".join(marks)}</ul>' if marks else "")
    return told or _soft("Nothing is known of it.")


def clock(seconds: float) -> str:
    """A time that the script shows in the reader's own zone."""
    moment = datetime.fromtimestamp(seconds, UTC)
    return f'<time datetime="{moment:%Y-%m-%dT%H:%M:%SZ}">{moment:%Y-%m-%d %H:%M} UTC</time>'


def _soft(text: str) -> str:
    return f'<p class="soft">{escape(text)}</p>'
