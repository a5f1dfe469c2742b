"""What a command line asks of a run: its config, and the checkpoint that it goes on from."""

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
from workbench.commands.arguments import again
from workbench.commands.fork import begun, fork
from workbench.commands.ports import PORTS


def launched(options: Namespace, overrides: Sequence[str]) -> tuple[config.Config, str | None, Allowance]:
    """(the config, --resume_from, what may differ from the checkpoint) of a run or of a fork. Raises UserError."""
    if options.fork_from is not None:
        checkpoint = config.expand_home(options.fork_from, "--fork_from")
        forked, allowed = fork(checkpoint, overrides)
        return forked, checkpoint, allowed
    loaded = config.load(options.config[0], list(overrides))
    resume_from = options.resume_from and config.expand_home(options.resume_from, "--resume_from")
    return loaded, resume_from, allowed_changes.parse(options.allow, resume_from)


def next_command(options: Namespace, loaded: config.Config, arguments: Sequence[str]) -> str:
    """The command line that goes on with the run. A fork is a run of its own from its first checkpoint on."""
    if options.fork_from is None:
        return again(arguments)
    layout = Layout(Path(loaded.run.output_dir))
    if not begun(layout):
        return shlex.join(["python", "train.py", *arguments])
    return shlex.join(["python", "train.py", "--config", str(layout.config), "--resume_from", "auto"])


def asked(resume_from: str | None, allowed: Allowance | None = None, ports: Ports = PORTS, **more: bool) -> Launch:
    """The way a command starts a run. more: planned, elsewhere, verify."""
    return Launch(resume_from, allowed or Allowance(resume_from=resume_from or "auto"), ports, **more)


def train(loaded: config.Config, *, resume_from: str | None, allowed: Allowance | None = None, **more: Any) -> bool:
    """Train a run with all parts; returns whether its end was reached. more: ports, and what `asked` takes."""
    with Session(loaded, "train", asked(resume_from, allowed, **more)) as session:
        return session.train()


def differences(summary: Summary, first: list[str], plan: RunPlan) -> str:
    """What a start says of its plan: all of the first run, put into `first`; of others what is not as there."""
    lines, news, head = summary.described(plan).splitlines(), list[str](), ""
    for line in lines if first else ():
        head = head if line.startswith(" ") else line
        news += [each for each in dict.fromkeys((head, line)) if line not in first and each not in news]
    first += [] if first else lines
    return "\n".join([*news, "  all else as in the plan above"] if news else lines)


def compare_runs(file: str, *, only_plan: bool) -> None:
    """Train the variants of a file of --compare, or print the command of each run."""
    from workbench.compare.comparison import compare_all
    from workbench.compare.variations import read_comparison

    summary = PORTS.summary and SimpleNamespace(described=partial(differences, PORTS.summary, []))
    ports = replace(PORTS, summary=summary)
    compare_all(read_comparison(file), partial(train, resume_from="auto", ports=ports), only_plan=only_plan)


def size_of(text: str) -> int:
    """The bytes that --plan_memory means. Raises UserError."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise UserError(f"--plan_memory {text!r}: {error}") from error
