"""A component's tensors in its files, and their way into the module: split, converted, or taken over quantised."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch import nn

from trainer.base.errors import UserError
from trainer.base.files import Advance, no_progress
from trainer.base.progress import Phase
from trainer.base.protocols import WeightOwner
from trainer.base.tensorfile import NAMES, TensorEntry, TensorFile, count_not_finite
from trainer.base.types import HeldWeight, Link, Recognised
from trainer.models.names import Shape, original_shape, split_original

Recognise = Callable[[Mapping[str, TensorEntry]], Recognised]


@dataclass(frozen=True)
class Weights:
    """One component's tensors in one or several files, by their names there without `prefix`.

    links: from the original layout's names to the module's; None: the files have the module's names. recognise: (header
    entries by name) -> the weights among them that the files hold quantised.
    """

    files: tuple[TensorFile, ...]
    prefix: str
    links: tuple[Link, ...] | None
    recognise: Recognise

    @cached_property
    def index(self) -> dict[str, TensorFile]:
        """Each tensor's file, by the tensor's name without the prefix."""
        keys = ((key, file) for file in self.files for key in file.entries)
        return {key.removeprefix(self.prefix): file for key, file in keys if key.startswith(self.prefix)}

    @cached_property
    def recognised(self) -> Recognised:
        """The weights that the files hold quantised. Raises UserError, with the file, for an unsupported convention."""
        try:
            return self.recognise({key: self.entry(key) for key in self.index})
        except UserError as error:
            raise UserError(f"{self.files[0].path}: {error}") from error

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...] | None]:
        """Every weight's shape. A quantised weight counts as one; None if the header does not show its shape."""
        quantised, other = self.recognised.weights, self.recognised.other
        parts = {part for weight in quantised.values() for part in weight.parts.values()}
        plain = {key: self.entry(key).shape for key in self.index if key not in parts and key not in other}
        return plain | {key: weight.shape for key, weight in quantised.items()}

    def links_to(self, expected: Mapping[str, Shape]) -> Sequence[Link]:
        """The links from the files' tensors to the module's. expected: the module's tensors."""
        return same_names(expected, self.shapes) if self.links is None else self.links

    def entry(self, key: str) -> TensorEntry:
        """A tensor's entry in its file's header."""
        return self.index[key].entries[self.prefix + key]

    def read(self, key: str, advance: Advance = no_progress) -> torch.Tensor:
        """A tensor, as its file has it. Raises UserError if a value is not finite."""
        tensor = self.index[key].read(self.prefix + key, advance)
        if count := count_not_finite(tensor):
            values = f"{count:,} of {tensor.numel():,} values of tensor {self.prefix + key!r} are NaN or infinite"
            cause = "as a broken merge or conversion leaves them; make or download the file again, or use another copy"
            raise UserError(f"{self.index[key].path}: {values}, {cause}")
        return tensor


@dataclass(frozen=True)
class Read:
    """One tensor to read. shape: in the file. parts: shapes of the module's tensors that its rows become."""

    weights: Weights
    link: Link
    shape: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each part."""
        return tuple(shape[0] if shape else 1 for shape in self.parts)

    @property
    def held(self) -> HeldWeight | None:
        """The quantised weight; None if the file holds plain numbers."""
        return self.weights.recognised.weights.get(self.link.original)

    @property
    def bytes(self) -> int:
        """Bytes in the files."""
        keys = self.held.parts.values() if self.held is not None else (self.link.original,)
        return sum(self.weights.entry(key).bytes for key in keys)

    def check(self) -> None:
        """Refuse a tensor that cannot be placed, by headers and the short descriptions beside quantised weights."""
        weight, original = self.held, self.link.original
        if weight is not None:
            if weight.shape is None and (len(self.link.parts) > 1 or self.link.op != "rows"):
                raise self.refusal(
                    "several layers share it, or their rows lie in another order, and its blocks need not end with a row; "
                    "use the model in diffusers' layout, or its 16-bit file"
                )
            self._call(weight.check, weight.described)
        elif not (dtype := self.weights.entry(original).dtype).is_floating_point:
            raise UserError(
                f"{self.weights.index[original].path}: tensor {self.weights.prefix + original!r} holds {NAMES[dtype]} "
                "where weights are floating-point numbers; download or copy the file again, or use the 16-bit file"
            )

    def place(self, module: nn.Module, device: torch.device, phase: Phase) -> None:
        """Read the tensor into the module, or hand a quantised weight's payload to the layer that stores it."""
        weight = self.held
        if weight is None:
            source = self.weights.read(self.link.original, phase.advance).to(device)
            for name, piece in zip(self.link.parts, split_original(self.link, source, self.rows), strict=True):
                phase.check()
                _place_tensor(module, name, piece)
            return
        for name, shape, piece in zip(self.link.parts, self.parts, self._payloads(weight, phase.advance), strict=True):
            piece = {role: tensor.to(device) for role, tensor in piece.items()}
            owner = module.get_submodule(name.rpartition(".")[0])
            if isinstance(owner, WeightOwner):
                owner.load_held(weight, piece)
            else:
                _place_tensor(module, name, weight.dequantize(piece, shape))

    def tensors(self, advance: Advance = no_progress) -> list[torch.Tensor]:
        """The module's tensors that it becomes, in fp32; a quantised weight is dequantised."""
        if self.held is None:
            source = self.weights.read(self.link.original, advance)
            return [piece.float() for piece in split_original(self.link, source, self.rows)]
        payloads = self._payloads(self.held, advance)
        return [self.held.dequantize(piece, shape) for piece, shape in zip(payloads, self.parts, strict=True)]

    def _payloads(self, weight: HeldWeight, advance: Advance) -> list[dict[str, torch.Tensor]]:
        """Each part's payload of a quantised weight, split by rows if the file's layout is not the module's."""
        payload, link = self._call(weight.payload, tuple(weight.parts), advance), self.link
        if len(link.parts) == 1 and link.op == "rows":
            return [dict(payload)]
        codes, scale = payload["weight"], payload["scale"]
        if link.op == "transpose":
            if bool((scale != scale[0]).any()):
                raise self.refusal("its rows are the module's columns, and have a scale each; use the 16-bit file")
            scale = scale[:1].expand(self.parts[0][0])
        # As bytes: torch has no concatenation of every float8 dtype.
        weights = split_original(link, codes.view(torch.uint8), self.rows)
        scales = split_original(link if link.swap else Link(link.original, link.parts), scale, self.rows)
        return [{"weight": w.contiguous().view(codes.dtype), "scale": s} for w, s in zip(weights, scales, strict=True)]

    def _call(self, function: Callable, roles: tuple[str, ...], advance: Advance = no_progress):
        """function(tensors by these roles, shape); a ValueError becomes a UserError."""
        try:
            return function({role: self.weights.read(self.held.parts[role], advance) for role in roles}, self.shape)
        except ValueError as error:
            raise self.refusal(str(error)) from error

    def refusal(self, reason: str) -> UserError:
        """The error for this quantised tensor."""
        file = self.weights.index[next(iter(self.held.parts.values()))]
        return UserError(f"{file.path}: the quantised tensor {self.weights.prefix + self.link.original!r}: {reason}")


def _place_tensor(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner_name, _, leaf = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    if leaf == "weight" and isinstance(owner, WeightOwner):
        owner.load_weight(tensor)
    else:
        with torch.no_grad():
            getattr(owner, leaf).copy_(tensor)


def plan_reads(
    name: str, weights: Weights, expected: Mapping[str, Shape], *, others: Collection[str], harmless: Collection[str]
) -> list[Read]:
    """The reads that fill component `name`, whose module has the `expected` tensors. Reads headers only.

    others: prefixes of the file's other components. harmless: patterns of tensors that are no weights. Raises UserError for a
    missing, wrongly shaped or unexpected tensor, naming it.
    """
    path = weights.files[0].path if len(weights.files) == 1 else weights.files[0].path.parent

    def refuse_missing(missing: Sequence[str], count: int) -> None:
        if missing:
            share = f"{len(missing)} of {count} in all"
            tensor = f"{path}: tensor {missing[0]!r} of component {name!r}"
            raise UserError(f"{tensor} is missing ({share}); use a whole file of this model")

    reads, links = [], weights.links_to(expected)
    refuse_missing([weights.prefix + link.original for link in links if link.original not in weights.shapes], len(links))
    for link in links:
        parts = [expected[part] for part in link.parts]
        read, shape = Read(weights, link, original_shape(parts, link.op), tuple(parts)), weights.shapes[link.original]
        if shape not in (read.shape, None):
            tensor = f"{path}: tensor {weights.prefix + link.original!r}"
            raise UserError(f"{tensor} has shape {shape}, the config of component {name!r} wants {read.shape}")
        read.check()
        reads.append(read)
    refuse_missing(sorted(expected.keys() - {part for link in links for part in link.parts}), len(expected))
    # A single file holds several components; an empty prefix matches all of them.
    foreign = () if weights.prefix else tuple(others)
    unclaimed = sorted(weights.shapes.keys() - {link.original for link in links})
    odd = [key for key in unclaimed if not key.startswith(foreign)]
    odd = [key for key in odd if not any(fnmatchcase(weights.prefix + key, pattern) for pattern in harmless)]
    if odd:
        raise UserError(
            f"{path}: unexpected tensor {weights.prefix + odd[0]!r} ({len(odd)} in all); the file is not this "
            f"family's {name}, or is of a variant that is not supported"
        )
    return reads


def same_names(expected: Mapping[str, Shape], index: Iterable[str]) -> list[Link]:
    """Identity links. Files of another transformers version differ by a leading `text_model.`, those of a language model by
    `model.`, or `model.language_model.` if it also sees images."""
    rename = {}
    for key in index:
        candidates = [key, f"text_model.{key}"]
        candidates += [key.removeprefix(start) for start in ("text_model.", "model.language_model.", "model.")]
        if name := next((candidate for candidate in candidates if candidate in expected), None):
            rename[name] = key
    if "shared.weight" in rename and "encoder.embed_tokens.weight" in expected:
        # T5 lists its one embedding table under two names; files hold either or both.
        rename.setdefault("encoder.embed_tokens.weight", rename["shared.weight"])
    return [Link(key, (target,)) for target, key in rename.items()]
