"""The core runs without the workbench, and each folder of the workbench can be deleted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.harness import ROOT, Workbench
from trainer import config as configs
from trainer.base.tensorfile import TensorFile
from workbench.commands import launch

# By folder a command that is made of it, and what stands on the folder beside commands.
FOLDERS = {
    "importing": ("scripts/import_config.py", "their.toml"),
    "adapters": ("scripts/adapter.py", "show", "their.safetensors"),
    "audit": ("scripts/audit.py", "model", "--config", "run.toml", "--formats", "nf4", "--out", "audit"),
    "replay": ("scripts/replay.py", "checkpoint"),
    "compare": ("train.py", "--compare", "compare.toml"),
    "drawing": ("scripts/sample.py", "model", "--prompt", "a", "--out", "drawn"),
    "watch": ("scripts/watch.py", "runs"),
    "mirror": ("train.py", "--config", "run.toml", "--set", "checkpoint.mirror=file:///tmp/mirror"),
}
STANDS_ON = {"compare": ("watch",)}
ALONE = """
import sys
sys.modules["workbench"] = None  # whoever imports it fails
import socket
from trainer import config
from trainer import Session
from trainer.base.errors import UserError

def connect(*words):
    raise AssertionError("the core opened a connection")

socket.socket.connect = connect
for resume_from, stop in ((None, 2), ("auto", 3)):
    loaded = config.load(sys.argv[1], [f"run.stop_after={stop}"])
    with Session.open(loaded, resume_from=resume_from) as session:
        assert session.train() == (stop == 3)
try:
    Session.open(config.load(sys.argv[1], ['model.path="someone/sdxl"']))
except UserError as error:
    print(error)
"""


# An editable installation would find what is not in the copy in the tree that it was made from.
OF_THE_COPY = """
import runpy, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
"""
PROGRAM = OF_THE_COPY + "sys.argv = sys.argv[1:]; sys.path.insert(0, ''); runpy.run_path(sys.argv[0], run_name='__main__')"


def run(*words: str, folder: Path, code: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(code), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_the_core_trains_saves_resumes_and_exports_alone(bench: Workbench) -> None:
    """With the bytes of a run that has all parts."""
    tree = bench.tree("sdxl", adapter__type="dora", run__output_dir="alone", data__cache_dir=str(bench.tmp / "cache"))
    path = bench.tmp / "run.toml"
    path.write_text(configs.dumps(configs.parse(tree)).replace("tensorboard = false\n", ""))
    done = run("-c", ALONE, str(path), folder=bench.tmp)
    assert done.returncode == 0, done.stderr
    assert "no advice on memory, report, verdict, model card, summary, TensorBoard files" in done.stdout
    assert "model.path = 'someone/sdxl' is no local file or folder; a hub id is read by 'hub', a part that" in done.stdout
    assert launch.train(configs.parse(tree | {"run": tree["run"] | {"output_dir": str(bench.tmp / "all")}}), resume_from=None)
    for file in ("adapter.safetensors", "optimizer.safetensors"):
        alone, everything = (bench.tmp / folder / "checkpoints" / "step-00000003" / file for folder in ("alone", "all"))
        assert alone.read_bytes() == everything.read_bytes(), file
    alone, everything = (
        TensorFile(bench.tmp / each / "adapters" / "bear.safetensors").read_all() for each in ("alone", "all")
    )
    assert alone.keys() == everything.keys() and all(torch.equal(alone[name], everything[name]) for name in alone)
    assert not (bench.tmp / "alone" / "report.html").exists() and (bench.tmp / "all" / "report.html").exists()


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    code = tmp_path_factory.mktemp("code")
    for name in ("trainer", "workbench", "scripts"):
        shutil.copytree(ROOT / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", code)
    return code


@pytest.mark.parametrize(
    "folders",
    [
        pytest.param([*FOLDERS], id="all of them", marks=pytest.mark.slow),
        *(pytest.param([each], id=each, marks=pytest.mark.proof) for each in FOLDERS),
    ],
)
def test_a_folder_of_the_workbench_can_be_deleted(bench: Workbench, copy: Path, folders: list[str]) -> None:
    """The rest imports, and a command that is made of it is refused by name."""
    gone = dict.fromkeys(name for folder in folders for name in (folder, *STANDS_ON.get(folder, ())))
    aside = [(copy / "workbench" / name).rename(copy / f"{name}.aside") for name in gone]
    try:
        files = [path.relative_to(copy).with_suffix("") for path in copy.glob("*/**/*.py") if "aside" not in str(path)]
        modules = [".".join(file.parts).removesuffix(".__init__") for file in files if file.parts[0] != "scripts"]
        modules = [module for module in modules if not module.endswith("_triton")]
        imports = f"{OF_THE_COPY}from importlib import import_module\nfor name in {modules}: import_module(name)"
        done = run("-c", imports, folder=copy, code=copy)
        assert done.returncode == 0, done.stderr
        (bench.tmp / "run.toml").write_text(configs.dumps(bench.config()).replace("tensorboard = false\n", ""))
        for name in ("their.toml", "compare.toml"):
            (bench.tmp / name).write_text("")
        for folder in folders:
            program, *words = FOLDERS[folder]
            done = run("-c", PROGRAM, str(copy / program), *words, folder=bench.tmp, code=copy)
            named = "checkpoint.mirror = " if folder == "mirror" else f"workbench/{folder} is not here"
            assert done.returncode == 2 and named in done.stderr and "Traceback" not in done.stderr, done.stderr
    finally:
        for name, path in zip(gone, aside, strict=True):
            path.rename(copy / "workbench" / name)
