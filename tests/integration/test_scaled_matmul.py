"""precision.matmul = "fp8" from the config on: refused where it means nothing, and a run like any other where it does."""

from __future__ import annotations

import pytest

from tests.harness import DENOISER, Workbench, metrics_of
from trainer import kernels
from workbench.commands import main as cli


def command(bench: Workbench, family: str, **more) -> list[str]:
    tree = bench.tree(family, precision__matmul="fp8", data__cache_dir=str(bench.tmp / "cache"), **more)
    return ["--config", str(bench.write(tree)), "--resume_from", "auto"]


@pytest.mark.parametrize(
    ("dtype", "compute"), [("bf16", "bf16"), ("fp8_e5m2", "bf16"), ("int8", "bf16"), ("fp8_e4m3", "fp16")]
)
def test_refused_where_the_denoiser_cannot(bench: Workbench, capsys, dtype: str, compute: str) -> None:
    stored = {"unet": {"dtype": dtype}, "text_encoder": {"dtype": "fp8_e4m3"}}
    assert cli.main(command(bench, "sdxl", model__components=stored, precision__compute=compute)) == 2
    error = capsys.readouterr().err
    assert "precision.matmul = 'fp8'" in error and f"dtype = {dtype!r}" in error and f"compute = {compute!r}" in error
    assert not (bench.tmp / "out").exists()


@pytest.mark.slow
def test_small_layers_keep_the_ordinary_product(bench: Workbench, capsys) -> None:
    """Said at the start; the run is then the same as without, byte for byte."""
    stored = {"transformer": {"dtype": "fp8_e4m3"}}
    config = command(bench, "flux", model__components=stored, precision__compute="bf16", run__max_steps=1)
    for matmul in ("fp8", "compute"):
        sets = [f"precision.matmul={matmul}", f"run.output_dir={bench.tmp / matmul}"]
        assert cli.main([*config, *(part for each in sets for part in ("--set", each))]) == 0
    assert "0 of 40 float8 Linears are wide enough" in capsys.readouterr().out
    assert metrics_of(bench.tmp / "fp8") == metrics_of(bench.tmp / "compute")


@pytest.mark.parametrize("family", ["flux", pytest.param("sdxl", marks=pytest.mark.slow)])
def test_a_run_that_multiplies_in_float8(bench: Workbench, capsys, monkeypatch, family: str) -> None:
    """With the gate open: trains near the ordinary run but not on it. It keeps nothing that a resume could lose."""
    monkeypatch.setattr(kernels, "FP8_MIN_WEIGHTS", 1)
    monkeypatch.setattr(kernels, "FP8_MIN_ROWS", 1)
    config = command(
        bench, family, model__components={DENOISER[family]: {"dtype": "fp8_e4m3"}}, precision__compute="bf16",
        adapter__type="dora", adapter__targets="attention+mlp", run__max_steps=2,
    )  # fmt: skip
    for matmul in ("compute", "fp8"):
        sets = [f"run.output_dir={bench.tmp / matmul}", f"precision.matmul={matmul}"]
        assert cli.main([*config, *(part for each in sets for part in ("--set", each))]) == 0
    assert "float8 Linears are wide enough to multiply in float8" in capsys.readouterr().out
    ours, ordinary = metrics_of(bench.tmp / "fp8"), metrics_of(bench.tmp / "compute")
    for one, other in zip(ours, ordinary, strict=True):
        assert one["loss"] != other["loss"]
        # Each product is off by some 4 %, at random; the loss of a few thousand pixels by far less.
        assert one["loss"] == pytest.approx(other["loss"], rel=0.04)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.04)
