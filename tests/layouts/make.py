"""Make the fixture of a checkpoint layout: what the commit that wrote it leaves after two steps.

    python tests/layouts/make.py 663d709 tests/layouts/5.tar.xz

When the layout changes, the last commit of the one before makes its fixture. tests/integration/test_older_layouts.py exports
and resumes all of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import tomli_w

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from proofs.shared import PHOTOS, STARTED, make_models, worktree  # noqa: E402

MODEL, STOP = "sdxl", 2
BLOCK = "mid_block.attentions.0.transformer_blocks.0"


def tree(output: str) -> dict[str, Any]:
    """A DoRA over float8, of layers with ranks and alphas of their own, one in a text encoder. Its paths are relative."""
    rules = [
        {"component": "unet", "match": f"{BLOCK}.ff.net.2", "rank": 1, "alpha": 3.0},
        {"component": "text_encoder", "match": "*layers.0.self_attn.q_proj", "rank": 1},
    ]
    return {
        "run": {"name": "bear", "output_dir": output, "seed": 7, "max_steps": 4, "stop_after": STOP, "device": "cpu"},
        "model": {"family": "sdxl", "path": MODEL, "components": {"unet": {"dtype": "fp8_e4m3"}}},
        "precision": {"compute": "fp32"},
        "adapter": {"type": "dora", "rank": 2, "alpha": 1.0, "targets": [f"{BLOCK}.attn1.to_q"], "rules": rules},
        "data": {"resolution": 64, "batch_size": 2, "sources": [{"path": PHOTOS.name}], "cache_dir": "cache"},
        "optimizer": {"lr": 1e-2},
        "schedule": {"warmup": 0},
        "checkpoint": {"every_steps": STOP},
        "export": {"every_steps": STOP},
        "validation": {"every_steps": 0},
        "logging": {"tensorboard": False},
    }


def place(folder: Path, models: Path) -> None:
    """What the config's paths mean, below `folder`."""
    os.symlink(models / "sdxl", folder / MODEL)
    os.symlink(PHOTOS, folder / PHOTOS.name)


def main(commit: str, out: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        place(folder, make_models(folder / "models", ["sdxl"]))
        (folder / "run.toml").write_text(tomli_w.dumps(tree("out")))
        with worktree(commit, folder / "code") as code:
            own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "SOURCE_DATE_EPOCH": STARTED, "CUDA_VISIBLE_DEVICES": ""}
            command = [sys.executable, str(code / "train.py"), "--config", "run.toml"]
            subprocess.run(command, cwd=folder, env=os.environ | own | {"PYTHONPATH": str(code)}, check=True)
        kept = folder / "kept"
        shutil.copytree(folder / "out" / "checkpoints" / f"step-{STOP:08d}", kept / f"step-{STOP:08d}")
        shutil.copytree(folder / "out" / "adapters", kept / "adapters")
        with tarfile.open(out, "w:xz") as archive:
            for path in sorted(path for path in kept.rglob("*") if path.is_file()):
                with path.open("rb") as content:
                    entry = tarfile.TarInfo(str(path.relative_to(kept)))
                    entry.size = path.stat().st_size
                    archive.addfile(entry, content)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
