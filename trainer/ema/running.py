"""Running averages beside the training: after update n, average <- average + w(n) (weights - average), in fp32."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer.base.errors import UserError
from trainer.base.memory import put_back

# n, counted from 1 -> the share of the newest weights in the average after update n, at most 1; of the first one alone it
# may be all.
NewShare = Callable[[int], float]


def constant(decay: float) -> NewShare:
    """w = 1 - min(decay, (1 + n) / (10 + n)).

    The rise is that of TensorFlow's ExponentialMovingAverage and diffusers' EMAModel: without it the first weights, where B
    is zero, would weigh decay^n. While it lasts the average has the last tenth of the run or so: w is 9 / (10 + n), a power
    function of exponent 8.
    """
    return lambda n: 1 - min(decay, (1 + n) / (10 + n))


class Averages:
    """The piece "ema" of a checkpoint: NAME|PARAMETER, fp32, and how many updates are in them. None of them: all is empty.

    parameters: by name, as they lie in memory from now on (an optimizer may have flattened them). weights: by the averages'
    names; the first one is sampled and exported. changed: is called when the parameters changed (DoRA's norms are
    marked stale there).
    They are of each parameter, not of the optimizer's groups: groups may be others after --allow.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], weights: Mapping[str, NewShare], changed: Callable[[], object]
    ) -> None:
        self.weights, self.changed, self.updates = dict(weights), changed, 0
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.kept = {name: [parameter.detach().clone() for parameter in self.parameters] for name in self.weights}

    @torch.no_grad()
    def update(self) -> None:
        """Due after every update that changed the parameters."""
        self.updates += 1
        for name, average in self.kept.items():
            torch._foreach_lerp_(average, self.parameters, self.weights[name](self.updates))

    @contextmanager
    def used(self) -> Iterator[None]:
        """A block in which the parameters are the first average; afterwards they are, bit for bit, what they were, however
        it ends."""
        with put_back(self.parameters, self.changed):
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, next(iter(self.kept.values())))
            self.changed()
            yield

    def of(self, name: str) -> dict[str, Tensor]:
        """The average `name`, by the parameters' names."""
        return dict(zip(self.names, self.kept[name], strict=True))

    @property
    def tensors(self) -> list[Tensor]:
        """All averages' tensors."""
        return [tensor for average in self.kept.values() for tensor in average]

    def state_dict(self) -> dict[str, Any]:
        """The averages' tensors by "AVERAGE|PARAMETER", and the count of updates."""
        named = {f"{name}|{key}": tensor for name in self.kept for key, tensor in self.of(name).items()}
        return {"updates": self.updates, **named}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises UserError where names or shapes differ; ValueError for what is no count."""
        updates, mine = state["updates"], self.state_dict()
        if not (type(updates) is int and 0 <= updates < 2**53):
            raise ValueError(f"updates = {updates!r:.50}")
        for key in sorted(mine.keys() | state.keys()):
            one, other = mine.get(key), state.get(key)
            if key == "updates":
                continue
            kinds = [(t.dtype, tuple(t.shape)) if isinstance(t, Tensor) else None for t in (one, other)]
            if kinds[0] != kinds[1]:
                said = ", here ".join("nothing" if kind is None else f"{kind[0]} {kind[1]}" for kind in reversed(kinds))
                raise UserError(f"the saved averages do not fit this run: {key} is {said}")
        for name in self.kept:
            for key, tensor in self.of(name).items():
                tensor.copy_(state[f"{name}|{key}"])
        self.updates = updates
