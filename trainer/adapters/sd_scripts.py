"""Adapter files in the keys of kohya's sd-scripts, and the layers that sd-scripts drops of them.

PREFIX_NAME.{lora_down.weight, lora_up.weight, alpha, dora_scale}; scale = alpha / rank; dora_scale [N, 1] (Conv2d
[N, 1, 1, 1]; for the input axis [1, K]). Layers that the original layout fuses (Flux's qkv, linear1) become one pair:
block-diagonal, or, if all have one and the same A, that A and their B's.

A LoKr has its matrices in place of A and B. If the original layout fuses layers, its keys are diffusers' names behind
`lycoris_`, which ComfyUI and LyCORIS read: several products cannot become one. Layers that ComfyUI does not know by such a
name keep their original one.

sd-scripts builds modules for layers of some blocks alone, and drops the tensors of all others without a word. The model
family knows these layers (`AdapterPart.not_in_sd_scripts`).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from trainer.adapters.portable import AllNorms, Factors, Portable, by_component, derived, squared_norm, widest
from trainer.base.console import some
from trainer.base.errors import UserError
from trainer.base.files import Advance, no_progress
from trainer.base.tensorfile import Recipe, Tensors
from trainer.base.types import Link

ENTRY = "not_in_sd_scripts"  # header entry of a LoRA that has such layers


def kohya_tensors(
    portable: Portable,
    *,
    modules: Mapping[str, Sequence[Link]],
    prefixes: Mapping[str, str],
    rows: Callable[[str], int],
    not_behind_lycoris: Sequence[str] = (),
    norms: AllNorms = {},
    advance: Advance = no_progress,
) -> Tensors:
    """The adapter's tensors under kohya keys; A and B keep their dtypes, alpha is fp32.

    modules: component -> its modules by the names to write (empty: the layers under their own names).
    prefixes: component -> key prefix; behind one that ends in a dot, names keep their dots.
    rows: (full name of a layer without an adapter in one of `modules`) -> its number of rows.
    not_behind_lycoris: fnmatch patterns for full names of layers that ComfyUI does not know behind `lycoris_`.
    norms: for DoRA, by full name, the norms of such layers. advance: counts layers.
    Raises UserError if the magnitudes of one module cannot be joined.
    """
    tensors: dict[str, torch.Tensor | Recipe] = {}
    for component, layers in by_component(portable):
        links = [module for module in modules.get(component, ()) if any(part in layers for part in module.parts)]
        covered = {part for module in links for part in module.parts}
        links += [Link(name, (name,)) for name in layers if name not in covered]
        splits = portable.kind.form is not None and any(len(module.parts) > 1 for module in modules.get(component, ()))
        for module in links:
            keys = [(prefixes[component], module)]
            if splits and not any(fnmatchcase(f"{component}.{module.parts[0]}", each) for each in not_behind_lycoris):
                keys = [("lycoris", Link(part, (part,))) for part in module.parts if part in layers]
            for prefix, link in keys:
                key = prefix + link.original if prefix.endswith(".") else f"{prefix}_{link.original.replace('.', '_')}"
                full = Link(key, tuple(f"{component}.{part}" for part in link.parts), link.op)
                tensors |= _kohya_module(portable, full, rows, norms)
                advance(sum(part in layers for part in link.parts))
    return tensors


def _kohya_module(portable: Portable, module: Link, rows: Callable[[str], int], norms: AllNorms) -> dict[str, Any]:
    key = module.original
    parts = {name: portable.layers.get(name) for name in module.parts}
    if module.swap:
        parts = {name: factors.swapped() for name, factors in parts.items()}
    present = {name: factors for name, factors in parts.items() if factors is not None}
    if formed := next((factors for factors in present.values() if factors.matrices), None):
        return formed.named_matrices(f"{key}.") | {f"{key}.alpha": torch.tensor(formed.ranked[1], dtype=torch.float32)}
    counts = {name: factors.rows if factors else rows(name) for name, factors in parts.items()}
    first = next(iter(present.values()))
    shared = len(present) == len(parts) > 1 and _one_a(list(present.values()))
    rank = first.rank if shared else sum(factors.rank for factors in present.values())
    total, kernel = sum(counts.values()), first.b.shape[2:]

    def up() -> torch.Tensor:
        joined = torch.zeros(total, rank, *kernel, dtype=dtype_b)
        row = column = 0
        for name, count in counts.items():
            if (factors := parts[name]) is not None:
                b = factors.b.make()
                # One alpha serves all parts: a part whose scaling differs from the first's carries the ratio in its rows.
                ratio = factors.scaling / first.scaling
                joined[row : row + count, column : column + b.shape[1]] = b if ratio == 1 else b * ratio
                column += 0 if shared else b.shape[1]
            row += count
        return joined

    def down() -> torch.Tensor:
        pieces = [factors.a.make() for factors in ([first] if shared else present.values())]
        return pieces[0] if len(pieces) == 1 else torch.cat([a.to(dtype_a) for a in pieces])

    dtype_a, dtype_b = (widest([getattr(factors, which) for factors in present.values()]) for which in "ab")
    tensors: dict[str, Any] = {
        f"{key}.lora_down.weight": Recipe(dtype_a, (rank, *first.a.shape[1:]), down),
        f"{key}.lora_up.weight": Recipe(dtype_b, (total, rank, *kernel), up),
        f"{key}.alpha": torch.tensor(first.scaling * rank, dtype=torch.float32),
    }
    if (scale := _module_scale(parts, norms)) is not None:
        tensors[f"{key}.dora_scale"] = scale
    return tensors


def _module_scale(parts: Mapping[str, Factors | None], norms: AllNorms) -> Recipe | None:
    """The dora_scale of one module; None if no part has a magnitude. parts: by full name."""
    present = {name: factors for name, factors in parts.items() if factors is not None}
    with_m = {name: factors for name, factors in present.items() if factors.magnitude is not None}
    if not with_m:
        return None
    first = next(iter(with_m.values()))
    ones, axes = [1] * (len(first.b.shape) - 2), {factors.axis for factors in with_m.values()}
    if axes == {"input"}:
        magnitudes = [factors.magnitude.make() for factors in with_m.values()]
        if len(with_m) < len(parts) or not all(torch.equal(magnitudes[0], m) for m in magnitudes):
            raise UserError(
                f"{', '.join(parts)} are one module in this format, with one magnitude of the input axis; theirs differ. "
                "Use --to lora for an approximation"
            )
        return derived(first.magnitude, (1, len(magnitudes[0]), *ones), lambda m: m.view(1, -1, *ones))
    absent = [name for name in parts if name not in with_m]
    if axes != {"output"} or any(name in present or name not in norms for name in absent):
        raise UserError(
            f"{', '.join(absent or parts)}: a module of several layers takes the magnitudes of all of them, "
            "of one axis, and of a layer without an adapter its norms in the model: give the model with --base"
        )
    rows = [f.magnitude.make().flatten() if (f := with_m.get(name)) else norms[name].reader for name in parts]
    scale = torch.cat(rows).view(-1, 1, *ones)
    return Recipe(scale.dtype, tuple(scale.shape), lambda: scale)


def _one_a(parts: Sequence[Factors]) -> bool:
    """Whether all parts have one and the same A, as a trained fused adapter has, and one scaling."""
    first = parts[0]
    if any((part.a.shape, part.a.dtype, part.scaling) != (first.a.shape, first.a.dtype, first.scaling) for part in parts):
        return False
    return all(part.a is first.a or torch.equal(part.a.make(), first.a.make()) for part in parts[1:])


def left_out(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Full names of the layers that sd-scripts has no module for. patterns: fnmatch, on full names."""
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def left_out_phrase(portable: Portable, patterns: Sequence[str]) -> str:
    """A LoRA's loss in sd-scripts as one phrase; "" if it loses nothing, and for a DoRA, which sd-scripts cannot read."""
    names = [] if portable.kind.module else left_out(portable.layers, patterns)
    return f"{some(names)}: {_share(portable, names):.0%} of the norm of the update" if names else ""


def _share(portable: Portable, names: Collection[str]) -> float:
    """||s B A|| over the layers `names` relative to that over all, each the root of a sum of squares; 0 if all is zero."""
    squares = {}
    for name, factors in portable.layers.items():
        a, b = (matrix.make().double().flatten(1) for matrix in (factors.a, factors.b))
        squares[name] = factors.scaling**2 * squared_norm(a, b)
    return (sum(squares[name] for name in names) / (sum(squares.values()) or 1.0)) ** 0.5


def sentence(phrase: str) -> str:
    """A message about the dropped layers. phrase: the header entry `ENTRY`."""
    return f"sd-scripts builds no module for some layers of the kohya file and drops them without a message: {phrase}"
