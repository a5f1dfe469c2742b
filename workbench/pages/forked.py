"""A fork beside the run that it comes from: both lines, and their difference since they parted, which has none of the jitter
that their common photos, noise and times cause."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from trainer.base.run_layout import Layout
from trainer.monitoring.metrics import mark_of
from workbench.pages import curves
from workbench.pages.curves import Curve
from workbench.pages.history import History, Series, read_starts


@dataclass(frozen=True)
class Fork:
    """What a page says of a fork. step: after which it parted from its run. charts: SVG figures."""

    step: int
    said: tuple[str, ...]
    charts: tuple[str, ...]


def forked(history: History, layout: Layout) -> Fork | None:
    """The fork that a run is; None of a run that began by itself."""
    if not layout.original.exists():
        return None
    original, (step, _) = History(layout.original).read(), read_starts(layout.phases)[0]
    rows, charts = [], []
    for field, name in (("held_out_loss", "held-out loss"), ("loss", "loss of a step")):
        if field == "loss":  # up to where one of the two changed what it measures, and not the other
            until = min((at - 1 for at, _ in history.levels.items() ^ original.levels.items() if at > step), default=math.inf)
        else:
            until = math.inf if mark_of(history.rows) == mark_of(original.rows) else step
        apart = [pair for pair in difference(history.series(field), original.series(field), step) if pair[0] <= until]
        if until == step and history.values(field):
            rows.append(f"Its {name} is not compared: it measures something else than that of the original.")
        if not apart:
            continue
        values = [value for _, value in apart if value is not None]
        at = f"at step {apart[-1][0]:,.0f}" if field == "held_out_loss" else f"on average over {len(values)} steps"
        value = values[-1] if field == "held_out_loss" else fmean(values)
        how = "equal to" if not any(values) else f"{'lower' if value < 0 else 'higher'} by {abs(value):.4g} than"
        rows.append(f"Its {name} is {how} that of the original {at}.")
        smooth = curves.averaged if field == "loss" else list
        both = {"this run": smooth(history.series(field)), "the original": smooth(original.series(field))}
        about = "This run less the original, at the same photos, noise and times: below 0 this run is better."
        charts += [
            curves.draw(f"{name[0].upper()}{name[1:]}, both runs", "", curves.lines_of(both)),
            curves.draw(f"Difference of the {name}", "", [Curve("difference", smooth(apart), "line0")], about=about),
        ]
    return Fork(step, tuple(rows), tuple(charts))


def difference(series: Series, original: Series, after: int) -> Series:
    """(step, value less the original's) of the steps beyond `after` at which both have one."""
    known = dict(original)
    both = ((step, value, known.get(step)) for step, value in series if step > after)
    return [(step, value - other) for step, value, other in both if value is not None and other is not None]
