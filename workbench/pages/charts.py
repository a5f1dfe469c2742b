"""Which charts a run has, from its history."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainer.monitoring.course import PHOTOS
from workbench.pages import curves
from workbench.pages.curves import Curve
from workbench.pages.history import NOTHING, Events, History, Series

HELD_OUT = {"held_out_loss": "held-out photos", "trained_loss": "trained photos, same draws"}
QUARTERS = ("least noise", "second quarter", "third quarter", "most noise")
# Positions, totals, and what has a chart of its own or a place elsewhere.
NOT_CURVES = {"step", "epoch", "images", "time", "skipped", "images_per_second", *HELD_OUT}


def draw_all(history: History, events: Events = NOTHING) -> list[str]:
    """One <figure> for each that has a value, the loss first."""
    marks = Events(events.marks)
    whole, levels = history.series("step"), [step - 1 for step in history.levels]

    def single(field: str, title: str, unit: str, about: str = "", *, smooth: bool = False, scale: float = 1.0) -> str:
        series = [(step, value and value * scale) for step, value in history.series(field)]
        cuts = levels if field == "grad_norm" else ()
        lines = smoothed(series, cuts) if smooth else [Curve(title.lower(), series, "line0")]
        return curves.draw(title, unit, lines, events=marks, range_of=whole, about=about)

    figures = [
        _loss(history, events),
        _quarters(history, marks),
        single("grad_norm", "Gradient norm", "before clipping", "A rise that stays is a rate that is too high.", smooth=True),
        curves.draw("Learning rate", "per update", _rates(history), events=marks, range_of=whole),
        single("weight_change", "Change of the weights", "share of a layer's own", "Of the layer that moved most."),
        single("peak_bytes", "Peak memory", "GiB", scale=2.0**-30),
        single("seconds", "Time of a step", "seconds", smooth=True),
        single("loss_scale", "Loss scale", "factor"),
    ]
    known = {"loss", "grad_norm", "lr", "highest_lr", "weight_change", "peak_bytes", "seconds", "loss_scale", *NOT_CURVES}
    others = [field for field in history.fields if field not in known and len(set(history.values(field))) > 1]
    figures += [single(field, field.replace("_", " ").capitalize(), "") for field in others]
    return [figure for figure in figures if figure]


def remaining(costs: Mapping[str, Sequence[float]]) -> str:
    """The chart of what formats change of a prediction without their first 0, 1, 2, ... layers. costs: percent, by
    format."""
    series = {name: list(enumerate(values)) for name, values in costs.items()}
    lines = [replace(line, over="excluded layers") for line in curves.lines_of(series)]
    about = "Of all layers at the left; further right without the costliest ones, as many as stand below."
    return curves.draw("Change of the prediction", "%", lines, about=about, wide=True)


def smoothed(series: Series, cuts: Sequence[int] = ()) -> list[Curve]:
    """The values, faint, with their moving average over them, which begins anew after each of the steps `cuts`."""
    window, raw = curves.smoothing_window(len(series)), curves.broken(series, cuts)
    if not window:
        return [Curve("each step", raw, "line0")]
    parts = itertools.pairwise([-math.inf, *cuts, math.inf])
    averages = [curves.smooth([at for at in series if first < at[0] <= last], window) for first, last in parts]
    average = curves.broken(curves.last_of_slices(list(itertools.chain(*averages))), cuts)
    return [Curve("each step", raw, "raw"), Curve(f"moving average, {window} steps", average, "line0")]


def breaks(history: History) -> list[int]:
    """The steps after which other photos or draws are measured than before."""
    marks = [(row["step"], row["at_start"][PHOTOS]) for row in history.rows if PHOTOS in row.get("at_start", {})]
    return [step - 1 for step, mark in marks[1:]]


def _loss(history: History, events: Events) -> str:
    cuts = breaks(history)
    fixed = [
        Curve(name, curves.broken(history.series(field), cuts), f"line{place}")
        for place, (field, name) in enumerate(HELD_OUT.items(), 1)
    ]
    about = "The loss of a step jitters: other photos, noise and times each time."
    if history.series("held_out_loss"):
        about += " That of held-out photos does not. Where it rises while that of trained photos falls, photos are memorised."
    if history.levels:
        about += " Where its line is broken, what it measures was changed: the parts are no one curve."
    lines = [*smoothed(history.series("loss"), [step - 1 for step in history.levels]), *fixed]
    return curves.draw("Loss", "", lines, events=events, about=about, wide=True)


def _quarters(history: History, marks: Events) -> str:
    field, whose = ("held_out", "held-out") if history.series("held_out_loss") else ("trained", "trained")
    cuts = breaks(history)
    quarters = {name: history.series(f"{field}_quarters/{place}") for place, name in enumerate(QUARTERS, 1)}
    parts = {name: curves.broken(series, cuts) for name, series in quarters.items()}
    about = f"Of the {whose} photos. Details are decided at little noise, subjects and colours at much."
    return curves.draw("Loss by timestep quarter", "", curves.lines_of(parts), events=marks, about=about)


def _rates(history: History) -> list[Curve]:
    named: dict[str, Series] = {"first group": history.series("lr")}
    if highest := history.series("highest_lr"):
        named["highest of a group"] = highest
    return curves.lines_of(named)
