"""An optional piece, here an average of the adapter: saved, restored, and refused where config and checkpoint disagree."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import Workbench
from trainer import config as configs
from trainer.adapters import Adapter
from trainer.base.errors import UserError
from trainer.checkpoint import state, store
from trainer.checkpoint.state import PIECES, Piece, Pieces, Saved
from trainer.config import reading
from trainer.resume import start_point
from trainer.run import run as runs
from workbench.commands import launch

AVERAGE = Piece("average", file="average.safetensors", asked_by="average.decay")


class AverageTable(configs.Table):
    decay: float


class WithAverage(configs.Config):
    average: AverageTable | None = None


class Average:
    """avg = decay * avg + (1 - decay) * parameter after every update; from the adapter as it starts."""

    def __init__(self, adapter: Adapter, decay: float) -> None:
        self.adapter, self.decay, self.updates = adapter, decay, 0
        self.tensors = {name: tensor.clone() for name, tensor in adapter.state_dict().items()}

    def update(self) -> None:
        self.updates += 1
        for name, tensor in self.adapter.state_dict().items():
            self.tensors[name].lerp_(tensor, 1 - self.decay)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, **self.tensors}

    def load_state_dict(self, loaded: dict[str, Any]) -> None:
        self.updates = loaded["updates"]
        self.tensors = {name: loaded[name] for name in self.tensors}


@pytest.fixture
def averaging(monkeypatch) -> None:
    """What a trainer with such a piece has more: a key, a line of the census, and one each to build and update it."""

    def census(config: configs.Config) -> Mapping[str, Piece]:
        return PIECES | ({AVERAGE.name: AVERAGE} if config.average else {})

    def build_adapter(config, components, pieces):
        adapter, *others = build_adapter_alone(config, components, pieces)
        if wanted := config.average:
            average, mark_stale = (pieces.enter("average", Average(adapter, wanted.decay)), adapter.mark_stale)
            monkeypatch.setattr(adapter, "mark_stale", lambda: [mark_stale(), average.update()])
        return adapter, *others

    build_adapter_alone = runs.build_adapter
    monkeypatch.setattr(reading, "Config", WithAverage)
    monkeypatch.setattr(start_point, "census", census)
    monkeypatch.setattr(runs, "build_adapter", build_adapter)


def train(bench: Workbench, out: str, resume_from: str | None = None, **more: Any) -> Path:
    """Returns the last checkpoint."""
    tree = bench.tree(run__output_dir=str(bench.tmp / out), adapter__targets=["*attn1.to_q"], optimizer__lr=1e-2, **more)
    launch.train(configs.parse(tree), resume_from=resume_from)
    return bench.tmp / out / "checkpoints" / f"step-{more.get('run__stop_after', 3):08d}"


@pytest.mark.slow
def test_an_optional_piece_is_saved_and_restored(bench: Workbench, averaging) -> None:
    decay = {"average__decay": 0.5}
    whole = train(bench, "whole", **decay)
    first = train(bench, "parts", run__stop_after=1, **decay)
    last = train(bench, "parts", "auto", **decay)
    names = [AVERAGE.file, "adapter.safetensors", "optimizer.safetensors"]
    assert all((whole / name).read_bytes() == (last / name).read_bytes() for name in names)
    one, three = (Saved(folder, PIECES | {"average": AVERAGE}).state("average") for folder in (first, last))
    assert (one.pop("updates"), three.pop("updates")) == (1, 3)
    adapter = Saved(last, PIECES | {"average": AVERAGE}).state("adapter")
    assert three.keys() == adapter.keys()
    moved = [name for name in three if not torch.equal(three[name], one[name])]
    assert any("lora_B" in name for name in moved) and not any(torch.equal(three[n], adapter[n]) for n in moved)

    plain = train(bench, "plain")
    for name in ("adapter.safetensors", "optimizer.safetensors"):
        assert (plain / name).read_bytes() == (whole / name).read_bytes(), "a piece beside the others changes none of them"
    assert sorted(path.name for path in whole.iterdir()) == sorted([*(p.name for p in plain.iterdir()), AVERAGE.file])


@pytest.mark.slow
@pytest.mark.parametrize("was_asked_for", [True, False])
def test_it_is_refused_where_config_and_checkpoint_disagree(bench: Workbench, averaging, was_asked_for: bool) -> None:
    with_it, without = {"average__decay": 0.5}, dict[str, float]()
    then, now = (with_it, without) if was_asked_for else (without, with_it)
    train(bench, "out", run__stop_after=1, **then)
    remedy = "which average.decay asks for: set average.decay as it was when the run started, or start a new run"
    with pytest.raises(UserError, match=f"step-00000001 {'has' if was_asked_for else 'lacks'} average, {remedy}"):
        train(bench, "out", "auto", **now)


class Stored:
    """A piece of one value and, where it has a file, one tensor."""

    def __init__(self, piece: Piece, value: float) -> None:
        self.values = {"value": value} | ({"tensor": torch.full((3,), value)} if piece.file else {})

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, loaded: dict[str, Any]) -> None:
        self.values = loaded


def filled(
    saved: Saved | None, census: Mapping[str, Piece], value: float, names: Mapping[str, Piece] | None = None
) -> tuple[Pieces, dict[str, Stored]]:
    """names: which pieces of the census are entered; left out: all."""
    pieces = Pieces(saved, census)
    return pieces, {name: pieces.enter(name, Stored(census[name], value)) for name in names or census}


def test_entering_restores_and_leaving_out_raises(tmp_path) -> None:
    census = PIECES | {AVERAGE.name: AVERAGE}
    pieces, _ = filled(None, census, 1.0)
    pieces.complete()
    folder = store.save(tmp_path, 1, pieces.pack())
    again, stored = filled(Saved(folder, census), census, 2.0)
    again.complete()
    for name in census:
        assert stored[name].values["value"] == 1.0, name
        assert not census[name].file or stored[name].values["tensor"].tolist() == [1.0] * 3, name
    for saved in (None, Saved(folder, census)):
        short, _ = filled(saved, census, 2.0, PIECES)
        with pytest.raises(ValueError, match="never entered: average"):
            short.complete()
    with pytest.raises(ValueError, match="average"):
        short.pack()
    with pytest.raises(ValueError, match="not restored: average"):
        filled(Saved(folder, census), PIECES, 2.0)[0].complete()


def test_a_run_without_optional_pieces_has_no_entry_for_them() -> None:
    plain = filled(None, PIECES, 1.0)[0].pack()
    assert b"asked_by" not in b"".join(map(bytes, plain[state.STATE]))
