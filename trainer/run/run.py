"""The story of a run, in the order the data flows:

config -> model family -> quantise -> adapters -> data -> step -> checkpoint -> adapter files
"""

import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from trainer import optim
from trainer.adapters import Adapter
from trainer.adapters.norms import made_for
from trainer.artifacts.exports import Artifacts
from trainer.artifacts.ports import Attached
from trainer.artifacts.provenance import Origin
from trainer.base import files
from trainer.base.digests import FileDigests
from trainer.base.errors import Interrupted
from trainer.base.memory import give_back
from trainer.base.protocols import Kernels
from trainer.base.signals import Signals
from trainer.base.types import Batch
from trainer.checkpoint.pieces import Pieces
from trainer.checkpoint.saver import Saver
from trainer.checkpoint.state import Progress
from trainer.config import Config
from trainer.data.batches import loader, sampler
from trainer.engine.assembly import TrainState, build_adapter, build_step, load_trained
from trainer.engine.components import Components
from trainer.engine.encoding import encode, report_captions
from trainer.engine.graphs import retrying
from trainer.engine.held_out_loss import HeldOutLoss
from trainer.engine.policies import NonFinite
from trainer.engine.step import Step
from trainer.models.base import Family, Model
from trainer.models.loading import ModelSource
from trainer.monitoring import metrics
from trainer.monitoring.measurements import Measurements, change_due, change_fields
from trainer.plan.changes import in_words, never
from trainer.plan.data_sources import cache_dir
from trainer.plan.run_plan import RunPlan, fetched
from trainer.resume import pins
from trainer.resume.allowed_changes import FIXED_LOSS, LOSS, Allowance, noted
from trainer.resume.unlike import refuse_unlike_data, refuse_unlike_states
from trainer.run.checkpointing import Saves
from trainer.run.loop import Loop
from trainer.run.setup import Beginning, Launch, begin, disk_needs, opened_cache, updates_of, warn_of_disk, written_bytes
from trainer.runtime.attention import Attention
from trainer.runtime.compilation import Compiler
from trainer.runtime.context import RunContext
from trainer.runtime.device import Memory
from trainer.runtime.jobs import Fields, Job, Position


@dataclass(frozen=True)
class Run:
    """Everything that a step needs, and what a checkpoint is made of. Nothing is trained yet. resumed: the checkpoint that it
    goes on from. changed: --allow replaced a value pinned there."""

    plan: RunPlan
    context: RunContext
    resumed: Path | None
    changed: bool
    pieces: Pieces
    components: Components
    reader: loader.Reader
    origin: Origin
    state: TrainState
    step: Step
    non_finite: NonFinite
    attached: Attached

    @property
    def adapter(self) -> Adapter:
        """The adapter that is trained."""
        return self.state.adapter

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        return self.state.progress

    @property
    def family(self) -> Family:
        """The model's family."""
        return self.plan.model.family

    @property
    def model(self) -> Model:
        """The model, for the family's functions."""
        return self.components.model

    @property
    def stop_after(self) -> int:
        """The last step of this start."""
        last = self.plan.length.max_steps
        return min(self.plan.config.run.stop_after or last, last)

    def updates(self) -> Iterator[list[sampler.MicroBatch]]:
        """Every update's micro-batches, of all processes, from the present step on."""
        return updates_of(self.plan, after=self.progress.step)

    def data(self) -> Generator[tuple[list[sampler.MicroBatch], list[Batch]]]:
        """Every update, and this process's share of it, read."""
        peers = self.context.processes
        whole, ahead = itertools.tee(self.updates())
        mine = (sampler.share(update, processes=peers.count, rank=peers.rank) for update in ahead)
        workers, pin = self.plan.config.data.num_workers, peers.device.type == "cuda"
        with closing(loader.iterate(mine, self.reader, num_workers=workers, pin=pin)) as batches:
            yield from zip(whole, batches, strict=True)

    def artifacts(self) -> Artifacts:
        """What the run leaves for people, at its present step."""
        return Artifacts(self.plan, self.components, self.reader, self.state, self.origin, self.context, self.attached.page)


def build(config: Config, source: ModelSource, context: RunContext, launch: Launch) -> Run:
    """Everything up to the first step; only caches are written. config: the resolved one. Raises UserError."""
    allowed, ports = launch.allowed, launch.ports
    peers, phases = context.processes, context.phases
    there = Memory.of(peers.device, config).everywhere(peers.largest)
    which = " (adapter.kernels = 'auto')" if config.adapter.kernels == "auto" else ""
    several = f", {peers.count} processes" if peers.count > 1 else ""
    peers.say(f"device {peers.device}{several}; kernels: {there.kernels.name}{which}")
    begun = begin(config, source, there, launch, processes=peers.count, phases=phases, say=peers.say)
    if ports.summary is not None:
        peers.say(ports.summary.described(begun.plan))
    plan = replace(begun.plan, model=fetched(begun.plan.model, peers, phases))
    pieces, saved = begun.pieces, begun.saved
    refuse_unlike_data(peers, plan, pieces)
    if saved is not None:
        done = "; it is done, and nothing is left to train" if begun.progress.step >= plan.length.max_steps else ""
        peers.say(f"resuming {saved.folder} at step {begun.progress.step}{done}")
    if peers.is_main:
        if ports.trackers is not None:
            ports.trackers.sign_in(plan.config)
        files.make_folder(context.layout.root, "run.output_dir")
    non_finite = NonFinite(plan.config.step.non_finite, plan.config.step.max_skipped, begun.progress, peers.say)
    components, contents = build_components(plan, there.kernels, begun.attention, context, pieces)
    begun.memo.save()
    reader = encode(plan, components, opened_cache(plan, peers.say), on_non_finite=non_finite.entry)
    state, origin, step = build_state(plan, components, begun, allowed)
    if ports.planning is not None:
        step = replace(step, too_large=ports.planning.what_would_fit(plan, on_cpu=peers.device.type == "cpu"))
    warn_of_disk(disk_needs(plan, *written_bytes(plan, state.adapter, step.optimizer)), peers.say)
    pieces.complete()
    refuse_unlike_states(peers, config, pieces)
    give_back()
    assert begun.environment is not None
    page = None
    if ports.pages is not None:
        about = {"contents": contents, "environment": begun.environment.value}
        page = ports.pages.page_of(plan, components, context, begun.progress, begun.start, **about)
    return Run(
        plan=plan,
        context=context,
        resumed=saved.folder if saved else None,
        changed=bool(allowed.changed),
        pieces=pieces,
        components=components,
        reader=reader,
        origin=origin,
        state=state,
        step=step,
        non_finite=non_finite,
        attached=Attached(page, trackers=ports.trackers),
    )


def build_components(
    plan: RunPlan, kernels: Kernels, attention: Attention, context: RunContext, pieces: Pieces
) -> tuple[Components, Mapping[str, str]]:
    """(the model, of which nothing is loaded yet; digests of its files by component). Enters the files as a piece."""
    cache, peers = cache_dir(plan.config), context.processes
    files.make_folder(cache, "data.cache_dir")
    digests = FileDigests(cache / "digests.json", context.phases)
    compiler = Compiler(cache / "compiled", str(attention), peers.say) if plan.config.step.compile == "blocks" else None
    given = {"kernels": kernels, "attention": attention, "compiler": compiler}
    components = Components(plan.model, digests=digests, processes=peers, phases=context.phases, **given)
    peers.say(str(report_captions(plan.data, components.family, components.model)))
    cached, beneath = plan.model.before_steps, {} if plan.model.under is None else {"under": plan.model.under_sha256}
    contents = plan.model.source.contents(cached, digests.of) | beneath
    pieces.enter("model", pins.pin_model(contents, cached=cached, snapshots=plan.model.source.snapshots))
    return components, contents


def build_state(
    plan: RunPlan, components: Components, begun: Beginning, allowed: Allowance
) -> tuple[TrainState, Origin, Step]:
    """(what the steps change, what adapter files say of the run, the step). Enters the rest of the pieces."""
    pieces, start, progress = begun.pieces, begun.start, begun.progress
    load_trained(plan, components, pieces)
    adapter, norms = build_adapter(plan.config, components, pieces)
    start.apply(adapter, norms, components.processes.say)
    origin = pieces.enter("origin", Origin(plan, progress, adapter, made_for(norms.held), start))
    then = begun.saved.state("config") if begun.saved is not None and allowed.changed else None
    state, step = build_step(plan.config, components, adapter, norms, pieces, progress, saved_config=then)
    if adapter.kind.magnitudes:  # else they would be made in the first step, which a stop has to wait for
        with components.phases("norms of the adapted layers", len(adapter.layers), "layer") as phase:
            adapter.refresh(phase.advance)
    return state, origin, step


# --- what is done between two steps -----------------------------------------------------------------------------------


def jobs_of(run: Run, saves: Saves) -> Sequence[Job]:
    """What the run does beside training, in this order; those that give fields before the step's line of the log."""
    config, artifacts, go_on, page = run.plan.config, run.artifacts(), "go on with --resume_from auto", run.attached.page
    held_out = HeldOutLoss.of(run.plan, run.components, run.reader, run.state.evaluating)
    held_out.changed = noted(run.progress.changes, FIXED_LOSS)
    held_out.errors = retrying(run.step.graphs, held_out.errors)

    def change(at: Position) -> Fields:
        with run.state.evaluating():
            return change_fields(run.adapter, run.origin.start.weights, run.context.phases)

    measured = Job(
        name="the held-out loss was measured",
        due=lambda at: at.due(config.validation.loss_every_steps, ends=True),
        run=lambda at: held_out.measure(),
        remedy=f"{go_on} and validation.loss_every_steps = 0",
        shared=True,
        fields=held_out.names,
        mark=held_out.mark,
    )
    moved = Job(
        name="the change of the weights was measured",
        due=change_due,
        run=retrying(run.step.graphs, change),
        remedy=run.step.too_large,
        fields=("weight_change",),
    )
    undrawn = in_words(never("validation", config.validation))
    length, export, drawn = run.plan.length, config.export, run.plan.length.every(config.validation)
    saved = saves.job(length.every(config.checkpoint), run.stop_after)
    samples = Job(
        name="samples were drawn",
        due=lambda at: bool(run.plan.data.requests) and at.due(drawn, ends=True),
        run=retrying(run.step.graphs, artifacts.draw_samples),
        remedy=f"{go_on} and smaller samples (width, height of validation.samples), or with {undrawn}",
    )
    exported = Job(
        name="adapter files were written",
        due=lambda at: not at.at_end and at.due(length.every(export, export.first)),
        run=artifacts.export_step,
        remedy=f"{go_on} and {in_words(never('export', export))}",
    )
    # After the samples, whose first one may be the files' thumbnail. The last step's files are written at the end.
    if page is None:
        return [measured, moved, saved, samples, exported]

    def show(at: Position) -> None:
        page.after_step(news=not at.fresh or any(job.due(at) for job in (measured, saved, samples, exported)))

    shown = Job(name="the report was written", due=lambda at: True, run=show, remedy=run.step.too_large, shared=True)
    # Before the samples, too: what is new by then need not wait until they are drawn.
    return [measured, moved, saved, replace(shown, due=samples.due), samples, exported, shown]


# --- output, loop, end ------------------------------------------------------------------------------------------------


def make_loop(run: Run, signals: Signals, more: Sequence[Job] = ()) -> Loop:
    """The steps of a run whose output is open. more: jobs after the run's own."""
    plan, config, state, context = run.plan, run.plan.config, run.state, run.context
    peers, layout, attached = context.processes, context.layout, run.attached
    log = metrics.Metrics(
        layout.metrics,
        trackers=attached.trackers.open_trackers(config, context, state.progress) if attached.trackers else (),
        total_steps=plan.length.max_steps,
        initial_step=state.progress.step,
        enabled=peers.is_main,
        phases=context.phases,
    )
    changed = "; ".join(noted(state.progress.changes, LOSS, state.progress.step))

    def saved(step: int) -> None:
        context.phases.made(f"checkpoint step {step}")
        if attached.mirror is not None:
            attached.mirror.offer(step)

    saver = Saver(
        layout.checkpoints,
        keep_last=config.checkpoint.keep_last,
        background=config.checkpoint.background,
        before=log.sync,
        after=saved,
        during=peers.undisturbed,
        step=state.progress.step,
    )
    saves = Saves(
        pieces=run.pieces,
        saver=saver,
        progress=state.progress,
        is_finite=state.optimizer.is_finite,
        lr=config.optimizer.lr,
        on_failure=config.checkpoint.on_failure,
        context=context,
        every_minutes=config.checkpoint.every_minutes,
    )
    jobs = [*jobs_of(run, saves), *more]
    fields = [job for job in jobs if job.fields]
    return Loop(
        step=run.step,
        data=run.data(),
        state=state,
        last=plan.length.max_steps,
        stop_after=run.stop_after,
        saves=saves,
        jobs=[job for job in jobs if not job.fields],
        measurements=Measurements(fields, log, optim.levers(config.optimizer.name), peers, changed),
        non_finite=run.non_finite,
        context=context,
        signals=signals,
    )


def close(run: Run, signals: Signals, *, finished: bool) -> None:
    """Leave what a whole run leaves for people, or what one does that stops before its end."""
    signals.promise = "stopping; the last step is saved"
    if run.step.graphs is not None:
        run.step.graphs.clear()  # pictures may need the memory
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
