"""A config of which the library makes another denoiser than steps and files know is refused with its file and its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.make_model import tiny_sdxl
from tests.unit.models.test_beside import put
from tests.unit.models.test_beside import shapes_of as published_shapes
from tests.unit.models.test_variants import sdxl
from trainer.base.errors import UserError
from trainer.models import FAMILIES
from trainer.models.building import build

UNET = FAMILIES["sdxl"].component("unet")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dual_cross_attention", True), ("class_embeddings_concat", True), ("addition_embed_type", "text"),
        ("addition_embed_type", "image"), ("encoder_hid_dim", 64), ("time_cond_proj_dim", 256),
        ("class_embed_type", "timestep"), ("class_embed_type", "projection"), ("class_embed_type", "identity"),
        ("num_class_embeds", 10), ("time_embedding_type", "fourier"), ("resnet_time_scale_shift", "scale_shift"),
        ("mid_block_type", None), ("only_cross_attention", True), ("attention_type", "gated"), ("conv_in_kernel", 5),
    ],
)  # fmt: skip
def test_a_switch_that_makes_another_unet_is_refused_with_its_key(key: str, value: Any) -> None:
    config = tiny_sdxl(1000)["unet"] | {key: value}
    with pytest.raises(UserError, match=rf"config\.json.*\b{key} = {value!r}"):
        build(UNET, config, Path("unet/config.json"))


def test_a_switch_that_the_unet_itself_computes_is_taken() -> None:
    assert build(UNET, tiny_sdxl(1000)["unet"] | {"center_input_sample": True, "timestep_post_act": "silu"})


def test_the_folder_of_a_whole_clip_serves_as_a_text_encoder(tmp_path: Path) -> None:
    source = sdxl(tmp_path / "model")
    known = {name: source.config(name) for name in source.family.text_encoders}
    for name, own in known.items():
        whole = {
            "architectures": ["CLIPModel"], "model_type": "clip", "projection_dim": own["projection_dim"],
            "text_config": {**own, "projection_dim": 512}, "vision_config": {"hidden_size": 1024},
        }  # fmt: skip
        (source.root / name / "config.json").write_text(json.dumps(whole))
        assert source.config(name) == own
    vision = {"vision_model.embeddings.class_embedding": (1024,), "visual_projection.weight": (768, 1024), "logit_scale": ()}
    put(source.root / "text_encoder/model.safetensors", published_shapes("sdxl", "text_encoder") | vision)
    source.verify("text_encoder")
