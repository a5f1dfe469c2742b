"""scripts/health.py tells a run that hangs from one that is busy, has ended or has not begun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from scripts import health
from tests.harness import ROOT
from trainer.base.progress import QUIET_SECONDS


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(health, "OUTPUTS", tmp_path)
    monkeypatch.setattr(health, "started", lambda: time.time() - 1e6)
    return tmp_path


def sign(folder: Path, age: float, silence: float = 5, doing: str = "training") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "alive.json"
    path.write_text(json.dumps({"doing": doing, "silence": silence, "host": "h", "pid": 1}))
    os.utime(path, (time.time() - age,) * 2)
    return folder


@pytest.mark.parametrize(
    ("age", "silence", "status"),
    [(30, 5, 0), (QUIET_SECONDS - 30, 5, 0), (QUIET_SECONDS + 30, 5, 1), (3900, 1000, 0), (4100, 1000, 1)],
)
def test_it_judges_by_the_rule_of_the_report(outputs: Path, capsys, age: float, silence: float, status: int) -> None:
    folder = sign(outputs / "bear", age, silence, "encoding photos")
    for arguments in ([str(folder)], []):
        assert health.main(arguments) == status
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith(f"{'hung' if status else 'healthy'}: {folder} ") and "(encoding photos)" in line


@pytest.mark.parametrize("arguments", [[], ["bear"]])
def test_what_has_ended_or_not_begun_is_healthy(outputs: Path, capsys, arguments: list[str]) -> None:
    (outputs / "bear" / "checkpoints").mkdir(parents=True)
    assert health.main([str(outputs / each) for each in arguments]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"healthy: no run is at work in {outputs / 'bear' if arguments else outputs}"


def test_the_newest_run_counts_however_deep_it_lies(outputs: Path, capsys) -> None:
    sign(outputs / "killed-long-ago", 9000)
    sign(outputs / "a" / "b" / "new", 10)
    assert health.main([]) == 0 and f"{outputs}/a/b/new gave" in capsys.readouterr().out
    sign(outputs / "a" / "b" / "new", 3000)
    assert health.main([]) == 1 and f"{outputs}/a/b/new has" in capsys.readouterr().out


def test_a_sign_of_an_earlier_container_is_none(outputs: Path, capsys, monkeypatch) -> None:
    """The volume of a pod that was lost: the new one still imports its libraries."""
    folder = sign(outputs / "bear", 3600)
    monkeypatch.setattr(health, "started", lambda: time.time() - 60)
    for arguments in ([], [str(folder)]):
        assert health.main(arguments) == 0
        assert capsys.readouterr().out.startswith("healthy: no run is at work in ")


def test_the_container_begins_with_its_first_process() -> None:
    assert health.started() == psutil.Process(1).create_time()


def test_it_imports_no_library_that_takes_long(tmp_path: Path) -> None:
    code = "import sys; from scripts import health; health.main(sys.argv[1:]); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "pydantic", "jinja2", "PIL"} & set(done.stdout.split())
