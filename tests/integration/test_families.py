"""The families of a transformer behind a Qwen3, on tiny models: trained, resumed, exported and loaded by the stock pipelines,
in pairs of choices.

What their rooms compute, bit by bit: unit/models/. What only one of them has: test_flux2.py, test_flux3.py, test_zimage.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from scripts import make_model
from tests.harness import Workbench, built, metrics_of, pairs
from tests.pipelines import stock
from trainer import config as configs
from trainer.base.tensorfile import TensorFile
from trainer.models import FAMILIES
from workbench.adapter_files.opening import open_adapter
from workbench.adapters.base_weights import whole_model_at
from workbench.commands import main as cli

STORAGE, COMPUTE = ("bf16", "fp8_e4m3", "int8", "nf4"), ("fp32", "bf16")
KINDS = {"flux2": ("lora", "dora"), "flux3": ("lora", "dora", "lokr"), "zimage": ("lora", "dora", "lokr")}
QUICK = {
    "flux2": ("fp8_e4m3", "fp32", "dora", "all", True),
    "flux3": ("fp8_e4m3", "bf16", "dora", "all", True),
    "zimage": ("fp8_e4m3", "bf16", "dora", "all", True),
}
# Of FLUX.3's, which are proofs but for these.
SLOW = {("nf4", "bf16", "lokr", "all", True), ("int8", "fp32", "lora", "attention+mlp", False)}
STREAMED = {"gradient_checkpointing": True, "offload": "blocks", "resident_blocks": 1}


def cells() -> list[Any]:
    """(family, cell): a quick one of each family, the other pairs of choices beside it."""
    made = []
    for family, kinds in KINDS.items():
        made.append(pytest.param(family, QUICK[family], id=f"{family}-quick"))
        wanted = sorted(
            {*pairs(STORAGE, COMPUTE, kinds, ("attention+mlp", "all"), (False, True)), *SLOW}
            if family == "flux3"
            else pairs(STORAGE, COMPUTE, kinds, ("attention+mlp", "all"), (False, True))
        )
        for cell in wanted:
            mark = pytest.mark.slow if family != "flux3" or cell in SLOW else pytest.mark.proof
            if cell != QUICK[family]:
                made.append(pytest.param(family, cell, marks=mark, id="-".join(map(str, (family, *cell)))))
    return made


@pytest.fixture(scope="module", autouse=True)
def tiny(models: Path) -> None:
    """A tiny model of each beside the other tiny models."""
    for family in KINDS:
        wanted = ["--size", "tiny", "--family", family, "--layout", "diffusers", str(models / family)]
        assert (models / family).exists() or make_model.main(wanted) == 0


def tree(
    bench: Workbench, family: str, out: str, storage: str, compute: str, kind: str, targets: str, streamed: bool
) -> dict[str, Any]:
    rules = [] if kind == "lokr" else [{"component": "transformer", "match": "*to_v", "rank": 2, "alpha": 3.0}]
    return bench.tree(
        family, run__output_dir=str(bench.tmp / out), precision__compute=compute, adapter__type=kind,
        adapter__targets=targets, model__components={"transformer": {"dtype": storage}}, optimizer__lr=1e-2,
        checkpoint__every_steps=2, memory=STREAMED if streamed else {}, adapter__rules=rules,
    )  # fmt: skip


def train(config: dict[str, Any], *arguments: str, bench: Workbench) -> None:
    assert cli.main(["--config", str(bench.write(config)), *arguments]) == 0


@pytest.mark.parametrize(("family", "cell"), cells())
def test_it_trains_resumes_and_loads_in_the_stock_pipeline(bench: Workbench, family: str, cell: tuple) -> None:
    train(tree(bench, family, "whole", *cell), bench=bench)
    parts = tree(bench, family, "parts", *cell)
    train(parts | {"run": parts["run"] | {"stop_after": 2}}, bench=bench)
    train(parts, "--resume_from", "auto", bench=bench)
    whole, again = bench.tmp / "whole", bench.tmp / "parts"
    last, in_diffusers = "checkpoints/step-00000003", cell[2] in FAMILIES[family].adapters.in_diffusers
    files = {path.relative_to(whole).as_posix() for path in whole.glob("adapters/*.safetensors")}
    assert files == {f"adapters/bear{end}.safetensors" for end in ("_comfyui", *([""] if in_diffusers else []))}
    for name in (*files, f"{last}/adapter.safetensors", f"{last}/optimizer.safetensors"):
        assert (whole / name).read_bytes() == (again / name).read_bytes(), name
    assert metrics_of(whole) == metrics_of(again)
    if not in_diffusers:
        return
    pipe = stock(family, bench.models / family)
    pipe.load_lora_weights(str(whole / "adapters" / "bear.safetensors"))
    loaded = {name: value for name, value in pipe.transformer.named_parameters() if "lora_" in name or "lokr_" in name}
    file = TensorFile(whole / "adapters" / "bear.safetensors")
    assert len(loaded) == len([key for key in file.entries if not key.endswith(".alpha")])  # no key without its layer
    assert_adapted_weights(bench, family, whole, cell, pipe)


def assert_adapted_weights(bench: Workbench, family: str, out: Path, cell: tuple, pipe: Any) -> None:
    """Of each layer the weight that the stock pipeline multiplies by, over its own 16-bit base, is W16 + the update as it was
    trained; of a DoRA each row has that direction and the trained norm, in fp64. But for what the norm of a quantised row
    does not know: 2 s <(W16 - W)_n, (B A)_n> under the root."""
    with built(configs.parse(tree(bench, family, out.name, *cell[:-1], False)), resume_from="auto") as run:
        for name, layer in run.adapter.layers.items():
            theirs = pipe.transformer.get_submodule(name.partition(".")[2])
            w16 = theirs.base_layer.weight.detach().double()
            if cell[2] == "lokr":
                delta, ours = theirs.get_delta_weight("default_0"), layer.get_delta_weight("default")
                assert delta.norm() > 0 and (ours - delta).norm() <= 2**-20 * w16.norm(), name
                continue
            a, b = (getattr(layer, f"lora_{part}")["default"].weight.detach().double() for part in "AB")
            a16, b16 = (getattr(theirs, f"lora_{part}")["default_0"].weight.detach().double() for part in "AB")
            scaling = layer.scaling["default"]
            assert torch.equal(a, a16) and torch.equal(b, b16) and theirs.scaling["default_0"] == scaling, name
            assert b.any(), name  # ai-toolkit #1054: of streamed and recomputed blocks, too
            if cell[2] == "lora":
                continue
            w, m = layer.get_base_layer().dequantize(torch.float32).double(), layer.lora_magnitude_vector["default"].weight
            m16 = theirs.lora_magnitude_vector["default_0"].weight.detach().double()
            g = m.detach().double() / (w + scaling * b @ a).norm(dim=1)
            adapted = w16 + scaling * b @ a
            missing = 2 * scaling * ((w16 - w) * (b @ a)).sum(1)
            expected = g * (adapted.square().sum(1) - missing).sqrt()
            assert torch.allclose(m16, expected, rtol=1e-5, atol=0), name


@pytest.mark.slow
@pytest.mark.parametrize(("family", "start"), [("zimage", "model."), ("flux3", "model.language_model.")])
def test_an_adapter_of_the_text_encoder_goes_into_a_folder_of_pefts(bench: Workbench, family: str, start: str) -> None:
    """diffusers' loader takes the transformer alone; captions differ in length."""
    rules = [{"component": "text_encoder", "match": "layers.3[0-9].*_proj", "rank": 3, "alpha": 1.5}]
    train(bench.tree(family, adapter__type="dora", adapter__rules=rules, optimizer__lr=1e-2, run__max_steps=1), bench=bench)
    adapters, model = bench.tmp / "out" / "adapters", whole_model_at(str(bench.models / family))
    keys = TensorFile(adapters / "bear.safetensors").entries
    assert keys and all(key.startswith("transformer.") for key in keys)
    pipe = stock(family, bench.models / family)
    PeftModel.from_pretrained(pipe.text_encoder, str(adapters / "bear_text_encoder"))
    theirs = {n: layer for n, layer in pipe.text_encoder.named_modules() if hasattr(layer, "lora_magnitude_vector")}
    ours, kohya = (
        open_adapter(adapters / name, [model]).portable for name in ("bear_text_encoder", "bear_comfyui.safetensors")
    )
    assert {f"text_encoder.{name.removeprefix(start)}" for name in theirs} == set(ours.layers) != set()
    assert set(ours.layers) == {name for name in kohya.layers if name.startswith("text_encoder.")}
    for name, layer in theirs.items():
        assert torch.equal(layer.lora_A["default"].weight, ours.layers[f"text_encoder.{name.removeprefix(start)}"].a.make())
