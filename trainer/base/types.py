"""Values shared between packages (interfaces: protocols.py).

Legend of the shape letters: B batch, C latent channels, H and W latent height and width, L tokens, D token width,
P pooled width, M rows of an activation (tokens), K input features, N output features, R rank.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, Self

import torch

from trainer.base.console import printable


def each_tensor(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """`value` with `change(tensor)` in place of each tensor: in tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [each_tensor(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        return {key: each_tensor(item, change) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: each_tensor(getattr(value, field.name), change) for field in fields(value)})
    return value


@dataclass(frozen=True)
class Conditioning:
    """A denoiser's inputs besides the noised latents.

    sequence: [B, L, D] token features. mask: [B, L] bool; None: the model attends to every token. pooled: [B, P] or None.
    lengths: rows of each caption, for models that take only captions of equal length at once.
    """

    sequence: torch.Tensor
    mask: torch.Tensor | None = None
    pooled: torch.Tensor | None = None
    lengths: tuple[int, ...] = ()

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name, as they are cached on disk; `Conditioning(**tensors)` is the inverse."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def to(self, device: torch.device | str) -> Self:
        """A copy on another device."""
        return each_tensor(self, lambda tensor: tensor.to(device))


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One appearance of a training image in an epoch: the key of its random draws. sample: the image's path relative to its
    source, prefixed by the source's index ("0/03.jpg")."""

    epoch: int
    sample: str
    repeat: int


@dataclass(frozen=True)
class Batch:
    """One micro-batch, all of one bucket and one layout of references, on the CPU until the step moves it.

    occurrences: one per sample; empty once a step has moved the batch, which then has tensors alone.
    latents: fp32 [B, C, H, W], normalised by the family.
    captions: the training text of each sample; "" if it was dropped.
    conditioning: cached encodings of `captions`; None: they are encoded live.
    original_size, crop_top_left, target_size: int64 [B, 2] as (height, width) or (top, left), in pixels.
    loss_weights: fp32 [B, H, W], factors of each latent's squared error; None: 1 everywhere.
    references: latents of reference images in order, each fp32 [B, C, h, w], of different sizes.
    preserved_captions, preserved: the captions without their trigger, on which the model must not change, and their cached
    encodings; empty if nothing is preserved.
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
        """A copy in page-locked memory; called by torch's data loader."""
        return each_tensor(self, torch.Tensor.pin_memory)

    def describe(self) -> str:
        """The batch's sizes and samples, for a message."""
        names = ", ".join(printable(occurrence.sample) for occurrence in self.occurrences)
        return f"{self.sized()} ({names})"

    def sized(self) -> str:
        """The number and size of the photos, and the sizes of the reference latents, in words."""
        height, width = self.target_size.tolist()[0]
        sizes = " and ".join(f"{reference.shape[-1]}x{reference.shape[-2]}" for reference in self.references)
        beside = f" with references of {sizes} latents" if sizes else ""
        return f"{len(self.occurrences)} photo(s) of {width}x{height}{beside}"


# How a reference is fitted: cropped, stretched to its bucket's aspect ratio, or whole with mirrored edges around it.
Showing = Literal["cut", "stretched", "framed"]


@dataclass(frozen=True)
class ReferenceRule:
    """How a family takes reference images. sizes: the (width, height) that are allowed; empty: the image's own, up to an
    area. most: maximum per photo; None: no limit. whole: whether a single reference is shown whole."""

    sizes: tuple[tuple[int, int], ...] = ()
    most: int | None = None
    whole: bool = False

    def showing(self, count: int) -> Showing:
        """How each of `count` references is fitted."""
        return "stretched" if self.sizes else "framed" if self.whole and count == 1 else "cut"


@dataclass(frozen=True)
class Link:
    """The mapping of one tensor or module of a model's original checkpoint to the library's module.

    original: full name, without the component's prefix, e.g. "double_blocks.0.img_attn.qkv.weight".
    parts: full names in the library, whose concatenated rows are the original's rows.
    op: "rows" (concatenation along dim 0; with one part a rename), "swap_halves" (the two halves of the rows change places:
    shift and scale of Flux's last norm), "transpose" ([K, N] in the original, [N, K] in the module), "squeeze" (a 1x1
    convolution [N, K, 1, 1] in the original, a Linear [N, K] in the module).
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
    """A frozen weight [N, K] (convolution kernels flattened) as stored in memory, row-major. Its fp32 value is
    levels[code] * scale + offset.

    codes: [N, K] of any float dtype, float8 or int8; or, with `bits` 4 or 2, uint8 [ceil(N * K * bits / 8)]: consecutive
      elements, the first in the lowest bits.
    scale: fp32, one per `block` consecutive elements (block = K: one per row); None: 1.
    offset: fp32, shaped like scale; None: 0.
    levels: fp32 [2 ** bits], the value of each code; None: the code itself.
    plain: whether float8 codes are known to be finite, with scales of ordinary size (kernels/decode.has_plain_codes).
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
        """The device of the codes."""
        return self.codes.device

    def is_dense(self, dtype: torch.dtype) -> bool:
        """Whether the codes are the weight in `dtype`, without conversion."""
        return self.codes.dtype == dtype and self.scale is None


@dataclass(frozen=True)
class HeldWeight:
    """A weight that a file stores quantised, in several tensors.

    dtype, backend: the storage format, as in the config.
    parts: names of the file's tensors, by their role in `payload`.
    shape: the weight's; None: only the tensors' contents give it.
    payload: (tensors by role, the weight's shape) -> the format's payload (quantization/formats.py): the file's codes bit
      for bit, scales expanded to one per row or block. Raises ValueError if they do not fit the shape.
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
    """The quantised weights in a component's files. weights: by the name that each would have unquantised. other: names of
    tensors of the convention that belong to no weight (markers, scales of activations)."""

    weights: Mapping[str, HeldWeight]
    other: frozenset[str]


@dataclass(frozen=True)
class KeyStyle:
    """How one kind of adapter file names a component's layers: `prefix`, then the layer's name.

    convention: the common name of the kind. original: names are of the original layout, where one module may hold several
    layers; else the library's. flat: with underscores for dots. links: maps modules of the original layout to the style's,
    if they differ.
    """

    convention: str
    component: str
    prefix: str
    original: bool = False
    flat: bool = False
    links: Callable[[Sequence[Link]], Iterator[Link]] | None = None

    def key(self, name: str) -> str:
        """The stem of a layer's keys in a file of this style. name: dotted, without the component."""
        return self.prefix + (name.replace(".", "_") if self.flat else name)


def separate(links: Sequence[Link]) -> Iterator[Link]:
    """Links of the single layers of modules that hold several, numbered like `img_attn.qkv.0`."""
    for link in links:
        if len(link.parts) > 1:
            yield from (Link(f"{link.original}.{index}", (part,)) for index, part in enumerate(link.parts))
