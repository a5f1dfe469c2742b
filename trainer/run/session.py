"""A run that is open: the one way in, for the command line, for every tool, and for Python (docs/api.md).

Nothing here ends the process: mistakes, stops and all else are raised (base/errors.py).
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from pydantic import ValidationError

from trainer import kernels
from trainer.artifacts.exports import leave_in_time
from trainer.artifacts.ports import Ports
from trainer.base.digests import FileDigests
from trainer.base.errors import Interrupted, UserError
from trainer.base.progress import QUIET, Alive, Phases, Record
from trainer.base.run_layout import Layout
from trainer.base.signals import Signals
from trainer.config import Config, LoggingTable, SampleTable, load, mistakes, with_values
from trainer.config.reading import literal
from trainer.data.memo import Memo
from trainer.data.sources import Scanned
from trainer.engine.components import Components
from trainer.engine.encoding import conditionings
from trainer.engine.graphs import retrying
from trainer.objectives import CustomLoss
from trainer.plan.requirements import refuse_unread, refuse_unread_by_model
from trainer.plan.run_plan import ModelPlan, RunPlan, make_plan, open_source, resolve
from trainer.plan.samples import requests_of
from trainer.resume.allowed_changes import Allowance
from trainer.resume.unlike import refuse_unlike_configs
from trainer.run.output_folder import opened
from trainer.run.run import Run, build, close, make_loop
from trainer.run.setup import Launch
from trainer.runtime.attention import TORCHS_OWN, Attention
from trainer.runtime.context import RunContext
from trainer.runtime.device import start_processes
from trainer.runtime.jobs import Job
from trainer.runtime.processes import Processes

if TYPE_CHECKING:
    from PIL.Image import Image

Errors, ALONE = Callable[[Any, Any], Any], Ports()
_TRAINING: list[Session] = []  # the one that trains in this process: signals, device and processes are the process's own


def load_config(file: str | Path, changes: dict[str, Any] | None = None) -> Config:
    """The config of a TOML file, with other values for some keys ({"optimizer.lr": 5e-5}). Raises UserError."""
    return load(str(file), [f"{key}={literal(value)}" for key, value in (changes or {}).items()])


def measuring(config: Config) -> Config:
    """The config of a run that only measures its held-out loss: nothing is written but caches of the model's own."""
    keys = {
        "data.cache": "memory", "step.compile": "none", "step.graphs": False, "memory.shard": False,
        "memory.gradient_checkpointing": False, "validation.every_steps": 0, "validation.every_epochs": 0,
        "validation.loss_every_steps": 1, "validation.prompts": (), "validation.samples": (),
    }  # fmt: skip
    return with_values(config, keys).model_copy(update={"logging": LoggingTable(tensorboard=False)})


class Session:
    """A run that is open. `open` is how one is made; `with` lets it go.

    source: the model's files. config: the resolved one. only: "train", or "measure" for a session that trains nothing, writes
    nothing and may stand beside others. quiet: it says nothing but warnings.
    """

    def __init__(self, config: Config, only: Literal["train", "measure"], launch: Launch) -> None:
        self.source = open_source(config)
        self.config = resolve(config, self.source)
        self.only, self.launch, self.quiet = only, launch, False
        self.jobs: Sequence[Job] = ()
        self.errors: Errors | None = None
        self._open = ExitStack()
        self._built: tuple[Run, Signals] | None = None
        self._steps: Generator[SimpleNamespace] | None = None
        self._left = False

    def __repr__(self) -> str:
        """Its folder, and where it is."""
        made = "not open" if self._built is None else f"step {self.step} of {self.run.plan.length.max_steps}"
        return f"Session({self.config.run.output_dir!r}: {made if self.only == 'train' else 'it measures'})"

    @classmethod
    def open(
        cls,
        config: Config,
        *,
        only: Literal["train", "measure"] = "train",
        resume_from: str | None = None,
        ports: Ports = ALONE,
        loss: Errors | None = None,
        jobs: Sequence[Job] = (),
    ) -> Session:
        """A session of a config, to be entered by `with`. Raises UserError for what its model's configs do not allow.

        resume_from: "auto", "latest", or the folder of a checkpoint. ports: parts on top of the core (workbench.PORTS: all).
        loss: (prediction, target), fp32 [B, C, H, W] -> the loss of each latent, in place of objective.loss. jobs: are done
        between two steps, after the run's own. Neither stands in a checkpoint: whoever resumes gives them again.
        """
        if only == "measure" and (resume_from is not None or loss is not None or jobs or ports is not ALONE):
            raise UserError('only="measure" trains nothing; leave out resume_from, ports, loss and jobs')
        session = cls(config, only, Launch(resume_from, Allowance(resume_from=resume_from or "auto"), ports))
        session.errors, session.jobs = loss, jobs
        return session

    # --- before a weight is read

    def plan(self, *, processes: int = 1, phases: Phases = QUIET, scanned: Scanned | Memo | None = None) -> RunPlan:
        """The run's plan, checked without weights. scanned: photos that were read, or what reads them. Raises UserError."""
        return make_plan(self.config, self.source, processes=processes, phases=phases, scanned=scanned)

    # --- to measure

    @cached_property
    def processes(self) -> Processes:
        """This process among its equals."""
        return start_processes(self.config, quiet=self.quiet)

    def components(
        self, model: ModelPlan, phases: Phases, *, attention: Attention = TORCHS_OWN, kind: Callable[..., Any] = Components
    ) -> Any:
        """The model of a plan whose weights are on this machine; nothing of it is loaded yet. kind: its class."""
        fused = kernels.choose(self.config.adapter.kernels, self.processes.device)
        given = {"kernels": fused, "digests": FileDigests(phases=phases), "attention": attention}
        return kind(model, processes=self.processes, phases=phases, **given)

    # --- to train

    def __enter__(self) -> Self:
        if self.only == "train":
            if threading.current_thread() is not threading.main_thread():
                raise UserError("a Session trains in the main thread, where signals come; open it there")
            if _TRAINING:
                folder = _TRAINING[0].config.run.output_dir
                raise UserError(f"a Session is training in this process already ({folder}); leave its `with` block first")
            with ExitStack() as stack:
                stack.callback(_TRAINING.clear)
                _TRAINING.append(self)
                run, signals = stack.enter_context(_prepared(self))
                stack.enter_context(run.attached.page or nullcontext())
                self._built, self._open = (run, signals), stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool | None:
        """Whatever ends the block, the last whole step is saved, but after a second Ctrl-C. A block that is left early,
        without an error, leaves adapter files as a run does that stops (export.on_stop)."""
        try:
            if self._steps is not None and isinstance(error, KeyboardInterrupt):
                with suppress(KeyboardInterrupt):
                    self._steps.throw(error)
            elif self._steps is not None:
                self._steps.close()
            if error is None and self._steps is not None and not self._left:
                self._leave()
        except BaseException as raised:
            if not self._open.__exit__(type(raised), raised, raised.__traceback__):
                raise
        finally:
            # The model goes with the block, though a name, or the traceback of an error, still holds on to the session.
            self._built, self._steps = None, None
        return self._open.__exit__(kind, error, trace)

    @property
    def run(self) -> Run:
        """What the run is made of. Raises UserError outside of a `with` block, and in a session that only measures."""
        if self._built is None:
            raise UserError("this needs a Session that trains, inside its block: with Session.open(config) as session")
        return self._built[0]

    @property
    def step(self) -> int:
        """How many steps are made."""
        return self.run.progress.step

    def __iter__(self) -> Iterator[SimpleNamespace]:
        """The steps from here on, each after it is made: an object with what the log has of it (step, loss, lr, grad_norm,
        ...). With the last step come adapter files and report, as at a run's end."""
        if self._steps is None:
            self._steps = self._iterate()
        return self._steps

    def _iterate(self) -> Generator[SimpleNamespace]:
        run, signals = self.run, self._built[1]  # type: ignore[index]
        if self.errors is not None:
            if self.config.step.graphs is True:
                raise UserError("step.graphs = true records the objective's own loss; leave it out beside a loss of your own")
            run.step.graphs = None
            objective = replace(run.step.losses.objective, loss=CustomLoss(function=self.errors))  # type: ignore[attr-defined]
            run.step.losses = replace(run.step.losses, objective=objective)  # type: ignore[type-var]
            run.context.processes.say("the steps train on the caller's loss; the held-out loss is objective.loss")
        loop = make_loop(run, signals, self.jobs)
        try:
            for line in loop.steps():
                yield SimpleNamespace(**line)
        except Interrupted:
            if run.plan.config.export.on_stop and run.progress.step:
                leave_in_time(run.artifacts(), signals)
            raise
        self._leave()

    def _leave(self) -> None:
        """Leave what a run leaves for people at its end, or where it stops."""
        self._left, finished = True, self.step >= self.run.plan.length.max_steps
        if finished or self.config.export.on_stop:
            close(self.run, self._built[1], finished=finished)  # type: ignore[index]

    def train(self) -> bool:
        """Train to the end, or to run.stop_after; returns whether the end was reached."""
        for _ in self:
            pass
        return self.step >= self.run.plan.length.max_steps

    @property
    def lr(self) -> float:
        """The first group's rate in the next step; setting it scales all groups', now and in the schedule. It does not stand
        in a checkpoint: a resumed run has the config's rate."""
        return self.run.step.schedule.get_last_lr()[0]

    @lr.setter
    def lr(self, value: float) -> None:
        """Scale all groups' rates. Raises UserError for one that cannot be."""
        schedule = self.run.step.schedule
        if not (value > 0 and self.lr > 0):
            raise UserError(f"lr = {value}: a rate above 0 is needed, and one now ({self.lr}) that can be scaled")
        share = value / self.lr
        schedule.base_lrs = [share * rate for rate in schedule.base_lrs]
        schedule._last_lr = [share * rate for rate in schedule.get_last_lr()]
        for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
            group["lr"] = rate

    def sample(self, prompt: str, **fields: Any) -> Image:
        """A picture by the adapter as it is. fields: of an entry of validation.samples (docs/keys.md), with its defaults.
        Text encoders that the run has let go are loaded for it, one by one. Raises UserError where a config is refused."""
        plan, components, state = self.run.plan, self.run.components, self.run.state
        try:
            samples = (SampleTable.model_validate({"prompt": prompt, **fields}),)
        except ValidationError as error:
            raise UserError(f"session.sample: {mistakes.explain(error.errors(include_url=False))}") from error
        keys = {"validation.prompts": (), "validation.samples": samples, "validation.every_steps": 1}
        config = with_values(self.config, keys)
        refuse_unread(config, plan.model.family)
        refuse_unread_by_model(config, plan.model.source)
        (asked,) = requests_of(config.validation, (), plan.data.resolution, plan.model.family.images)
        components.load(plan.model.family.vae)
        with torch.no_grad(), state.evaluating(), state.adapter.at_strength(asked.strength), components.without_below():
            conditioning = conditionings(components, [asked.prompt, asked.negative])
            draw = retrying(self.run.step.graphs, components.family.images.draw)
            return draw(components.model, asked, conditioning(asked.prompt), conditioning(asked.negative))

    def export(self, path: str | Path) -> list[Path]:
        """The files of the adapter as it is, written in the config's formats: diffusers' at the path, the others beside it.
        Raises NotTrained before the first update."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        return list(self.run.artifacts().export(path.name.removesuffix(".safetensors"), folder=path.parent).values())


@contextmanager
def _prepared(session: Session) -> Iterator[tuple[Run, Signals]]:
    """A block with a run whose output is open, and the signals that it hears. Nothing is trained yet."""
    config, launch = session.config, session.launch
    # Before the signal handlers: a process that waits for its peers has nothing to lose and should just end.
    peers, layout = session.processes, Layout(Path(config.run.output_dir))
    alive, every = Alive(layout.alive, enabled=peers.is_main), config.logging.every_seconds
    with Signals() as signals, peers.attending(signals, alive), alive:
        record = Record() if peers.is_main else None
        phases = Phases(check=peers.check, sign=peers.sign, show=peers.is_main, every=every, record=record)
        context = RunContext(peers, phases, layout)
        refuse_unlike_configs(peers, config)
        pages, mirror = launch.ports.pages, None
        first = nullcontext() if pages is None else pages.first_page(layout, name=config.run.name, enabled=peers.is_main)
        with first:
            if config.checkpoint.mirror is not None and launch.ports.mirror is not None:
                mirror = launch.ports.mirror.ask_mirror(config, context, launch.resume_from)
            run = build(config, session.source, context, launch)
            run = replace(run, attached=replace(run.attached, mirror=mirror))
        gc.enable()  # off since the process started (main.py)
        with opened(run), nullcontext() if mirror is None else mirror.running(signals, run.progress.step):
            yield run, signals
        peers.leave_together()
