"""The HTML pages: of a run before, during and after the training, of its data alone, and of a storage audit."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.base.files import write_atomic
from trainer.base.run_layout import Layout, step_of
from workbench.pages import charts, rendering
from workbench.pages.history import Events, History
from workbench.pages.rendering import document
from workbench.pages.samples import Samples
from workbench.pages.settings import configuration
from workbench.pages.status import Judgement, State, figures
from workbench.pages.tables import Sections, sorted_out

PREPARING_SECONDS = 3600  # a first start may fetch a model of many gigabytes


@dataclass(frozen=True)
class ReportedRun:
    """The facts on a run that stay the same within one start. total: the run's steps. start_step: steps made before this
    start. levers: the keys that set the rate. kicker: line above the title. changes: those by --allow, in order."""

    layout: Layout
    name: str
    total: int
    start_step: int = 0
    levers: str = "optimizer.lr"
    kicker: str = "Training report"
    lineage: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    changes: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True, kw_only=True)
class PageContents:
    """The contents of a run's page. data: HTML of the data's sections. blocks: the change of each block of the adapter, and
    when that was measured. hashes: SHA-256 of the adapter files. watched: Unix time of writing, and seconds until the page
    of a live run counts as stale. aside: folders of results that were set aside."""

    run: ReportedRun
    state: State
    history: History
    judgement: Judgement
    events: Events
    samples: Samples
    data: str | None
    outcome: Sections | None
    blocks: tuple[Mapping[str, float | None], str]
    hashes: Mapping[Path, str]
    watched: tuple[float, float]
    aside: tuple[Path, ...]


def write_page(path: Path, html: str) -> None:
    """Write a page, atomically."""
    write_atomic(path, [html.encode("utf-8", errors="replace")])


def render(contents: PageContents) -> str:
    """The whole page as text."""
    changes, _ = contents.blocks
    return document(
        "run.html",
        name=contents.run.name,
        page=contents,
        figures=figures(contents.history, changes),
        charts=charts.draw_all(contents.history, contents.events),
        tiles=charts.tiles(changes),
        shades=charts.legend(),
        checkpoints=_checkpoints(contents.run.layout),
        fork=charts.fork_of(contents.history, contents.run.layout),
        config=configuration(contents.run.layout.config),
        watched=contents.watched if contents.state.alive else None,
    )


def render_first(*, name: str) -> str:
    """The page of a run that has not begun."""
    return document("preparing.html", name=name, watched=(time.time(), PREPARING_SECONDS))


def render_data(*, name: str, data: Sections) -> str:
    """The page of a run's data alone: photos, then sections that need a look, then counts and the console's text."""
    pictured, care, plain = sorted_out(data)
    return document("data_report.html", name=name, data=pictured | care | plain, scripted=False)


def render_audit(*, name: str, parts: Sections, remaining: Mapping[str, Sequence[float]]) -> str:
    """The page of a storage audit. remaining: as `charts.remaining` takes it."""
    return document("audit.html", name=name, parts=parts, chart=charts.remaining(remaining), scripted=False)


def data_part(data: Sections) -> str:
    """The HTML of the data's sections for a run's page."""
    pictured, care, plain = sorted_out(data)
    return rendering.render("data.html", pictured=pictured, care=care, plain=plain)


def _checkpoints(layout: Layout) -> dict[str, str] | None:
    """The steps of all checkpoints, and the command that exports the last one's adapter; None without any."""
    folders = {step: folder for folder in layout.checkpoints.glob("*") if (step := step_of(folder.name)) is not None}
    if not folders:
        return None
    command = f"python scripts/adapter.py export {shlex.quote(str(folders[max(folders)]))} FOLDER"
    return {"steps": ", ".join(f"{step:,}" for step in sorted(folders)), "command": command}
