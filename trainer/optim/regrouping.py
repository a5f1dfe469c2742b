"""An optimizer's saved state, brought from the groups of a checkpoint to those of this run: each parameter keeps its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer.base.errors import UserError
from trainer.optim.libraries import MIN_8BIT_SIZE
from trainer.optim.parameters import ALIGNMENT, padded
from trainer.optim.table import OptimizerKind

Held = dict[str, Any]


@dataclass(frozen=True)
class Regrouping:
    """The way from the groups of a checkpoint to those of a run. then, now: the parameters' names, group by group, in the
    checkpoint and in this run. sizes: elements of each."""

    then: Sequence[Sequence[str]]
    now: Sequence[Sequence[str]]
    sizes: Mapping[str, int]

    def __call__(self, saved: Mapping[str, Held], entry: OptimizerKind) -> dict[str, Held]:
        """The state for this run's groups, by owner as OptimizerState names them. saved: the checkpoint's, by owner.

        No bit is computed: blocks of 8-bit states never span two parameters. Raises UserError where groups that become one
        keep their state in two formats, or differ in what a group has once.
        """
        left = dict(saved)
        each, once = dict[str, Held](), dict[str, Held]()  # of each parameter; of the group that it was in
        for index, names in enumerate(self.then):
            group = {f"param_groups|{key}": value for key, value in left.pop(f"param_groups.{index}", {}).items()}
            if entry.flat:
                sizes, pieces = [padded(self.sizes[name]) for name in names], {}
                for key, value in left.pop(f"group.{index}", {}).items():
                    if key in entry.shared:
                        group[f"group|{key}"] = value
                    else:
                        pieces[key] = _split(value, sizes, f"group.{index}|{key}")
                each |= {name: {key: parts[place] for key, parts in pieces.items()} for place, name in enumerate(names)}
            else:
                each |= {name: left.pop(f"group.{index}.{place}", {}) for place, name in enumerate(names)}
            once |= dict.fromkeys(names, group)
        for index, names in enumerate(self.now):
            _require_one_kind([(each[name] if entry.flat else {}, once[name]) for name in names])
            for place, name in enumerate(names):
                if not entry.flat and each[name]:
                    left[f"group.{index}.{place}"] = each[name]
            joined = {key: torch.cat([each[name][key] for name in names]) for key in each[names[0]]} if entry.flat else {}
            for text, value in once[names[0]].items():
                where, _, key = text.partition("|")
                copied = value.clone() if isinstance(value, torch.Tensor) else value
                if where == "group":
                    joined[key] = copied
                else:
                    left.setdefault(f"param_groups.{index}", {})[key] = copied
            if joined:
                left[f"group.{index}"] = joined
        return left


def _split(value: Any, sizes: Sequence[int], name: str) -> list[torch.Tensor]:
    """A flat parameter's state, split into its parts of these sizes: each block has equally many values."""
    blocks = [size // ALIGNMENT for size in sizes]
    if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.numel() % sum(blocks):
        raise UserError(f"the checkpoint's optimizer state {name} is not what {sum(sizes)} parameters need")
    each = value.numel() // sum(blocks)
    return list(value.split([count * each for count in blocks]))


def _require_one_kind(parts: Sequence[tuple[Held, Held]]) -> None:
    first, once = parts[0]
    for other, others_once in parts[1:]:
        if other.keys() != first.keys() or not _equal(once, others_once):
            raise UserError(
                "with these rates groups of the optimizer become one that keep their state in different ways (in 8 and in "
                f"32 bit, where one has fewer than {MIN_8BIT_SIZE} elements; or with other numbers of the whole group); that "
                "cannot be joined without a change of its values: give their rules lr or weight_decay that differ, if only "
                "in the last digit"
            )


def _equal(one: Held, other: Held) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        for key, value in one.items()
    )
