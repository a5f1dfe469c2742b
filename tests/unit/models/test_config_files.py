"""Damaged configs of a model end in one sentence with the file, the key and the value."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import diffusers
import pytest

from trainer.base.errors import UserError
from trainer.base.tensorfile import TensorFile
from trainer.base.types import Recognised
from trainer.models import FAMILIES
from trainer.models.building import shapes_of
from trainer.models.config_files import PUBLISHED, read_json
from trainer.models.loading import ModelSource
from trainer.models.sdxl import SCHEDULERS

LABELS = {"sdxl": "sdxl", "flux": "flux-dev"}


def opened(root: Path, family: str = "sdxl") -> ModelSource:
    return ModelSource(FAMILIES[family], root=root, recognise=lambda entries: Recognised({}, frozenset()))


def configs(tmp_path: Path, family: str = "sdxl") -> Path:
    """A copy of the embedded configs, to be changed."""
    return shutil.copytree(PUBLISHED / LABELS[family], tmp_path / "model")


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def checked(source: ModelSource) -> None:
    found = {component.name: source.config(component.name) for component in source.family.components}
    source.family.files.check(found, found[source.family.denoiser]["in_channels"])


@pytest.mark.parametrize(
    ("component", "key", "value", "said"),
    [
        ("vae", "block_out_channels", "abc", "'abc'"),
        ("vae", "block_out_channels", 8, "8"),
        ("vae", "block_out_channels", [8, "x"], r"\[8, 'x'\]"),
        ("vae", "latent_channels", None, "None"),
        ("vae", "norm_num_groups", {"a": 1}, r"\{'a': 1\}"),
        ("unet", "in_channels", "4", "'4'"),
        ("unet", "down_block_types", "CrossAttnDownBlock2D", "'CrossAttnDownBlock2D'"),
        ("unet", "cross_attention_dim", True, "True"),
        ("text_encoder", "num_hidden_layers", "12", "'12'"),
        ("text_encoder", "layer_norm_eps", float("inf"), "inf"),
        ("text_encoder", "num_hidden_layers", 10**9, "1000000000"),  # they would be built, one after the other
        ("unet", "layers_per_block", 10**9, "1000000000"),
        ("unet", "transformer_layers_per_block", [1, 2, 10**9], r"\[1, 2, 1000000000\]"),
        ("vae", "block_out_channels", [8] * 10**6, r"\[8, 8.*"),
    ],
)
def test_a_value_of_another_kind_is_named(tmp_path: Path, component: str, key: str, value: Any, said: str) -> None:
    root = configs(tmp_path)
    change(root / component / "config.json", **{key: value})
    with pytest.raises(UserError, match=rf"{component}/config\.json: {key} = {said}, where others have "):
        checked(opened(root))


@pytest.mark.parametrize("family", LABELS)
def test_what_models_have_is_taken(tmp_path: Path, family: str) -> None:
    """The published configs, one number where others have a list, a list where others have a number, and null."""
    root = configs(tmp_path, family)
    checked(opened(root, family))
    change(root / "vae/config.json", sample_size=None, something_new="x")
    if family == "sdxl":
        change(root / "unet/config.json", attention_head_dim=8, transformer_layers_per_block=2, sample_size=None)
    checked(opened(root, family))


@pytest.mark.parametrize(
    ("component", "key", "value"),
    [("vae", "act_fn", "swoosh"), ("text_encoder", "hidden_act", "swoosh"), ("vae", "down_block_types", ["Nothing2D"] * 4)],
)
def test_what_the_librarys_class_does_not_take_is_named(tmp_path: Path, component: str, key: str, value: Any) -> None:
    root = configs(tmp_path)
    path = root / component / "config.json"
    change(path, **{key: value})
    with pytest.raises(UserError, match="describes no (AutoencoderKL|CLIPTextModel).*(swoosh|Nothing2D)") as refusal:
        opened(root).build(component)
    assert str(path) in str(refusal.value)
    if isinstance(value, str):
        assert f"({key} = 'swoosh')" in str(refusal.value)


def test_values_that_do_not_go_together_are_refused_with_their_file(tmp_path: Path) -> None:
    root = configs(tmp_path)
    path, source = root / "unet/config.json", opened(root)
    change(path, block_out_channels=[320, 640])
    with pytest.raises(UserError, match=r"unet/config\.json: describes no UNet2DCond.*block_out_channels = .*Must provide"):
        shapes_of(source.family.component("unet"), source.config("unet"), path)


def test_a_mistake_in_our_own_table_of_names_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    """Where the library's class takes the config, nothing is wrong with it."""
    root = configs(tmp_path)
    unet = opened(root).family.component("unet")
    broken = dataclasses.replace(unet, names=lambda config: {}["a mistake"])
    with pytest.raises(KeyError, match="a mistake"):
        shapes_of(broken, opened(root).config("unet"), root / "unet/config.json")


@pytest.mark.parametrize(
    ("text", "said"), [("[" * 200_000, "nested too deeply"), ("[1]", "not a JSON object"), ('{"a": ', "not valid JSON")]
)
@pytest.mark.parametrize("place", ["vae/config.json", "scheduler/scheduler_config.json", "tokenizer/tokenizer_config.json"])
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, place: str, text: str, said: str) -> None:
    root = configs(tmp_path)
    (root / place).write_text(text)
    read = {
        "vae": lambda source: source.config("vae"),
        "scheduler": lambda source: source.scheduler,
        "tokenizer": lambda source: source.check_tokenizers(),
    }[place.partition("/")[0]]
    with pytest.raises(UserError, match=said) as refusal:
        read(opened(root))
    assert str(root / place) in str(refusal.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names on this system")
@pytest.mark.parametrize("read", [read_json, TensorFile])
def test_a_pipe_is_not_read(tmp_path: Path, read) -> None:
    """It waited for ever for somebody to write into it."""
    pipe = tmp_path / "config.json"
    os.mkfifo(pipe)
    threading.Thread(target=lambda: pipe.write_text("{}"), daemon=True).start()  # so that a reader would end
    with pytest.raises(UserError, match=r"config\.json is a pipe, a socket or a device"):
        read(pipe)


@pytest.mark.parametrize(
    "index", [{"weight_map": {"a": "../elsewhere.safetensors"}}, {"weight_map": {"a": "/etc/passwd"}}, {"weight_map": []}, {}]
)
def test_an_index_of_shards_names_files_beside_it(tmp_path: Path, index: dict[str, Any]) -> None:
    root = configs(tmp_path)
    place = root / "vae/diffusion_pytorch_model.safetensors.index.json"
    place.write_text(json.dumps(index))
    (root / "vae/diffusion_pytorch_model-00001-of-00001.safetensors").touch()
    with pytest.raises(UserError, match="which is not a file beside it|has no weight_map") as refusal:
        opened(root).weights("vae")
    assert str(place) in str(refusal.value)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("sdxl", {"scaling_factor": 0}, "scaling_factor = 0: .* a number above 0"),
        ("sdxl", {"scaling_factor": -0.13}, "scaling_factor = -0.13: .* a number above 0"),
        ("flux", {"scaling_factor": None}, "scaling_factor = None"),
        ("flux", {"shift_factor": None}, "shift_factor = None: .* is a number;"),
        ("sdxl", {"block_out_channels": [128, 256]}, r"\[128, 256\]: 2 levels .* 2 x 2 pixels; .* 4 levels, for 8 x 8"),
        ("flux", {"block_out_channels": [128] * 5}, "5 levels give one latent for 16 x 16 pixels"),
    ],
)
def test_a_vae_of_another_size_or_of_worthless_latents_is_refused(tmp_path: Path, family, changes, said) -> None:
    """At a scale of 0 all latents were zero, and the run ended with status 0; over 2 x 2 pixels the plan was too low."""
    root = configs(tmp_path, family)
    change(root / "vae/config.json", **changes)
    with pytest.raises(UserError, match=said):
        checked(opened(root, family))


def test_a_vae_that_leaves_its_scale_to_the_class_is_taken(tmp_path: Path) -> None:
    root = configs(tmp_path)
    path = root / "vae/config.json"
    path.write_text(
        json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "scaling_factor"})
    )
    checked(opened(root))


@pytest.mark.slow
def test_a_scheduler_may_have_what_its_class_has_by_default(tmp_path: Path) -> None:
    """An infinity among it, which JSON has no value for and the library writes."""
    root = configs(tmp_path)
    place = root / "scheduler" / "scheduler_config.json"
    for name in sorted(SCHEDULERS):
        known = getattr(diffusers, name)
        # Of a class whose library (scipy, torchsde) is not here, diffusers has a stand-in without values.
        stands_in = hasattr(known, "_backends")
        place.write_text(json.dumps({"_class_name": name}) if stands_in else known().to_json_string())
        assert opened(root).scheduler["_class_name"] == name


def test_a_config_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    root = configs(tmp_path)
    path = root / "unet" / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert opened(root).config("unet")["in_channels"] == 4
