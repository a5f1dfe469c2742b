"""The pages of a run: before it begins, while it goes on and after it, and of its data alone."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.base.files import write_atomic
from trainer.base.run_layout import Layout, step_of
from workbench.pages import blocks, charts, rendering
from workbench.pages.forked import forked
from workbench.pages.history import Events, History
from workbench.pages.rendering import document
from workbench.pages.samples import Samples
from workbench.pages.settings import configuration
from workbench.pages.status import Judgement, State, figures
from workbench.pages.tables import Sections, sorted_out

PREPARING_SECONDS = 3600  # a first start may fetch a model of many gigabytes


@dataclass(frozen=True)
class ReportedRun:
    """What a page says of its run, the same for as long as one start of it goes on. total: the run's steps. begun: those
    made before this start. levers: the keys that set the rate. kicker: above the title. changes: what --allow changed, in
    order."""

    layout: Layout
    name: str
    total: int
    begun: int = 0
    levers: str = "optimizer.lr"
    kicker: str = "Training report"
    lineage: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    changes: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True, kw_only=True)
class PageContents:
    """All that a page shows. data: HTML of the data's sections. blocks: the change of each block of the adapter, and when
    that was measured. hashes: of the adapter files. watched: Unix time when it was written, and seconds after which a page
    whose run is alive ought to have been written again."""

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
        moved=blocks.by_container(changes),
        shades=blocks.legend(),
        saved=_saved(contents.run.layout),
        fork=forked(contents.history, contents.run.layout),
        config=configuration(contents.run.layout.config),
        watched=contents.watched if contents.state.alive else None,
    )


def render_first(*, name: str) -> str:
    """The page of a run that has not begun."""
    return document("preparing.html", name=name, watched=(time.time(), PREPARING_SECONDS))


def render_data(*, name: str, data: Sections) -> str:
    """A page about a run's data alone: the photos, then what needs a look, then the counts and what the console said."""
    photos, care, plain = sorted_out(data)
    return document("data_report.html", name=name, data=photos | care | plain, scripted=False)


def render_audit(*, name: str, parts: Sections, remaining: Mapping[str, Sequence[float]]) -> str:
    """A page about what storage formats cost a model. remaining: as `charts.remaining` takes it."""
    return document("audit.html", name=name, parts=parts, chart=charts.remaining(remaining), scripted=False)


def data_part(data: Sections) -> str:
    """What a run's page shows of its data, the same for as long as it goes on."""
    pictured, care, plain = sorted_out(data)
    return rendering.render("data.html", pictured=pictured, care=care, plain=plain)


def _saved(layout: Layout) -> dict[str, str] | None:
    """How a step comes to files whose adapter lies in a checkpoint alone."""
    folders = {step: folder for folder in layout.checkpoints.glob("*") if (step := step_of(folder.name)) is not None}
    if not folders:
        return None
    command = f"python scripts/adapter.py export {shlex.quote(str(folders[max(folders)]))} FOLDER"
    return {"steps": ", ".join(f"{step:,}" for step in sorted(folders)), "command": command}
