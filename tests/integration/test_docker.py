"""Static checks of the container files: what can be known without a Docker engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib

import pytest

from tests.harness import ROOT


@pytest.fixture(scope="module")
def instructions() -> list[tuple[str, str]]:
    """(instruction, argument) of each Dockerfile line, continuation lines joined, comments dropped."""
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())]


def last(instructions: list[tuple[str, str]], word: str) -> str:
    return next(argument for name, argument in reversed(instructions) if name == word)


def test_signals_reach_python(instructions: list[tuple[str, str]]) -> None:
    assert json.loads(last(instructions, "ENTRYPOINT")) == ["python", "train.py"]  # exec form: no shell as process 1
    assert last(instructions, "STOPSIGNAL") == "SIGTERM"
    assert last(instructions, "WORKDIR") == "/app"


def test_runs_as_an_ordinary_user(instructions: list[tuple[str, str]]) -> None:
    assert last(instructions, "USER") not in ("root", "0", "0:0")
    after = instructions[max(i for i, (name, _) in enumerate(instructions) if name == "USER") :]
    assert {name for name, _ in after} <= {"USER", "VOLUME", "STOPSIGNAL", "ENTRYPOINT", "CMD"}


def test_models_data_and_outputs_are_volumes(instructions: list[tuple[str, str]]) -> None:
    volumes = json.loads(last(instructions, "VOLUME"))
    assert volumes == ["/models", "/data", "/outputs"]
    settings = " ".join(argument for name, argument in instructions if name == "ENV")
    assert re.search(r"HF_HOME=/models/", settings)
    owned = " ".join(argument for name, argument in instructions if name == "RUN")
    assert re.search(r"install -d -o trainer -g trainer .*" + " ".join(volumes), owned)


def test_layers_hold_no_caches(instructions: list[tuple[str, str]]) -> None:
    for name, argument in instructions:
        if name == "RUN" and "apt-get update" in argument:
            assert "rm -rf /var/lib/apt/lists" in argument
    assert any(name == "ENV" and "PIP_NO_CACHE_DIR=1" in argument for name, argument in instructions)


@pytest.mark.parametrize("extras", ["", "heic jxl"])
def test_the_project_file_says_what_is_installed(instructions: list[tuple[str, str]], extras: str) -> None:
    (run,) = [argument for name, argument in instructions if name == "RUN" and "pip install" in argument]
    (list_them,) = re.findall(r"python -c '.*?' \$\{EXTRAS\}", run)
    command = list_them.replace("python", sys.executable, 1)
    printed = subprocess.run(
        ["sh", "-c", command], cwd=ROOT, env={"EXTRAS": extras}, capture_output=True, text=True, check=True
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [name for extra in extras.split() for name in project["optional-dependencies"][extra]]
    assert printed.stdout.splitlines() == [*project["dependencies"], *wanted] and len(wanted) == len(extras.split())


def test_the_build_context_leaves_out_weights_and_results() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {".git", ".venv", "/models", "/outputs", "/data", "**/*.safetensors"} <= set(ignored)
    # Without the leading slash these patterns would still mean the root, but a reader could think of these packages.
    assert not {"trainer", "trainer/models", "trainer/data", "**/models", "**/data"} & set(ignored)


def test_the_readme_starts_it_as_a_spot_machine_needs() -> None:
    text = (ROOT / "docker" / "README.md").read_text(encoding="utf-8")
    for part in ("--gpus all", "--ipc=host", "--stop-timeout 60", "--resume_from auto", "not built in CI"):
        assert part in text
