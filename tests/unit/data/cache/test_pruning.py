"""What goes from a cache that is too large or too old: what was used longest ago, and nothing that a living process uses."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts import data
from tests.harness import ROOT
from trainer.base import files
from trainer.base.errors import UserError
from trainer.base.run_layout import in_use
from trainer.data.cache import pruning
from trainer.data.cache.pruning import Use, prune

HOUR = 3600


def put(folder: Path, number: int, *, size: int = 100, age: float) -> Path:
    """An entry that was used `age` seconds ago."""
    key = f"{number:064x}"
    path = folder / key[:2] / f"{key}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    os.utime(path, (time.time() - age,) * 2)
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "digests.json").write_text("{}")
    (tmp_path / "00").mkdir()
    (tmp_path / "00" / "mine.safetensors").write_text("not an entry")
    return tmp_path


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 1000)), max_size=8),
    st.none() | st.integers(0, 300),
    st.none() | st.integers(0, 1000),
    st.integers(0, 1000),
)
def test_the_oldest_go_until_it_is_small_enough_and_nothing_in_use(tmp_path_factory, entries, limit, older_than, since):
    folder = tmp_path_factory.mktemp("cache")
    made = [(put(folder, i, size=size, age=HOUR * age), size, age) for i, (size, age) in enumerate(entries)]
    # Half an hour between what is compared: the clock goes on meanwhile.
    began = int((time.time() - HOUR * (since + 0.5)) * 1000)
    done = prune(folder, began, limit=limit, older_than=None if older_than is None else HOUR * (older_than + 0.5))
    gone = [(path, size, age) for path, size, age in made if not path.exists()]
    assert {path for path, *_ in gone} == {entry.path for entry in done.deleted}
    stay = [(size, age) for path, size, age in made if path.exists()]
    idle = [(size, age) for size, age in stay if age > since]
    assert all(age > since for *_, age in gone), "in use"
    assert done.in_use == sum(age <= since for _, age in entries)
    if older_than is not None:
        assert not [age for _, age in idle if age > older_than]
    if limit is not None:
        assert sum(size for size, _ in stay) <= limit or not idle
    for _, size, age in gone:
        old = older_than is not None and age > older_than
        # Without this one it would be too large, or something older stayed.
        assert old or (limit is not None and sum(s for s, _ in stay) + size > limit) or len(gone) > 1
        assert all(age >= other for _, other in idle), "what was used longest ago goes first"
    assert done.left_bytes == sum(size for size, _ in stay)
    shutil.rmtree(folder)


def test_only_entries_go(folder):
    put(folder, 1, age=HOUR)
    assert len(prune(folder, 2**62, limit=0).deleted) == 1
    assert left(folder) == {"digests.json", "mine.safetensors"}


def test_a_dry_run_deletes_nothing_and_says_the_same(folder):
    paths = [put(folder, i, age=HOUR * i) for i in range(5)]
    said = prune(folder, 2**62, limit=250, dry_run=True)
    assert all(path.exists() for path in paths)
    assert prune(folder, 2**62, limit=250) == said
    assert [path.exists() for path in paths] == [True, True, False, False, False]


HOLDER = "import sys, time, pathlib\nfrom trainer.data.cache.pruning import Use\nuse = Use(pathlib.Path(sys.argv[1]))\n"
HOLDER += "print(use.since, flush=True)\ntime.sleep(60)"


def holder(folder: Path) -> tuple[subprocess.Popen, int]:
    """A process that uses the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    return process, int(process.stdout.readline())


@pytest.mark.skipif(sys.platform == "win32", reason="there are no record locks on Windows")
def test_what_a_living_process_asked_for_stays_until_it_dies(folder):
    old = put(folder, 1, age=HOUR)
    first, since = holder(folder)
    second, later = holder(folder)
    try:
        assert since <= later
        asked = put(folder, 2, age=0)
        assert Use(folder).first() == since
        done = prune(folder, Use(folder).first(), limit=0)
        assert not old.exists() and asked.exists() and done.in_use == 1
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        assert Use(folder).first() == later, "the other one lives"
        os.kill(second.pid, signal.SIGKILL)
        second.wait()
        time.sleep(0.01)
        prune(folder, Use(folder).first(), limit=0)
        assert not asked.exists()
    finally:
        for process in (first, second):
            process.kill()
            process.wait()
            process.stdout.close()
    assert in_use(folder).read_bytes() == b"" and left(folder) == {"digests.json", "mine.safetensors"}


@pytest.mark.parametrize("moment", ["before", "aside"])
def test_an_entry_that_is_asked_for_meanwhile_stays(folder, monkeypatch, moment):
    """By a run that started after the folder was looked through."""
    path = put(folder, 1, age=HOUR)
    replace, listed = os.replace, pruning.entries

    def asked_for_before(found):
        entries = list(listed(found))
        os.utime(path)
        return entries

    def asked_for_aside(source, target):
        if Path(source) == path:
            os.utime(path)
        replace(source, target)

    if moment == "before":
        monkeypatch.setattr(pruning, "entries", asked_for_before)
    else:
        monkeypatch.setattr(os, "replace", asked_for_aside)
    assert prune(folder, 2**62, limit=0).deleted == ()
    assert path.read_bytes() == b"x" * 100 and left(folder) == {"digests.json", "mine.safetensors", path.name}


def test_two_prune_at_once(folder, monkeypatch):
    put(folder, 1, age=HOUR)
    listed = list(pruning.entries(folder))
    prune(folder, 2**62, limit=0)
    monkeypatch.setattr(pruning, "entries", lambda folder: listed)
    assert prune(folder, 2**62, limit=0).deleted == ()


def test_without_locks_nothing_goes(folder, monkeypatch, capsys):
    path = put(folder, 1, age=HOUR)
    monkeypatch.setattr(files, "fcntl", None)
    assert data.main(["cache", "--folder", str(folder), "--prune", "--limit", "0GB"]) == 2
    assert "no file locks here" in capsys.readouterr().err and path.exists()


def test_the_command(folder, capsys):
    old, new = put(folder, 1, age=40 * 24 * HOUR, size=2**20), put(folder, 2, age=HOUR, size=2**20)
    assert data.main(["cache", "--folder", str(folder)]) == 0
    assert "2 files of entries, 2.0 MiB; 0 in use by runs" in capsys.readouterr().out
    command = ["cache", "--folder", str(folder), "--prune", "--older_than", "30d"]
    assert data.main([*command, "--dry_run"]) == 0
    said = capsys.readouterr().out
    assert str(old) in said and str(new) not in said and "1 files would be deleted, 1.0 MiB; 1.0 MiB left" in said
    assert old.exists()
    assert data.main(command) == 0
    assert "1 files deleted" in capsys.readouterr().out and not old.exists() and new.exists()
    assert data.main(["cache", "--folder", str(folder), "--prune", "--limit", "1MB"]) == 0
    assert not new.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prune"], "--prune needs --limit SIZE, --older_than AGE"),
        (["--limit", "1GB"], "belong to --prune"),
        (["--prune", "--limit", "20"], '--limit 20: write a number and its unit, for example "20GB"'),
        (["--prune", "--older_than", "a day"], "--older_than a day: write a number of hours"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(folder, capsys, arguments, said):
    assert data.main(["cache", "--folder", str(folder), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_look_writes_nothing(folder, capsys, monkeypatch):
    """Nor does a dry run. What cannot be opened is told."""

    def tree() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in (folder, *folder.rglob("*"))}

    put(folder, 1, age=HOUR)
    for _ in range(2):
        before = tree()
        assert data.main(["cache", "--folder", str(folder)]) == 0
        assert data.main(["cache", "--folder", str(folder), "--prune", "--limit", "0B", "--dry_run"]) == 0
        assert tree() == before
        assert "1 files would be deleted" in capsys.readouterr().out
        Use(folder)  # the second time beside the file of the locks
    monkeypatch.setattr(files, "fcntl", None)
    assert data.main(["cache", "--folder", str(folder)]) == 0
    assert "1 files of entries, 0.0 MiB; it is unknown which of them are in use" in capsys.readouterr().out
    assert data.main(["cache", "--folder", str(folder), "--prune", "--limit", "0B", "--dry_run"]) == 2
    assert "it is unknown which entries are in use" in capsys.readouterr().err


def test_a_folder_that_is_no_cache_is_named(folder, tmp_path_factory, capsys):
    run = tmp_path_factory.mktemp("bear")
    assert data.main(["cache", "--folder", str(run)]) == 2
    assert f"{run} is not a cache: it has no entries, and no run has used it; give data.cache_dir" in capsys.readouterr().err
    shutil.copytree(folder, run / "cache")
    put(run / "cache", 1, age=HOUR)
    for more in ([], ["--prune", "--limit", "0B"]):
        assert data.main(["cache", "--folder", str(run), *more]) == 2
        assert f"did you mean {run / 'cache'}?" in capsys.readouterr().err
    assert [path.name for path in run.iterdir()] == ["cache"]


def test_a_folder_that_is_not_there_is_not_made(tmp_path, capsys):
    assert data.main(["cache", "--folder", str(tmp_path / "cache")]) == 2
    assert "no such folder" in capsys.readouterr().err and not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("text", "count"), [("20GB", 20 * 10**9), ("1.5 GiB", 3 * 2**29), ("500MB", 5 * 10**8), ("7B", 7), ("2TiB", 2**41)]
)
def test_sizes(text, count):
    assert files.parse_size(text) == count
    for wrong in (text[:-1], f"-{text}", f"{text}s", ""):
        with pytest.raises(ValueError, match="a number and its unit"):
            files.parse_size(wrong)


def test_no_locks_is_told_as_a_mistake_of_the_config(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "fcntl", None)
    with pytest.raises(UserError, match="data.cache_limit: there are no file locks here"):
        pruning.require_locks(Use(tmp_path), "data.cache_limit")
