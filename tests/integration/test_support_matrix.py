"""Every storage format x compute dtype x adapter x family does what scripts/proofs/support_matrix.py says.

The default suite runs five cells in which denoiser and text encoders, all three adapted, are stored differently. Together
they have every format of ALL_FORMATS, each in a compute dtype that is not its own, every compute dtype, and each family with
each kind but SDXL with LoRA. SDXL's denoiser has fewer adapted layers there, convolutions among them. `slow` runs all cells.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.proofs import support_matrix as matrix
from scripts.proofs.support_matrix import Cell
from tests.harness import Workbench
from trainer.adapters import Adapter
from trainer.optim import OptimizerState

SOME_OF_THE_UNET = ("conv_in", "down_blocks.1.resnets.0.*", "mid_block.attentions.0.transformer_blocks.0.*")
COVERING = (
    Cell("sdxl", "dora", "fp8_e4m3-native+int8-quanto+int4-quanto", "bf16", SOME_OF_THE_UNET),
    Cell("flux", "dora", "fp4-bitsandbytes+bf16-native+int2-quanto", "fp16"),
    Cell("flux", "lora", "int8-bitsandbytes+fp16-native+nf4-bitsandbytes", "fp32"),
    Cell("flux", "lora", "fp8_e5m2-native+fp32-native+fp8_e4m3-quanto", "bf16"),
    Cell("flux", "dora", "fp8_e5m2-quanto+fp8_e5m2-native+bf16-native", "fp32"),
)


@pytest.fixture(scope="module")
def workbench(models: Path, tmp_path_factory) -> Workbench:
    """One for all cells, which share its caches."""
    return Workbench(models, tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize(
    "cell",
    [
        *(pytest.param(cell, id=cell.name) for cell in COVERING),
        *(pytest.param(cell, id=cell.name, marks=pytest.mark.slow) for cell in matrix.all_cells()),
    ],
)
def test_cell(workbench: Workbench, cell: Cell) -> None:
    result = matrix.run_cell(cell, workbench)
    assert result.state == "ok", f"{result.reason}\n{result.log}"


def test_the_covering_cells_cover() -> None:
    met = {(storage, cell.compute) for cell in COVERING for storage in cell.components().values()}
    assert {storage for storage, _ in met} == set(matrix.STORAGE)
    assert not any(storage.startswith(compute) for storage, compute in met)
    assert {compute for _, compute in met} == set(matrix.COMPUTE_DTYPES)
    assert {cell.family for cell in COVERING} == set(matrix.FAMILIES)
    assert {cell.kind for cell in COVERING} == set(matrix.KINDS)


SMALL = Cell("flux", "dora", "fp8_e4m3-native", "bf16", ("transformer_blocks.0.attn.to_q",))


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["magnitudes frozen", "optimizer state lost"])
def test_a_broken_trainer_fails_its_cell(workbench: Workbench, monkeypatch, broken: str) -> None:
    if broken == "magnitudes frozen":
        named, expected = Adapter.named_parameters, "adapter tensors have no finite gradient"

        def frozen(adapter: Adapter):
            parameters = named(adapter)
            for name, parameter in parameters.items():
                if "magnitude" in name:
                    parameter.requires_grad_(False)
            return parameters

        monkeypatch.setattr(Adapter, "named_parameters", frozen)
    else:
        expected = "resumed: "
        monkeypatch.setattr(OptimizerState, "load_state_dict", lambda self, state: None)
    result = matrix.run_cell(SMALL, workbench)
    assert result.state == "failed" and expected in result.reason, result


def test_refusals_and_failures_are_told_apart_and_explained(workbench: Workbench) -> None:
    refused = matrix.run_cell(Cell("flux", "lora", "int8-native", "fp32"), workbench)
    assert refused.state == "refused" and "backend" in refused.reason
    some = [
        matrix.Result(Cell("flux", "lora", "int4-quanto", "fp32"), "ok", skipped_updates=1, left_out=("a.layers.2.x",)),
        matrix.Result(Cell("flux", "lora", "int4-quanto", "bf16"), "refused", "no such thing"),
        matrix.Result(Cell("flux", "dora", "int4-quanto", "fp16"), "failed", "a loss is not finite"),
    ]
    table = matrix.table(some)
    assert "| int4 quanto | ok, 1 skipped | refused [1] |  |  |  | FAILED [2] |" in table
    assert "a.layers.2.* (1)" in table and "1. no such thing" in table and "2. a loss is not finite" in table
