"""What a run resolves before it reads a weight: components, targets, data, length. Printed at the start and by --plan."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

import torch
from torch import nn

from trainer import patterns, precision, quantization
from trainer.adapters import Rule, Target, match_targets
from trainer.config import Component, Config, Sample
from trainer.data import buckets, sampler, sources
from trainer.errors import UserError
from trainer.kernels import dora_torch
from trainer.models import family_named
from trainer.models.base import Component as ModelComponent
from trainer.models.base import Family, SampleRequest
from trainer.models.loading import ModelSource, open_model
from trainer.objectives import Objective
from trainer.phases import QUIET, Phases
from trainer.quantization import Format, formats_of
from trainer.tensorfile import size_text
from trainer.types import HeldWeight, Kernels
from trainer.validation import check_sizes

DEFAULT_STORAGE = {"denoiser": "bf16", "text_encoder": "bf16", "vae": "fp32"}


@dataclass(frozen=True)
class ComponentPlan:
    """How one component is stored and computes.

    exclude, sensitive: the config's and the family's patterns of layers that are not quantised.
    scaled_matmul: multiply float8 Linears as float8.
    """

    name: str
    format: Format
    compute: torch.dtype
    exclude: tuple[str, ...] = ()
    sensitive: tuple[str, ...] = ()
    scaled_matmul: bool = False

    @property
    def keep(self) -> tuple[str, ...]:
        return (*self.sensitive, *self.exclude)

    @property
    def unquantised(self) -> torch.dtype:
        """Storage of layers that are not quantised: 16 bit where the component is."""
        return self.format.dtype or torch.bfloat16

    def swap(
        self, module: nn.Module, *, held: Mapping[str, HeldWeight | torch.dtype] = {}, kernels: Kernels = dora_torch
    ) -> None:
        """Freeze the layers of a module on the meta device. held: what the model's files hold (ModelSource.held)."""
        quantization.freeze_layers(
            module,
            format=self.format,
            compute=self.compute,
            unquantised=self.unquantised,
            keep=self.keep,
            keep_fp32=tuple(getattr(module, "_keep_in_fp32_modules", None) or ()),
            held=held,
            scaled_matmul=self.scaled_matmul,
            kernels=kernels,
        )
        precision.keep_activations(module, self.compute)


@dataclass(frozen=True)
class Plan:
    """Everything that is known before weights are read."""

    config: Config
    family: Family
    source: ModelSource
    components: dict[str, ComponentPlan]
    objective: Objective
    photos: tuple[tuple[sources.Photo, tuple[int, int]], ...]
    targets: tuple[Target, ...]
    shapes: dict[tuple[str, str], tuple[int, ...]]
    skipped: tuple[str, ...]
    requests: tuple[SampleRequest, ...]
    processes: int
    steps_per_epoch: int
    max_steps: int
    cache_text: bool

    @property
    def scales_loss(self) -> bool:
        """Whether gradients pass through fp16: then the loss is scaled."""
        trained = {self.family.denoiser, *self.adapted}
        return any(self.components[name].compute == torch.float16 for name in trained)

    @property
    def adapted(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(target.component for target in self.targets))


def open_source(config: Config) -> ModelSource:
    """The model's configs and file headers. Of a hub id, the configs at first; `Run.open_model` fetches the rest."""
    family = family_named(config.model.family)
    names = [component.name for component in family.components]
    for name in config.model.components:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"{family.name} has {', '.join(names)}"
            raise UserError(f"model.components.{name} is not a component of {family.name}; {hint}")
    return open_model(
        family,
        config.model.path,
        config=config.model.config,
        component_paths={name: c.path for name, c in config.model.components.items() if c.path},
        variant=config.model.variant,
        stored={component.name: _precision(config, component) for component in family.components},
        recognise=quantization.recognise,
    )


def _precision(config: Config, component: ModelComponent) -> str:
    """What a component is stored as, before its files are looked at; "fp32" also where it computes in fp32."""
    given = config.model.components.get(component.name, Component())
    stored = given.dtype or DEFAULT_STORAGE[component.role]
    return "fp32" if (given.compute or config.precision.compute) == "fp32" else stored


def make_plan(config: Config, source: ModelSource, *, processes: int, phases: Phases = QUIET) -> Plan:
    """Check everything that can be without weights. Raises UserError for what cannot work. config: as `resolve` gives."""
    family = source.family
    components = _components(config, family)
    photos = sources.scan(
        [(s.path, s.repeats) for s in config.data.sources], strict_captions=config.data.strict_captions, phases=phases
    )
    objective = find_objective(config, source)
    source.check_tokenizers()
    for component in family.components:
        if source.is_here(component.name):
            check_files(source, components[component.name])
        _check_exclude(config, source, component.name)
    step = config.data.bucket_step
    if step % family.size_multiple or config.data.resolution < step:
        raise UserError(
            f"data.bucket_step = {step} does not suit {family.name} at data.resolution = {config.data.resolution}; "
            f"use a multiple of {family.size_multiple} that is at most the resolution"
        )
    bucketed = tuple(
        (photo, buckets.choose_bucket(photo.width, photo.height, resolution=config.data.resolution, step=step))
        for photo in photos
    )
    targets, shapes, skipped = _targets(config, family, source)
    adapted_encoders = {t.component for t in targets} - {family.denoiser}
    cache_text = not adapted_encoders if config.data.cache_text == "auto" else config.data.cache_text
    if cache_text and adapted_encoders:
        raise UserError(
            f"data.cache_text = true cannot be combined with adapting {', '.join(sorted(adapted_encoders))}: "
            "cached encodings would not follow the training; leave it out"
        )
    accumulation = config.step.accumulation
    steps_per_epoch = sampler.steps_per_epoch(
        bucketed, batch_size=config.data.batch_size, accumulation=accumulation, processes=processes
    )
    requests = _requests(config, family)
    check_sizes(requests, family.size_multiple)
    return Plan(
        config, family, source, components, objective, bucketed, targets, shapes, skipped, requests, processes,
        steps_per_epoch, config.run.max_steps or config.run.epochs * steps_per_epoch, cache_text,
    )  # fmt: skip


def find_objective(config: Config, source: ModelSource) -> Objective:
    """What is trained, of the config and of what the model says of itself. Raises UserError for a model of another kind."""
    family = source.family
    configs = {component.name: source.config(component.name) for component in family.components}
    shape = source.shape(family.denoiser, family.input_layer)
    family.check(configs, shape[1] if shape else configs[family.denoiser]["in_channels"])
    return family.objective(
        source.scheduler,
        source.markers,
        prediction=config.model.prediction,
        zero_terminal_snr=config.model.zero_terminal_snr,
        min_snr_gamma=config.objective.min_snr_gamma,
        timesteps=config.objective.timesteps,
        shift=config.objective.shift,
        logit_mean=config.objective.logit_mean,
        logit_std=config.objective.logit_std,
    )


def check_objective(config: Config, source: ModelSource, planned: Objective) -> None:
    """After a hub id's weights were fetched: refuse what its configs had not said of them."""
    found = find_objective(config, source).describe()
    if found != planned.describe():
        raise UserError(
            f"model.path = {config.model.path!r}: the fetched files say {found}, its scheduler's config "
            f"{planned.describe()}; set model.prediction and model.zero_terminal_snr"
        )


def resolve(config: Config, source: ModelSource) -> Config:
    """`config` with what the model decides written out: every component's dtypes and backend, and the bucket step."""
    family = source.family
    resolved = {}
    for component in family.components:
        given = config.model.components.get(component.name, Component())
        dtype, backend = _storage(given, component, held_storage(source, component.name))
        # What only encodes is worth its fp32; the denoiser, all of a run's time, is not slowed down by how it is stored.
        exact = dtype == "fp32" and component.role != "denoiser"
        compute = "fp32" if exact else config.precision.compute
        resolved[component.name] = given.model_copy(
            update={"dtype": dtype, "backend": backend, "compute": given.compute or compute}
        )
    step = config.data.bucket_step or buckets.bucket_step(config.data.resolution)
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"components": resolved}),
            "data": config.data.model_copy(update={"bucket_step": step}),
        }
    )


def held_storage(source: ModelSource, name: str) -> tuple[str, str] | None:
    """(dtype, backend) of a component whose files hold quantised weights; before they are fetched, what its config says."""
    if not source.is_here(name):
        return quantization.declared(source.config(name))
    kinds = {(h.dtype, h.backend) for h in source.held(name).values() if not isinstance(h, torch.dtype)}
    if len(kinds) > 1:
        shown = " and ".join(f"{dtype} ({backend})" for dtype, backend in sorted(kinds))
        raise UserError(
            f"component {name!r} holds weights quantised in more than one way: {shown}; use a file of one way"
        )
    return next(iter(kinds), None)


def _storage(given: Component, component: ModelComponent, held: tuple[str, str] | None) -> tuple[str, str]:
    """(dtype, backend) of a component, from what the config gives and what its files hold. Raises UserError."""
    key = f"model.components.{component.name}"
    quantises = component.role != "vae"
    dtype = given.dtype or (held[0] if held and quantises else DEFAULT_STORAGE[component.role])
    if held and dtype == held[0]:
        backends = [held[1]]
    else:
        backends = list(formats_of(dtype))
        if held and formats_of(dtype)[backends[0]].quantised and quantises:
            raise UserError(
                f"{key}.dtype = {dtype!r}: the model's file holds this component as {held[0]} ({held[1]}) already, and to "
                f"quantise it again would add a second error; leave dtype out to take it as it is, or use the 16-bit file"
            )
    if given.backend not in (None, *backends):
        raise UserError(
            f"{key}.backend = {given.backend!r} has no dtype = {dtype!r}; "
            f"use {' or '.join(map(repr, backends))} (left out: {backends[0]!r})"
        )
    return dtype, given.backend or backends[0]


def check_files(source: ModelSource, component: ComponentPlan) -> None:
    """Refuse files that lack a tensor, and an `exclude` of what they hold quantised. Reads headers only."""
    source.verify(component.name)
    if not component.format.quantised:
        return
    for layer, held in source.held(component.name).items():
        for pattern in component.exclude:
            if not isinstance(held, torch.dtype) and fnmatchcase(layer, pattern):
                raise UserError(
                    f"model.components.{component.name}.exclude: {pattern!r} matches {layer}, which the model's file holds "
                    f"as {held.dtype} already; take the pattern out, or use the 16-bit file"
                )


def check_storage(source: ModelSource, component: ComponentPlan) -> None:
    """After a hub id's weights were fetched: refuse what its config.json had not said of them."""
    held = held_storage(source, component.name)
    if held and component.format.quantised and held != (component.format.dtype_name, component.format.backend):
        raise UserError(
            f"model.components.{component.name}: the fetched files hold it as {held[0]} ({held[1]}), which their config.json "
            f"does not say, and it was to be stored as {component.format.name}; set its dtype = {held[0]!r} and "
            f"backend = {held[1]!r}, or use the 16-bit model"
        )


def _components(config: Config, family: Family) -> dict[str, ComponentPlan]:
    plans = {}
    for component in family.components:
        chosen = config.model.components[component.name]
        format = formats_of(chosen.dtype)[chosen.backend]
        if component.role == "vae" and format.quantised:
            raise UserError(
                f"model.components.{component.name}.dtype = {chosen.dtype!r}: the VAE is not quantised (its convolutions "
                "are a few hundred MB, and errors show in every image); use fp32, bf16 or fp16"
            )
        compute = precision.compute_dtype(chosen.compute)
        scaled = config.precision.matmul == "fp8" and component.role == "denoiser"
        if scaled and (chosen.dtype, chosen.compute) != ("fp8_e4m3", "bf16"):
            raise UserError(
                f"precision.matmul = 'fp8' multiplies a denoiser that is stored as fp8_e4m3 and computes in bf16; "
                f"model.components.{component.name} has dtype = {chosen.dtype!r} and compute = {chosen.compute!r}. Change "
                "these, or set precision.matmul = 'compute'"
            )
        plans[component.name] = ComponentPlan(
            component.name, format, compute, chosen.exclude, component.sensitive, scaled
        )
    return plans


def _check_exclude(config: Config, source: ModelSource, name: str) -> None:
    exclude = config.model.components[name].exclude
    names = (
        [n for n, m in source.build(name).named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))] if exclude else []
    )
    for pattern in exclude:
        if not any(fnmatchcase(n, pattern) for n in names):
            raise UserError(
                f"model.components.{name}.exclude: the pattern {pattern!r} matches no layer (patterns are fnmatch on the "
                f"whole dotted name); {patterns.advice(pattern, names)}"
            )


def _targets(
    config: Config, family: Family, source: ModelSource
) -> tuple[tuple[Target, ...], dict[tuple[str, str], tuple[int, ...]], tuple[str, ...]]:
    """(what is adapted, weight shapes of the adaptable layers, layers skipped for want of a gradient path)."""
    named = [family.denoiser, *(r.component for r in config.adapter.rules if r.component in family.text_encoders)]
    layers: dict[str, list[str]] = {}
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    skipped = []
    for name in dict.fromkeys(named):
        dead = family.no_gradient(name, source.config(name))
        layers[name] = []
        for layer, child in source.build(name).named_modules():
            if isinstance(child, nn.Linear) or (isinstance(child, nn.Conv2d) and child.groups == 1):
                if any(fnmatchcase(layer, pattern) for pattern in dead):
                    skipped.append(f"{name}.{layer}")
                else:
                    layers[name].append(layer)
                    shapes[name, layer] = tuple(child.weight.shape)
    for name in family.text_encoders:
        layers.setdefault(name, [])
    targets = match_targets(
        layers,
        denoiser=family.denoiser,
        targets=config.adapter.targets,
        presets=family.presets,
        rules=[Rule(**rule.model_dump()) for rule in config.adapter.rules],
        rank=config.adapter.rank,
        alpha=config.adapter.alpha,
    )
    adapted = {target.component for target in targets}
    return targets, shapes, tuple(name for name in skipped if name.partition(".")[0] in adapted)


def _requests(config: Config, family: Family) -> tuple[SampleRequest, ...]:
    wanted, size = config.validation, config.data.resolution
    for index, sample in enumerate(wanted.samples):
        if sample.negative and not family.negative_prompts:
            raise UserError(
                f"validation.samples.{index}.negative = {sample.negative!r}: {family.name} has no negative prompts (its "
                "guidance is an input, not a second evaluation); leave it out"
            )
    if wanted.every_steps == 0:
        return ()
    return tuple(
        SampleRequest(
            s.prompt, s.negative, s.width or size, s.height or size, wanted.seed if s.seed is None else s.seed,
            s.steps or wanted.steps, s.guidance, s.strength,
        )
        for s in (*(Sample(prompt=prompt) for prompt in wanted.prompts), *wanted.samples)
    )  # fmt: skip


def describe(plan: Plan, *, sizes: bool) -> str:
    """The start print. sizes: also build every component on the meta device to count its bytes."""
    config = plan.config
    lines = [f"run {config.run.name} -> {config.run.output_dir}", f"model {plan.family.name} from {config.model.path}"]
    total, width = 0, max(len(component.format.name) for component in plan.components.values())
    for name, component in plan.components.items():
        compute = str(component.compute).removeprefix("torch.")
        line = f"  {name:<15} stored {component.format.name:<{width}} computes {compute}"
        if sizes:
            module = plan.source.build(name)
            component.swap(module, held=plan.source.held(name))
            count = sum(t.numel() * t.dtype.itemsize for t in module.state_dict().values())
            total += count
            line += f"  {size_text(count)}"
        chosen = plan.source.chosen(name)
        if chosen is not None and chosen.why:
            line += f"; reads the {chosen.files} ({chosen.why})"
        lines.append(line)
    if sizes:
        lines.append(f"  weights in all   {size_text(total)}")
    if plan.source.published_parts:
        lines.append(f"  of the published model's configs: {', '.join(plan.source.published_parts)}")
    lines += _hub_lines(plan.source)
    lines += _adapter_lines(plan) + [f"objective {plan.objective.describe()}"] + _data_lines(plan)
    group = config.optimizer
    lines.append(
        f"optimizer {group.name}, lr {group.lr:g}, weight decay {group.weight_decay:g} (none on magnitudes), "
        f"clipping {config.step.max_grad_norm:g}; schedule {config.schedule.name}, warm-up {config.schedule.warmup:g}"
    )
    return "\n".join(lines)


def _hub_lines(source: ModelSource) -> list[str]:
    """What of a hub id is not here yet."""
    if source.fetched:
        return []
    lines = []
    if source.embedded:
        lines.append(f"  configs as embedded: nothing was fetched ({source.embedded})")
    count = source.to_fetch()
    if count:
        lines.append(f"  to be downloaded {size_text(count)}, into {source.repository.blobs.parent}")
    return lines


def _adapter_lines(plan: Plan) -> list[str]:
    adapter = plan.config.adapter
    lines = []
    for component in plan.adapted:
        mine = [t for t in plan.targets if t.component == component]
        dora = adapter.type == "dora"
        count = sum(_adapter_parameters(plan.shapes[t.component, t.name], t.rank, dora) for t in mine)
        kinds = Counter((t.rank, t.alpha, t.scaling(adapter.rslora), t.lr) for t in mine)
        lines.append(
            f"adapter {adapter.type} on {component}: {len(mine)} layers, {count:,} trainable parameters (fp32)"
        )
        for (rank, alpha, scaling, lr), layers in sorted(kinds.items(), key=str):
            rate = f", lr {lr:g}" if lr is not None else ""
            formula = "alpha / sqrt(rank)" if adapter.rslora else "alpha / rank"
            lines.append(f"  {layers} layers: rank {rank}, alpha {alpha:g}, {formula} = {scaling:g}{rate}")
    if plan.skipped:
        lines.append(f"  skipped, without a gradient path: {len(plan.skipped)} layers ({plan.skipped[0]}, ...)")
    return lines


def _adapter_parameters(shape: tuple[int, ...], rank: int, dora: bool) -> int:
    rows, columns = shape[0], prod(shape[1:])
    return rank * (rows + columns) + (rows if dora else 0)


def _data_lines(plan: Plan) -> list[str]:
    data, accumulation = plan.config.data, plan.config.step.accumulation
    images = sum(photo.repeats for photo, _ in plan.photos)
    even = images / (data.batch_size * accumulation * plan.processes)
    counts = Counter()
    for photo, bucket in plan.photos:
        counts[bucket] += photo.repeats
    shown = ", ".join(f"{w}x{h}: {n}" for (w, h), n in sorted(counts.items()))
    repeats = sorted({photo.repeats for photo, _ in plan.photos})
    captions = sum(not photo.caption for photo, _ in plan.photos)
    upscaled = sum(buckets.place(photo.width, photo.height, bucket).upscaled for photo, bucket in plan.photos)
    small = f"; {upscaled} photos are smaller than their bucket and are enlarged" if upscaled else ""
    length = f"{plan.max_steps} steps = {plan.max_steps / plan.steps_per_epoch:.4g} epochs"
    return [
        f"data {len(plan.photos)} images x {'/'.join(map(str, repeats))} repeats / (batch {data.batch_size} x accumulation "
        f"{accumulation} x {plan.processes} processes) = {even:g}, with bucket remainders {plan.steps_per_epoch} steps an "
        f"epoch; {length}",
        f"  buckets (images an epoch) {shown}{small}",
        f"  captions: {captions} missing or empty; dropped with probability {data.caption_dropout:g}; flip "
        f"{'on' if data.flip else 'off'}; text {'cached' if plan.cache_text else 'encoded live'}",
    ]


def total_updates(plan: Plan) -> int:
    """The schedule's length at a run's first start."""
    return plan.config.schedule.total_steps or plan.max_steps
