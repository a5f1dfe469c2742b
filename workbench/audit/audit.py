"""An audit of storage formats: their cost for a model, on the photos of a run and at the draws of its held-out loss.

config -> data -> base -> every layer's estimate -> the costliest layers alone -> each format as a run has it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from trainer import kernels
from trainer.artifacts.ports import Ports
from trainer.base import patterns
from trainer.base.errors import NonFiniteError, UserError, number_in
from trainer.base.files import make_folder
from trainer.base.memory import find_blocks
from trainer.base.progress import QUIET, Phases
from trainer.config import ComponentTable, Config
from trainer.data.batches.loader import Reader
from trainer.data.cache.entries import MemoryCache
from trainer.engine.components import Components
from trainer.engine.encoding import encode
from trainer.engine.held_out_loss import HeldOutLoss
from trainer.models import family_named
from trainer.plan.run_plan import ModelPlan, RunPlan, fetched
from trainer.plan.storage import DEFAULT_STORAGE, Storage, check, held_as
from trainer.quantization import ALL_FORMATS, FORMATS, Format, FrozenLayer, formats_of
from trainer.run.session import Session, measuring
from trainer.run.setup import choose_attention
from trainer.runtime.streaming import Streamer
from workbench.audit import storage_cost
from workbench.audit.spilling import Spiller
from workbench.audit.storage_cost import Audit, Effect, FormatCost, Formats, LayerCost, Predictions, Terms
from workbench.hub import hub
from workbench.sources import LAYOUTS


@dataclass(frozen=True)
class AuditPlan:
    """A run over the base that measures one kind of photo, and the denoiser's storages to compare the base with."""

    session: Session
    run: RunPlan
    stored: tuple[Storage, ...]


def formats_named(names: Sequence[str]) -> tuple[Format, ...]:
    """The quantised formats of these names, DTYPE or DTYPE:BACKEND, each once. Raises UserError for another name."""
    formats = {}
    quantised = [format.dtype_name for format in ALL_FORMATS if format.quantised]
    for name in names:
        dtype, _, backend = name.partition(":")
        if dtype not in quantised:
            fault = (
                "is not quantised, it is what the formats are compared with" if dtype in FORMATS else "is no storage format"
            )
            raise UserError(f"--formats {name} {fault}; use {', '.join(dict.fromkeys(quantised))}")
        backends = formats_of(dtype)
        if backend and backend not in backends:
            raise UserError(f"--formats {name}: {patterns.suggestion(backend, list(backends))}")
        format = backends[backend] if backend else next(iter(backends.values()))
        formats[format.name] = format
    return tuple(formats.values())


def plan_audit(config: Config, model: str, formats: Sequence[Format], phases: Phases = QUIET) -> AuditPlan:
    """The plan of an audit of `model` with a run's config, whose model.path is ignored. Reads photos and headers. The base is
    stored as in the config if that is not quantised, else in bf16. Raises UserError for an audit that cannot work."""
    if number_in("WORLD_SIZE", 1, least=1) > 1:
        raise UserError("an audit is made by one process; start it without torchrun")
    if config.precision.matmul != "compute":
        remedy = "rounds activations, too, and an audit is of the weights alone; give --set precision.matmul=compute"
        raise UserError(f"precision.matmul = {config.precision.matmul!r} {remedy}")
    denoiser = family_named(config.model.family).denoiser
    table = config.model.components.get(denoiser, ComponentTable())
    components = config.model.components | {denoiser: _unquantised(table)}
    over_base = config.model.model_copy(update={"path": model, "components": components})
    session = Session.open(
        measuring(config.model_copy(update={"model": over_base})), only="measure", ports=Ports(hub=hub, layouts=LAYOUTS)
    )
    source = session.source
    if (quantised := held_as(source, denoiser)) is not None:
        dtype, backend = quantised
        raise UserError(
            f"{model}: the {denoiser} is stored as {dtype} ({backend}) in the model's files already, and there is nothing to "
            "compare it with; give the 16-bit model"
        )
    run = session.plan(phases=phases)
    kind = next(iter(run.data.measured))  # held-out photos if there are any
    data = replace(run.data, measured={kind: run.data.measured[kind]}, requests=())
    # Nothing is trained, so no text encoder has to be at hand.
    run = replace(run, data=data, model=replace(run.model, targets=(), cache_text=True))
    base = run.model.storage[denoiser]
    stored = tuple(replace(base, format=format, exclude=table.exclude) for format in formats)
    check(source, stored[0])
    return AuditPlan(session, run, stored)


def _unquantised(table: ComponentTable) -> ComponentTable:
    """A denoiser's table with storage of 16 or 32 bits: its own, or the default."""
    plain = table.dtype is not None and not next(iter(formats_of(table.dtype).values())).quantised
    dtype = table.dtype if plain else DEFAULT_STORAGE["denoiser"]
    return table.model_copy(update={"dtype": dtype, "backend": None, "exclude": ()})


class OnDisk(Components):
    """A model whose denoiser's blocks are in a file in `folder` on a CPU; with a GPU they stream as planned."""

    def __init__(self, folder: Path, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.folder = folder

    def streamer(self, name: str, module: nn.Module) -> Streamer | None:
        if name != self.family.denoiser or self.model.device.type != "cpu":
            return super().streamer(name, module)
        make_folder(self.folder, "--out")
        return Spiller(self.family.ordered_blocks(name, module), self.model.device, self.folder)


def _load(components: Components) -> nn.Module:
    """The denoiser, ready to compute as in a run."""
    family = components.family
    denoiser = components.load(family.denoiser).eval()
    components.attention.give(denoiser, family.memory.attention, components.model.device, components.kernels)
    return denoiser


def _predict(
    run: RunPlan, components_of: Callable[[ModelPlan], Components], reader: Reader, storage: Storage, phase: str
) -> Predictions:
    """The predictions of the denoiser in one storage: it is loaded and then released."""
    components = components_of(replace(run.model, storage={**run.model.storage, storage.name: storage}))
    _load(components)
    try:
        return storage_cost.predict(HeldOutLoss.of(run, components, reader, nullcontext), components, phase)
    finally:
        components.unload([storage.name])


def _quantised(plan: AuditPlan, storage: Storage) -> Formats:
    """The format of each layer that a storage quantises. Reads no weight."""
    module = plan.run.model.source.build(storage.name)
    storage.swap(module, kernels=kernels.choose(plan.run.config.adapter.kernels, plan.session.processes.device))
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, FrozenLayer)}
    return {name: layer.format for name, layer in layers.items() if layer.format.quantised}


def audit(plan: AuditPlan, folder: Path, *, most: int, alone: int, phases: Phases) -> Audit:
    """The audit of a model's denoiser. folder: has room for the base. most: layers to exclude in each format. alone: how many
    of the costliest are measured one by one. Raises NonFiniteError, and UserError for a format that would store no layer."""
    run, peers = plan.run, plan.session.processes
    attention = choose_attention(run, peers.device, peers.say)
    run = replace(run, model=fetched(run.model, peers, phases), data=replace(run.data, examples=()))
    layers = [_quantised(replace(plan, run=run), storage) for storage in plan.stored]
    for storage, formats in zip(plan.stored, layers, strict=True):
        if not formats:
            fault = f"no layer of the {storage.name} would be stored so; look at its exclude = {list(storage.exclude)}"
            raise UserError(f"--formats {storage.format.dtype_name}: {fault}")
    components_of = partial(plan.session.components, phases=phases, attention=attention)
    components = components_of(run.model, kind=partial(OnDisk, folder))
    reader = encode(run, components, MemoryCache(), on_non_finite=_refuse)
    denoiser, held_out = _load(components), HeldOutLoss.of(run, components, reader, nullcontext)
    base = storage_cost.predict(held_out, components, "held-out loss of the base")
    blocks = find_blocks(denoiser, run.model.family.memory.blocks)
    terms = storage_cost.estimate(held_out, components, denoiser, blocks, layers)
    single: list[dict[str, Effect]] = []
    for storage, formats, estimates in zip(plan.stored, layers, terms, strict=True):
        single.append({})
        for name in estimates.ranked()[:alone]:
            with storage_cost.swapped(denoiser.get_submodule(name), formats[name]):
                predictions = storage_cost.predict(held_out, components, f"{storage.format.name}: {name} alone")
            single[-1][name] = storage_cost.measured(base, predictions)
    shapes = {name: layer.weight_shape for name, layer in denoiser.named_modules() if isinstance(layer, FrozenLayer)}
    del denoiser, held_out
    components.unload([run.model.family.denoiser])
    costs, predict = [], partial(_predict, run, components_of, reader)
    for storage, formats, estimates, effects in zip(plan.stored, layers, terms, single, strict=True):
        payloads = {name: format.empty_payload(shapes[name], "meta").values() for name, format in formats.items()}
        stored_bytes = {name: sum(tensor.nbytes for tensor in payload) for name, payload in payloads.items()}
        sizes = {name: (size, 2 * shapes[name].numel()) for name, size in stored_bytes.items()}
        costs.append(_cost(predict, storage, estimates, effects, sizes, base, most))
    (kind,), (photos,) = run.data.measured.keys(), run.data.measured.values()
    stored = run.model.storage[run.model.family.denoiser]
    return Audit(
        model=run.config.model.path, denoiser=stored.name, stored=stored.format.name, kind=kind, photos=len(photos),
        base=base, excluded=plan.stored[0].exclude, costs=tuple(costs),
    )  # fmt: skip


def _cost(
    predict: Callable[[Storage, str], Predictions],
    storage: Storage,
    terms: Terms,
    alone: dict[str, Effect],
    sizes: dict[str, tuple[int, int]],
    base: Predictions,
    most: int,
) -> FormatCost:
    """The cost of a storage, with and without costly layers. alone: those measured singly. sizes: (stored, excluded)."""
    ranked = terms.ranked()
    layers = [LayerCost(name, terms.effect([name]), alone.get(name), sizes[name][1] - sizes[name][0]) for name in ranked]
    first = max(most, len(alone))  # includes the measured layers: they are sorted by their measurement
    layers[:first] = sorted(layers[:first], key=lambda layer: -layer.moved)
    order = [layer.name for layer in layers]
    exclude = tuple(order[:most])
    name = storage.format.name
    whole = storage_cost.measured(base, predict(storage, f"held-out loss of {name}"))
    after_exclusion = None
    if exclude:
        less = replace(storage, exclude=(*storage.exclude, *exclude))
        after_exclusion = storage_cost.measured(base, predict(less, f"held-out loss of {name} without {len(exclude)} layers"))
    return FormatCost(
        format=storage.format,
        layers=tuple(layers),
        estimated=terms.effect(order),
        whole=whole,
        after_exclusion=after_exclusion,
        exclude=exclude,
        remaining=tuple(terms.effect(order[first:]).of_prediction for first in range(len(order) + 1)),
        bytes=sum(stored for stored, _ in sizes.values()),
    )


def _refuse(source: str) -> None:
    raise NonFiniteError(f"{source}: the encoding is not finite")
