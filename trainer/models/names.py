"""Parts of the families' tables of names: the original checkpoints' names ("original") against those of the libraries'
modules ("parts"). Single files are read, and kohya's adapter files named, by these tables.

Sources of the original names: Stability-AI/generative-models (`sgm/modules`), mlfoundations/open_clip (`model.py`),
black-forest-labs/flux (`src/flux/model.py`, `modules/layers.py`, `modules/autoencoder.py`).

Modules are those of transformers >= 5.6, where `CLIPTextModel` lost its inner `text_model.`. Folders follow the version that
wrote them, so that one leading `text_model.` more or less is accepted; original files and kohya's keys always have it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.base.errors import UserError
from trainer.base.types import Link

ComponentConfig = Mapping[str, Any]
Shape = tuple[int, ...]
# Prefixes of a module list, by the config key that holds its length. A model has one of them.
LISTS = {
    "num_layers": ("transformer_blocks.", "txt_mode_blocks."), "num_single_layers": ("single_transformer_blocks.",),
    "n_layers": ("layers.",), "n_refiner_layers": ("noise_refiner.",),
}  # fmt: skip
SWAP = "swap_halves"  # `Link.op` of a last modulation: (shift, scale) in the original, (scale, shift) in diffusers


def join_parts(link: Link, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The original checkpoint's tensor from the module's, in the order of `link.parts`."""
    joined = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    if link.swap:
        return torch.cat(joined.chunk(2)[::-1])
    if link.op == "transpose":
        return joined.t()
    return joined[..., None, None] if link.op == "squeeze" else joined


def split_original(link: Link, original: torch.Tensor, rows: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """The module's tensors from the original checkpoint's; `rows` of each part. Inverse of `join_parts`."""
    if link.swap:
        original = torch.cat(original.chunk(2)[::-1])
    elif link.op == "transpose":
        original = original.t()
    elif link.op == "squeeze":
        original = original.flatten(1)
    return original.split(list(rows)) if len(rows) > 1 else (original,)


@dataclass
class Names:
    """Links, and the shape of every module parameter, added layer by layer. bias: default of `layer`."""

    bias: bool = True
    links: list[Link] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)

    def add(self, original: str, parts: Mapping[str, Shape], op: str = "rows") -> None:
        """Add a tensor of the original, and the module's tensors that it becomes, with their shapes."""
        self.links.append(Link(original, tuple(parts), op))
        self.shapes |= parts

    def layer(self, original: str, part: str, shape: Shape, bias: bool | None = None, op: str = "rows") -> None:
        """A Linear, convolution, norm or embedding: `.weight` of `shape`, `.bias` of its rows."""
        self.add(f"{original}.weight", {f"{part}.weight": shape}, op)
        if self.bias if bias is None else bias:
            self.add(f"{original}.bias", {f"{part}.bias": shape[:1]}, op if op == SWAP else "rows")

    def same_layer(self, name: str, shape: Shape, bias: bool | None = None) -> None:
        """A `layer` with one name in both."""
        self.layer(name, name, shape, bias)

    def embedder(self, original: str, part: str, inputs: int, width: int) -> None:
        """Two layers that embed a time, a guidance or a pooled vector, as Flux and its successors name them."""
        self.layer(f"{original}.in_layer", f"{part}.linear_1", (width, inputs))
        self.layer(f"{original}.out_layer", f"{part}.linear_2", (width, width))

    def qk_norm(self, original: str, part: str, size: int, query: str = "norm_q", key: str = "norm_k") -> None:
        """The norms of query and key of an attention layer, as Flux and its successors name them."""
        self.add(f"{original}.query_norm.scale", {f"{part}.{query}.weight": (size,)})
        self.add(f"{original}.key_norm.scale", {f"{part}.{key}.weight": (size,)})

    def fused(self, weight: str, bias: str, outputs: Mapping[str, int], inputs: int) -> None:
        """Linears whose rows the original keeps in one tensor; `outputs`: rows by module name."""
        self.add(weight, {f"{part}.weight": (rows, inputs) for part, rows in outputs.items()})
        self.add(bias, {f"{part}.bias": (rows,) for part, rows in outputs.items()})


def check_head(size: int, axes: Sequence[int]) -> None:
    """Refuse a head size other than the published models', which a rotary embedding divides into `axes`."""
    if size != sum(axes):
        raise UserError(
            f"the transformer of this file has heads of {size} (the published models: {sum(axes)}), and how its rotary "
            "embedding divides them is written nowhere in it; give its config with model.config"
        )


def each_level(value: int | Sequence[int], levels: int) -> list[int]:
    """One value a level: the list, or the same number `levels` times."""
    return [value] * levels if isinstance(value, int) else list(value)


def original_shape(parts: Sequence[Shape], op: str) -> Shape:
    """The shape of the original's tensor that `op` makes of parts of these shapes."""
    if not parts[0]:
        return ()
    rows = sum(part[0] for part in parts) if len(parts) > 1 else parts[0][0]  # a config may have a size that is no number
    shape = (rows, *parts[0][1:])
    return shape[::-1] if op == "transpose" else (*shape, 1, 1) if op == "squeeze" else shape


def under_original_names(
    shapes: Mapping[str, Shape], names: Callable[[ComponentConfig], Names], config: dict
) -> dict[str, Shape]:
    """Shapes of a file with the module's names, renamed to the original layout. config: of any model of the family."""
    counts = {key: max(how_many(shapes, prefix) for prefix in prefixes) for key, prefixes in LISTS.items()}
    complete = counts | {"guidance_embeds": True, "flow_map": True}
    links = names(config | {key: value for key, value in complete.items() if key in config}).links
    present = [link for link in links if shapes.keys() >= set(link.parts)]
    return {link.original: original_shape([shapes[part] for part in link.parts], link.op) for link in present}


def how_many(shapes: Mapping[str, Shape], prefix: str) -> int:
    """Length of the list of modules `prefix`0, `prefix`1, ..."""
    return len({key.removeprefix(prefix).split(".")[0] for key in shapes if key.startswith(prefix)})
