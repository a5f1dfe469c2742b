"""The plan of a run before any weight is read: components, targets, data, length. Printed at the start and by --plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from PIL import Image

from trainer import quantization
from trainer.adapters import Rule, Target, adaptable_layers, match_targets
from trainer.adapters.portable import Portable
from trainer.adapters.targets import fused_modules
from trainer.base import patterns
from trainer.base.errors import UserError
from trainer.base.progress import QUIET, Phases
from trainer.base.protocols import Hub
from trainer.base.types import Link
from trainer.config import Config, DataTable, IntervalTable, with_values
from trainer.data import buckets, held_out
from trainer.data.batches import sampler, short_batches
from trainer.data.examples import Example, examples
from trainer.data.images import near_duplicates
from trainer.data.memo import Memo
from trainer.data.scan import refuse_damaged
from trainer.data.sources import Photo, Scanned
from trainer.models import family_named
from trainer.models.base import Family, SampleRequest
from trainer.models.beside import complete
from trainer.models.loading import ModelSource
from trainer.models.opening import open_model
from trainer.models.weight_sets import Wanted
from trainer.objectives import Objective
from trainer.plan import optimizer_rules, storage
from trainer.plan.data_sources import read_sources, resolutions, sources_of
from trainer.plan.requirements import check_edits, check_preserved, family_options, refuse_unread, refuse_unread_by_model
from trainer.plan.samples import check_references, requests_of, truths_of
from trainer.plan.storage import Storage
from trainer.runtime import precision
from trainer.runtime.jobs import Every
from trainer.runtime.processes import Processes


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """A run's data before encoding. table: resolved. seed: of its random draws."""

    table: DataTable
    seed: int
    scanned: Scanned
    photos: tuple[Photo, ...]  # of the training set
    examples: tuple[Example, ...]  # the same photos, at their training sizes
    held_out: tuple[Example, ...]  # never trained on, at the sizes they would have
    measured: Mapping[str, tuple[Example, ...]]  # with a loss at fixed draws, by kind (held_out.measured_examples)
    alike: tuple[tuple[Photo, ...], ...]  # groups of near duplicates, trained on or held out
    requests: tuple[SampleRequest, ...]

    @property
    def encoded(self) -> tuple[Example, ...]:
        """All examples whose latents and captions a run reads."""
        return (*self.examples, *(example for examples in self.measured.values() for example in examples))

    @property
    def resolution(self) -> int:
        """The largest training resolution."""
        return max(side for example in self.examples for side in example.photo.source.resolutions)


@dataclass(frozen=True)
class Length:
    """The length of a run. processes: the number that share an update. began: (step, epoch), from the run's Progress."""

    processes: int
    steps_per_epoch: int
    max_steps: int
    began: tuple[int, int] = (0, 0)

    def epoch_of(self, step: int) -> int:
        """The epoch of step `step`, both counted from 1."""
        return sampler.epoch_of(step, steps_per_epoch=self.steps_per_epoch, began=self.began)

    def every(self, table: IntervalTable, first: int = 0) -> Every:
        """A table's interval. first: the earliest step, or epoch if the table counts epochs."""
        if not table.every_epochs:
            return Every(table.every_steps, first=first)
        # Epochs end at multiples of their length from the step at which training on these photos began, also before it.
        (step, epoch), length = self.began, self.steps_per_epoch
        zero = step - epoch * length
        return Every(table.every_epochs * length, zero, zero + first * length)


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """The model and its adapter before weights are read: all that loading and sampling need.

    storage: by component. options: the values of the keys that the family reads. cache_text: encode captions ahead, then
    unload the encoders. converted: the folder that caches converted weights, if any. resident: blocks that stay on the
    device, by streamed component. parts: the number of shards of each denoiser block, one in each process; 1: not sharded.
    under: the frozen adapter below the trained one, with its file's digest.
    """

    source: ModelSource
    storage: Mapping[str, Storage]
    objective: Objective
    options: Mapping[str, Any]
    targets: tuple[Target, ...]
    cache_text: bool
    converted: str | None
    resident: Mapping[str, int]
    parts: int = 1
    under: Portable | None = None
    under_sha256: str = ""

    @property
    def family(self) -> Family:
        """The model's family."""
        return self.source.family

    @property
    def adapted(self) -> tuple[str, ...]:
        """The components with adapted layers."""
        return tuple(dict.fromkeys(target.component for target in self.targets))

    @property
    def in_steps(self) -> tuple[str, ...]:
        """The components that training steps use."""
        return (self.family.denoiser, *(() if self.cache_text else self.family.text_encoders))

    @property
    def before_steps(self) -> tuple[str, ...]:
        """The components that encode photos and captions ahead of the steps."""
        return (self.family.vae, *(self.family.text_encoders if self.cache_text else ()))

    @property
    def fused(self) -> dict[str, list[Link]]:
        """Layers that the original layout fuses, by adapted component."""
        return {name: fused_modules(self.family.module_links(name, self.source.config(name))) for name in self.adapted}

    @property
    def scales_loss(self) -> bool:
        """Whether gradients pass through fp16, so that the loss must be scaled."""
        return precision.needs_scaling(self.storage[name].compute for name in {self.family.denoiser, *self.adapted})


@dataclass(frozen=True, kw_only=True, repr=False)
class RunPlan:
    """A whole run before weights are read. config: resolved."""

    config: Config
    model: ModelPlan
    data: DataPlan
    length: Length
    shapes: dict[tuple[str, str], tuple[int, ...]]  # (component, layer) -> weight shape, of adaptable layers
    skipped: tuple[str, ...]  # layers without a gradient path
    truths: tuple[Image.Image | None, ...]  # of the requests, at their sizes

    def __repr__(self) -> str:
        """One line: the fields of every layer and photo would fill a notebook. `PORTS.summary.described` prints the plan."""
        run, photos = self.config.run, len(self.data.photos)
        return f"RunPlan({run.name!r} -> {run.output_dir!r}: {self.length.max_steps} steps, {photos} photos)"

    @property
    def saves_before_the_end(self) -> bool:
        """Whether a checkpoint is due before the last step."""
        when, last = self.config.checkpoint, self.length.max_steps
        return last > 1 and (when.every_minutes > 0 or bool(self.length.every(when).steps(last - 1)))


def open_source(config: Config, hub: Hub | None = None) -> ModelSource:
    """The model's configs and file headers; for a hub id only the configs, until `fetched`. hub: lists it; None: a hub id is
    refused. Raises UserError."""
    family = family_named(config.model.family)
    refuse_unread(config, family)
    optimizer_rules.check(config)
    names = [component.name for component in family.components]
    for name in config.model.components:
        if name not in names:
            near = patterns.suggestion(name, names)
            raise UserError(f"model.components.{name} is not a component of {family.name}; {near}")
    source = open_model(
        family,
        config.model.path,
        hub=hub,
        config=config.model.config,
        component_paths={name: c.path for name, c in config.model.components.items() if c.path},
        wanted=Wanted(
            config.model.variant,
            {c.name: storage.asked_precision(config, c) for c in family.components},
            revision=config.model.revision,
        ),
        recognise=quantization.recognise,
    )
    source.check_kind()
    source = complete(source)
    refuse_unread_by_model(config, source)
    return source


def make_plan(
    config: Config, source: ModelSource, *, processes: int, phases: Phases = QUIET, scanned: Scanned | Memo | None = None
) -> RunPlan:
    """The plan, checked as far as possible without weights. config: resolved. scanned: photos that were read already, or the
    record of their files. Raises UserError if the run cannot work."""
    family = source.family
    components = storage.storages(config, family)
    data, length = plan_data(config, family, processes=processes, phases=phases, scanned=scanned)
    options = family_options(config, family)
    objective = find_objective(source, options)
    check_edits(source, data.examples)
    source.check_tokenizers()
    for component in components.values():
        storage.check(source, component)
    targets, shapes, skipped = find_targets(config, family, source)
    refuse_idle_steps(config, targets, length.max_steps)
    adapted = {target.component for target in targets}
    encoders = ", ".join(sorted(adapted - {family.denoiser}))
    cache_text = not encoders if config.data.cache_text == "auto" else config.data.cache_text
    if cache_text and encoders:
        raise UserError(
            f"data.cache_text = true cannot be combined with adapting {encoders}: cached encodings would not follow the "
            "training; leave it out"
        )
    check_preserved(config, cache_text=cache_text)
    return RunPlan(
        config=config,
        model=ModelPlan(
            source=source,
            storage=components,
            objective=objective,
            options=options,
            targets=targets,
            cache_text=cache_text,
            converted=config.model.cache_dir,
            resident=storage.resident_blocks(config, source, adapted),
            parts=storage.parts(config, processes),
        ),
        data=data,
        length=length,
        shapes=shapes,
        skipped=skipped,
        truths=truths_of(config.validation, data.requests, data.examples),
    )


def plan_data(
    config: Config, family: Family, *, processes: int, phases: Phases = QUIET, scanned: Scanned | Memo | None = None
) -> tuple[DataPlan, Length]:
    """The photos with their training sizes, and the length of the run. config: resolved. scanned: photos that were read
    already, of which the sound ones are planned, or the record of their files. Raises UserError if the run cannot work."""
    data = config.data
    if not isinstance(scanned, Scanned):
        scanned = read_sources(config, phases, scanned)
        refuse_damaged(scanned)
    for resolution in {side for source in sources_of(data) for side in source.resolutions}:
        if data.bucket_step % family.images.size_multiple or resolution < data.bucket_step:
            raise UserError(
                f"data.bucket_step = {data.bucket_step} does not suit {family.name} at data.resolution = {resolution}; "
                f"use a multiple of {family.images.size_multiple} that is at most the resolution"
            )
    photos, held_out_photos = held_out.split(scanned.photos, data.held_out)
    in_buckets = partial(
        examples,
        step=data.bucket_step,
        enlarge=data.enlarge,
        seed=config.run.seed,
        multiple=family.images.size_multiple,
        reference_rule=family.images.references,
        max_aspect=data.max_aspect,
    )
    training_set, held_out_set = in_buckets(photos), in_buckets(held_out_photos)
    if data.short_batches == "merge":
        training_set = short_batches.merged(training_set, batch_size=data.batch_size, enlarge=data.enlarge)
    group = config.step.accumulation * processes
    steps_per_epoch = sampler.steps_per_epoch(training_set, batch_size=data.batch_size, group=group)
    check_references(((str(e.photo.image), len(e.references)) for e in (*training_set, *held_out_set)), family.images)
    plan = DataPlan(
        table=data,
        seed=config.run.seed,
        scanned=scanned,
        photos=photos,
        examples=training_set,
        held_out=held_out_set,
        measured=held_out.measured_examples(training_set, held_out_set) if config.validation.loss_every_steps else {},
        alike=near_duplicates.groups(scanned.photos),
        requests=requests_of(config.validation, training_set, max(resolutions(data.resolution)), family.images),
    )
    return plan, Length(processes, steps_per_epoch, config.run.max_steps or config.run.epochs * steps_per_epoch)


def fetched(plan: ModelPlan, peers: Processes, phases: Phases) -> ModelPlan:
    """The plan with a hub id's weights on this machine. Raises UserError if they differ from their configs."""
    with peers.main_first():  # processes may differ in hub id or folder
        if plan.source.repository is None:
            return plan
        plan = replace(plan, source=plan.source.fetch(phases=phases))
    plan.source.check_kind()
    for component in plan.storage.values():
        storage.check(plan.source, component)
        storage.check_fetched(plan.source, component)
    check_objective(plan.source.repository.hub_id, plan.source, plan.options, plan.objective)
    return plan


def find_objective(source: ModelSource, options: Mapping[str, Any]) -> Objective:
    """The objective that the model's files and `family_options` ask for. Raises UserError for a model of another kind."""
    return source.family.images.objective(source.scheduler, source.markers, **options)


def check_objective(name: str, source: ModelSource, options: Mapping[str, Any], planned: Objective) -> None:
    """Raises UserError if fetched weights have another objective than their configs had. name: the hub id."""
    words = find_objective(source, options).describe()
    if words != planned.describe():
        raise UserError(
            f"model.path = {name!r}: the fetched files say {words}, its scheduler's config "
            f"{planned.describe()}; set model.prediction and model.zero_terminal_snr"
        )


def resolve(config: Config, source: ModelSource) -> Config:
    """`config` with the defaults of model and libraries: dtypes, backends, bucket step, optimizer options."""
    smallest = min(side for source in sources_of(config.data) for side in source.resolutions)
    step = config.data.bucket_step or buckets.bucket_step(smallest)
    keys = {"model.components": storage.resolve(config, source), "data.bucket_step": step}
    return with_values(config, keys).model_copy(update={"optimizer": optimizer_rules.resolve(config.optimizer)})


def find_targets(
    config: Config, family: Family, source: ModelSource
) -> tuple[tuple[Target, ...], dict[tuple[str, str], tuple[int, ...]], tuple[str, ...]]:
    """(targets, (component, layer) -> weight shape of adaptable layers, layers skipped for lack of a gradient path)."""
    components = [family.denoiser, *(r.component for r in config.adapter.rules if r.component in family.text_encoders)]
    layers: dict[str, list[str]] = {name: [] for name in dict.fromkeys((*components, *family.text_encoders))}
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    skipped, references = [], any(source.references for source in config.data.sources)
    for name in dict.fromkeys(components):
        no_gradient = family.adapters.no_gradient(name, source.config(name), references)
        for layer, shape in adaptable_layers(source.build(name)).items():
            if any(fnmatchcase(layer, pattern) for pattern in no_gradient):
                skipped.append(f"{name}.{layer}")
            else:
                layers[name].append(layer)
                shapes[name, layer] = shape
    targets = match_targets(
        layers,
        denoiser=family.denoiser,
        targets=config.adapter.targets,
        presets=family.adapters.presets,
        rules=[Rule(**rule.model_dump()) for rule in config.adapter.rules],
        rank=config.adapter.rank,
        alpha=config.adapter.alpha,
    )
    adapted = {target.component for target in targets}
    return targets, shapes, tuple(name for name in skipped if name.partition(".")[0] in adapted)


def refuse_idle_steps(config: Config, targets: Sequence[Target], max_steps: int) -> None:
    """Raises UserError if every layer stops before the run does: a later loss would have no gradient."""
    stops = [target.stop_step for target in targets]
    if all(stop is not None and stop < max_steps for stop in stops):
        run = config.run
        length = f"run.max_steps = {max_steps}" if run.max_steps else f"run.epochs = {run.epochs} is {max_steps} steps"
        raise UserError(
            f"adapter.rules: every adapted layer stops by step {max(stop or 0 for stop in stops)}, and {length}: nothing "
            "would be trained after that; leave out a stop_step, or lower the run's length"
        )
