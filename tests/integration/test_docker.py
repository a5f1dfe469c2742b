"""The cloud kit, checked offline: each file of docker/ by its named check, which a broken one does not pass.

A tool that is missing fails its tests. SkyPilot itself reads its file in tests/proofs/skypilot_task.py. The image is
built, and the commands are started in it, by tests/proofs/image.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import health
from tests.harness import ROOT
from tests.proofs import recipes
from trainer.run import setup
from workbench.commands import arguments

DOCKER = ROOT / "docker"
CLOUDS = DOCKER / "clouds"
TOOLS = Path(sys.executable).parent
SCHEMA = ["check-jsonschema", "--builtin-schema"]
KUBERNETES = ["kubernetes-validate", "--strict"]
# What is asked of each file, beside the tests below; the page has the same table.
CHECKS = {
    "Dockerfile": ["hadolint"],
    "compose.yaml": [*SCHEMA, "vendor.compose-spec"],
    "image.yml": [*SCHEMA, "vendor.github-workflows"],
    "kubernetes.yaml": KUBERNETES,
    "kubernetes_array.yaml": KUBERNETES,
    "kubernetes_elastic.yaml": KUBERNETES,
    "runpod.sh": ["shellcheck"],
    "slurm.sh": ["shellcheck"],
}
OTHER_CHECKS = {"skypilot.yaml", "runpod.json"}
GRACE = 120  # s: between SIGTERM and SIGKILL


def place(name: str) -> Path:
    return next(path for folder in (ROOT / ".github" / "workflows", DOCKER, CLOUDS) if (path := folder / name).exists())


def text_of(name: str) -> str:
    return place(name).read_text(encoding="utf-8")


def ask(name: str, path: Path) -> subprocess.CompletedProcess[str]:
    """The named check of a file, which lies at `path`. Nothing can be fetched."""
    tool, *options = CHECKS[name]
    offline = os.environ | {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https", "HTTP", "HTTPS")}
    return subprocess.run([TOOLS / tool, *options, path], capture_output=True, text=True, env=offline)


@pytest.mark.parametrize("name", CHECKS)
def test_a_file_passes_its_check(name: str) -> None:
    asked = ask(name, place(name))
    assert asked.returncode == 0, asked.stdout + asked.stderr


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("Dockerfile", "python:3.11.14-slim-bookworm", "python"),
     ("Dockerfile", "USER ${UID}:${GID}", "USER root"),
     ("Dockerfile", "-y --no-install", "--no-install"),
     ("Dockerfile", "PIP_NO_CACHE_DIR=1", "PIP_CACHE=1"),
     ("compose.yaml", "stop_grace_period", "stop_grace"),
     ("compose.yaml", "restart: on-failure:3", "restart: {on-failure: 3}"),
     ("image.yml", "needs: test", "need: test"),
     ("image.yml", "runs-on", "runs_on"),
     ("image.yml", "packages: write", "packages: all"),
     ("kubernetes.yaml", "runAsNonRoot: true", "runAsNoRoot: true"),
     ("kubernetes.yaml", "runAsUser: 1000", "runAsUser: trainer"),
     ("kubernetes.yaml", "          operator: In\n", ""),
     ("kubernetes_elastic.yaml", "completionMode: Indexed", "completion: Indexed"),
     ("kubernetes_elastic.yaml", "succeededIndexes", "indexes"),
     ("kubernetes_array.yaml", "backoffLimitPerIndex", "backoffLimitOfEach"),
     ("runpod.sh", '"$@"', "$@"),
     ("slurm.sh", '"$config" "${words', '$config "${words'),
     ("slurm.sh", "done\n", "")],
)  # fmt: skip
def test_a_broken_file_does_not(tmp_path: Path, name: str, before: str, after: str) -> None:
    text = text_of(name)
    assert before in text
    broken = tmp_path / name
    broken.write_text(text.replace(before, after, 1), encoding="utf-8")
    asked = ask(name, broken)
    assert asked.returncode == 1, asked.stdout + asked.stderr


def test_every_file_has_a_check_and_the_page_names_it() -> None:
    folders = (DOCKER, CLOUDS, ROOT / ".github" / "workflows")
    files = {path.name for folder in folders for path in folder.iterdir() if path.is_file()}
    assert files == {*CHECKS, *OTHER_CHECKS, "README.md"}
    rows = text_of("README.md").partition("## What is checked")[2]
    for name in files - {"README.md"}:
        (row,) = [line for line in rows.splitlines() if line.startswith("|") and f"`{name}`" in line.split("|")[1]]
        assert all(word in row for word in CHECKS.get(name, [])[:1]), row


# --- the commands -----------------------------------------------------------------------------------------------------


def commands() -> dict[str, list[str]]:
    """The words behind train.py of each way to start a run."""
    array, elastic = (recipes.pods(name)[0] for name in recipes.PODS[1:])
    assert elastic.entrypoint is not None
    return {
        "compose": list(recipes.compose().words),
        "kubernetes": list(recipes.pods("kubernetes.yaml")[0].words),
        "kubernetes_array": list(array.words),
        "kubernetes_elastic": shlex.split(elastic.entrypoint[-1].partition("train.py ")[2].replace("$share", "1")),
        "runpod": list(recipes.runpod({}).words),
        "skypilot": shlex.split(loaded("skypilot.yaml")["run"].partition("train.py ")[2]),
        "slurm": ["--config", "$config", *re.findall(r"^words=\((.*)\)$", text_of("slurm.sh"), re.MULTILINE)[0].split()],
        "docker run": list(recipes.docker_run().words),
    }


def loaded(name: str) -> Any:
    return yaml.safe_load(text_of(name))


documents = recipes.documents
PODS = recipes.PODS
CONFIG = "data/bear.toml"


def test_every_command_goes_on_where_a_run_was_and_is_one_of_train_py() -> None:
    found = commands()
    assert len(found) == 8
    for where, words in found.items():
        chosen = arguments.parse(words)
        assert chosen.resume_from == "auto", where
        assert chosen.config in ([CONFIG], ["$CONFIG"], ["$config"]), where
    assert loaded("skypilot.yaml")["envs"]["CONFIG"] == CONFIG
    assert f"sbatch docker/clouds/slurm.sh {CONFIG}" in text_of("README.md")


def test_all_leave_the_same_time_to_save() -> None:
    assert loaded("compose.yaml")["services"]["trainer"]["stop_grace_period"] == f"{GRACE}s"
    for name in PODS:
        assert documents(name)["Job"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == GRACE
    assert directives(text_of("slurm.sh"))["signal"] == f"B:USR1@{GRACE}"
    assert f"--stop-timeout {GRACE} " in text_of("README.md") and f"give it {GRACE} seconds" in text_of("README.md")


@pytest.mark.slow
def test_the_page_begins_as_a_clone_without_a_gpu_can(tmp_path: Path) -> None:
    """Its first block, but for the set-up, whose environment is this one, and with a model that is here."""
    (block,) = re.findall(r"^```bash\n(.*?)^```", text_of("README.md"), re.MULTILINE | re.DOTALL)
    setup, rest = block.split("\n", 1)
    assert setup == "bash scripts/setup.sh"
    python = shlex.quote(sys.executable)
    rest = rest.replace(".venv/bin/python train.py", f"{python} {ROOT / 'train.py'} --model {ROOT / 'examples/pocket_sdxl'}")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run(["bash", "-euc", rest], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "fits: " in done.stdout, done.stdout + done.stderr
    written = tomllib.loads((tmp_path / CONFIG).read_text(encoding="utf-8"))
    # As in the image, where data and outputs are links to the volumes.
    assert written["data"]["sources"][0]["path"] == "data/bear" and written["run"]["output_dir"] == "outputs/bear"


def test_the_pages_arithmetic_is_right() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", text_of("README.md"), re.MULTILINE | re.DOTALL)
    values: dict[str, Any] = {}
    told = []
    for line in block.splitlines():
        code, _, comment = line.partition("#")
        if result := re.match(r" = (\d+) ", comment):
            value = eval(code, values)
            told.append(round(value))
            assert abs(value - int(result[1])) < 0.5 or (value > 1e4 and abs(value - int(result[1])) < 10), line
            if share := re.search(r"([\d.]+) %", comment):
                assert float(share[1]) == round(100 * value / (values["hours"] * 3600), 1), line
        else:
            exec(code, values)
    assert len(told) == 7
    measured = json.loads((ROOT / "docs" / "benchmarks" / "full-size-CPU-2026-11-22.json").read_text(encoding="utf-8"))
    phases = measured["families"]["flux"]["float8 DoRA 256 px"]["phases"]
    seconds = {phase["phase"]: phase["seconds"] for phase in phases}
    assert round(seconds["all before the first step"]) == values["begin"]
    assert round(seconds["saving step 1"], 1) == values["save"]
    assert f"| 1024 px | fp8_e4m3 | {values['step']} s |" in (ROOT / "docs" / "benchmarks" / "gpu.md").read_text(
        encoding="utf-8"
    )


# --- the image --------------------------------------------------------------------------------------------------------


def stages() -> dict[str, list[tuple[str, str]]]:
    """By the argument of its FROM, (instruction, argument) of each line of a Dockerfile's stage, continuation lines joined,
    comments dropped."""
    lines = [line for line in text_of("Dockerfile").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found: dict[str, list[tuple[str, str]]] = {}
    stage: list[tuple[str, str]] = []
    for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip()):
        if word == "FROM":
            stage = found[rest] = []
        stage.append((word, rest))
    return found


@pytest.fixture(scope="module")
def instructions() -> list[tuple[str, str]]:
    """Of the stage that is built where no target is named."""
    first, _, last = stages()
    assert first.endswith(" AS trainer") and last == "trainer" and stages()[last] == [("FROM", "trainer")]
    return stages()[first]


def last(instructions: list[tuple[str, str]], word: str) -> str:
    return next(argument for name, argument in reversed(instructions) if name == word)


def settings(instructions: list[tuple[str, str]]) -> dict[str, str]:
    return dict(
        pair.split("=", 1) for name, argument in instructions if name in ("ENV", "ARG") for pair in shlex.split(argument)
    )


def test_signals_reach_python(instructions: list[tuple[str, str]]) -> None:
    assert json.loads(last(instructions, "ENTRYPOINT")) == ["python", "/app/train.py"]  # exec form: no shell as process 1
    assert last(instructions, "STOPSIGNAL") == "SIGTERM"
    assert last(instructions, "WORKDIR") == "/app"


def test_it_runs_as_an_ordinary_user_who_has_a_number(instructions: list[tuple[str, str]]) -> None:
    assert last(instructions, "USER") == "${UID}:${GID}" and settings(instructions)["UID"] == "1000"
    after = instructions[max(i for i, (name, _) in enumerate(instructions) if name == "USER") :]
    assert {name for name, _ in after} <= {"USER", "VOLUME", "HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT", "CMD"}
    for name in PODS:
        assert documents(name)["Job"]["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == 1000


def test_caches_data_and_outputs_are_volumes(instructions: list[tuple[str, str]]) -> None:
    volumes = json.loads(last(instructions, "VOLUME"))
    assert volumes == ["/cache", "/data", "/outputs"]
    environment = settings(instructions)
    assert {environment[key].split("/")[1] for key in ("HF_HOME", "TRITON_CACHE_DIR")} == {"cache"}
    runs = " ".join(argument for name, argument in instructions if name == "RUN")
    assert re.search(r"install -d -o trainer -g trainer .*" + " ".join(volumes), runs)
    assert "ln -s /data data" in runs and "ln -s /outputs outputs" in runs
    mounted = [volume.split(":")[1] for volume in loaded("compose.yaml")["services"]["trainer"]["volumes"]]
    assert sorted(mounted) == volumes


def test_a_run_in_it_knows_where_it_is(instructions: list[tuple[str, str]]) -> None:
    assert settings(instructions)[setup.IN_IMAGE] == "1"


@pytest.mark.parametrize(("age", "status"), [(60, 0), (3600, 1), (None, 0)])
def test_health_is_asked_of_the_runs_own_signs_of_life(tmp_path, instructions, age: int | None, status: int) -> None:
    _, _, command = last(instructions, "HEALTHCHECK").partition("CMD ")
    asked = json.loads(command)
    for name in PODS:
        (pod,) = documents(name)["Job"]["spec"]["template"]["spec"]["containers"]
        probe = pod["livenessProbe"]["exec"]["command"]
        if name == "kubernetes_array.yaml":  # its pods share /outputs: each asks for its own run
            (own,) = [word for word in pod["args"] if word.startswith("run.output_dir=")]
            folder = own.removeprefix("run.output_dir=").replace("$(JOB_COMPLETION_INDEX)", "$JOB_COMPLETION_INDEX")
            assert probe == ["sh", "-c", f"exec {shlex.join(asked)} /{folder}"]
        else:
            assert probe == asked
    program, script = asked
    assert program == "python" and Path(json.loads(last(instructions, "VOLUME"))[2]) == health.OUTPUTS
    if age is not None:
        sign = tmp_path / "alive.json"
        sign.write_text('{"doing": "training", "silence": 5}')
        os.utime(sign, (time.time() - age, time.time() - age))
    script = script.replace("/app", str(ROOT))
    environment = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}  # from any folder, with no variable of ours
    asked = subprocess.run(
        [sys.executable, script, str(tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    if age is not None and time.time() - age < health.started():
        pytest.fail("this machine is too new to have been hung for that long")
    assert asked.returncode == status and not asked.stderr, asked.stdout


@pytest.mark.parametrize("extras", ["", "heic jxl"])
def test_the_project_file_says_what_is_installed(instructions: list[tuple[str, str]], extras: str) -> None:
    (run,) = [argument for name, argument in instructions if name == "RUN" and "pip install" in argument]
    (list_them,) = re.findall(r"python -c '.*?' ", run)
    command = list_them.replace("python", sys.executable, 1)
    printed = subprocess.run(
        ["sh", "-c", command], cwd=ROOT, env={"EXTRAS": extras}, capture_output=True, text=True, check=True
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    always = ["s3", "gcs", "azure", "wandb"]  # what a mirror and the logs ask for
    wanted = [name for extra in (*always, *extras.split()) for name in project["optional-dependencies"][extra]]
    assert printed.stdout.splitlines() == [*project["dependencies"], *wanted] and len(wanted) == 7 + len(extras.split())


@pytest.mark.parametrize("build", ["cu130", "cu126", "cpu", "130"])
def test_pytorch_is_the_tests_version_in_the_build_that_was_asked_for(
    instructions: list[tuple[str, str]], build: str
) -> None:
    (run,) = [argument for name, argument in instructions if name == "RUN" and "pip install" in argument]
    asked = re.sub(r"python -c '.*?'", "true", run).replace("/tmp/requirements.txt", "requirements.txt")
    stand_in = 'pip() { printf "%s\\n" "$@"; }; rm() { :; }; '
    command = ["sh", "-c", stand_in + asked.replace("> requirements.txt", "")]
    done = subprocess.run(
        command, cwd=ROOT, env={"TORCH": build, "PATH": os.environ["PATH"]}, capture_output=True, text=True
    )  # fmt: skip
    if build == "130":
        assert done.returncode == 2 and done.stderr == "TORCH=130: there is cu130, cu126 and cpu\n"
        return
    words = done.stdout.splitlines()
    assert done.returncode == 0 and words[:5] == ["install", "-c", "constraints.txt", "-r", "requirements.txt"]
    # PyPI's wheel is the one of CUDA 13.0: no second index, which could name another package of that name.
    of_an_index = [f"torch=={pins()['torch']}+{build}", "--extra-index-url", f"https://download.pytorch.org/whl/{build}"]
    assert words[5:] == ([f"torch=={pins()['torch']}"] if build == "cu130" else of_an_index)


def test_what_is_published_is_what_the_recipes_take(instructions: list[tuple[str, str]]) -> None:
    assert loaded("image.yml")["jobs"]["image"]["strategy"]["matrix"]["torch"] == ["cu126", "cu130"]
    assert recipes.pods("kubernetes.yaml")[0].image.endswith(f"/lora-trainer:{settings(instructions)['TORCH']}")
    build, publish = (
        step["run"] for step in loaded("image.yml")["jobs"]["image"]["steps"] if step.get("name") in ("Build", "Publish")
    )
    assert '--target runpod -t "$IMAGE:$GITHUB_SHA-$TORCH-runpod"' in build and '"$TORCH" "$TORCH-runpod"' in publish


def test_the_build_context_leaves_out_weights_and_results() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {
        ".git",
        ".venv",
        "**/.env*",
        "!/docker/clouds/runpod.sh",
        "/models",
        "/outputs",
        "/data",
        "/cache",
        "**/*.safetensors",
    } <= set(ignored)
    # Without the leading slash these patterns would still mean the root, but a reader could think of these packages.
    assert not {"trainer", "trainer/models", "trainer/data", "**/models", "**/data", "constraints.txt"} & set(ignored)


# --- versions ---------------------------------------------------------------------------------------------------------


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {
        canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines if line[0] != "#")
    }


def project_needs() -> list[Requirement]:
    """Of the project with all of its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [
        Requirement(line) for lines in (project["dependencies"], *project["optional-dependencies"].values()) for line in lines
    ]


def loose(needs: Iterable[Requirement], pinned: Mapping[str, str]) -> Iterator[str]:
    """What of `needs`, and of what these need as they are installed here, has no version, or not one that is asked for."""
    waiting, seen = list(needs), set()
    while waiting:
        need = waiting.pop()
        name = canonicalize_name(need.name)
        # PyTorch's CUDA wheels bring these, and pin them.
        if name.startswith(("nvidia-", "cuda-")):
            continue
        if name not in pinned or not need.specifier.contains(pinned[name], prereleases=True):
            yield f"{need}: {pinned.get(name)}"
        elif (name, frozenset(need.extras)) not in seen:
            seen.add((name, frozenset(need.extras)))
            try:
                deeper = [Requirement(line) for line in metadata.requires(name) or []]
            except metadata.PackageNotFoundError:
                continue
            waiting += [
                d for d in deeper if d.marker is None or any(d.marker.evaluate({"extra": e}) for e in ("", *need.extras))
            ]


def test_every_package_has_a_version_and_it_is_one_that_is_asked_for() -> None:
    assert list(loose(project_needs(), pins())) == [], "run scripts/constraints.sh"
    for version in pins().values():
        assert re.fullmatch(r"\d[\w.]*", version), "no name of a build, no range"


@pytest.mark.parametrize(
    ("name", "version"), [("mpmath", None), ("torch", "2.10.0"), ("jsonschema", None), ("markupsafe", "1.0")]
)
def test_a_package_without_the_right_version_is_found(name: str, version: str | None) -> None:
    """mpmath: of sympy, of torch. jsonschema: of a tool of the tests."""
    kept = {key: value for key, value in pins().items() if key != name} | ({name: version} if version else {})
    assert any(line.startswith(name) for line in map(str.lower, loose(project_needs(), kept)))


@pytest.mark.parametrize("there", [[], ["torch"], ["torch", "triton"]])
def test_the_set_up_installs_them_and_keeps_a_pytorch_that_is_there(tmp_path: Path, there: list[str]) -> None:
    for name in ("scripts/setup.sh", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    stand_in = tmp_path / ".venv" / "bin" / "python"
    stand_in.parent.mkdir(parents=True)
    stand_in.write_text(
        f"""#!{sys.executable}
import shutil, sys
words = sys.argv[1:]
if words[0] == "-c":
    exec(words[1].replace("from importlib.util import find_spec", "find_spec = {there}.__contains__"))
elif words[:2] == ["-m", "pip"]:
    open("asked", "w").write(" ".join(words))
    shutil.copy(words[words.index("-c") + 1], "used")
""",
        encoding="utf-8",
    )
    stand_in.chmod(0o755)
    subprocess.run(["bash", "scripts/setup.sh", "dev"], cwd=tmp_path, env=os.environ | {"PYTHON": sys.executable}, check=True)
    assert (tmp_path / "asked").read_text().split()[-2:] == ["-e", ".[dev]"]
    used = {line.partition("==")[0] for line in (tmp_path / "used").read_text().splitlines()}
    left_out = {canonicalize_name(name) for name in pins()} - {canonicalize_name(name) for name in used}
    assert left_out == set(there)


# --- Kubernetes -------------------------------------------------------------------------------------------------------


def faults_of_pods(job: Mapping[str, Any]) -> Iterator[str]:
    """What a schema cannot ask of a Job."""
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    context, (trainer,) = pod["securityContext"], pod["containers"]
    if context.get("runAsNonRoot") is not True or not isinstance(context.get("runAsUser"), int) or context["runAsUser"] < 1:
        yield "it may run as root"
    if trainer["securityContext"].get("allowPrivilegeEscalation") is not False:
        yield "it may become root"
    if trainer["resources"]["limits"].get("nvidia.com/gpu") != 1:
        yield "it has no GPU"
    # With podFailurePolicy the API takes no other.
    if pod["restartPolicy"] != "Never":
        yield "its policy is not read"
    if spec.get("podReplacementPolicy") != "Failed":
        yield "two pods may be one run"
    rules = spec["podFailurePolicy"]["rules"]
    if not any(
        rule["action"] == "Ignore" and rule.get("onPodConditions") == [{"type": "DisruptionTarget"}] for rule in rules
    ):
        yield "a pod that was taken away counts as one that failed"


def final(job: Mapping[str, Any]) -> set[int]:
    """The statuses after which no pod comes."""
    rules = job["spec"]["podFailurePolicy"]["rules"]
    return {status for rule in rules if rule["action"] == "FailJob" for status in rule["onExitCodes"]["values"]}


@pytest.mark.parametrize("name", PODS)
def test_a_pod_is_no_roots_and_its_loss_is_no_failure(name: str) -> None:
    assert list(faults_of_pods(documents(name)["Job"])) == []


@pytest.mark.parametrize("name", PODS)
@pytest.mark.parametrize(
    ("before", "after"),
    [("runAsNonRoot: true", "fsGroup: 1000"), ("runAsUser: 1000", "runAsUser: 0"), ("nvidia.com/gpu: 1", "cpu: 1"),
     ("allowPrivilegeEscalation: false", "privileged: true"), ("restartPolicy: Never", "restartPolicy: OnFailure"),
     ("Policy: Failed", "Policy: TerminatingOrFailed"), ("type: DisruptionTarget", "type: Ready")],
)  # fmt: skip
def test_another_pod_is_found(name: str, before: str, after: str) -> None:
    assert before in text_of(name)
    (job,) = (d for d in yaml.safe_load_all(text_of(name).replace(before, after, 1)) if d["kind"] == "Job")
    assert len(list(faults_of_pods(job))) == 1


def test_statuses_that_would_come_again_end_the_job() -> None:
    table = (
        (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8").partition("## Exit status")[2].partition("\n## ")[0]
    )
    statuses = {int(number) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for number in row.split(",")}
    assert final(documents("kubernetes.yaml")["Job"]) == {status for status in statuses if 0 < status < 128}
    # torchrun has a status of its own.
    assert final(documents("kubernetes_elastic.yaml")["Job"]) == set()
    assert loaded("skypilot.yaml")["resources"]["job_recovery"] == {
        "recover_on_exit_codes": [143],
        "max_restarts_on_errors": 0,
    }


@pytest.mark.parametrize(("machines", "share"), [(1, 2), (2, 1)])
def test_an_elastic_run_keeps_the_micro_batches_of_an_update(tmp_path: Path, machines: int, share: int) -> None:
    """Of one machine or of two: else the run would be refused as another one."""
    job = documents("kubernetes_elastic.yaml")["Job"]
    (trainer,) = job["spec"]["template"]["spec"]["containers"]
    words = trainer["command"]
    assert words[0] == "torchrun" and "--nnodes=1:2" in words and job["spec"]["completions"] == 2
    service = documents("kubernetes_elastic.yaml")["Service"]
    name, port = service["metadata"]["name"], service["spec"]["ports"][0]["port"]
    assert f"--rdzv_endpoint={job['metadata']['name']}-0.{name}:{port}" in words
    assert job["spec"]["template"]["spec"]["subdomain"] == name and service["spec"]["clusterIP"] == "None"
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@"\n', encoding="utf-8")
    (tmp_path / "python").chmod(0o755)
    environment = {"WORLD_SIZE": str(machines), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = subprocess.run(words[words.index("bash") :], env=environment, capture_output=True, text=True, check=True).stdout
    assert f"step.accumulation={share}" in said.split() and said.startswith("train.py --config data/bear.toml")


# --- Slurm ------------------------------------------------------------------------------------------------------------


def directives(text: str) -> dict[str, str]:
    """As sbatch reads them: up to the first command."""
    found = {}
    for line in text.splitlines()[1:]:
        if line and not line.startswith("#"):
            break
        if asked := re.fullmatch(r"#SBATCH --([\w-]+)(?:=(\S+))?", line):
            found[asked[1]] = asked[2] or ""
    return found


def test_sbatch_reads_how_the_job_is_warned_and_queued_again() -> None:
    text = text_of("slurm.sh")
    found = directives(text)
    assert len(found) == len(re.findall(r"^#SBATCH", text, re.MULTILINE)), "one is written otherwise, or comes too late"
    assert {"requeue": "", "open-mode": "append", "gres": "gpu:1"}.items() <= found.items()
    assert "requeue" not in directives(text.replace("#SBATCH --requeue", "true\n#SBATCH --requeue"))


@contextmanager
def killed_in_time(job: subprocess.Popen[str]) -> Iterator[None]:
    """A block in which a job that hears no signal is killed in the end, with all that it started."""
    timer = threading.Timer(60, lambda: os.killpg(job.pid, signal.SIGKILL))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Any]:
    """Starts the script beside stand-ins: (what the run does, signal of Slurm) -> (exit status, what scontrol was asked)."""
    asked, python = tmp_path / "asked", tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {asked}\n', encoding="utf-8")
    (tmp_path / "scontrol").chmod(0o755)
    # As on a busy machine: the script waits before each of its commands, and what it started does not.
    slow = tmp_path / "slow.sh"
    slow.write_text("case $0 in *slurm.sh) trap 'sleep 0.02' DEBUG ;; esac\n", encoding="utf-8")

    def start(does: str, number: signal.Signals | None) -> tuple[int, str]:
        python.write_text(f"#!/bin/bash\n{does}\n", encoding="utf-8")
        python.chmod(0o755)
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "BASH_ENV": str(slow)}
        # A shell cannot trap what it was told to ignore, as tests that called train.py in this process are.
        command = ["env", "--default-signal=USR1", "bash", str(CLOUDS / "slurm.sh"), CONFIG]
        job = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        with job, killed_in_time(job):
            assert job.stdout is not None
            job.stdout.readline()
            if number is not None:
                job.send_signal(number)
            job.wait()
        return job.returncode, asked.read_text(encoding="utf-8").strip() if asked.exists() else ""

    return start


TRAINS = "trap 'sleep 0.2; exit {}' TERM; echo \"$@\"; while :; do sleep 0.02; done"


@pytest.mark.parametrize(
    ("does", "number", "ends"),
    [pytest.param(TRAINS.format(143), signal.SIGUSR1, (143, "requeue 7"), id="out of time"),
     pytest.param(TRAINS.format(143), signal.SIGTERM, (143, ""), id="cancelled"),
     pytest.param("kill -TERM $PPID; " + TRAINS.format(143), None, (143, ""), id="cancelled as it starts"),
     pytest.param(TRAINS.format(0), signal.SIGUSR1, (0, ""), id="done in the last minutes"),
     pytest.param(TRAINS.format(6), signal.SIGUSR1, (6, ""), id="could not save"),
     pytest.param("echo; exit 2", None, (2, ""), id="a mistake"),
     pytest.param("echo; exit 0", None, (0, ""), id="done")],
)  # fmt: skip
def test_a_job_that_ran_out_of_time_is_queued_again_and_no_other(slurm, does, number, ends) -> None:
    assert slurm(does, number) == ends


@pytest.mark.parametrize(
    ("task", "configs", "words"),
    [("", ["data/bear.toml"], "--config data/bear.toml --resume_from auto"),
     ("3", ["data/bear.toml"], "--config data/bear.toml --resume_from auto --set run.seed=3 "
      "--set run.name=bear-seed-3 run.output_dir=outputs/bear-seed-3"),
     ("1", ["data/bear.toml", "data/fox.toml"], "--config data/fox.toml --resume_from auto "
      "--set run.name=fox run.output_dir=outputs/fox"),
     ("2", ["data/bear.toml", "data/fox.toml"], "error: 2 configs, and none for task '2'; give sbatch --array=0-1"),
     ("", ["data/bear.toml", "data/fox.toml"], "error: 2 configs, and none for task ''; give sbatch --array=0-1")],
)  # fmt: skip
def test_each_task_of_an_array_is_a_run_with_an_output_of_its_own(
    tmp_path: Path, task: str, configs: list[str], words: str
) -> None:
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nshift; echo "$HF_TOKEN $*"\n', encoding="utf-8")
    python.chmod(0o755)
    (tmp_path / ".env").write_text("HF_TOKEN=of_the_file\n", encoding="utf-8")
    environment = os.environ | ({"SLURM_ARRAY_TASK_ID": task} if task else {})
    command = ["bash", str(CLOUDS / "slurm.sh"), *configs]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    if words.startswith("error"):
        assert (done.returncode, done.stderr.strip(), done.stdout) == (2, words, "")
    else:
        assert (done.returncode, done.stdout.strip()) == (0, f"of_the_file {words}")


# --- SkyPilot, RunPod -------------------------------------------------------------------------------------------------


def test_skypilot_takes_spot_machines_and_finds_another() -> None:
    task = loaded("skypilot.yaml")
    assert task["resources"]["use_spot"] is True and task["setup"] == "bash scripts/setup.sh s3"
    # As of the image: its Python and the compiler are those of the tests.
    assert re.findall(r"^FROM (python:[\d.]+)", text_of("Dockerfile"), re.MULTILINE)[0] in task["resources"]["image_id"]
    assert {"/data", "/outputs"} == task["file_mounts"].keys()


# https://docs.runpod.io/api-reference/templates/POST/templates: TemplateCreateInput
RUNPOD: dict[str, type] = {
    "name": str, "imageName": str, "category": str, "containerDiskInGb": int, "containerRegistryAuthId": str,
    "dockerEntrypoint": list, "dockerStartCmd": list, "env": dict, "isPublic": bool, "isServerless": bool, "ports": list,
    "readme": str, "volumeInGb": int, "volumeMountPath": str,
}  # fmt: skip


def faults_of_template(template: Mapping[str, Any]) -> Iterator[str]:
    yield from sorted({"name", "imageName", "volumeMountPath"} - template.keys())
    for key, value in template.items():
        if RUNPOD.get(key) is not type(value) or (isinstance(value, list) and not all(isinstance(v, str) for v in value)):
            yield key
    yield from (key for key, value in template.get("env", {}).items() if not isinstance(value, str))
    caches = [value for key, value in template.get("env", {}).items() if key in ("HF_HOME", "TRITON_CACHE_DIR")]
    if not all(f"{value}/".startswith(f"{template.get('volumeMountPath')}/") for value in caches):
        yield "a cache is not on the volume"


def test_the_template_has_the_keys_of_runpods_api() -> None:
    template = json.loads(text_of("runpod.json"))
    assert list(faults_of_template(template)) == []
    assert f"\ncd {template['volumeMountPath']}\n" in text_of("runpod.sh")
    runpod = dict(stages()["trainer AS runpod"])
    assert runpod["USER"] == "0" and json.loads(runpod["ENTRYPOINT"]) == ["bash", "/app/docker/clouds/runpod.sh"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [({"volumeMount": "/workspace"}, "volumeMount"), ({"volumeInGb": "100"}, "volumeInGb"), ({"isPublic": 0}, "isPublic"),
     ({"dockerStartCmd": "cd"}, "dockerStartCmd"), ({"env": {"HF_HOME": 1}}, "HF_HOME"),
     ({"env": {"HF_HOME": "/root"}}, "a cache is not on the volume")],
)  # fmt: skip
def test_another_template_is_found(change: dict[str, Any], fault: str) -> None:
    assert fault in list(faults_of_template(json.loads(text_of("runpod.json")) | change))


@pytest.mark.parametrize(("uid", "writes"), [("1000", True), ("0", True), ("0", False)])
def test_a_volume_of_root_is_trained_on_as_the_user_or_the_start_says_what_to_do(
    tmp_path: Path, uid: str, writes: bool
) -> None:
    """With stand-ins for what asks for root's rights; tests/proofs/image.py has the rights themselves."""
    as_user = 'while [ "${1#-}" != "$1" ]; do case $1 in --re*) shift ;; esac; shift; done; '
    stand_ins = {
        "id": f"[ $# -eq 1 ] && echo {uid} || echo 1000",
        "find": "exit 1" if not writes else "",
        "setpriv": as_user + ('exec "$@"' if writes else "exit 1"),
        "python": 'echo "$HF_TOKEN $AWS_ACCESS_KEY_ID $*"',
    }
    for name, does in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    script = text_of("runpod.sh").replace("cd /workspace", f"cd {shlex.quote(str(tmp_path))}")
    environment = dict(recipes.runpod({"HF_TOKEN": "hf_1"}).environment) | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "-c", script, "runpod.sh", *recipes.runpod({}).words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if writes:
        trains = "hf_1  /app/train.py --config data/bear.toml --resume_from auto"
        left_out = "this account has no secret for AWS_ACCESS_KEY_ID AWS_ENDPOINT_URL AWS_SECRET_ACCESS_KEY WANDB_API_KEY"
        assert (done.returncode, done.stdout.splitlines()) == (0, [left_out, trains]), done.stderr
    else:
        assert done.returncode == 2 and f"error: {tmp_path}/cache belongs to" in done.stderr, done.stderr
        assert f"run chmod -R a+rwX {tmp_path}/cache {tmp_path}/outputs" in done.stderr
