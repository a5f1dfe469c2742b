"""Several runs on one page: where each stands, the same axes, the config keys that differ, samples beside each other."""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, pairwise
from statistics import median
from typing import Any
from urllib.parse import quote

from trainer.base.errors import CAUSES, NonFiniteError
from trainer.base.progress import Sign, last_sign
from trainer.base.run_layout import Layout
from trainer.config.tables import ValidationTable
from trainer.monitoring.course import moved_by
from trainer.monitoring.metrics import mark_of
from workbench.compare.paired import BySeed, Difference, Pair, corrected
from workbench.pages import curves
from workbench.pages.curves import Curve
from workbench.pages.diagnosis import series
from workbench.pages.history import History, Series, Standing, read_standing
from workbench.pages.rendering import document
from workbench.pages.samples import Row, Samples, read_samples
from workbench.pages.settings import values
from workbench.pages.status import Judgement, State, judged
from workbench.pages.tables import size
from workbench.pages.thumbnails import Thumbnails

# Keys by which the held-out loss has another unit or another input: what is predicted, from what, and how the model is told.
UNITS = re.compile(
    r"(model\.(family|path|config|revision|variant|prediction|zero_terminal_snr|components\..*\.path)|objective\.guidance"
    r"|data\.((sources\.\d+\.)?resolution.*|bucket_step|max_aspect|crop|enlarge|background|text_length|clip_chunks|weighted_captions))$"
)
DRAWN = 8  # lines of a chart that can still be told apart
ALL = 1e15  # seconds: of a page that nobody expects to be written again
YEAR_2242 = 2**33  # a later Unix time is none
OWN = {"run.name", "run.output_dir", "run.stop_after", "data.cache_dir"}  # keys that say nothing of the training


@dataclass(frozen=True)
class Seen:
    """A run as its files tell it. name: unique on the page. config: the resolved one, by full key. kept: steps whose adapter
    can be taken. variant: what a comparison calls its setting, or "". sign: of life. stamp: of the history as read."""

    name: str
    config: Mapping[str, Any]
    history: History
    samples: Samples
    kept: Sequence[int]
    standing: Standing
    variant: str = ""
    sign: Sign | None = None
    stamp: tuple[object, ...] = ()
    _judgements: dict[State, Judgement] = field(default_factory=dict, compare=False, repr=False)

    def judgement(self, state: State) -> Judgement:
        """The judgement of its success in that state: made once, as it takes most of a page's time."""
        if state not in self._judgements:
            self._judgements[state] = judged(self.history, state, kept=self.kept, levers="the learning rate")
        return self._judgements[state]

    @property
    def link(self) -> str:
        """The address of the run's page from that of all runs."""
        return f"{quote(self.name)}/"

    @property
    def total(self) -> int | None:
        """Steps of the whole run, where it is told."""
        given = self.config.get("run.max_steps")
        return self.standing.total or (given if isinstance(given, int) else None)

    def state(self, now: float) -> State:
        """The state that its last start ended in. One that has told no end is at work, or was killed: by its last sign."""
        step, total, standing = self.history.step, self.total or self.history.step, self.standing
        if standing.why:
            return State("ended", total, why=standing.why, finite=standing.why != CAUSES[NonFiniteError])
        # After the last step there are still samples and files to make. A run of an older program told neither.
        if self.total is not None and step >= self.total and (standing.ended or standing.started is None):
            return State("finished", total)
        alive = not standing.ended and now < self._silent_from
        return State("training" if alive else "stopped", total)

    @cached_property
    def _silent_from(self) -> float:
        """Unix time from which its silence is too long. Its last start was heard of when it began, and after each step."""
        told, started = self.history.series("time"), self.standing.started
        if started is None:
            times = [time for _, time in told if time is not None][-1:]
        else:
            times = [started, *(time for step, time in told if step > self.standing.begun and time is not None)]
        silence = max((after - before for before, after in pairwise(times)), default=0.0)
        signs = [Sign(time, silence, "") for time in times[-1:]] + ([self.sign] if self.sign else [])
        return max((sign.over for sign in signs), default=-math.inf)


def seen(name: str, layout: Layout, history: History | None = None, thumbnails: Thumbnails | None = None) -> Seen:
    """The run in a folder. history, thumbnails: from an earlier reading, continued."""
    config, history = values(layout.config), history or History(layout.metrics)
    steps = layout.adapter_steps(str(config.get("run.name", name)))
    samples = read_samples(layout.samples, thumbnails)
    history.read()
    standing, sign = read_standing(layout.phases), last_sign(layout.alive)
    return Seen(name, config, history, samples, steps, standing, sign=sign, stamp=history.stamp)


def compare(runs: Sequence[Seen], unread: Mapping[str, str], now: float | None = None, asked: str = "") -> str:
    """The page as text. unread: by name, why a run could not be read. now: Unix time. asked: said of the whole comparison."""
    now = time.time() if now is None else now
    groups, cards = grouped(runs), _cards(runs)
    charts, notes = _curves(groups)
    pairs = pairs_of(groups)
    return document(
        "comparison.html",
        name=f"{len(runs)} run{'' if len(runs) == 1 else 's'}",
        alive=any(run.state(now).alive for run in runs),
        runs=runs,
        unread=unread,
        groups=[_table_part(group, f"line{place}" if place < DRAWN else "", now) for place, group in enumerate(groups)],
        charts=charts,
        pairs=pairs,
        asked=asked,
        diverged=not_judged(groups),
        intervals=[chart for pair in pairs if len(pair.by_step) > 1 and (chart := pair.chart())],
        notes=notes,
        several=[card for card in cards.items() if len(card[1]) > 1],
        alone=[card for card in cards.items() if len(card[1]) == 1],
        unsampled=without_samples([run.config for run in runs]),
        differences=_differences(runs),
        # It is made anew whenever it is asked for: also a run that starts later comes to be seen.
        watched=(now, ALL),
    )


def without_samples(configs: Sequence[Mapping[str, Any]]) -> str:
    """A sentence where none of these configs asks for samples, else "". configs: of each run, by full key."""
    default = {"validation.every_steps": ValidationTable().every_steps}
    for config in configs:
        texts = any(config[key] for key in config if re.match(r"validation\.(prompts|samples)", key))
        if texts and any((default | dict(config)).get(f"validation.every_{unit}") for unit in ("steps", "epochs")):
            return ""
    why = "There are no samples to compare: validation.prompts is empty, or validation.every_steps is 0."
    return why if all(configs) else ""  # a run without a config may have had them


def grouped(runs: Sequence[Seen]) -> list[list[Seen]]:
    """The groups of runs that differ in their seed alone, and measure the same. A run without a config is alone."""
    groups: dict[Any, list[Seen]] = {}
    for place, run in enumerate(runs):
        settings = ((key, repr(value)) for key, value in run.config.items() if key not in {*OWN, "run.seed"})
        variant = run.variant or frozenset(settings)
        groups.setdefault((variant, mark_of(run.history.rows)) if variant else place, []).append(run)
    return list(groups.values())


def pairs_of(groups: Sequence[Sequence[Seen]]) -> list[Pair]:
    """Every two groups that measured the same photos with two common seeds, in the order of the groups. One of which a run
    left the numbers is not judged by those that did not."""
    pairs = []
    for both in combinations((group for group in groups if not any(map(_left_the_numbers, group))), 2):
        (first, *_), (second, *_) = both
        if mark_of(first.history.rows) != mark_of(second.history.rows) or _units(first, second):
            continue
        losses = [{run.config.get("run.seed"): run.history.series("held_out_loss") for run in group} for group in both]
        names = _called(both[0]), _called(both[1])
        if pair := Pair.of(*names, *losses):
            pairs += [pair, *_at_their_ends(names, losses)]
    return corrected(pairs)


def _at_their_ends(names: tuple[str, str], losses: Sequence[BySeed]) -> Iterator[Pair]:
    """The pair of the last losses of each, where one was measured for longer than the other."""
    common = sorted(losses[0].keys() & losses[1].keys())
    ends = [[next((at for at in reversed(of[seed]) if at[1] is not None), (0, None)) for seed in common] for of in losses]
    steps = [{step for step, _ in each} for each in ends]
    if len(common) > 1 and all(len(each) == 1 and 0 not in each for each in steps) and steps[0] != steps[1]:
        first, second = (f"{name} at its end (step {max(step):,.0f})" for name, step in zip(names, steps, strict=True))
        at = Difference(max(*steps[0], *steps[1]), *([loss for _, loss in each] for each in ends), common)
        yield Pair(first, second, [at], len(common))


def _units(first: Seen, second: Seen) -> list[str]:
    """Keys that differ, by which the losses of the two have no common unit."""
    one, other = first.config, second.config
    return sorted(key for key in one.keys() | other.keys() if UNITS.match(key) and one.get(key) != other.get(key))


def not_judged(groups: Sequence[Sequence[Seen]]) -> list[str]:
    """A sentence on each variant of which a run met a value that is not finite, and on each two groups that measured the same
    photos and whose losses have no common unit."""
    lost = [
        f"{_called(group)} is not judged: {count} of its {len(group)} runs ended, as a value was not finite."
        for group in groups
        if group[0].variant and (count := sum(map(_left_the_numbers, group)))
    ]
    marks = [(group, mark) for group in groups if (mark := mark_of(group[0].history.rows)) is not None]
    return lost + [
        f"{_called(one)} and {_called(other)} are not judged by the held-out loss, which is another quantity where "
        f"{', '.join(keys)} differs; compare their samples, times and memory."
        for (one, mark), (other, its) in combinations(marks, 2)
        if mark == its and (keys := _units(one[0], other[0]))
    ]


def record(runs: Sequence[Seen], pairs: Sequence[Pair]) -> dict[str, Any]:
    """What the page says, as data: of each run the measurements and the median seconds and largest bytes of a step, of each
    pair the difference and its interval by step. An interval at the last step is corrected for the other pairs."""
    return {
        "runs": [
            {
                "variant": run.variant, "seed": run.config.get("run.seed"), "folder": run.name,
                "held_out_loss": run.history.series("held_out_loss"),
                "seconds": median(times) if (times := run.history.values("seconds")) else None,
                "peak_bytes": max(run.history.values("peak_bytes"), default=None),
            }
            for run in runs
        ],
        "pairs": [
            {
                "first": pair.first, "second": pair.second, "seeds": pair.seeds, "told_apart": pair.told_apart,
                "interval": pair.interval, "divisor": pair.divisor,
                "by_step": [
                    {"step": at.step, "seeds": at.seeds, "differences": at.each, "mean": at.mean, "interval": at.interval()}
                    for at in pair.by_step
                ],
            }
            for pair in pairs
        ],
    }  # fmt: skip


def _left_the_numbers(run: Seen) -> bool:
    return run.standing.why == CAUSES[NonFiniteError]


def _called(group: Sequence[Seen]) -> str:
    return group[0].variant or group[0].name


def _table_part(group: Sequence[Seen], line: str, now: float) -> dict[str, Any]:
    """The rows of one group. line: the kind of its curve; "" where it has none."""
    text, rows = "", list[dict[str, Any]]()
    if len(group) > 1:
        ends = [losses[-1] for run in group if (losses := run.history.values("held_out_loss"))]
        band = f", held-out loss {min(ends):.4g} to {max(ends):.4g}" if ends else ""
        seeds = {run.config.get("run.seed") for run in group}
        alike = "that differ in their seed alone" if len(seeds) > 1 else "of one config"
        text = f"{len(group)} runs {alike}{band}"
    for run in group:
        state = run.state(now)
        last = run.history.last("time") if state.kind in ("training", "stopped") else None
        rows.append({
            "run": run, "state": _state(run, state), "last": last if 0 < (last or 0) < YEAR_2242 else None,
            "judgement": run.judgement(state), "numbers": _numbers(run.history),
        })  # fmt: skip
    return {"said": text, "line": line, "rows": rows}


def _state(run: Seen, state: State) -> str:
    at = f"step {run.history.step:,}" + (f" of {run.total:,}" if run.total else "")
    states = {"finished": f"finished: {at}", "ended": f"ended at {at}: {state.why}"}
    return states.get(state.kind, at if run.history.rows else "no step yet")


def _numbers(history: History) -> list[str]:
    held_out = [value for _, value in series(history.rows, "held_out_loss") if value is not None]
    losses = series(history.rows, "loss")
    window = curves.smoothing_window(len(losses))
    averaged = [value for _, value in (curves.smooth(losses, window) if window else losses) if value is not None]
    change, seconds, peaks = history.last("weight_change"), history.values("seconds")[-200:], history.values("peak_bytes")
    return [
        f"{held_out[-1]:.4g}, lowest {min(held_out):.4g}" if held_out else "-",
        f"{averaged[-1]:.4g}" if averaged else "-",
        "-" if change is None else moved_by(change),
        f"{median(seconds):.3g} s" if seconds else "-",
        size(int(max(peaks))) if peaks else "-",
    ]


def _curves(groups: Sequence[Sequence[Seen]]) -> tuple[list[str], list[str]]:
    """The charts that have a line, and what is to be said of them."""
    runs = [run for group in groups for run in group]
    steps: list[tuple[float, float | None]] = [(0, None), (max((run.history.step for run in runs), default=0), None)]

    def chart(
        title: str, unit: str, field: str, about: str = "", *, smooth: bool = False, scale: float = 1.0, wide: bool = False
    ) -> str:
        def of(run: Seen) -> Series:
            values = run.history.series(field)
            window = curves.smoothing_window(len(values)) if smooth else 0
            return curves.smooth(values, window) if window else [(step, value and value * scale) for step, value in values]

        lines = []
        for place, group in enumerate(groups[:DRAWN]):
            values = [of(run) for run in group]
            drawn = curves.spread(values) if len(group) > 1 else values
            middle, *band = [curves.last_of_slices(series) for series in drawn] if smooth else drawn
            name = f"{_called(group)} ({len(group)} runs)" if band else _called(group)
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
    median_line = (
        "Runs of one config, whatever their seed, are one line, their median, in a band from the lowest to the highest."
    )
    notes = [median_line] if any(len(group) > 1 for group in groups[:DRAWN]) else []
    notes += [f"Only the first {DRAWN} lines are drawn."] if len(groups) > DRAWN else []
    return [figure for figure in drawn if figure], notes


def _held_out_about(runs: Sequence[Seen]) -> str:
    """A held-out loss tells runs apart only where they measure the same photos at the same draws."""
    marks = {mark for run in runs if (mark := mark_of(run.history.rows))}
    if len(marks) > 1 or any(_units(runs[0], run) for run in runs[1:]):
        other = "These runs measure other photos, captions or draws, or another quantity"
        return f"{other}: compare each with itself, not with one another."
    return "The same photos, captions and draws in all of them: the lower the better."


def _cards(runs: Sequence[Seen]) -> dict[tuple[str, str], list[tuple[Seen, Row]]]:
    """By (prompt, detail), the runs that drew it."""
    cards = defaultdict[tuple[str, str], list[tuple[Seen, Row]]](list)
    for run in runs:
        for row in run.samples.rows:
            cards[row.prompt, row.detail].append((run, row))
    return cards


def _differences(runs: Sequence[Seen]) -> dict[str, list[Any]]:
    """By key, the values of all runs; None: it is not set."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in OWN)
    found = {key: [run.config.get(key) for run in runs] for key in keys}
    return {key: values for key, values in found.items() if len(set(map(repr, values))) > 1}
