"""The census of a checkpoint's pieces: each there and back, and none left out without a word."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
import torch
from torch import nn

from trainer import optim
from trainer.adapters import Method, Target, inject
from trainer.adapters.kinds import KINDS
from trainer.base import files
from trainer.base.errors import UserError
from trainer.checkpoint import state, store
from trainer.ema import Average
from trainer.kernels import dora_torch
from trainer.quantization import FORMATS, FrozenConv2d, FrozenLinear
from trainer.runtime.precision import ScalerState


class Piece:
    """A provider with something to forget."""

    def __init__(self, **state) -> None:
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state) -> None:
        self.state = state


def census() -> dict[str, Piece]:
    pieces = {name: Piece(value=name) for name in state.PIECES}
    for name in state.TENSOR_FILES:
        pieces[name].state["tensor"] = torch.arange(5.0)
    return pieces


def test_every_piece_goes_there_and_back(tmp_path) -> None:
    before, after = census(), {name: Piece() for name in state.PIECES}
    contents = state.pack(before)
    for name in state.TENSOR_FILES:
        before[name].state["tensor"].zero_()  # the training goes on while the snapshot is written
    saved = state.Saved(store.save(tmp_path, 1, contents), state.PIECES)
    saved.restore(**after)
    saved.finish()
    for name, piece in after.items():
        assert piece.state["value"] == name
        assert name not in state.TENSOR_FILES or torch.equal(piece.state["tensor"], torch.arange(5.0))


@pytest.mark.parametrize("name", sorted(state.PIECES))
def test_leaving_out_any_piece_raises(tmp_path, name: str) -> None:
    whole = census()
    without = {key: piece for key, piece in whole.items() if key != name}
    with pytest.raises(ValueError, match=name):
        state.pack(without)
    folder = store.save(tmp_path, 1, state.pack(whole))
    saved = state.Saved(folder, state.PIECES)
    saved.restore(**without)
    with pytest.raises(ValueError, match=f"not restored: {name}"):
        saved.finish()
    tree = json.loads((folder / "state.json").read_text())
    for change, expected in (
        (lambda pieces: pieces.pop(name), f"lacks {name}"),
        (lambda pieces: pieces.update(ema={"version": 1, "state": {}}), "unknown piece, ema"),
        (lambda pieces: pieces[name].update(version=2), f"{name} has version 2, this version reads 1"),
    ):
        changed = copy.deepcopy(tree)
        change(changed["pieces"])
        (folder / "state.json").write_bytes(files.json_bytes(changed))
        with pytest.raises(UserError, match=expected):
            state.Saved(folder, state.PIECES)


@pytest.mark.parametrize("layout", [5, 7, "6", True, None])
def test_a_checkpoint_of_another_layout_is_refused(tmp_path, layout) -> None:
    """By its number, with the one that is read, and what to do. Also where all pieces are those of the present one."""
    folder = store.save(tmp_path, 1, state.pack(census()))
    (folder / "state.json").write_bytes(files.json_bytes(files.read_json(folder / "state.json") | {"layout": layout}))
    said = f"{folder} has checkpoint layout {layout!r}, this version reads layout 6; go on with the version that wrote it"
    for wanted in (None, state.PIECES):
        with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
            state.Saved(folder, wanted)


def test_progress_counts_and_says_what_changed() -> None:
    progress = state.Progress(step=3, images=6, non_finite=0, total_steps=9, started="2025-01-01T00:00:00+00:00")
    sound = progress.state_dict()
    change = {"step": 2, "what": ["optimizer.lr: 1 -> 2"], "epoch": 1}
    progress.load_state_dict(sound | {"step": 4, "changes": [change]})
    assert progress.step == 4 and progress.began == (2, 1)
    for odd in (
        {"step": -1}, {"images": 1.0}, {"non_finite": True}, {"total_steps": 2**53}, {"started": "yesterday"},
        {"changes": [change | {"step": 5}]}, {"changes": [change | {"epoch": -1}]}, {"changes": [change | {"what": "all"}]},
        {"changes": [change | {"what": [1]}]}, {"log": None},
    ):  # fmt: skip
        with pytest.raises(ValueError):
            progress.load_state_dict(sound | {"step": 4} | odd)
    assert progress.step == 4, "nothing of it was taken"
    del sound["log"]
    progress.load_state_dict(sound)
    assert progress.log == "", "a checkpoint of an earlier version has no digest of the log"


@pytest.mark.parametrize("error", [KeyError("a"), TypeError("b"), ValueError("c"), AttributeError("d"), RecursionError("e")])
def test_a_state_that_does_not_fit_is_the_users_to_mend(tmp_path, error: Exception) -> None:
    saved = state.Saved(store.save(tmp_path, 1, state.pack(census())), state.PIECES)

    class Odd(Piece):
        def load_state_dict(self, state) -> None:
            raise error

    with pytest.raises(UserError, match="the state of progress does not fit"):
        saved.restore(progress=Odd())


# What has nothing to bring back: pins, which must be now what they were then, and what is made for people.
COMPARED = {"config", "data", "environment", "model", "norms", "origin", "quantization"}


def of_a_run(updates: int) -> dict[str, Any]:
    """The pieces that a run goes on with, as trainer/run/run.py enters them, of a DoRA after so many updates."""
    layer = FrozenLinear(12, 10, bias=True, format=FORMATS["fp8_e4m3"], compute_dtype=torch.float32, kernels=dora_torch)
    layer.load_weight(torch.randn(10, 12, generator=torch.Generator().manual_seed(0)))
    layer.bias.data.zero_()
    adapter = inject(
        {"net": nn.Sequential(layer)},
        [Target("net", "0", 4, 8.0)],
        bases=(FrozenLinear, FrozenConv2d),
        method=Method(KINDS["dora"]),
        seed=0,
    )
    named = adapter.named_parameters()
    groups = [
        {"params": [p for name, p in named.items() if name.endswith("vector") == magnitudes], "lr": 1e-2,
         "weight_decay": 0.1, "magnitudes": magnitudes}
        for magnitudes in (False, True)
    ]  # fmt: skip
    optimizer = optim.build_optimizer("adamw", groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 1 / (n + 1)] * 2)
    pieces = {
        "adapter": adapter,
        "ema": Average(named, 0.5, adapter.mark_stale),
        "optimizer": optim.OptimizerState(optimizer, "adamw"),
        "progress": state.Progress(step=0, images=0, non_finite=0, total_steps=9, started="2025-01-01T00:00:00+00:00"),
        "scaler": ScalerState(torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)),
        "schedule": optim.ScheduleState(schedule),
    }
    for _ in range(updates):
        update(pieces)
    return pieces


def update(pieces: dict[str, Any]) -> None:
    optimizer, scaler, progress = pieces["optimizer"].optimizer, pieces["scaler"].scaler, pieces["progress"]
    for parameter in pieces["adapter"].named_parameters().values():  # what fills up a flat group has no gradient
        parameter.grad.copy_(scaler.scale(parameter.detach().sin() + 0.1))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    pieces["ema"].update()
    pieces["schedule"].schedule.step()
    progress.step += 1
    progress.images += 2
    progress.changes.append({"step": progress.step, "what": ["photos"], "epoch": None})


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else bool(a == b)

    return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())


def test_each_piece_of_a_run_comes_back_from_its_file_and_goes_on_from_there(tmp_path) -> None:
    """After five updates, in which the loss scale rose once: the same state, and the same one after two more."""
    census = state.PIECES | {"ema": state.Piece("ema", file="ema.safetensors", asked_by="ema.kind")}
    one, other = of_a_run(5), of_a_run(0)
    assert census.keys() == one.keys() | COMPARED, "a piece that nothing here brings back"
    compared = []
    pins = {name: state.Pin({"value": name}, lambda then, now: compared.append(then == now)) for name in COMPARED}
    saved = state.Saved(store.save(tmp_path, 5, state.pack(one | pins, census)), census)
    for name in one:
        assert not same(dict(one[name].state_dict()), dict(other[name].state_dict())), f"{name}: nothing to bring back"
    saved.restore(**other, **pins)
    saved.finish()
    assert compared == [True] * len(COMPARED)
    for more in (0, 2):
        for _ in range(more):
            update(one), update(other)
        for name in one:
            assert same(dict(one[name].state_dict()), dict(other[name].state_dict())), (name, more)
