"""Line charts of series by step: inline SVG for the lines, text in HTML, so that letters keep their size at every width."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from statistics import median

from workbench.pages.history import NOTHING, Events, Series
from workbench.pages.rendering import render

POINTS = 300  # slices along the x axis: about one per two CSS pixels
SIDE = 1000  # viewBox units; stretched to the plot
LOG_ABOVE = 10.0  # largest / smallest value beyond which positive values get a logarithmic axis

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """A series to draw. kind: CSS class: "raw" is faint; "line0" to "line7" differ in colour and dashes. band: the lowest
    and the highest values by step of several series whose median this one is; else empty. over: the unit of its steps."""

    name: str
    series: Series
    kind: str
    band: Sequence[Series] = ()
    over: str = "steps"


@dataclass(frozen=True)
class Axes:
    """The map from values to the viewBox. Ticks enclose the values; on a logarithmic axis they lie within them."""

    first: float
    last: float
    x_ticks: list[float]
    y_ticks: list[float]
    low: float
    high: float
    log: bool

    @staticmethod
    def over(steps: Sequence[float], values: Sequence[float], *, log: bool) -> Axes:
        """Axes that span all steps and values. log: whether the values' axis is logarithmic."""
        low, high, first, last = min(values), max(values), min(steps), max(steps)
        y_ticks = log_ticks(low, high) if log else ticks(low, high, 4)
        x_ticks = [tick for tick in ticks(first, last, 5, whole=True) if first <= tick <= last]
        if log:  # ends at the values: a decade without any would take a third of the height
            y_ticks = [tick for tick in y_ticks if low <= tick <= high]
            return Axes(first, last, x_ticks, y_ticks, low, high, log)
        return Axes(first, last, x_ticks, y_ticks, min(low, y_ticks[0]), max(high, y_ticks[-1]), log)

    def x_of(self, step: float) -> float:
        """The x coordinate of a step."""
        return SIDE * ((step - self.first) / (self.last - self.first) if self.last > self.first else 0.5)

    def y_of(self, value: float) -> float:
        """The y coordinate of a value, from the top."""
        low, high = self.low, self.high
        share = math.log(value / low) / math.log(high / low) if self.log else (value - low) / (high - low)
        return SIDE * (1 - share)

    def path(self, curve: Curve) -> str:
        """The SVG path, with a gap at each missing value. A lone value is a dot: a line of no length with round ends."""
        parts = itertools.groupby(curve.series, key=lambda point: point[1] is not None)
        runs = [list(run) for has_value, run in parts if has_value]
        return "".join(f"M{self._through(run)}{'h0' * (len(run) == 1)}" for run in runs)

    def band(self, curve: Curve) -> str:
        """The SVG path around a curve's band; "" without one, or if it has a single point."""
        low, high = ([(s, v) for s, v in series if v is not None] for series in curve.band or ([], []))
        return f"M{self._through([*low, *reversed(high)])}" if len(low) > 1 else ""

    def _through(self, points: Sequence[Point]) -> str:
        return "L".join(f"{self.x_of(step):.1f} {self.y_of(value):.1f}" for step, value in points)


def draw(
    title: str,
    unit: str,
    lines: Sequence[Curve],
    *,
    events: Events = NOTHING,
    range_of: Series = (),
    about: str = "",
    wide: bool = False,
) -> str:
    """The HTML of one chart; "" if no line has a value. range_of: a series whose steps the x axis spans, too. about: one
    sentence below the title that explains the chart. wide: with the rails of events."""
    lines = [line for line in lines if any(value is not None for _, value in line.series)]
    if not lines:
        return ""
    known_values = {line.name: [value for _, value in line.series if value is not None] for line in lines}
    steps = [step for line in lines for step in (line.series[0][0], line.series[-1][0])]
    steps += [range_of[0][0], range_of[-1][0]] if range_of else []
    steps += [mark.step for mark in events.marks if mark.step < min(steps)] if wide else []
    text = "; ".join(f"{name} from {values[0]:.4g} to {values[-1]:.4g}" for name, values in known_values.items())
    # From here on a long run costs what a short one does.
    lines = [replace(line, series=thin(line.series), band=[thin(series) for series in line.band]) for line in lines]
    values = [value for line in lines for series in (line.series, *line.band) for _, value in series if value is not None]
    axes = Axes.over(steps, values, log=min(values) > 0 and max(values) / min(values) > LOG_ABOVE)
    summary = f"{title} over {lines[0].over} {axes.first:g} to {axes.last:g}: {text}"
    rails = {
        name: [f"{axes.x_of(step):.0f}" for step in steps if axes.first <= step <= axes.last]
        for name, steps in events.steps.items()
    }
    return render(
        "chart.html", title=title, unit=", ".join(filter(None, [unit, "logarithmic" if axes.log else ""])), lines=lines,
        about=about, wide=wide, axes=axes, summary=summary, marks=events.marks, side=SIDE, label=label,
        bounds=json.dumps([axes.first, axes.last, axes.low, axes.high, axes.log]),
        rails={name: strokes for name, strokes in rails.items() if strokes},
    )  # fmt: skip


def smoothing_window(count: int) -> int:
    """The time constant of the moving average, in steps: a twentieth of the run, 2 to 200; 0 (none) below 8 values."""
    return 0 if count < 8 else max(2, min(200, count // 20))


def smooth(series: Series, window: int) -> list[Point]:
    """The exponential moving average with decay 1 - 1/window, corrected for its start at zero; gaps are skipped."""
    decay = 1 - 1 / window
    total = weight = 0.0
    result: list[Point] = []
    for step, value in series:
        if value is not None:
            total, weight = decay * total + (1 - decay) * value, decay * weight + (1 - decay)
            result.append((step, total / weight))
    return result


def spread(many: Sequence[Series]) -> tuple[list[Point], list[Point], list[Point]]:
    """(median, lowest, highest) by step, over the series with a value there."""
    values_at: dict[float, list[float]] = {}
    for step, value in itertools.chain.from_iterable(many):
        if value is not None:
            values_at.setdefault(step, []).append(value)
    by_step = sorted(values_at.items())
    middle, low, high = ([(step, statistic(values)) for step, values in by_step] for statistic in (median, min, max))
    return middle, low, high


def averaged(series: Series) -> Series:
    """The moving average of a series, or the series itself if it is too short."""
    window = smoothing_window(len(series))
    return smooth(series, window) if window else series


def last_of_slices(series: Series) -> Series:
    """The last point of each slice: enough for a curve that is smooth already."""
    return [part[-1] for part in _slices(series)] if len(series) > POINTS else series


def thin(series: Series) -> Series:
    """The series in at most 2 * POINTS points: the lowest and highest of each slice, so that spikes and gaps stay."""
    if len(series) <= 2 * POINTS:
        return series
    points: list[tuple[float, float | None]] = []
    for part in _slices(series):
        values = [point for point in part if point[1] is not None]
        extremes = {at_end(values, key=itemgetter(1)) for at_end in (min, max)} if values else {(part[0][0], None)}
        points += sorted(extremes)
    return points


def broken(series: Series, cuts: Sequence[float]) -> Series:
    """The series with a gap after each of the steps `cuts`: the parts are different curves."""
    if not cuts:
        return series
    parts = []
    for (step, value), following in itertools.zip_longest(series, series[1:]):
        parts.append((step, value))
        if following and any(step <= at < following[0] for at in cuts):
            parts.append((step, None))
    return parts


def _slices(series: Series) -> list[Series]:
    bounds = [index * len(series) // POINTS for index in range(POINTS + 1)]
    return [series[start:end] for start, end in itertools.pairwise(bounds)]


def ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """Round tick values (1, 2 or 5 times a power of ten apart) that enclose [low, high]. whole: integers alone."""
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


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten around [low, high], every second or third of them on a long axis; 2 and 5 times them on a short one."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    powers = math.floor(math.log10(high) + 1e-9) - math.ceil(math.log10(low) - 1e-9) + 1  # within [low, high]
    every, factors = max(1, math.ceil((last - first) / 4)), {0: (1, 2, 5), 1: (1, 2, 5), 2: (1, 3)}.get(powers, (1,))
    return [factor * 10.0**exponent for exponent in range(first, last + every, every) for factor in factors]


def label(tick: float, ticks: Sequence[float]) -> str:
    """A tick's value in the notation that suits all ticks."""
    largest = max(abs(t) for t in ticks)
    if abs(tick) < largest * 1e-9:
        return "0"
    if 1e-3 <= largest < 1e6:
        return f"{tick:,g}"
    exponent = math.floor(math.log10(abs(tick)) + 1e-9)
    return f"{tick / 10.0**exponent:.3g}e{exponent}"


def lines_of(parts: Mapping[str, Series]) -> list[Curve]:
    """A curve of each series by name, in the order of the colours."""
    return [Curve(name, series, f"line{index}") for index, (name, series) in enumerate(parts.items())]
