"""Flux files that hold everything, as ComfyUI's flux1-dev-fp8.safetensors does."""

from __future__ import annotations

import json
import math
import shutil
import tomllib
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.harness import PHOTOS, Workbench, built, take_step
from tests.integration.test_errors import refused
from tests.unit.models.test_names import parameter_shapes
from trainer import config as configs
from trainer.base.errors import UserError
from trainer.base.tensorfile import TensorFile, write_tensors
from trainer.base.types import Link
from trainer.kernels import dora_torch
from trainer.models import FAMILIES
from trainer.models.config_files import PUBLISHED
from trainer.models.loading import load_tokenizers
from trainer.models.names import join_parts
from trainer.models.opening import open_model
from trainer.plan.run_plan import open_source, resolve
from trainer.plan.storage import Storage
from trainer.quantization import FORMATS
from workbench.commands import main as cli
from workbench.summary.model import model_account

FLUX = FAMILIES["flux"]
PREFIXES = {
    "transformer": "model.diffusion_model.",
    "text_encoder": "text_encoders.clip_l.transformer.",
    "text_encoder_2": "text_encoders.t5xxl.transformer.",
    "vae": "vae.",
}
# Small, of the published heads and norm groups, as wide as the tiny models' encoders where they meet, with embeddings for
# CLIP's words and those of the tiny T5's tokenizer.
SIZES = {
    "transformer": {"num_attention_heads": 1, "num_layers": 2, "num_single_layers": 3, "joint_attention_dim": 64,
                    "pooled_projection_dim": 32},
    "text_encoder": {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 1, "num_hidden_layers": 2},
    "text_encoder_2": {"d_ff": 96, "d_kv": 64, "d_model": 64, "num_heads": 2, "num_layers": 2, "vocab_size": 1384},
    "vae": {"block_out_channels": [32, 32, 64, 64], "layers_per_block": 1},
}  # fmt: skip


def published(component: str, variant: str = "flux-dev") -> dict:
    return json.loads((PUBLISHED / variant / component / "config.json").read_text())


def links_of(component: str, config: dict) -> list[Link]:
    """The names of ComfyUI's files: the original ones, and transformers' own for the encoders."""
    if FLUX.component(component).names:
        return FLUX.component(component).names(config).links
    start = "text_model." if component == "text_encoder" else ""
    shapes = parameter_shapes(FLUX.component(component).class_name, config)
    return [Link(start + name, (name,)) for name in shapes]


def write_all_in_one(path: Path, weights: dict[str, dict[str, torch.Tensor]], configs: dict[str, dict]) -> None:
    """With what ComfyUI's file has beside them."""
    tensors = {
        PREFIXES[component] + link.original: join_parts(link, [weights[component][part] for part in link.parts])
        for component, config in configs.items()
        for link in links_of(component, config)
    }
    tensors["text_encoders.clip_l.logit_scale"] = torch.tensor(4.6)
    tensors["text_encoders.t5xxl.logit_scale"] = torch.tensor(4.6)
    tensors["text_encoders.clip_l.transformer.text_projection.weight"] = torch.zeros(4, 4)
    write_tensors(path, tensors)


def random_weights(component: str, config: dict) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = parameter_shapes(FLUX.component(component).class_name, config)
    return {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) / shape[1] ** 0.5
        for name, shape in shapes.items()
    }


def loaded(source, component: str) -> dict[str, torch.Tensor]:
    swap = partial(Storage(component, FORMATS["fp32"], torch.float32).swap, kernels=dora_torch)
    state = source.load(component, swap=swap, device=torch.device("cpu")).state_dict()
    return {name.replace("payload_", ""): tensor for name, tensor in state.items()}


def assert_holds(source, weights: dict[str, dict[str, torch.Tensor]]) -> None:
    for component, tensors in weights.items():
        source.verify(component)
        state = loaded(source, component)
        for name, tensor in tensors.items():
            assert torch.equal(state[name], tensor), f"{component}: {name}"


def tiny_weights(models: Path) -> dict[str, dict[str, torch.Tensor]]:
    weights = {}
    for component in PREFIXES:
        (file,) = (models / "flux" / component).glob("*.safetensors")
        tensors = TensorFile(file).read_all()
        weights[component] = {name.removeprefix("text_model."): tensor.float() for name, tensor in tensors.items()}
    return weights


def tiny_configs(models: Path) -> dict[str, dict]:
    return {c: json.loads((models / "flux" / c / "config.json").read_text()) for c in PREFIXES}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "pruned"),
    [("flux-dev", {}), ("flux-dev", {"num_layers": 1, "num_single_layers": 12}), ("flux-schnell", {"num_single_layers": 1})],
    ids=["dev", "pruned", "schnell"],
)
def test_the_sizes_of_an_all_in_one_file_are_read_behind_its_prefixes(bench: Workbench, variant, pruned) -> None:
    """The published sizes were taken instead, and the file refused for want of a block that it never had."""
    configs = {c: published(c, variant) | sizes for c, sizes in SIZES.items()}
    configs["transformer"] |= pruned
    weights = {component: random_weights(component, config) for component, config in configs.items()}
    path = bench.tmp / "all.safetensors"
    write_all_in_one(path, weights, configs)
    source = open_model(FLUX, str(path))
    assert source.root.name == variant
    for component, config in configs.items():
        assert source.config(component) == config, component
    assert_holds(source, weights)

    # T5's tokenizer is not embedded: it comes with the encoder's own path, and here both encoders do.
    tiny = {"path": str(bench.models / "flux")}
    config = bench.config("flux", model__path=str(path), model__components={"text_encoder": tiny, "text_encoder_2": tiny},
                          data__text_length=16)  # fmt: skip
    with built(config) as run:
        step = take_step(run, 1, next(run.updates()))
    assert step.updated and math.isfinite(step.loss) and step.grad_norm > 0


def test_an_all_in_one_file_of_the_tiny_models(bench: Workbench) -> None:
    weights = tiny_weights(bench.models)
    path = bench.tmp / "all.safetensors"
    write_all_in_one(path, weights, tiny_configs(bench.models))
    assert_holds(open_model(FLUX, str(path), config=str(bench.models / "flux")), weights)
    # Without configs, by what is in the file: not that blocks are missing, which was said of it.
    with pytest.raises(UserError, match=r"heads of 16 .* model\.config"):
        open_model(FLUX, str(path)).config("transformer")


@pytest.mark.slow
def test_a_plan_asks_for_the_tokenizer_that_is_nowhere(bench: Workbench, capsys) -> None:
    """As the training does."""
    configs = {c: published(c) | sizes for c, sizes in SIZES.items()}
    path = bench.tmp / "all.safetensors"
    write_all_in_one(path, {c: random_weights(c, config) for c, config in configs.items()}, configs)
    tree = bench.tree("flux", model__path=str(path))
    for arguments in (("--plan",), ()):
        refused(bench, capsys, "the model has no tokenizer_2", "model.config", tree=tree, arguments=arguments)


def test_the_folder_beside_the_file_may_hold_the_missing_tokenizer_alone(bench: Workbench) -> None:
    """It was refused for want of the configs, which the published model's stand for."""
    configs = {c: published(c) | sizes for c, sizes in SIZES.items()}
    path = bench.tmp / "all.safetensors"
    write_all_in_one(path, {c: random_weights(c, config) for c, config in configs.items()}, configs)
    shutil.copytree(bench.models / "flux" / "tokenizer_2", bench.tmp / "all" / "tokenizer_2")
    source = open_model(FLUX, str(path))
    assert source.root == bench.tmp / "all"
    assert {c: source.config(c) for c in configs} == configs
    assert source.scheduler == json.loads((PUBLISHED / "flux-dev/scheduler/scheduler_config.json").read_text())
    source.check_tokenizers()
    ids = {name: tokenizer("a bear").input_ids for name, tokenizer in load_tokenizers(FLUX, source).items()}
    assert ids["tokenizer"][0] == 49406 and ids["tokenizer_2"][-1] == 1


@pytest.mark.slow
def test_a_folder_of_configs_that_was_given_is_taken_as_it_is(bench: Workbench, capsys) -> None:
    """The published configs stand for what the folder found beside a file lacks, and for no other's; the plan says so."""
    path, beside = bench.tmp / "one.safetensors", bench.tmp / "one"
    shutil.copy(bench.models / "sdxl-one.safetensors", path)
    shutil.copytree(bench.models / "sdxl-one", beside)
    (beside / "scheduler/scheduler_config.json").unlink()
    assert cli.main(["--config", str(bench.write(bench.tree("sdxl", model__path=str(path)))), "--plan"]) == 0
    said = capsys.readouterr().out
    assert "  assumed: 1 part: configs of the published sdxl (scheduler); " in said, said
    shutil.rmtree(beside / "tokenizer")
    (beside / "vae/config.json").unlink()
    said = "configs of the published sdxl (scheduler, tokenizer, vae)"
    assert said in str(model_account(open_model(FAMILIES["sdxl"], str(path)), {}).lines())
    given = bench.tree("sdxl", model__path=str(path), model__config=str(beside))
    for part in ("vae/config.json", "scheduler/scheduler_config.json"):
        refused(bench, capsys, f"{part} does not exist; complete the model folder, or point model.config", tree=given)
        shutil.copy(bench.models / "sdxl" / part, beside / part)
    refused(bench, capsys, "the model has no tokenizer", "set model.config to a folder that has tokenizer/", tree=given)
    assert model_account(open_model(FAMILIES["sdxl"], str(path), config=str(beside)), {}).lines() == []


def test_a_block_that_is_missing_is_named_with_its_prefix(bench: Workbench) -> None:
    configs = {c: published(c) | sizes for c, sizes in SIZES.items()}
    weights = {component: random_weights(component, config) for component, config in configs.items()}
    path = bench.tmp / "all.safetensors"
    write_all_in_one(path, weights, configs)
    tensors = TensorFile(path).read_all()
    del tensors["model.diffusion_model.single_blocks.1.linear2.weight"]
    write_tensors(path, tensors)
    with pytest.raises(UserError, match=r"'model\.diffusion_model\.single_blocks\.1\.linear2\.weight'.* is missing"):
        open_model(FLUX, str(path)).verify("transformer")


@pytest.mark.slow
def test_new_writes_where_each_part_lies(bench: Workbench, monkeypatch, capsys) -> None:
    """Of ComfyUI's commonest Flux file, the transformer alone; the data report and the plan are over the same parts."""
    monkeypatch.chdir(bench.tmp)
    files = {"transformer": "unet/flux1-dev", "text_encoder": "clip/clip_l", "text_encoder_2": "clip/t5xxl", "vae": "vae/ae"}
    for component, file in files.items():
        config = published(component) | SIZES[component]
        weights = random_weights(component, config)
        tensors = {link.original: join_parts(link, [weights[p] for p in link.parts]) for link in links_of(component, config)}
        write_tensors(bench.tmp / f"models/{file}.safetensors", tensors)
    new = ["--new", str(PHOTOS), "--model", "models/unet/flux1-dev.safetensors", "--plan_memory", "24GB"]
    new += ["--set", "data.resolution=64", "validation.every_steps=0"]
    assert cli.main(new) == 2
    assert "tokenizer_2: none in models/clip/tokenizer_2; copy that folder" in capsys.readouterr().err
    assert not list(bench.tmp.glob("*.toml")), "a start that failed leaves no config"
    shutil.copytree(bench.models / "flux/tokenizer_2", bench.tmp / "models/clip/tokenizer_2")
    assert cli.main(new) == 0
    assert "data report: " in capsys.readouterr().out
    (written,) = bench.tmp.glob("*.toml")
    assert 'path = "models/vae/ae.safetensors" # found beside the model\n' in written.read_text()
    components = tomllib.loads(written.read_text())["model"]["components"]
    wanted = {component: f"models/{file}.safetensors" for component, file in files.items() if component != "transformer"}
    assert {name: table["path"] for name, table in components.items() if "path" in table} == wanted
    assert open_source(configs.load(str(written), [])).found == {}
    # A config without them finds the same, and the run's own config names what was found.
    bare = configs.load(str(written), [f"model.components.{name}.path=" for name in wanted])
    resolved = resolve(bare, open_source(bare)).model.components
    assert {name: table.path for name, table in resolved.items() if table.path} == wanted
