"""Remembered digests: the file's own, whatever happens to it, and read no more often than that takes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from trainer.base import digests
from trainer.base.digests import FileDigests


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights" * 1000)
    return path


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def count_reads(monkeypatch) -> list:
    reads, real = [], digests.hash_file
    monkeypatch.setattr(digests, "hash_file", lambda *a: (reads.append(1), real(*a))[1])
    return reads


def test_a_file_is_read_once_in_a_process_and_once_on_a_machine(file: Path, tmp_path: Path, monkeypatch) -> None:
    reads, memory = count_reads(monkeypatch), tmp_path / "digests.json"
    monkeypatch.setattr(digests, "SETTLED_SECONDS", -1)
    first = FileDigests(memory)
    assert first.of(file) == first.of(file) == FileDigests(memory).of(file) == sha(file)
    assert len(reads) == 1
    other = tmp_path / "other"
    other.write_bytes(b"x")
    assert FileDigests(memory).of(other) == sha(other) and len(reads) == 2


def test_every_change_of_the_file_is_seen(file: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(digests, "SETTLED_SECONDS", -1)
    memory, before = tmp_path / "digests.json", file.stat()
    assert FileDigests(memory).of(file) == sha(file)
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # same size, same mtime: the inode's time tells
    assert FileDigests(memory).of(file) == sha(file)
    new = tmp_path / "new"
    new.write_bytes(content[::-1])
    os.replace(new, file)
    assert FileDigests(memory).of(file) == sha(file)


def test_a_file_written_just_now_is_not_remembered_on_disk(file: Path, tmp_path: Path) -> None:
    """It could be written again within the clock's grain."""
    memory = tmp_path / "digests.json"
    assert FileDigests(memory).of(file) == sha(file)
    assert not memory.exists()


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"a": 1}', b"\xff"])
def test_a_damaged_memory_is_none(file: Path, tmp_path: Path, damage: bytes) -> None:
    memory = tmp_path / "digests.json"
    memory.write_bytes(damage)
    assert FileDigests(memory).of(file) == sha(file)


def test_what_a_kill_left_half_written_is_swept_up(file: Path, tmp_path: Path) -> None:
    memory = tmp_path / "digests.json"
    left, other = (tmp_path / f".{name}.json.{os.getpid()}.0a.tmp" for name in ("digests", "another"))
    left.write_bytes(b"{")
    other.write_bytes(b"{")
    FileDigests(memory)
    assert not left.exists() and other.exists()
