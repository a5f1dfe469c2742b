"""Describes an adapter file, as text and as a picture (`scripts/adapter.py show`)."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trainer.adapters.export import DORA_SCALE_MEANING
from trainer.adapters.portable import DoraScale, Factors, is_finite
from trainer.base.console import printable, shortlist
from trainer.monitoring.weight_change import block_of
from workbench.adapter_files.opening import OpenedAdapter
from workbench.adapters.convert import WeightOf, gain

SHOWN = 12  # lines of a list
OTHER_SIZE = "another size than the published ones; --base MODEL tells which layers have no adapter"


@dataclass(frozen=True)
class LayerReport:
    """An adapter's effect on one layer. change: ||s B A||, of all elements. With the base, weight: ||W||, and for a DoRA
    drift: max |g - 1|, where g multiplies the rows or columns of W + s B A."""

    name: str
    rank: int
    alpha: float
    scaling: float
    change: float
    finite: bool
    empty: bool
    weight: float | None = None
    drift: float | None = None


def layer_report(name: str, factors: Factors, meaning: DoraScale, weight: WeightOf | None = None) -> LayerReport:
    """The report of a layer; ||s B A|| by the trace of (B^T B)(A A^T), or by its kind. weight: of the base, or None."""
    tensors = {kind: tensor.make() for kind, tensor in factors.tensors().items()}
    finite = all(map(is_finite, tensors.values()))
    if factors.form is None:
        a, b = tensors["A"].double().flatten(1), tensors["B"].double().flatten(1)
        product = max(float(((b.t() @ b) * (a @ a.t())).sum()), 0.0) ** 0.5
    else:
        product = factors.form.norm(tensors)
    change = abs(factors.scaling) * product
    report = LayerReport(name, *factors.ranked, factors.scaling, change, finite, not factors.changes())
    if weight is None:
        return report
    w = weight(name)
    drift = float((gain(w, factors, meaning) - 1).abs().max()) if "magnitude" in tensors else None
    return replace(report, weight=float(w.double().norm()), drift=drift)


def lines(opened: OpenedAdapter, layers: list[LayerReport]) -> list[str]:
    """The report as text."""
    read, portable = opened.read, opened.portable
    dtypes = Counter(str(t.dtype).removeprefix("torch.") for f in portable.layers.values() for t in f.tensors().values())
    parameters = sum(torch.Size(t.shape).numel() for f in portable.layers.values() for t in f.tensors().values())
    rows = [
        f"{opened.path}: {portable.kind.word} for {opened.model.family.name} ({' or '.join(opened.labels) or OTHER_SIZE})",
        f"  keys: {_counts(read.conventions, 'module(s)')}",
        f"  layers: {_counts(Counter(name.partition('.')[0] for name in portable.layers), 'layers')}; "
        f"{parameters:,} numbers, {_counts(dtypes, 'tensors')}",
        f"  rank: {_counts(Counter(layer.rank for layer in layers), 'layers')}",
        f"  alpha: {_counts(Counter(f'{layer.alpha:g}' for layer in layers), 'layers')}; {', '.join(read.alphas)}",
        f"  scale (alpha / rank): {_counts(Counter(f'{layer.scaling:g}' for layer in layers), 'layers')}"
        + ("; rsLoRA" if portable.rslora else ""),
    ]
    rows += [f"  {line}" for line in opened.read.account.lines()]
    if portable.kind.magnitudes:
        axes = Counter(factors.axis for factors in portable.layers.values() if factors.magnitude is not None)
        rows.append(f"  magnitudes: {_counts(axes, 'layers')} axis; {DORA_SCALE_MEANING[portable.meaning]}")
    if read.fused:
        rows.append(f"  modules of several layers: {_counts(read.fused, 'modules')}")
    if read.absent:
        rows += _rows("  rows without an adapter, whose magnitudes are the model's norms and were left out", read.absent)
    rows += _norms(layers)
    for component in opened.components if opened.labels else ():
        absent = [name for name in opened.model.full_layers([component]) if name not in portable.layers]
        some = f"not adapted of {component}: {len(absent)} layers: {_kinds(absent)}"
        rows.append(f"  {some if absent else f'every layer of {component} is adapted'}")
    rows += _rows("  NOT FINITE", [layer.name for layer in layers if not layer.finite])
    rows += _rows("  B is zero, so that nothing changes", [layer.name for layer in layers if layer.empty])
    for key in ("ss_output_name", "modelspec.title", "ss_base_model_version", "ss_steps", "modelspec.trigger_phrase"):
        if value := portable.metadata.get(key):
            rows.append(f"  {key}: {printable(value[:200])}")
    return rows


def _norms(layers: list[LayerReport]) -> list[str]:
    by_block: dict[str, list[LayerReport]] = {}
    for layer in layers:
        by_block.setdefault(block_of(layer.name), []).append(layer)
    is_relative = all(layer.weight is not None for layer in layers)
    measure = "||sBA|| / ||W||" if is_relative else "||sBA||"
    drifts = any(layer.drift is not None for layer in layers)
    rows = [f"  {measure} by block (largest layer){'; largest |g - 1| of the magnitudes' if drifts else ''}:"]
    for block, norms in by_block.items():
        largest = max(norms, key=_size)
        drift = max((layer.drift for layer in norms if layer.drift is not None), default=None)
        number = f"{_size(largest):.3%}" if is_relative else f"{_size(largest):.4g}"
        rows.append(f"    {block}: {number}" + (f"; {drift:.3%}" if drift is not None else ""))
    return rows


def _size(layer: LayerReport) -> float:
    return layer.change / max(layer.weight, 1e-30) if layer.weight is not None else layer.change


def _counts(counts: Mapping[object, int], noun: str) -> str:
    if len(counts) == 1:
        return f"{next(iter(counts))} ({next(iter(counts.values()))} {noun})"
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return shortlist([f"{key} ({count})" for key, count in ordered], SHOWN)


def _kinds(names: Iterable[str]) -> str:
    ends = Counter(".".join(part for part in name.split(".")[-2:] if not part.isdigit()) for name in names)
    return _counts(ends, "layers")


def _rows(title: str, names: list[str]) -> list[str]:
    return [f"{title}: {len(names)} layers: {shortlist(names, SHOWN)}"] if names else []


def plot(layers: list[LayerReport], title: str, path: Path) -> None:
    """Write a PNG with every layer's change and rank, in the model's order; for a DoRA with its base the drift, too."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    is_relative = all(layer.weight is not None for layer in layers)
    drifts = [layer.drift for layer in layers]
    panels = [("||sBA|| / ||W||" if is_relative else "||sBA||", [_size(layer) for layer in layers])]
    if all(drift is not None for drift in drifts):
        panels.append(("magnitude: max |g - 1|", drifts))
    panels.append(("rank", [layer.rank for layer in layers]))
    figure = Figure(figsize=(max(6.0, min(24.0, len(layers) / 20)), 2.2 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (label, values) in zip(figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0], panels, strict=True):
        axes.bar(range(len(values)), values, width=1.0)
        axes.set_ylabel(label)
    axes.set_xlabel("layer, in the model's order")
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=100, metadata={"Software": None})
