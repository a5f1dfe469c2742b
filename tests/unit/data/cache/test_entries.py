"""Stores of entries: shared by processes that fill them at once and are killed; bounded; in memory alone."""

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.unit.data.cache.test_fill import (
    ENCODING,
    KEY,
    TENSORS,
    dataset,
    encode_text,
    entries_of,
    equal,
    fill_latents,
    fill_text,
    refuse,
    singly,
    stored,
)  # fmt: skip
from trainer.base.errors import UserError
from trainer.base.run_layout import in_use
from trainer.base.tensorfile import TensorFile
from trainer.data.cache import entries, pruning
from trainer.data.cache.entries import Cache, MemoryCache

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="forks and record locks")
CAPTIONS = [f"caption {i}" for i in range(12)]


def fill(cache: Cache | MemoryCache, delay: float = 0.0) -> int:
    def slowly(captions):
        time.sleep(delay)
        return encode_text(captions)

    made = fill_latents(cache, dataset(), seed=0, fingerprint="vae", **ENCODING)
    return made + fill_text(cache, CAPTIONS, fingerprint="text", encode=singly(slowly), on_non_finite=refuse)


def contents(folder: Path) -> dict[str, bytes]:
    """The entries in packs, and any other file."""
    others = (path for path in folder.rglob("*") if path.is_file() and path != in_use(folder) and path.parent.name != "packs")
    return entries_of(folder) | {path.name: path.read_bytes() for path in others}


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


@contextlib.contextmanager
def child(work, *arguments):
    """A forked process, which has torch loaded already."""
    process = multiprocessing.get_context("fork").Process(target=work, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    assert fill(Cache(folder)) == 5 + len(CAPTIONS) + 1
    return contents(folder)


@pytest.mark.slow
@POSIX
def test_two_processes_fill_one_folder_at_once(tmp_path, expected):
    both = multiprocessing.get_context("fork").Barrier(2)
    with child(fill_folder, tmp_path, 0.002, both) as one, child(fill_folder, tmp_path, 0.002, both) as other:
        for process in (one, other):
            process.join(400)  # of a machine that is shared: it tells a deadlock from a wait, and measures nothing
        assert (one.exitcode, other.exitcode) == (0, 0)
    assert contents(tmp_path) == expected


def fill_folder(folder: Path, delay: float, together=None, pack: int = 256 * 10**6) -> None:
    entries.PACK_BYTES = pack
    if together is not None:
        together.wait()
    fill(Cache(folder), delay)


@pytest.mark.slow
@POSIX
def test_a_kill_loses_at_most_the_open_pack(tmp_path, expected):
    rng, moments = random.Random(3), set()
    for trial in range(12):
        folder = tmp_path / str(trial)
        with child(fill_folder, folder, 0.004, None, 3000) as process:
            deadline = time.monotonic() + 30
            # By its work, not by the clock: on a machine that is shared it may stand still.
            while len(list(folder.rglob("*.safetensors"))) < 1 + trial // 2 and time.monotonic() < deadline:
                time.sleep(0.0005)
            time.sleep(rng.random() * 0.005)
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        left = entries_of(folder)
        assert left.items() <= expected.items(), "an entry is there whole, or not at all"
        assert fill(Cache(folder)) == len(expected) - len(left)
        assert contents(folder) == expected, "no leftover, no other entry"
        moments.add(len(left))
    assert len(moments) > 2, moments


def test_in_memory_nothing_is_written_and_the_entries_are_the_same(tmp_path, expected, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("written"))
    cache = MemoryCache()
    assert cache.missing([KEY, KEY]) == [KEY]
    cache.put(KEY, TENSORS)
    assert cache.missing([KEY]) == [] and equal(cache.get(KEY), TENSORS) and cache.is_finite(KEY)
    cache.put(KEY, {"x": torch.tensor([float("nan")])})
    assert not cache.is_finite(KEY)
    monkeypatch.undo()
    assert fill(cache) == len(expected) and fill(cache) == 0
    disk = Cache(tmp_path / "disk")
    fill(disk)
    assert all(equal(cache.get(key), disk.get(key)) for key in expected)
    assert not list(tmp_path.glob("*.safetensors"))


def age(folder: Path, seconds: float) -> None:
    for path in folder.rglob("*.safetensors"):
        os.utime(path, (time.time() - seconds,) * 2)


@POSIX
def test_the_limit_takes_what_no_run_uses(tmp_path_factory, expected, monkeypatch):
    monkeypatch.setattr(entries, "PACK_BYTES", 3000)
    tmp_path, alone = tmp_path_factory.mktemp("both"), tmp_path_factory.mktemp("alone")
    fill(Cache(alone))
    earlier = Cache(tmp_path)
    fill_text(
        earlier, [f"another {i}" for i in range(50)], fingerprint="text", encode=singly(encode_text), on_non_finite=refuse
    )
    del earlier
    age(tmp_path, 3600)
    shared = next(tmp_path.rglob("*.safetensors"))  # of which this run asks for an entry, too
    key = next(iter(TensorFile(shared).entries))
    cache = Cache(tmp_path, limit=size_of(alone) + 8000)
    assert cache.missing([key]) == []
    fill(cache)
    cache.keep_limit()
    left = contents(tmp_path)
    assert expected.items() <= left.items() and shared.exists(), "what the run asked for stays"
    assert cache.pruned > 0 and size_of(tmp_path) <= cache.limit and cache.over_limit == 0
    assert fill(Cache(tmp_path)) == 0


@POSIX
def test_a_run_larger_than_the_limit_keeps_all_it_asked_for(tmp_path, expected):
    cache = Cache(tmp_path, limit=1000)
    fill(cache)
    cache.keep_limit()
    assert contents(tmp_path) == expected
    assert cache.over_limit == size_of(tmp_path) - 1000 and cache.pruned == 0


@POSIX
def test_far_above_its_limit_a_run_does_not_look_at_every_entry(tmp_path, monkeypatch):
    """What it looks at grows as what it writes, and not as its square."""
    prune, looked_at = pruning.prune, []

    def counted(*args, **kwargs):
        done = prune(*args, **kwargs)
        looked_at.append(len(done.entries))
        return done

    monkeypatch.setattr(pruning, "prune", counted)
    cache = Cache(tmp_path, limit=1)
    cache.missing([])
    for number in range(400):
        cache.put(f"{number:064x}", {"x": torch.zeros(4000, dtype=torch.uint8)})
    assert len(looked_at) > 10 and sum(looked_at) < 20 * 400


@POSIX
def test_the_limit_is_kept_while_entries_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(entries, "PACK_BYTES", 4000)
    old = Cache(tmp_path)
    old.missing([])
    for number in range(36):
        old.put(f"{number:064x}", {"x": torch.zeros(1000, dtype=torch.uint8)})
    old.flush()
    del old
    age(tmp_path, 3600)
    cache = Cache(tmp_path, limit=50_000)
    cache.missing([])
    most = 0
    for number in range(100, 130):
        cache.put(f"{number:064x}", {"x": torch.zeros(1000, dtype=torch.uint8)})
        most = max(most, size_of(tmp_path))
    assert most < 50_000 * (1 + 1 / 16) + 3000 and cache.pruned > 0


def test_a_limit_without_locks_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(pruning.files, "fcntl", None)
    with pytest.raises(UserError, match="data.cache_limit: there are no file locks here"):
        Cache(tmp_path, limit=1000).missing([KEY])
    assert Cache(tmp_path).missing([KEY]) == [KEY]


@POSIX
def test_what_was_asked_for_is_in_use_until_the_process_ends(tmp_path, expected):
    fill(Cache(tmp_path))
    age(tmp_path, 3600)
    key = next(iter(expected))
    (pack,) = (path for path in tmp_path.rglob("*.safetensors") if key in TensorFile(path).entries)
    with child(ask_and_wait, tmp_path, [key]):
        deadline = time.monotonic() + 30
        while max(path.stat().st_mtime for path in tmp_path.rglob("*.safetensors")) < time.time() - 1800:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        marked = max(path.stat().st_mtime for path in tmp_path.rglob("*.safetensors")) * 1000
        assert pruning.look(tmp_path) <= marked
        pruning.prune(tmp_path, pruning.require_locks(pruning.Use(tmp_path), "test"), limit=0)
        assert contents(tmp_path).keys() == TensorFile(pack).entries.keys() < expected.keys()
    time.sleep(0.01)
    pruning.prune(tmp_path, pruning.require_locks(pruning.Use(tmp_path), "test"), limit=0)
    assert contents(tmp_path) == {}


def ask_and_wait(folder: Path, keys: list[str]) -> None:
    cache = Cache(folder)
    assert cache.missing(keys) == []
    time.sleep(60)


@POSIX
@pytest.mark.parametrize("mode", [0o755, 0o775, 0o777])
def test_who_may_write_to_the_folder_may_mark_its_entries(tmp_path, mode):
    """Whatever the umask of the one who came first."""
    folder, before = tmp_path / "cache", os.umask(0o077)
    folder.mkdir()
    folder.chmod(mode)
    try:
        cache = Cache(folder)
        assert cache.missing([KEY]) == [KEY] and not cache.unprotected
        cache.put(KEY, TENSORS)
        cache.flush()
    finally:
        os.umask(before)
    folders, files = {0o755: (0, 0), 0o775: (0o070, 0o060), 0o777: (0o077, 0o066)}[mode]
    assert [path.stat().st_mode & 0o077 for path in (in_use(folder).parent, cache.path(KEY).parent)] == [folders] * 2
    assert [path.stat().st_mode & 0o077 for path in (in_use(folder), cache.path(KEY))] == [files] * 2


@pytest.mark.parametrize("what", ["lock", "entry"])
def test_who_cannot_mark_what_is_used_is_told(tmp_path, monkeypatch, what):
    pack = stored(tmp_path).path(KEY)
    pruning.Use(tmp_path)
    denied, utime = {"lock": in_use(tmp_path), "entry": pack}[what], os.utime

    def refused(path, *times):
        if Path(path) == denied:
            raise PermissionError(13, "Permission denied", str(path))
        utime(path, *times)

    monkeypatch.setattr(os, "utime", refused)
    cache = Cache(tmp_path)
    assert cache.missing([KEY, "0" * 64]) == ["0" * 64]
    assert cache.unprotected.startswith(f"this run may not write to {denied} (Permission denied), so it cannot mark which")
    assert f"chmod -R g+rwX {tmp_path}" in cache.unprotected


def test_a_temporary_file_that_someone_took_for_a_leftover_is_written_again(tmp_path, monkeypatch):
    """Of a run in another container that shares the folder: the same process number there."""
    replace, lost = os.replace, []

    def losing(source, target):
        if not lost:
            lost.append(Path(source).unlink())
        replace(source, target)

    monkeypatch.setattr(os, "replace", losing)
    stored(tmp_path)
    assert lost and equal(Cache(tmp_path).get(KEY), TENSORS)
