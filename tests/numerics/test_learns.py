"""It learns: over fixed draws the loss falls, and a float8 base keeps most of that."""

from __future__ import annotations

import pytest
import torch

from tests.harness import DENOISER, PHOTOS, Workbench, built
from trainer.types import Batch, Occurrence

DRAWS = 12  # for each of two images: 24 fixed (noise, timestep) pairs


def fall_of_the_loss(bench: Workbench, family: str, kind: str, dtype: str) -> float:
    """1 - last / first mean loss over the fixed draws, after 100 steps at lr 1e-2."""
    data = bench.tmp / "photos"
    if not data.exists():
        data.mkdir()
        for name in ("01.jpg", "01.txt", "03.jpg", "03.txt"):
            (data / name).write_bytes((PHOTOS / name).read_bytes())
    components = {DENOISER[family]: {"dtype": dtype}}
    config = bench.config(
        family, adapter__type=kind, adapter__rank=8, adapter__alpha=8.0, adapter__targets="attention+mlp",
        model__components=components, data__sources=[{"path": str(data)}], data__caption_dropout=0.0,
        data__bucket_step=64, optimizer__lr=1e-2, run__output_dir=str(bench.tmp / f"{family}-{kind}-{dtype}"),
        data__cache_dir=str(bench.tmp / f"cache-{family}"),
    )  # fmt: skip
    with built(config) as run:
        samples = sorted(run.reader.photos)
        pairs = [Occurrence(draw, sample, 0, 0) for draw in range(DRAWS) for sample in samples]
        batches = [run.reader[tuple(pairs[i : i + 8])] for i in range(0, len(pairs), 8)]

        def mean_loss() -> float:
            with torch.no_grad():
                return float(torch.cat([run.step.losses(batch) for batch in batches]).mean())

        first = mean_loss()
        for step in range(100):
            batch: Batch = run.reader[tuple(pairs[(2 * step) % len(pairs) : (2 * step) % len(pairs) + 2])]
            run.step.run(step + 1, [batch], 2)
        return 1 - mean_loss() / first


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("sdxl", "lora"),
        ("flux", "dora"),
        # The other two take a minute; the default suite has each family and each kind once.
        pytest.param("sdxl", "dora", marks=pytest.mark.slow),
        pytest.param("flux", "lora", marks=pytest.mark.slow),
    ],
)
def test_the_loss_falls_and_float8_keeps_it(bench: Workbench, record_property, family: str, kind: str) -> None:
    exact = fall_of_the_loss(bench, family, kind, "fp32")
    float8 = fall_of_the_loss(bench, family, kind, "fp8_e4m3")
    record_property("fall over fp32", exact)
    record_property("fall over fp8_e4m3", float8)
    print(f"{family} {kind}: the loss falls by {exact:.1%} over fp32, {float8:.1%} over fp8_e4m3")
    assert exact >= 0.05
    assert float8 >= 0.7 * exact
