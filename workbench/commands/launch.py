"""What a command line asks of a run: its config, and the checkpoint that it goes on from."""

import shlex
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from trainer import config
from trainer.base.errors import UserError
from trainer.base.files import parse_size
from trainer.base.run_layout import Layout
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


def asked(resume_from: str | None, allowed: Allowance | None = None, **more: bool) -> Launch:
    """The way a command starts a run: with all parts. more: planned, elsewhere, verify."""
    return Launch(resume_from, allowed or Allowance(resume_from=resume_from or "auto"), PORTS, **more)


def train(loaded: config.Config, *, resume_from: str | None, allowed: Allowance | None = None, verify: bool = False) -> bool:
    """Train a run with all parts; returns whether its end was reached. verify: every photo is read."""
    with Session(loaded, "train", asked(resume_from, allowed, verify=verify)) as session:
        return session.train()


def compare_runs(file: str, *, only_plan: bool) -> None:
    """Train the variants of a file of --compare, or print the command of each run."""
    from workbench.compare.comparison import compare_all
    from workbench.compare.variations import read_comparison

    compare_all(read_comparison(file), partial(train, resume_from="auto"), only_plan=only_plan)


def size_of(text: str) -> int:
    """The bytes that --plan_memory means. Raises UserError."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise UserError(f"--plan_memory {text!r}: {error}") from error
