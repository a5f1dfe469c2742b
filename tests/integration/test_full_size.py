"""Models of the published sizes. Files of them are sparse here: headers that are true, and next to nothing on the disk."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import make_model as maker
from tests.harness import ROOT, Workbench
from tests.integration.test_mutated_files import changed_bytes
from trainer.base.errors import UserError
from trainer.base.tensorfile import Recipe, TensorFile
from trainer.models import FAMILIES
from trainer.models.opening import open_model
from trainer.plan.run_plan import make_plan, open_source, resolve
from workbench.summary.plan import describe

PADDING = "spiece_model"  # of the names that a Flux file may have beside the weights, the first in the file
GIGABYTE = 10**9


def never() -> torch.Tensor:
    raise AssertionError("a tensor was made")


def sparse_model(
    monkeypatch, path: Path, *, size: str = "full", family: str, layout: str, dtype: torch.dtype | None = None, total=0
) -> None:
    """A model of `make_model.py` without its weights. dtype: of the file's tensors; total: its bytes, padded in front."""

    write_sparse = maker.write_sparse

    def sparse(path, tensors, metadata=None):
        tensors = {name: Recipe(dtype or t.dtype, tuple(t.shape), never) for name, t in tensors.items()}
        missing = total - sum(map(maker.size_of, tensors.values()))
        if missing > 0 and path == out:
            tensors[PADDING] = Recipe(torch.float64, (missing // 8,), never)
        write_sparse(path, tensors, metadata)

    out = path
    monkeypatch.setattr(maker, "write_sparse", sparse)
    assert maker.main(["--size", size, "--family", family, "--layout", layout, "--sparse", str(out)]) == 0


@pytest.mark.parametrize(
    ("gigabytes", "family", "layout", "dtype"),
    [(5, "sdxl", "diffusers", None), pytest.param(1000, "flux", "single_file", torch.float64, marks=pytest.mark.slow)],
)
def test_full_size_files_are_planned_over(
    monkeypatch, bench: Workbench, gigabytes: int, family: str, layout: str, dtype
) -> None:
    """The transformer's file is as large as that. A plan reads headers alone, and the sizes that it tells are true."""
    path = bench.tmp / ("model" if layout == "diffusers" else "model.safetensors")
    total = 1000 * GIGABYTE if family == "flux" else 0
    sparse_model(monkeypatch, path, family=family, layout=layout, dtype=dtype, total=total)
    denoiser = FAMILIES[family].denoiser
    files = sorted((path / denoiser).glob("*.safetensors")) if layout == "diffusers" else [path]
    assert abs(sum(file.stat().st_size for file in files) / GIGABYTE - gigabytes) < 0.3
    assert sum(file.stat().st_blocks * 512 for file in files) < 4_000_000

    monkeypatch.setattr(TensorFile, "read", lambda self, name: never())
    config = bench.config(family, model__path=str(path), adapter__targets="attention+mlp", adapter__rank=16)
    source = open_source(config)
    config = resolve(config, source)
    told = describe(make_plan(config, source, processes=1), sizes=True)
    sizes = dict(re.findall(r"^  (\w+) +stored .*  ([\d.]+ [GM]iB)$", told, re.MULTILINE))
    assert sizes[denoiser] == {"sdxl": "4.79 GiB", "flux": "22.17 GiB"}[family], told


@pytest.mark.slow
def test_hundreds_of_damages_of_a_100_gigabyte_files_header_are_each_one_typed_error(monkeypatch, tmp_path) -> None:
    """Of Flux's transformer with two blocks: its names and shapes are known, so what is well-formed is seen too."""
    path = tmp_path / "flux.safetensors"
    options = dict(size="short", family="flux", layout="single_file", dtype=torch.float64, total=100 * GIGABYTE)
    sparse_model(monkeypatch, path, **options)
    with open(path, "rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
    data = path.stat().st_size - 8 - len(header)
    assert data == 100 * GIGABYTE
    open_model(FAMILIES["flux"], str(path)).verify("transformer")

    whole, said = means(header), Counter()
    for seed in range(200):
        rng = random.Random(seed)
        damaged, length = header, len(header)
        while means(damaged[:length]) == whole:  # a space more means nothing
            damaged = changed_bytes(header, rng) if seed % 2 else other_letter(header, rng)
            length = rng.choice((len(header), len(damaged)))  # or the file is as long as its header says
        with open(path, "r+b") as file:
            file.truncate(0)
            file.write(length.to_bytes(8, "little") + damaged)
            file.truncate(8 + length + data)
        with pytest.raises(UserError) as refused:
            open_model(FAMILIES["flux"], str(path)).verify("transformer")
        assert str(path) in str(refused.value), refused.value
        said[re.sub(r"'.*?'|\d+", "...", str(refused.value).removeprefix(str(path)))] += 1
    assert len(said) >= 5, said


def other_letter(header: bytes, rng: random.Random) -> bytes:
    """One digit of an offset or a size, or one letter of a name or a dtype, is another: still JSON."""
    letters = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    at = 0
    while header[at] not in letters:
        at = rng.randrange(len(header))
    kind = letters[:10] if header[at] in letters[:10] else letters[10:]
    return header[:at] + bytes([rng.choice(kind)]) + header[at + 1 :]


def means(header: bytes) -> object:
    try:
        return json.loads(header)
    except (ValueError, RecursionError):
        return None


# --- real bytes -------------------------------------------------------------------------------------------------------


def prove(family: str, *options: str, **environment: str) -> dict[str, Any]:
    """The proof's cells by name, once it has found that everything holds."""
    out = Path(options[options.index("--out") + 1])
    command = [sys.executable, "tests/proofs/full_size.py", "--family", family, *options]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())["families"][family]


@pytest.mark.proof
@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_the_published_widths_with_one_block_of_each_kind_are_trained_and_exported(tmp_path, family: str) -> None:
    """The proof's first training, of a smaller model: float8, DoRA, both adapter files, every phase accounted for."""
    options = ["--size", "short", "--cells", "float8 DoRA 64 px", "--out", str(tmp_path / "proof.json")]
    cells = prove(family, *options, TMPDIR=str(tmp_path))
    cell, written = cells["float8 DoRA 64 px"], cells["write the model, shards"]
    assert not list(tmp_path.glob("full-size-*")), "the model is still there"
    # Of the model's bytes a few tensors at a time are in memory, and a block of random numbers.
    assert written["phases"][0]["written_bytes"] > 1.4 * GIGABYTE and written["peak_bytes"] < 0.9 * GIGABYTE
    assert all(map(math.isfinite, cell["loss"])) and len(cell["loss"]) == {"sdxl": 2, "flux": 1}[family]
    assert cell["sha256"].keys() == {f"{n}.safetensors" for n in ("adapter", "optimizer", "proof", "proof_comfyui")}
    phases = {phase["phase"]: phase for phase in cell["phases"]}
    before, after = phases["all before the first step"], phases["all after the last step"]
    steps = sum(phase["seconds"] for name, phase in phases.items() if name.startswith("step "))
    assert abs(before["seconds"] + steps + after["seconds"] - cell["seconds"]) < 0.05 * cell["seconds"]
    denoiser = phases[f"loading {FAMILIES[family].denoiser}"]
    assert denoiser["read_bytes"] > 0.8 * GIGABYTE and denoiser["peak_bytes"] <= cell["peak_bytes"]


@pytest.mark.proof
@pytest.mark.parametrize(
    ("family", "gigabytes", "count", "equal"),
    [("sdxl", 18, 10, 2), ("flux", 40, 5, 0)],  # the models, the plan and the trainings; cells that end in another's bytes
)
def test_full_size_models_are_trained_and_exported_within_their_limits(
    tmp_path, family: str, gigabytes: int, count: int, equal: int
) -> None:
    free = shutil.disk_usage(tmp_path).free
    if free < gigabytes * GIGABYTE:
        pytest.skip(f"the proof writes {gigabytes} GB, and {tmp_path} has {free / GIGABYTE:.0f} GB free")
    # The limits are those of the whole machine, not of a test's one thread.
    threads = str(len(os.sched_getaffinity(0)))
    out = tmp_path / "proof.json"
    cells = prove(family, "--keep", str(tmp_path), "--out", str(out), OMP_NUM_THREADS=threads)
    assert sum("equal_bytes" in cell for cell in cells.values()) == equal
    assert all(limit["met"] for cell in cells.values() for limit in cell.get("limits", ()))
    assert len(cells) == count
