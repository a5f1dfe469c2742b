"""An optimizer's state as a piece of the checkpoint, also under other parameter groups; and its weights for use."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer.base.errors import UserError
from trainer.base.memory import preserved
from trainer.optim.libraries import MIN_8BIT_SIZE, paged
from trainer.optim.parameters import ALIGNMENT, padded
from trainer.optim.table import OPTIMIZERS, OptimizerKind

StateValues = dict[str, Any]  # of a parameter or a group, by key


@dataclass(frozen=True)
class Regrouping:
    """Maps an optimizer's state from a checkpoint's groups to this run's: each parameter keeps its own.

    saved, current: the parameters' names, group by group, in the checkpoint and in this run. sizes: elements of each.
    """

    saved: Sequence[Sequence[str]]
    current: Sequence[Sequence[str]]
    sizes: Mapping[str, int]

    def __call__(self, state: Mapping[str, StateValues], entry: OptimizerKind) -> dict[str, StateValues]:
        """The state for this run's groups. state: the checkpoint's; both by owner, as OptimizerState names them.

        No bit is computed: blocks of 8-bit states never span two parameters. Raises UserError if groups that become one keep
        their state in two formats, or differ in values of the whole group.
        """
        result = dict(state)
        by_name, groups = (
            dict[str, StateValues](),
            dict[str, StateValues](),
        )  # each parameter's values; those of its saved group
        for index, names in enumerate(self.saved):
            group = {f"param_groups|{key}": value for key, value in result.pop(f"param_groups.{index}", {}).items()}
            if entry.flat:
                sizes, pieces = [padded(self.sizes[name]) for name in names], {}
                for key, value in result.pop(f"group.{index}", {}).items():
                    if key in entry.shared:
                        group[f"group|{key}"] = value
                    else:
                        pieces[key] = _split(value, sizes, f"group.{index}|{key}")
                by_name |= {name: {key: parts[place] for key, parts in pieces.items()} for place, name in enumerate(names)}
            else:
                by_name |= {name: result.pop(f"group.{index}.{place}", {}) for place, name in enumerate(names)}
            groups |= dict.fromkeys(names, group)
        for index, names in enumerate(self.current):
            _require_one_kind([(by_name[name] if entry.flat else {}, groups[name]) for name in names])
            for place, name in enumerate(names):
                if not entry.flat and by_name[name]:
                    result[f"group.{index}.{place}"] = by_name[name]
            keys = by_name[names[0]] if entry.flat else ()
            joined = {key: torch.cat([by_name[name][key] for name in names]) for key in keys}
            for text, value in groups[names[0]].items():
                owner, _, key = text.partition("|")
                copied = value.clone() if isinstance(value, torch.Tensor) else value
                if owner == "group":
                    joined[key] = copied
                else:
                    result.setdefault(f"param_groups.{index}", {})[key] = copied
            if joined:
                result[f"group.{index}"] = joined
        return result


def _split(value: Any, sizes: Sequence[int], name: str) -> list[torch.Tensor]:
    """A flat parameter's state, split into parts for parameters of these sizes: each block has equally many values."""
    blocks = [size // ALIGNMENT for size in sizes]
    if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.numel() % sum(blocks):
        raise UserError(f"the checkpoint's optimizer state {name} is not what {sum(sizes)} parameters need")
    each = value.numel() // sum(blocks)
    return list(value.split([count * each for count in blocks]))


def _require_one_kind(parts: Sequence[tuple[StateValues, StateValues]]) -> None:
    """Raises UserError unless all parts, (a parameter's values, its saved group's values), can be joined."""
    first, group = parts[0]
    for other, other_group in parts[1:]:
        if other.keys() != first.keys() or not _equal(group, other_group):
            raise UserError(
                "with these rates groups of the optimizer become one that keep their state in different ways (in 8 and in "
                f"32 bit, where one has fewer than {MIN_8BIT_SIZE} elements; or with other numbers of the whole group); that "
                "cannot be joined without a change of its values: give their rules lr or weight_decay that differ, if only "
                "in the last digit"
            )


def _equal(one: StateValues, other: StateValues) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        for key, value in one.items()
    )


class OptimizerState:
    """The state of the optimizer `name` as flat keys `NAME|KEY`. NAME: `group.INDEX` (a flat parameter), `group.INDEX.PLACE`
    (a parameter with its own shape), `param_groups.INDEX` (values of a group).

    Set directly: torch's `load_state_dict` would cast 8-bit states and step counters to the parameters' dtype.
    regrouping: applied to a loaded state if its groups differ from this run's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, regrouping: Regrouping | None = None) -> None:
        self.optimizer, self.entry, self.regrouping = optimizer, OPTIMIZERS[name], regrouping
        self._constants = self._other_keys()

    def state_dict(self) -> dict[str, Any]:
        """The flat state. Raises ValueError if a group changed in a key that the table does not name: it would be lost."""
        for before, after in zip(self._constants, self._other_keys(), strict=True):
            changed = sorted({key for key, _ in before.items() ^ after.items()})
            if changed:
                raise ValueError(f"the optimizer changes its groups in what its group_keys do not name: {', '.join(changed)}")
        owners = self._groups() | {name: self.optimizer.state.get(p, {}) for name, p in self._parameters().items()}
        return {f"{name}|{key}": value for name, values in owners.items() for key, value in values.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the state. Raises UserError if it belongs to other parameters, or another optimizer, than this run's."""
        by_name: dict[str, StateValues] = {}
        for key, value in state.items():
            name, _, state_key = key.rpartition("|")
            by_name.setdefault(name, {})[state_key] = value
        if self.regrouping is not None and self.regrouping.saved != self.regrouping.current:
            by_name = self.regrouping(by_name, self.entry)
        parameters, groups = self._parameters(), self._groups()
        unknown = sorted(by_name.keys() - parameters.keys() - groups.keys())
        if unknown:
            raise UserError(f"the checkpoint's optimizer state has {unknown[0]!r}, which this run does not train")
        for (name, current), group in zip(groups.items(), self.optimizer.param_groups, strict=True):
            saved = by_name.pop(name, {})
            _check(saved, [_kinds(current)], name, "this run's optimizer keeps there")
            group.update(_to(saved, group["params"][0].device))
        owners = (group for group in self.optimizer.param_groups for _ in group["params"])
        for (name, parameter), group in zip(parameters.items(), owners, strict=True):
            saved = by_name.get(name, {})
            # A group with a stop_step may have been left alone before its first update: all its steps were skipped.
            if by_name and not saved and "stop_step" not in group:
                raise UserError(f"the checkpoint has no optimizer state for {name}, which this run trains")
            if saved:
                layouts = [_kinds(layout) for layout in self.entry.layouts(parameter.shape, group)]
                _check(saved, layouts, name, f"the {parameter.numel()} parameters there need")
            saved = _to(saved, parameter.device)
            self.optimizer.state[parameter] = paged(self.optimizer, parameter, saved) if self.entry.paged else saved

    def log_fields(self) -> dict[str, float | None]:
        """Fields of the log: the estimate of an optimizer that finds its rate; None if it is not finite."""
        if self.entry.finds is None:
            return {}
        value = float(self.optimizer.param_groups[0][self.entry.finds.estimate])
        return {self.entry.finds.estimate: value if math.isfinite(value) else None}

    def is_finite(self) -> bool:
        """Whether all parameters and their state are finite."""
        values = [parameter.detach() for parameter in self._parameters().values()] + list(self.state_dict().values())
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        numbers = [value for value in values if not isinstance(value, torch.Tensor)]
        return all(map(math.isfinite, numbers)) and all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point())

    @contextmanager
    def evaluating(self, changed: Callable[[], object]) -> Iterator[None]:
        """A context in which the parameters are the weights for use; afterwards, bit for bit, what they were.

        An optimizer without modes has one set of weights: nothing is done. changed: called when parameters changed.
        """
        if not self.entry.modes:
            yield
            return
        with preserved(list(self._parameters().values()), changed):
            try:
                self.optimizer.eval()  # type: ignore[attr-defined]
                changed()
                yield
            finally:
                self.optimizer.train()  # type: ignore[attr-defined]

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {
            f"group.{index}" if self.entry.flat else f"group.{index}.{place}": parameter
            for index, group in enumerate(self.optimizer.param_groups)
            for place, parameter in enumerate(group["params"])
        }

    def _groups(self) -> dict[str, StateValues]:
        return {
            f"param_groups.{index}": {key: group[key] for key in self.entry.group_keys}
            for index, group in enumerate(self.optimizer.param_groups)
        }

    def _other_keys(self) -> list[dict[str, str]]:
        """Each group's values that must not change, as text. The rates belong to the schedule."""
        variable = {"params", "lr", "initial_lr", *self.entry.group_keys, *self.entry.derived}
        groups = self.optimizer.param_groups
        return [{key: repr(value) for key, value in group.items() if key not in variable} for group in groups]


def state_bytes(name: str, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the state that the optimizer `name` has after its first update. Parameters may have no values."""
    return sum(
        tensor.nbytes
        for group in optimizer.param_groups
        for parameter in group["params"]
        for tensor in OPTIMIZERS[name].layouts(parameter.shape, group)[0].values()
        if isinstance(tensor, torch.Tensor)
    )


def weights_for_use(
    trained: Mapping[str, torch.Tensor], state: Mapping[str, Any], groups: Sequence[Sequence[str]], beta1: float
) -> dict[str, torch.Tensor]:
    """The weights for use of a schedule-free optimizer, x = y + (1 - 1 / beta1) (z - y), as its eval() makes them (Defazio et
    al., The Road Less Scheduled, 2024). trained: y, by name. state: has z, of flat parameters. groups: the names in each.

    The last bits may differ from those on the device that trained. Raises ValueError if the state has other groups.
    """
    weights = {}
    for index, names in enumerate(groups):
        if (z := state.get(f"group.{index}|z")) is None:
            continue  # before the first update
        sizes = [padded(trained[name].numel()) for name in names]
        if sum(sizes) != len(z):
            raise ValueError(f"optimizer state of {len(z)} elements for {sum(sizes)}")
        y = torch.zeros_like(z)
        for name, piece in zip(names, y.split(sizes), strict=True):
            weights[name] = piece[: trained[name].numel()].view(trained[name].shape).copy_(trained[name])
        y.lerp_(z, 1 - 1 / beta1)
    return weights


def _check(saved: StateValues, layouts: Sequence[Mapping[str, str]], name: str, requirement: str) -> None:
    kinds = _kinds(saved)
    if kinds not in layouts:
        listed = ", ".join(f"{key} {kind}" for key, kind in sorted(kinds.items())) or "nothing"
        raise UserError(f"the checkpoint's optimizer state of {name} is not what {requirement}: {listed}")


def _kinds(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: kind(value) for key, value in values.items()}


def _to(saved: StateValues, device: torch.device) -> StateValues:
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in saved.items()}


def kind(value: Any) -> str:
    """dtype and shape of a tensor; "count", "number" or "flag"."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, bool):
        return "flag"
    if isinstance(value, int) and 0 <= value < 2**31:
        return "count"
    return "number" if isinstance(value, float) and math.isfinite(value) else "neither tensor nor number"
