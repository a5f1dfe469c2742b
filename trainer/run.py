"""The story of a run, in the order the data flows:

config -> model family -> quantise -> adapters -> data -> step -> checkpoint -> adapter files
"""

import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trainer import files, kernels, metrics, optim, precision, quantization, resume
from trainer.adapters import Adapter, export, inject
from trainer.adapters.norms import Norms, made_for
from trainer.artifacts import Artifacts
from trainer.checkpoint.pieces import Pieces
from trainer.checkpoint.saver import Saver
from trainer.checkpoint.state import Progress
from trainer.components import Components
from trainer.config import Config
from trainer.data import loader, sampler
from trainer.data.cache import Cache
from trainer.describe import describe
from trainer.devices import check_device, start_processes
from trainer.digests import FileDigests
from trainer.encoding import encode, report_captions
from trainer.errors import Interrupted
from trainer.layout import Layout
from trainer.loop import Loop
from trainer.memory import checkpoint_blocks, find_blocks
from trainer.models.base import Family, Model
from trainer.models.loading import ModelSource
from trainer.output import opened
from trainer.phases import QUIET, Phases, Record
from trainer.plan import Plan, fetched, make_plan, open_source, resolve
from trainer.policies import NonFinite, what_would_fit
from trainer.processes import Processes
from trainer.quantization import FrozenConv2d, FrozenLinear
from trainer.saving import Saves
from trainer.signals import Signals
from trainer.step import Step, batch_losses
from trainer.storage import held_as
from trainer.terminal import write


def preview(config: Config) -> None:
    """Print what a run would do."""
    source = open_source(config)
    config = resolve(config, source)
    check_device(config)
    count = int(os.environ.get("WORLD_SIZE", "1"))
    write(describe(make_plan(config, source, processes=count, phases=Phases(show=True)), sizes=True))


def train(config: Config, *, resume_from: str | None) -> None:
    """Train to the end, to `run.stop_after`, or until a signal. Raises what cli.py turns into exit statuses."""
    source = open_source(config)
    config = resolve(config, source)
    # Before the signal handlers: a process that waits for its peers has nothing to lose and should just end.
    peers = start_processes(config)
    with Signals() as signals, peers.attending(signals):
        phases = Phases(check=peers.check, show=peers.is_main, record=Record() if peers.is_main else None)
        run = build(config, source, peers, resume_from=resume_from, phases=phases)
        # Off since the process started (cli.py).
        gc.enable()
        with opened(config, run.pieces, step=run.progress.step, resumed=run.resumed, processes=peers, phases=phases):
            if make_loop(run, signals).run():
                finish(run, signals)


@dataclass(frozen=True)
class Run:
    """What `build` made: everything that a step needs, and what a checkpoint is made of. Nothing is trained yet.

    resumed: the checkpoint that it goes on from.
    """

    plan: Plan
    processes: Processes
    phases: Phases
    layout: Layout
    resumed: Path | None
    pieces: Pieces
    progress: Progress
    components: Components
    reader: loader.Reader
    adapter: Adapter
    norms: Norms
    optimizer: optim.OptimizerState
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
            self.plan.photos,
            seed=config.run.seed,
            batch_size=config.data.batch_size,
            accumulation=config.step.accumulation,
            processes=self.processes.count,
            after=self.progress.step,
        )

    def artifacts(self) -> Artifacts:
        evaluating = partial(self.optimizer.evaluating, self.adapter.mark_stale)
        return Artifacts(self.components, self.reader, self.adapter, self.norms, self.progress, self.layout, evaluating)


def build(config: Config, source: ModelSource, peers: Processes, *, resume_from: str | None, phases: Phases = QUIET) -> Run:
    """Everything up to the first step. config: as `resolve` gives. Reads the checkpoint to go on from; writes only caches.

    Raises UserError for all that can be refused without a step.
    """
    saved, passed_over = resume.find_start(config, resume_from, phases)
    plan = make_plan(config, source, processes=peers.count, phases=phases)
    chosen = kernels.choose(config.adapter.kernels, peers.device)
    for line in passed_over:
        peers.say(f"warning: {line}")
    asked = " (adapter.kernels = 'auto')" if config.adapter.kernels == "auto" else ""
    peers.say(f"device {peers.device}, {peers.count} process(es); kernels: {chosen.name}{asked}")
    peers.say(describe(plan, sizes=False))
    plan = fetched(plan, peers, phases)

    layout, pieces = Layout(Path(config.run.output_dir)), Pieces(saved, resume.census(config))
    pieces.enter("config", resume.pin_config(config))
    progress = pieces.enter("progress", resume.first_progress(plan))
    photos, micro_batches = sampler.fingerprint(plan.photos), config.step.accumulation * plan.processes
    pieces.enter("data", resume.pin_data(digests=photos, samples=len(plan.photos), micro_batches=micro_batches))
    environment = resume.pin_environment(peers, kernels=chosen.name, deterministic=config.run.deterministic, say=peers.say)
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
    peers.say(report_captions(components))
    cached = (plan.family.vae, *(plan.family.text_encoders if plan.cache_text else ()))
    contents, snapshots = plan.source.contents(cached, components.digests.of), plan.source.snapshots
    pieces.enter("model", resume.pin_model(contents, cached=cached, snapshots=snapshots))
    reader = encode(components, Cache(cache_dir), on_non_finite=non_finite.entry)
    load_trained(components, pieces)
    adapter, norms = build_adapter(plan, components, pieces)
    optimizer, step = build_step(components, adapter, pieces, progress)
    pieces.complete()
    if adapter.dora:
        # They would be made in the first step, which a stop has to wait for.
        with phases("norms of the adapted layers", len(adapter.layers), "layer") as phase:
            adapter.refresh_norms(phase.advance)
    return Run(
        plan=plan,
        processes=peers,
        phases=phases,
        layout=layout,
        resumed=saved.folder if saved else None,
        pieces=pieces,
        progress=progress,
        components=components,
        reader=reader,
        adapter=adapter,
        norms=norms,
        optimizer=optimizer,
        step=step,
        non_finite=non_finite,
    )


# --- adapter, optimizer, step -----------------------------------------------------------------------------------------


def load_trained(components: Components, pieces: Pieces) -> None:
    """Load what the steps compute with, and pin the bytes of its frozen tensors."""
    plan = components.plan
    trained = (plan.family.denoiser, *(() if plan.cache_text else plan.family.text_encoders))
    modules = [(name, components.load(name)) for name in trained]
    if plan.requests:
        components.load(plan.family.vae)  # only to draw samples: its bytes decide nothing of a step
    record = quantization.record(modules, components.phases)
    pieces.enter("quantization", resume.pin_quantization(record, snapshots=plan.source.snapshots))


def build_adapter(plan: Plan, components: Components, pieces: Pieces) -> tuple[Adapter, Norms]:
    """(the adapter in its layers, the norms that its files need)."""
    config, family, modules = plan.config, plan.family, components.model.modules
    peers, phases = components.processes, components.phases
    adapted = {name: modules[name] for name in plan.adapted}
    with phases("injecting the adapter", len(plan.targets), "layer") as phase:
        adapter = inject(
            adapted,
            plan.targets,
            linear_class=FrozenLinear,
            conv_class=FrozenConv2d,
            dora=config.adapter.type == "dora",
            rslora=config.adapter.rslora,
            dropout=config.adapter.dropout,
            seed=config.run.seed,
            advance=phase.advance,
        )
    for module in modules.values():
        module.eval()
    held = {name: kind[0] for name in plan.adapted if (kind := held_as(plan.source, name))}
    if adapter.dora and held:
        peers.say(f"the DoRA's files are made for {made_for(held)}")
    beside = {name: components.layer(name) for name in export.fused_with(adapter, plan.fused)}
    read = len(beside) if adapter.dora else 0
    with phases("norms of the layers beside the adapted ones", read, "layer") as phase:
        norms = pieces.enter("norms", Norms(adapter, beside, held, phase.advance))
    pieces.enter("adapter", adapter)

    for name in plan.adapted:
        adapter.share_inputs(name, family.shared_inputs.get(name, ()))
    blocks = find_blocks(modules[family.denoiser], family.blocks)
    adapter.refresh_before(adapted | {f"{family.denoiser}.{name}": block for name, block in blocks.items()})
    unread = family.unread_beside(adapter.layers, half=plan.scales_loss)
    recomputed = checkpoint_blocks(blocks, config.memory.gradient_checkpointing, unread)
    if recomputed:
        peers.say(f"gradient checkpointing: {recomputed} blocks are recomputed in the backward pass")
    return adapter, norms


def build_step(
    components: Components, adapter: Adapter, pieces: Pieces, progress: Progress
) -> tuple[optim.OptimizerState, Step]:
    """(the optimizer's state, the step): the optimizer, its schedule and the loss scaler are entered as pieces."""
    plan, family, model, peers = components.plan, components.family, components.model, components.processes
    config, seed, dropout = plan.config, plan.config.run.seed, adapter.dropout(plan.config.run.seed)
    optimizer = optim.build_optimizer(
        config.optimizer.name,
        adapter.parameter_groups(lr=config.optimizer.lr, weight_decay=config.optimizer.weight_decay),
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
        min_8bit_size=config.optimizer.min_8bit_size,
    )
    schedule = optim.build_schedule(
        config.schedule.name,
        optimizer,
        total_steps=progress.total_steps,
        warmup=optim.warmup_steps(config.schedule.warmup, progress.total_steps),
    )
    scaler = precision.loss_scaler(
        plan.scales_loss,
        peers.device,
        initial_scale=config.precision.loss_scale,
        growth_interval=config.precision.loss_scale_growth_interval,
    )
    state = pieces.enter("optimizer", optim.OptimizerState(optimizer, config.optimizer.name))
    pieces.enter("schedule", optim.ScheduleState(schedule))
    pieces.enter("scaler", precision.ScalerState(scaler))

    def losses(batch):
        return batch_losses(
            batch,
            objective=plan.objective,
            predict=lambda *inputs: family.predict(model, *inputs),
            encode=lambda texts: family.encode_prompts(model, texts),
            image_tokens=family.image_tokens,
            seed=seed,
            device=peers.device,
        )

    step = Step(
        losses=losses,
        optimizer=optimizer,
        schedule=schedule,
        scaler=scaler,
        max_grad_norm=config.step.max_grad_norm,
        after_update=adapter.mark_stale,
        sum=peers.sum,
        # By the micro-batch's place in the update, whichever process has it.
        dropout=lambda step, index: dropout(step, index * peers.count + peers.rank),
    )
    return state, step


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
        batches=loader.iterate(mine, run.reader, num_workers=config.data.num_workers),
        progress=progress,
        last=plan.max_steps,
        stop_after=min(config.run.stop_after or plan.max_steps, plan.max_steps),
        save_every=config.checkpoint.every_steps,
        saves=saves,
        after_step=run.artifacts().after_step,
        log=log,
        non_finite=run.non_finite,
        too_large=what_would_fit(plan),
        processes=peers,
        signals=signals,
    )


def finish(run: Run, signals: Signals) -> None:
    """Leave what a whole run leaves."""
    signals.promise = "stopping; the last step is saved"
    try:
        run.artifacts().finish()
    except Interrupted as error:
        where = "after the last step, which is saved; adapter files or the report may be missing"
        raise Interrupted(error.signum, where) from None
