"""With which status, and in which words, an exception ends the program."""

from __future__ import annotations

import errno
import json

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
