"""Runs over a frozen adapter (adapter.under): resumed in the same bytes, in no file and no sample, pinned, planned, refused.

That it is what a merged base is, in fp64: unit/engine/test_below.py.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Workbench, built, metrics_of
from tests.integration.test_compiled import traced_only
from trainer import config as configs
from trainer.base.errors import UserError
from trainer.base.tensorfile import TensorFile
from trainer.kernels import dora_torch
from trainer.plan.run_plan import make_plan, open_source, resolve
from workbench.adapter_files.start import with_below
from workbench.commands import main as cli
from workbench.planning.estimate import STEP, forecast

SAMPLE = {"validation__every_steps": 3, "validation__samples": [{"prompt": "a bear", "steps": 1, "seed": 3}]}
STREAMED = {"gradient_checkpointing": True, "offload": "blocks", "resident_blocks": 1}


def train(bench: Workbench, out: str, *arguments: str, **keys: Any) -> int:
    config = bench.tree("flux", **({"run__output_dir": str(bench.tmp / out), "optimizer__lr": 1e-2} | keys))
    return cli.main(["--config", str(bench.write(config)), *arguments])


@pytest.fixture(scope="module")
def files(models: Path, tmp_path_factory) -> dict[str, Path]:
    """Adapter files by what is adapted: in both forms a LoRA of more layers than those that the runs below train."""
    bench, found = Workbench(models, tmp_path_factory.mktemp("below")), {}
    wide = {"adapter__targets": "attention+mlp", "adapter__rank": 3, "run__max_steps": 2, "optimizer__lr": 0.05}
    rules = {"adapter__rules": [{"component": "text_encoder", "match": "*q_proj"}]}
    for name, keys in {"lora": {}, "other": {"run__seed": 9}, "dora": {"adapter__type": "dora"}, "text": rules}.items():
        assert train(bench, name, **wide | keys) == 0
        found[name] = bench.tmp / name / "adapters" / "bear.safetensors"
    return found | {"comfyui": found["lora"].with_name("bear_comfyui.safetensors")}


@pytest.mark.slow
def test_it_is_a_part_of_the_steps_and_of_nothing_that_the_run_leaves(bench: Workbench, files: dict[str, Path]) -> None:
    """The same bytes interrupted, with its file elsewhere and in another form, streamed and recomputed. Another file is
    refused, and so is none."""
    under = {"adapter__under": str(files["lora"]), "checkpoint__every_steps": 2, **SAMPLE}
    assert train(bench, "whole", **under) == train(bench, "without", **SAMPLE) == 0
    assert train(bench, "parts", run__stop_after=2, **under) == 0
    shutil.copy(files["lora"], bench.tmp / "moved.safetensors")
    moved = under | {"adapter__under": str(bench.tmp / "moved.safetensors")}
    for wrong in (str(files["other"]), str(files["comfyui"])):  # of another digest
        assert train(bench, "parts", "--resume_from", "auto", **under | {"adapter__under": wrong}) == 2
    without = {key: value for key, value in under.items() if key != "adapter__under"}
    assert train(bench, "parts", "--resume_from", "auto", **without) == 2
    assert train(bench, "parts", "--resume_from", "auto", **moved) == 0
    assert train(bench, "streamed", memory=STREAMED, **under | {"adapter__under": str(files["comfyui"])}) == 0
    whole, last = bench.tmp / "whole", "checkpoints/step-00000003"
    for name in ("adapters/bear.safetensors", "adapters/bear_comfyui.safetensors", f"{last}/adapter.safetensors",
                 f"{last}/optimizer.safetensors", "samples/step-00000003/00.png"):  # fmt: skip
        for other in ("parts", "streamed"):
            assert (whole / name).read_bytes() == (bench.tmp / other / name).read_bytes(), (name, other)
    ours, theirs = (metrics_of(bench.tmp / name) for name in ("whole", "without"))
    assert ours == metrics_of(bench.tmp / "parts") and ours[0]["loss"] != theirs[0]["loss"]
    first = "samples/step-00000000/00.png"  # before training
    assert (whole / first).read_bytes() == (bench.tmp / "without" / first).read_bytes()
    keys = [TensorFile(bench.tmp / name / "adapters/bear.safetensors").entries.keys() for name in ("whole", "without")]
    assert keys[0] == keys[1]


@pytest.mark.proof
def test_compiled_blocks_have_it_too(bench: Workbench, files: dict[str, Path], monkeypatch) -> None:
    traced_only(monkeypatch)
    under = {"adapter__under": str(files["lora"]), "run__max_steps": 2, "data__bucket_step": 64, **SAMPLE}
    assert train(bench, "eager", **under) == train(bench, "compiled", step__compile="blocks", **under) == 0
    eager, compiled = ([line["loss"] for line in metrics_of(bench.tmp / name)] for name in ("eager", "compiled"))
    assert compiled == pytest.approx(eager, rel=1e-5)


@pytest.mark.slow
def test_a_plan_counts_it(bench: Workbench, files: dict[str, Path]) -> None:
    """Its matrices are kept, and nothing of it is trained."""

    def planned(**more: Any):
        config = configs.parse(bench.tree("flux", **more))
        source = open_source(config)
        plan = with_below(make_plan(resolve(config, source), source, processes=1), lambda line: None)
        return plan, next(each for each in forecast(plan, dora_torch).phases if each.name.startswith(STEP))

    (_, alone), (plan, step) = planned(), planned(adapter__under=str(files["lora"]))
    size = sum(4 * math.prod(tensor.shape) for each in plan.model.under.layers.values() for tensor in (each.a, each.b))
    assert step.parts["adapter"] == alone.parts["adapter"]
    assert step.parts["saved"] == alone.parts["saved"] + size, "beside them no activation is kept"


@pytest.mark.parametrize(
    ("key", "changed", "said"),
    [
        ("lora", {"adapter__type": "dora"}, r"cannot be combined with adapter\.type = 'dora': .*; take 'lora' or 'lokr'"),
        ("dora", {}, r"adapter\.under = '.*' is a DoRA; make a LoRA of it: .*convert --to lora"),
        ("text", {}, r"has layers of text encoders \('text_encoder\."),
        ("absent", {}, r"adapter\.under = 'none\.safetensors' is no file"),
    ],
)
@pytest.mark.slow
def test_what_is_refused(bench: Workbench, files: dict[str, Path], key: str, changed: dict, said: str) -> None:
    path = files.get(key, Path("none.safetensors"))
    with pytest.raises(UserError, match=said), built(bench.config("flux", adapter__under=str(path), **changed)):
        pass


@pytest.mark.slow
def test_a_file_for_another_model_is_refused(bench: Workbench, files: dict[str, Path]) -> None:
    with (
        pytest.raises(UserError, match=r"^adapter\.under = "),
        built(bench.config("sdxl", adapter__under=str(files["lora"]))),
    ):
        pass
