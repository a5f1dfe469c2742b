"""Interfaces of optional parts, which the caller passes when it opens a run (`workbench/commands/ports.py` has all). Without
them a run trains, saves, resumes and writes its adapter files; a config key that needs a missing part is refused. A module
may implement a protocol."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

from trainer.adapters.export import About
from trainer.adapters.portable import Portable
from trainer.base.account import Account
from trainer.base.errors import UserError
from trainer.base.files import FileGroup
from trainer.base.protocols import Hub
from trainer.base.run_layout import Layout
from trainer.base.signals import Signals
from trainer.checkpoint.state import Progress
from trainer.config import Config
from trainer.data.sources import ARCHIVE, HUB, SourceReader
from trainer.engine.assembly import TrainState
from trainer.engine.components import Components
from trainer.monitoring.metrics import Tracker
from trainer.plan.run_plan import RunPlan
from trainer.resume.initial_adapter import Start
from trainer.runtime.context import RunContext
from trainer.runtime.device import Memory


class Page(AbstractContextManager[Any], Protocol):
    """The report of one start of a run, in a `with` block."""

    def after_step(self, *, news: bool) -> None:
        """Write the page between two steps, if it is due. news: more than another step has happened."""

    def stopped(self, check: Callable[[], None]) -> Path:
        """Write the page of a run that stopped before its end; returns its path. check: called often; may raise."""

    def judge(self, state: TrainState, written: Mapping[str, Path]) -> None:
        """Measure what a finished run changed, and print the verdict. written: the adapter files, by format."""

    def end(self) -> None:
        """Write the page of a finished, judged run; print its path and what was changed."""

    def write_card(self, about: About, written: Mapping[str, Path], files: FileGroup) -> str:
        """Write the model card beside the adapter files; returns a note to print, or "". written: by format."""
        ...


class Pages(Protocol):
    """Creates pages."""

    def first_page(self, layout: Layout, *, name: str, enabled: bool) -> AbstractContextManager[None]:
        """A block with the page of a run in preparation."""
        ...

    def page_of(
        self, plan: RunPlan, components: Components, context: RunContext, progress: Progress, start: Start,
        *, contents: Mapping[str, str], environment: Mapping[str, Any],
    ) -> Page:  # fmt: skip
        """The page of a built run. contents: digests of the model's files, by component."""
        ...


class StartReader(Protocol):
    """Reads initial adapters: adapter files of all kinds, and checkpoints."""

    def read_start(self, plan: RunPlan) -> tuple[Portable, Account]:
        """(adapter of adapter.init_from, assumptions about it). Reads headers and scales. Raises UserError if it does not fit
        the plan."""
        ...

    def with_below(self, plan: RunPlan, say: Callable[[str], object]) -> RunPlan:
        """The plan with the frozen adapter of adapter.under. Raises UserError if it does not fit."""
        ...


class Planning(Protocol):
    """Chooses keys by memory and time, and suggests others that need less."""

    def fitted(self, plan: RunPlan, memory: Memory, *, fixed: Collection[str], say: Callable[[str], None]) -> RunPlan:
        """The plan with `memory.fit` and `memory.resident_blocks` resolved. Raises UserError if nothing fits."""
        ...

    def compiling(self, plan: RunPlan, memory: Memory, *, say: Callable[[str], None]) -> RunPlan:
        """The plan with `step.compile` resolved, alike in all processes."""
        ...

    def what_would_fit(self, plan: RunPlan, *, on_cpu: bool) -> str:
        """The remedies after a step ran out of memory, in words."""
        ...


class Summary(Protocol):
    """Describes a plan."""

    def described(self, plan: RunPlan) -> str:
        """The text at the start of a run: what it will do, and warnings about unlikely settings."""
        ...


class Trackers(Protocol):
    """Experiment trackers."""

    def check_trackers(self, config: Config) -> None:
        """Raises UserError if the library of a configured tracker is missing."""

    def sign_in(self, config: Config) -> None:
        """Raises UserError if a configured tracker has no login on this machine."""

    def open_trackers(self, config: Config, context: RunContext, progress: Progress) -> list[Tracker]:
        """The configured trackers."""
        ...


class Copying(Protocol):
    """The copying of one start of a run to its mirror."""

    def offer(self, step: int) -> None:
        """Offer a complete checkpoint for copying."""

    def running(self, signals: Signals, step: int) -> AbstractContextManager[None]:
        """A block in which files are copied; at its end all processes wait for the rest. step: of its beginning."""
        ...


class Mirrors(Protocol):
    """A second place for a run's files."""

    def check_library(self, url: str) -> None:
        """Raises UserError if the library for a URL is missing."""

    def ask_mirror(self, config: Config, context: RunContext, resume_from: str | None) -> Copying:
        """The copying to `checkpoint.mirror`. First fetches a newer checkpoint from there, if any."""
        ...


@dataclass(frozen=True)
class Attached:
    """The objects that the parts made for one run; None: it has no such part."""

    page: Page | None = None
    mirror: Copying | None = None
    trackers: Trackers | None = None


@dataclass(frozen=True)
class Ports:
    """The parts that a run is given; None: it has none of that kind."""

    hub: Hub | None = None
    adapter_files: StartReader | None = None
    layouts: Sequence[SourceReader] | None = None
    planning: Planning | None = None
    pages: Pages | None = None
    summary: Summary | None = None
    trackers: Trackers | None = None
    mirror: Mirrors | None = None


def _no_folder(config: Config) -> str | None:
    """The first source of photos that is no folder and no table."""
    paths = [path for source in config.data.sources for path in (source.path, source.held_out) if path]
    return next((p for p in paths if p.startswith(HUB) or (ARCHIVE.fullmatch(p) and not Path(p).is_dir())), None)


def _is_written(config: Config, key: str) -> bool:
    table, _, name = key.partition(".")
    return name in getattr(config, table).model_fields_set


def _auto(value: object) -> object:
    """The value if it leaves the choice to the part."""
    return value if value == "auto" else None


# By part the keys that it alone reads, and what a config asks for there; what counts as false asks for nothing. TensorBoard's
# files are a default: a run without trackers says that there are none.
ASKED: dict[str, dict[str, Callable[[Config], object]]] = {
    "hub": {},  # models/opening.py refuses a model.path that is a hub id
    "adapter_files": {key: attrgetter(key) for key in ("adapter.init_from", "adapter.under")},
    "layouts": {"data.sources": _no_folder},
    "planning": {
        "memory.fit": attrgetter("memory.fit"),
        "memory.resident_blocks": lambda config: config.memory.offload == "blocks" and _auto(config.memory.resident_blocks),
        "step.compile": lambda config: _auto(config.step.compile),
    },
    "pages": {"export.base_model": attrgetter("export.base_model")},
    "summary": {},
    "trackers": {
        "logging.tensorboard": lambda config: config.logging.tensorboard and _is_written(config, "logging.tensorboard"),
        "logging.wandb": attrgetter("logging.wandb"),
    },
    "mirror": {"checkpoint.mirror": attrgetter("checkpoint.mirror")},
}
# Part -> its results, in words.
LOST = {
    "planning": "advice on memory", "pages": "report, verdict, model card", "summary": "summary",
    "trackers": "TensorBoard files",
}  # fmt: skip


def refuse_unserved(config: Config, ports: Ports) -> str:
    """The missing results, in words; "" if all parts are there. Raises UserError for a key that needs a missing part."""
    missing = [field.name for field in fields(ports) if getattr(ports, field.name) is None]
    for part in missing:
        for key, asks in ASKED[part].items():
            if value := asks(config):
                raise UserError(
                    f"{key} = {value!r} is read by {part!r}, a part that this run was opened without; from Python "
                    "give all parts: from workbench import PORTS, Session.open(config, ports=PORTS); or leave the key out"
                )
    return ", ".join(LOST[part] for part in missing if part in LOST)
