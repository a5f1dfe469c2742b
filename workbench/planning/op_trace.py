"""Traces the cost of torch operators: live memory, launches, bytes read and written, FLOPs. The allocator's rounding and
splitting, and the workspaces of cuBLAS and cuDNN, are below operators and not counted."""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

# Operators that allocate or rename memory without a kernel launch.
_SILENT = {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided", "aten::detach",
    "aten::alias", "aten::_unsafe_view", "aten::lift_fresh", "aten::set_", "aten::_local_scalar_dense", "aten::resize_",
}  # fmt: skip

# FLOPs of operators that torch's counter does not know: the attention that stands for every fused one (dry_run.py), and our
# own: t B^T, G^T t, and W A^T, A A^T and B (A A^T), as multiplications and additions.
_UNKNOWN = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda q, k, v, *_: sdpa_flop_count(q.shape, k.shape, v.shape),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda dy, q, k, v, *_: sdpa_backward_flop_count(
        dy.shape, q.shape, k.shape, v.shape
    ),
    "trainer::compose": lambda t, b, *_: 2 * t.numel() * len(b),
    "trainer::adapter_gradients": lambda dy, u, t, *_: 2 * dy.numel() * t.shape[1],
    "trainer::adapted_norms": lambda c, wa, gram, *rest: (
        2 * wa.shape[3] * (rest[4] * (c.numel() + c.shape[0] * wa.shape[3]) + c.numel() * wa.shape[3])
    ),
}


class Work(NamedTuple):
    """The work of one operator. read, written: bytes. flops, width (bytes of an element): 0 except for products, convolutions
    and attention."""

    read: int = 0
    written: int = 0
    flops: int = 0
    width: int = 0


@dataclass
class Cost:
    """The cost of all operators that were called. works: work -> number of calls."""

    works: Counter[Work] = field(default_factory=Counter)

    @property
    def launches(self) -> int:
        """The number of calls."""
        return self.works.total()

    def total(self, field: Literal["read", "written", "flops"]) -> int:
        """The sum of a field of Work over all calls."""
        return sum(count * getattr(work, field) for work, count in self.works.items())


class Remembering(TorchDispatchMode):
    """A block in which the results of operators on meta tensors are cached by the forms of their arguments: torch computes
    many of them in Python, which took most of the time of a plan."""

    # (operator, forms of its arguments) -> the form of its result, or the index of the argument that it returns. Nothing else
    # decides the result, so all traces of a process share the cache.
    _results: ClassVar[dict[Any, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing is compiled here, and torch's guard against it would be half of the time of an operator."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        return self._call(func, args, kwargs or {})

    def _call(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """func(*args, **kwargs)."""
        if func.is_view:  # allocates nothing, and torch does not need Python for it
            return func(*args, **kwargs)
        try:
            key = func, _forms(args, kwargs)
            form = self._results.get(key)
        except TypeError:  # an argument has values, or cannot be hashed
            return func(*args, **kwargs)
        if form is not None:
            return tensors_in(args, kwargs)[form] if type(form) is int else _from_form(form)
        out = func(*args, **kwargs)
        inputs = tensors_in(args, kwargs)
        if func._schema.is_mutable:
            # Meta tensors have no values to write. An operator that changes the form of an argument is not cached.
            index = next((index for index, tensor in enumerate(inputs) if tensor is out), None)
            if index is not None and (func, _forms(args, kwargs)) == key:
                self._results[key] = index
            return out
        storages = {tensor.untyped_storage()._cdata for tensor in inputs}
        outputs = out if isinstance(out, (tuple, list)) else (out,)
        if all(r is None or (_is_meta(r) and r.untyped_storage()._cdata not in storages) for r in outputs):
            self._results[key] = _form(out)
        return out


class Trace(Remembering):
    """A block in which every operator is counted. alive: bytes of live tensors that were created inside or `enter`ed. peak:
    the largest `alive` since `reset`. by_name: launches by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.cost, self.by_name = Cost(), Counter[str]()
        self._finalizers: dict[int, weakref.finalize] = {}  # by storage
        self._kinds: dict[Any, tuple[bool, tuple[int, ...], Any]] = {}

    def reset(self) -> None:
        """Begin a new span: without calls, and with the live bytes as the peak."""
        self.peak, self.cost, self.by_name = self.alive, Cost(), Counter()

    def enter(self, tensors: Iterable[Tensor]) -> int:
        """Count tensors that were created outside. Returns the bytes that this adds."""
        before = self.alive
        for storage in (tensor.untyped_storage() for tensor in tensors):
            key, size = storage._cdata, storage.nbytes()
            if key not in self._finalizers:
                self.alive += size
                self.peak = max(self.peak, self.alive)
                self._finalizers[key] = weakref.finalize(storage, self._leave, key, size)
        return self.alive - before

    def _leave(self, key: int, size: int) -> None:
        del self._finalizers[key]
        self.alive -= size

    def _kind(self, func: Any) -> tuple[bool, tuple[int, ...], Any]:
        """(whether the operator launches a kernel, indices of the arguments that it writes, its FLOP formula)."""
        if func not in self._kinds:
            name, arguments = func._schema.name, func._schema.arguments
            changed = tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)
            # torch's counter lacks in-place operators ("addmm_"), which multiply as their namesakes ("addmm").
            namesake = getattr(torch.ops.aten, name.removeprefix("aten::").removesuffix("_"), None)
            formula = flop_registry.get(func.overloadpacket, flop_registry.get(namesake))
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
        outputs = tensors_in(out)
        self.enter(outputs)
        if not launches:
            return out
        self.by_name[func._schema.name] += 1
        inputs = tensors_in(args, kwargs)
        writes = {id(tensor): tensor for tensor in outputs}
        writes |= {id(tensor): tensor for index in changed if index < len(args) for tensor in tensors_in(args[index])}
        work = Work(sum(map(_bytes, inputs)), sum(map(_bytes, writes.values())))
        if formula is not None:
            work = work._replace(flops=formula(*args, **kwargs, out_val=out), width=inputs[0].itemsize)
        self.cost.works[work] += 1
        return out


def _is_meta(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter) and value.is_meta


def _forms(args: tuple, kwargs: dict[str, Any]) -> Any:
    return (_form(args), *kwargs, _form(tuple(kwargs.values()))) if kwargs else _form(args)


def _form(value: Any) -> tuple[Any, ...]:
    """A key for the cache: a meta tensor's (shape, stride, dtype); anything else with its type first, so that 1 is not 1.0.
    Raises TypeError for a tensor with values."""
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:
        if value.is_meta:
            return value.shape, value.stride(), value.dtype
        raise TypeError("a tensor with values")
    if kind is tuple or kind is list:
        return kind, *[_form(item) for item in value]
    if isinstance(value, Tensor):
        raise TypeError("a tensor of another kind")
    return kind, value


def _from_form(form: tuple[Any, ...]) -> Any:
    """The result with that `_form`."""
    if isinstance(form[0], torch.Size):
        return torch.empty_strided(form[0], form[1], dtype=form[2], device="meta")
    kind, *values = form
    return None if kind is type(None) else kind(map(_from_form, values))


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
    """The bytes of a tensor's elements; an expanded tensor counts only the elements that are stored."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())
