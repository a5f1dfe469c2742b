"""Folders that appear when they are whole, what a killed writer leaves, and disks that take no writes.

Faults of the disk, and kills: integration/test_commit_protocol.py.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.harness import ROOT
from trainer import files
from trainer.errors import UserError, ending


def test_a_folder_appears_when_it_is_whole_or_not_at_all(tmp_path: Path) -> None:
    with files.appearing(tmp_path / "new" / "a") as folder:
        (folder / "x").write_bytes(b"x")
        assert not (tmp_path / "new" / "a").exists()
    assert (tmp_path / "new" / "a" / "x").read_bytes() == b"x"
    with pytest.raises(KeyError), files.appearing(tmp_path / "b"):
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["new"] and len(list((tmp_path / "new").iterdir())) == 1


def test_what_killed_writers_left_is_removed_and_never_in_the_way(tmp_path: Path) -> None:
    """Folders and files, of processes that are gone and of this one's number, as every container's number may be 1. What a
    living process writes stays, and so does what is another file's."""
    code = (
        "import os, sys; from pathlib import Path; from trainer import files; out = Path(sys.argv[1])\n"
        "with files.appearing(out) as folder: (folder / 'half').touch(); os.kill(os.getpid(), 9)"
    )
    out = tmp_path / "a[1].b"
    subprocess.run([sys.executable, "-c", code, str(out)], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    (killed,) = tmp_path.iterdir()
    assert [path.name for path in killed.iterdir()] == ["half"]
    mine = tmp_path / f".a[1].b.{os.getpid()}.0a.tmp"
    mine.mkdir()
    (mine / "weights").touch()
    linked = tmp_path / f".a[1].b.{os.getpid()}.0b.tmp"
    linked.symlink_to(mine)
    living, other = tmp_path / f".a[1].b.{os.getppid()}.0c.tmp", tmp_path / f".a1.b.{os.getpid()}.0d.tmp"
    living.touch()
    other.touch()
    with files.appearing(out):  # none of them is in its way
        pass
    files.remove_leftovers(files.leftovers_of(out))
    assert {path.name for path in tmp_path.iterdir()} == {out.name, living.name, other.name}


def test_a_link_is_removed_and_not_what_it_leads_to(tmp_path: Path) -> None:
    kept, link = tmp_path / "kept", tmp_path / "link"
    kept.mkdir()
    (kept / "x").touch()
    for ignore_errors in (False, True):
        for target in (kept, tmp_path / "nowhere"):
            link.symlink_to(target)
            files.remove_folder(link, ignore_errors=ignore_errors)
            assert not link.is_symlink() and (kept / "x").exists()
    with pytest.raises(FileNotFoundError, match="link"):
        files.remove_folder(link)
    files.remove_folder(link, ignore_errors=True)


@pytest.mark.parametrize("read_only", [True, False])
def test_a_read_only_disk_is_storage_and_a_denied_folder_the_users(tmp_path: Path, monkeypatch, read_only: bool) -> None:
    """Status 6 and 2. Both deny the write to whoever asks."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY if read_only else 0))
    with pytest.raises(OSError if read_only else UserError) as refused:
        files.check_folder(tmp_path / "out", "run.output_dir")
    status, said = ending(refused.value)
    assert status == (6 if read_only else 2) and str(tmp_path / "out") in said
    assert ("Read-only file system" in said) == read_only
    assert not read_only or refused.value.errno == errno.EROFS
