"""Several runs on one page: their states, common charts, differing config keys, samples side by side."""

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
from workbench.pages.history import History, Standing, read_standing
from workbench.pages.rendering import document
from workbench.pages.samples import Row, Samples, read_samples
from workbench.pages.settings import values
from workbench.pages.status import Judgement, State, figures, judgement_of
from workbench.pages.thumbnails import Thumbnails

# Keys that change the unit of the held-out loss, or the model's input.
UNITS = re.compile(
    r"(model\.(family|path|config|revision|variant|prediction|zero_terminal_snr|components\..*\.path)|objective\.guidance"
    r"|data\.((sources\.\d+\.)?resolution.*|bucket_step|max_aspect|crop|enlarge|background|text_length|clip_chunks|weighted_captions))$"
)
LINES = 8  # of a chart; more could not be distinguished
NEVER_STALE = 1e15  # seconds
YEAR_2242 = 2**33  # later Unix times are invalid
OWN_KEYS = {"run.name", "run.output_dir", "run.stop_after", "data.cache_dir"}  # of no effect on the training


@dataclass(frozen=True)
class RunFiles:
    """A run, read from its files. name: unique on the page. config: the resolved one, by full key. saved_steps: steps whose
    adapter can be taken. variant: its setting's name in a comparison, or "". sign: its heartbeat. stamp: the history's."""

    name: str
    config: Mapping[str, Any]
    history: History
    samples: Samples
    saved_steps: Sequence[int]
    standing: Standing
    variant: str = ""
    sign: Sign | None = None
    stamp: tuple[object, ...] = ()
    _judgements: dict[State, Judgement] = field(default_factory=dict, compare=False, repr=False)

    def judgement(self, state: State) -> Judgement:
        """The judgement of the run in that state: cached, as it takes most of a page's time."""
        if state not in self._judgements:
            levers = "the learning rate"
            self._judgements[state] = judgement_of(self.history, state, saved_steps=self.saved_steps, levers=levers)
        return self._judgements[state]

    @property
    def link(self) -> str:
        """The run's folder as a relative link from the page of all runs."""
        return f"{quote(self.name)}/"

    @property
    def total(self) -> int | None:
        """The steps of the whole run; None if unknown."""
        max_steps = self.config.get("run.max_steps")
        return self.standing.total or (max_steps if isinstance(max_steps, int) else None)

    def state(self, now: float) -> State:
        """The state of the last start: without a logged end at work, or stopped if silent too long. now: Unix time."""
        step, total, standing = self.history.step, self.total or self.history.step, self.standing
        if standing.reason:
            return State("ended", total, reason=standing.reason, finite=not _left_the_numbers(self))
        # Samples and files follow the last step. Older versions logged neither start nor end.
        if self.total is not None and step >= self.total and (standing.ended or standing.started is None):
            return State("finished", total)
        alive = not standing.ended and now < self._silent_from
        return State("training" if alive else "stopped", total)

    @cached_property
    def _silent_from(self) -> float:
        """Unix time from which the run's silence is too long, by its start, its steps and its heartbeat."""
        logged, started = self.history.series("time"), self.standing.started
        if started is None:
            times = [time for _, time in logged if time is not None][-1:]
        else:
            times = [started, *(time for step, time in logged if step > self.standing.start_step and time is not None)]
        silence = max((after - before for before, after in pairwise(times)), default=0.0)
        signs = [Sign(time, silence, "") for time in times[-1:]] + ([self.sign] if self.sign else [])
        return max((sign.over for sign in signs), default=-math.inf)


def read_run(name: str, layout: Layout, history: History | None = None, thumbnails: Thumbnails | None = None) -> RunFiles:
    """Read a run's files. history, thumbnails: from an earlier reading, continued."""
    config, history = values(layout.config), history or History(layout.metrics)
    steps = layout.adapter_steps(str(config.get("run.name", name)))
    samples = read_samples(layout.samples, thumbnails)
    history.read()
    standing, sign = read_standing(layout.phases), last_sign(layout.alive)
    return RunFiles(name, config, history, samples, steps, standing, sign=sign, stamp=history.stamp)


def compare(runs: Sequence[RunFiles], unread: Mapping[str, str], now: float | None = None, power: str = "") -> str:
    """The page as text. unread: by name, why a run could not be read. now: Unix time. power: what the seeds can detect."""
    now = time.time() if now is None else now
    groups, cards = group_runs(runs), _cards(runs).items()
    charts, notes = _curves(groups)
    pairs = pairs_of(groups)
    return document(
        "comparison.html",
        name=f"{len(runs)} run{'' if len(runs) == 1 else 's'}",
        alive=any(run.state(now).alive for run in runs),
        runs=runs,
        unread=unread,
        groups=[_table_part(group, f"line{index}" if index < LINES else "", now) for index, group in enumerate(groups)],
        charts=charts,
        pairs=pairs,
        power=power,
        diverged=not_judged(groups),
        intervals=[chart for pair in pairs if len(pair.by_step) > 1 and (chart := pair.chart())],
        notes=notes,
        several=[card for card in cards if len(card[1]) > 1],
        alone=[card for card in cards if len(card[1]) == 1],
        unsampled=without_samples([run.config for run in runs]),
        differences=_differences(runs),
        # The server makes the page at each request: it reloads for runs that start later, too.
        watched=(now, NEVER_STALE),
    )


def without_samples(configs: Sequence[Mapping[str, Any]]) -> str:
    """A sentence if none of these configs asks for samples, else "". configs: of each run, by full key."""
    default = {"validation.every_steps": ValidationTable().every_steps}
    for config in configs:
        texts = any(config[key] for key in config if re.match(r"validation\.(prompts|samples)", key))
        if texts and any((default | dict(config)).get(f"validation.every_{unit}") for unit in ("steps", "epochs")):
            return ""
    missing = "There are no samples to compare: validation.prompts is empty, or validation.every_steps is 0."
    return missing if all(configs) else ""  # a run without a config may have had samples


def group_runs(runs: Sequence[RunFiles]) -> list[list[RunFiles]]:
    """The groups of runs that differ in their seed alone, and measure the same. A run without a config is alone."""
    groups: dict[Any, list[RunFiles]] = {}
    for index, run in enumerate(runs):
        settings = ((key, repr(value)) for key, value in run.config.items() if key not in {*OWN_KEYS, "run.seed"})
        variant = run.variant or frozenset(settings)
        groups.setdefault((variant, mark_of(run.history.rows)) if variant else index, []).append(run)
    return list(groups.values())


def pairs_of(groups: Sequence[Sequence[RunFiles]]) -> list[Pair]:
    """Every two groups that measured the same photos with two common seeds, in order. A group in which a run met values that
    are not finite is left out: its other runs alone do not represent it."""
    pairs = []
    for first, second in combinations((group for group in groups if not any(map(_left_the_numbers, group))), 2):
        if mark_of(first[0].history.rows) != mark_of(second[0].history.rows) or _units(first[0], second[0]):
            continue
        losses = [{run.config.get("run.seed"): run.history.series("held_out_loss") for run in g} for g in (first, second)]
        names = _name(first), _name(second)
        if pair := Pair.of(*names, *losses):
            pairs += [pair, *_at_their_ends(names, losses)]
    return corrected(pairs)


def _at_their_ends(names: tuple[str, str], losses: Sequence[BySeed]) -> Iterator[Pair]:
    """The pair of their last losses, if one was measured for longer than the other."""
    common = sorted(losses[0].keys() & losses[1].keys())
    ends = [[next((p for p in reversed(by[seed]) if p[1] is not None), (0, None)) for seed in common] for by in losses]
    steps = [{step for step, _ in points} for points in ends]
    if len(common) > 1 and all(len(last) == 1 and 0 not in last for last in steps) and steps[0] != steps[1]:
        first, second = (f"{name} at its end (step {max(last):,.0f})" for name, last in zip(names, steps, strict=True))
        at = Difference(max(*steps[0], *steps[1]), *([loss for _, loss in points] for points in ends), common)
        yield Pair(first, second, [at], len(common))


def _units(first: RunFiles, second: RunFiles) -> list[str]:
    """The differing keys that give the two losses different units."""
    one, other = first.config, second.config
    return sorted(key for key in one.keys() | other.keys() if UNITS.match(key) and one.get(key) != other.get(key))


def not_judged(groups: Sequence[Sequence[RunFiles]]) -> list[str]:
    """A sentence on each variant with a run that was not finite, and on each two groups of the same photos in other units."""
    not_finite = [
        f"{_name(group)} is not judged: {count} of its {len(group)} runs ended, as a value was not finite."
        for group in groups
        if group[0].variant and (count := sum(map(_left_the_numbers, group)))
    ]
    marks = [(group, mark) for group in groups if (mark := mark_of(group[0].history.rows)) is not None]
    return not_finite + [
        f"{_name(one)} and {_name(other)} are not judged by the held-out loss, which is another quantity where "
        f"{', '.join(keys)} differs; compare their samples, times and memory."
        for (one, mark), (other, other_mark) in combinations(marks, 2)
        if mark == other_mark and (keys := _units(one[0], other[0]))
    ]


def record(runs: Sequence[RunFiles], pairs: Sequence[Pair]) -> dict[str, Any]:
    """The page as data. Runs: measurements, median seconds and largest bytes of a step. Pairs: the difference and its
    interval by step, and the interval at the last step, corrected for the other pairs."""
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


def _left_the_numbers(run: RunFiles) -> bool:
    return run.standing.reason == CAUSES[NonFiniteError]


def _name(group: Sequence[RunFiles]) -> str:
    return group[0].variant or group[0].name


def _table_part(group: Sequence[RunFiles], line: str, now: float) -> dict[str, Any]:
    """The rows of one group. line: the kind of its curve; "" without one."""
    text, rows = "", list[dict[str, Any]]()
    if len(group) > 1:
        ends = [losses[-1] for run in group if (losses := run.history.values("held_out_loss"))]
        band = f", held-out loss {min(ends):.4g} to {max(ends):.4g}" if ends else ""
        seeds = {run.config.get("run.seed") for run in group}
        relation = "that differ in their seed alone" if len(seeds) > 1 else "of one config"
        text = f"{len(group)} runs {relation}{band}"
    for run in group:
        state = run.state(now)
        last = run.history.last("time") if state.kind in ("training", "stopped") else None
        rows.append({
            "run": run, "state": _state(run, state), "last": last if 0 < (last or 0) < YEAR_2242 else None,
            "judgement": run.judgement(state), "numbers": _numbers(run.history),
        })  # fmt: skip
    return {"heading": text, "line": line, "rows": rows}


def _state(run: RunFiles, state: State) -> str:
    at = f"step {run.history.step:,}" + (f" of {run.total:,}" if run.total else "")
    states = {"finished": f"finished: {at}", "ended": f"ended at {at}: {state.reason}"}
    return states.get(state.kind, at if run.history.rows else "no step yet")


def _numbers(history: History) -> list[str]:
    held_out = [value for _, value in series(history.rows, "held_out_loss") if value is not None]
    values, change, seconds = figures(history, {}), history.last("weight_change"), history.values("seconds")[-200:]
    return [
        f"{held_out[-1]:.4g}, lowest {min(held_out):.4g}" if held_out else "-",
        values.get("Loss, averaged", values.get("Loss", "-")),
        "-" if change is None else moved_by(change),
        f"{median(seconds):.3g} s" if seconds else "-",
        values.get("Peak memory", "-"),
    ]


def _curves(groups: Sequence[Sequence[RunFiles]]) -> tuple[list[str], list[str]]:
    """The charts that have a line, and notes on them."""
    runs = [run for group in groups for run in group]
    steps: list[tuple[float, float | None]] = [(0, None), (max((run.history.step for run in runs), default=0), None)]

    def chart(
        title: str, unit: str, field: str, about: str = "", *, smooth: bool = False, scale: float = 1.0, wide: bool = False
    ) -> str:
        lines = []
        for index, group in enumerate(groups[:LINES]):
            values = [[(step, value and value * scale) for step, value in run.history.series(field)] for run in group]
            series = [curves.averaged(points) for points in values] if smooth else values
            parts = curves.spread(series) if len(group) > 1 else series
            middle, *band = map(curves.last_of_slices, parts) if smooth else parts
            name = f"{_name(group)} ({len(group)} runs)" if band else _name(group)
            lines.append(Curve(name, middle, f"line{index}", band))
        return curves.draw(title, unit, [line for line in lines if line.series], about=about, range_of=steps, wide=wide)

    charts = [
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
    notes = [median_line] if any(len(group) > 1 for group in groups[:LINES]) else []
    notes += [f"Only the first {LINES} lines are drawn."] if len(groups) > LINES else []
    return [figure for figure in charts if figure], notes


def _held_out_about(runs: Sequence[RunFiles]) -> str:
    """The sentence on the held-out losses: they compare runs only if these measure the same photos at the same draws."""
    marks = {mark for run in runs if (mark := mark_of(run.history.rows))}
    if len(marks) > 1 or any(_units(runs[0], run) for run in runs[1:]):
        other = "These runs measure other photos, captions or draws, or another quantity"
        return f"{other}: compare each with itself, not with one another."
    return "The same photos, captions and draws in all of them: the lower the better."


def _cards(runs: Sequence[RunFiles]) -> dict[tuple[str, str], list[tuple[RunFiles, Row]]]:
    """The runs with samples of a request, by (prompt, detail)."""
    cards = defaultdict[tuple[str, str], list[tuple[RunFiles, Row]]](list)
    for run in runs:
        for row in run.samples.rows:
            cards[row.prompt, row.detail].append((run, row))
    return cards


def _differences(runs: Sequence[RunFiles]) -> dict[str, list[Any]]:
    """The values of all runs for each key that differs; None: not set."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in OWN_KEYS)
    rows = {key: [run.config.get(key) for run in runs] for key in keys}
    return {key: values for key, values in rows.items() if len(set(map(repr, values))) > 1}
