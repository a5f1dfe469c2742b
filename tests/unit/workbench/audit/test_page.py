"""The audit in words and numbers: what its columns say, and that its table is TOML."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path

import pytest
import torch

from trainer.base.files import json_bytes
from trainer.quantization import formats_of
from workbench.audit import page as audit_report
from workbench.audit.storage_cost import Audit, Effect, FormatCost, LayerCost, Predictions
from workbench.pages.rendering import write_page

MIB = 2**20


def effect(loss: float, moved: float, **more) -> Effect:
    return Effect(torch.tensor([loss, loss]).double(), torch.tensor([moved, moved]).double(), **more)


def found(spared: bool = True) -> Audit:
    layers = (
        LayerCost("out.<b>", effect(0.02, 0.06, first_order=True), effect(0.01, 0.05), 2 * MIB),
        LayerCost("in", effect(-0.01, 0.02, first_order=True), None, 4 * MIB),
    )
    cost = FormatCost(
        format=formats_of("nf4")["bitsandbytes"], layers=layers,
        estimated=effect(0.01, 0.08, first_order=True), whole=effect(0.03, 0.1), exclude=("out.<b>",),
        after_exclusion=effect(0.005, 0.04) if spared else None, remaining=(0.08, 0.02, 0.0), bytes=3 * MIB,
    )  # fmt: skip
    base = Predictions((torch.zeros(1), torch.zeros(1)), (0.5, 0.7), (8.0, 12.0))
    return Audit("models/m", "unet", "bf16", "held_out", 1, base, ("mid.*",), (cost,))


def test_shares_are_of_the_measured_whole_and_paid_in_mib() -> None:
    parts = audit_report.sections(found())
    assert list(parts) == [
        "All layers", "nf4 (bitsandbytes): the first to exclude",
        "nf4 (bitsandbytes): every layer",
    ]  # fmt: skip
    whole = {row[1]: row[2:] for row in parts["All layers"]["rows"]}
    assert whole["all, measured"] == ("10 %", "+3.00e-02", "0", "3.0 MiB")  # the root of 0.1 / 10
    assert whole["all, estimated"][2] == "0.08"  # the second order, which an estimate adds to its band
    assert whole["without 1, measured"] == ("6.32 %", "+5.00e-03", "0", "5.0 MiB")
    (row,) = parts["nf4 (bitsandbytes): the first to exclude"]["rows"]
    assert row == ("out.<b>", "7.07 %", "50 %", "+1.00e-02", "0", 2.0, "25 %", True)
    assert "60.0% of the squared change is gone for 2.0 MiB more, 30 % a MiB" in str(parts)
    estimated = parts["nf4 (bitsandbytes): every layer"]["rows"][1]
    assert estimated[0] == "in" and estimated[2] == "20 %" and estimated[-1] is False
    assert audit_report.remaining(found()) == {"nf4 (bitsandbytes)": [(0, 100 * 0.008**0.5), (1, 100 * 0.002**0.5)]}


def test_the_band_is_said_to_be_of_these_photos() -> None:
    """Its standard error is over the draws, so it tells nothing of other photos."""
    for said in (audit_report.text(found()), str(audit_report.sections(found()))):
        assert "other noises and times on these photos give a loss" in said and "other photos are not in it" in said


def test_the_config_keeps_what_it_excluded() -> None:
    said = audit_report.text(found())
    table = tomllib.loads(said[said.index("[model.components.unet]") :])["model"]["components"]["unet"]
    assert table == {"dtype": "nf4", "backend": "bitsandbytes", "exclude": ["mid.*", "out.<b>"]}
    assert "a loss of 0.6 on 1 held-out photo (2 draws)" in said
    assert "in (estimated)" not in said  # below those that are excluded


def test_the_page_escapes_and_the_numbers_are_json(tmp_path: Path) -> None:
    audit = found(spared=False)
    write_page(tmp_path / "audit.html", audit_report.html(audit, name="<m>"))
    page = (tmp_path / "audit.html").read_text()
    assert "<m>" not in page and "out.&lt;b&gt;" in page and "over excluded layers 0 to 1" in page
    numbers = json.loads(json_bytes(audit_report.numbers(audit)))["formats"]["nf4 (bitsandbytes)"]
    assert [layer["name"] for layer in numbers["layers"]] == ["out.<b>", "in"]
    assert numbers["excluded"] == {"layers": ["out.<b>"], "bytes": 2 * MIB, "measured": None}
    assert numbers["layers"][1]["estimated"]["prediction"] == pytest.approx(math.sqrt(0.002))
    one = Effect(torch.ones(1).double(), torch.ones(1).double())
    assert audit_report._numbers(audit, one)["band"] is None, "JSON has no infinity"
