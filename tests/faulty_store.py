"""A file system of fsspec in memory that keeps a record of what is asked of it, and fails where a test says so."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

from workbench.mirror.store import Mirror

URL = "file:///bucket/run"


class FaultyStore(MemoryFileSystem):
    """asked: (what, file) of every call. fails: whether such a call is cut off; a write then leaves half of its bytes."""

    cachable = False

    def __init__(self, fails: Callable[[str, str], bool] = lambda what, name: False) -> None:
        super().__init__()
        self.store, self.pseudo_dirs = {}, [""]
        self.fails = fails
        self.asked: list[tuple[str, str]] = []

    def fault(self, what: str, path: str) -> bool:
        name = path.strip("/").removeprefix("bucket/run").strip("/")
        self.asked.append((what, name))
        return self.fails(what, name)

    def ls(self, path: str, detail: bool = True, **more: Any) -> Any:
        self.cut(self.fault("list", path))
        return super().ls(path, detail=detail, **more)

    def pipe_file(self, path: str, value: bytes, **more: Any) -> None:
        failed = self.fault("write", path)
        super().pipe_file(path, value[: len(value) // 2] if failed else value, **more)
        self.cut(failed)

    def put_file(self, lpath: str, rpath: str, **more: Any) -> None:
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def cat_file(self, path: str, **more: Any) -> bytes:
        self.cut(self.fault("read", path))
        return super().cat_file(path, **more)

    def get_file(self, rpath: str, lpath: str, **more: Any) -> None:
        failed = self.fault("get", rpath)
        data = super().cat_file(rpath)
        Path(lpath).write_bytes(data[: len(data) // 2] if failed else data)
        self.cut(failed)

    def rm_file(self, path: str) -> None:
        self.cut(self.fault("remove", path))
        super().rm_file(path)

    def cp_file(self, path1: str, path2: str, **more: Any) -> None:
        self.cut(self.fault("copy", path1))
        super().cp_file(path1, path2, **more)

    def cut(self, failed: bool) -> None:
        if failed:
            raise OSError(errno.ECONNRESET, "the connection was cut")

    def changes(self) -> list[tuple[str, str]]:
        return [(what, name) for what, name in self.asked if what in ("write", "remove", "copy")]

    def mirror(self) -> Mirror:
        """A new one, as of another process."""
        return Mirror(self, "/bucket/run", URL)
