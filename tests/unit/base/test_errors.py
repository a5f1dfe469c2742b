"""With which status, and in which words, an exception ends the program."""

from __future__ import annotations

import errno
import json
import resource
import socket
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from trainer.base.errors import (
    DataError,
    Interrupted,
    NonFiniteError,
    NotTrained,
    NotWritten,
    OutOfMemory,
    PeerStopped,
    UserError,
    converted,
    ending,
    number_in,
    reading,
)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (UserError("mend it"), 2, "mend it"), (NotTrained("no update"), 2, "no update"), (NonFiniteError("NaN"), 4, "NaN"),
        (OutOfMemory("step 3"), 5, "step 3"), (DataError("a photo"), 6, "a photo"), (PeerStopped("gone", 143), 143, "gone"),
        (Interrupted(15), 143, "stopped by SIGTERM before the first step of this start; go on with --resume_from auto"),
        (KeyboardInterrupt(), 130, "stopped at once"), (MemoryError(), 5, "out of memory: start a new run"),
        (NotWritten(OSError(errno.ENOSPC, "full", "a.png")), 6, "storage: [Errno 28] full: 'a.png'; free space"),
        (NotWritten(PermissionError(errno.EACCES, "denied", "a.png")), 2, "a.png: denied; give a path"),
        (NotWritten("no disk"), 6, "no disk"), (OSError(errno.EIO, "broken"), 6, "storage: [Errno 5] broken"),
        (OSError(errno.EROFS, "read-only", "out"), 6, "read-only: 'out'; give a folder that can be written to"),
        (PermissionError(errno.EACCES, "denied", "out"), 2, "out: denied; give a path that this user may write to"),
        (NotADirectoryError(errno.ENOTDIR, "no folder", "out"), 2, "out: no folder; give a path"),
        (FileExistsError(errno.EEXIST, "is there", "out"), 2, "out: is there; give a path"),
        (IsADirectoryError(errno.EISDIR, "a folder", "out"), 2, "out: a folder; give a path"),
        (RuntimeError("DataLoader worker (pid 3) is killed"), 6, "start again with --resume_from auto; a lower"),
        (RuntimeError("shapes"), 1, "shapes"), (ValueError("who knows"), 1, "who knows"),
    ],
)  # fmt: skip
def test_each_end_has_its_status(error: BaseException, status: int, said: str) -> None:
    found = ending(error)
    assert found[0] == status and said in found[1]


def test_what_a_library_raises_while_a_file_is_read_is_the_files_fault() -> None:
    with (
        pytest.raises(UserError, match=r"^a\.json: row 3: Expecting value.*; mend it$"),
        reading("a.json", "row 3", remedy="mend it"),
    ):
        json.loads("x")
    with pytest.raises(UserError, match="'x' should be a whole number"), reading("a.json"):
        converted(int, "x", "a whole number")


@pytest.mark.parametrize(
    "raised", [TypeError("ours"), KeyError("ours"), MemoryError(), OSError(errno.EIO, "broken"), UserError("x")]
)
def test_what_our_own_code_or_the_system_raises_meanwhile_stays(raised: BaseException) -> None:
    with pytest.raises(type(raised)) as error, reading("a.json"):
        raise raised
    assert error.value is raised


def link_to_itself(folder: Path) -> None:
    (folder / "loop").symlink_to("loop")
    (folder / "loop").read_bytes()


def too_many_files(folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    (folder / "a").touch()
    with ExitStack() as opened:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(257):
            opened.enter_context(open(folder / "a"))


def port_in_use(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.socket() as second:
        second.bind(first.getsockname())


def no_temporary_folder(folder: Path) -> None:
    tempfile._get_default_tempdir()


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (link_to_itself, "loop: Too many levels of symbolic links; mend the link, which leads to itself"),
        (lambda folder: (folder / ("n" * 300)).exists(), "nnn: File name too long; give a shorter name"),
        (too_many_files, "a: Too many open files; raise the limit of open files (ulimit -n 4096)"),
        (port_in_use, "Address already in use; give another port"),
        (
            no_temporary_folder,
            "No usable temporary directory found in ['/gone']; let TMPDIR name a folder that this user may",
        ),
    ],
)
def test_what_the_system_refuses_is_one_sentence(
    tmp_path: Path, monkeypatch, work: Callable[[Path], object], said: str
) -> None:
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/gone"])
    with pytest.raises(OSError) as raised:
        work(tmp_path)
    status, told = ending(raised.value)
    assert status == 2 and said in told and len(told.splitlines()) == 1


@pytest.mark.parametrize("error", [TypeError("ours"), FileNotFoundError(errno.ENOENT, "none", "a"), OSError(errno.EBADF, "")])
def test_a_fault_of_ours_stays_one(error: Exception) -> None:
    """With its traceback, as status 1 has it."""
    assert ending(error)[0] == 1


@pytest.mark.parametrize(
    ("given", "number"),
    [(None, 7), ("", 7), ("3", 3), (" 4 ", 4), ("two", None), ("-1", None), ("9" * 5000, None), ("1.5", None)],
)
def test_a_number_of_the_environment_is_read_or_refused(monkeypatch, given: str | None, number: int | None) -> None:
    monkeypatch.delenv("NUMBER", raising=False)
    if given is not None:
        monkeypatch.setenv("NUMBER", given)
    if number is not None:
        assert number_in("NUMBER", 7, most=9) == number
        return
    with pytest.raises(UserError, match=r"^NUMBER: '.* should be a number from 0 to 9; set it to one, or unset it$"):
        number_in("NUMBER", 7, most=9)
