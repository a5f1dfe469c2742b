"""An optimizer's state as a piece of the checkpoint, and its weights as they are used."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainer.base.errors import UserError
from trainer.base.memory import preserved
from trainer.optim.libraries import paged
from trainer.optim.parameters import padded
from trainer.optim.regrouping import Regrouping
from trainer.optim.table import OPTIMIZERS


class OptimizerState:
    """The state of the optimizer `name` as flat keys `NAME|KEY`. NAME: `group.INDEX` (a flat parameter),
    `group.INDEX.PLACE` (a parameter with its own shape), `param_groups.INDEX` (values of a group).

    Set directly: torch's `load_state_dict` would cast 8-bit states and step counters to the parameters' dtype.
    regrouping: where the groups of what is loaded may be others.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, regrouping: Regrouping | None = None) -> None:
        self.optimizer, self.entry, self.regrouping = optimizer, OPTIMIZERS[name], regrouping
        self._constants = self._other_keys()

    def state_dict(self) -> dict[str, Any]:
        """Raises ValueError where a group changed in what the table does not name: it would be lost on a resume."""
        for then, now in zip(self._constants, self._other_keys(), strict=True):
            lost = sorted({key for key, _ in then.items() ^ now.items()})
            if lost:
                raise ValueError(f"the optimizer changes its groups in what its group_keys do not name: {', '.join(lost)}")
        owners = self._groups() | {name: self.optimizer.state.get(p, {}) for name, p in self._parameters().items()}
        return {f"{name}|{key}": value for name, values in owners.items() for key, value in values.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UserError where the state is of other parameters, or of another optimizer, than this run's."""
        by_name: dict[str, dict[str, Any]] = {}
        for key, value in state.items():
            name, _, state_key = key.rpartition("|")
            by_name.setdefault(name, {})[state_key] = value
        if self.regrouping is not None and self.regrouping.then != self.regrouping.now:
            by_name = self.regrouping(by_name, self.entry)
        parameters, groups = self._parameters(), self._groups()
        unknown = sorted(by_name.keys() - parameters.keys() - groups.keys())
        if unknown:
            raise UserError(f"the checkpoint's optimizer state has {unknown[0]!r}, which this run does not train")
        for (name, now), group in zip(groups.items(), self.optimizer.param_groups, strict=True):
            saved = by_name.pop(name, {})
            _check(saved, [_kinds(now)], name, "this run's optimizer keeps there")
            group.update(_to(saved, group["params"][0].device))
        owners = (group for group in self.optimizer.param_groups for _ in group["params"])
        for (name, parameter), group in zip(parameters.items(), owners, strict=True):
            saved = by_name.get(name, {})
            # A group with a stop_step may have been left alone before its first update: all its steps were skipped.
            if by_name and not saved and "stop_step" not in group:
                raise UserError(f"the checkpoint has no optimizer state for {name}, which this run trains")
            if saved:
                what = f"the {parameter.numel()} parameters there need"
                _check(saved, [_kinds(layout) for layout in self.entry.layouts(parameter.shape, group)], name, what)
            saved = _to(saved, parameter.device)
            self.optimizer.state[parameter] = paged(self.optimizer, parameter, saved) if self.entry.paged else saved

    def log_fields(self) -> dict[str, float | None]:
        """Numbers for the log: the estimate of an optimizer that finds its rate; None where it is not finite."""
        if self.entry.finds is None:
            return {}
        value = float(self.optimizer.param_groups[0][self.entry.finds.estimate])
        return {self.entry.finds.estimate: value if math.isfinite(value) else None}

    def is_finite(self) -> bool:
        """Whether all parameters and their state are."""
        values = [parameter.detach() for parameter in self._parameters().values()] + list(self.state_dict().values())
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        numbers = [value for value in values if not isinstance(value, torch.Tensor)]
        return all(map(math.isfinite, numbers)) and all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point())

    @contextmanager
    def evaluating(self, changed: Callable[[], object]) -> Iterator[None]:
        """A block in which the parameters are the weights to be used; afterwards they are, bit for bit, what they were.

        Of an optimizer without modes these are the same, and nothing is done. changed: called when parameters changed.
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

    def _groups(self) -> dict[str, dict[str, Any]]:
        return {
            f"param_groups.{index}": {key: group[key] for key in self.entry.group_keys}
            for index, group in enumerate(self.optimizer.param_groups)
        }

    def _other_keys(self) -> list[dict[str, str]]:
        """What must not change in each group, as text. The rates are the schedule's."""
        apart = {"params", "lr", "initial_lr", *self.entry.group_keys, *self.entry.derived}
        return [
            {key: repr(value) for key, value in group.items() if key not in apart} for group in self.optimizer.param_groups
        ]


def state_bytes(name: str, optimizer: torch.optim.Optimizer) -> int:
    """The bytes that the optimizer of that name keeps after its first update. Parameters may have no values."""
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
    """The weights to use of a schedule-free optimizer, x = y + (1 - 1 / beta1) (z - y), as its eval() makes it (Defazio et
    al., The Road Less Scheduled, 2024). y: what was trained. z: its state, in these groups of names, of flat parameters.

    On the device where it was trained the last bits may be others. Raises ValueError where the state is of other groups.
    """
    used = {}
    for index, names in enumerate(groups):
        if (z := state.get(f"group.{index}|z")) is None:
            continue  # before the first update
        sizes = [padded(trained[name].numel()) for name in names]
        if sum(sizes) != len(z):
            raise ValueError(f"optimizer state of {len(z)} elements for {sum(sizes)}")
        y = torch.zeros_like(z)
        for name, piece in zip(names, y.split(sizes), strict=True):
            used[name] = piece[: trained[name].numel()].view(trained[name].shape).copy_(trained[name])
        y.lerp_(z, 1 - 1 / beta1)
    return used


def _check(saved: dict[str, Any], layouts: Sequence[Mapping[str, str]], name: str, what: str) -> None:
    kinds = _kinds(saved)
    if kinds not in layouts:
        listed = ", ".join(f"{key} {kind}" for key, kind in sorted(kinds.items())) or "nothing"
        raise UserError(f"the checkpoint's optimizer state of {name} is not what {what}: {listed}")


def _kinds(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: kind(value) for key, value in values.items()}


def _to(saved: dict[str, Any], device: torch.device) -> dict[str, Any]:
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
