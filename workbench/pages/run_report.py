"""The page of a training run: LiveReport with the facts, data and outcome of the running program."""

import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer import __version__, optim
from trainer.adapters.export import About
from trainer.adapters.kinds import kind_named
from trainer.base.console import width
from trainer.base.files import FileGroup
from trainer.checkpoint.state import Progress
from trainer.engine.assembly import TrainState
from trainer.engine.components import Components
from trainer.engine.encoding import report_captions
from trainer.monitoring.metrics import is_line, read_lines
from trainer.monitoring.weight_change import render, weight_change
from trainer.plan.run_plan import RunPlan
from trainer.resume.initial_adapter import Start
from trainer.runtime.context import RunContext
from workbench.pages.before_after import write_before_after
from workbench.pages.data_report import sections
from workbench.pages.diagnosis import judge
from workbench.pages.live import LiveReport, ReportedRun, first_page
from workbench.pages.model_card import write_card
from workbench.pages.tables import Sections
from workbench.summary.data import data_lines
from workbench.summary.outcome import Outcome, sample_triples

__all__ = ["RunPage", "first_page", "page_of"]


class RunPage(LiveReport):
    """The report of a run, its model card, and the picture of its samples before and after."""

    def __init__(self, outcome: Outcome, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.whole, self.plan = outcome, outcome.plan
        self.tables: dict[str, dict[str, Any]] = {}
        self.moved: dict[str, float] = {}

    def judge(self, state: TrainState, files: Mapping[str, Path]) -> None:
        """Measure what the whole run changed, and print the verdict. files: the adapter files, by format."""
        with state.evaluating():
            moved = weight_change(state.adapter, self.whole.start.weights, self.whole.context.phases)
        self.moved = {block: change.largest for block, change in moved.items()}
        rows = list(filter(is_line, read_lines(self.layout.metrics)))
        verdict = judge(rows, self.moved, self.run.levers, self.layout.adapter_steps(self.run.name))
        head = "warning" if verdict.bad else verdict.kind
        self.tables = self.whole.tables(state, moved, files)
        self.tables["Did it take?"]["notes"] = [f"{head.capitalize()}: {verdict.sentence}."]
        self.tables["Effect"]["rows"].insert(0, ["verdict", verdict.kind])
        self.say(f"{'' if verdict.bad else 'verdict: '}{head}: {verdict.sentence}")

    def end(self) -> None:
        """Write before_after.png and the page of the whole run; print their paths and the tables."""
        say, context, step = self.whole.context.processes.say, self.whole.context, self.whole.progress.step
        if picture := write_before_after(self.layout, sample_triples(self.layout, step), step):
            say(f"before and after: {picture}", whole=True)
        with context.phases("writing the report") as phase:
            report = self.finished(self.tables, self.moved, phase.check)
        say(f"report: {report}", whole=True)
        say(render(self.tables, width(sys.stdout)))

    def write_card(self, about: About, adapters: Mapping[str, Path], files: FileGroup) -> str:
        """Write README.md beside the adapter files; returns a remark for the user, or "". adapters: the files, by format."""
        return write_card(self.plan, about, self.layout, adapters, files)


def page_of(
    plan: RunPlan,
    components: Components,
    context: RunContext,
    progress: Progress,
    start: Start,
    *,
    contents: Mapping[str, str],
    environment: Mapping[str, Any],
) -> RunPage:
    """The page of a run. contents: digests of the model's files, by component. environment: versions and devices, by name."""
    config, adapter, processes = plan.config, plan.config.adapter, context.processes
    targets = adapter.targets if isinstance(adapter.targets, str) else "own targets"
    sizes = f"rank {adapter.rank}" + ("" if adapter.alpha is None else f", alpha {adapter.alpha:g}")
    run = ReportedRun(
        context.layout,
        name=config.run.name,
        total=plan.length.max_steps,
        start_step=progress.step,
        levers=optim.levers(config.optimizer.name),
        kicker=f"Training report: {kind_named(adapter.type).word} of {sizes}, {targets}, for {config.model.path}",
        lineage=_lineage(plan, progress, start, contents),
        environment={
            "trainer": __version__,
            "Python": platform.python_version(),
            "system": platform.platform(),
            **{name: str(value) for name, value in environment.items()},
        },
        changes=progress.changes,
    )

    def data_of() -> Sections:
        report = report_captions(plan.data, components.family, components.model)
        return sections(plan.data, data_lines(config, plan.data, plan.length, reported=True), report, components.phases)

    outcome = Outcome(plan, components, context, progress, start)
    return RunPage(outcome, run, data_of=data_of, say=processes.say, enabled=processes.is_main)


def _lineage(plan: RunPlan, progress: Progress, start: Start, contents: Mapping[str, str]) -> dict[str, str]:
    rows = {"begun": progress.started.replace("T", " ").replace("+00:00", " UTC"), "base model": plan.config.model.path}
    rows |= {f"{name}, SHA-256": digest for name, digest in contents.items()}
    if start.path:
        rows["adapter that it started from"] = f"{start.name}, SHA-256 {start.sha256}" if start.sha256 else start.name
    return rows
