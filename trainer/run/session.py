"""An open run: the only entry point of the command line, of all tools, and of Python (docs/api.md). Nothing here ends the
process: errors and stops are raised (base/errors.py)."""

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
from trainer.run.output_folder import open_output
from trainer.run.run import Run, build, close, make_loop
from trainer.run.setup import Launch
from trainer.runtime.attention import TORCHS_OWN, Attention
from trainer.runtime.context import RunContext
from trainer.runtime.device import start_processes
from trainer.runtime.jobs import Job
from trainer.runtime.processes import Processes

if TYPE_CHECKING:
    from PIL.Image import Image

LossFunction = Callable[[Any, Any], Any]
NO_PORTS = Ports()
_TRAINING: list[Session] = []  # at most one per process, which has only one set of signals, device and peers


def load_config(file: str | Path, changes: dict[str, Any] | None = None) -> Config:
    """The config of a TOML file. changes: other values by key ({"optimizer.lr": 5e-5}). Raises UserError."""
    return load(str(file), [f"{key}={literal(value)}" for key, value in (changes or {}).items()])


def measuring(config: Config) -> Config:
    """The config of a run that only measures its held-out loss, and writes only the model's caches."""
    keys = {
        "data.cache": "memory", "step.compile": "none", "step.graphs": False, "memory.shard": False,
        "memory.gradient_checkpointing": False, "validation.every_steps": 0, "validation.every_epochs": 0,
        "validation.loss_every_steps": 1, "validation.prompts": (), "validation.samples": (),
    }  # fmt: skip
    return with_values(config, keys).model_copy(update={"logging": LoggingTable(tensorboard=False)})


class Session:
    """An open run. `open` creates it, `with` closes it. source: the model's files. config: the resolved one. only: "train",
    or "measure": trains and writes nothing, and allows several sessions. quiet: print only warnings."""

    def __init__(self, config: Config, only: Literal["train", "measure"], launch: Launch) -> None:
        self.source = open_source(config, launch.ports.hub)
        self.config = resolve(config, self.source)
        self.only, self.launch, self.quiet = only, launch, False
        self.jobs: Sequence[Job] = ()
        self.errors: LossFunction | None = None
        self._open = ExitStack()
        self._running: tuple[Run, Signals] | None = None
        self._steps: Generator[SimpleNamespace] | None = None
        self._files_written = False

    def __repr__(self) -> str:
        """The folder and the step."""
        position = "not open" if self._running is None else f"step {self.step} of {self.run.plan.length.max_steps}"
        return f"Session({self.config.run.output_dir!r}: {position if self.only == 'train' else 'it measures'})"

    @classmethod
    def open(
        cls,
        config: Config,
        *,
        only: Literal["train", "measure"] = "train",
        resume_from: str | None = None,
        ports: Ports = NO_PORTS,
        loss: LossFunction | None = None,
        jobs: Sequence[Job] = (),
    ) -> Session:
        """A session of a config, to be entered by `with`. Raises UserError for settings that the model does not allow.

        resume_from: "auto", "latest", or the folder of a checkpoint. ports: parts on top of the core (workbench.PORTS: all).
        loss: (prediction, target), fp32 [B, C, H, W] -> the loss of each latent, in place of objective.loss. jobs: run
        between two steps, after the run's own. Neither is saved in a checkpoint: give them again when you resume.
        """
        if only == "measure" and (resume_from is not None or loss is not None or jobs):
            raise UserError('only="measure" trains nothing; leave out resume_from, loss and jobs')
        session = cls(config, only, Launch(resume_from, Allowance(resume_from=resume_from or "auto"), ports))
        session.errors, session.jobs = loss, jobs
        return session

    # --- before a weight is read

    def plan(self, *, processes: int = 1, phases: Phases = QUIET, scanned: Scanned | Memo | None = None) -> RunPlan:
        """The run's plan, checked without weights. scanned: scanned photos, or their memo. Raises UserError."""
        scanned = scanned or Memo(layouts=self.launch.ports.layouts or ())
        return make_plan(self.config, self.source, processes=processes, phases=phases, scanned=scanned)

    # --- to measure

    @cached_property
    def processes(self) -> Processes:
        """This process and its peers."""
        return start_processes(self.config, quiet=self.quiet)

    def components(
        self, model: ModelPlan, phases: Phases, *, attention: Attention = TORCHS_OWN, kind: Callable[..., Any] = Components
    ) -> Any:
        """The model of a plan whose weights are on this machine, with nothing loaded yet. kind: its class."""
        fused = kernels.choose(self.config.adapter.kernels, self.processes.device)
        choices = {"kernels": fused, "digests": FileDigests(phases=phases), "attention": attention}
        return kind(model, processes=self.processes, phases=phases, **choices)

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
                self._running, self._open = (run, signals), stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool | None:
        """Save the last whole step, unless a second Ctrl-C ended the block. If it is left early without an error, adapter
        files are written as for a run that stops (export.on_stop)."""
        try:
            if self._steps is not None and isinstance(error, KeyboardInterrupt):
                with suppress(KeyboardInterrupt):
                    self._steps.throw(error)
            elif self._steps is not None:
                self._steps.close()
            if error is None and self._steps is not None and not self._files_written:
                self._write_artifacts()
        except BaseException as raised:
            if not self._open.__exit__(type(raised), raised, raised.__traceback__):
                raise
        finally:
            # Frees the model although a name, or the traceback of an error, still refers to the session.
            self._running, self._steps = None, None
        return self._open.__exit__(kind, error, trace)

    @property
    def run(self) -> Run:
        """The parts of the run. Raises UserError outside of a `with` block, and in a session that only measures."""
        if self._running is None:
            raise UserError("this needs a Session that trains, inside its block: with Session.open(config) as session")
        return self._running[0]

    @property
    def step(self) -> int:
        """The number of steps done."""
        return self.run.progress.step

    def __iter__(self) -> Iterator[SimpleNamespace]:
        """The remaining steps, each after it is done, as an object with the log's fields (step, loss, lr, grad_norm, ...).
        After the last one, adapter files and report are written, as at a run's end."""
        if self._steps is None:
            self._steps = self._iterate()
        return self._steps

    def _iterate(self) -> Generator[SimpleNamespace]:
        run, signals = self.run, self._running[1]  # type: ignore[index]
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
        self._write_artifacts()

    def _write_artifacts(self) -> None:
        """Write the artifacts of a run's end or stop."""
        self._files_written, finished = True, self.step >= self.run.plan.length.max_steps
        if finished or self.config.export.on_stop:
            close(self.run, self._running[1], finished=finished)  # type: ignore[index]

    def train(self) -> bool:
        """Train to the end, or to run.stop_after; returns whether the end was reached."""
        for _ in self:
            pass
        return self.step >= self.run.plan.length.max_steps

    @property
    def lr(self) -> float:
        """The first group's next rate. Setting it scales all groups' rates; a resumed run has the config's again."""
        return self.run.step.schedule.get_last_lr()[0]

    @lr.setter
    def lr(self, value: float) -> None:
        """Scale all groups' rates. Raises UserError if the old or the new rate is not above 0."""
        schedule = self.run.step.schedule
        if not (value > 0 and self.lr > 0):
            raise UserError(f"lr = {value}: a rate above 0 is needed, and one now ({self.lr}) that can be scaled")
        share = value / self.lr
        schedule.base_lrs = [share * rate for rate in schedule.base_lrs]
        schedule._last_lr = [share * rate for rate in schedule.get_last_lr()]
        for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
            group["lr"] = rate

    def sample(self, prompt: str, **fields: Any) -> Image:
        """An image drawn with the current adapter. fields: other keys of an entry of validation.samples (docs/keys.md). Text
        encoders that the run has freed are loaded again, one by one. Raises UserError for invalid fields."""
        plan, components, state = self.run.plan, self.run.components, self.run.state
        try:
            samples = (SampleTable.model_validate({"prompt": prompt, **fields}),)
        except ValidationError as error:
            raise UserError(f"session.sample: {mistakes.explain(error.errors(include_url=False))}") from error
        keys = {"validation.prompts": (), "validation.samples": samples, "validation.every_steps": 1}
        config = with_values(self.config, keys)
        refuse_unread(config, plan.model.family)
        refuse_unread_by_model(config, plan.model.source)
        (request,) = requests_of(config.validation, (), plan.data.resolution, plan.model.family.images)
        components.load(plan.model.family.vae)
        with torch.no_grad(), state.evaluating(), state.adapter.at_strength(request.strength), components.without_below():
            conditioning = conditionings(components, [request.prompt, request.negative])
            draw = retrying(self.run.step.graphs, components.family.images.draw)
            return draw(components.model, request, conditioning(request.prompt), conditioning(request.negative))

    def export(self, path: str | Path) -> list[Path]:
        """Write the adapter in the config's formats, diffusers' to `path`. Raises NotTrained before the first update."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        return list(self.run.artifacts().export(path.name.removesuffix(".safetensors"), folder=path.parent).values())


@contextmanager
def _prepared(session: Session) -> Iterator[tuple[Run, Signals]]:
    """A block with a built run whose output folder is open, and its signals. Nothing is trained yet."""
    config, launch = session.config, session.launch
    # Before the signal handlers: a process waiting for its peers has nothing to lose and should just end.
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
        with open_output(run), nullcontext() if mirror is None else mirror.running(signals, run.progress.step):
            yield run, signals
        peers.leave_together()
