"""What a run is made of, and how it becomes files: every piece by name, none optional.

adapter.safetensors, optimizer.safetensors: tensors. state.json: counters, schedule, loss scaler, optimizer scalars, the
resolved config. quantization.json: what the frozen base is stored as, payload hashes included. No pickle anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.errors import UserError
from trainer.tensorfile import TensorFile, serialize

LAYOUT_VERSION = 2
_SEPARATOR = "|"  # between a group's name and an optimizer's key for it


@dataclass
class Progress:
    """Where a run stands. step: attempted updates; images: samples seen; total_steps: the schedule's frozen length;
    started: ISO date and time of the first start (UTC)."""

    step: int
    images: int
    total_steps: int
    started: str


def optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors, scalars) of the optimizer's state, keyed 'group.INDEX|KEY': one flat parameter a group."""
    tensors, scalars = {}, {}
    for name, parameter in _parameters(optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            (tensors if isinstance(value, torch.Tensor) else scalars)[name + _SEPARATOR + key] = value
    return tensors, scalars


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]
) -> None:
    """The inverse of `optimizer_state`. Set directly: `load_state_dict` would cast 8-bit states and step counters."""
    by_name: dict[str, dict[str, Any]] = {}
    for key, value in {**tensors, **scalars}.items():
        name, _, state_key = key.rpartition(_SEPARATOR)
        by_name.setdefault(name, {})[state_key] = value
    parameters = dict(_parameters(optimizer))
    unknown = sorted(by_name.keys() - parameters.keys())
    if unknown:
        raise UserError(f"the checkpoint's optimizer state has {unknown[0]!r}, which this run does not train")
    for name, parameter in parameters.items():
        state = by_name.get(name, {})
        if by_name and not state:
            raise UserError(f"the checkpoint has no optimizer state for {name}, which this run trains")
        for key in ("exp_avg", "exp_avg_sq", "state1", "state2"):
            if key in state and state[key].numel() != parameter.numel():
                raise UserError(
                    f"the checkpoint's optimizer state {name}{_SEPARATOR}{key} has {state[key].numel()} elements, "
                    f"this run's adapter {parameter.numel()}"
                )
        optimizer.state[parameter] = {
            key: value.to(parameter.device) if isinstance(value, torch.Tensor) else value
            for key, value in state.items()
        }


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for index, group in enumerate(optimizer.param_groups):
        (parameter,) = group["params"]
        yield f"group.{index}", parameter


def pack(
    *,
    progress: Progress,
    adapter: Mapping[str, torch.Tensor],
    optimizer: tuple[Mapping[str, torch.Tensor], Mapping[str, Any]],
    schedule: Mapping[str, Any],
    scaler: Mapping[str, Any],
    quantization: Mapping[str, Any],
    config: Mapping[str, Any],
    data: Mapping[str, Any],
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """The checkpoint's files as pieces of bytes, by name."""
    tensors, scalars = optimizer
    state = {
        "layout": LAYOUT_VERSION,
        "progress": asdict(progress),
        "schedule": dict(schedule),
        "scaler": dict(scaler),
        "optimizer_scalars": dict(scalars),
        "optimizer_tensors": sorted(tensors),
        "versions": dict(versions),
        "config": dict(config),
        "data": dict(data),
    }
    return {
        "adapter.safetensors": serialize(adapter),
        "optimizer.safetensors": serialize(tensors),
        "state.json": [_json(state)],
        "quantization.json": [_json(quantization)],
    }


def _json(tree: Any) -> bytes:
    return (json.dumps(tree, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


@dataclass(frozen=True)
class Saved:
    """A checkpoint read back."""

    progress: Progress
    adapter: dict[str, torch.Tensor]
    optimizer_tensors: dict[str, torch.Tensor]
    optimizer_scalars: dict[str, Any]
    schedule: dict[str, Any]
    scaler: dict[str, Any]
    quantization: dict[str, Any]
    config: dict[str, Any]
    data: dict[str, Any]


def read_header(folder: Path) -> tuple[Progress, dict[str, Any]]:
    """(progress, resolved config) of a checkpoint, without its tensors."""
    state = _read_state(folder)
    return Progress(**state["progress"]), state["config"]


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{folder} lacks state.json; it is not a checkpoint of this trainer") from error
    if state.get("layout") != LAYOUT_VERSION:
        raise UserError(
            f"{folder} has checkpoint layout {state.get('layout')}, this version reads {LAYOUT_VERSION}; "
            "go on with the version that wrote it"
        )
    return state


def unpack(folder: Path) -> Saved:
    """Read a verified checkpoint. Raises UserError where a piece is missing or of another layout."""
    state = _read_state(folder)
    try:
        optimizer_tensors = TensorFile(folder / "optimizer.safetensors").read_all()
        if sorted(optimizer_tensors) != state["optimizer_tensors"]:
            odd = sorted(optimizer_tensors.keys() ^ set(state["optimizer_tensors"]))
            raise UserError(f"{folder}: optimizer.safetensors does not hold what state.json lists: {', '.join(odd)}")
        return Saved(
            progress=Progress(**state["progress"]),
            adapter=TensorFile(folder / "adapter.safetensors").read_all(),
            optimizer_tensors=optimizer_tensors,
            optimizer_scalars=state["optimizer_scalars"],
            schedule=state["schedule"],
            scaler=state["scaler"],
            quantization=json.loads((folder / "quantization.json").read_text(encoding="utf-8")),
            config=state["config"],
            data=state["data"],
        )
    except (KeyError, TypeError, FileNotFoundError) as error:
        raise UserError(f"{folder} lacks a piece of the run's state: {error}") from error


def check_data(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on over other photos or another global batch: every later step would see other samples."""
    if saved["photos"] != now["photos"]:
        raise UserError(
            "the photos, captions or repeats are not those of the checkpoint; restore them, or start a new run "
            "(another run.output_dir)"
        )
    if saved["micro_batches"] != now["micro_batches"]:
        raise UserError(
            f"an update had {saved['micro_batches']} micro-batches (accumulation x processes), now it has "
            f"{now['micro_batches']}; start as many processes as before, or change step.accumulation to match"
        )


def check_quantization(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on over a base that is not bit-equal to the saved one, naming the first layer that differs.

    Another version of a library is none, where it gives the same bytes.
    """
    for name in sorted(saved.keys() | now.keys()):
        then, today = dict(saved.get(name, {})), dict(now.get(name, {}))
        libraries = then.pop("library", None), today.pop("library", None)
        for each in (then, today):
            each.pop("relative_error", None)  # measured, not compared: its sums depend on the device
        if then != today:
            how = (
                "is not there now" if name not in now
                else "was not there then" if name not in saved
                else f"is stored as {then.get('format')} in the checkpoint, as {today.get('format')} now"
                if then.get("format") != today.get("format")
                else "has other bytes now: the model's file changed" if libraries[0] == libraries[1]
                else f"has other bytes now: the model's file or the library changed ({libraries[0]} then, {libraries[1]} now)"
            )  # fmt: skip
            raise UserError(f"the checkpoint's frozen base differs: {name} {how}; restore it, or start a new run")
