"""A value that is not finite is found as its tensor is read, and named; files under the module's names are read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests.unit.models.test_beside import LABELS, put, shapes_of
from trainer.base.errors import UserError
from trainer.base.tensorfile import TensorFile, write_tensors
from trainer.base.types import Recognised
from trainer.models import FAMILIES
from trainer.models.config_files import PUBLISHED
from trainer.models.opening import open_model
from trainer.models.weights import Weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_value_that_is_not_finite_is_named_with_its_file_and_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.ones(4, 1000)
    tensor[1, :3] = float("nan")
    path = tmp_path / "model.safetensors"
    write_tensors(path, {"unet.broken": tensor.to(dtype), "unet.sound": torch.ones(3), "unet.counts": torch.arange(3)})
    weights = Weights((TensorFile(path),), "unet.", None, lambda entries: Recognised({}, frozenset()))
    assert weights.read("sound").tolist() == [1, 1, 1] and weights.read("counts").tolist() == [0, 1, 2]
    said = f"^{re.escape(str(path))}: 3 of 4,000 values of tensor 'unet.broken' are NaN or infinite.* use another copy$"
    with pytest.raises(UserError, match=said):
        weights.read("broken")


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model.", "transformer.", "model."])
@pytest.mark.parametrize("family", ["flux", "flux2", "flux3", "zimage"])
def test_a_transformer_under_the_modules_names_in_one_file(tmp_path: Path, family: str, prefix: str) -> None:
    """With fewer blocks than the published one, too, and float8."""
    component = FAMILIES[family].component("transformer")
    config = json.loads((PUBLISHED / LABELS[family] / "transformer/config.json").read_text())
    fewer = {"n_layers": 5, "n_refiner_layers": 1} if family == "zimage" else {"num_layers": 3, "num_single_layers": 5}
    for blocks in ({}, fewer):
        shapes = component.names(config | blocks).shapes
        path = put(
            tmp_path / "finetune.safetensors", {prefix + name: shape for name, shape in shapes.items()}, torch.float8_e4m3fn
        )
        source = open_model(FAMILIES[family], str(path))
        source.verify("transformer")
        source.check_kind()
        read = source.config("transformer")
        assert {key: read[key] for key in blocks} == blocks
        assert read.get("guidance_embeds") == config.get("guidance_embeds") and source.weights("transformer").prefix == prefix


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "unet."])
def test_a_unet_and_a_vae_under_the_modules_names(tmp_path: Path, prefix: str) -> None:
    for name, before in (("unet", prefix), ("vae", "")):
        config = json.loads((PUBLISHED / "sdxl" / name / "config.json").read_text())
        shapes = FAMILIES["sdxl"].component(name).names(config).shapes
        put(tmp_path / f"{name}.safetensors", {before + key: shape for key, shape in shapes.items()})
    paths = {"vae": str(tmp_path / "vae.safetensors")}
    source = open_model(FAMILIES["sdxl"], str(tmp_path / "unet.safetensors"), component_paths=paths)
    for name in ("unet", "vae"):
        source.verify(name)
    source.check_kind()


@pytest.mark.parametrize("suffix", [".sft", ".SAFETENSORS"])
def test_other_spellings_of_the_suffix(tmp_path: Path, suffix: str) -> None:
    path = put(tmp_path / f"flux1-dev{suffix}", shapes_of("flux", "transformer"))
    vae = put(tmp_path / f"ae{suffix}", shapes_of("flux", "vae"))
    source = open_model(FAMILIES["flux"], str(path), component_paths={"vae": str(vae)})
    source.verify("transformer")
    source.verify("vae")


def test_one_shard_alone_and_a_merge_of_the_last_one_are_refused(tmp_path: Path) -> None:
    shapes = FAMILIES["flux"].component("transformer").names(
        json.loads((PUBLISHED / "flux-dev/transformer/config.json").read_text())
    ).shapes  # fmt: skip
    last = {name: shape for name, shape in shapes.items() if name.startswith(("single_transformer_blocks.3", "proj_out"))}
    shard = put(tmp_path / "diffusion_pytorch_model-00003-of-00003.safetensors", last)
    with pytest.raises(UserError, match="is shard 3 of 3 alone; give the whole diffusers folder, or the folder"):
        open_model(FAMILIES["flux"], str(shard))
    merge = put(tmp_path / "merged.safetensors", last)
    with pytest.raises(UserError, match=r"component 'transformer' is missing \(\d+ of \d+ in all\); use a whole file"):
        open_model(FAMILIES["flux"], str(merge)).verify("transformer")


def test_the_class_that_a_parts_config_names_is_checked(tmp_path: Path) -> None:
    put(tmp_path / "flux.safetensors", shapes_of("flux", "transformer"))
    (tmp_path / "flux").mkdir()
    (tmp_path / "flux/vae").mkdir()
    (tmp_path / "flux/vae/config.json").write_text(json.dumps({"_class_name": "AutoencoderTiny"}))
    said = r"vae/config\.json: _class_name = 'AutoencoderTiny'; the vae is a AutoencoderKL"
    with pytest.raises(UserError, match=said):
        open_model(FAMILIES["flux"], str(tmp_path / "flux.safetensors")).check_kind()
