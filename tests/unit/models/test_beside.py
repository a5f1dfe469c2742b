"""What a Flux or SDXL file lacks is found beside it, by its header, or asked for in one message.

Files of the published sizes, headers alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import torch

from scripts.make_model import clip_shapes, qwen_shapes, t5_shapes, write_sparse
from trainer.base.errors import UserError
from trainer.base.tensorfile import Recipe
from trainer.models import FAMILIES
from trainer.models.beside import complete
from trainer.models.config_files import PUBLISHED
from trainer.models.loading import ModelSource
from trainer.models.names import Shape
from trainer.models.opening import open_model
from trainer.models.weights import original_shape

LABELS = {"sdxl": "sdxl", "flux": "flux-dev", "flux2": "flux2-klein-4b", "flux3": "flux3-klein-base", "zimage": "zimage"}


@cache
def shapes_of(family: str, component: str) -> Mapping[str, Shape]:
    """Under the names that ComfyUI's files of one component have."""
    config = json.loads((PUBLISHED / LABELS[family] / component / "config.json").read_text())
    known = FAMILIES[family].component(component)
    if known.names is not None:
        names = known.names(config)
        return {link.original: original_shape([names.shapes[part] for part in link.parts], link.op) for link in names.links}
    if known.class_name in ("T5EncoderModel", "Qwen3Model"):
        return t5_shapes(config) if known.class_name == "T5EncoderModel" else qwen_shapes(config)
    return {f"text_model.{name}": shape for name, shape in clip_shapes(config).items()}


def put(place: Path, shapes: Mapping[str, Shape], dtype: torch.dtype = torch.bfloat16) -> Path:
    write_sparse(place, {name: Recipe(dtype, shape, lambda: torch.empty(0)) for name, shape in shapes.items()})
    return place


def part(place: Path, component: str, family: str = "flux", dtype: torch.dtype = torch.bfloat16) -> Path:
    return put(place, shapes_of(family, component), dtype)


def tokenizer(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def opened(path: Path | str, family: str = "flux", **how) -> ModelSource:
    return complete(open_model(FAMILIES[family], str(path), **how))


def distractors(root: Path) -> None:
    """What else people have in these folders."""
    part(root / "models/vae/sdxl_vae.safetensors", "vae", "sdxl")
    part(root / "models/clip/clip_g.safetensors", "text_encoder_2", "sdxl")
    put(root / "models/clip/t5-small.safetensors", {**shapes_of("flux", "text_encoder_2"), "shared.weight": (32128, 512)})
    put(root / "models/clip/clip lora.safetensors", {"text_model.encoder.layers.0.lora_A.weight": (4, 4)})
    (root / "models/clip/broken clip.safetensors").write_bytes(b"half of a download")
    (root / "models/vae/ae.gguf").touch()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "encoders", "vae", "tokenizers"),
    [
        ("models/unet", "models/clip", "models/vae", "comfy/text_encoders/t5_tokenizer"),
        ("models/diffusion_models/flux", "models/text_encoders", "models/vae/FLUX", "comfy/text_encoders/t5_tokenizer"),
        ("models/checkpoints", "models/text_encoders/flux", "models/vae", "models/text_encoders/flux/tokenizer_2"),
        ("models/Stable-diffusion", "models/text_encoder", "models/VAE", "models/text_encoder/tokenizer_2"),
        ("flux", "flux", "flux", "flux/tokenizer_2"),
        ("flux", "flux/clip", "flux/vae", "flux/tokenizer_2"),
    ],
)
def test_the_parts_are_found_where_programs_keep_them(tmp_path: Path, model, encoders, vae, tokenizers) -> None:
    root = tmp_path / "ComfyUI"
    path = part(root / model / "flux1-dev.safetensors", "transformer")
    parts = {
        "text_encoder": part(root / encoders / "clip_l.safetensors", "text_encoder"),
        "text_encoder_2": part(root / encoders / "t5xxl_fp8_e4m3fn.safetensors", "text_encoder_2", dtype=torch.float8_e4m3fn),
        "vae": part(root / vae / "ae.safetensors", "vae"),
    }
    folder = tokenizer(root / tokenizers)
    distractors(root)
    source = opened(path)
    assert source.found == source.overrides == parts
    assert source.tokenizer_folder("tokenizer_2") == folder
    for component in source.family.components:
        source.verify(component.name)


@pytest.mark.slow
def test_a_path_as_it_is_typed_inside_the_folder(tmp_path: Path, monkeypatch) -> None:
    part(tmp_path / "models/unet/flux.safetensors", "transformer")
    for name, file in (("text_encoder", "clip/clip_l"), ("text_encoder_2", "clip/t5xxl_fp16"), ("vae", "vae/ae")):
        part(tmp_path / f"models/{file}.safetensors", name)
    tokenizer(tmp_path / "models/clip/tokenizer_2")
    for place, given, start in (
        ("models/unet", "flux.safetensors", "../clip"),
        (".", "models/unet/flux.safetensors", "models/clip"),
    ):
        monkeypatch.chdir(tmp_path / place)
        assert str(opened(given).found["text_encoder"]) == f"{start}/clip_l.safetensors"


@pytest.mark.slow
def test_a_vae_under_the_names_of_diffusers(tmp_path: Path) -> None:
    """As the file of a repository's folder that was copied and renamed. Some of its names are those of the original."""
    path = part(tmp_path / "flux.safetensors", "transformer")
    part(tmp_path / "clip/clip_l.safetensors", "text_encoder")
    part(tmp_path / "clip/t5xxl.safetensors", "text_encoder_2")
    tokenizer(tmp_path / "clip/tokenizer_2")
    config = json.loads((PUBLISHED / "flux-dev/vae/config.json").read_text())
    vae = put(tmp_path / "vae/ae.safetensors", FAMILIES["flux"].component("vae").names(config).shapes)
    source = opened(path)
    assert source.found["vae"] == vae
    source.verify("vae")


def test_a_file_that_holds_nothing_of_the_model_is_not_asked_for_its_rest(tmp_path: Path) -> None:
    path = put(tmp_path / "model.safetensors", {"a.b.weight": (4, 4)})
    with pytest.raises(UserError, match="of component 'unet' is missing"):
        opened(path, "sdxl")


@pytest.mark.slow
def test_the_header_decides_and_not_the_name(tmp_path: Path) -> None:
    path = part(tmp_path / "flux.safetensors", "transformer")
    t5 = part(tmp_path / "clip_l.safetensors", "text_encoder_2")
    vae = part(tmp_path / "t5xxl.safetensors", "vae")
    clip = part(tmp_path / "ae.safetensors", "text_encoder")
    tokenizer(tmp_path / "tokenizer_2")
    assert opened(path).found == {"text_encoder": clip, "text_encoder_2": t5, "vae": vae}


@pytest.mark.slow
def test_a_whole_repository_beside_the_file(tmp_path: Path) -> None:
    """As FLUX.1-dev's has both: its folders serve, and a second VAE beside them is no question."""
    path = part(tmp_path / "flux1-dev.safetensors", "transformer")
    part(tmp_path / "ae.safetensors", "vae")
    for name, file in (("text_encoder", "model"), ("text_encoder_2", "model"), ("vae", "diffusion_pytorch_model")):
        config = (PUBLISHED / "flux-dev" / name / "config.json").read_text()
        names = shapes_of("flux", name)
        if name == "vae":
            known = FAMILIES["flux"].component("vae")
            names = known.names(json.loads(config)).shapes
        put(tmp_path / name / f"{file}.safetensors", names)
        (tmp_path / name / "config.json").write_text(config)
    folder = tokenizer(tmp_path / "tokenizer_2")
    source = opened(path)
    assert source.found == {name: tmp_path / name for name in ("text_encoder", "text_encoder_2", "vae")}
    assert source.tokenizer_folder("tokenizer_2") == folder


@pytest.mark.slow
def test_all_that_is_missing_is_asked_for_at_once(tmp_path: Path) -> None:
    path = part(tmp_path / "models/unet/flux1-dev.safetensors", "transformer")
    clip = part(tmp_path / "models/clip/clip_l.safetensors", "text_encoder")
    both = [part(tmp_path / f"models/clip/{name}.safetensors", "text_encoder_2") for name in ("t5xxl_fp16", "t5xxl_fp8")]
    with pytest.raises(UserError) as refusal:
        opened(path)
    said = str(refusal.value)
    first, *rest = said.splitlines()
    assert first == (
        f"model.path = {str(path)!r} holds transformer alone, not text_encoder, text_encoder_2, vae; still to be given:"
    )
    assert (
        rest[0]
        == f'text_encoder_2: {both[0]}, {both[1]} all fit; choose one, model.components.text_encoder_2.path = "{both[0]}"'
    )
    assert rest[1] == 'vae (AutoencoderKL): nothing beside it fits; model.components.vae.path = "FOLDER/ae.safetensors"'
    assert rest[2] == f"tokenizer_2: none in {path.parent / 'tokenizer_2'}; copy that folder of the model's repository there"
    assert rest[3] == f"text_encoder: found, {clip}"
    assert rest[4].startswith(f"looked in {path.parent}, {clip.parent}; a key is given in the config, or as --set")
    tokenizer(tmp_path / "models/clip/tokenizer_2")
    given = {"text_encoder_2": str(both[1]), "vae": str(part(tmp_path / "elsewhere/x.safetensors", "vae"))}
    assert opened(path, component_paths=given).found == {"text_encoder": clip}


def test_an_sdxl_checkpoint_without_a_vae(tmp_path: Path) -> None:
    shapes = {f"model.diffusion_model.{name}": shape for name, shape in shapes_of("sdxl", "unet").items()}
    for component in ("text_encoder", "text_encoder_2"):
        prefix = FAMILIES["sdxl"].component(component).prefixes[0]
        shapes |= {prefix + name: shape for name, shape in shapes_of("sdxl", component).items()}
    path = put(tmp_path / "models/checkpoints/pruned.safetensors", shapes)
    part(tmp_path / "models/vae/ae.safetensors", "vae", "flux")
    with pytest.raises(UserError, match=r"holds unet, text_encoder, text_encoder_2 alone, not vae;.*\n.*FOLDER/sdxl_vae\."):
        opened(path, "sdxl")
    vae = part(tmp_path / "models/vae/sdxl.vae.safetensors", "vae", "sdxl")
    assert opened(path, "sdxl").found == {"vae": vae}


def test_an_encoder_of_another_width_is_refused_by_name(tmp_path: Path) -> None:
    source = open_model(FAMILIES["flux"], str(part(tmp_path / "flux.safetensors", "transformer")))
    config = json.loads((PUBLISHED / "flux-dev/text_encoder_2/config.json").read_text()) | {"d_model": 512}
    (tmp_path / "t5").mkdir()
    (tmp_path / "t5/config.json").write_text(json.dumps(config))
    wrong = source.with_parts({"text_encoder_2": tmp_path / "t5"})
    with pytest.raises(
        UserError,
        match=r"joint_attention_dim = 4096, .* text_encoder_2's config.json \(d_model\) give 512: they do not belong",
    ):
        wrong.check_kind()
