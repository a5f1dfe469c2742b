"""Do other versions of the libraries encode as these do? Captions and photos by tiny and pocket models of every family.

    python tests/proofs/encodings.py > pinned.txt               # with the versions of constraints.txt
    pip install --upgrade transformers diffusers
    python tests/proofs/encodings.py --against pinned.txt       # exit status 1: a line differs

A line is a model and the digest of all its encodings: of every caption, and of the latents of every photo. The first line
names the versions, which may differ. Digests are of one type of CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.proofs.shared import FAMILIES, PHOTOS, make_models  # noqa: E402
from trainer import config  # noqa: E402
from trainer.base.tensorfile import TensorFile  # noqa: E402
from trainer.run.session import Session  # noqa: E402
from workbench.commands.launch import make_launch  # noqa: E402

LIBRARIES = ("torch", "diffusers", "transformers", "tokenizers")


def digest(family: str, model: Path, folder: Path) -> str:
    """The digest of all encodings of a run over that model, which are made below `folder`."""
    cache = folder / "cache"
    keys = {
        "run": {"name": "encodings", "output_dir": str(folder / "out"), "max_steps": 1},
        "model": {"family": family, "path": str(model)},
        "precision": {"compute": "fp32"},
        "data": {"resolution": 64, "sources": [{"path": str(PHOTOS)}], "cache_dir": str(cache)},
    }
    with contextlib.redirect_stdout(sys.stderr), Session(config.parse(keys), "train", make_launch(None)):
        pass
    found = [TensorFile(path).read_all() for path in cache.rglob("*.safetensors")]
    parts = [
        "".join(f"{name} {hashlib.sha256(t.numpy().tobytes()).hexdigest()} " for name, t in sorted(entry.items()))
        for entry in found
    ]
    return f"{len(found)} encodings {hashlib.sha256(''.join(sorted(parts)).encode()).hexdigest()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="what this printed with other versions")
    before = parser.parse_args().against
    print(", ".join(f"{name} {version(name)}" for name in LIBRARIES))
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        folder, families = Path(temporary), (*FAMILIES, "flux2")
        with contextlib.redirect_stdout(sys.stderr):
            make_models(folder, families)
        for family in families:
            for kind, model in (("tiny", folder / family), ("pocket", ROOT / "examples" / f"pocket_{family}")):
                lines.append(f"{kind} {family}: {digest(family, model, folder / f'{kind} {family}')}")
                print(lines[-1])
    others = before.read_text(encoding="utf-8").splitlines()[1:] if before else lines
    for line in sorted({*lines} ^ {*others}):
        print(f"differs: {line}", file=sys.stderr)
    return int(lines != others)


if __name__ == "__main__":
    sys.exit(main())
