"""What the operators of a piece of code cost: memory that is alive, launches, bytes read and written, FLOPs.

What lies below them is not seen: how an allocator rounds and splits, the workspaces of cuBLAS and cuDNN.
"""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

# Operators that make or rename memory, and launch nothing.
_SILENT = {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided", "aten::detach",
    "aten::alias", "aten::_unsafe_view", "aten::lift_fresh", "aten::set_", "aten::_local_scalar_dense", "aten::resize_",
}  # fmt: skip

# FLOPs of what torch's counter does not know, by name: of the attention that stands for every fused one (dry_run.py), and of
# ours: t B^T, G^T t, and W A^T, A A^T and B (A A^T), as multiplications and additions.
_UNKNOWN = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda q, k, v, *_: sdpa_flop_count(q.shape, k.shape, v.shape),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda dy, q, k, v, *_: sdpa_backward_flop_count(
        dy.shape, q.shape, k.shape, v.shape
    ),
    "trainer::compose": lambda t, b, *_: 2 * t.numel() * len(b),
    "trainer::adapter_gradients": lambda dy, u, t, *_: 2 * dy.numel() * t.shape[1],
    "trainer::adapted_norms": lambda c, wa, gram, *given: (
        2 * wa.shape[3] * (given[4] * (c.numel() + c.shape[0] * wa.shape[3]) + c.numel() * wa.shape[3])
    ),
}


class Work(NamedTuple):
    """What one operator does. read, written: bytes. flops, and width, the bytes of an element of what is multiplied: of
    products, convolutions and attention, 0 of others."""

    read: int = 0
    written: int = 0
    flops: int = 0
    width: int = 0


@dataclass
class Cost:
    """What the operators cost that were called: how often each work was done."""

    works: Counter[Work] = field(default_factory=Counter)

    @property
    def launches(self) -> int:
        """How many operators there were."""
        return self.works.total()

    def total(self, field: Literal["read", "written", "flops"]) -> int:
        """The sum of a field of Work over all of them."""
        return sum(count * getattr(work, field) for work, count in self.works.items())


class Remembering(TorchDispatchMode):
    """A block in which an operator on meta tensors is asked of torch once for each form of its arguments: torch works many
    results out in Python, which took most of the time of a plan."""

    # What operators gave, by them and the forms of their arguments: a form, or the place of the argument that they gave back.
    # It depends on nothing else, so all traces of a process share it.
    _results: ClassVar[dict[Any, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; torch's guard against it would be half of the time of an operator."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        return self._call(func, args, kwargs or {})

    def _call(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """func(*args, **kwargs)."""
        if func.is_view:  # made without Python, and no memory
            return func(*args, **kwargs)
        try:
            key = func, _forms(args, kwargs)
            form = self._results.get(key)
        except TypeError:  # it has values, or is nothing that can be looked up
            return func(*args, **kwargs)
        if form is not None:
            return tensors_in(args, kwargs)[form] if type(form) is int else _made(form)
        out = func(*args, **kwargs)
        given = tensors_in(args, kwargs)
        if func._schema.is_mutable:
            # Without values an operator has nothing to write. One that changes a form is asked each time.
            place = next((place for place, tensor in enumerate(given) if tensor is out), None)
            if place is not None and (func, _forms(args, kwargs)) == key:
                self._results[key] = place
            return out
        storages = {tensor.untyped_storage()._cdata for tensor in given}
        made = out if isinstance(out, (tuple, list)) else (out,)
        if all(r is None or (_is_meta(r) and r.untyped_storage()._cdata not in storages) for r in made):
            self._results[key] = _form(out)
        return out


class Trace(Remembering):
    """A block in which every operator is counted. alive: bytes of the tensors that were made inside or `enter`ed, and still
    are. peak: the most there were since `reset`. by_name: launches by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.cost, self.by_name = Cost(), Counter[str]()
        self._known: dict[int, weakref.finalize] = {}
        self._kinds: dict[Any, tuple[bool, tuple[int, ...], Any]] = {}

    def reset(self) -> None:
        """Begin a new span: the peak is what is alive, and nothing was called."""
        self.peak, self.cost, self.by_name = self.alive, Cost(), Counter()

    def enter(self, tensors: Iterable[Tensor]) -> int:
        """Count tensors that were made outside. Returns how many bytes that adds."""
        before = self.alive
        for storage in (tensor.untyped_storage() for tensor in tensors):
            key, size = storage._cdata, storage.nbytes()
            if key not in self._known:
                self.alive += size
                self.peak = max(self.peak, self.alive)
                self._known[key] = weakref.finalize(storage, self._leave, key, size)
        return self.alive - before

    def _leave(self, key: int, size: int) -> None:
        del self._known[key]
        self.alive -= size

    def _kind(self, func: Any) -> tuple[bool, tuple[int, ...], Any]:
        """(whether it launches anything, the places of arguments that it writes, its formula of FLOPs)."""
        if func not in self._kinds:
            name, arguments = func._schema.name, func._schema.arguments
            changed = tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)
            # In place, as "addmm_", torch's counter knows none: it multiplies as the one that it is named after.
            named_after = getattr(torch.ops.aten, name.removeprefix("aten::").removesuffix("_"), None)
            formula = flop_registry.get(func.overloadpacket, flop_registry.get(named_after))
            if formula is None and name in _UNKNOWN:
                formula = lambda *args, out_val, unknown=_UNKNOWN[name], **_: unknown(*args)  # noqa: E731
            self._kinds[func] = not func.is_view and name not in _SILENT, changed, formula
        return self._kinds[func]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        out = self._call(func, args, kwargs)
        if func is torch.ops.prim.device.default:
            return out
        launches, changed, formula = self._kind(func)
        made = [out] if isinstance(out, Tensor) else tensors_in(out)
        self.enter(made)
        if not launches:
            return out
        self.by_name[func._schema.name] += 1
        given = tensors_in(args, kwargs)
        written = {id(tensor): tensor for tensor in made}
        written |= {id(tensor): tensor for at in changed if at < len(args) for tensor in tensors_in(args[at])}
        work = Work(sum(map(_bytes, given)), sum(map(_bytes, written.values())))
        if formula is not None:
            work = work._replace(flops=formula(*args, **kwargs, out_val=out), width=given[0].itemsize)
        self.cost.works[work] += 1
        return out


def _is_meta(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter) and value.is_meta


def _forms(args: tuple, kwargs: dict[str, Any]) -> Any:
    return (_form(args), *kwargs, _form(tuple(kwargs.values()))) if kwargs else _form(args)


def _form(value: Any) -> tuple[Any, ...]:
    """To be looked up: a meta tensor's (shape, stride, dtype), anything else with its type first, so that 1 is not 1.0.
    Raises TypeError for a tensor with values."""
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:
        if value.is_meta:
            return value.shape, value.stride(), value.dtype
        raise TypeError("a tensor with values")
    if kind is tuple or kind is list:
        return kind, *[_form(each) for each in value]
    if isinstance(value, Tensor):
        raise TypeError("a tensor of another kind")
    return kind, value


def _made(form: tuple[Any, ...]) -> Any:
    """The other way round, of results."""
    if isinstance(form[0], torch.Size):
        return torch.empty_strided(form[0], form[1], dtype=form[2], device="meta")
    kind, *values = form
    return None if kind is type(None) else kind(map(_made, values))


def tensors_in(*values: Any) -> list[Tensor]:
    """The tensors in arguments or results, in order."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (tuple, list)):
            tensors += tensors_in(*value)
        elif isinstance(value, dict):
            tensors += tensors_in(*value.values())
    return tensors


def _bytes(tensor: Tensor) -> int:
    """The bytes of its elements; an expanded tensor counts only the elements that are stored."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())
