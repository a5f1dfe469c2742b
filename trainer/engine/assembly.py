"""What a step computes with, put together: the loaded parts of the model, the adapter in their layers, optimizer and step."""

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
from trainer.engine.draw_digest import DrawDigest
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
    """What the steps of a run change. progress: counts them."""

    adapter: Adapter
    norms: Norms
    optimizer: optim.OptimizerState
    average: ema.Average | None
    progress: Progress

    def evaluating(self) -> AbstractContextManager[None]:
        """A block in which the adapter has the weights to be used; afterwards it has, bit for bit, those it trains with."""
        return self.optimizer.evaluating(self.adapter.mark_stale)

    def weights_for_use(self) -> dict[str, Callable[[], AbstractContextManager[None]]]:
        """The blocks in which the adapter has weights to be used, by the suffix of what is made in them: "" or "_ema"."""
        return {"": self.evaluating} | ({AVERAGE: self.average.used} if self.average else {})


def load_trained(plan: RunPlan, components: Components, pieces: Pieces) -> None:
    """Load what the steps compute with, and pin the bytes of its frozen tensors."""
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
    components.put_below(config.adapter.under)
    for module in modules.values():
        module.eval()
    held = {name: kind[0] for name in plan.adapted if (kind := held_as(plan.source, name))}
    if adapter.kind.magnitudes and held:
        peers.say(f"the {adapter.kind.word}'s files are made for {made_for(held)}")
    beside = {name: components.layer(name) for name in fused_with(adapter.targets, plan.fused)}
    read = len(beside) if adapter.kind.magnitudes else 0
    with phases("norms of the layers beside the adapted ones", read, "layer") as phase:
        norms = pieces.enter("norms", Norms(adapter, beside, held, phase.advance))
    pieces.enter("adapter", adapter)

    for name in plan.adapted:
        adapter.share_inputs(name, family.memory.shared_inputs.get(name, ()))
    blocks = find_blocks(modules[family.denoiser], family.memory.blocks)
    # Norms of a streamed block are made as it passes by.
    adapter.refresh_before(adapted | components.streamed_blocks(adapted))
    unread = family.memory.unread_beside(adapter.layers, half=plan.scales_loss)
    every = config.memory.gradient_checkpointing
    attention, device = family.memory.attention, components.model.device
    components.attention.give(modules[family.denoiser], attention, device, components.kernels)
    compiled = {n: b for n, b in blocks.items() if compiler and any(fnmatchcase(n, p) for p in family.memory.compiled)}
    recomputed = checkpoint_blocks(blocks, every, unread, family.memory.skipped, compiled)
    if recomputed:
        but = ", but for attention" if every == "selective" else ""
        peers.say(f"gradient checkpointing: {recomputed} blocks are recomputed in the backward pass{but}")
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
    then: Mapping[str, Any] | None,
) -> tuple[TrainState, Step]:
    """(what the steps change, the step). Enters the optimizer, its schedule, the loss scaler and the average as pieces.

    then: the checkpoint's config, where --allow changed it.
    """
    peers, encoders = components.processes, components.family.text_encoders
    optimizer, schedule = _optimizer(config, adapter, encoders, progress.total_steps)
    scaler = precision.loss_scaler(components.plan.scales_loss, peers.device, initial_scale=config.precision.loss_scale)
    regrouping = None if then is None else _regrouping(config, then, adapter, encoders)
    held = pieces.enter("optimizer", optim.OptimizerState(optimizer, config.optimizer.name, regrouping))
    pieces.enter("schedule", optim.ScheduleState(schedule, anew=then is not None, say=peers.say))
    pieces.enter("scaler", precision.ScalerState(scaler))
    average = None
    if config.ema.kind == "constant":
        average = pieces.enter("ema", ema.Average(adapter.named_parameters(), config.ema.decay, adapter.mark_stale))
    state = TrainState(adapter, norms, held, average, progress)
    norms.used = state.evaluating
    options = config.adapter
    training = adapter.training(config.run.seed, rank_dropout=options.rank_dropout, module_dropout=options.module_dropout)

    draws = DrawDigest(config.logging.draws)

    def after_update(step: int) -> dict[str, Any]:
        fields = {} if options.max_norm is None else {"layers_limited": adapter.limit_norms(options.max_norm, step)}
        adapter.mark_stale()
        if average:
            average.update()
        return fields | draws.told() | held.log_fields() | (components.compiler.told() if components.compiler else {})

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
    """The micro-batches of a run as CUDA graphs; None where they are eager, as in a rehearsal of another machine's run."""
    peers, without = components.processes, without_graphs(config, components.processes.device)
    if config.step.graphs is not False:
        peers.say(f"step.graphs: {f'off: {without}' if without else 'on: micro-batches are recorded as CUDA graphs'}")
    if without:
        return None
    return Graphs(
        losses,
        list(adapter.named_parameters().values()),
        adapter,
        recorder=lambda: CudaGraphs(peers.device),
        say=peers.say,
        attention=components.attention.used,
        needed=config.step.graphs is True,
    )


def _optimizer(config: Config, adapter: Adapter, encoders: Sequence[str], total: int) -> tuple[torch.optim.Optimizer, Any]:
    """(the optimizer of the adapter's parameters, its schedule)."""
    table, falls = config.optimizer, config.schedule
    groups = adapter.parameter_groups(Rates.read(table.model_dump(), encoders))
    optimizer = optim.build_optimizer(table.name, groups, betas=table.betas, eps=table.eps, options=table.options)
    schedule = optim.build_schedule(
        falls.name,
        optimizer,
        total_steps=total,
        warmup=optim.steps_of(falls.warmup, total),
        end=falls.end,
        cycles=falls.cycles,
        power=falls.power,
        decay=optim.steps_of(falls.decay, total),
    )
    return optimizer, schedule


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
        # An update may have many micro-batches: each is a sign of life.
        drawn=lambda *drawn: (components.phases.sign(), draws.add(*drawn)),
        preserve=config.objective.preserve,
        frozen=lambda: adapter.at_strength(0),
    )


def _regrouping(config: Config, then: Mapping[str, Any], adapter: Adapter, encoders: Sequence[str]) -> optim.Regrouping:
    """Where the rates of a rule or of the optimizer changed, so did the groups that they make."""
    rules = [Rule(**rule) for rule in then["adapter"]["rules"]]
    return optim.Regrouping(
        then=list(adapter.groups(Rates.read(then["optimizer"], encoders), rules).values()),
        now=list(adapter.groups(Rates.read(config.optimizer.model_dump(), encoders)).values()),
        sizes={name: parameter.numel() for name, parameter in adapter.named_parameters().items()},
    )
