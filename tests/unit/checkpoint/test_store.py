"""The checkpoint store. What faults and damage do: integration/test_commit_protocol.py, integration/test_mutated_files.py."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat

import pytest

from trainer.base import files
from trainer.base.errors import UserError
from trainer.base.files import json_bytes
from trainer.checkpoint import store

FILES = {"adapter.safetensors": b"a" * 100, "state.json": b"{}"}


def save(root, step: int, state: bytes = FILES["state.json"], **how) -> None:
    store.save(root, step, {name: [data] for name, data in (FILES | {"state.json": state}).items()}, **how)


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


@pytest.mark.parametrize("older", [False, True], ids=["alone", "with an older one"])
def test_another_checkpoint_of_a_step_sets_the_first_aside(tmp_path, monkeypatch, older) -> None:
    if older:
        save(tmp_path, 2)
    save(tmp_path, 3)
    first = {path.name: path.read_bytes() for path in (tmp_path / "step-00000003").iterdir()}
    for name in ("superseded-step-00000003", "superseded-step-00000003-2"):
        save(tmp_path, 3, name.encode(), instead=True)
        assert store.problem(tmp_path / "step-00000003") is None
        assert (tmp_path / "step-00000003" / "state.json").read_bytes() == name.encode()
        assert store.problem(tmp_path / name) is None
    assert {path.name: path.read_bytes() for path in (tmp_path / "superseded-step-00000003").iterdir()} == first
    # Killed between the two renames, with one older checkpoint and with none: nothing is lost.
    replace, calls = os.replace, []

    def killed(*names):
        calls.append(names)
        if len(calls) == 2:
            raise KeyboardInterrupt
        replace(*names)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 3, b"third", instead=True)
    assert store.problem(tmp_path / "superseded-step-00000003-3") is None
    found, (told,) = store.find(tmp_path, "auto")
    assert (found / "state.json").read_bytes() == b"third"
    assert told == f"{found} is whole: a kill came before it had its name, which it gets now"
    monkeypatch.undo()
    assert store.settle(tmp_path) == {found: tmp_path / "step-00000003"} and not found.exists()
    assert store.find(tmp_path, "auto") == (tmp_path / "step-00000003", [])


def test_what_is_set_aside_again_and_again_does_not_pile_up(tmp_path) -> None:
    """Starts that are repeated from one step: of each later step the first copy and the newest stay, none of them twice."""

    def names() -> list[str]:
        return sorted(path.name.removeprefix("superseded-") for path in tmp_path.glob("superseded-*"))

    for times in range(3):
        for step in (1, 2, 3):
            save(tmp_path, step)
        assert len(store.set_aside(tmp_path, after=1)) == (2 if times == 0 else 0)
        assert names() == ["step-00000002", "step-00000003"], "the same bytes are there"
    for number in range(2, 13):
        save(tmp_path, 3, b"%d" % number)
        assert [path.name for path in store.set_aside(tmp_path, after=1)] == [f"superseded-step-00000003-{number}"]
        assert names() == ["step-00000002", "step-00000003", f"step-00000003-{number}"]
    assert (tmp_path / "superseded-step-00000003-12" / "state.json").read_bytes() == b"12"
    # A copy that is damaged is none.
    (tmp_path / "superseded-step-00000002" / "state.json").write_bytes(b"[]")
    save(tmp_path, 2)
    assert [path.name for path in store.set_aside(tmp_path, after=1)] == ["superseded-step-00000002-2"]
    # In its own place: a copy is no other checkpoint.
    for _ in range(2):
        save(tmp_path, 1, b"another", instead=True)
        assert names()[:2] == ["step-00000001", "step-00000002"]
    assert not list(tmp_path.glob(".*"))


def relisted(folder, edit) -> None:
    """Another manifest, in the form that is written."""
    listed = json.loads((folder / store.MANIFEST).read_bytes())["files"]
    edit(listed)
    (folder / store.MANIFEST).write_bytes(json_bytes({"files": listed}))


def outside(folder) -> None:
    (folder.parent / "secret").write_bytes(b"a" * 100)
    relisted(folder, lambda listed: listed.update({"../secret": listed["adapter.safetensors"]}))


def absolute(folder) -> None:
    relisted(folder, lambda listed: listed.update({str(folder / "adapter.safetensors"): listed["adapter.safetensors"]}))


def pipe(folder) -> None:
    nothing = {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}
    os.mkfifo(folder / "pipe")
    relisted(folder, lambda listed: listed.update(pipe=nothing))


def pipe_for_a_manifest(folder) -> None:
    (folder / store.MANIFEST).unlink()
    os.mkfifo(folder / store.MANIFEST)


def unlisted(folder) -> None:
    relisted(folder, lambda listed: listed.pop("adapter.safetensors"))
    (folder / "adapter.safetensors").write_bytes(b"b" * 100)


def without_the_adapter(folder) -> None:
    relisted(folder, lambda listed: listed.pop("adapter.safetensors"))
    (folder / "adapter.safetensors").unlink()


def without_the_state(folder) -> None:
    relisted(folder, lambda listed: listed.pop("state.json"))
    (folder / "state.json").unlink()


EDITED = {
    outside: "manifest.json lists '../secret', which is no name of a file",
    absolute: "adapter.safetensors', which is no name of a file",
    pipe: "pipe is no file",
    pipe_for_a_manifest: "manifest.json is no file",
    unlisted: "manifest.json does not list 'adapter.safetensors'",
    without_the_adapter: "manifest.json does not list 'adapter.safetensors', which every checkpoint has",
    without_the_state: "manifest.json does not list 'state.json', which every checkpoint has",
}


@pytest.mark.skipif(os.name == "nt", reason="there are no pipes with names")
@pytest.mark.parametrize("edit", EDITED, ids=lambda edit: edit.__name__)
def test_a_checkpoint_that_was_edited_by_hand_is_not_valid(tmp_path, edit) -> None:
    """And the one before is taken. What is no checkpoint's may lie beside its files."""
    for step in (1, 2):
        save(tmp_path, step)
        (tmp_path / store.folder_name(step) / ".DS_Store").touch()
    edit(tmp_path / "step-00000002")
    folder, (passed,) = store.newest_valid(tmp_path)
    assert folder.name == "step-00000001" and EDITED[edit] in passed


@pytest.mark.parametrize("kind", ["a link to a checkpoint", "a link to nothing", "a file"])
def test_what_has_a_leftovers_name_goes_and_nothing_it_leads_to(tmp_path, kind) -> None:
    save(tmp_path, 1)
    elsewhere = tmp_path.with_name("elsewhere")
    save(elsewhere, 9)
    odd = tmp_path / ".step-00000009.new.tmp"
    for act in (lambda: store.settle(tmp_path), lambda: save(tmp_path, 9)):
        odd.touch() if kind == "a file" else odd.symlink_to(elsewhere / ("step-00000009" if "checkpoint" in kind else "no"))
        assert store.newest_valid(tmp_path)[0].name == "step-00000001"
        act()
        assert not odd.is_symlink() and not odd.exists() and not (tmp_path / "step-00000009").is_symlink()
        assert store.problem(elsewhere / "step-00000009") is None
    assert store.steps(tmp_path) == [1, 9]


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


def test_a_manifest_counts_only_in_the_form_it_was_written_in(tmp_path) -> None:
    save(tmp_path, 1)
    path = tmp_path / "step-00000001" / store.MANIFEST
    sound = path.read_bytes()
    assert store.problem(path.parent) is None
    for odd, said in (
        (b'{"files": {}}', "not in the form"), (files.json_bytes({"files": {}}), "lists no files"),
        (sound + b" ", "not in the form"), (sound.replace(b'"bytes": 2', b'"bytes": 2.0'), "not in the form"),
        (sound.replace(b'"bytes": 2', b'"bytes": 3'), "has 2 bytes, the manifest says 3"), (b"[]", "is damaged"),
        (sound.replace(b"state.json", b"state\\tjson"), "not in the form"), (b"{", "is damaged"),
    ):  # fmt: skip
        path.write_bytes(odd)
        assert said in str(store.problem(path.parent)), odd


def test_what_was_only_set_aside_is_no_fresh_start(tmp_path) -> None:
    save(tmp_path, 2)
    store.set_aside(tmp_path, after=0)
    with pytest.raises(
        UserError, match="only checkpoints that were set aside; go on from one with --resume_from .*-00000002"
    ):
        store.find(tmp_path, "auto")


def test_names_are_gone_from_the_disk_before_the_files_behind_them(tmp_path, monkeypatch) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    done = []
    for name in ("sync_folder", "remove_folder"):
        real = getattr(files, name)
        monkeypatch.setattr(
            files, name, lambda path, _real=real, _name=name, **more: (done.append(_name), _real(path, **more))
        )
    store.prune(tmp_path, 1)
    assert done == ["sync_folder", "remove_folder", "remove_folder"] and store.steps(tmp_path) == [3]
