"""The table of optimizers. A new one is a line here, and the functions that it names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer import patterns
from trainer.errors import UserError

Groups = Sequence[Mapping[str, Any]]
ALIGNMENT = 256  # elements: the block of 8-bit optimizers, so that no block spans two parameters


@dataclass(frozen=True)
class Entry:
    """One entry of the table.

    build: (groups, **keys) -> the optimizer. groups: {"params", "lr", "weight_decay", "magnitudes"}, laid out as `flat`
    says; keys: those of the config's table.
    layouts: what it keeps for a parameter of a shape, {key: kind (state.kind)}; any one of the given alternatives.
    flat: its parameters are one flat tensor for each group; False where it needs their shapes.
    shared: of a flat parameter's state, what is there once and not for each of its blocks of ALIGNMENT elements.
    group_keys: what changes in its groups, for example Prodigy's "d". Not "lr": the schedule sets it after every update.
    cpu_scratch: bytes that an update takes for a moment on a CPU, for each element of its largest parameter.
    modes: it has train() and eval(), as schedule-free optimizers: gradients are taken at other weights than those that are
    used. Both change parameters, and no state.
    """

    build: Callable[..., torch.optim.Optimizer]
    layouts: Callable[[torch.Size], Sequence[Mapping[str, str]]]
    flat: bool = True
    shared: tuple[str, ...] = ("step",)
    group_keys: tuple[str, ...] = ()
    cpu_scratch: int = 0
    modes: bool = False


def _adamw(groups: Groups, *, betas: tuple[float, float], eps: float, **_: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, betas=betas, eps=eps, fused=True)


def _adamw_layouts(shape: torch.Size) -> list[dict[str, str]]:
    flat = f"torch.float32 {list(shape)}"
    return [{"step": "torch.float32 []", "exp_avg": flat, "exp_avg_sq": flat}]


def _adamw8bit(groups: Groups, *, betas: tuple[float, float], eps: float, min_8bit_size: int) -> torch.optim.Optimizer:
    """The state of magnitudes stays fp32."""
    import bitsandbytes as bnb

    optimizer = bnb.optim.AdamW8bit(groups, betas=betas, eps=eps, min_8bit_size=min_8bit_size)
    manager = bnb.optim.GlobalOptimManager.get_instance()
    for group in optimizer.param_groups:
        # All are told: it remembers places and ids of parameters that are gone, which come again.
        manager.override_config(group["params"], "optim_bits", 32 if group["magnitudes"] else 8)
    manager.register_parameters(optimizer.param_groups)
    return optimizer


def _adamw8bit_layouts(shape: torch.Size) -> list[dict[str, str]]:
    """In 32 and in 8 bit."""
    flat, codes = f"torch.float32 {list(shape)}", f"torch.uint8 {list(shape)}"
    map_, scales = "torch.float32 [256]", f"torch.float32 [{shape.numel() // ALIGNMENT}]"
    eight_bit = {f"{key}{i}": kind for i in "12" for key, kind in {"state": codes, "qmap": map_, "absmax": scales}.items()}
    return [{"step": "count", "state1": flat, "state2": flat}, {"step": "count"} | eight_bit]


OPTIMIZERS = {
    "adamw": Entry(_adamw, _adamw_layouts),
    # bitsandbytes decodes and encodes the whole state on a CPU.
    "adamw8bit": Entry(_adamw8bit, _adamw8bit_layouts, shared=("step", "qmap1", "qmap2"), cpu_scratch=20),
}


def padded(elements: int) -> int:
    """What a parameter of so many elements takes of a flat one."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


def flatten(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """One fp32 parameter whose slices the given ones become, gradients included. These are there from the start, zero.

    An adapter is hundreds of small tensors. Flat, they take one kernel each for the update, the norm, the clipping and the
    reduction over processes.
    """
    starts, total = [], 0
    for parameter in parameters:
        starts.append(total)
        total += padded(parameter.numel())
    flat = nn.Parameter(torch.zeros(total, dtype=torch.float32, device=parameters[0].device))
    flat.grad = torch.zeros_like(flat)
    for parameter, start in zip(parameters, starts, strict=True):
        assert parameter.dtype == torch.float32
        piece = slice(start, start + parameter.numel())
        flat.data[piece].copy_(parameter.data.reshape(-1))
        parameter.data = flat.data[piece].view(parameter.shape)
        parameter.grad = flat.grad[piece].view(parameter.shape)
    return [flat]


def shaped(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """The given ones where they lie."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return list(parameters)


def optimizer_named(name: str) -> Entry:
    """Raises UserError, with the name that was probably meant."""
    if name not in OPTIMIZERS:
        raise UserError(f"optimizer.name = {name!r} is not known; {patterns.meant(name, OPTIMIZERS)}")
    return OPTIMIZERS[name]


def build_optimizer(name: str, groups: Groups, **keys: Any) -> torch.optim.Optimizer:
    """groups, keys: as `Entry.build` takes them. The parameters get gradients, to be zeroed in place, never set to None."""
    entry = optimizer_named(name)
    lay_out = flatten if entry.flat else shaped
    optimizer = entry.build([{**group, "params": lay_out(group["params"])} for group in groups], **keys)
    if entry.modes:
        optimizer.train()  # type: ignore[attr-defined]
    return optimizer


def state_bytes(name: str, groups: Groups, **keys: Any) -> int:
    """Of what the optimizer keeps after an update of parameters of these sizes: of its own step, on tensors without values.

    groups, keys: as of `build_optimizer`, whose parameters may be laid out already.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):  # bitsandbytes keeps tables of its codes, with values
        copies = [
            {
                "params": [
                    nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype)) for parameter in group["params"]
                ],
                **{key: group[key] for key in ("lr", "weight_decay", "magnitudes")},
            }
            for group in groups
        ]
        copy = build_optimizer(name, copies, **keys)
        copy.step()
        return sum(t.nbytes for state in copy.state.values() for t in state.values() if isinstance(t, torch.Tensor))
