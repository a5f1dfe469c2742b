"""report.html while a run goes on: written again whenever there is something new to see, from what lies on the disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from trainer.base.digests import Stamp, stamp_of
from trainer.base.errors import Interrupted, NonFiniteError, cause, ending
from trainer.base.files import hash_file
from trainer.base.progress import quiet_for
from trainer.base.run_layout import Layout
from trainer.monitoring.course import BLOCKS
from workbench.pages.history import Events, History, marks_of, read_starts
from workbench.pages.page import PageContents, ReportedRun, data_part, render, render_first, write_page
from workbench.pages.samples import read_samples
from workbench.pages.status import State, judged
from workbench.pages.tables import Sections
from workbench.pages.thumbnails import Thumbnails

SHARE = 0.01  # of a run's time that writing may take, apart from what is asked for at its start and end
EVERY_SECONDS = 15.0  # without anything to see but more steps: as often as the page loads itself again


@contextmanager
def first_page(layout: Layout, *, name: str, enabled: bool) -> Iterator[None]:
    """A block with the page of a run that is prepared, unless there is one. A run that is refused leaves nothing of it."""
    if not enabled or layout.report.exists() or layout.metrics.exists():
        yield
        return
    made = [folder for folder in (layout.root, *layout.root.parents) if not folder.exists()]
    with suppress(OSError):  # a folder that cannot be written is refused with its reason
        layout.root.mkdir(parents=True, exist_ok=True)
        write_page(layout.report, render_first(name=name))
    try:
        yield
    except BaseException:
        for remove in (layout.report.unlink, layout.alive.unlink, *(folder.rmdir for folder in made)):
            with suppress(OSError):  # it never came to be, or others are at work there
                remove()
        raise


class LiveReport:
    """The page of one start of a run, in a `with` block: alive inside, and afterwards as what ended it says. data_of: makes
    the sections of the data; called once. say: tells that a page could not be written. enabled: in the main process."""

    def __init__(
        self,
        run: ReportedRun,
        *,
        data_of: Callable[[], Sections] = dict,
        say: Callable[[str], None] = print,
        enabled: bool = True,
    ) -> None:
        self.run, self.layout, self.say, self.enabled = run, run.layout, say, enabled
        self.state = State("training", run.total, run.begun)
        self.seconds = 0.0  # that writing took, in all
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
        """However the run ends, the page says so."""
        if self.state.alive and not isinstance(error, KeyboardInterrupt):
            self.state = replace(self.state, kind="stopped")
            if error is not None and not isinstance(error, Interrupted):
                words, finite = "; ".join(ending(error)[1].splitlines()), not isinstance(error, NonFiniteError)
                self.state = replace(self.state, kind="ended", why=cause(error), said=words, finite=finite)
            self._write_if_possible()

    def after_step(self, *, news: bool) -> None:
        """Write the page between two steps, where it is time. news: whether there is more to see than another step."""
        if not self.enabled:
            return
        self._news = self._news or news
        quiet = time.monotonic() - self._last
        self._silence = max(self._silence, quiet)
        # The first step belongs to the start: a page that still says that none was made would be wrong for long.
        first = not self._stepped and self._history.read().step > self.run.begun
        if first or (quiet * SHARE >= self._cost and (self._news or quiet >= EVERY_SECONDS)):
            try:
                if self._data_html is None:
                    self._data_html = data_part(self._make_data())
            except Interrupted:  # whoever runs the steps looks at signals next
                return
            self._write_if_possible()

    def stopped(self, check: Callable[[], None] = lambda: None) -> Path:
        """The page of a run that stopped before its end. check: may raise, which leaves it as it was. Raises OSError."""
        return self._end("stopped", check)

    def finished(self, outcome: Sections, blocks: Mapping[str, float], check: Callable[[], None] = lambda: None) -> Path:
        """The page of the whole run. outcome: the tables of its end; blocks: the change of each block of the adapter. check:
        called now and then. Raises OSError, and what `check` raises."""
        self._outcome, self._blocks = outcome, blocks
        return self._end("finished", check)

    def _end(self, kind: Literal["stopped", "finished"], check: Callable[[], None]) -> Path:
        if self._data_html is None:
            self._data_html = data_part(self._make_data())
        check()
        before, self.state = self.state, replace(self.state, kind=kind)
        try:
            self.write(check)
        except BaseException:
            self.state = before
            raise
        return self.layout.report

    def _write_if_possible(self) -> None:
        """In mid-run nothing ends because a page could not be written: that is said once."""
        if not self.enabled:
            return
        try:
            self.write()
        except OSError as error:
            if not self._failed:
                self._failed = True
                self.say(f"warning: the report could not be written ({error}); training goes on, and it is tried again")

    def write(self, check: Callable[[], None] = lambda: None) -> None:
        """Now, atomically. Raises OSError, and what `check` raises."""
        began = time.monotonic()
        try:
            html = render(self.contents(check))
            self._stepped = self._history.step > self.run.begun
            check()
            write_page(self.layout.report, html)
        finally:
            self._last = time.monotonic()
            self._cost = self._last - began
            self.seconds += self._cost
            self._news = False

    def contents(self, check: Callable[[], None]) -> PageContents:
        """What the page shows now. check: called now and then; may raise."""
        layout, history = self.layout, self._history.read()
        samples = read_samples(layout.samples, self._thumbnails, check)
        kept = [step for step in layout.adapter_steps(self.run.name) if step <= max(history.step, self.run.begun)]
        starts = read_starts(layout.phases)
        measured, blocks = history.newest(BLOCKS) or (0, None)
        if self._blocks is not None:
            measured, blocks = history.step, self._blocks
        steps = {"samples": samples.steps, "kept": kept, "skipped": history.skipped()}
        return PageContents(
            run=self.run,
            state=self.state,
            history=history,
            judgement=judged(history, self.state, kept=kept, levers=self.run.levers, blocks=self._blocks),
            events=Events(marks_of(starts, history.rows, self.run.changes), steps),
            samples=samples,
            data=self._data_html,
            outcome=self._outcome,
            blocks=(blocks or {}, "" if blocks is None else f"after step {measured:,}"),
            hashes=self._hashed(check),
            watched=(time.time(), quiet_for(self._silence)),
            aside=tuple(layout.set_aside()),
        )

    def _hashed(self, check: Callable[[], None]) -> dict[Path, str]:
        stamps = {file: stamp_of(file.stat()) for file in sorted(self.layout.adapters.glob("*.safetensors"))}
        for file, newest in stamps.items():
            if file not in self._hashes or self._hashes[file][0] != newest:
                self._hashes[file] = newest, hash_file(file, lambda _: check())
        return {file: self._hashes[file][1] for file in stamps}
