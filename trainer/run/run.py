"""A run, in the order of the data flow:

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
from trainer.checkpoint.saver import Saver
from trainer.checkpoint.state import Pieces, Progress
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
from trainer.plan.data_sources import cache_dir, open_cache
from trainer.plan.run_plan import RunPlan, fetched
from trainer.resume import pins
from trainer.resume.allowed_changes import FIXED_LOSS, LOSS, Allowance, change_lines
from trainer.resume.unlike import refuse_unlike_data, refuse_unlike_states
from trainer.run.checkpointing import Saves
from trainer.run.loop import Loop
from trainer.run.setup import Beginning, Launch, begin, disk_needs, updates_of, warn_of_disk, written_bytes
from trainer.runtime.attention import Attention
from trainer.runtime.compilation import Compiler
from trainer.runtime.context import RunContext
from trainer.runtime.device import Memory
from trainer.runtime.jobs import Fields, Job, Position


@dataclass(frozen=True)
class Run:
    """A built run, not trained yet. resumed: the checkpoint to resume. changed: --allow replaced a value pinned there."""

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
        """The trained adapter."""
        return self.state.adapter

    @property
    def progress(self) -> Progress:
        """The run's progress."""
        return self.state.progress

    @property
    def family(self) -> Family:
        """The model's family."""
        return self.plan.model.family

    @property
    def model(self) -> Model:
        """The model, as the family's functions take it."""
        return self.components.model

    @property
    def stop_after(self) -> int:
        """The last step of this start."""
        last = self.plan.length.max_steps
        return min(self.plan.config.run.stop_after or last, last)

    def updates(self) -> Iterator[list[sampler.MicroBatch]]:
        """The micro-batches of each update from the current step on, of all processes."""
        return updates_of(self.plan, after=self.progress.step)

    def data(self) -> Generator[tuple[list[sampler.MicroBatch], list[Batch]]]:
        """Each update, and this process's batches of it."""
        peers = self.context.processes
        whole, ahead = itertools.tee(self.updates())
        mine = (sampler.share(update, processes=peers.count, rank=peers.rank) for update in ahead)
        workers, pin = self.plan.config.data.num_workers, peers.device.type == "cuda"
        with closing(loader.iterate(mine, self.reader, num_workers=workers, pin=pin)) as batches:
            yield from zip(whole, batches, strict=True)

    def artifacts(self) -> Artifacts:
        """The artifacts of the run at its current step."""
        return Artifacts(self.plan, self.components, self.reader, self.state, self.origin, self.context, self.attached.page)


def build(config: Config, source: ModelSource, context: RunContext, launch: Launch) -> Run:
    """Build everything for the first step; only caches are written. config: resolved. Raises UserError."""
    allowed, ports = launch.allowed, launch.ports
    peers, phases = context.processes, context.phases
    memory = Memory.of(peers.device, config).everywhere(peers.largest)
    automatic = " (adapter.kernels = 'auto')" if config.adapter.kernels == "auto" else ""
    several = f", {peers.count} processes" if peers.count > 1 else ""
    peers.say(f"device {peers.device}{several}; kernels: {memory.kernels.name}{automatic}")
    beginning = begin(config, source, memory, launch, processes=peers.count, phases=phases, say=peers.say)
    if ports.summary is not None:
        peers.say(ports.summary.described(beginning.plan))
    plan = replace(beginning.plan, model=fetched(beginning.plan.model, peers, phases))
    pieces, saved = beginning.pieces, beginning.saved
    refuse_unlike_data(peers, plan, pieces)
    if saved is not None:
        finished = "; it is done, and nothing is left to train" if beginning.progress.step >= plan.length.max_steps else ""
        peers.say(f"resuming {saved.folder} at step {beginning.progress.step}{finished}")
    if peers.is_main:
        if ports.trackers is not None:
            ports.trackers.sign_in(plan.config)
        files.make_folder(context.layout.root, "run.output_dir")
    non_finite = NonFinite(plan.config.step.non_finite, plan.config.step.max_skipped, beginning.progress, peers.say)
    components, contents = build_components(plan, memory.kernels, beginning.attention, context, pieces)
    beginning.memo.save()
    folder = cache_dir(plan.config)
    cache = open_cache(plan.config.data, folder, lambda size: warn_of_disk({"data.cache_dir": (folder, size)}, peers.say))
    reader = encode(plan, components, cache, on_non_finite=non_finite.entry)
    state, origin, step = build_state(plan, components, beginning, allowed)
    if ports.planning is not None:
        step = replace(step, too_large=ports.planning.what_would_fit(plan, on_cpu=peers.device.type == "cpu"))
    warn_of_disk(disk_needs(plan, *written_bytes(plan, state.adapter, step.optimizer)), peers.say)
    pieces.complete()
    refuse_unlike_states(peers, config, pieces)
    give_back()
    assert beginning.environment is not None
    page = None
    if ports.pages is not None:
        about = {"contents": contents, "environment": beginning.environment.value}
        page = ports.pages.page_of(plan, components, context, beginning.progress, beginning.start, **about)
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
    """(the model, with nothing loaded yet; digests of its files by component). Enters the piece "model"."""
    cache, peers = cache_dir(plan.config), context.processes
    files.make_folder(cache, "data.cache_dir")
    digests = FileDigests(cache / "digests.json", context.phases)
    compiler = Compiler(cache / "compiled", str(attention), peers.say) if plan.config.step.compile == "blocks" else None
    choices = {"kernels": kernels, "attention": attention, "compiler": compiler}
    components = Components(plan.model, digests=digests, processes=peers, phases=context.phases, **choices)
    peers.say(str(report_captions(plan.data, components.family, components.model)))
    cached, beneath = plan.model.before_steps, {} if plan.model.under is None else {"under": plan.model.under_sha256}
    contents = plan.model.source.contents(cached, digests.of) | beneath
    pieces.enter("model", pins.pin_model(contents, cached=cached, snapshots=plan.model.source.snapshots))
    return components, contents


def build_state(
    plan: RunPlan, components: Components, beginning: Beginning, allowed: Allowance
) -> tuple[TrainState, Origin, Step]:
    """(trained state, origin for adapter files, step). Enters the remaining pieces."""
    pieces, start, progress = beginning.pieces, beginning.start, beginning.progress
    load_trained(plan, components, pieces)
    adapter, norms = build_adapter(plan.config, components, pieces)
    start.apply(adapter, norms, components.processes.say)
    origin = pieces.enter("origin", Origin(plan, progress, adapter, made_for(norms.held), start))
    old_config = beginning.saved.state("config") if beginning.saved is not None and allowed.changed else None
    state, step = build_step(plan.config, components, adapter, norms, pieces, progress, saved_config=old_config)
    if adapter.kind.magnitudes:  # else the first step would compute them, and a stop would have to wait
        with components.phases("norms of the adapted layers", len(adapter.layers), "layer") as phase:
            adapter.refresh(phase.advance)
    return state, origin, step


# --- jobs between two steps -------------------------------------------------------------------------------------------


def jobs_of(run: Run, saves: Saves) -> Sequence[Job]:
    """The jobs between two steps, in order. Jobs with fields run before the step's line is logged."""
    config, artifacts, go_on, page = run.plan.config, run.artifacts(), "go on with --resume_from auto", run.attached.page
    held_out = HeldOutLoss.of(run.plan, run.components, run.reader, run.state.evaluating)
    held_out.changed = change_lines(run.progress.changes, FIXED_LOSS)
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
    length, export, draws = run.plan.length, config.export, run.plan.length.every(config.validation)
    saved = saves.job(length.every(config.checkpoint), run.stop_after)
    samples = Job(
        name="samples were drawn",
        due=lambda at: bool(run.plan.data.requests) and at.due(draws, ends=True),
        run=retrying(run.step.graphs, artifacts.draw_samples),
        remedy=f"{go_on} and smaller samples (width, height of validation.samples), or with {undrawn}",
    )
    exported = Job(
        name="adapter files were written",
        due=lambda at: not at.at_end and at.due(length.every(export, export.first)),
        run=artifacts.export_step,
        remedy=f"{go_on} and {in_words(never('export', export))}",
    )
    # Export comes after the samples, as the first may be the files' thumbnail. The last step's files are written at the end.
    if page is None:
        return [measured, moved, saved, samples, exported]

    def show(at: Position) -> None:
        page.after_step(news=not at.fresh or any(job.due(at) for job in (measured, saved, samples, exported)))

    report = Job(name="the report was written", due=lambda at: True, run=show, remedy=run.step.too_large, shared=True)
    # Also before the samples, so that earlier news need not wait for them.
    return [measured, moved, saved, replace(report, due=samples.due), samples, exported, report]


# --- output, loop, end ------------------------------------------------------------------------------------------------


def make_loop(run: Run, signals: Signals, more: Sequence[Job] = ()) -> Loop:
    """The loop of a run whose output is open. more: jobs after the run's own."""
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
    changes = "; ".join(change_lines(state.progress.changes, LOSS, state.progress.step))

    def saved(step: int) -> None:
        context.phases.event = f"checkpoint step {step}"
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
        measurements=Measurements(fields, log, optim.levers(config.optimizer.name), peers, changes),
        non_finite=run.non_finite,
        context=context,
        signals=signals,
    )


def close(run: Run, signals: Signals, *, finished: bool) -> None:
    """Write the artifacts of a finished run, or of one that stops early."""
    signals.promise = "stopping; the last step is saved"
    if run.step.graphs is not None:
        run.step.graphs.clear()  # samples may need the memory
    try:
        artifacts = run.artifacts()
        if finished:
            artifacts.finish()
        else:
            artifacts.leave_files()
            artifacts.leave_report()
    except Interrupted as error:
        last = "the last step" if finished else f"step {run.progress.step}"
        state = f"after {last}, which is saved; adapter files or the report may be missing, or those of an earlier stop"
        raise Interrupted(error.signum, state) from None
