"""What it costs to read FLUX.2 klein's captions after other layers of its text encoder than its own.

    python benchmarks/text_layers.py

The pipeline reads Qwen3 after layers 9, 18 and 27; diffusers' training scripts read 10, 20 and 30, which are those of
FLUX.2 [dev]. The pocket klein was trained with 27 layers, so the third is that one here either way. Its loss is measured on
the icons of examples/icons/trained, over fixed draws of time and noise, as it was trained and with the other layers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import lessons  # noqa: E402
from tests.harness import built  # noqa: E402
from trainer.models.flux2 import names  # noqa: E402

OWN, OTHERS = names.LAYERS, (10, 20, 27)
DRAWS = 16


def loss(layers: tuple[int, ...]) -> float:
    """The mean loss of the icons that the model was trained on, before any adapter. layers: after which Qwen3 is read."""
    # Captions are encoded live: the cache knows one set of layers.
    changes = {"data__cache": "none", "adapter__type": "lora"}
    with TemporaryDirectory() as folder, patch.object(names, "LAYERS", layers):
        out = Path(folder)
        with built(lessons.config("flux2", 0, out / "run", out / "cache", changes=changes)) as run:
            examiner = lessons.Examiner(run)
            sources = range(2, len(run.plan.config.data.sources))
            found = [each for at in sources for each in examiner.losses(examiner.samples(at), DRAWS)]
    return sum(found) / len(found)


if __name__ == "__main__":
    own, others = loss(OWN), loss(OTHERS)
    print(f"layers {OWN}: loss {own:.4f}; {OTHERS}: {others:.4f}, {others / own - 1:+.1%}")
