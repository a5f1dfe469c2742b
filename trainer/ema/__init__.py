"""Exponential moving average of the weights: after update n, average <- average + w(n) (weights - average), in fp32, with

    w(n) = 1 - min(decay, (1 + n) / (10 + n)).

This warm-up is that of TensorFlow's ExponentialMovingAverage and diffusers' EMAModel: without it the initial weights, where B
is zero, would have the weight decay^n.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer.base.errors import UserError
from trainer.base.memory import preserved

OF = "constant|"  # prefix of the tensors' names in a checkpoint


class Average:
    """The piece "ema" of a checkpoint, fp32. parameters: by name, in their final storage (an optimizer may have flattened
    them). changed: called after they are changed. weights: the averages, by name."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float, changed: Callable[[], object]) -> None:
        self.decay, self.changed, self.updates = decay, changed, 0
        self.parameters = list(parameters.values())
        self.weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Update the average; call it after every update that changed the parameters."""
        self.updates += 1
        share = 1 - min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(list(self.weights.values()), self.parameters, share)

    @contextmanager
    def used(self) -> Iterator[None]:
        """A block in which the parameters are the average; afterwards they are restored bit for bit."""
        with preserved(self.parameters, self.changed):
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, list(self.weights.values()))
            self.changed()
            yield

    def state_dict(self) -> dict[str, Any]:
        """The averages by "constant|PARAMETER", and the number of updates."""
        return {"updates": self.updates, **{OF + name: tensor for name, tensor in self.weights.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the average. Raises UserError if names or shapes differ; ValueError if `updates` is no count."""
        updates, current = state["updates"], self.state_dict()
        if not (type(updates) is int and 0 <= updates < 2**53):
            raise ValueError(f"updates = {updates!r:.50}")
        for key in sorted((current.keys() | state.keys()) - {"updates"}):
            pair = current.get(key), state.get(key)
            kinds = [(t.dtype, tuple(t.shape)) if isinstance(t, Tensor) else None for t in pair]
            if kinds[0] != kinds[1]:
                difference = ", here ".join("nothing" if kind is None else f"{kind[0]} {kind[1]}" for kind in reversed(kinds))
                raise UserError(f"the saved averages do not fit this run: {key} is {difference}")
        for name, tensor in self.weights.items():
            tensor.copy_(state[OF + name])
        self.updates = updates


def described(decay: float) -> str:
    """The average's description in adapter files."""
    return f"constant, decay {decay:g}"
