"""The checkpoint store and the census. What faults and damage do: test_commit_protocol.py, test_mutated_files.py."""

from __future__ import annotations

import copy
import errno
import json
import os
import stat

import pytest
import torch

from trainer import files
from trainer.checkpoint import state, store
from trainer.errors import UserError

FILES = {"adapter.safetensors": b"a" * 100, "state.json": b"{}"}


def save(root, step: int) -> None:
    store.save(root, step, {name: [data] for name, data in FILES.items()})


def test_newest_valid_and_prune(tmp_path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (tmp_path / ".step-00000009.new.tmp").mkdir()
    store.prune(tmp_path, 2)
    store.remove_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    (tmp_path / "step-00000004" / "state.json").write_bytes(b"[]")
    folder, passed = store.newest_valid(tmp_path)
    assert folder.name == "step-00000003" and "state.json does not match" in passed[0]
    with pytest.raises(OSError, match=r"does not read back \(state.json does not match .*step-00000004"):
        store.prune(tmp_path, 1)
    assert store.steps(tmp_path) == [3, 4], "nothing is deleted while the newest is not valid"


def test_files_and_folders_keep_the_umasks_mode(tmp_path) -> None:
    before = os.umask(0o027)
    try:
        save(tmp_path / "checkpoints", 1)
    finally:
        os.umask(before)
    folder = tmp_path / "checkpoints" / "step-00000001"
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder.parent, folder, *folder.iterdir())}
    assert modes == {"checkpoints": 0o750, folder.name: 0o750, **dict.fromkeys([*FILES, store.MANIFEST], 0o640)}


def test_find(tmp_path) -> None:
    assert store.find(tmp_path, None) == store.find(tmp_path, "auto") == (None, [])
    with pytest.raises(UserError, match="use --resume_from auto"):
        store.find(tmp_path, "latest")
    save(tmp_path, 5)
    assert store.find(tmp_path, "latest")[0].name == "step-00000005"
    (tmp_path / "step-00000005" / "manifest.json").unlink()
    with pytest.raises(UserError, match="manifest.json is missing"):
        store.find(tmp_path, "auto")


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
    saved = state.Saved(store.save(tmp_path, 1, contents))
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
    saved = state.Saved(folder)
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
            state.Saved(folder)
    (folder / "state.json").write_bytes(files.json_bytes(tree | {"layout": 2}))
    with pytest.raises(UserError, match="layout 2, this version reads 4; go on with the version that wrote it"):
        state.Saved(folder)


@pytest.mark.skipif(os.name == "nt", reason="folders cannot be opened there at all")
def test_file_systems_that_cannot_sync_a_folder_hold_checkpoints_too(tmp_path, monkeypatch) -> None:
    fsync = os.fsync

    def without_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", without_folders)
    for step in (1, 2):
        save(tmp_path / "new" / "checkpoints", step)
    store.prune(tmp_path / "new" / "checkpoints", 1)
    assert store.newest_valid(tmp_path / "new" / "checkpoints")[0].name == "step-00000002"
