"""Started with a Python that lacks the libraries, the program says how to start it."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT
from workbench.commands import environment

PROGRAMS = ("train.py", "scripts/adapter.py", "scripts/data.py", "scripts/sample.py", "scripts/watch.py")


def bare(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A program, where nothing is installed: without site-packages."""
    command = [sys.executable, "-I", "-S", "-c", "import runpy, sys; sys.path.insert(0, '.'); sys.argv = sys.argv[1:]; "
               "runpy.run_path(sys.argv[0], run_name='__main__')", *arguments]  # fmt: skip
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_python_without_the_libraries_is_told_where_they_are(program: str) -> None:
    done = bare(program, "--config", "tiny_sdxl.toml")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    first, *rest = done.stderr.splitlines()
    assert first.startswith("error: this Python (") and first.endswith(
        "has no torch, diffusers, transformers, safetensors, pydantic"
    )
    assert rest[-1].endswith(f" {program} --config tiny_sdxl.toml")


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


@pytest.mark.skipif(sys.platform == "win32", reason="words are split as a shell of Linux does")
@pytest.mark.parametrize("made", [False, True])
def test_its_commands_can_be_copied_where_there_are_spaces(tmp_path: Path, monkeypatch, capsys, made: bool) -> None:
    folder = tmp_path / "my photos"
    if made:
        (folder / ".venv" / "bin").mkdir(parents=True)
        (folder / ".venv" / "bin" / "python").touch()
    monkeypatch.setattr(environment, "ROOT", folder)
    monkeypatch.setattr(environment, "NEEDED", ("a_library_that_is_not_there",))
    with pytest.raises(SystemExit):
        environment.check(["train.py", "--new", "the bear's"])
    *setup, started = [shlex.split(line.partition(": ")[2]) for line in capsys.readouterr().err.splitlines()[1:]]
    assert started == [f"{folder}/.venv/bin/python", "train.py", "--new", "the bear's"]
    assert setup == ([] if made else [["bash", f"{folder}/scripts/setup.sh"]])


def test_an_old_python_is_named(monkeypatch, capsys) -> None:
    monkeypatch.setattr(environment, "OLDEST", (99, 0))
    with pytest.raises(SystemExit):
        environment.check(["train.py"])
    assert "is older than 99.0" in capsys.readouterr().err


def test_here_everything_is() -> None:
    environment.check(["train.py"])


CUDA = {"version.cuda": "13.0", "version.hip": None}
CPU = {"version.cuda": None, "version.hip": None}


@pytest.mark.parametrize(
    ("built", "works", "card", "said"),
    [
        (CUDA, True, "H100", ["built for CUDA 13.0; runs use H100"]),
        (CUDA, False, "", ["built for CUDA 13.0; runs use the CPU"]),
        (
            CUDA,
            False,
            "RTX 4090",
            ["runs use the CPU", "this machine has RTX 4090, which it cannot use: .* update the driver"],
        ),
        (CPU, False, "", ["built for the CPU; runs use the CPU"]),
        (CPU, False, "RTX 4090", ["runs use the CPU", "has RTX 4090, which it cannot use: .* install PyTorch's CUDA build"]),
    ],
)
def test_which_pytorch_was_taken_is_said(monkeypatch, tmp_path: Path, built, works: bool, card: str, said: list[str]) -> None:
    """nvidia-smi stands in the path as a script that names the card, or fails as it does without one."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{card or 'NVIDIA-SMI has failed'}'\nexit {0 if card else 9}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    for name, value in built.items():
        monkeypatch.setattr(f"torch.{name}", value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: works)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda place: card)
    found = environment.torch_report()
    assert len(found) == len(said) and all(re.search(pattern, line) for pattern, line in zip(said, found, strict=True)), found


@pytest.mark.parametrize("chosen", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}])
@pytest.mark.parametrize(
    ("running", "cores", "spins"),
    [
        ("1", 2, environment.ALONE),
        ("2", 2, environment.BESIDE_OTHERS),
        ("2", 64, environment.ALONE),
        ("16", 64, environment.ALONE),
        ("17", 64, environment.BESIDE_OTHERS),
        (None, 2, environment.ALONE),
    ],
)
def test_threads_wait_as_others_run_unless_the_user_chose(
    tmp_path: Path, monkeypatch, chosen: dict[str, str], running: str | None, cores: int, spins: str
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(environment, "LOAD", str(tmp_path / "loadavg"))
    if running is not None:
        (tmp_path / "loadavg").write_text(f"9.00 0.00 0.00 {running}/95 3\n")
    environment.choose_waiting()
    found = {name: os.environ[name] for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT") if name in os.environ}
    assert found == (chosen or {"GOMP_SPINCOUNT": spins})


def test_a_program_that_runs_for_a_moment_alone_is_none(tmp_path: Path, monkeypatch) -> None:
    """Only what wants a core each time counts."""
    counts = iter(["2/95", "1/95"])
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(environment, "open", lambda path: io.StringIO(f"9.00 0.00 0.00 {next(counts)} 3"), raising=False)
    assert not environment._others_run() and next(counts, None) is None


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_chooses_before_a_library_is_loaded(program: str) -> None:
    """GNU's OpenMP reads the environment once, when PyTorch is imported."""
    code = (
        "import os, runpy, sys\n"
        "from workbench.commands import environment\n"
        "def stop(arguments):\n"
        "    assert 'torch' not in sys.modules\n"
        "    assert os.environ['GOMP_SPINCOUNT'] in (environment.ALONE, environment.BESIDE_OTHERS)\n"
        "    sys.exit(77)\n"
        "environment.check = stop\n"
        f"runpy.run_path({program!r}, run_name='__main__')"
    )
    without = {key: value for key, value in os.environ.items() if key not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=without).returncode == 77


@pytest.mark.parametrize("coding", ["cp1252", "ascii", "ascii:surrogateescape", "utf-8", "utf-16"])
def test_what_a_terminal_cannot_show_is_written_as_an_escape(coding: str) -> None:
    """Nor does a name that is not UTF-8 end a program. What can be shown is."""
    code = "from workbench.commands import environment; environment.show_everything(); print('caf\\xe9 \\U0001f600 \\udcff')"
    code += "; import sys; print('\\U0001f600', file=sys.stderr)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, env=os.environ | {"PYTHONIOENCODING": coding}
    )
    assert run.returncode == 0, run.stderr
    cafe = "caf\\xe9" if coding.startswith("ascii") else "caf\xe9"
    smile = "\U0001f600" if coding.startswith("utf") else r"\U0001f600"
    name = coding.partition(":")[0]
    assert run.stdout.decode(name).strip() == f"{cafe} {smile} \\udcff" and run.stderr.decode(name).strip() == smile


def test_the_help_loads_no_module_that_only_a_run_needs() -> None:
    code = "import sys, workbench.commands.environment, workbench.commands.main; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert "argparse" in loaded
    assert not {"json", "multiprocessing", "pydantic", "subprocess", "torch"} & set(loaded)
