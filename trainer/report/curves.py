"""metrics.jsonl -> series -> inline SVG line charts.

A chart never holds more than POINTS * 2 raw points, however long the run was: each slice of the run keeps its lowest
and its highest value, so a spike stays visible after thinning.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

POINTS = 400  # slices along the x axis; about one per CSS pixel and a half
WIDTH, HEIGHT = 640, 250  # of the viewBox
LEFT, RIGHT, TOP, BOTTOM = 62, 26, 12, 40  # margins around the plot, in viewBox units
LOG_ABOVE = 10.0  # a positive series spanning more than this ratio is easier to read on a logarithmic axis

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """How one field of metrics.jsonl is drawn."""

    field: str
    title: str
    unit: str
    smooth: bool = True
    may_be_log: bool = False


CURVES = (
    Curve("loss", "Loss", "per-sample mean"),
    Curve("lr", "Learning rate", "per update", smooth=False),
    Curve("grad_norm", "Gradient norm", "before clipping", may_be_log=True),
    Curve("seconds", "Time per step", "seconds", may_be_log=True),
    Curve("loss_scale", "Loss scale", "factor", smooth=False, may_be_log=True),
)
NOT_CURVES = {"step", "epoch", "images", "time"}  # positions and totals: they only grow
# Measured at fixed draws now and then, drawn together below: field -> what its line is called.
HELD_OUT = {"held_out_loss": "held-out photos", "trained_loss": "trained photos"}
QUARTERS = ("least noise", "second quarter", "third quarter", "most noise")


@dataclass(frozen=True)
class History:
    """The rows of metrics.jsonl; `unreadable` counts lines that are not JSON objects with a step (a torn last line)."""

    rows: tuple[dict, ...] = ()
    unreadable: int = 0

    def series(self, field: str) -> list[tuple[float, float | None]]:
        """(step, value) for each row that has the field; None where the value is null or not finite.

        What stands under "at_start" is of the step before.
        """
        return [(step, _finite(row[field])) for step, row in self._measured() if field in row]

    def part(self, field: str, place: int) -> list[tuple[float, float | None]]:
        """As `series`, of one value of a field that holds several."""
        rows = ((step, row[field]) for step, row in self._measured() if isinstance(row.get(field), list))
        return [(step, _finite(values[place])) for step, values in rows if place < len(values)]

    def _measured(self) -> Iterator[tuple[float, dict]]:
        for row in self.rows:
            if isinstance(row.get("at_start"), dict):
                yield row["step"] - 1, row["at_start"]
            yield row["step"], row

    def values(self, field: str) -> list[float]:
        return [value for _, value in self.series(field) if value is not None]


def read_metrics(path: Path) -> History:
    """Read metrics.jsonl; a missing file gives no rows."""
    if not path.exists():
        return History()
    rows, unreadable = [], 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict) and _finite(row.get("step")) is not None:
                rows.append(row)
            elif line.strip():
                unreadable += 1
    return History(tuple(rows), unreadable)


def draw_all(metrics: History) -> list[str]:
    """One <figure> for each field that has a value, the known ones first."""
    known = [curve.field for curve in CURVES]
    fields = dict.fromkeys(field for row in metrics.rows for field in row)
    others = [
        Curve(field, field.replace("_", " "), "", smooth=False, may_be_log=True)
        for field in fields
        if field not in known and field not in NOT_CURVES and field not in HELD_OUT and len(set(metrics.values(field))) > 1
    ]
    drawn = [draw(curve, metrics.series(curve.field)) for curve in (*CURVES, *others) if metrics.values(curve.field)]
    return [figure for figure in (*drawn[:1], *draw_held_out(metrics), *drawn[1:]) if figure]


def draw_held_out(metrics: History) -> list[str]:
    """The losses at fixed draws beside the smoothed loss of the training; those of the held-out photos by quarter of time."""
    measured = {name: series for field, name in HELD_OUT.items() if (series := metrics.series(field))}
    if not measured:
        return []
    losses = metrics.series("loss")
    window = smoothing_window(len(losses))
    beside = {"loss of the training, moving average": smooth(losses, window)} if window else {}
    field = next(field for field in HELD_OUT if metrics.series(field)).replace("_loss", "_quarters")
    quarters = {name: metrics.part(field, place) for place, name in enumerate(QUARTERS)}
    kind = next(iter(measured))
    return [
        draw_lines("Loss at fixed draws", "mean squared error", measured | beside),
        draw_lines(f"Loss of {kind} by time", "mean squared error", {n: s for n, s in quarters.items() if s}),
    ]


def draw_lines(title: str, unit: str, lines: Mapping[str, Sequence[tuple[float, float | None]]]) -> str:
    """One chart of several series, by name; "" where none has a value. A logarithmic axis where they are far apart."""
    lines = {name: series for name, series in lines.items() if any(value is not None for _, value in series)}
    if not lines:
        return ""
    values = [value for series in lines.values() for _, value in series if value is not None]
    steps = [step for series in lines.values() for step, _ in series]
    axes = Axes.over(steps, values, log=min(values) > 0 and max(values) / min(values) > LOG_ABOVE)
    ends = {name: [value for _, value in series if value is not None] for name, series in lines.items()}
    said = "; ".join(f"{name} from {own[0]:.4g} to {own[-1]:.4g}" for name, own in ends.items())
    legend = "".join(f'<i class="line{place}"></i>{escape(name)}' for place, name in enumerate(lines))
    drawn = [axes.lines(thin(series), f"line{place}") for place, series in enumerate(lines.values())]
    summary = f"{title} over steps {min(steps):g} to {max(steps):g}: {said}"
    return _figure(title, unit, f'<span class="legend">{legend}</span>', summary, axes, drawn)


def draw(curve: Curve, series: Sequence[tuple[float, float | None]]) -> str:
    """One chart: the raw values, their moving average over them, axes with ticks, and a text summary for readers."""
    values = [value for _, value in series if value is not None]
    low, high = min(values), max(values)
    axes = Axes.over([step for step, _ in series], values, log=curve.may_be_log and low > 0 and high / low > LOG_ABOVE)
    window = smoothing_window(len(values)) if curve.smooth else 0
    legend = ""
    if window:
        legend = f'<span class="legend"><i class="raw"></i>each step<i class="mean"></i>moving average, {window} steps</span>'
    summary = (
        f"{curve.title} over steps {axes.first:g} to {axes.last:g}: first {values[0]:.4g}, last {values[-1]:.4g}, "
        f"lowest {min(values):.4g}, highest {max(values):.4g}"
    )
    drawn = [axes.lines(thin(series), "raw" if window else "mean")]
    if window:
        # The last of each slice is enough for a curve that is smooth already.
        smoothed = smooth(series, window)
        drawn.append(axes.lines([part[-1] for part in _slices(smoothed)] if len(smoothed) > POINTS else smoothed, "mean"))
    return _figure(curve.title, curve.unit, legend, summary, axes, drawn)


@dataclass(frozen=True)
class Axes:
    """From values to places in the viewBox. Ticks enclose the values."""

    first: float
    last: float
    x_ticks: list[float]
    y_ticks: list[float]
    low: float
    high: float
    log: bool

    @staticmethod
    def over(steps: Sequence[float], values: Sequence[float], *, log: bool) -> Axes:
        low, high, first, last = min(values), max(values), min(steps), max(steps)
        y_ticks = _log_ticks(low, high) if log else _ticks(low, high, 5)
        x_ticks = [tick for tick in _ticks(first, last, 8, whole=True) if first <= tick <= last]
        return Axes(first, last, x_ticks, y_ticks, min(low, y_ticks[0]), max(high, y_ticks[-1]), log)

    def x_of(self, step: float) -> float:
        share = (step - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y_of(self, value: float) -> float:
        low, high = self.low, self.high
        share = math.log(value / low) / math.log(high / low) if self.log else (value - low) / (high - low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def lines(self, points: Sequence[tuple[float, float | None]], kind: str) -> str:
        drawn = []
        for run in _unbroken(points):
            placed = [(self.x_of(step), self.y_of(value)) for step, value in run]
            if len(placed) == 1:
                drawn.append(f'<circle class="{kind}" cx="{placed[0][0]:.1f}" cy="{placed[0][1]:.1f}" r="2.5"/>')
            else:
                text = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
                drawn.append(f'<polyline class="{kind}" points="{text}"/>')
        return "".join(drawn)


def _figure(title: str, unit: str, legend: str, summary: str, axes: Axes, drawn: Sequence[str]) -> str:
    unit = f' <span class="unit">{escape(unit)}</span>' if unit else ""
    parts = [
        f'<figure class="chart"><figcaption><b>{escape(title)}</b>{unit}{legend}</figcaption>',
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(summary)}">',
        f"<title>{escape(summary)}</title>",
    ]
    for tick in axes.y_ticks:
        y = axes.y_of(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_label(tick, axes.y_ticks)}</text>')
    base = HEIGHT - BOTTOM
    for tick in axes.x_ticks:
        x = axes.x_of(tick)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 4}"/>')
        parts.append(f'<text x="{x:.1f}" y="{base + 17}" text-anchor="middle">{tick:,.0f}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    scale = "step (logarithmic y axis)" if axes.log else "step"
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 5}" text-anchor="middle">{scale}</text>')
    return "".join([*parts, *drawn, "</svg></figure>"])


def smoothing_window(count: int) -> int:
    """Steps over which the moving average forgets: a twentieth of the run, 2 to 200; 0 (none) below 8 values."""
    return 0 if count < 8 else max(2, min(200, count // 20))


def smooth(series: Sequence[tuple[float, float | None]], window: int) -> list[Point]:
    """Exponential moving average with decay 1 - 1/window, corrected for its start from zero; it passes over gaps."""
    decay = 1 - 1 / window
    total = weight = 0.0
    result: list[Point] = []
    for step, value in series:
        if value is not None:
            total, weight = decay * total + (1 - decay) * value, decay * weight + (1 - decay)
            result.append((step, total / weight))
    return result


def thin(series: Sequence[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    """At most 2 * POINTS points: the lowest and highest of each slice, in order. A slice without values is a gap."""
    if len(series) <= 2 * POINTS:
        return list(series)
    kept: list[tuple[float, float | None]] = []
    for part in _slices(series):
        known = [point for point in part if point[1] is not None]
        if known:
            extremes = (min(known, key=lambda point: point[1]), max(known, key=lambda point: point[1]))
            kept += sorted(set(extremes))
        else:
            kept.append((part[0][0], None))
    return kept


def _slices(series: Sequence[tuple[float, float | None]]) -> list[Sequence[tuple[float, float | None]]]:
    bounds = [index * len(series) // POINTS for index in range(POINTS + 1)]
    return [series[start:end] for start, end in itertools.pairwise(bounds)]


def _unbroken(points: Sequence[tuple[float, float | None]]) -> list[list[Point]]:
    runs = itertools.groupby(points, key=lambda point: point[1] is not None)
    return [list(run) for known, run in runs if known]


def _ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """Round tick values (1, 2 or 5 times a power of ten apart) that enclose [low, high]."""
    if high <= low:  # one step, or a constant such as a constant learning rate: frame it
        margin = abs(low) * 0.5 or 1.0
        if whole:
            return [low]
        low, high = low - margin, high + margin
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    spacing = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    if whole:
        spacing = max(1.0, spacing)
    first = math.floor(low / spacing + 1e-9)
    last = math.ceil(high / spacing - 1e-9)
    return [index * spacing for index in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten that enclose [low, high], every second or third of them on a long axis."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    every = max(1, math.ceil((last - first) / 6))
    return [10.0**exponent for exponent in range(first, last + every, every)]


def _label(tick: float, ticks: Sequence[float]) -> str:
    largest = max(abs(t) for t in ticks)
    if abs(tick) < largest * 1e-9:
        return "0"
    if 1e-3 <= largest < 1e6:
        return f"{tick:,g}"
    exponent = math.floor(math.log10(abs(tick)) + 1e-9)
    return f"{tick / 10.0**exponent:.3g}e{exponent}"


def _finite(value: object) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None
