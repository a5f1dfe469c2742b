"""The mirror of a run: checked before the first weight, copied to during the run, awaited at the end."""

import math
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from trainer.base import files
from trainer.base.console import shortlist
from trainer.base.errors import Interrupted, PeerStopped, UserError
from trainer.base.progress import duration
from trainer.base.run_layout import Layout, folder_name
from trainer.base.signals import Signals
from trainer.checkpoint import store
from trainer.checkpoint.state import Saved
from trainer.config import Config
from trainer.monitoring import metrics
from trainer.runtime.context import RunContext
from workbench.mirror.copier import Asker, Copier
from workbench.mirror.store import RUN, Mirror, adopt, check_library, key_of, open_mirror

NEWEST = ("auto", "latest")
NAMED = 20  # names in one line


@dataclass(frozen=True)
class Mirroring:
    """The copying of a run to its mirror. wait: seconds. copier: in the main process; the others wait for it at the end."""

    wait: float
    context: RunContext
    copier: Copier | None

    def offer(self, step: int) -> None:
        """Queue a complete checkpoint."""
        if self.copier is not None:
            self.copier.offer(step)

    @contextmanager
    def running(self, signals: Signals, step: int) -> Iterator[None]:
        """A context in which checkpoints are copied; at its end all processes wait for the copies. step: the run's first."""
        if self.copier is not None:
            self.copier.start(step)
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._finish(signals, error)
            raise
        self._finish(signals, None)

    def _finish(self, signals: Signals, failure: BaseException | None) -> None:
        """Wait for the copies. failure: the exception that ended the run. After a signal, only a second one ends the wait."""
        copier, context, processes, wait = self.copier, self.context, self.context.processes, self.wait
        stopped: Interrupted | PeerStopped | None = None
        if copier is not None:
            signals.promise = "leaving the mirror as it is"
            check = signals.check if isinstance(failure, PeerStopped) else processes.check
            patient = signals.last_work(wait) if isinstance(failure, Interrupted) else nullcontext()
            try:
                with patient, context.phases("copying to the mirror", obey=False, keep=False) as phase:
                    missing = copier.finish(wait, lambda: (phase.check(), check()))
            except (Interrupted, PeerStopped) as error:
                missing, stopped = copier.missing(), error
            if missing:
                cause = f" ({copier.troubles.last})" if copier.troubles.last else ""
                limit = "" if stopped else f" after {duration(wait)} (checkpoint.mirror_wait)"
                lacks = f"lacks {shortlist(missing, NAMED)}{limit}{cause}; all of it is whole in {context.layout.root}"
                remedy = "start again with --resume_from auto, and it is copied"
                processes.say(f"warning: {copier.mirror.url} {lacks}: {remedy}")
            elif copier.is_claimed:
                since = f"what this run made since it was claimed is in {context.layout.root} alone"
                processes.say(f"warning: {copier.mirror.url} is another start's: {since}")
            elif copier.newest is not None:
                processes.say(f"mirror {copier.mirror.url}: all is copied, up to {folder_name(copier.newest)}")
        if not isinstance(failure or stopped, PeerStopped):
            processes.wait()
        if failure is None and isinstance(stopped, Interrupted):
            raise Interrupted(stopped.signum, "while files were copied to the mirror; the last step is saved")
        if failure is None and stopped is not None:
            raise stopped


def ask_mirror(config: Config, context: RunContext, resume_from: str | None) -> Mirroring:
    """Open checkpoint.mirror, and fetch a newer checkpoint from it if the run resumes from the newest. Raises UserError if
    the mirror cannot be written, or holds anything but this run."""
    url, name, wait = config.checkpoint.mirror, config.run.name, config.checkpoint.mirror_wait
    assert url is not None
    processes, phases, layout = context.processes, context.phases, context.layout
    with processes.main_first():
        if not processes.is_main:
            return Mirroring(wait, context, None)
        check_library(url)
        note = files.read_json(layout.mirror) if layout.mirror.exists() else {}
        run_id, back = note.get("id"), note.get("back_to", math.inf)
        ask = Asker(url, wait, processes.say, phases.check)
        with phases("asking the mirror", keep=False):
            mirror = ask(lambda: open_mirror(url), "opening it")
            current = ask(mirror.owner, "asking whose it is")
            steps = ask(mirror.steps, "listing its checkpoints") if current else []
            if current is not None:
                _refuse_others(config, current, run_id, layout, holds=bool(steps), newest=resume_from in NEWEST)
            ask(mirror.try_out, "trying to write")
            # Each start has its own mark: one run on two machines is two starts.
            owner = {
                "run": name,
                "id": run_id or (current["id"] if current and steps else secrets.token_hex(8)),
                "start": secrets.token_hex(8),
            }
            if not steps and current != {"run": name, "id": run_id}:
                ask(lambda: mirror.claim(owner), "claiming it")  # else when the run begins: this start may still be refused
        if resume_from in NEWEST and steps:
            files.make_folder(layout.root, "run.output_dir")
            with files.locked(layout.lock):
                if run_id is None:
                    files.write_atomic(layout.mirror, [files.json_bytes({"id": owner["id"]})])
                _fetch(mirror, [step for step in steps if step <= back], ask, context, name)
    copier = Copier(mirror, layout, owner=owner, steps=steps, keep_last=config.checkpoint.keep_last, say=processes.say)
    return Mirroring(wait, context, copier)


def _refuse_others(
    config: Config, current: dict[str, str], run_id: str | None, layout: Layout, *, holds: bool, newest: bool
) -> None:
    """Raises UserError unless the mirror is this run's. holds: it has checkpoints. newest: the run resumes the newest."""
    key, name = key_of(str(config.checkpoint.mirror)), config.run.name
    here = bool(store.steps(layout.checkpoints) or store.unnamed(layout.checkpoints))
    if current["run"] != name or run_id not in (None, current["id"]) or (run_id is None and here):
        remedy = "" if holds else f", or delete {RUN} there if that run is gone"
        other = f"another run ({current['run']!r}, of another run.output_dir)"
        raise UserError(f"{key} holds {other}; give another prefix{remedy}")
    if holds and not here and not newest:
        remedy = "add --resume_from auto to go on, or give another prefix"
        raise UserError(f"{key} already holds checkpoints of {name!r}; {remedy}")


def _fetch(mirror: Mirror, steps: list[int], ask: Asker, context: RunContext, name: str) -> None:
    """Fetch the newest valid checkpoint of the mirror if it is newer than all local ones."""
    layout, say, phases = context.layout, context.processes.say, context.phases
    root = layout.checkpoints
    here, _ = store.newest_valid(root, phases)
    numbers = {root / folder_name(step): step for step in store.steps(root)}
    numbers |= {folder: step for step, folder in store.unnamed(root).items()}
    newest = -1 if here is None else numbers[here]
    for step in reversed([step for step in steps if step > newest]):
        with phases(f"fetching {folder_name(step)} from the mirror"):
            problem = _fetch_one(mirror, step, ask, context, name)
        if problem is None:
            say(f"{folder_name(step)} came from {mirror.url}")
            return
        say(f"warning: {folder_name(step)} in {mirror.url} is not valid: {problem}")
    if newest < 0:
        missing = f"no valid checkpoint ({len(steps)} are damaged, or set aside here), and there is none in {root}"
        raise UserError(f"{mirror.key} holds {missing}; restore one, or give another prefix to start again")


def _fetch_one(mirror: Mirror, step: int, ask: Asker, context: RunContext, name: str) -> str | None:
    """Fetch a checkpoint, with the log and the results up to it. Returns the reason if it is invalid, else None."""
    layout = context.layout

    def fill(folder: Path) -> None:
        task = f"fetching {folder_name(step)}"
        ask(lambda: mirror.fetch(step, folder), task, lambda: sum(path.stat().st_size for path in folder.iterdir()))

    def keep(folder: Path) -> None:
        task = f"fetching what was left up to {folder_name(step)}"
        ask(lambda: mirror.fetch_results(layout, name, step), task, lambda: len(layout.results(name)))
        log, digest = folder / layout.metrics.name, Saved(folder, census=None).values("progress").get("log")
        metrics.truncate(log, step)
        if digest and not metrics.has_digest(log, digest):
            problem = f"not the log that the run wrote: it is not taken, and lines up to step {step} are missing here"
            context.processes.say(f"warning: {log.name} of {folder_name(step)} in {mirror.url} is {problem}")
        elif log.exists():
            files.write_atomic(layout.metrics, [log.read_bytes()])
        log.unlink(missing_ok=True)  # not part of a checkpoint, so not in its manifest

    return adopt(layout.checkpoints, step, fill, keep)
