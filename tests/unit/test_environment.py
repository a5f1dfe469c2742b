"""Started with a Python that lacks the libraries, the program says how to start it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT
from trainer import environment


def bare(*arguments: str) -> subprocess.CompletedProcess[str]:
    """train.py, where nothing is installed: without site-packages."""
    command = [sys.executable, "-I", "-S", "-c", "import runpy, sys; sys.path.insert(0, '.'); sys.argv = sys.argv[1:]; "
               "runpy.run_path('train.py', run_name='__main__')", "train.py", *arguments]  # fmt: skip
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_python_without_the_libraries_is_told_where_they_are() -> None:
    done = bare("--config", "tiny_sdxl.toml")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    first, *rest = done.stderr.splitlines()
    assert first.startswith("error: this Python (") and first.endswith(
        "has no torch, diffusers, transformers, safetensors, pydantic"
    )
    assert rest[-1].endswith("train.py --config tiny_sdxl.toml")


@pytest.mark.parametrize("made", [False, True])
def test_it_names_the_environment_or_how_to_make_it(tmp_path: Path, monkeypatch, capsys, made: bool) -> None:
    python = tmp_path / ".venv" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if made:
        python.parent.mkdir(parents=True)
        python.touch()
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "NEEDED", ("torch", "a_library_that_is_not_there"))
    with pytest.raises(SystemExit) as ended:
        environment.check(["train.py", "--plan"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "has no a_library_that_is_not_there" in said
    assert f"{python} train.py --plan" in said and ("scripts/setup.sh" in said) != made


def test_an_old_python_is_named(monkeypatch, capsys) -> None:
    monkeypatch.setattr(environment, "OLDEST", (99, 0))
    with pytest.raises(SystemExit):
        environment.check(["train.py"])
    assert "is older than 99.0" in capsys.readouterr().err


def test_here_everything_is() -> None:
    environment.check(["train.py"])
