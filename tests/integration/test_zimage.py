"""Z-Image on a tiny model: its file for ComfyUI by ComfyUI's own table, files of others, what is refused.

Runs in pairs of choices: test_families.py. What its room computes, bit by bit: unit/models/test_zimage.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ZImagePipeline
from PIL import Image

from scripts import adapter as adapter_tool
from scripts import make_model
from tests.harness import Workbench, built
from tests.integration.test_graphs import trained
from trainer.base.errors import UserError
from trainer.base.run_layout import Layout
from trainer.base.tensorfile import TensorFile, write_tensors
from trainer.models.weights import original_shape
from trainer.runtime import precision
from workbench.adapter_files.opening import open_adapter
from workbench.adapters.base_weights import whole_model_at
from workbench.commands import main as cli


@pytest.fixture(scope="module", autouse=True)
def zimage(models: Path) -> None:
    """A tiny Z-Image beside the other tiny models."""
    wanted = ["--size", "tiny", "--family", "zimage", "--layout", "diffusers", str(models / "zimage")]
    assert (models / "zimage").exists() or make_model.main(wanted) == 0


def train(config: dict[str, Any], *arguments: str, bench: Workbench) -> None:
    assert cli.main(["--config", str(bench.write(config)), *arguments]) == 0


@pytest.mark.slow
def test_a_sample_is_the_stock_pipelines_with_the_adapter(bench: Workbench) -> None:
    """By the exported file, with a second pass for its guidance; and not what the base draws."""
    asked = {"prompt": "a bear", "negative": "fur", "width": 48, "height": 64, "seed": 5, "steps": 2, "guidance": 3.0}
    config = bench.tree(
        "zimage", precision__compute="fp32", adapter__targets="all", optimizer__lr=1e-2, validation__samples=[asked],
        validation__every_steps=3, model__components={name: {"dtype": "fp32"} for name in ("transformer", "text_encoder")},
    )  # fmt: skip
    train(config, bench=bench)
    layout = Layout(bench.tmp / "out")
    pipe = ZImagePipeline.from_pretrained(bench.models / "zimage", torch_dtype=torch.float32)
    pipe.load_lora_weights(str(layout.adapters / "bear.safetensors"))
    drawn = pipe(
        prompt="a bear", negative_prompt="fur", width=48, height=64, num_inference_steps=2, guidance_scale=3.0,
        generator=torch.Generator("cpu").manual_seed(5),
    ).images[0]  # fmt: skip
    before, ours = (np.asarray(Image.open(layout.samples_of(step) / "00.png")).astype(int) for step in (0, 3))
    assert ours.shape == (64, 48, 3)
    assert abs(ours - np.asarray(drawn).astype(int)).max() <= 1, "one of 256 levels, where sums round otherwise"
    assert abs(ours - before).max() > 1


@pytest.fixture(scope="module")
def everything(models: Path, tmp_path_factory) -> Path:
    """The output of a DoRA on all layers of the transformer, and on some of Qwen3's, whose captions differ in length."""
    bench = Workbench(models, tmp_path_factory.mktemp("everything"))
    rules = [{"component": "text_encoder", "match": "layers.3[0-9].*_proj", "rank": 3, "alpha": 1.5}]
    config = bench.tree("zimage", adapter__type="dora", adapter__targets="all", adapter__rules=rules, optimizer__lr=1e-2)
    train(config, bench=bench)
    return bench.tmp / "out"


def comfyui(config: dict) -> dict[str, tuple[str, slice]]:
    """ComfyUI's `z_image_to_diffusers` (comfy/utils.py, pull request 10980) in words: the module of its model, and the rows
    of that, for each of diffusers' names."""
    width = config["dim"]
    blocks = [f"{kind}.{i}" for kind, count in (("layers", "n_layers"), ("noise_refiner", "n_refiner_layers"),
              ("context_refiner", "n_refiner_layers")) for i in range(config[count])]  # fmt: skip
    table = {}
    for block in blocks:
        for place, part in enumerate("qkv"):
            rows = slice(place * width, (place + 1) * width)
            table[f"{block}.attention.to_{part}"] = (f"{block}.attention.qkv", rows)
        table[f"{block}.attention.to_out.0"] = (f"{block}.attention.out", slice(None))
        for layer in ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "adaLN_modulation.0"):
            table[f"{block}.{layer}"] = (f"{block}.{layer}", slice(None))
    table["all_x_embedder.2-1"] = ("x_embedder", slice(None))
    for layer in ("linear", "adaLN_modulation.1"):
        table[f"all_final_layer.2-1.{layer}"] = (f"final_layer.{layer}", slice(None))
    return table | {name: (name, slice(None)) for name in ("t_embedder.mlp.0", "t_embedder.mlp.2", "cap_embedder.1")}


@pytest.mark.slow
def test_comfyui_has_a_layer_for_every_key(everything: Path, models: Path) -> None:
    """ComfyUI #11487, musubi-tuner #770: of `lora_unet_` it reads the names of its own model alone, where query, key and
    value are one layer. By its table each says what the file for diffusers says of its rows."""
    model = whole_model_at(str(models / "zimage"))
    file, diffusers = (TensorFile(everything / "adapters" / f"bear{end}.safetensors").read_all() for end in ("_comfyui", ""))
    table = comfyui(model.config("transformer"))
    base = TensorFile(models / "zimage" / "transformer" / "diffusion_pytorch_model.safetensors")
    stems = {key.partition(".lora_")[0] for key in file if ".lora_" in key}
    flat = {f"lora_unet_{module.replace('.', '_')}" for module, _ in table.values()}
    flat |= {f"text_encoders.qwen3_4b.transformer.model.{name}" for name in model.layers("text_encoder")}
    assert stems <= flat and "lora_unet_noise_refiner_0_attention_qkv" in stems
    assert "text_encoders.qwen3_4b.transformer.model.layers.34.self_attn.q_proj" in stems
    names = model.family.component("transformer").names(model.config("transformer"))
    shapes = {link.original.removesuffix(".weight"): original_shape([names.shapes[p] for p in link.parts], link.op)
              for link in names.links}  # fmt: skip
    for name, (module, rows) in table.items():
        if f"transformer.{name}.lora_A.weight" not in diffusers:
            continue
        stem = f"lora_unet_{module.replace('.', '_')}"
        up, down, alpha = (file[f"{stem}.{end}"].double() for end in ("lora_up.weight", "lora_down.weight", "alpha"))
        assert (up.shape[0], down.shape[1]) == shapes[module]
        theirs = (up @ down * alpha / len(down))[rows]
        a, b = (diffusers[f"transformer.{name}.lora_{part}.weight"].double() for part in "AB")
        assert torch.allclose(theirs, b @ a * 0.5, rtol=1e-6, atol=1e-12), name  # alpha 4 of rank 8
        # ComfyUI's releases divide by ||W||, diffusers by ||W + s B A||.
        weight, magnitude = (
            base.read(f"{name}.weight").double(),
            diffusers[f"transformer.{name}.lora_magnitude_vector"].double(),
        )
        expected = magnitude.flatten() * weight.norm(dim=1) / (weight + 0.5 * b @ a).norm(dim=1)
        assert torch.allclose(file[f"{stem}.dora_scale"][rows].flatten().double(), expected, rtol=1e-6, atol=0), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", ["ai-toolkit", "musubi-tuner", "musubi-tuner's original names", "DiffSynth-Studio", "SimpleTuner"]
)
def test_files_of_others_are_read(everything: Path, models: Path, tmp_path: Path, form: str) -> None:
    """Under their names, of the same layers: the factors are the file's."""
    from safetensors.torch import load_file, save_file

    a_b = {key: value for key, value in load_file(everything / "adapters" / "bear.safetensors").items() if "lora_" in key}
    made, blocks = {}, [key for key in a_b if key.startswith("transformer.layers.") and key.endswith("lora_A.weight")]
    for key in blocks:
        name = key.removeprefix("transformer.").removesuffix(".lora_A.weight")
        a, b = a_b[key], a_b[key.replace("lora_A", "lora_B")]
        if form == "ai-toolkit":
            made |= {f"diffusion_model.{name}.lora_A.weight": a, f"diffusion_model.{name}.lora_B.weight": b}
        elif form == "DiffSynth-Studio":
            made |= {f"{name}.lora_A.default.weight": a, f"{name}.lora_B.default.weight": b}
        elif form == "SimpleTuner":
            made |= {f"transformer.{name}.lora_A.weight": a, f"transformer.{name}.lora_B.weight": b}
        elif form == "musubi-tuner" or "feed_forward" in name:
            stem = f"lora_unet_{name.replace('.', '_')}"
            made |= {f"{stem}.lora_down.weight": a, f"{stem}.lora_up.weight": b, f"{stem}.alpha": torch.tensor(float(len(a)))}
    path = tmp_path / "theirs.safetensors"
    save_file({key: value.contiguous() for key, value in made.items()}, path)
    opened = open_adapter(path, [whole_model_at(str(models / "zimage"))])
    assert opened.model.family.name == "zimage"
    assert len(opened.portable.layers) == len(made) // (3 if "musubi" in form else 2)
    out = tmp_path / "out.safetensors"
    assert adapter_tool.main(["convert", str(path), str(out), "--to", "diffusers", "--base", str(models / "zimage")]) == 0
    written = load_file(out)
    for name, factors in opened.portable.layers.items():
        a = factors.a.make()
        assert torch.equal(a, a_b[f"{name}.lora_A.weight"]) and f"{name}.lora_A.weight" in written


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model__variant": "turbo"}, r"Turbo, the distilled model .*\(adapter\.under\); model\.allow_distilled = true"),
        ({"precision__compute": "fp16"}, r"the transformer of zimage does not compute in fp16: the inputs of .* 344,064"),
        ({"objective__guidance": 2.0}, r"objective\.guidance = 2\.0 has no effect on zimage"),
    ],
)
def test_what_is_refused(bench: Workbench, changed: dict, said: str) -> None:
    with pytest.raises(UserError, match=said), built(bench.config("zimage", **changed)):
        pass


def test_turbo_is_trained_over_an_adapter_that_undoes_its_distillation(bench: Workbench) -> None:
    """How people train on it (diffusion-pipe#470); of the file that ai-toolkit's users put there the keys."""
    layer = "layers.0.feed_forward.w1"
    weights = TensorFile(bench.models / "zimage/transformer/diffusion_pytorch_model.safetensors")
    rows, columns = weights.shapes[f"{layer}.weight"]
    stem = f"diffusion_model.{layer}"
    write_tensors(
        under := bench.tmp / "training_adapter.safetensors",
        {f"{stem}.lora_A.weight": torch.ones(2, columns), f"{stem}.lora_B.weight": torch.ones(rows, 2)},
    )
    with built(bench.config("zimage", model__variant="turbo", adapter__under=str(under))) as run:
        assert not run.plan.config.model.allow_distilled and run.plan.model.options["allow_distilled"]


@pytest.mark.slow
def test_replayed_micro_batches_leave_the_bytes_of_eager_ones(bench: Workbench, monkeypatch) -> None:
    """As a graph's replay does, of captions of one padded length and of several in a batch."""
    monkeypatch.setattr(precision, "GROWTH_INTERVAL", 2)
    eager, before = trained(bench, "zimage", taped=False, adapter__type="dora")
    replayed, after = trained(bench, "zimage", taped=True, adapter__type="dora")
    assert replayed == eager and all(torch.equal(after[name], before[name]) for name in before)
