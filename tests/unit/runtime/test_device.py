"""How much memory a machine, or the container in it, gives a process."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from trainer.kernels import dora_torch
from trainer.runtime.device import Memory, host_memory

GIB = 2**30
MACHINE = 64 * GIB


def tree(root: Path, *, groups: str, limits: dict[str, str]) -> tuple[Path, Path]:
    """(a process's list of control groups, the root of their file system)."""
    listed, mounted = root / "cgroup", root / "fs"
    listed.write_text(groups)
    for path, limit in limits.items():
        (mounted / path).parent.mkdir(parents=True, exist_ok=True)
        (mounted / path).write_text(limit + "\n")
    return listed, mounted


V1 = "12:cpu,cpuacct:/jobs\n3:memory:/jobs/one\n0::/jobs/one\n"


@pytest.mark.parametrize(
    ("groups", "limits", "memory"),
    [
        pytest.param("0::/\n", {"memory.max": str(8 * GIB)}, 8 * GIB, id="a container of version 2"),
        pytest.param("0::/a/b\n", {"memory.max": str(8 * GIB)}, 8 * GIB, id="seen under another name"),
        pytest.param("0::/a/b\n", {"a/memory.max": str(8 * GIB), "a/b/memory.max": "max"}, 8 * GIB, id="a group around it"),
        pytest.param(
            "0::/a/b\n", {"a/memory.max": str(8 * GIB), "a/b/memory.max": str(4 * GIB)}, 4 * GIB, id="the smallest of several"
        ),
        pytest.param("0::/a\n", {"a/memory.max": "max", "b/memory.max": "1"}, MACHINE, id="no limit, another group has one"),
        pytest.param("0::/\n", {"memory.max": str(99 * GIB)}, MACHINE, id="more than the machine has"),
        pytest.param(V1, {"memory/jobs/one/memory.limit_in_bytes": str(5 * GIB)}, 5 * GIB, id="version 1"),
        pytest.param(V1, {"memory/memory.limit_in_bytes": str(5 * GIB)}, 5 * GIB, id="version 1, in a container"),
        pytest.param(V1, {"memory/memory.limit_in_bytes": str(2**63 - 4096)}, MACHINE, id="version 1 without a limit"),
        pytest.param("", {}, MACHINE, id="no groups"),
    ],
)
def test_a_containers_limit_counts(tmp_path, monkeypatch, groups: str, limits: dict[str, str], memory: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"total": MACHINE}))
    assert host_memory(*tree(tmp_path, groups=groups, limits=limits)) == memory


def test_a_system_without_groups_gives_the_machines_memory(tmp_path) -> None:
    assert host_memory(tmp_path / "none", tmp_path) == psutil.virtual_memory().total


def test_processes_that_ask_unequally_often_for_their_memory_meet_once() -> None:
    """What a process takes is a reduction over all of them, and how many plans it tries depends on its photos."""
    met: list[int] = []
    there = Memory(8 * GIB, lambda: GIB, dora_torch).everywhere(lambda number: met.append(number) or [number])
    assert [there.base(), there.base(), there.size] == [GIB, GIB, 8 * GIB] and met == [-8 * GIB, GIB]
