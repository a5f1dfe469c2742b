"""Builds what a step computes with: the loaded model, the adapter in its layers, the optimizer, the step itself."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from trainer import ema, optim, quantization
from trainer.adapters import Adapter, Method, Rates, Rule, inject
from trainer.adapters.kinds import kind_named
from trainer.adapters.norms import Norms, made_for
from trainer.adapters.targets import fused_with
from trainer.base.memory import checkpoint_blocks, find_blocks
from trainer.base.run_layout import AVERAGE
from trainer.checkpoint.state import Pieces, Progress
from trainer.config import Config
from trainer.engine.components import Components
from trainer.engine.graphs import CudaGraphs, Graphs
from trainer.engine.step import Losses, Step
from trainer.plan.run_plan import RunPlan
from trainer.plan.storage import held_as
from trainer.quantization import FrozenConv2d, FrozenLinear
from trainer.resume import pins
from trainer.runtime import precision
from trainer.runtime.compilation import RECOMPUTES
from trainer.runtime.device import without_graphs


@dataclass(frozen=True)
class TrainState:
    """The objects that a run's steps change. progress: its counters."""

    adapter: Adapter
    norms: Norms
    optimizer: optim.OptimizerState
    average: ema.Average | None
    progress: Progress

    def evaluating(self) -> AbstractContextManager[None]:
        """A context in which the adapter has the weights for use; afterwards, bit for bit, those it trains with."""
        return self.optimizer.evaluating(self.adapter.mark_stale)

    def weights_for_use(self) -> dict[str, Callable[[], AbstractContextManager[None]]]:
        """Contexts in which the adapter has weights for use, by the suffix of files that are made in them: "" or "_ema"."""
        return {"": self.evaluating} | ({AVERAGE: self.average.used} if self.average else {})


@dataclass
class DrawDigest:
    """A digest of a step's times and noise, for the log (logging.draws): equal in runs that drew the same. It is the sum of
    the samples' digests, so micro-batches do not change it."""

    enabled: bool
    value: int = 0

    def begin(self) -> None:
        """Start an update: a refused one leaves nothing behind."""
        self.value = 0

    def add(self, time: torch.Tensor, noise: torch.Tensor) -> None:
        """Add a micro-batch. time: [B]. noise: fp32 [B, C, H, W]. Both on the CPU."""
        for draws in zip(time.unbind(), noise.unbind(), strict=True) if self.enabled else ():
            digest = 0
            for tensor in draws:
                digest = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy(), digest)
            self.value = (self.value + digest) % 2**32

    def log_fields(self) -> dict[str, str]:
        """The log's entry, in hexadecimal."""
        return {"draws": f"{self.value:08x}"} if self.enabled else {}


def load_trained(plan: RunPlan, components: Components, pieces: Pieces) -> None:
    """Load the components that steps compute with, and pin the bytes of their frozen tensors."""
    modules = [(name, components.load(name)) for name in plan.model.in_steps]
    if plan.data.requests:
        components.load(plan.model.family.vae)  # only to draw samples: its bytes decide nothing of a step
    record = quantization.record(modules, components.phases)
    pieces.enter("quantization", pins.pin_quantization(record, snapshots=plan.model.source.snapshots))


def build_adapter(config: Config, components: Components, pieces: Pieces) -> tuple[Adapter, Norms]:
    """(the adapter in its layers, the norms that its files need)."""
    plan, family, modules = components.plan, components.family, components.model.modules
    peers, phases, compiler = components.processes, components.phases, components.compiler
    adapted = {name: modules[name] for name in plan.adapted}
    with phases("injecting the adapter", len(plan.targets), "layer") as phase:
        table, bases = config.adapter, (FrozenLinear, FrozenConv2d)
        method = Method(kind_named(table.type, vars(table)), table.rslora, table.dropout)
        adapter = inject(adapted, plan.targets, method=method, bases=bases, seed=config.run.seed, advance=phase.advance)
    components.put_below(table.under)
    for module in modules.values():
        module.eval()
    file_dtypes = {name: storage[0] for name in plan.adapted if (storage := held_as(plan.source, name))}
    if adapter.kind.magnitudes and file_dtypes:
        peers.say(f"the {adapter.kind.word}'s files are made for {made_for(file_dtypes)}")
    neighbours = {name: components.layer(name) for name in fused_with(adapter.targets, plan.fused)}
    count = len(neighbours) if adapter.kind.magnitudes else 0
    with phases("norms of the layers beside the adapted ones", count, "layer") as phase:
        norms = pieces.enter("norms", Norms(adapter, neighbours, file_dtypes, phase.advance))
    pieces.enter("adapter", adapter)

    for name in plan.adapted:
        adapter.share_inputs(name, family.memory.shared_inputs.get(name, ()))
    # Norms of a streamed block are made as it passes by.
    adapter.refresh_before(adapted | components.streamed_blocks(adapted))
    components.attention.give(modules[family.denoiser], family.memory.attention, components.model.device, components.kernels)
    blocks = find_blocks(modules[family.denoiser], family.memory.blocks)
    compiled = {n: b for n, b in blocks.items() if compiler and any(fnmatchcase(n, p) for p in family.memory.compiled)}
    every, unread = config.memory.gradient_checkpointing, family.memory.unread_beside(adapter.layers, half=plan.scales_loss)
    recomputed = checkpoint_blocks(blocks, every, unread, family.memory.skipped, compiled)
    if recomputed:
        exception = ", but for attention" if every == "selective" else ""
        peers.say(f"gradient checkpointing: {recomputed} blocks are recomputed in the backward pass{exception}")
    if compiler is not None:
        count = compiler.compile(compiled)
        peers.say(f"step.compile: {count} blocks are compiled when a shape is met first, which takes minutes")
        if recomputed and not RECOMPUTES:
            peers.say(
                f"warning: programs of torch {torch.__version__} recompute only a part of a block, and need more memory than "
                "the plan says; torch 2.12 and later recompute all of it"
            )
    return adapter, norms


def build_step(
    config: Config,
    components: Components,
    adapter: Adapter,
    norms: Norms,
    pieces: Pieces,
    progress: Progress,
    *,
    saved_config: Mapping[str, Any] | None,
) -> tuple[TrainState, Step]:
    """(the state that steps change, the step). Enters the optimizer, its schedule, the loss scaler and the average as pieces.

    saved_config: the checkpoint's, if --allow changed it; else None.
    """
    peers, encoders = components.processes, components.family.text_encoders
    optimizer, schedule = _optimizer(config, adapter, encoders, progress.total_steps)
    scaler = precision.loss_scaler(components.plan.scales_loss, peers.device, initial_scale=config.precision.loss_scale)
    regrouping = None if saved_config is None else _regrouping(config, saved_config, adapter, encoders)
    trained = pieces.enter("optimizer", optim.OptimizerState(optimizer, config.optimizer.name, regrouping))
    pieces.enter("schedule", optim.ScheduleState(schedule, anew=saved_config is not None, say=peers.say))
    pieces.enter("scaler", precision.ScalerState(scaler))
    average = None
    if config.ema.kind == "constant":
        average = pieces.enter("ema", ema.Average(adapter.named_parameters(), config.ema.decay, adapter.mark_stale))
    state = TrainState(adapter, norms, trained, average, progress)
    norms.used = state.evaluating
    options = config.adapter
    training = adapter.training(config.run.seed, rank_dropout=options.rank_dropout, module_dropout=options.module_dropout)
    draws = DrawDigest(config.logging.draws)

    def after_update(step: int) -> dict[str, Any]:
        fields = {} if options.max_norm is None else {"layers_limited": adapter.limit_norms(options.max_norm, step)}
        adapter.mark_stale()
        if average:
            average.update()
        programs = components.compiler.log_fields() if components.compiler else {}
        return fields | draws.log_fields() | trained.log_fields() | programs

    losses = _losses(config, components, adapter, draws)
    graphs = _graphs(config, losses, adapter, components)
    step = Step(
        losses=losses,
        begin=lambda: (draws.begin(), graphs and graphs.begin()),
        graphs=graphs,
        optimizer=optimizer,
        schedule=schedule,
        scaler=scaler,
        max_grad_norm=config.step.max_grad_norm,
        after_update=after_update,
        sum=peers.sum,
        # By the micro-batch's place in the update, whichever process has it.
        training=lambda step, index: training(step, index * peers.count + peers.rank),
        attention=components.attention.used,
    )
    return state, step


def _graphs(config: Config, losses: Losses, adapter: Adapter, components: Components) -> Graphs | None:
    """The CUDA graphs of a run's micro-batches; None if they are eager, as in a rehearsal of another machine's run."""
    peers, reason = components.processes, without_graphs(config, components.processes.device)
    if config.step.graphs is not False:
        peers.say(f"step.graphs: {f'off: {reason}' if reason else 'on: micro-batches are recorded as CUDA graphs'}")
    if reason:
        return None
    return Graphs(
        losses,
        list(adapter.named_parameters().values()),
        adapter,
        recorder=lambda: CudaGraphs(peers.device),
        say=peers.say,
        attention=components.attention.used,
        required=config.step.graphs is True,
    )


def _optimizer(config: Config, adapter: Adapter, encoders: Sequence[str], total: int) -> tuple[torch.optim.Optimizer, Any]:
    """(the optimizer of the adapter's parameters, its schedule). total: the schedule's length (Progress.total_steps)."""
    table, schedule = config.optimizer, config.schedule
    groups = adapter.parameter_groups(Rates.read(table.model_dump(), encoders))
    optimizer = optim.build_optimizer(table.name, groups, betas=table.betas, eps=table.eps, options=table.options)
    return optimizer, optim.build_schedule(
        schedule.name,
        optimizer,
        total_steps=total,
        warmup=optim.steps_of(schedule.warmup, total),
        end=schedule.end,
        cycles=schedule.cycles,
        power=schedule.power,
        decay=optim.steps_of(schedule.decay, total),
    )


def _losses(config: Config, components: Components, adapter: Adapter, draws: DrawDigest) -> Losses:
    family, model = components.family, components.model
    return Losses(
        objective=components.plan.objective,
        predict=lambda *inputs: family.images.predict(model, *inputs),
        tokens=lambda texts: family.all_tokens(model, texts),
        encode=lambda tokens: family.encode_tokens(model, tokens),
        image_tokens=family.images.image_tokens,
        seed=config.run.seed,
        device=components.processes.device,
        # An update may have many micro-batches: each is a heartbeat.
        on_draw=lambda time, noise: (components.phases.sign(), draws.add(time, noise)),
        preserve=config.objective.preserve,
        without_adapter=lambda: adapter.at_strength(0),
    )


def _regrouping(config: Config, saved: Mapping[str, Any], adapter: Adapter, encoders: Sequence[str]) -> optim.Regrouping:
    """The map from the saved config's parameter groups to this one's: rates of rules and of the optimizer make the groups."""
    rules = [Rule(**rule) for rule in saved["adapter"]["rules"]]
    return optim.Regrouping(
        saved=list(adapter.groups(Rates.read(saved["optimizer"], encoders), rules).values()),
        current=list(adapter.groups(Rates.read(config.optimizer.model_dump(), encoders)).values()),
        sizes={name: parameter.numel() for name, parameter in adapter.named_parameters().items()},
    )
