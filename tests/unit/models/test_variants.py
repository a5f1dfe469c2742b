"""Dev or schnell: as tensors show, as is asked for, as a name says, else schnell; the account says which, and why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.make_model import write_sparse
from tests.unit.models.test_beside import part, put, shapes_of, tokenizer
from trainer.base.errors import UserError
from trainer.base.tensorfile import Recipe
from trainer.models import FAMILIES
from trainer.models.beside import complete
from trainer.models.config_files import PUBLISHED
from trainer.models.flux import distillation, metadata, t5_length
from trainer.models.loading import ModelSource
from trainer.models.opening import open_model
from trainer.models.weight_sets import Wanted
from workbench.summary.model import model_account

FLUX = FAMILIES["flux"]
DEV = shapes_of("flux", "transformer")
UNGUIDED = {name: shape for name, shape in DEV.items() if not name.startswith("guidance_in.")}


def opened(root: Path, file: str, shapes=UNGUIDED, *, variant: str | None = None, **said: str) -> ModelSource:
    tensors = {name: Recipe(torch.bfloat16, shape, lambda: torch.empty(0)) for name, shape in shapes.items()}
    write_sparse(root / "unet" / file, tensors, said or None)
    if not (root / "clip").is_dir():
        for name, place in (("text_encoder", "clip/clip_l"), ("text_encoder_2", "clip/t5xxl"), ("vae", "vae/ae")):
            part(root / f"{place}.safetensors", name)
        tokenizer(root / "clip/tokenizer_2")
    return complete(open_model(FLUX, str(root / "unet" / file), wanted=Wanted(variant)))


def lines(source: ModelSource, **options: Any) -> str:
    return "\n".join(model_account(source, options).lines())


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("flux1-dev", "dev"), ("FLUX.1-dev-fp8", "dev"), ("flux-dev-de-distill", "dev"), ("fluxDedistilled_v10", "dev"),
        ("flux1Dev_dedistilled", "dev"), ("Flux-Dev2Pro", "dev"), ("fluxUndistilled", "dev"), ("flux_dev", "dev"),
        ("black-forest-labs/FLUX.1-schnell", "schnell"), ("LibreFLUX", "schnell"), ("OpenFLUX.1", "schnell"),
        ("schnell-dedistilled", "schnell"), ("flux-dev-schnell-merge", None), ("devil_v2", None), ("my-developer", None),
        ("mymodel", None), ("device", None), ("flux1-dev-kontext_fp8_scaled", None),
    ],
)  # fmt: skip
def test_names_say_dev_or_schnell_as_people_write_them(name: str, found: str | None) -> None:
    assert distillation(name) == found


@pytest.mark.slow
def test_a_dedistilled_dev_is_read_as_dev_and_the_account_says_why_and_what_says_otherwise(tmp_path: Path) -> None:
    source = opened(tmp_path, "flux-dev-de-distill.safetensors")
    assert source.markers.distillation == "dev" and source.config("transformer")["guidance_embeds"] is False
    assert source.scheduler["use_dynamic_shifting"] is True, "dev's"
    text = lines(source)
    for part_of_it in (
        "assumed: the model is dev or made of it, as its name says (flux-dev-de-distill)",
        "T5 reads up to 512 tokens of a caption (data.text_length), and adapter files say flux-1-dev",
        "for schnell, model.variant = 'schnell'",
        "configs of the published flux-dev (scheduler, ",
    ):
        assert part_of_it in text
    assert "T5 reads up to 100 tokens" in lines(source, text_length=100)
    assert source.contents((), str)["variant"] == "dev", "a run of earlier versions read it as schnell"


@pytest.mark.slow
def test_without_a_word_it_is_schnell_as_ever_and_the_account_says_so(tmp_path: Path) -> None:
    source = opened(tmp_path, "mymodel.safetensors")
    assert source.markers.distillation == "schnell" and source.scheduler["use_dynamic_shifting"] is False
    assert "variant" not in source.contents((), str)
    assert "assumed: the model is schnell or made of it, as nothing says which it is: T5 reads up to 256 tokens" in lines(
        source
    )
    asked = opened(tmp_path, "mymodel.safetensors", variant="dev")
    assert asked.markers.distillation == "dev" and "\nthe model is dev or made of it, as model.variant says" in "\n" + lines(
        asked
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"modelspec.title": "Flux Dev De-Distilled"}, "dev"), ({"modelspec.architecture": "flux-1-dev"}, "dev"),
        ({"modelspec.architecture": "flux-1-schnell"}, "schnell"), ({"format": "pt"}, "schnell"),
    ],
)  # fmt: skip
def test_a_files_metadata_says_it_where_its_name_does_not(tmp_path: Path, said: dict[str, str], found: str) -> None:
    assert opened(tmp_path, "mymodel.safetensors", **said).variant.name == found


def test_the_folder_around_a_file_says_it(tmp_path: Path) -> None:
    path = put(tmp_path / "flux-dev-de-distill" / "consolidated_s6700.safetensors", UNGUIDED)
    assert open_model(FLUX, str(path)).variant.name == "dev"


@pytest.mark.slow
def test_a_guidance_embedding_outweighs_every_name(tmp_path: Path) -> None:
    source = opened(tmp_path, "flux1-schnell.safetensors", DEV)
    assert source.variant.name == "dev" and source.root.name == "flux-dev" and "variant" not in source.contents((), str)
    said = "warning: the model is dev, as its tensors show, and not schnell, as its name says (flux1-schnell)"
    assert said in lines(source)
    with pytest.raises(UserError, match="model.variant = 'schnell': the model is dev, as its tensors show; leave it out"):
        opened(tmp_path, "flux1-schnell.safetensors", DEV, variant="schnell").markers  # noqa: B018


def test_tokens_and_header_follow(tmp_path: Path) -> None:
    class Tokenizer:
        model_max_length = 512

    class Model:
        tokenizers, configs, options = {"tokenizer_2": Tokenizer}, {"transformer": {"guidance_embeds": False}}, {}

    lengths = []
    for options in ({}, {"distillation": "schnell"}, {"distillation": "dev"}, {"distillation": "dev", "text_length": 77}):
        Model.options = options
        lengths.append(t5_length(Model))
    assert lengths == [256, 256, 512, 77]
    config = {"guidance_embeds": False}
    assert metadata(config | {"_variant": "dev"}, "")["modelspec.architecture"] == "flux-1-dev/lora"
    assert metadata(config, "")["modelspec.architecture"] == "flux-1-schnell/lora"


def sdxl(folder: Path, **scheduler: Any) -> ModelSource:
    """A diffusers folder, with these changes of its scheduler's config."""
    shutil.copytree(PUBLISHED / "sdxl", folder)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionXLPipeline"}))
    path = folder / "scheduler/scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | scheduler))
    for component in FAMILIES["sdxl"].components:
        stem = "model" if component.library == "transformers" else "diffusion_pytorch_model"
        put(folder / component.name / f"{stem}.safetensors", shapes_of("sdxl", component.name))
    return open_model(FAMILIES["sdxl"], str(folder))


@pytest.mark.slow
def test_the_account_warns_of_a_name_that_says_another_kind_and_no_other_part_of_the_path_does(tmp_path: Path) -> None:
    source = opened(tmp_path / "control", "my_flux-kontext.safetensors", DEV)
    said = "its name says FLUX.1 Kontext (an editing model) (my_flux-kontext), and it is trained as a Flux model"
    assert f"warning: {said} that is shown no references; if the name is right, set model.variant = 'kontext'" in lines(
        source
    )
    assert "control model" not in lines(source)
    assert "its name" not in lines(opened(tmp_path / "kontext", "mine.safetensors", DEV))


def test_a_name_that_says_v_is_named_unless_a_key_or_a_file_says_what_is_predicted(tmp_path: Path) -> None:
    said = "its name says a model that predicts v (x_vpred), and it is trained as one that predicts epsilon"
    remedy = "if the name is right, set model.prediction = 'v', and mostly model.zero_terminal_snr = true"
    source = sdxl(tmp_path / "turbo/x_vpred")
    assert lines(source, prediction="auto") == f"warning: {said}; {remedy}"
    assert lines(source, prediction="v") == lines(source, prediction="epsilon") == ""
    assert lines(sdxl(tmp_path / "y_vpred", prediction_type="v_prediction")) == ""
    assert "a distilled model" in lines(sdxl(tmp_path / "z-turbo"), prediction="v")


def test_of_a_folder_the_account_names_its_pipeline_and_no_published_configs(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    sdxl(folder)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionXLInpaintPipeline"}))
    text = lines(open_model(FAMILIES["sdxl"], str(folder)))
    assert text == "its pipeline calls itself StableDiffusionXLInpaintPipeline, and is trained as StableDiffusionXLPipeline"
