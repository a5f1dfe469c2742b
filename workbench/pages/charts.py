"""Charts of a run from its history, the heat map of its adapter's blocks, and a fork beside its original."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from trainer.base.run_layout import Layout
from trainer.monitoring.course import PHOTOS, is_finite
from trainer.monitoring.metrics import mark_of
from workbench.pages import curves
from workbench.pages.curves import Curve
from workbench.pages.history import NOTHING, Events, History, Series, read_starts

HELD_OUT = {"held_out_loss": "held-out photos", "trained_loss": "trained photos, same draws"}
QUARTERS = ("least noise", "second quarter", "third quarter", "most noise")
# Positions and totals, and fields with a chart of their own or a place elsewhere.
NOT_CURVES = {"step", "epoch", "images", "time", "skipped", "images_per_second", *HELD_OUT}
SHADES = (0.0005, 0.002, 0.01, 0.03, 0.1, 0.3)  # ||dW|| / ||W||: lower edges of the darker tiles


def draw_all(history: History, events: Events = NOTHING) -> list[str]:
    """The <figure> of each chart with a value, the loss first."""
    whole, levels = history.series("step"), [step - 1 for step in history.levels]

    def single(field: str, title: str, unit: str, about: str = "", *, smooth: bool = False, scale: float = 1.0) -> str:
        series = [(step, value and value * scale) for step, value in history.series(field)]
        cuts = levels if field == "grad_norm" else ()
        lines = smoothed(series, cuts) if smooth else [Curve(title.lower(), series, "line0")]
        return curves.draw(title, unit, lines, events=events, range_of=whole, about=about)

    rates = {"first group": history.series("lr"), "highest of a group": history.series("highest_lr")}
    figures = [
        _loss(history, events),
        _quarters(history, events),
        single("grad_norm", "Gradient norm", "before clipping", "A rise that stays is a rate that is too high.", smooth=True),
        curves.draw("Learning rate", "per update", curves.lines_of(rates), events=events, range_of=whole),
        single("weight_change", "Change of the weights", "share of a layer's own", "Of the layer that moved most."),
        single("peak_bytes", "Peak memory", "GiB", scale=2.0**-30),
        single("seconds", "Time of a step", "seconds", smooth=True),
        single("loss_scale", "Loss scale", "factor"),
    ]
    charted = {"loss", "grad_norm", "lr", "highest_lr", "weight_change", "peak_bytes", "seconds", "loss_scale", *NOT_CURVES}
    others = [field for field in history.fields if field not in charted and len(set(history.values(field))) > 1]
    figures += [single(field, field.replace("_", " ").capitalize(), "") for field in others]
    return [figure for figure in figures if figure]


def smoothed(series: Series, cuts: Sequence[int] = ()) -> list[Curve]:
    """The values, faint, below their moving average, which restarts after each of the steps `cuts`."""
    window, raw = curves.smoothing_window(len(series)), curves.broken(series, cuts)
    if not window:
        return [Curve("each step", raw, "line0")]
    parts = itertools.pairwise([-math.inf, *cuts, math.inf])
    averages = [curves.smooth([point for point in series if first < point[0] <= last], window) for first, last in parts]
    average = curves.broken(curves.last_of_slices(list(itertools.chain(*averages))), cuts)
    return [Curve("each step", raw, "raw"), Curve(f"moving average, {window} steps", average, "line0")]


def breaks(history: History) -> list[int]:
    """The steps after which the measured photos or draws change."""
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


def _quarters(history: History, events: Events) -> str:
    field, photos = ("held_out", "held-out") if history.series("held_out_loss") else ("trained", "trained")
    cuts = breaks(history)
    quarters = {name: history.series(f"{field}_quarters/{place}") for place, name in enumerate(QUARTERS, 1)}
    parts = {name: curves.broken(series, cuts) for name, series in quarters.items()}
    about = f"Of the {photos} photos. Details are decided at little noise, subjects and colours at much."
    return curves.draw("Loss by timestep quarter", "", curves.lines_of(parts), events=events, about=about)


def tiles(changes: Mapping[str, float | None]) -> dict[str, list[tuple[str, int, str]]]:
    """The heat map: (name, number of its shade, change in percent) of each block by its container ("unet.down_blocks").
    changes: ||dW|| / ||W|| of the layer that moved most, by block, in order."""
    rows: dict[str, list[tuple[str, int, str]]] = {}
    for block, change in changes.items():
        container, _, last = block.rpartition(".")
        group, name = (container, last) if last.isdigit() else (container or block, last or block)
        shade = sum(change >= edge for edge in SHADES) if is_finite(change) else len(SHADES)
        rows.setdefault(group, []).append((name, shade, _percent(change)))
    return rows


def _percent(change: float | None) -> str:
    if not is_finite(change):
        return "not finite"
    share = 100 * change
    return f"{share:.0f}%" if share >= 10 else f"{share:.1f}%" if share >= 1 else f"{share:.2f}%"


def legend() -> list[str]:
    """The range of each shade of the heat map."""
    return [f"below {100 * SHADES[0]:g}%", *(f"{100 * edge:g}%" for edge in SHADES[:-1]), f"{100 * SHADES[-1]:g}% and more"]


@dataclass(frozen=True)
class Fork:
    """A fork beside its original. step: the last common one. sentences: on their losses. charts: SVG figures of both, and of
    their difference, free of the jitter that their common photos, noise and times cause."""

    step: int
    sentences: tuple[str, ...]
    charts: tuple[str, ...]


def fork_of(history: History, layout: Layout) -> Fork | None:
    """The comparison of a forked run with its original; None for a run that is no fork."""
    if not layout.original.exists():
        return None
    original, (step, _) = History(layout.original).read(), read_starts(layout.phases)[0]
    sentences, charts = [], []
    for field, name in (("held_out_loss", "held-out loss"), ("loss", "loss of a step")):
        if field == "loss":  # up to where one of the two changed what it measures, and not the other
            until = min((at - 1 for at, _ in history.levels.items() ^ original.levels.items() if at > step), default=math.inf)
        else:
            until = math.inf if mark_of(history.rows) == mark_of(original.rows) else step
        change = [point for point in difference(history.series(field), original.series(field), step) if point[0] <= until]
        if until == step and history.values(field):
            sentences.append(f"Its {name} is not compared: it measures something else than that of the original.")
        if not change:
            continue
        values = [value for _, value in change if value is not None]
        at = f"at step {change[-1][0]:,.0f}" if field == "held_out_loss" else f"on average over {len(values)} steps"
        value = values[-1] if field == "held_out_loss" else fmean(values)
        relation = "equal to" if not any(values) else f"{'lower' if value < 0 else 'higher'} by {abs(value):.4g} than"
        sentences.append(f"Its {name} is {relation} that of the original {at}.")
        smooth = curves.averaged if field == "loss" else list
        series = {"this run": smooth(history.series(field)), "the original": smooth(original.series(field))}
        about = "This run less the original, at the same photos, noise and times: below 0 this run is better."
        charts += [
            curves.draw(f"{name[0].upper()}{name[1:]}, both runs", "", curves.lines_of(series)),
            curves.draw(f"Difference of the {name}", "", [Curve("difference", smooth(change), "line0")], about=about),
        ]
    return Fork(step, tuple(sentences), tuple(charts))


def difference(series: Series, original: Series, after: int) -> Series:
    """(step, value less the original's) for each step beyond `after` at which both have one."""
    others = dict(original)
    pairs = ((step, value, others.get(step)) for step, value in series if step > after)
    return [(step, value - other) for step, value, other in pairs if value is not None and other is not None]
