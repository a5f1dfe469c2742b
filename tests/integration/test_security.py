"""Nothing that can run code is read: no pickles, no code of a model's own; libraries are newer than their known holes."""

from __future__ import annotations

import ast
import json
import tomllib
from pathlib import Path

import pytest

from tests.harness import ROOT
from trainer.base.errors import UserError
from trainer.models import FAMILIES
from trainer.models.opening import open_model
from trainer.models.tokenizers import load_tokenizer

FOLDERS = ("trainer", "workbench", "scripts", "benchmarks", "tests/proofs", "examples")
SOURCES = [ROOT / "train.py", *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))]
PICKLES = [".bin", ".pt", ".pth", ".ckpt"]
# Modules that run what they read.
LOADERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
# The oldest releases without a published hole that lets a file run code (November 2026).
FLOORS = {"torch": (2, 10), "transformers": (5, 3)}


@pytest.mark.parametrize("suffix", PICKLES)
@pytest.mark.parametrize("exists", [True, False], ids=["there", "not there"])
def test_a_pickled_model_is_refused(tmp_path: Path, suffix: str, exists: bool) -> None:
    """By its name: not a byte of it is read."""
    path = tmp_path / f"model{suffix}"
    if exists:
        path.write_bytes(b"\x80\x04")
    with pytest.raises(UserError, match=r"model\.path = .* is a pickle.*convert it to \.safetensors"):
        open_model(FAMILIES["sdxl"], str(path))


@pytest.mark.parametrize("suffix", PICKLES)
def test_a_pickled_component_is_refused(tmp_path: Path, suffix: str) -> None:
    """Named by its key, or found in a folder in place of its safetensors twin."""
    (tmp_path / "model_index.json").write_text("{}")
    path = tmp_path / f"unet{suffix}"
    path.write_bytes(b"\x80\x04")
    with pytest.raises(UserError, match=r"model\.components\.unet\.path = .* is a pickle.*convert it to \.safetensors"):
        open_model(FAMILIES["sdxl"], str(tmp_path), component_paths={"unet": str(path)})
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / f"diffusion_pytorch_model{suffix}").write_bytes(b"\x80\x04")
    for component_paths in ({}, {"unet": str(tmp_path / "unet")}):
        source = open_model(FAMILIES["sdxl"], str(tmp_path), component_paths=component_paths)
        with pytest.raises(UserError, match=rf"diffusion_pytorch_model\{suffix} there is a pickle.*convert it"):
            source.weights("unet")


def faults(source: str) -> set[str]:
    """What in a module's text could run what it reads."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.partition(".")[0] in LOADERS}
        elif isinstance(node, ast.ImportFrom):
            root = (node.module or "").partition(".")[0]
            found |= {node.module} if root in LOADERS else set()
            found |= {f"torch.{a.name}" for a in node.names if root == "torch" and a.name in ("load", "save")}
        elif isinstance(node, ast.Attribute) and node.attr in ("load", "save") and isinstance(node.value, ast.Name):
            found |= {f"{node.value.id}.{node.attr}"} if node.value.id in ("torch", "np", "numpy") else set()
        elif isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "allow_pickle", "use_safetensors"):
            safe = isinstance(node.value, ast.Constant) and node.value.value is (node.arg == "use_safetensors")
            found |= set() if safe else {f"{node.arg}={ast.unparse(node.value)}"}
    return found


def test_no_module_reads_or_writes_pickles_or_trusts_code() -> None:
    assert len(SOURCES) > 50
    assert {path.name: found for path in SOURCES if (found := faults(path.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize(
    "line",
    ["import pickle", "import pickle as p", "from pickle import loads", "torch.load('x')", "from torch import load",
     "f = torch.save", "np.load('x')", "A.from_pretrained('x', trust_remote_code=True)", "f(trust_remote_code=flag)",
     "np.frombuffer(allow_pickle=True)", "A.from_pretrained('x', use_safetensors=False)", "import dill"],
)  # fmt: skip
def test_the_search_finds(line: str) -> None:
    assert faults(line)


def test_the_search_lets_pass() -> None:
    assert not faults(
        "json.load(f); torch.load_state = 1; f(trust_remote_code=False, use_safetensors=True); a.load_state_dict({})"
    )


@pytest.mark.parametrize("name", FLOORS)
def test_versions_are_above_known_holes(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (asked,) = [line for line in project["dependencies"] if line.startswith(f"{name}>")]
    floor = asked.removeprefix(f"{name}>=").partition(",")[0]
    assert tuple(map(int, floor.split("."))) >= FLOORS[name]


@pytest.mark.parametrize("kind", ["Wild", "T5TokenizerFast", ""])
def test_a_tokenizer_with_code_of_its_own_is_refused_without_a_question(tmp_path: Path, monkeypatch, kind: str) -> None:
    folder = tmp_path / "tokenizer_2"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": kind, "auto_map": {"AutoTokenizer": ["wild.Wild", "wild.Wild"]}})
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "wild", "auto_map": {"AutoConfig": "wild.Config"}}))
    (folder / "wild.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    (folder / "spiece.model").write_bytes(b"no sentencepiece model")
    monkeypatch.setattr("builtins.input", lambda *prompt: pytest.fail("a question was asked"))
    with pytest.raises(UserError, match="(?s)cannot be read: .*code of a model's own is never run"):
        load_tokenizer(tmp_path / "tokenizer_2", "tokenizer_2")
    assert not (tmp_path / "ran").exists()
