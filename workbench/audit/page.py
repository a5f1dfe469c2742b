"""An audit of storage formats as text, as a page, as JSON, and as the lines of a config."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from statistics import fmean
from typing import Any

from trainer.base.tensorfile import size_text
from workbench.audit.storage_cost import Audit, Effect, FormatCost, LayerCost
from workbench.pages import curves
from workbench.pages.rendering import document

MIB = 2**20
BAND = "with 95 %, other noises and times on these photos give a loss at most that far away; other photos are not in it"
COLUMNS = ("layer", "prediction", "share", "loss", "band", "MiB more", "share per MiB", "measured")
NOTES = (
    "prediction: the root mean square of its change, relative to that of the prediction. share: of the format's whole mean "
    f"squared change, which layers add up to nearly. loss: the change of the loss. band: {BAND}. MiB more: what the layer "
    "takes beyond the format where it is excluded.",
    "measured: computed with this one layer stored so. The others are estimates of first order, whose band has the second "
    "order in it.",
)


def about(audit: Audit) -> str:
    """A sentence on the base: its storage, loss, photos and draws."""
    photos = f"{audit.photos} {'held-out' if audit.kind == 'held_out' else 'trained'} photo{'' if audit.photos == 1 else 's'}"
    return (
        f"the {audit.denoiser} of {audit.model}, stored as {audit.stored}, has a loss of {audit.base.loss:.5g} on {photos} "
        f"({len(audit.base.residuals)} draws)"
    )


def text(audit: Audit) -> str:
    """The audit for a terminal."""
    lines = [f"base: {about(audit)}"]
    for cost in audit.costs:
        lines += ["", f"{cost.format.name}: {len(cost.layers)} layers, {size_text(cost.bytes)}"]
        lines.append(f"  all of them: {_effect(audit, cost.whole)}")
        lines.append(f"  as estimated: {_effect(audit, cost.estimated)}")
        if cost.after_exclusion is not None:
            lines.append(f"  without the {len(cost.exclude)} below: {_effect(audit, cost.after_exclusion)}; {_gain(cost)}")
        for layer in cost.layers[: len(cost.exclude)]:
            change, mib = layer.alone or layer.estimated, layer.more / MIB
            lines.append(
                f"  {_share(cost, layer):7.1%} {change.relative(audit.base):8.2%} {change.of_loss:+.1e} +- {change.band:.0e} "
                f"{mib:7.3g} MiB  {layer.name}{'' if layer.alone else ' (estimated)'}"
            )
    lines += ["", "columns: share of the format's change, change of the prediction, of the loss, memory if excluded, layer"]
    lines.append(f"+-: {BAND}")
    for cost in audit.costs:
        lines += ["", excluded(audit, cost)]
    return "\n".join(lines)


def excluded(audit: Audit, cost: FormatCost) -> str:
    """The table of a config with the format, and with the layers to exclude from it."""
    names = json.dumps([*audit.excluded, *cost.exclude], indent=4)  # valid TOML, too
    table, format = f"[model.components.{audit.denoiser}]", cost.format
    return f'{table}\ndtype = "{format.dtype_name}"\nbackend = "{format.backend}"\nexclude = {names}'


def html(audit: Audit, *, name: str) -> str:
    """The page."""
    lines = [replace(line, over="excluded layers") for line in curves.lines_of(remaining(audit))]
    about = "Of all layers at the left; further right without the costliest ones, as many as stand below."
    chart = curves.draw("Change of the prediction", "%", lines, about=about, wide=True)
    return document("audit.html", name=name, parts=sections(audit), chart=chart, scripted=False)


def sections(audit: Audit) -> dict[str, dict[str, Any]]:
    """The sections of the page (pages/tables.py)."""
    rows = []
    for cost in audit.costs:
        effects = [("all, measured", cost.whole, 0), ("all, estimated", cost.estimated, 0)]
        if cost.after_exclusion is not None:
            effects.append((f"without {len(cost.exclude)}, measured", cost.after_exclusion, cost.more))
        for layers, effect, more in effects:
            rows.append((
                cost.format.name, layers, _percent(effect.relative(audit.base)), f"{effect.of_loss:+.2e}",
                f"{effect.band:.2g}", size_text(cost.bytes + more),
            ))  # fmt: skip
    columns, notes = ("format", "layers", "prediction", "loss", "band", "size"), [f"Base: {about(audit)}.", NOTES[0]]
    parts: dict[str, dict[str, Any]] = {"All layers": {"columns": columns, "rows": rows, "notes": notes}}
    for cost in audit.costs:
        most = len(cost.exclude)
        gain = [f"Without these {most}: {_gain(cost)}."] if cost.after_exclusion is not None else []
        first = {"columns": COLUMNS, "rows": _table(audit, cost, most), "notes": [*gain, NOTES[1]]}
        parts[f"{cost.format.name}: the first to exclude"] = {"text": excluded(audit, cost)} | first
        if len(cost.layers) > most:
            rows = _table(audit, cost, len(cost.layers))
            parts[f"{cost.format.name}: every layer"] = {"columns": COLUMNS, "rows": rows, "folded": True}
    return parts


def remaining(audit: Audit) -> dict[str, list[tuple[float, float]]]:
    """(number of excluded layers, estimated change of the prediction in percent), by format."""
    power = fmean(audit.base.power)
    return {
        cost.format.name: [(count, 100 * math.sqrt(change / power)) for count, change in enumerate(cost.remaining[:-1])]
        for cost in audit.costs
    }


def numbers(audit: Audit) -> dict[str, Any]:
    """The whole audit, as JSON."""
    return {
        "model": audit.model,
        "denoiser": audit.denoiser,
        "base": audit.stored,
        "loss": audit.base.loss,
        "photos": {audit.kind: audit.photos},
        "draws": len(audit.base.residuals),
        "formats": {
            cost.format.name: {
                "bytes": cost.bytes,
                "measured": _numbers(audit, cost.whole),
                "estimated": _numbers(audit, cost.estimated),
                "excluded": {
                    "layers": list(cost.exclude),
                    "bytes": cost.more,
                    "measured": cost.after_exclusion and _numbers(audit, cost.after_exclusion),
                },
                "layers": [
                    {
                        "name": layer.name,
                        "bytes_if_excluded": layer.more,
                        "estimated": _numbers(audit, layer.estimated),
                        "measured": layer.alone and _numbers(audit, layer.alone),
                    }
                    for layer in cost.layers
                ],
            }
            for cost in audit.costs
        },
    }


def _numbers(audit: Audit, effect: Effect) -> dict[str, float | None]:
    return {
        "loss": effect.of_loss,
        "band": effect.band if math.isfinite(effect.band) else None,
        "prediction": effect.relative(audit.base),
        "squared": effect.of_prediction,
    }


def _table(audit: Audit, cost: FormatCost, most: int) -> list[tuple[Any, ...]]:
    rows = []
    for layer in cost.layers[:most]:
        effect, mib, share = layer.alone or layer.estimated, layer.more / MIB, _share(cost, layer)
        rows.append((
            layer.name, _percent(effect.relative(audit.base)), _percent(share), f"{effect.of_loss:+.2e}",
            f"{effect.band:.2g}", mib, _percent(share / mib), layer.alone is not None,
        ))  # fmt: skip
    return rows


def _share(cost: FormatCost, layer: LayerCost) -> float:
    """A layer's part of the format's squared change of the prediction."""
    whole = cost.whole.of_prediction
    return layer.moved / whole if whole else 0.0


def _gain(cost: FormatCost) -> str:
    """The gain of excluding the first layers, and its memory."""
    assert cost.after_exclusion is not None
    whole = cost.whole.of_prediction
    share = 1 - cost.after_exclusion.of_prediction / whole if whole else 0.0
    rate = f", {_percent(share / (cost.more / MIB))} a MiB" if cost.more else ""
    return f"{share:.1%} of the squared change is gone for {size_text(cost.more)} more{rate}"


def _effect(audit: Audit, effect: Effect) -> str:
    return f"prediction {effect.relative(audit.base):.2%}, loss {effect.of_loss:+.2e} +- {effect.band:.1e}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
