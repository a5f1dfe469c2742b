"""Models of the family's architecture that are trained for something else: refused by what they are, before a weight is read.

As what SDXL and Flux are they would train without a word, or end in the first step.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.harness import DENOISER, Workbench, built
from tests.integration.test_errors import refused
from trainer.base.errors import UserError
from trainer.base.tensorfile import TensorFile, write_tensors
from trainer.models import FAMILIES, config_files
from trainer.models.base import Markers
from trainer.models.sdxl import BETAS
from trainer.plan.requirements import family_options
from trainer.plan.run_plan import check_objective, find_objective, open_source, resolve

CHOICES = dict(
    prediction="auto", zero_terminal_snr="auto", min_snr_gamma=None, timesteps="auto", shift="auto", logit_mean=0.0,
    logit_std=1.0,
)  # fmt: skip


def change_json(path: Path, **changes: object) -> None:
    """`None` takes a key out."""
    tree = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in tree.items() if value is not None}))


def change_file(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = TensorFile(path).read_all()
    change(tensors)
    write_tensors(path, tensors)


def copied(bench: Workbench, family: str) -> Path:
    return shutil.copytree(bench.models / family, bench.tmp / "model")


def single(bench: Workbench, family: str, siblings: bool = True) -> Path:
    """A copy of the single file, with its folder of configs beside it."""
    path = bench.tmp / "one.safetensors"
    shutil.copy(bench.models / f"{family}-one.safetensors", path)
    if siblings:
        shutil.copytree(bench.models / f"{family}-one", bench.tmp / "one")
    return path


def refused_unread(bench: Workbench, capsys, monkeypatch, *expected: str, tree: dict) -> None:
    """By the plan and by the training, and no tensor was read."""

    def read(self, name):
        raise AssertionError(f"{name} of {self.path} was read")

    monkeypatch.setattr(TensorFile, "read", read)
    for arguments in (("--plan",), ()):
        refused(bench, capsys, *expected, tree=tree, arguments=arguments)


def wider(channels: int, name: str = "conv_in.weight") -> Callable[[dict[str, torch.Tensor]], None]:
    """The layer that reads the latents, with more input channels."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        weight = tensors[name]
        tensors[name] = torch.cat([weight] * (-(-channels // weight.shape[1])), dim=1)[:, :channels].contiguous()

    return change


# --- the objective ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "marker", "model"),
    [("single file", "edm_vpred.sigma_max", "CosXL"), ("under a prefix", "edm_vpred.sigma_min", "CosXL"),
     ("the unet's own file", "edm_mean", "Playground 2.5"), ("a folder", "edm_std", "Playground 2.5"),
     ("the vae's own file", "edm_mean", "Playground 2.5")],
)  # fmt: skip
@pytest.mark.slow
def test_an_edm_checkpoint_is_refused_wherever_its_marker_is(
    bench: Workbench, capsys, monkeypatch, where, marker, model
) -> None:
    def mark(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = torch.tensor(120.0)

    name, tree = marker, bench.tree()
    if where == "a folder":
        folder = copied(bench, "sdxl")
        path = folder / "unet" / "diffusion_pytorch_model.safetensors"
        tree["model"]["path"] = str(folder)
    else:
        path = single(bench, "sdxl")
        if where == "under a prefix":
            name = f"model.diffusion_model.{marker}"
        if where.endswith("own file"):
            tree["model"]["components"] = {where.split("'")[0].removeprefix("the "): {"path": str(path)}}
        else:
            tree["model"]["path"] = str(path)
    change_file(path, mark)
    refused_unread(bench, capsys, monkeypatch, f"{path} holds '{name}' ({model})", "an EDM model", tree=tree)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("sdxl", {"_class_name": "EDMEulerScheduler", "prediction_type": "v_prediction"}, ("EDM model", "CosXL")),
        ("sdxl", {"_class_name": "EDMDPMSolverMultistepScheduler"}, ("EDM model", "Playground 2.5")),
        ("sdxl", {"_class_name": "FlowMatchEulerDiscreteScheduler"}, ("flow-matching",)),
        ("sdxl", {"_class_name": "FlowMapEulerDiscreteScheduler"}, ("flow-matching",)),
        ("sdxl", {"_class_name": "LCMScheduler"}, ("distilled",)),
        ("sdxl", {"_class_name": "MyScheduler"}, ("_class_name = 'MyScheduler'", "EulerDiscreteScheduler")),
        ("sdxl", {"_class_name": None}, ("_class_name = None", "EulerDiscreteScheduler")),
        ("sdxl", {"prediction_type": "sample"}, ("prediction_type = 'sample'", "'epsilon' or 'v_prediction'")),
        ("sdxl", {"prediction_type": "flow_prediction"}, ("prediction_type = 'flow_prediction'",)),
        ("sdxl", {"_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": True}, ("use_flow_sigmas = True",)),
        ("sdxl", {"timestep_type": "continuous"}, ("timestep_type = 'continuous'", "EDM")),
        ("sdxl", {"beta_start": None, "beta_end": None}, ("no beta_start and no beta_end", "0.00085, 0.012")),
        ("sdxl", {"beta_schedule": None}, ("no beta_schedule", "'scaled_linear'")),
        ("sdxl", {"num_train_timesteps": None}, ("no num_train_timesteps",)),
        ("sdxl", {"trained_betas": [0.1, 0.2]}, ("trained_betas",)),
        ("flux", {"_class_name": "EulerDiscreteScheduler"}, ("'EulerDiscreteScheduler'", "FlowMatchEulerDiscreteScheduler")),
        ("flux", {"_class_name": "FlowMatchLCMScheduler"}, ("distilled", "flux has one of FlowMatchEuler")),
    ],
)  # fmt: skip
def test_a_scheduler_of_another_objective_is_refused(bench, capsys, monkeypatch, family, changes, expected) -> None:
    folder = copied(bench, family)
    change_json(folder / "scheduler" / "scheduler_config.json", **changes)
    tree = bench.tree(family, model__path=str(folder))
    refused_unread(bench, capsys, monkeypatch, "scheduler_config.json", *expected, tree=tree)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sdxl", "flux"])
@pytest.mark.parametrize("key", ["latents_mean", "latents_std"])
def test_a_vae_of_normalised_channels_is_refused(bench: Workbench, capsys, monkeypatch, family, key) -> None:
    folder = copied(bench, family)
    change_json(folder / "vae" / "config.json", **{key: [0.5, 1.0, 1.0, 1.0]})
    tree = bench.tree(family, model__path=str(folder))
    refused_unread(bench, capsys, monkeypatch, f"{key} = [0.5, 1.0, 1.0, 1.0]", "Playground", tree=tree)


@pytest.mark.parametrize("variant", ["sdxl", "flux-dev", "flux-schnell"])
def test_the_published_models_are_accepted(variant: str) -> None:
    family = FAMILIES[variant.partition("-")[0]]
    read = lambda path: json.loads((config_files.PUBLISHED / variant / path).read_text())  # noqa: E731
    configs = {component.name: read(f"{component.name}/config.json") for component in family.components}
    family.files.check(configs, configs[family.denoiser]["in_channels"])
    assert family.images.objective(read("scheduler/scheduler_config.json"), Markers(), **CHOICES)


@pytest.mark.slow
def test_every_scheduler_that_is_accepted_samples_the_betas_that_are_trained() -> None:
    """The allow-list holds classes of diffusers that know the same betas."""
    import diffusers

    from trainer.models.sdxl import SCHEDULERS

    family = FAMILIES["sdxl"]
    for name in sorted(SCHEDULERS):
        if name in ("DPMSolverSDEScheduler", "LMSDiscreteScheduler"):  # they want torchsde and scipy
            continue
        scheduler = getattr(diffusers, name).from_config({**BETAS, "beta_start": 0.001})
        assert scheduler.config.prediction_type == "epsilon", "what a config that says nothing means"
        ours = family.images.objective(dict(scheduler.config) | {"_class_name": name}, Markers(), **CHOICES)
        torch.testing.assert_close(ours.alphas_cumprod.float(), scheduler.alphas_cumprod, rtol=1e-4, atol=1e-6)


def test_no_prediction_type_is_epsilon() -> None:
    scheduler = {**BETAS, "_class_name": "EulerDiscreteScheduler", "prediction_type": None}
    assert FAMILIES["sdxl"].images.objective(scheduler, Markers(), **CHOICES).prediction == "epsilon"


def test_a_flux_of_any_flow_matching_scheduler_is_not_told_that_it_is_one() -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler

    scheduler = dict(FlowMatchHeunDiscreteScheduler(shift=2.0).config) | {"_class_name": "FlowMatchHeunDiscreteScheduler"}
    assert FAMILIES["flux"].images.objective(scheduler, Markers(), **CHOICES)
    assert FlowMatchEulerDiscreteScheduler.from_config(scheduler).config.shift == 2.0, "as a sample is drawn"
    with pytest.raises(UserError, match="'FlowMatchOtherScheduler', which is not trained as flux") as refusal:
        FAMILIES["flux"].images.objective({"_class_name": "FlowMatchOtherScheduler"}, Markers(), **CHOICES)
    assert "flow-matching" not in str(refusal.value)


@pytest.mark.parametrize("layout", ["folder", "single file"])
def test_what_a_config_leaves_out_is_as_the_library_has_it(bench: Workbench, layout) -> None:
    """diffusers loads it; here it ended in a KeyError."""
    path, folder = (single(bench, "sdxl"), bench.tmp / "one") if layout != "folder" else (copied(bench, "sdxl"),) * 2
    change_json(folder / "vae/config.json", latent_channels=None, in_channels=None)
    change_json(folder / "unet/config.json", in_channels=None, out_channels=None)
    change_json(folder / "text_encoder/config.json", max_position_embeddings=None)
    source = open_source(bench.config(model__path=str(path)))
    assert source.config("vae")["latent_channels"] == source.config("unet")["in_channels"] == 4
    for component in FAMILIES["sdxl"].components:
        source.verify(component.name)
    FAMILIES["sdxl"].files.check({c.name: source.config(c.name) for c in FAMILIES["sdxl"].components}, 4)


@pytest.mark.slow
def test_a_marker_in_the_denoisers_own_file_says_v_prediction(bench: Workbench) -> None:
    path = single(bench, "sdxl")
    change_file(path, lambda t: t.update({"v_pred": torch.zeros(0), "model.diffusion_model.ztsnr": torch.zeros(0)}))
    config = bench.config(model__components={"unet": {"path": str(path)}})
    with built(config) as run:
        assert run.plan.model.objective.prediction == "v" and run.plan.model.objective.alphas_cumprod[-1] == 0
    vae_alone = bench.config(model__components={"vae": {"path": str(path)}})
    assert open_source(vae_alone).markers == Markers(), "they say nothing of another file's unet"


def test_fetched_files_that_say_another_objective_are_refused(bench: Workbench) -> None:
    folder = copied(bench, "sdxl")
    config = bench.config(model__path=str(folder))
    before = open_source(config)
    options = family_options(resolve(config, before), before.family)
    planned = find_objective(before, options)
    change_file(folder / "unet" / "diffusion_pytorch_model.safetensors", lambda t: t.update(v_pred=torch.zeros(0)))
    with pytest.raises(UserError, match=r"say v-prediction.*config epsilon-prediction.*model\.prediction"):
        check_objective(config.model.path, open_source(config), options, planned)


# --- the channels -----------------------------------------------------------------------------------------------------


KINDS = [
    ("sdxl", 9, "inpainting"),
    ("sdxl", 8, "editing"),
    ("sdxl", 16, "do not belong together; use a unet that reads and predicts 4"),
    ("flux", 384, "Flux Fill"),
    ("flux", 128, "Control model (Canny or Depth"),
    ("flux", 32, "do not belong together; use a transformer that reads and predicts 64"),
]
# A tiny Flux has heads that no embedded config has.
LAYOUTS = {"sdxl": ["folder", "single file", "its own file", "embedded configs"], "flux": ["folder", "single file"]}


@pytest.mark.parametrize(
    # Each kind, and each layout that there is of its family.
    ("family", "channels", "expected", "layout"),
    [(*kind, layout) for kind, layout in zip(KINDS, (*LAYOUTS["sdxl"][:3], *LAYOUTS["flux"], "folder"), strict=True)]
    + [(*KINDS[0], LAYOUTS["sdxl"][3])],
)
@pytest.mark.slow
def test_a_denoiser_that_reads_more_than_latents_is_refused(
    bench: Workbench, capsys, monkeypatch, family, channels, expected, layout
) -> None:
    denoiser, tree = DENOISER[family], bench.tree(family)
    own, original = {
        "sdxl": ("conv_in.weight", "model.diffusion_model.input_blocks.0.0.weight"),
        "flux": ("x_embedder.weight", "img_in.weight"),
    }[family]
    if layout == "folder":
        folder = copied(bench, family)
        change_file(folder / denoiser / "diffusion_pytorch_model.safetensors", wider(channels, own))
        out = {"sdxl": 4, "flux": 64}[family]
        change_json(folder / denoiser / "config.json", in_channels=channels, out_channels=out)
        tree["model"]["path"] = str(folder)
    else:
        # Its configs say nothing of it: they are the plain model's.
        path = single(bench, family, siblings=layout == "single file")
        change_file(path, wider(channels, original))
        if layout == "its own file":
            tree["model"]["components"] = {denoiser: {"path": str(path)}}
        else:
            tree["model"]["path"] = str(path)
    refused_unread(bench, capsys, monkeypatch, f"the {denoiser} reads {channels} channels", expected, tree=tree)


@pytest.mark.slow
def test_a_denoiser_that_predicts_more_than_latents_is_refused(bench: Workbench, capsys, monkeypatch) -> None:
    folder = copied(bench, "sdxl")
    change_json(folder / "unet" / "config.json", out_channels=8)
    refused_unread(bench, capsys, monkeypatch, "reads 4 channels and predicts 8", tree=bench.tree(model__path=str(folder)))


# --- samples ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_negative_prompt_is_refused_where_it_would_be_ignored(bench: Workbench, capsys, monkeypatch) -> None:
    validation = {"every_steps": 1, "samples": [{"prompt": "a bear"}, {"prompt": "a bear", "negative": "blurred"}]}
    expected = ("validation.samples.1.negative = 'blurred'", "has no effect on flux", "leave it out")
    refused_unread(bench, capsys, monkeypatch, *expected, tree=bench.tree("flux", validation=validation))
    tree = bench.tree("sdxl", validation=validation)
    from workbench.commands import main as cli

    assert cli.main(["--config", str(bench.write(tree)), "--plan"]) == 0
