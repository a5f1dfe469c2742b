"""Several runs on one page: where each stands, the same axes, the config keys that differ, samples beside each other."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any
from urllib.parse import quote

from trainer.base.errors import NonFiniteError
from trainer.base.progress import duration
from trainer.monitoring.course import PHOTOS, moved_by
from trainer.report import curves
from trainer.report.curves import Curve
from trainer.report.gallery import left_out, shot
from trainer.report.history import History, Series, Standing
from trainer.report.live import CAUSES, quiet_for
from trainer.report.page import RELOAD_SECONDS, document
from trainer.report.samples import Row, Samples
from trainer.report.status import State, judged
from trainer.report.tables import grid, section, size

DRAWN = 8  # lines of a chart that can still be told apart
ALL = 1e15  # seconds: of a page that nobody expects to be written again
OWN = {"run.name", "run.output_dir", "run.stop_after", "data.cache_dir"}  # keys that say nothing of the training


@dataclass(frozen=True)
class Seen:
    """A run as its files tell it. name: unique on the page. config: the resolved one, by full key. kept: steps whose adapter
    can be taken."""

    name: str
    config: Mapping[str, Any]
    history: History
    samples: Samples
    kept: Sequence[int]
    standing: Standing

    @property
    def link(self) -> str:
        return f"{quote(self.name)}/"

    @property
    def total(self) -> int | None:
        """Steps of the whole run, where it is told."""
        given = self.config.get("run.max_steps")
        return self.standing.total or (given if isinstance(given, int) else None)

    def state(self, now: float) -> State:
        """As its last start ended. One that has told no end is at work, or was killed: by the clock of its last step, as its
        own page does it."""
        step, total, told = self.history.step, self.total or self.history.step, self.standing
        if told.why:
            return State("ended", total, why=told.why, finite=told.why != CAUSES[NonFiniteError])
        # After the last step there are still samples and files to make. A run of an older program told neither.
        if self.total is not None and step >= self.total and (told.ended or told.started is None):
            return State("finished", total)
        times = self._times()
        silence = max((after - before for before, after in pairwise(times)), default=0.0)
        alive = not told.ended and bool(times) and now - times[-1] < quiet_for(silence)
        return State("training" if alive else "stopped", total)

    def _times(self) -> list[float]:
        """Unix times at which its last start was heard of: when it began, and after each step. Of a run that told no start
        the last step's."""
        times, started = self.history.series("time"), self.standing.started
        if started is None:
            return [time for _, time in times if time is not None][-1:]
        return [started, *(time for step, time in times if step > self.standing.begun and time is not None)]


def compare(runs: Sequence[Seen], unread: Mapping[str, str], now: float | None = None) -> str:
    """The page as text. unread: by name, why the files of a run could not be read. now: Unix time; None: the present."""
    now = time.time() if now is None else now
    alive, groups = any(run.state(now).alive for run in runs), _groups(runs)
    parts = {
        "Runs": _table(groups, now) + _left_out(runs, unread),
        "Curves": _curves(groups),
        "Samples": _samples(runs),
        "What differs in their configs": _differences(runs),
    }
    title = f"{len(runs)} run{'' if len(runs) == 1 else 's'}"
    said = "at least one of them is training" if alive else "none of them is training now"
    kind = "training" if alive else "finished"
    body = [
        f'<header><p class="kicker">Comparison</p><h1>{title}</h1>',
        f'<p class="state {kind}" id="state"><i></i><span>{title}: {said}.</span></p></header>',
        "<main>",
        *(section(name, part) for name, part in parts.items()),
        "</main>",
    ]
    # It is made anew whenever it is asked for: also a run that starts later comes to be seen.
    told = f' data-written="{now:.0f}" data-quiet="{ALL:.0f}" data-reload="{RELOAD_SECONDS}"'
    return document(title, "comparison", "\n".join(body), told)


def _groups(runs: Sequence[Seen]) -> list[list[Seen]]:
    """Runs that differ in their seed alone are one group, in the order of their first ones. One without a config is alone.

    What they measure is the same, too: a seed changes no held-out photo, the data may.
    """
    groups: dict[Any, list[Seen]] = {}
    for place, run in enumerate(runs):
        told = frozenset((key, repr(value)) for key, value in run.config.items() if key not in {*OWN, "run.seed"})
        groups.setdefault((told, _mark(run.history)) if told else place, []).append(run)
    return list(groups.values())


def _table(groups: Sequence[Sequence[Seen]], now: float) -> str:
    if not groups:
        return '<p class="soft">No run has written anything here yet.</p>'
    head = [
        "Run",
        "State",
        "Verdict",
        "Held-out loss",
        "Loss, averaged",
        "Weights changed by",
        "Time of a step",
        "Peak memory",
    ]
    rows = []
    for place, group in enumerate(groups):
        if len(group) > 1:
            ends = [found[-1] for run in group if (found := run.history.values("held_out_loss"))]
            band = f", held-out loss {min(ends):.4g} to {max(ends):.4g}" if ends else ""
            said = f"{len(group)} runs that differ in their seed alone{band}"
            rows.append([f'<th colspan="{len(head)}" scope="rowgroup" class="soft">{said}</th>'])
        rows += [_row(run, f"line{place}" if place < DRAWN else "", now) for run in group]
    return grid([f'<th scope="col">{title}</th>' for title in head], rows, ' class="runs"')


def _row(run: Seen, line: str, now: float) -> list[str]:
    """line: as of Curve; "" where it has none."""
    history, state = run.history, run.state(now)
    judgement = judged(history, state, kept=run.kept, levers="the learning rate")
    link = f'<a href="{escape(run.link)}report.html">{escape(run.name)}</a>'
    swatch = f'<i class="swatch {line}"></i>' if line else ""
    best = f'<div class="soft">{escape(judgement.best)}</div>' if judgement.best else ""
    said = f'<td class="said">{escape(judgement.title)}{best}</td>'
    cells = [f"<td>{swatch}<b>{link}</b></td>", f"<td>{escape(_state(run, state, now))}</td>", said]
    return cells + [f'<td class="number">{number}</td>' for number in _numbers(history)]


def _left_out(runs: Sequence[Seen], unread: Mapping[str, str]) -> str:
    lines = {run.name: run.history.unreadable for run in runs if run.history.unreadable}
    said = [f"{name}: {many} line(s) of metrics.jsonl could not be read and are left out." for name, many in lines.items()]
    said += [f"{run.name}: {left_out(run.samples)}" for run in runs if run.samples.unreadable]
    said += [f"{name} is left out. Its files could not be read: {why}." for name, why in unread.items()]
    return "".join(f'<p class="soft">{escape(text)}</p>' for text in said)


def _state(run: Seen, state: State, now: float) -> str:
    step = run.history.step
    at = f"step {step:,}" + (f" of {run.total:,}" if run.total else "")
    last = run.history.last("time")
    if state.kind == "finished":
        return f"finished: {at}"
    if state.kind == "ended":
        return f"ended at {at}: {state.why}"
    if last is None:
        return "no step yet"
    return f"{at}, the last one {duration(max(0.0, now - last))} ago"


def _numbers(history: History) -> list[str]:
    held_out, losses = history.values("held_out_loss"), history.series("loss")
    window = curves.smoothing_window(len(losses))
    averaged = curves.smooth(losses, window)[-1][1] if window else history.last("loss")
    change, seconds, peaks = history.last("weight_change"), history.values("seconds")[-200:], history.values("peak_bytes")
    return [
        f"{held_out[-1]:.4g}, lowest {min(held_out):.4g}" if held_out else "-",
        "-" if averaged is None else f"{averaged:.4g}",
        "-" if change is None else moved_by(change),
        f"{sorted(seconds)[len(seconds) // 2]:.3g} s" if seconds else "-",
        size(int(max(peaks))) if peaks else "-",
    ]


def _curves(groups: Sequence[Sequence[Seen]]) -> str:
    runs = [run for group in groups for run in group]
    steps: list[tuple[float, float | None]] = [(0, None), (max((run.history.step for run in runs), default=0), None)]

    def chart(
        title: str, unit: str, field: str, about: str = "", *, smooth: bool = False, scale: float = 1.0, wide: bool = False
    ) -> str:
        def of(run: Seen) -> Series:
            series = run.history.series(field)
            window = curves.smoothing_window(len(series)) if smooth else 0
            return curves.smooth(series, window) if window else [(step, value and value * scale) for step, value in series]

        lines = []
        for place, group in enumerate(groups[:DRAWN]):
            found = [of(run) for run in group]
            drawn = curves.spread(found) if len(group) > 1 else found
            middle, *band = [curves.last_of_slices(series) for series in drawn] if smooth else drawn
            name = f"{group[0].name} ({len(group)} runs)" if band else group[0].name
            lines.append(Curve(name, middle, f"line{place}", band))
        return curves.draw(title, unit, [line for line in lines if line.series], about=about, range_of=steps, wide=wide)

    drawn = [
        chart("Held-out loss", "", "held_out_loss", _held_out_about(runs), wide=True),
        chart("Loss", "moving average", "loss", smooth=True),
        chart("Gradient norm", "moving average, before clipping", "grad_norm", smooth=True),
        chart("Learning rate", "per update", "lr"),
        chart("Change of the weights", "share of a layer's own", "weight_change"),
        chart("Time of a step", "seconds, moving average", "seconds", smooth=True),
        chart("Peak memory", "GiB", "peak_bytes", scale=2.0**-30),
    ]
    if not any(drawn):
        return '<p class="soft">No step has been recorded yet.</p>'
    notes = []
    if any(len(group) > 1 for group in groups[:DRAWN]):
        notes.append(
            "Runs that differ in their seed alone are one line, their median, in a band from the lowest to the highest."
        )
    if len(groups) > DRAWN:
        notes.append(f"Only the first {DRAWN} lines are drawn.")
    return f'<div class="charts">{"".join(drawn)}</div>' + "".join(f'<p class="soft">{note}</p>' for note in notes)


def _held_out_about(runs: Sequence[Seen]) -> str:
    """A held-out loss tells runs apart only where they measure the same photos at the same draws."""
    marks = {mark for run in runs if (mark := _mark(run.history))}
    if len(marks) > 1:
        return "These runs measure other photos, captions or draws: compare each with itself, not with one another."
    return "The same photos, captions and draws in all of them: the lower the better."


def _mark(history: History) -> Any:
    """On which photos was measured last; None where nothing was."""
    starts = (row["at_start"][PHOTOS] for row in history.rows if PHOTOS in (row.get("at_start") or {}))
    newest = history.newest(PHOTOS)
    return newest[1] if newest else next(starts, None)


def _samples(runs: Sequence[Seen]) -> str:
    """A card for each thing that was asked for, with the newest image of each run that drew it."""
    cards: dict[tuple[str, str], list[tuple[Seen, Row]]] = {}
    for run in runs:
        for row in run.samples.rows:
            cards.setdefault((row.prompt, row.detail), []).append((run, row))
    if not cards:
        return '<p class="soft">No sample is drawn yet.</p>'
    several = [(key, drawn) for key, drawn in cards.items() if len(drawn) > 1]
    alone = [(key, drawn) for key, drawn in cards.items() if len(drawn) == 1]
    parts = [f'<div class="cards compared">{"".join(_card(place, *card) for place, card in enumerate(several))}</div>']
    if alone:
        inner = "".join(_card(place, *card) for place, card in enumerate(alone, len(several)))
        count = f"{len(alone)} that only one run was asked for"
        parts.append(f'<details class="gone"><summary>{count}</summary><div class="cards compared">{inner}</div></details>')
    return "".join(parts)


def _card(place: int, asked: tuple[str, str], drawn: Sequence[tuple[Seen, Row]]) -> str:
    shots = []
    for run, row in drawn:
        step = max(row.images)
        shots.append(
            shot(row, f"{run.name}, {f'step {step:,}' if step else 'before training'}", row.images[step], None, run.link)
        )
    truth = next(((run, row) for run, row in drawn if row.truth), None)
    if truth is not None and truth[1].truth is not None:
        shots.append(shot(truth[1], "the truth", truth[1].truth, None, truth[0].link))
    return (
        f'<article class="card" data-row="{place}"><h3>{escape(asked[0])}</h3><p class="soft">{escape(asked[1])}</p>'
        f'<div class="sides many">{"".join(shots)}</div></article>'
    )


def _differences(runs: Sequence[Seen]) -> str:
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in OWN)
    differ = [key for key in keys if len({repr(run.config.get(key)) for run in runs}) > 1]
    if not differ:
        return (
            '<p class="soft">Nothing but names and folders.</p>' if len(runs) > 1 else '<p class="soft">There is one run.</p>'
        )
    head = [f'<th scope="col">{escape(title)}</th>' for title in ("Key", *(run.name for run in runs))]
    rows = []
    for key in differ:
        values = [run.config.get(key) for run in runs]
        cells = [
            f"<td>{'<span class=soft>not set</span>' if v is None else f'<code>{escape(str(v))}</code>'}</td>" for v in values
        ]
        rows.append([f'<th scope="row"><code>{escape(key)}</code></th>', *cells])
    return grid(head, rows)
