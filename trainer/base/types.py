"""What the rooms share as values. Their seams: protocols.py.

Legend of the shape letters: B batch, C latent channels, H and W latent height and width, L tokens, D token width,
P pooled width, M rows of an activation (tokens), K input features, N output features, R rank.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, Self

import torch

from trainer.base.console import printable


def each_tensor(value: Any, new: Callable[[torch.Tensor], Any]) -> Any:
    """`value`, with what `new` makes of each tensor in it: in tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        return new(value)
    if isinstance(value, (tuple, list)):
        made = [each_tensor(each, new) for each in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, Mapping):
        return {key: each_tensor(each, new) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: each_tensor(getattr(value, each.name), new) for each in fields(value)})
    return value


@dataclass(frozen=True)
class Conditioning:
    """What a denoiser is told besides the noised latents.

    sequence: [B, L, D] token features.  mask: [B, L] bool, or None where the model attends to every token.
    pooled: [B, P], or None.  lengths: rows of each caption, where the model takes captions of one number of rows at once.
    """

    sequence: torch.Tensor
    mask: torch.Tensor | None = None
    pooled: torch.Tensor | None = None
    lengths: tuple[int, ...] = ()

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name, as they are cached on disk; `from_tensors` is the inverse."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> Self:
        """The conditioning of which `tensors` are all tensors, by name."""
        return cls(**tensors)

    def to(self, device: torch.device | str) -> Self:
        """The same on another device."""
        return each_tensor(self, lambda tensor: tensor.to(device))


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One appearance of a training image in an epoch: the key of every random draw made for it. sample: the image's path
    relative to its source, prefixed by the source's index ("0/03.jpg")."""

    epoch: int
    sample: str
    repeat: int


@dataclass(frozen=True)
class Batch:
    """One micro-batch, all of one bucket and one layout of references, on the CPU until the step moves it.

    occurrences: of each sample; none of a batch that a step moved, which has tensors alone.
    latents: fp32 [B, C, H, W], already normalised by the family.
    captions: the text each sample trains on ("" where the caption was dropped).
    conditioning: cached encodings of `captions`, or None when they are encoded live.
    original_size, crop_top_left, target_size: int64 [B, 2] as (height, width) or (top, left), in pixels.
    loss_weights: fp32 [B, H, W], what the squared error of each latent is multiplied by; None: 1 everywhere.
    references: what the model is shown beside each sample, fp32 [B, C, h, w] each, of sizes of their own, in order.
    preserved_captions, preserved: the captions without their trigger, for which the model is to stay as it is, and their
    cached encodings; none where nothing is preserved.
    """

    occurrences: tuple[Occurrence, ...]
    latents: torch.Tensor
    captions: tuple[str, ...]
    conditioning: Conditioning | None
    original_size: torch.Tensor
    crop_top_left: torch.Tensor
    target_size: torch.Tensor
    loss_weights: torch.Tensor | None = None
    references: tuple[torch.Tensor, ...] = ()
    preserved_captions: tuple[str, ...] = ()
    preserved: Conditioning | None = None

    def pin_memory(self) -> Self:
        """The same in page-locked memory: torch's loader asks for it."""
        return each_tensor(self, torch.Tensor.pin_memory)

    def describe(self) -> str:
        """Its sizes and samples, for a message."""
        names = ", ".join(printable(occurrence.sample) for occurrence in self.occurrences)
        return f"{self.sized()} ({names})"

    def sized(self) -> str:
        """How many photos of which size, and how large the latents of what is shown beside them are."""
        height, width = self.target_size.tolist()[0]
        sizes = " and ".join(f"{each.shape[-1]}x{each.shape[-2]}" for each in self.references)
        beside = f" with references of {sizes} latents" if sizes else ""
        return f"{len(self.occurrences)} photo(s) of {width}x{height}{beside}"


# How a reference is shown: its edges cut, with the aspect ratio of its bucket, or whole, in a frame of its mirrored edges.
Showing = Literal["cut", "stretched", "framed"]


@dataclass(frozen=True)
class ReferenceRule:
    """How a family is shown references. sizes: (width, height), one of which each gets; none: it keeps its own, up to an
    area. most: beside one photo; None: any number. whole: whether one that is alone is kept whole."""

    sizes: tuple[tuple[int, int], ...] = ()
    most: int | None = None
    whole: bool = False

    def showing(self, count: int) -> Showing:
        """How each of so many is shown."""
        return "stretched" if self.sizes else "framed" if self.whole and count == 1 else "cut"


@dataclass(frozen=True)
class Link:
    """One tensor of a model's original checkpoint, or one module, and what it becomes in the library's module.

    original: full name, without the component's prefix, e.g. "double_blocks.0.img_attn.qkv.weight".
    parts: full names of those whose rows, concatenated, are the original's rows.
    op: "rows" (plain concatenation along dim 0; with one part a rename), "swap_halves" (the two halves of the rows
    change places: shift and scale of Flux's last norm), "transpose" ([K, N] in the original, [N, K] in the module),
    "squeeze" (a 1x1 convolution [N, K, 1, 1] in the original, a Linear [N, K] in the module).
    """

    original: str
    parts: tuple[str, ...]
    op: str = "rows"

    @property
    def swap(self) -> bool:
        """Whether the two halves of the rows change places."""
        return self.op == "swap_halves"


@dataclass(frozen=True)
class StoredWeight:
    """A frozen weight [N, K] (a convolution's kernel flattened) as it lies in memory, row by row.

    Its value, in fp32: levels[code] * scale + offset.

    codes: [N, K] of any float dtype, float8 or int8; or, with `bits` 4 or 2, uint8 [ceil(N * K * bits / 8)]: the codes of
      consecutive elements, the first in the lowest bits.
    scale: fp32, one for each `block` consecutive elements (block = K: one for each row); None: 1.
    offset: fp32 like scale; None: 0.
    levels: fp32 [2 ** bits], the number a code stands for; None: the code itself.
    plain: whether float8 codes are known to be finite, with scales of an ordinary size (kernels/decode.has_plain_codes).
    """

    codes: torch.Tensor
    shape: tuple[int, int]
    bits: int | None = None
    block: int = 0
    scale: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    levels: torch.Tensor | None = None
    plain: bool = False

    @property
    def device(self) -> torch.device:
        """The device that it lies on."""
        return self.codes.device

    def is_dense(self, dtype: torch.dtype) -> bool:
        """Whether the codes are the weight in `dtype`, with nothing to convert."""
        return self.codes.dtype == dtype and self.scale is None


@dataclass(frozen=True)
class HeldWeight:
    """A weight that a file holds quantised already: several of its tensors that stand for one.

    dtype, backend: the storage format, as in the config.
    parts: names of the file's tensors, by the role under which `payload` takes them.
    shape: the weight's; None where only the tensors' contents say it.
    payload: (tensors by role, the weight's shape) -> the format's payload (quantization/formats.py): the file's codes bit
      for bit, scales spread to one a row or block. Raises ValueError, saying what, where they disagree with the shape.
    dequantize: (payload, shape) -> the weight, fp32.
    """

    dtype: str
    backend: str
    parts: Mapping[str, str]
    shape: tuple[int, ...] | None
    payload: Callable[[Mapping[str, torch.Tensor], tuple[int, ...]], dict[str, torch.Tensor]]
    described: tuple[str, ...]
    check: Callable[[Mapping[str, torch.Tensor], tuple[int, ...]], None]
    dequantize: Callable[[Mapping[str, torch.Tensor], tuple[int, ...]], torch.Tensor]


@dataclass(frozen=True)
class Recognised:
    """What a component's files hold quantised. weights: by the name that each would have unquantised.

    other: names of tensors that belong to the convention but to no weight (markers, scales of activations).
    """

    weights: Mapping[str, HeldWeight]
    other: frozenset[str]


@dataclass(frozen=True)
class KeyStyle:
    """How one kind of adapter file writes the name of a component's layer: `prefix`, then the name.

    convention: whose files have it, as people call it. original: names of the original layout, where several layers may be
    one module; else the library's. flat: with underscores for dots. links: modules of the original layout -> those that the
    style has, where they are others.
    """

    convention: str
    component: str
    prefix: str
    original: bool = False
    flat: bool = False
    links: Callable[[Sequence[Link]], Iterator[Link]] | None = None

    def key(self, name: str) -> str:
        """The stem of a layer's keys in a file of this style. name: the layer's, dotted, without its component."""
        return self.prefix + (name.replace(".", "_") if self.flat else name)


def separate(links: Sequence[Link]) -> Iterator[Link]:
    """The layers of modules that hold several, numbered behind the module's name: `img_attn.qkv.0`."""
    for link in links:
        if len(link.parts) > 1:
            yield from (Link(f"{link.original}.{index}", (part,)) for index, part in enumerate(link.parts))
