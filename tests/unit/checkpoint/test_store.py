"""The checkpoint store. What faults and damage do: integration/test_commit_protocol.py, integration/test_mutated_files.py."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from trainer.checkpoint import store
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
