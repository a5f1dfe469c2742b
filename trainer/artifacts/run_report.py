"""The report of a run that is built: what its page shows besides the files of the run."""

import platform
from collections.abc import Mapping
from functools import partial
from typing import Any

from trainer import __version__, optim
from trainer.adapters.kinds import kind_named
from trainer.artifacts.data_report import sections
from trainer.checkpoint.state import Progress
from trainer.engine.components import Components
from trainer.engine.encoding import report_captions
from trainer.plan.describe import data_lines
from trainer.plan.run_plan import RunPlan
from trainer.report import LiveReport, ReportedRun
from trainer.resume.initial_adapter import Start
from trainer.runtime.context import RunContext


def report_of(
    plan: RunPlan,
    components: Components,
    context: RunContext,
    progress: Progress,
    start: Start,
    *,
    contents: Mapping[str, str],
    environment: Mapping[str, Any],
) -> LiveReport:
    """The report of a run. contents: digests of the model's files, by component. environment: what the run depends on
    besides them (pins.pin_environment)."""
    processes = context.processes
    config, adapter = plan.config, plan.config.adapter
    targets = adapter.targets if isinstance(adapter.targets, str) else "own targets"
    sizes = f"rank {adapter.rank}" + ("" if adapter.alpha is None else f", alpha {adapter.alpha:g}")
    run = ReportedRun(
        context.layout,
        name=config.run.name,
        total=plan.length.max_steps,
        begun=progress.step,
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
    data_of = partial(_data, plan, components)
    return LiveReport(run, data_of=data_of, say=processes.say, enabled=processes.is_main)


def _data(plan: RunPlan, components: Components) -> dict[str, dict[str, Any]]:
    said = report_captions(plan.data, components.family, components.model)
    return sections(plan.data, data_lines(plan.config, plan.data, plan.length), said, components.phases)


def _lineage(plan: RunPlan, progress: Progress, start: Start, contents: Mapping[str, str]) -> dict[str, str]:
    told = {"begun": progress.started.replace("T", " ").replace("+00:00", " UTC"), "base model": plan.config.model.path}
    told |= {f"{name}, SHA-256": digest for name, digest in contents.items()}
    if start.path:
        told["adapter that it started from"] = f"{start.name}, SHA-256 {start.sha256}" if start.sha256 else start.name
    return told
