"""Files that are there whole or not at all. What faults of a whole save do: integration/test_commit_protocol.py."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.base import files
from trainer.base.errors import UserError, ending


def test_a_short_write_is_gone_on_with_and_counted_once(tmp_path: Path, monkeypatch) -> None:
    write, told = os.write, []
    monkeypatch.setattr(os, "write", lambda descriptor, view: write(descriptor, view[:3]))
    found = files.write(tmp_path / "a", [b"0123456789", b"", b"abc"], told.append)
    monkeypatch.undo()
    assert (tmp_path / "a").read_bytes() == b"0123456789abc" and sum(told) == 13
    assert found == (hashlib.sha256(b"0123456789abc").hexdigest(), 13)
    assert files.hash_file(tmp_path / "a") == found[0]
    with pytest.raises(FileExistsError):
        files.write(tmp_path / "a", [b""])


def test_files_that_belong_together_get_their_names_at_the_end_or_none_does(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "one").write_bytes(b"old")
    (tmp_path / "gone").write_bytes(b"old")
    with pytest.raises(RuntimeError), files.FileGroup() as group:
        group.write(tmp_path / "one", [b"new"])
        group.write(tmp_path / "other", [b"new"])
        raise RuntimeError
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"one": b"old", "gone": b"old"}
    unlinked, unlink = [], Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path, **more: (unlinked.append(path.name), unlink(path, **more)))
    with files.FileGroup() as group:
        group.write(tmp_path / "one", [b"new"])
        group.remove(tmp_path / "gone")
        group.remove(tmp_path / "never there")
        assert (tmp_path / "one").read_bytes() == b"old"
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["one"] and (tmp_path / "one").read_bytes() == b"new"
    assert unlinked == ["gone", "never there"], "a temporary that got its name is not looked for again"


def test_what_a_person_names_is_not_written_over_unless_the_same_bytes_stand_there(tmp_path: Path) -> None:
    for name in ("same", "other"):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for taken in ("other", "folder", "link"):
        with (
            pytest.raises(UserError, match=f"{taken} exists; remove it, or give another OUT"),
            files.FileGroup(keep=True) as group,
        ):
            group.write(tmp_path / "new", [b"new"])
            group.write(tmp_path / taken, [b"same"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "link", "other", "same"]
    assert (tmp_path / "other").read_bytes() == b"other"
    with files.FileGroup(keep=True) as group:
        group.write(tmp_path / "same", [b"same"])
        group.write(tmp_path / "new", [b"new"])
    assert (tmp_path / "new").read_bytes() == b"new"


@pytest.mark.parametrize(
    ("inner", "outer", "shared"),
    [(0o755, 0o755, False), (0o757, 0o755, True), (0o755, 0o777, True), (0o755, 0o1777, False), (0o1777, 0o755, True)],
)
def test_a_folder_that_others_may_write_is_known(tmp_path: Path, inner: int, outer: int, shared: bool) -> None:
    """In a folder like /tmp nobody can rename what is another's."""
    (folder := tmp_path / "outer" / "inner").mkdir(parents=True)
    folder.chmod(inner)
    folder.parent.chmod(outer)
    assert files.others_may_write(folder) == shared
    if os.geteuid() == 0:
        os.chown(folder, 12345, 12345)
        assert files.others_may_write(folder)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EIO])
def test_a_folder_that_knows_no_sync_is_none_to_complain_about(tmp_path: Path, monkeypatch, number: int) -> None:
    def fails(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fails)
    if number == errno.EIO:
        with pytest.raises(OSError, match=str(tmp_path)):
            files.sync_folder(tmp_path)
    else:
        files.sync_folder(tmp_path)


@pytest.mark.parametrize("read_only", [True, False])
def test_a_read_only_file_system_is_told_from_a_folder_of_somebody_else(tmp_path: Path, monkeypatch, read_only: bool) -> None:
    """Both say no to whoever asks for the right to write."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY * read_only))
    with pytest.raises((OSError, UserError)) as refused:
        files.check_folder(tmp_path / "not" / "yet", "run.output_dir")
    status, said = ending(refused.value)
    assert (status, "Read-only file system" in said, "Permission denied" in said) == (
        6 if read_only else 2,
        read_only,
        not read_only,
    )


@pytest.mark.parametrize("text", [b"NaN", b"[1e999]", b'"\\ud800"', b"{", b"\xff", b"[" * 100_000])
def test_what_could_not_be_written_is_not_read(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text)
    with pytest.raises(UserError, match="a.json is damaged: it is not JSON"):
        files.read_json(path)
    tree = {"b": [1, 2.5, None], "a": "\u00e9"}
    path.write_bytes(files.json_bytes(tree))
    assert files.read_json(path) == tree
    with pytest.raises(ValueError):
        files.json_bytes(float("nan"))


def test_only_leftovers_whose_writers_are_gone_are_removed(tmp_path: Path) -> None:
    gone = 2**22 + 1  # more than there are processes
    ours, another, nobody, no_number = (
        tmp_path / f".a.{who}.0f.tmp" for who in (os.getpid(), os.getppid(), gone, "x")
    )  # fmt: skip
    for path in (ours, another, nobody, no_number):
        path.touch()
    files.remove_leftovers(tmp_path.iterdir(), idle=60)
    assert len(list(tmp_path.iterdir())) == 4, "written a moment ago, perhaps by another machine"
    for path in (ours, another, nobody, no_number):
        os.utime(path, (time.time() - 100,) * 2)
    files.remove_leftovers(tmp_path.iterdir(), idle=60)
    assert sorted(tmp_path.iterdir()) == sorted([another, no_number])


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("20GB", 20 * 10**9),
        ("20GiB", 20 * 2**30),
        ("1.5 MB", 1_500_000),
        ("3kB", 3000),
        ("3KiB", 3072),
        ("7B", 7),
        ("1TB", 10**12),
    ],
)
def test_sizes_have_the_units_that_they_name(text: str, count: int) -> None:
    assert files.parse_size(text) == count


@pytest.mark.parametrize("text", ["20", "GB", "-1GB", "7iB", "1e3GB", "20 G"])
def test_a_size_without_a_unit_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="write a number and its unit"):
        files.parse_size(text)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, and record locks")
def test_those_who_share_a_lock_keep_away_only_one_who_wants_it_alone(tmp_path: Path) -> None:
    """All processes of a start ask at about the same time whether another run has the folder."""

    def elsewhere(shared: bool) -> bool:
        """Whether another process gets it."""
        child = os.fork()
        if child == 0:
            try:
                with files.locked(tmp_path / "lock", shared=shared):
                    os._exit(0)
            except UserError:
                os._exit(2)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    with files.locked(tmp_path / "lock", shared=True):
        assert (elsewhere(shared=True), elsewhere(shared=False)) == (True, False)
    with files.locked(tmp_path / "lock"):
        assert (elsewhere(shared=True), elsewhere(shared=False)) == (False, False)
    assert elsewhere(shared=False)
