"""The story of a run, in the order the data flows:

config -> model family -> quantise -> adapters -> data -> step -> checkpoint -> adapter files
"""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer import kernels, optim
from trainer.adapters import Adapter
from trainer.adapters.norms import made_for
from trainer.artifacts.exports import Artifacts
from trainer.artifacts.on_stop import leave_in_time
from trainer.artifacts.provenance import Origin
from trainer.artifacts.run_report import report_of
from trainer.base import files
from trainer.base.digests import FileDigests
from trainer.base.errors import TOO_LARGE, Interrupted
from trainer.base.memory import give_back
from trainer.base.progress import QUIET, Phases, Record
from trainer.base.run_layout import Layout
from trainer.base.signals import Signals
from trainer.checkpoint.pieces import Pieces
from trainer.checkpoint.saver import Saver
from trainer.checkpoint.state import Progress
from trainer.config import Config
from trainer.data.batches import loader, sampler
from trainer.engine.assembly import TrainState, build_adapter, build_step, load_trained
from trainer.engine.components import Components
from trainer.engine.encoding import encode, report_captions
from trainer.engine.held_out_loss import HeldOutLoss
from trainer.engine.policies import NonFinite, what_would_fit
from trainer.engine.step import Step
from trainer.models.base import Family, Model
from trainer.models.loading import ModelSource
from trainer.monitoring import metrics
from trainer.monitoring.measurements import Measured, change_due, change_fields
from trainer.monitoring.trackers import sign_in
from trainer.plan.data_sources import open_cache
from trainer.plan.describe import describe
from trainer.plan.run_plan import Plan, fetched, open_source, resolve
from trainer.report import LiveReport, first_page
from trainer.resume import pins
from trainer.resume.allowed_changes import Allowance
from trainer.run.checkpointing import Saves
from trainer.run.loop import Loop
from trainer.run.output_folder import open_trackers, opened
from trainer.run.setup import begin, cache_dir
from trainer.runtime.device import base_of, start_processes
from trainer.runtime.jobs import Fields, Job, Position
from trainer.runtime.processes import Processes


def train(config: Config, *, resume_from: str | None, allowed: Allowance | None = None) -> bool:
    """Train to the end, to `run.stop_after`, or until a signal. Returns whether the end was reached. Raises what main.py
    turns into exit statuses."""
    source = open_source(config)
    config = resolve(config, source)
    # Before the signal handlers: a process that waits for its peers has nothing to lose and should just end.
    peers = start_processes(config)
    with Signals() as signals, peers.attending(signals):
        record = Record() if peers.is_main else None
        phases = Phases(check=peers.check, show=peers.is_main, every=config.logging.every_seconds, record=record)
        with first_page(Layout(Path(config.run.output_dir)), name=config.run.name, enabled=peers.is_main):
            run = build(config, source, peers, resume_from=resume_from, allowed=allowed, phases=phases)
        gc.enable()  # off since the process started (main.py)
        config, step, resumed, changed = run.plan.config, run.progress.step, run.resumed, run.changed
        about = {"step": step, "total": run.plan.max_steps, "resumed": resumed, "changed": changed}
        with opened(config, run.pieces, **about, processes=peers, phases=phases), run.report:
            try:
                finished = make_loop(run, signals).run()
            except Interrupted:
                if config.export.on_stop and run.progress.step:
                    leave_in_time(run.artifacts(), signals)
                raise
            if finished or config.export.on_stop:
                close(run, signals, finished=finished)
            return finished


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
    components: Components
    reader: loader.Reader
    origin: Origin
    state: TrainState
    step: Step
    non_finite: NonFinite
    report: LiveReport

    @property
    def adapter(self) -> Adapter:
        return self.state.adapter

    @property
    def progress(self) -> Progress:
        return self.state.progress

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

    def artifacts(self) -> Artifacts:
        return Artifacts(self.components, self.reader, self.state, self.origin, self.layout, self.report)


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
    Raises UserError for all that can be refused without a step."""
    allowed = allowed or Allowance(resume_from=resume_from or "auto")
    chosen = kernels.choose(config.adapter.kernels, peers.device)
    asked = " (adapter.kernels = 'auto')" if config.adapter.kernels == "auto" else ""
    peers.say(f"device {peers.device}, {peers.count} process(es); kernels: {chosen.name}{asked}")
    begun = begin(
        config,
        source,
        processes=peers.count,
        device=peers.device,
        kernels=chosen,
        base=base_of(peers.device),
        resume_from=resume_from,
        allowed=allowed,
        phases=phases,
        say=peers.say,
    )
    assert begun.environment is not None
    layout, saved, pieces, progress, start = begun.layout, begun.saved, begun.pieces, begun.progress, begun.start
    peers.say(describe(begun.plan, sizes=False))
    plan = fetched(begun.plan, peers, phases)
    config = plan.config
    if saved is not None:
        peers.say(f"resuming {saved.folder} at step {progress.step}")
    if peers.is_main:
        if config.logging.wandb:
            sign_in()
        files.make_folder(layout.root, "run.output_dir")
    non_finite = NonFinite(config.step.non_finite, config.step.max_skipped, progress, peers.say)
    cache = cache_dir(config)
    files.make_folder(cache, "data.cache_dir")
    digests = FileDigests(cache / "digests.json", phases)
    components = Components(plan, kernels=chosen, digests=digests, processes=peers, phases=phases)
    peers.say(str(report_captions(plan, components.model)))
    cached = (plan.family.vae, *(plan.family.text_encoders if plan.cache_text else ()))
    contents, snapshots = plan.source.contents(cached, components.digests.of), plan.source.snapshots
    pieces.enter("model", pins.pin_model(contents, cached=cached, snapshots=snapshots))
    reader = encode(components, open_cache(config.data, cache), on_non_finite=non_finite.entry)
    load_trained(components, pieces)
    adapter, norms = build_adapter(plan, components, pieces)
    start.apply(adapter, norms, peers.say)
    origin = pieces.enter("origin", Origin(plan, progress, adapter, made_for(norms.held), start))
    then = saved.state("config") if saved is not None and allowed.changed else None
    state, step = build_step(components, adapter, norms, pieces, progress, then=then)
    pieces.complete()
    if adapter.dora:  # else they would be made in the first step, which a stop has to wait for
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
        components=components,
        reader=reader,
        origin=origin,
        state=state,
        step=step,
        non_finite=non_finite,
        report=report_of(components, layout, progress, start, contents=contents, environment=begun.environment.value),
    )


# --- what is done between two steps -----------------------------------------------------------------------------------


def jobs_of(run: Run) -> tuple[Job, ...]:
    """What the run does beside training, in this order; those that give fields before the checkpoint of the step."""
    config, artifacts, go_on = run.plan.config, run.artifacts(), "go on with --resume_from auto"
    held_out = HeldOutLoss.of(run.components, run.reader, run.state.evaluating)

    def change(at: Position) -> Fields:
        with run.state.evaluating():
            return change_fields(run.adapter, run.origin.start.weights, run.phases)

    return (
        Job(
            name="the held-out loss was measured",
            due=lambda at: at.due(config.validation.loss_every_steps, ends=True),
            run=lambda at: held_out.measure(),
            remedy=f"{go_on} and validation.loss_every_steps = 0",
            shared=True,
            fields=held_out.names,
            mark=held_out.mark,
        ),
        Job(
            name="the change of the weights was measured",
            due=change_due,
            run=change,
            remedy=TOO_LARGE,
            fields=("weight_change",),
        ),
        Job(
            name="averages were set aside",
            due=lambda at: run.state.averages.updates > 0 and at.due(config.ema.snapshot_every_steps, ends=True),
            run=lambda at: artifacts.set_aside(),
            remedy=f"{go_on}, which sets them aside before its first step; or do without them from here on, with "
            "ema.snapshot_every_steps = 0 beside it",
        ),
        Job(
            name="samples were drawn",
            due=lambda at: bool(run.plan.requests) and at.due(config.validation.every_steps, ends=True),
            run=artifacts.draw_samples,
            remedy=f"{go_on} and smaller samples (width, height of validation.samples), or with validation.every_steps = 0",
        ),
        # After the samples, whose first one may be the files' thumbnail. Those of the last step come with the end.
        Job(
            name="adapter files were written",
            due=lambda at: not at.at_end and at.due(config.export.every_steps),
            run=artifacts.export_step,
            remedy=f"{go_on} and export.every_steps = 0",
        ),
        Job(name="the report was written", due=lambda at: True, run=artifacts.show, remedy=TOO_LARGE, shared=True),
    )


# --- output, loop, end ------------------------------------------------------------------------------------------------


def make_loop(run: Run, signals: Signals) -> Loop:
    """The steps of a run whose output is open."""
    plan, config, progress, peers = run.plan, run.plan.config, run.progress, run.processes
    log = metrics.Metrics(
        run.layout.metrics,
        trackers=open_trackers(config, run.layout, progress, peers),
        total_steps=plan.max_steps,
        initial_step=progress.step,
        enabled=peers.is_main,
        phases=run.phases,
    )
    saver = Saver(
        run.layout.checkpoints,
        keep_last=config.checkpoint.keep_last,
        background=config.checkpoint.background,
        before=log.sync,
        after=lambda step: run.phases.made(f"checkpoint step {step}"),
        during=peers.undisturbed,
        step=progress.step,
    )
    jobs = jobs_of(run)
    saves = Saves(
        pieces=run.pieces,
        saver=saver,
        progress=progress,
        is_finite=run.state.optimizer.is_finite,
        lr=config.optimizer.lr,
        on_failure=config.checkpoint.on_failure,
        processes=peers,
        phases=run.phases,
        every_minutes=config.checkpoint.every_minutes,
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
        jobs=[job for job in jobs if not job.fields],
        measured=Measured([job for job in jobs if job.fields], log, optim.levers(config.optimizer.name), peers),
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
