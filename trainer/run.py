"""The story of a run, in the order the data flows:

config -> model family -> quantise -> adapters -> data -> step -> checkpoint -> adapter files
"""

import gc
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trainer import files, kernels, metrics, optim, resume
from trainer.adapters import Adapter
from trainer.adapters.norms import Norms, made_for
from trainer.advice import changes, fitted
from trainer.allowance import Allowance
from trainer.artifacts import Artifacts
from trainer.assembly import build_adapter, build_step, load_trained
from trainer.checkpoint.pieces import Pieces
from trainer.checkpoint.saver import Saver
from trainer.checkpoint.state import Progress
from trainer.components import Components
from trainer.config import Config
from trainer.data import identity, loader, sampler
from trainer.dataset import open_cache
from trainer.describe import describe, describe_memory
from trainer.devices import Memory, accelerator_of, base_of, check_device, start_processes
from trainer.digests import FileDigests
from trainer.ema import Averages
from trainer.encoding import encode, report_captions
from trainer.errors import Interrupted
from trainer.forecast import forecast
from trainer.held_out_loss import HeldOutLoss
from trainer.layout import AVERAGE, Layout
from trainer.loop import Loop
from trainer.measured import Measured, WeightChange
from trainer.memory import give_back
from trainer.models.base import Family, Model
from trainer.models.loading import ModelSource
from trainer.origin import Origin
from trainer.output import opened
from trainer.phases import QUIET, Phases, Record
from trainer.plan import Plan, fetched, make_plan, open_source, resolve
from trainer.policies import NonFinite, what_would_fit
from trainer.processes import Processes
from trainer.saving import Saves
from trainer.signals import Signals
from trainer.start import open_start
from trainer.step import Step
from trainer.stopped import leave_in_time
from trainer.terminal import write


def preview(config: Config, memory: int | None = None) -> None:
    """Print what a run would do, and whether it fits into memory.

    memory: bytes of the accelerator that is planned for; None: of the device that this machine has.
    """
    source = open_source(config)
    config = resolve(config, source)
    there = accelerator_of(config, memory) if memory is not None else Memory.of(check_device(config), config)
    count = int(os.environ.get("WORLD_SIZE", "1"))
    plan = make_plan(config, source, processes=count, phases=Phases(show=True))
    open_start(plan)
    plan = fitted(plan, there.kernels, base=there.base)
    write(describe(plan, sizes=True))
    found = forecast(plan, there.kernels, base=there.base)
    smaller = [] if found.fits(there.size) else changes(plan, there.kernels, found, there.size)
    write(describe_memory(found, there.size, smaller, updates=config.step.accumulation))


def train(config: Config, *, resume_from: str | None, allowed: Allowance | None = None) -> None:
    """Train to the end, to `run.stop_after`, or until a signal. Raises what cli.py turns into exit statuses."""
    source = open_source(config)
    config = resolve(config, source)
    # Before the signal handlers: a process that waits for its peers has nothing to lose and should just end.
    peers = start_processes(config)
    with Signals() as signals, peers.attending(signals):
        phases = Phases(check=peers.check, show=peers.is_main, record=Record() if peers.is_main else None)
        run = build(config, source, peers, resume_from=resume_from, allowed=allowed, phases=phases)
        # Off since the process started (cli.py).
        gc.enable()
        config, step, resumed, changed = run.plan.config, run.progress.step, run.resumed, run.changed
        with opened(config, run.pieces, step=step, resumed=resumed, changed=changed, processes=peers, phases=phases):
            try:
                finished = make_loop(run, signals).run()
            except Interrupted:
                if config.export.on_stop and run.progress.step:
                    leave_in_time(run.artifacts(), signals)
                raise
            if finished or config.export.on_stop:
                close(run, signals, finished=finished)


@dataclass(frozen=True)
class Run:
    """What `build` made: everything that a step needs, and what a checkpoint is made of. Nothing is trained yet.

    resumed: the checkpoint that it goes on from. changed: whether --allow changed what is pinned there.
    """

    plan: Plan
    processes: Processes
    phases: Phases
    layout: Layout
    resumed: Path | None
    changed: bool
    pieces: Pieces
    progress: Progress
    components: Components
    reader: loader.Reader
    adapter: Adapter
    norms: Norms
    origin: Origin
    optimizer: optim.OptimizerState
    averages: Averages
    step: Step
    non_finite: NonFinite

    @property
    def family(self) -> Family:
        return self.plan.family

    @property
    def model(self) -> Model:
        return self.components.model

    def updates(self) -> Iterator[list[sampler.MicroBatch]]:
        """Every update's micro-batches, of all processes, from the present step on."""
        config = self.plan.config
        return sampler.all_updates(
            self.plan.examples,
            seed=config.run.seed,
            batch_size=config.data.batch_size,
            accumulation=config.step.accumulation,
            processes=self.processes.count,
            after=self.progress.step,
            fill=config.data.short_batches == "merge",
            began=self.plan.began,
        )

    def evaluating(self) -> AbstractContextManager[None]:
        """Inside, the adapter has the weights to be used; afterwards, bit for bit those it trains with."""
        return self.optimizer.evaluating(self.adapter.mark_stale)

    def artifacts(self) -> Artifacts:
        weights = {"": self.evaluating} | ({AVERAGE: self.averages.used} if self.averages.weights else {})
        about = self.adapter, self.norms, self.progress, self.origin, self.layout
        return Artifacts(self.components, self.reader, *about, weights, self.averages)


def build(
    config: Config,
    source: ModelSource,
    peers: Processes,
    *,
    resume_from: str | None,
    allowed: Allowance | None = None,
    phases: Phases = QUIET,
) -> Run:
    """Everything up to the first step. config: as `resolve` gives. Reads the checkpoint to go on from; writes only caches.

    Raises UserError for all that can be refused without a step.
    """
    allowed = allowed or Allowance(resume_from=resume_from or "auto")
    saved, passed_over = resume.find_start(config, resume_from, allowed, phases)
    plan = make_plan(config, source, processes=peers.count, phases=phases)
    start = open_start(plan, resumed=saved is not None)
    chosen = kernels.choose(config.adapter.kernels, peers.device)
    plan = fitted(plan, chosen, base=base_of(peers.device))
    config = plan.config
    for line in passed_over:
        peers.say(f"warning: {line}")
    asked = " (adapter.kernels = 'auto')" if config.adapter.kernels == "auto" else ""
    peers.say(f"device {peers.device}, {peers.count} process(es); kernels: {chosen.name}{asked}")
    layout, pieces = Layout(Path(config.run.output_dir)), Pieces(saved, resume.census(config))
    pieces.enter("config", resume.pin_config(config, allowed=allowed))
    progress = pieces.enter("progress", resume.first_progress(plan))
    start.enter(pieces)
    photos = resume.pin_data(
        digests=identity.fingerprint(plan.examples),
        photos=identity.photo_digests(plan.examples),
        samples=len(plan.photos),
        micro_batches=config.step.accumulation * plan.processes,
        steps_per_epoch=plan.steps_per_epoch,
        allowed=allowed,
    )
    pieces.enter("data", photos)
    plan = resume.go_on(plan, progress, allowed, peers.say)
    peers.say(describe(plan, sizes=False))
    plan = fetched(plan, peers, phases)
    deterministic, optimizer = config.run.deterministic, config.optimizer.name
    environment = resume.pin_environment(peers, chosen.name, optimizer, deterministic=deterministic, say=peers.say)
    pieces.enter("environment", environment)
    if saved is not None:
        resume.check_length(plan, progress, saved.folder)
        peers.say(f"resuming {saved.folder} at step {progress.step}")
    if peers.is_main:
        files.make_folder(layout.root, "run.output_dir")
    non_finite = NonFinite(config.step.non_finite, config.step.max_skipped, progress, peers.say)

    cache_dir = Path(config.data.cache_dir or layout.cache)
    files.make_folder(cache_dir, "data.cache_dir")
    components = Components(
        plan, kernels=chosen, digests=FileDigests(cache_dir / "digests.json", phases), processes=peers, phases=phases
    )
    peers.say(str(report_captions(plan, components.model)))
    cached = (plan.family.vae, *(plan.family.text_encoders if plan.cache_text else ()))
    contents, snapshots = plan.source.contents(cached, components.digests.of), plan.source.snapshots
    pieces.enter("model", resume.pin_model(contents, cached=cached, snapshots=snapshots))
    reader = encode(components, open_cache(config.data, cache_dir), on_non_finite=non_finite.entry)
    load_trained(components, pieces)
    adapter, norms = build_adapter(plan, components, pieces)
    start.apply(adapter, norms, peers.say)
    origin = pieces.enter("origin", Origin(plan, progress, adapter, made_for(norms.held), start))
    then = saved.state("config") if saved is not None and allowed.changed else None
    optimizer, averages, step = build_step(components, adapter, pieces, progress, then=then)
    norms.used = partial(optimizer.evaluating, adapter.mark_stale)
    pieces.complete()
    if adapter.dora:
        # They would be made in the first step, which a stop has to wait for.
        with phases("norms of the adapted layers", len(adapter.layers), "layer") as phase:
            adapter.refresh(phase.advance)
    give_back()
    return Run(
        plan=plan,
        processes=peers,
        phases=phases,
        layout=layout,
        resumed=saved.folder if saved else None,
        changed=bool(allowed.changed),
        pieces=pieces,
        progress=progress,
        components=components,
        reader=reader,
        adapter=adapter,
        norms=norms,
        origin=origin,
        optimizer=optimizer,
        averages=averages,
        step=step,
        non_finite=non_finite,
    )


# --- output, loop, end ------------------------------------------------------------------------------------------------


def make_loop(run: Run, signals: Signals) -> Loop:
    """The steps of a run whose output is open."""
    plan, config, progress, peers = run.plan, run.plan.config, run.progress, run.processes
    log = metrics.Metrics(
        run.layout.metrics,
        tensorboard=run.layout.tensorboard if config.logging.tensorboard else None,
        total_steps=plan.max_steps,
        initial_step=progress.step,
        enabled=peers.is_main,
        # It is shown, no more: the loop looks at signals between two steps, and the log itself tells what they took.
        phases=Phases(show=run.phases.show),
    )
    saver = Saver(
        run.layout.checkpoints,
        keep_last=config.checkpoint.keep_last,
        background=config.checkpoint.background,
        before=log.sync,
        step=progress.step,
    )
    saves = Saves(
        pieces=run.pieces,
        saver=saver,
        progress=progress,
        is_finite=run.optimizer.is_finite,
        lr=config.optimizer.lr,
        on_failure=config.checkpoint.on_failure,
        processes=peers,
        phases=run.phases,
    )
    mine = (sampler.share(update, processes=peers.count, rank=peers.rank) for update in run.updates())
    return Loop(
        step=run.step,
        updates=run.updates(),
        batches=loader.iterate(mine, run.reader, num_workers=config.data.num_workers, pin=peers.device.type == "cuda"),
        progress=progress,
        last=plan.max_steps,
        stop_after=min(config.run.stop_after or plan.max_steps, plan.max_steps),
        save_every=config.checkpoint.every_steps,
        saves=saves,
        after_step=run.artifacts().after_step,
        measured=Measured(
            [
                HeldOutLoss.of(run.components, run.reader, run.evaluating),
                WeightChange(run.adapter, run.origin.start.weights, run.evaluating, peers, run.phases),
            ],
            log,
            optim.levers(config.optimizer.name),
            peers,
        ),
        non_finite=run.non_finite,
        too_large=what_would_fit(plan),
        processes=peers,
        signals=signals,
    )


def close(run: Run, signals: Signals, *, finished: bool) -> None:
    """Leave what a whole run leaves for people, or what one does that stops before its end."""
    signals.promise = "stopping; the last step is saved"
    try:
        artifacts = run.artifacts()
        if finished:
            artifacts.finish()
        else:
            artifacts.leave_files()
            artifacts.leave_report()
    except Interrupted as error:
        last = "the last step" if finished else f"step {run.progress.step}"
        where = f"after {last}, which is saved; adapter files or the report may be missing, or those of an earlier stop"
        raise Interrupted(error.signum, where) from None
