"""An audit: what storage formats cost a model, on the photos of a run and at the draws of its held-out loss.

config -> model family -> data -> base -> every layer's estimate -> the costliest layers alone -> each format as a run has it

On a CPU the base lies in a file, and memory holds two of its blocks, and of what is stored otherwise one layer. Each whole
format is then loaded in the
base's place, as a run loads it: its loss is the one that this run logs before its first step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from trainer import kernels, quantization
from trainer.base.errors import NonFiniteError, UserError
from trainer.base.files import make_folder
from trainer.base.memory import find_blocks
from trainer.base.progress import Phases
from trainer.data.batches.loader import Reader
from trainer.data.cache.entries import MemoryCache
from trainer.engine.components import Components
from trainer.engine.encoding import encode
from trainer.engine.held_out_loss import HeldOutLoss
from trainer.plan.run_plan import ModelPlan, RunPlan, fetched
from trainer.plan.storage import Storage
from trainer.quantization import FrozenLayer
from trainer.run.session import Session
from trainer.run.setup import choose_attention
from trainer.runtime.attention import Attention
from trainer.runtime.streaming import Streamer
from workbench.audit.spilling import Spiller
from workbench.audit.storage_audit import AuditPlan
from workbench.audit.storage_cost import (
    Audit,
    Effect,
    FormatCost,
    Formats,
    LayerCost,
    Predictions,
    Terms,
    estimate,
    measured,
    predict,
    swapped,
)  # fmt: skip


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
            return predict(self.held_out(components), components, what)
        finally:
            components.let_go([storage.name])

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
    for storage, formats_of in zip(plan.stored, layers, strict=True):
        if not formats_of:
            raise UserError(
                f"--formats {storage.format.dtype_name}: no layer of the {storage.name} would be stored so; look at its "
                f"exclude = {list(storage.exclude)}"
            )
    components = bench.components(run.model, partial(OnDisk, folder))
    bench = replace(bench, reader=encode(run, components, MemoryCache(), on_non_finite=_refuse))
    denoiser, held_out = bench.load(components), bench.held_out(components)
    base = predict(held_out, components, "held-out loss of the base")
    blocks = find_blocks(denoiser, run.model.family.memory.blocks)
    terms = estimate(held_out, components, denoiser, blocks, layers)
    single: list[dict[str, Effect]] = []
    for storage, formats_of, own in zip(plan.stored, layers, terms, strict=True):
        single.append({})
        for name in own.ranked()[:alone]:
            with swapped(denoiser.get_submodule(name), formats_of[name]):
                losses = predict(held_out, components, f"{storage.format.name}: {name} alone")
            single[-1][name] = measured(base, losses)
    shapes = {name: layer.weight_shape for name, layer in denoiser.named_modules() if isinstance(layer, FrozenLayer)}
    del denoiser, held_out
    components.let_go([run.model.family.denoiser])
    costs = []
    for storage, formats_of, own, each in zip(plan.stored, layers, terms, single, strict=True):
        sizes = {name: _bytes(format, shapes[name]) for name, format in formats_of.items()}
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
    whole = measured(base, bench.predict(storage, f"held-out loss of {name}"))
    spared = None
    if exclude:
        less = replace(storage, exclude=(*storage.exclude, *exclude))
        spared = measured(base, bench.predict(less, f"held-out loss of {name} without {len(exclude)} layers"))
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


def _bytes(format: quantization.Format, shape) -> tuple[int, int]:
    """(bytes of a weight in a format, bytes of it excluded)."""
    payload = format.empty_payload(shape, "meta").values()
    return sum(tensor.nbytes for tensor in payload), 2 * shape.numel()


def _refuse(what: str) -> None:
    raise NonFiniteError(f"{what}: the encoding is not finite")
