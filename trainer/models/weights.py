"""A component's tensors in its files, and how each gets into the module: split, widened, converted or taken over."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
    """The tensors of one component, in one or several files, under the names they have there without `prefix`.

    links: None where those names are the module's own, else how the original layout's names become the module's.
    recognise: (header entries by name) -> which of them are weights that the files hold quantised.
    """

    files: tuple[TensorFile, ...]
    prefix: str
    links: tuple[Link, ...] | None
    recognise: Recognise

    @cached_property
    def index(self) -> dict[str, TensorFile]:
        """The file that each of the component's tensors is in, by the tensor's name without the prefix."""
        keys = ((key, file) for file in self.files for key in file.entries)
        return {key.removeprefix(self.prefix): file for key, file in keys if key.startswith(self.prefix)}

    @cached_property
    def recognised(self) -> Recognised:
        """What the files hold quantised. Raises UserError, with the file, for a convention that is not supported."""
        try:
            return self.recognise({key: self.entry(key) for key in self.index})
        except UserError as error:
            raise UserError(f"{self.files[0].path}: {error}") from error

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...] | None]:
        """Every weight's shape; a weight held quantised counts as one, None where the header does not say its shape."""
        held, other = self.recognised.weights, self.recognised.other
        parts = {part for weight in held.values() for part in weight.parts.values()}
        plain = {key: self.entry(key).shape for key in self.index if key not in parts and key not in other}
        return plain | {key: weight.shape for key, weight in held.items()}

    def links_to(self, expected: Mapping[str, Shape]) -> Sequence[Link]:
        """The links from the files' tensors to the module's. expected: the module's tensors."""
        return same_names(expected, self.shapes) if self.links is None else self.links

    def entry(self, key: str) -> TensorEntry:
        """The place and kind of a tensor in its file."""
        return self.index[key].entries[self.prefix + key]

    def read(self, key: str, advance: Advance = no_progress) -> torch.Tensor:
        """A tensor, as its file has it. Raises UserError where a value is not finite."""
        tensor = self.index[key].read(self.prefix + key, advance)
        if count := count_not_finite(tensor):
            values = f"{count:,} of {tensor.numel():,} values of tensor {self.prefix + key!r} are NaN or infinite"
            why = "as a broken merge or conversion leaves them; make or download the file again, or use another copy"
            raise UserError(f"{self.index[key].path}: {values}, {why}")
        return tensor


@dataclass(frozen=True)
class Read:
    """One tensor to read, of `shape`, and the module tensors that its rows become, of the shapes `parts`."""

    weights: Weights
    link: Link
    shape: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows of each part."""
        return tuple(shape[0] if shape else 1 for shape in self.parts)

    @property
    def held(self) -> HeldWeight | None:
        """The weight that the file holds quantised; None where it holds plain numbers."""
        return self.weights.recognised.weights.get(self.link.original)

    @property
    def bytes(self) -> int:
        """The bytes of it in the files."""
        keys = self.held.parts.values() if self.held is not None else (self.link.original,)
        return sum(self.weights.entry(key).bytes for key in keys)

    def check(self) -> None:
        """Refuse what cannot be placed, as far as headers and the short descriptions beside quantised weights tell."""
        held, original = self.held, self.link.original
        if held is not None:
            if held.shape is None and (len(self.link.parts) > 1 or self.link.op != "rows"):
                raise self.refusal(
                    "several layers share it, or their rows lie in another order, and its blocks need not end with a row; "
                    "use the model in diffusers' layout, or its 16-bit file"
                )
            self._checked(held.check, held.described)
        elif not (dtype := self.weights.entry(original).dtype).is_floating_point:
            raise UserError(
                f"{self.weights.index[original].path}: tensor {self.weights.prefix + original!r} holds {NAMES[dtype]} "
                "where weights are floating-point numbers; download or copy the file again, or use the 16-bit file"
            )

    def place(self, module: nn.Module, device: torch.device, phase: Phase) -> None:
        """Read the tensor, and convert it into the module's own, or take its payload over where that is stored so."""
        held = self.held
        if held is None:
            source = self.weights.read(self.link.original, phase.advance).to(device)
            for name, piece in zip(self.link.parts, split_original(self.link, source, self.rows), strict=True):
                phase.check()
                _place_tensor(module, name, piece)
            return
        payload = self._checked(held.payload, tuple(held.parts), phase.advance)
        for name, shape, piece in zip(self.link.parts, self.parts, self.split(payload), strict=True):
            piece = {role: tensor.to(device) for role, tensor in piece.items()}
            owner = module.get_submodule(name.rpartition(".")[0])
            if isinstance(owner, WeightOwner):
                owner.load_held(held, piece)
            else:
                _place_tensor(module, name, held.dequantize(piece, shape))

    def tensors(self, advance: Advance = no_progress) -> list[torch.Tensor]:
        """The module tensors that it becomes, in fp32; of a quantised weight its value."""
        if self.held is None:
            source = self.weights.read(self.link.original, advance)
            return [piece.float() for piece in split_original(self.link, source, self.rows)]
        payload = self._checked(self.held.payload, tuple(self.held.parts), advance)
        return [self.held.dequantize(piece, shape) for piece, shape in zip(self.split(payload), self.parts, strict=True)]

    def split(self, payload: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """The payload of each part, where the file's layout is not the module's own. Codes and scales go by rows."""
        link = self.link
        if len(link.parts) == 1 and link.op == "rows":
            return [dict(payload)]
        codes, scale = payload["weight"], payload["scale"]
        if link.op == "transpose":
            if bool((scale != scale[0]).any()):
                raise self.refusal("its rows are the module's columns, and have a scale each; use the 16-bit file")
            scale = scale[:1].expand(self.parts[0][0])
        # As bytes: torch has no concatenation of every float8 dtype.
        split = [codes.view(torch.uint8), scale]
        ops = [link, link if link.swap else Link(link.original, link.parts)]
        pieces = [split_original(op, tensor, self.rows) for op, tensor in zip(ops, split, strict=True)]
        return [{"weight": part.contiguous().view(codes.dtype), "scale": rows} for part, rows in zip(*pieces, strict=True)]

    def _checked(self, function: Callable, roles: tuple[str, ...], advance: Advance = no_progress):
        """function(the parts of those roles, shape), a ValueError told as the user's."""
        try:
            return function({role: self.weights.read(self.held.parts[role], advance) for role in roles}, self.shape)
        except ValueError as error:
            raise self.refusal(str(error)) from error

    def refusal(self, why: str) -> UserError:
        """The error that says `why` this quantised tensor cannot be read."""
        file = self.weights.index[next(iter(self.held.parts.values()))]
        return UserError(f"{file.path}: the quantised tensor {self.weights.prefix + self.link.original!r}: {why}")


def _place_tensor(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner_name, _, leaf = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    if leaf == "weight" and isinstance(owner, WeightOwner):
        owner.load_weight(tensor)
    else:
        with torch.no_grad():
            getattr(owner, leaf).copy_(tensor)


@dataclass(frozen=True)
class Headers:
    """What was read so far, by component: the weights' files, and the shapes of the module's parameters."""

    opened: dict[str, Weights] = field(default_factory=dict)
    shapes: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)


def plan_reads(
    name: str, weights: Weights, expected: Mapping[str, Shape], *, others: Collection[str], harmless: Collection[str]
) -> list[Read]:
    """What fills component `name`, whose module has the `expected` tensors. Reads headers only.

    others: what stands before the names of the file's other components. harmless: patterns of tensors that are no weights.
    Raises UserError for a missing, wrongly shaped or unexpected tensor, naming it.
    """
    where = weights.files[0].path if len(weights.files) == 1 else weights.files[0].path.parent

    def refuse_missing(missing: Sequence[str], count: int) -> None:
        if missing:
            share = f"{len(missing)} of {count} in all"
            tensor = f"{where}: tensor {missing[0]!r} of component {name!r}"
            raise UserError(f"{tensor} is missing ({share}); use a whole file of this model")

    reads, links = [], weights.links_to(expected)
    refuse_missing([weights.prefix + link.original for link in links if link.original not in weights.shapes], len(links))
    for link in links:
        wanted = [expected[part] for part in link.parts]
        read, shape = Read(weights, link, original_shape(wanted, link.op), tuple(wanted)), weights.shapes[link.original]
        if shape not in (read.shape, None):
            tensor = f"{where}: tensor {weights.prefix + link.original!r}"
            raise UserError(f"{tensor} has shape {shape}, the config of component {name!r} wants {read.shape}")
        read.check()
        reads.append(read)
    refuse_missing(sorted(expected.keys() - {part for link in links for part in link.parts}), len(expected))
    # A single file holds several components; under an empty prefix all of them are seen.
    apart = () if weights.prefix else tuple(others)
    unclaimed = sorted(weights.shapes.keys() - {link.original for link in links})
    odd = [key for key in unclaimed if not key.startswith(apart)]
    odd = [key for key in odd if not any(fnmatchcase(weights.prefix + key, pattern) for pattern in harmless)]
    if odd:
        raise UserError(
            f"{where}: unexpected tensor {weights.prefix + odd[0]!r} ({len(odd)} in all); the file is not this "
            f"family's {name}, or is of a variant that is not supported"
        )
    return reads


def same_names(expected: Mapping[str, Shape], index: Iterable[str]) -> list[Link]:
    """Identity links; files of another transformers version differ by one leading `text_model.`, those of a language model by
    `model.` (`model.language_model.` of one that sees images), behind which its layers lie."""
    rename = {}
    for key in index:
        candidates = [key, f"text_model.{key}"]
        candidates += [key.removeprefix(start) for start in ("text_model.", "model.language_model.", "model.")]
        if own := next((candidate for candidate in candidates if candidate in expected), None):
            rename[own] = key
    if "shared.weight" in rename and "encoder.embed_tokens.weight" in expected:
        # T5 lists its one embedding table under two names; files hold either or both.
        rename.setdefault("encoder.embed_tokens.weight", rename["shared.weight"])
    return [Link(key, (target,)) for target, key in rename.items()]
