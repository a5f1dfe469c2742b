"""The libraries' optimizers: how each is imported (lazily), how it is built, and the layout of its state."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer.optim.parameters import ALIGNMENT

MIN_8BIT_SIZE = 4096  # elements: a smaller group keeps its state in fp32, as in bitsandbytes
Groups = Sequence[Mapping[str, Any]]
# A parameter's state by key: a tensor without values, or an example of a number.
StateLayout = dict[str, Any]


@dataclass(frozen=True)
class Finds:
    """An optimizer that finds its rate, as Prodigy does (arXiv 2306.06101): options of its library, and a key of its groups.

    lr: bounds of optimizer.lr. start: the option with the first estimate. factor: the option that multiplies the estimate.
    guard: the option that leaves the schedule's low rates out of it. estimate: the key of the groups.
    """

    lr: tuple[float, float] = (0.1, 10.0)
    start: str = "d0"
    factor: str = "d_coef"
    guard: str = "safeguard_warmup"
    estimate: str = "d"


def like(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor on the meta device: a shape and a dtype without values."""
    return torch.empty(shape, dtype=dtype, device="meta")


def imported(module: str, name: str) -> Callable[[], type]:
    """A function that imports a library's module and returns its optimizer `name`."""
    return lambda: getattr(importlib.import_module(module), name)


# --- builders: (class, groups, keywords) -> optimizer -----------------------------------------------------------------


def plain(library: type, groups: Groups, keys: dict[str, Any]) -> torch.optim.Optimizer:
    """The library's optimizer with exactly these keywords."""
    return library(groups, **keys)


def blockwise(library: type, groups: Groups, keys: dict[str, Any]) -> torch.optim.Optimizer:
    """An optimizer of bitsandbytes, for flat parameters. Magnitudes and small groups keep their state in fp32."""
    import bitsandbytes

    def bits(group: Mapping[str, Any]) -> int:
        small = sum(parameter.numel() for parameter in group["params"]) < MIN_8BIT_SIZE
        return 32 if group["magnitudes"] or small else 8

    optimizer = library([{**group, "bits": bits(group)} for group in groups], min_8bit_size=MIN_8BIT_SIZE, **keys)
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    for group in optimizer.param_groups:
        # Every group, also of 32 bits: the manager remembers addresses and ids of freed parameters, which are used again.
        manager.override_config(group["params"], "optim_bits", group["bits"])
    manager.register_parameters(optimizer.param_groups)
    return optimizer


def counting(library: type, groups: Groups, keys: dict[str, Any]) -> torch.optim.Optimizer:
    """An optimizer of pytorch-optimizer, not batched over a group on a CPU: temporaries would be as large as the group."""
    optimizer = library(groups, foreach=groups[0]["params"][0].device.type != "cpu", **keys)
    for group in optimizer.param_groups:
        group.setdefault("step", 0)
    return optimizer


def prodigy(library: type, groups: Groups, keys: dict[str, Any]) -> torch.optim.Optimizer:
    """pytorch-optimizer's Prodigy, with its numerator as a tensor from the start."""
    optimizer = counting(library, groups, keys)
    for group in optimizer.param_groups:
        group["d_numerator"] = torch.zeros(1, device=group["params"][0].device)
    return optimizer


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the matrices, AdamW for the magnitudes: torch's own, over one list of groups and one state."""

    def __init__(self, groups: Groups, betas: tuple[float, float], eps: float, **keys: Any) -> None:
        super().__init__(groups, {})
        self.parts: dict[bool, torch.optim.Optimizer] = {}  # by whether it trains magnitudes
        if weights := self._groups(magnitudes=False):
            self.parts[False] = torch.optim.Muon(weights, **keys)
        if vectors := self._groups(magnitudes=True):
            self.parts[True] = torch.optim.AdamW(vectors, betas=betas, eps=eps, fused=True)
        for part in self.parts.values():
            part.state = self.state

    def _groups(self, *, magnitudes: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["magnitudes"] == magnitudes]

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One update by both."""
        for magnitudes, part in self.parts.items():
            part.param_groups = self._groups(magnitudes=magnitudes)  # a step may leave some out
            part.step()


def muon(library: type, groups: Groups, keys: dict[str, Any]) -> torch.optim.Optimizer:
    """Muon for the matrices, torch's AdamW for the magnitudes; betas and eps are AdamW's."""
    adamw = {"betas": (0.9, 0.999), "eps": 1e-8} | {key: keys[key] for key in ("betas", "eps") if key in keys}
    return MuonAdamW(groups, **keys | adamw)


def paged(optimizer: Any, parameter: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """A loaded state of bitsandbytes, in memory that a GPU pages."""
    if not parameter.is_cuda:
        return state
    return {
        key: optimizer.get_state_buffer(parameter, dtype=value.dtype).copy_(value) if key in ("state1", "state2") else value
        for key, value in state.items()
    }


# --- state: (shape, the parameter's group) -> layouts; an update makes the first --------------------------------------


def adamw_keeps(shape: torch.Size, group: Mapping[str, Any]) -> list[StateLayout]:
    """The layout of AdamW's state."""
    more = {"max_exp_avg_sq": like(*shape)} if group.get("amsgrad") else {}
    return [{"step": like(), "exp_avg": like(*shape), "exp_avg_sq": like(*shape)} | more]


def blockwise_keeps(states: int) -> Callable[[torch.Size, Mapping[str, Any]], list[StateLayout]]:
    """The layouts of a state with `states` moments, in 8 and in 32 bits: a loaded state keeps its format."""

    def keeps(shape: torch.Size, group: Mapping[str, Any]) -> list[StateLayout]:
        codes, scales = like(*shape, dtype=torch.uint8), like(shape.numel() // ALIGNMENT)
        numbers = range(1, states + 1)
        small = {f"{key}{i}": t for i in numbers for key, t in {"state": codes, "qmap": like(256), "absmax": scales}.items()}
        full = {f"state{i}": like(*shape) for i in numbers}
        layouts = [{"step": 1} | small, {"step": 1} | full]
        return layouts if group["bits"] == 8 else layouts[::-1]

    return keeps


def keeps(*keys: str) -> Callable[[torch.Size, Mapping[str, Any]], list[StateLayout]]:
    """The layout of tensors shaped like the parameter, one for each key."""
    return lambda shape, group: [{key: like(*shape) for key in keys}]


def _factors(shape: torch.Size, name: str) -> StateLayout:
    return {f"{name}_row": like(*shape[:-1]), f"{name}_col": like(*shape[:-2], shape[-1])}


def _squares(shape: torch.Size) -> StateLayout:
    return _factors(shape, "exp_avg_sq") if len(shape) > 1 else {"exp_avg_sq": like(*shape)}


def adafactor_keeps(shape: torch.Size, group: Mapping[str, Any]) -> list[StateLayout]:
    """The layout of Adafactor's state."""
    momentum = {} if group["beta1"] is None else {"exp_avg": like(*shape)}
    return [{"step": 1, "RMS": like()} | _squares(shape) | momentum]


def came_keeps(shape: torch.Size, group: Mapping[str, Any]) -> list[StateLayout]:
    """The layout of CAME's state."""
    squares = _squares(shape) | (_factors(shape, "exp_avg_res") if len(shape) > 1 else {})
    more = {"exp_avg_sq_hat": like(*shape)} if group["ams_bound"] else {}
    return [{"RMS": like(), "exp_avg": like(*shape)} | squares | more]


def muon_keeps(shape: torch.Size, group: Mapping[str, Any]) -> list[StateLayout]:
    """The layout of Muon's state; for magnitudes of AdamW's."""
    return adamw_keeps(shape, group) if group["magnitudes"] else [{"momentum_buffer": like(*shape)}]
