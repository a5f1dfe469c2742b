"""Starts runs from the command line's options: config, checkpoint, allowed changes."""

import shlex
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainer import config
from trainer.artifacts.ports import Ports, Summary
from trainer.base.errors import UserError
from trainer.base.files import parse_size
from trainer.base.run_layout import Layout
from trainer.plan.run_plan import RunPlan
from trainer.resume import allowed_changes
from trainer.resume.allowed_changes import Allowance
from trainer.run.session import Session
from trainer.run.setup import Launch
from workbench.commands.arguments import resume_command
from workbench.commands.fork import fork, has_checkpoint
from workbench.commands.ports import PORTS


def load_run(options: Namespace, overrides: Sequence[str]) -> tuple[config.Config, str | None, Allowance]:
    """(config, checkpoint to resume from, allowed differences from it) of a run or a fork. Raises UserError."""
    if options.fork_from is not None:
        checkpoint = config.expand_home(options.fork_from, "--fork_from")
        forked, allowed = fork(checkpoint, overrides)
        return forked, checkpoint, allowed
    loaded = config.load(options.config[0], list(overrides))
    resume_from = options.resume_from and config.expand_home(options.resume_from, "--resume_from")
    return loaded, resume_from, allowed_changes.parse(options.allow, resume_from)


def next_command(options: Namespace, loaded: config.Config, arguments: Sequence[str]) -> str:
    """The command line that resumes the run. From its first checkpoint on, a fork is a run of its own."""
    if options.fork_from is None:
        return resume_command(arguments)
    layout = Layout(Path(loaded.run.output_dir))
    if has_checkpoint(layout):
        arguments = ["--config", str(layout.config), "--resume_from", "auto"]
    return shlex.join(["python", "train.py", *arguments])


def make_launch(resume_from: str | None, allowed: Allowance | None = None, ports: Ports = PORTS, **options: bool) -> Launch:
    """A command's Launch of a run. options: planned, elsewhere, verify."""
    return Launch(resume_from, allowed or Allowance(resume_from=resume_from or "auto"), ports, **options)


def train(loaded: config.Config, *, resume_from: str | None, allowed: Allowance | None = None, **options: Any) -> bool:
    """Train a run with all ports; returns whether its end was reached. options: of `make_launch`."""
    with Session(loaded, "train", make_launch(resume_from, allowed, **options)) as session:
        return session.train()


def differences(summary: Summary, first: list[str], plan: RunPlan) -> str:
    """A plan's summary: for the first run all lines, which are added to `first`; for others the lines that are not in it."""
    lines, news, head = summary.described(plan).splitlines(), list[str](), ""
    for line in lines if first else ():
        head = head if line.startswith(" ") else line
        news += [new for new in dict.fromkeys((head, line)) if line not in first and new not in news]
    first += [] if first else lines
    return "\n".join([*news, "  all else as in the plan above"] if news else lines)


def compare_runs(file: str, *, only_plan: bool) -> None:
    """Train the variants of a --compare file, or print the command of each run."""
    from workbench.compare.comparison import compare_all
    from workbench.compare.variations import read_comparison

    summary = PORTS.summary and SimpleNamespace(described=partial(differences, PORTS.summary, []))
    ports = replace(PORTS, summary=summary)
    compare_all(read_comparison(file), partial(train, resume_from="auto", ports=ports), only_plan=only_plan)


def size_of(text: str) -> int:
    """The bytes of --plan_memory. Raises UserError."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise UserError(f"--plan_memory {text!r}: {error}") from error
