"""A running average beside the training: after update n, average <- average + w(n) (weights - average), in fp32, with

    w(n) = 1 - min(decay, (1 + n) / (10 + n)).

The rise is that of TensorFlow's ExponentialMovingAverage and diffusers' EMAModel: without it the first weights, where B is
zero, would weigh decay^n.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer.base.errors import UserError
from trainer.base.memory import preserved

OF = "constant|"  # begins the tensors' names in a checkpoint


class Average:
    """The piece "ema" of a checkpoint, fp32. parameters: by name, as they lie in memory from now on (an optimizer may have
    flattened them). changed: is called when they changed. weights: the average of each, by name."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float, changed: Callable[[], object]) -> None:
        self.decay, self.changed, self.updates = decay, changed, 0
        self.parameters = list(parameters.values())
        self.weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Due after every update that changed the parameters."""
        self.updates += 1
        share = 1 - min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(list(self.weights.values()), self.parameters, share)

    @contextmanager
    def used(self) -> Iterator[None]:
        """A block in which the parameters are the average; afterwards they are, bit for bit, what they were."""
        with preserved(self.parameters, self.changed):
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, list(self.weights.values()))
            self.changed()
            yield

    def state_dict(self) -> dict[str, Any]:
        """The average's tensors by "constant|PARAMETER", and the count of updates."""
        return {"updates": self.updates, **{OF + name: tensor for name, tensor in self.weights.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises UserError where names or shapes differ; ValueError for what is no count."""
        updates, mine = state["updates"], self.state_dict()
        if not (type(updates) is int and 0 <= updates < 2**53):
            raise ValueError(f"updates = {updates!r:.50}")
        for key in sorted((mine.keys() | state.keys()) - {"updates"}):
            both = mine.get(key), state.get(key)
            kinds = [(t.dtype, tuple(t.shape)) if isinstance(t, Tensor) else None for t in both]
            if kinds[0] != kinds[1]:
                difference = ", here ".join("nothing" if kind is None else f"{kind[0]} {kind[1]}" for kind in reversed(kinds))
                raise UserError(f"the saved averages do not fit this run: {key} is {difference}")
        for name, tensor in self.weights.items():
            tensor.copy_(state[OF + name])
        self.updates = updates


def described(decay: float) -> str:
    """What adapter files say of it."""
    return f"constant, decay {decay:g}"
