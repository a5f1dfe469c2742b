"""report.html of a live run: rewritten from the run's files whenever there is something new to see."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from trainer.base.digests import Stamp, stamp_of
from trainer.base.errors import Interrupted, NonFiniteError, cause, ending
from trainer.base.files import hash_file
from trainer.base.progress import quiet_for
from trainer.base.run_layout import Layout, step_of
from trainer.monitoring.course import BLOCKS
from workbench.pages import charts
from workbench.pages.history import Events, History, marks_of, read_starts
from workbench.pages.rendering import document, render, write_page
from workbench.pages.samples import read_samples
from workbench.pages.settings import configuration
from workbench.pages.status import State, figures, judgement_of
from workbench.pages.tables import Sections, sorted_out
from workbench.pages.thumbnails import Thumbnails

SHARE = 0.01  # largest share of a run's time for writing, besides the pages of its start and end
EVERY_SECONDS = 15.0  # between pages with no news but further steps: as often as a page reloads
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


@contextmanager
def first_page(layout: Layout, *, name: str, enabled: bool) -> Iterator[None]:
    """A block with a page that says that the run is being prepared, unless the run has one. An error removes it again."""
    if not enabled or layout.report.exists() or layout.metrics.exists():
        yield
        return
    new_folders = [folder for folder in (layout.root, *layout.root.parents) if not folder.exists()]
    with suppress(OSError):  # a folder that cannot be written is refused later, with the reason
        layout.root.mkdir(parents=True, exist_ok=True)
        write_page(layout.report, document("preparing.html", name=name, watched=(time.time(), PREPARING_SECONDS)))
    try:
        yield
    except BaseException:
        for remove in (layout.report.unlink, layout.alive.unlink, *(folder.rmdir for folder in new_folders)):
            with suppress(OSError):  # it does not exist, or another process works there
                remove()
        raise


class LiveReport:
    """The page of one start of a run, in a `with` block: alive inside, afterwards in the state of its end. data_of: makes
    the sections of the data; called once. say: prints that a page could not be written. enabled: in the main process."""

    def __init__(
        self,
        run: ReportedRun,
        *,
        data_of: Callable[[], Sections] = dict,
        say: Callable[[str], None] = print,
        enabled: bool = True,
    ) -> None:
        self.run, self.layout, self.say, self.enabled = run, run.layout, say, enabled
        self.state = State("training", run.total, run.start_step)
        self.seconds = 0.0  # of writing, in all
        self._make_data, self._data_html = data_of, None
        self._history, self._thumbnails = History(run.layout.metrics), Thumbnails()
        self._hashes: dict[Path, tuple[Stamp, str]] = {}
        self._outcome: Sections | None = None
        self._blocks: Mapping[str, float] | None = None
        self._news, self._failed, self._stepped = False, False, False
        self._last, self._cost, self._silence = time.monotonic(), 0.0, 0.0

    def __enter__(self) -> LiveReport:
        self._write_if_possible()
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        """Write the page, however the run ended."""
        if self.state.alive and not isinstance(error, KeyboardInterrupt):
            self.state = replace(self.state, kind="stopped")
            if error is not None and not isinstance(error, Interrupted):
                message, finite = "; ".join(ending(error)[1].splitlines()), not isinstance(error, NonFiniteError)
                self.state = replace(self.state, kind="ended", reason=cause(error), message=message, finite=finite)
            self._write_if_possible()

    def after_step(self, *, news: bool) -> None:
        """Write the page between two steps, if it is due. news: whether there is more to see than another step."""
        if not self.enabled:
            return
        self._news = self._news or news
        quiet = time.monotonic() - self._last
        self._silence = max(self._silence, quiet)
        # At the first step always: the page that says that none was made would be wrong for long.
        first = not self._stepped and self._history.read().step > self.run.start_step
        if first or (quiet * SHARE >= self._cost and (self._news or quiet >= EVERY_SECONDS)):
            try:
                self._prepare_data()
            except Interrupted:  # the caller checks for signals next
                return
            self._write_if_possible()

    def _prepare_data(self) -> None:
        if self._data_html is None:
            pictured, care, plain = sorted_out(self._make_data())
            self._data_html = render("data.html", pictured=pictured, care=care, plain=plain)

    def stopped(self, check: Callable[[], None] = lambda: None) -> Path:
        """Write the page of a run that stopped early. check: may raise, which leaves the old page. Raises OSError."""
        return self._end("stopped", check)

    def finished(self, outcome: Sections, blocks: Mapping[str, float], check: Callable[[], None] = lambda: None) -> Path:
        """Write the page of a finished run. outcome: the tables of its end. blocks: ||dW|| / ||W|| of each block of the
        adapter. check: called now and then. Raises OSError, and whatever `check` raises."""
        self._outcome, self._blocks = outcome, blocks
        return self._end("finished", check)

    def _end(self, kind: Literal["stopped", "finished"], check: Callable[[], None]) -> Path:
        self._prepare_data()
        check()
        before, self.state = self.state, replace(self.state, kind=kind)
        try:
            self.write(check)
        except BaseException:
            self.state = before
            raise
        return self.layout.report

    def _write_if_possible(self) -> None:
        """Write the page. An OSError does not end the run: it is reported once."""
        if not self.enabled:
            return
        try:
            self.write()
        except OSError as error:
            if not self._failed:
                self._failed = True
                self.say(f"warning: the report could not be written ({error}); training goes on, and it is tried again")

    def write(self, check: Callable[[], None] = lambda: None) -> None:
        """Write the page now, atomically. Raises OSError, and whatever `check` raises."""
        began = time.monotonic()
        try:
            html = document("run.html", **self.contents(check))
            self._stepped = self._history.step > self.run.start_step
            check()
            write_page(self.layout.report, html)
        finally:
            self._last = time.monotonic()
            self._cost = self._last - began
            self.seconds += self._cost
            self._news = False

    def contents(self, check: Callable[[], None]) -> dict[str, Any]:
        """The present contents of run.html by the names that it uses. check: called now and then; may raise."""
        run, layout, history = self.run, self.layout, self._history.read()
        samples = read_samples(layout.samples, self._thumbnails, check)
        saved = [step for step in layout.adapter_steps(run.name) if step <= max(history.step, run.start_step)]
        steps = {"samples": samples.steps, "kept": saved, "skipped": history.skipped()}
        events = Events(marks_of(read_starts(layout.phases), history.rows, run.changes), steps)
        measured_at, changes = (
            (history.step, self._blocks) if self._blocks is not None else history.newest(BLOCKS) or (0, None)
        )
        changes = changes or {}
        now = time.time()
        return {
            "name": run.name,
            "run": run,
            "state": self.state,
            "history": history,
            "judgement": judgement_of(history, self.state, saved_steps=saved, levers=run.levers, blocks=self._blocks),
            "events": events,
            "samples": samples,
            "data": self._data_html,
            "outcome": self._outcome,
            "hashes": self._hashed(check),
            "figures": figures(history, changes),
            "charts": charts.draw_all(history, events),
            "tiles": charts.tiles(changes),
            "shades": charts.legend(),
            "measured_at": measured_at,
            "checkpoints": _checkpoints(layout),
            "fork": charts.fork_of(history, layout),
            "config": configuration(layout.config),
            "aside": layout.set_aside(),
            "now": now,
            "watched": (now, quiet_for(self._silence)) if self.state.alive else None,
        }

    def _hashed(self, check: Callable[[], None]) -> dict[Path, str]:
        stamps = {file: stamp_of(file.stat()) for file in sorted(self.layout.adapters.glob("*.safetensors"))}
        for file, newest in stamps.items():
            if file not in self._hashes or self._hashes[file][0] != newest:
                self._hashes[file] = newest, hash_file(file, lambda _: check())
        return {file: self._hashes[file][1] for file in stamps}


def _checkpoints(layout: Layout) -> dict[str, str] | None:
    """The steps of all checkpoints, and the command that exports the last one's adapter; None without any."""
    folders = {step: folder for folder in layout.checkpoints.glob("*") if (step := step_of(folder.name)) is not None}
    if not folders:
        return None
    command = f"python scripts/adapter.py export {shlex.quote(str(folders[max(folders)]))} FOLDER"
    return {"steps": ", ".join(f"{step:,}" for step in sorted(folders)), "command": command}
