"""What a step computes with, put together: the loaded parts of the model, the adapter in their layers, optimizer and step."""

from collections.abc import Mapping
from typing import Any

from trainer import ema, optim, quantization
from trainer.adapters import Adapter, Rates, Rule, export, inject
from trainer.adapters.norms import Norms, made_for
from trainer.base.memory import checkpoint_blocks, find_blocks
from trainer.checkpoint.pieces import Pieces
from trainer.checkpoint.state import Progress
from trainer.engine.components import Components
from trainer.engine.step import Step, batch_losses
from trainer.plan.run_plan import Plan
from trainer.plan.storage import held_as
from trainer.quantization import FrozenConv2d, FrozenLinear
from trainer.resume import pins
from trainer.runtime import precision
from trainer.runtime.attention import few_tokens_in_fp32


def load_trained(components: Components, pieces: Pieces) -> None:
    """Load what the steps compute with, and pin the bytes of its frozen tensors."""
    plan = components.plan
    trained = (plan.family.denoiser, *(() if plan.cache_text else plan.family.text_encoders))
    modules = [(name, components.load(name)) for name in trained]
    if plan.requests:
        components.load(plan.family.vae)  # only to draw samples: its bytes decide nothing of a step
    record = quantization.record(modules, components.phases)
    pieces.enter("quantization", pins.pin_quantization(record, snapshots=plan.source.snapshots))


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
    beside = {name: components.layer(name) for name in export.fused_with(adapter.targets, plan.fused)}
    read = len(beside) if adapter.dora else 0
    with phases("norms of the layers beside the adapted ones", read, "layer") as phase:
        norms = pieces.enter("norms", Norms(adapter, beside, held, phase.advance))
    pieces.enter("adapter", adapter)

    for name in plan.adapted:
        adapter.share_inputs(name, family.shared_inputs.get(name, ()))
    blocks = find_blocks(modules[family.denoiser], family.blocks)
    adapter.refresh_before(adapted)
    unread = family.unread_beside(adapter.layers, half=plan.scales_loss)
    few_tokens_in_fp32(modules[family.denoiser], family.attention, components.model.device)
    recomputed = checkpoint_blocks(blocks, config.memory.gradient_checkpointing, unread)
    if recomputed:
        peers.say(f"gradient checkpointing: {recomputed} blocks are recomputed in the backward pass")
    return adapter, norms


def build_step(
    components: Components, adapter: Adapter, pieces: Pieces, progress: Progress, *, then: Mapping[str, Any] | None
) -> tuple[optim.OptimizerState, ema.Averages, Step]:
    """(the optimizer's state, the averages, the step): the optimizer, its schedule, the loss scaler and the averages of [ema]
    are entered as pieces.

    then: the checkpoint's config, where --allow changed it.
    """
    plan, family, model, peers = components.plan, components.family, components.model, components.processes
    config, seed, options = plan.config, plan.config.run.seed, plan.config.adapter
    training = adapter.training(seed, rank_dropout=options.rank_dropout, module_dropout=options.module_dropout)
    chosen, falls = config.optimizer, config.schedule
    optimizer = optim.build_optimizer(
        chosen.name,
        adapter.parameter_groups(Rates.read(chosen.model_dump(), family.text_encoders)),
        betas=chosen.betas,
        eps=chosen.eps,
        min_8bit_size=chosen.min_8bit_size,
        options=chosen.options,
    )
    schedule = optim.build_schedule(
        falls.name,
        optimizer,
        total_steps=progress.total_steps,
        warmup=optim.steps_of(falls.warmup, progress.total_steps),
        end=falls.end,
        cycles=falls.cycles,
        power=falls.power,
        decay=optim.steps_of(falls.decay, progress.total_steps),
    )
    scaler = precision.loss_scaler(
        plan.scales_loss,
        peers.device,
        initial_scale=config.precision.loss_scale,
        growth_interval=config.precision.loss_scale_growth_interval,
    )
    regrouping = None if then is None else _regrouping(plan, then, adapter)
    state = pieces.enter("optimizer", optim.OptimizerState(optimizer, chosen.name, regrouping))
    pieces.enter("schedule", optim.ScheduleState(schedule, anew=then is not None))
    pieces.enter("scaler", precision.ScalerState(scaler))
    averages = ema.Averages(
        adapter.named_parameters(), ema.weights_of(config.ema.kind, config.ema.decay), changed=adapter.mark_stale
    )
    if averages.weights:
        pieces.enter("ema", averages)

    def after_update(step: int) -> dict[str, float | None]:
        told = {} if options.max_norm is None else {"layers_limited": adapter.limit_norms(options.max_norm, step)}
        adapter.mark_stale()
        averages.update()
        return told | state.told()

    def losses(batch, update=()):
        return batch_losses(
            batch,
            objective=plan.objective,
            predict=lambda *inputs: family.predict(model, *inputs),
            encode=lambda texts: family.encode_prompts(model, texts),
            image_tokens=family.image_tokens,
            seed=seed,
            device=peers.device,
            update=update,
        )

    step = Step(
        losses=losses,
        optimizer=optimizer,
        schedule=schedule,
        scaler=scaler,
        max_grad_norm=config.step.max_grad_norm,
        after_update=after_update,
        sum=peers.sum,
        # By the micro-batch's place in the update, whichever process has it.
        training=lambda step, index: training(step, index * peers.count + peers.rank),
    )
    return state, averages, step


def _regrouping(plan: Plan, then: Mapping[str, Any], adapter: Adapter) -> optim.Regrouping:
    """Where the rates of a rule or of the optimizer changed, so did the groups that they make."""
    rules, encoders = [Rule(**rule) for rule in then["adapter"]["rules"]], plan.family.text_encoders
    return optim.Regrouping(
        then=list(adapter.groups(Rates.read(then["optimizer"], encoders), rules).values()),
        now=list(adapter.groups(Rates.read(plan.config.optimizer.model_dump(), encoders)).values()),
        sizes={name: parameter.numel() for name, parameter in adapter.named_parameters().items()},
    )
