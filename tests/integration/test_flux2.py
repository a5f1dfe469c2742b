"""FLUX.2 klein on a tiny model: its file for ComfyUI, an adapter on Qwen3, what is refused.

Runs in pairs of choices: test_families.py. What its room computes, bit by bit: unit/models/test_flux2.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Flux2KleinPipeline
from peft import PeftModel

from scripts import adapter as adapter_tool
from scripts import make_model
from tests.harness import Workbench, built, train_built
from trainer.base.errors import UserError
from trainer.base.tensorfile import TensorFile
from trainer.models.weights import original_shape
from workbench.adapter_files.opening import NamedModel, open_adapter
from workbench.adapters import push
from workbench.adapters.base_weights import whole_model_at
from workbench.commands import main as cli


@pytest.fixture(scope="module", autouse=True)
def flux2(models: Path) -> None:
    """A tiny klein beside the other tiny models."""
    wanted = ["--size", "tiny", "--family", "flux2", "--layout", "diffusers", str(models / "flux2")]
    assert (models / "flux2").exists() or make_model.main(wanted) == 0


def train(config: dict[str, Any], *arguments: str, bench: Workbench) -> None:
    assert cli.main(["--config", str(bench.write(config)), *arguments]) == 0


@pytest.fixture(scope="module")
def everything(models: Path, tmp_path_factory) -> Path:
    """The output of a DoRA on all layers of the transformer, and on some of Qwen3's."""
    bench = Workbench(models, tmp_path_factory.mktemp("everything"))
    rules = [{"component": "text_encoder", "match": "layers.2[0-9].*_proj", "rank": 3, "alpha": 1.5}]
    config = bench.tree("flux2", adapter__type="dora", adapter__targets="all", adapter__rules=rules, optimizer__lr=1e-2)
    train(config, bench=bench)
    return bench.tmp / "out"


@pytest.mark.slow
def test_comfyui_has_a_layer_for_every_key(everything: Path, models: Path, capsys) -> None:
    """Names and shapes of its model: of the transformer the original ones, flat, modulation and time among them; of Qwen3
    `text_encoders.` and the name in its state dict (comfy/lora.py, `model_lora_keys_unet` and `model_lora_keys_clip`)."""
    opened = open_adapter(everything / "adapters" / "bear_comfyui.safetensors", [tiny(models)])
    family, config = opened.model.family, opened.model.config("transformer")
    names = family.component("transformer").names(config)
    known = {
        f"lora_unet_{link.original.removesuffix('.weight').replace('.', '_')}":
            original_shape([names.shapes[part] for part in link.parts], link.op)
        for link in names.links
    }  # fmt: skip
    encoder = opened.model.layers("text_encoder").items()
    known |= {f"text_encoders.qwen3_4b.transformer.model.{name}": shape for name, shape in encoder}
    file = TensorFile(everything / "adapters" / "bear_comfyui.safetensors")
    stems = {key.partition(".lora_")[0] for key in file.entries if ".lora_" in key}
    base = TensorFile(models / "flux2" / "transformer" / "diffusion_pytorch_model.safetensors")
    weights = {
        f"lora_unet_{link.original.removesuffix('.weight').replace('.', '_')}":
            torch.cat([base.read(part).double() for part in link.parts])
        for link in names.links if len(link.parts) > 1
    }  # fmt: skip
    assert weights and weights.keys() <= stems
    assert stems <= known.keys()
    for stem in stems:
        rows, columns = known[stem]
        up, down = (file.entries[f"{stem}.lora_{end}.weight"].shape for end in ("up", "down"))
        assert (up[0], down[1]) == (rows, columns) and file.entries[f"{stem}.dora_scale"].shape == (rows, 1)
        if (fused := weights.get(stem)) is not None:  # OneTrainer #1666: the magnitudes of fused layers stayed at their start
            start = fused.norm(dim=1, keepdim=True)
            assert ((file.read(f"{stem}.dora_scale").double() - start).abs() > 1e-3 * start).float().mean() > 0.9, stem
    assert {"lora_unet_double_stream_modulation_img_lin", "lora_unet_time_in_in_layer", "lora_unet_single_blocks_1_linear1",
            "lora_unet_final_layer_adaLN_modulation_1", "lora_unet_double_blocks_0_txt_attn_qkv",
            "text_encoders.qwen3_4b.transformer.model.layers.20.self_attn.q_proj"} <= stems  # fmt: skip
    assert "text_encoders.qwen3_4b.transformer.model.layers.19.mlp.up_proj" not in stems


def tiny(models: Path) -> NamedModel:
    return whole_model_at(str(models / "flux2"))


@pytest.mark.slow
def test_an_adapter_of_qwen3_goes_into_a_folder_of_pefts_and_not_into_the_file_for_diffusers(
    everything: Path, models: Path, tmp_path: Path, capsys
) -> None:
    """Whose loader takes the transformer alone. What the folder holds is what was trained, and is read back as that."""
    keys = TensorFile(everything / "adapters" / "bear.safetensors").entries
    assert keys and all(key.startswith("transformer.") for key in keys)
    pipe = Flux2KleinPipeline.from_pretrained(models / "flux2", torch_dtype=torch.float32)
    pipe.load_lora_weights(str(everything / "adapters" / "bear.safetensors"))
    folder = everything / "adapters" / "bear_text_encoder"
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    ends = {key.rpartition("_proj.")[2] for key in TensorFile(folder / "adapter_model.safetensors").entries}
    assert ends == {"lora_A.weight", "lora_B.weight", "lora_magnitude_vector"}, "as PEFT saves them"
    checkpoint = everything / "checkpoints" / "step-00000003"
    assert adapter_tool.main(["export", str(checkpoint), str(tmp_path / "again")]) == 0
    assert "peft text_encoder: " in capsys.readouterr().out
    for path in folder.iterdir():
        assert (tmp_path / "again" / folder.name / path.name).read_bytes() == path.read_bytes()

    PeftModel.from_pretrained(pipe.text_encoder, str(folder))
    stock = {n: layer for n, layer in pipe.text_encoder.named_modules() if hasattr(layer, "lora_magnitude_vector")}
    kohya = open_adapter(everything / "adapters" / "bear_comfyui.safetensors", [tiny(models)]).portable
    ours = open_adapter(folder, [tiny(models)]).portable
    assert {f"text_encoder.{name.removeprefix('model.')}" for name in stock} == set(ours.layers)
    assert set(ours.layers) == {name for name in kohya.layers if name.startswith("text_encoder.")}
    for name, layer in stock.items():
        factors = ours.layers[f"text_encoder.{name.removeprefix('model.')}"]
        assert torch.equal(layer.lora_A["default"].weight, factors.a.make()) and layer.scaling["default"] == 0.5
        assert torch.equal(layer.lora_magnitude_vector["default"].weight, factors.magnitude.make().flatten())


@pytest.mark.slow
def test_what_becomes_of_the_folder_of_pefts(bench: Workbench) -> None:
    """It follows its files. Of an adapter of Qwen3 alone there is no file for diffusers. A way back sets it
    aside, another choice of formats deletes it; a push sends it, and the card says how to load it."""
    rules = [{"component": "text_encoder", "match": "*_proj"}]
    config = bench.tree(
        "flux2", adapter__targets=[], adapter__rules=rules, optimizer__lr=1e-2, checkpoint__every_steps=1,
        export__every_steps=2, validation__every_steps=3, validation__steps=1, validation__prompts=["a bear"],
    )  # fmt: skip
    train(config, bench=bench)
    adapters = bench.tmp / "out" / "adapters"
    names = {
        "bear_comfyui.safetensors",
        "bear_text_encoder",
        "bear-00000002_comfyui.safetensors",
        "bear-00000002_text_encoder",
    }
    assert {path.name for path in adapters.iterdir()} == names | {"README.md", "images"}
    train(config, "--resume_from", str(bench.tmp / "out" / "checkpoints" / "step-00000001"), bench=bench)
    (aside,) = bench.tmp.glob("out/superseded-after-*")
    assert {path.name for path in aside.rglob("*bear*")} >= names
    assert {path.name for path in adapters.iterdir()} == names | {"README.md", "images"}

    del config["adapter"]["targets"]
    config["run"] |= {"output_dir": str(bench.tmp / "both"), "stop_after": 2}
    train(config, bench=bench)
    adapters = bench.tmp / "both" / "adapters"
    card = (adapters / "README.md").read_text()
    assert 'PeftModel.from_pretrained(pipe.text_encoder, "bear_text_encoder")' in card and "load_lora_weights" in card
    (call,) = re.findall(r"image = (pipe\(.*\)\.images\[0\])", card)
    pipe = Flux2KleinPipeline.from_pretrained(bench.models / "flux2", torch_dtype=torch.float32)
    assert eval(call, {"pipe": pipe, "torch": torch}).size == (64, 64)  # as it stands there
    sent = push.files_of(adapters)
    assert {"bear_text_encoder/adapter_model.safetensors", "bear_text_encoder/adapter_config.json"} <= sent.keys()
    del config["run"]["stop_after"]
    config["export"] |= {"formats": ["comfyui"]}
    train(config, "--resume_from", "auto", bench=bench)
    assert not (adapters / "bear_text_encoder" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model__variant": "distilled"}, r"the distilled model .*model\.allow_distilled = true"),
        ({"precision__compute": "fp16"}, r"the transformer of flux2 does not compute in fp16: .* set precision\.compute"),
        ({"objective__guidance": 2.0}, r"objective\.guidance = 2\.0 has no effect on flux2"),
        (
            {"adapter__rules": [{"component": "text_encoder", "match": "*q_proj"}], "data__cache_text": True},
            r"data\.cache_text = true cannot be combined with adapting text_encoder",
        ),
    ],
)
def test_what_is_refused(bench: Workbench, changed: dict, said: str) -> None:
    with pytest.raises(UserError, match=said), built(bench.config("flux2", **changed)):
        pass


@pytest.mark.slow
def test_a_distilled_model_that_is_allowed_is_drawn_without_guidance(bench: Workbench) -> None:
    """And goes on where it had been taken for a base model: what is allowed changes no step."""
    train(bench.tree("flux2", model__variant="base", run__max_steps=2, run__stop_after=1), bench=bench)
    config = bench.config(
        "flux2", model__variant="distilled", model__allow_distilled=True, run__max_steps=2, validation__every_steps=2,
        validation__steps=2, validation__prompts=["a bear"],
    )  # fmt: skip
    with built(config, resume_from="auto") as run:
        passes = []
        run.model.modules["transformer"].register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
        assert train_built(run)
        assert passes.count(False) == 2, "an image of two steps"
