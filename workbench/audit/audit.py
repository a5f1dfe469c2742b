"""An audit: what storage formats cost a model, on the photos of a run and at the draws of its held-out loss.

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
from trainer.base import patterns
from trainer.base.errors import NonFiniteError, UserError, number_in
from trainer.base.files import make_folder
from trainer.base.memory import find_blocks
from trainer.base.progress import QUIET, Phases
from trainer.config import ComponentTable, Config
from trainer.data.batches.loader import Reader
from trainer.data.cache.entries import MemoryCache
from trainer.data.memo import Memo
from trainer.engine.components import Components
from trainer.engine.encoding import encode
from trainer.engine.held_out_loss import HeldOutLoss
from trainer.models import family_named
from trainer.plan.run_plan import ModelPlan, RunPlan, fetched
from trainer.plan.storage import DEFAULT_STORAGE, Storage, check, held_as
from trainer.quantization import ALL_FORMATS, FORMATS, Format, FrozenLayer, formats_of
from trainer.run.session import Session, measuring
from trainer.run.setup import choose_attention
from trainer.runtime.attention import Attention
from trainer.runtime.streaming import Streamer
from workbench.audit import storage_cost
from workbench.audit.spilling import Spiller
from workbench.audit.storage_cost import Audit, Effect, FormatCost, Formats, LayerCost, Predictions, Terms
from workbench.sources import LAYOUTS


@dataclass(frozen=True)
class AuditPlan:
    """A run over the base, of which one kind of photo is measured, and the denoiser's storages to compare it with."""

    session: Session
    run: RunPlan
    stored: tuple[Storage, ...]


def formats_named(names: Sequence[str]) -> tuple[Format, ...]:
    """The quantised formats of these names, DTYPE or DTYPE:BACKEND, each once. Raises UserError for another name."""
    formats = {}
    known = [format.dtype_name for format in ALL_FORMATS if format.quantised]
    for name in names:
        dtype, _, backend = name.partition(":")
        if dtype not in known:
            why = "is not quantised, it is what the formats are compared with" if dtype in FORMATS else "is no storage format"
            raise UserError(f"--formats {name} {why}; use {', '.join(dict.fromkeys(known))}")
        backends = formats_of(dtype)
        if backend and backend not in backends:
            raise UserError(f"--formats {name}: {patterns.suggestion(backend, list(backends))}")
        format = backends[backend] if backend else next(iter(backends.values()))
        formats[format.name] = format
    return tuple(formats.values())


def plan_audit(config: Config, model: str, formats: Sequence[Format], phases: Phases = QUIET) -> AuditPlan:
    """The audit of a model with a run's config, whose model.path counts no more. Reads photos and headers. The base is stored
    as the config says where that is not quantised, else in bf16. Raises UserError for what cannot work."""
    if number_in("WORLD_SIZE", 1, least=1) > 1:
        raise UserError("an audit is made by one process; start it without torchrun")
    if config.precision.matmul != "compute":
        why = "rounds activations, too, and an audit is of the weights alone; give --set precision.matmul=compute"
        raise UserError(f"precision.matmul = {config.precision.matmul!r} {why}")
    denoiser = family_named(config.model.family).denoiser
    asked = config.model.components.get(denoiser, ComponentTable())
    components = config.model.components | {denoiser: _unquantised(asked)}
    over_base = config.model.model_copy(update={"path": model, "components": components})
    session = Session.open(measuring(config.model_copy(update={"model": over_base})), only="measure")
    source = session.source
    if (held := held_as(source, denoiser)) is not None:
        raise UserError(
            f"{model}: the {denoiser} is stored as {held[0]} ({held[1]}) in the model's files already, and there is "
            "nothing to compare it with; give the 16-bit model"
        )
    run = session.plan(phases=phases, scanned=Memo(layouts=LAYOUTS))
    kind = next(iter(run.data.measured))  # held-out photos where there are any
    data = replace(run.data, measured={kind: run.data.measured[kind]}, requests=())
    # Nothing is trained, so no text encoder has to be at hand.
    run = replace(run, data=data, model=replace(run.model, targets=(), cache_text=True))
    base = run.model.storage[denoiser]
    stored = tuple(replace(base, format=format, exclude=asked.exclude) for format in formats)
    check(source, stored[0])
    return AuditPlan(session, run, stored)


def _unquantised(given: ComponentTable) -> ComponentTable:
    """A denoiser's table with storage of 16 or 32 bits: the one that it asks for, or the default."""
    plain = given.dtype is not None and not next(iter(formats_of(given.dtype).values())).quantised
    dtype = given.dtype if plain else DEFAULT_STORAGE["denoiser"]
    return given.model_copy(update={"dtype": dtype, "backend": None, "exclude": ()})


class OnDisk(Components):
    """A model whose denoiser's blocks lie in a file of `folder` on a CPU; beside a GPU they stream as the plan says."""

    def __init__(self, folder: Path, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.folder = folder

    def streamer(self, name: str, module: nn.Module) -> Streamer | None:
        if name != self.family.denoiser or self.model.device.type != "cpu":
            return super().streamer(name, module)
        make_folder(self.folder, "--out")
        return Spiller(self.family.ordered_blocks(name, module), self.model.device, self.folder)


@dataclass(frozen=True)
class Bench:
    """What measures. reader: of the photos, which are encoded."""

    session: Session
    run: RunPlan
    attention: Attention
    phases: Phases
    reader: Reader | None = None

    def components(self, model: ModelPlan, kind: Callable[..., Components] = Components) -> Components:
        """The model, of which nothing is loaded."""
        return self.session.components(model, self.phases, attention=self.attention, kind=kind)

    def load(self, components: Components) -> nn.Module:
        """The denoiser, ready to compute as in a run."""
        family = components.family
        denoiser = components.load(family.denoiser).eval()
        components.attention.give(denoiser, family.memory.attention, components.model.device, components.kernels)
        return denoiser

    def held_out(self, components: Components) -> HeldOutLoss:
        """The held-out loss of what is loaded."""
        assert self.reader is not None
        return HeldOutLoss.of(self.run, components, self.reader, nullcontext)

    def predict(self, storage: Storage, what: str) -> Predictions:
        """The predictions of the denoiser in one storage, which is loaded for them and let go."""
        model = self.run.model
        components = self.components(replace(model, storage={**model.storage, storage.name: storage}))
        self.load(components)
        try:
            return storage_cost.predict(self.held_out(components), components, what)
        finally:
            components.unload([storage.name])

    def quantised(self, storage: Storage) -> Formats:
        """The layers that a storage quantises. Reads no weight."""
        module = self.run.model.source.build(storage.name)
        storage.swap(module, kernels=kernels.choose(self.run.config.adapter.kernels, self.session.processes.device))
        layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, FrozenLayer)}
        return {name: layer.format for name, layer in layers.items() if layer.format.quantised}


def audit(plan: AuditPlan, folder: Path, *, most: int, alone: int, phases: Phases) -> Audit:
    """The audit of a model's denoiser. most: layers to exclude in each format. alone: how many of the costliest are measured
    one by one. folder: has room for the base. Raises NonFiniteError, and UserError for a format that would store no layer."""
    run, peers = plan.run, plan.session.processes
    attention = choose_attention(run, peers.device, peers.say)
    run = replace(run, model=fetched(run.model, peers, phases), data=replace(run.data, examples=()))
    bench = Bench(plan.session, run, attention, phases)
    layers = [bench.quantised(storage) for storage in plan.stored]
    for storage, formats in zip(plan.stored, layers, strict=True):
        if not formats:
            why = f"no layer of the {storage.name} would be stored so; look at its exclude = {list(storage.exclude)}"
            raise UserError(f"--formats {storage.format.dtype_name}: {why}")
    components = bench.components(run.model, partial(OnDisk, folder))
    bench = replace(bench, reader=encode(run, components, MemoryCache(), on_non_finite=_refuse))
    denoiser, held_out = bench.load(components), bench.held_out(components)
    base = storage_cost.predict(held_out, components, "held-out loss of the base")
    blocks = find_blocks(denoiser, run.model.family.memory.blocks)
    terms = storage_cost.estimate(held_out, components, denoiser, blocks, layers)
    single: list[dict[str, Effect]] = []
    for storage, formats, own in zip(plan.stored, layers, terms, strict=True):
        single.append({})
        for name in own.ranked()[:alone]:
            with storage_cost.swapped(denoiser.get_submodule(name), formats[name]):
                losses = storage_cost.predict(held_out, components, f"{storage.format.name}: {name} alone")
            single[-1][name] = storage_cost.measured(base, losses)
    shapes = {name: layer.weight_shape for name, layer in denoiser.named_modules() if isinstance(layer, FrozenLayer)}
    del denoiser, held_out
    components.unload([run.model.family.denoiser])
    costs = []
    for storage, formats, own, each in zip(plan.stored, layers, terms, single, strict=True):
        payloads = {name: format.empty_payload(shapes[name], "meta").values() for name, format in formats.items()}
        stored_bytes = {name: sum(tensor.nbytes for tensor in payload) for name, payload in payloads.items()}
        sizes = {name: (size, 2 * shapes[name].numel()) for name, size in stored_bytes.items()}
        costs.append(_cost(bench, storage, own, each, sizes, base, most))
    (kind,), (photos,) = run.data.measured.keys(), run.data.measured.values()
    stored = run.model.storage[run.model.family.denoiser]
    return Audit(
        model=run.config.model.path, denoiser=stored.name, stored=stored.format.name, kind=kind, photos=len(photos),
        base=base, kept=plan.stored[0].exclude, costs=tuple(costs),
    )  # fmt: skip


def _cost(
    bench: Bench,
    storage: Storage,
    terms: Terms,
    alone: dict[str, Effect],
    sizes: dict[str, tuple[int, int]],
    base: Predictions,
    most: int,
) -> FormatCost:
    """One storage, as a run has it, whole and without the costliest layers. sizes: (bytes stored, bytes excluded)."""
    ranked = terms.ranked()
    layers = [LayerCost(name, terms.effect([name]), alone.get(name), sizes[name][1] - sizes[name][0]) for name in ranked]
    first = max(most, len(alone))  # those that were measured take their places by it
    layers[:first] = sorted(layers[:first], key=lambda layer: -layer.moved)
    order = [layer.name for layer in layers]
    exclude = tuple(order[:most])
    name = storage.format.name
    whole = storage_cost.measured(base, bench.predict(storage, f"held-out loss of {name}"))
    spared = None
    if exclude:
        less = replace(storage, exclude=(*storage.exclude, *exclude))
        spared = storage_cost.measured(base, bench.predict(less, f"held-out loss of {name} without {len(exclude)} layers"))
    return FormatCost(
        name=name,
        dtype=storage.format.dtype_name,
        backend=storage.format.backend,
        layers=tuple(layers),
        estimated=terms.effect(order),
        whole=whole,
        spared=spared,
        exclude=exclude,
        remaining=tuple(terms.effect(order[first:]).of_prediction for first in range(len(order) + 1)),
        bytes=sum(stored for stored, _ in sizes.values()),
    )


def _refuse(what: str) -> None:
    raise NonFiniteError(f"{what}: the encoding is not finite")
