"""Every storage format x compute dtype x adapter x family does what docs/benchmarks/support_matrix.md says.

`proof` runs all cells, as tests/proofs/support_matrix.py does: trained, stopped, resumed, sampled, exported. Its short
form: the storage of every cell is planned, which refuses what cannot be before a weight is read, and the page says of each
what the plan says. Five cells in which denoiser and text encoders, all three adapted, are stored differently are trained,
sampled and exported. Together they have every format of ALL_FORMATS, each in a compute dtype that is not its own, every
compute dtype, and each family with each kind but SDXL with LoRA. SDXL's denoiser has fewer adapted layers there,
convolutions among them. That stopped and resumed equals uninterrupted is shown in test_resume_pairs.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import ROOT, Workbench
from tests.proofs import support_matrix as matrix
from tests.proofs.support_matrix import Cell
from trainer.adapters import Adapter
from trainer.base.errors import UserError
from trainer.base.tensorfile import TensorFile
from trainer.optim import OptimizerState
from trainer.plan import storage
from trainer.plan.run_plan import open_source, resolve

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
    "cell", [pytest.param(cell, id=cell.name, marks=() if cell in COVERING[:2] else pytest.mark.slow) for cell in COVERING]
)
def test_a_cell_trains_samples_and_exports(workbench: Workbench, cell: Cell) -> None:
    result = matrix.run_cell(cell, workbench, resumed=False)
    assert result.state == "ok", f"{result.reason}\n{result.log}"


@pytest.mark.proof
@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.name) for cell in matrix.all_cells()])
def test_every_cell_also_stopped_and_resumed(workbench: Workbench, cell: Cell) -> None:
    result = matrix.run_cell(cell, workbench)
    assert result.state == "ok", f"{result.reason}\n{result.log}"


def page_says() -> dict[str, str]:
    """Cell -> "ok", "refused" or "FAILED", as docs/benchmarks/support_matrix.md has it."""
    told = {}
    for section in (ROOT / "docs" / "benchmarks" / "support_matrix.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        family, *lines = section.splitlines()
        rows = [[field.strip() for field in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
        (_, *columns), *cells = rows
        for stored, *marks in cells:
            for column, mark in zip(columns, marks, strict=True):
                kind, compute = column.split()
                told[f"{family}/{kind}/{stored.replace(' ', '-')}/{compute}"] = re.split(r"[, ]", mark)[0]
    return told


@pytest.mark.slow
def test_the_page_says_of_every_cell_what_the_plan_says(workbench: Workbench, monkeypatch) -> None:
    """No weight is read. One more cell, which no page has, shows that a plan refuses."""

    def read(self, name):
        raise AssertionError(f"{name} of {self.path} was read")

    monkeypatch.setattr(TensorFile, "read", read)
    planned, sources = {}, {}
    for cell in (*matrix.all_cells(), Cell("flux", "lora", "int8-native", "fp32")):
        config = matrix.config_of(cell, workbench, workbench.tmp / "planned")
        if cell.family not in sources:
            sources[cell.family] = open_source(config)
        source = sources[cell.family]
        try:
            components = storage.storages(resolve(config, source), source.family)
        except UserError:
            planned[cell.name] = "refused"
            continue
        for component in components.values():
            storage.check(source, component)
        stored = {name: f"{made.format.dtype_name}-{made.format.backend}" for name, made in components.items()}
        assert stored.items() >= cell.components().items()
        computes = {made.compute for name, made in components.items() if name != "vae"}
        assert computes == {matrix.COMPUTE_DTYPES[cell.compute]}
        planned[cell.name] = "ok"
    assert planned.pop("flux/lora/int8-native/fp32") == "refused"
    assert page_says() == planned


def test_the_covering_cells_cover() -> None:
    met = {(storage, cell.compute) for cell in COVERING for storage in cell.components().values()}
    assert {storage for storage, _ in met} == set(matrix.STORAGE)
    assert not any(storage.startswith(compute) for storage, compute in met)
    assert {compute for _, compute in met} == set(matrix.COMPUTE_DTYPES)
    assert {cell.family for cell in COVERING} == set(matrix.FAMILIES)
    assert {cell.kind for cell in COVERING} == set(matrix.KINDS)


SMALL = Cell("flux", "dora", "fp8_e4m3-native", "bf16", ("transformer_blocks.0.attn.to_q",))


@pytest.mark.proof
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
