"""The pocket models are made from packages of icons to diffusers folders, which the trainer and stock pipelines load."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.pocket import card, data, draw, flux, flux2, icons, make, sdxl, training, vae
from trainer.models import FAMILIES
from workbench.commands import main as cli

TRAININGS = ("vae", "sdxl", "flux", "flux-guided", "flux2")
SHAPES = (
    '<circle cx="16" cy="16" r="{}" fill="{}"/>',
    '<rect x="4" y="4" width="{}" height="20" fill="{}"/>',
    '<path d="M16 2L{} 30H2z" fill="{}"/>',
)


def packages(folder: Path) -> None:
    """Archives as npm packs them, with made-up icons: every subject in every style."""
    folder.mkdir(parents=True)
    for place, (style, each) in enumerate(icons.SETS.items()):
        bodies = {
            name: {"body": SHAPES[number % 3].format(8 + number % 20, f"#{(number * 97 + place * 31) % 4096:03x}")}
            for number, name in enumerate(icons.SUBJECTS)
        }
        aliased = bodies.pop(icons.SUBJECTS[0])
        content = {"icons": bodies | {"other-name": aliased}, "width": 32, "height": 32}
        content["aliases"] = {icons.SUBJECTS[0]: {"parent": "other-name"}}
        data = json.dumps(content).encode()
        with tarfile.open(icons.archive(folder, icons.SETS[style]), "w:gz") as archive:
            member = tarfile.TarInfo("package/icons.json")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        assert each.package in icons.archive(folder, each).name


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("resvg_py", reason="draws the icons; pip install -e .[pocket]")
    folder = tmp_path_factory.mktemp("pocket")
    packages(folder / "packages")
    with pytest.MonkeyPatch.context() as patch:  # nothing is to be seen on what three steps teach
        patch.setattr(card, "SHOWN", 4)
        patch.setattr(draw, "STEPS", 2)
        assert make.main(["--work", str(folder), "--steps", "3", *make.PARTS]) == 0
    return folder


@pytest.mark.proof
@pytest.mark.parametrize("family", ["sdxl", "flux", "flux2"])
def test_the_folder_draws_and_trains(work: Path, family: str, tmp_path: Path, capsys) -> None:
    """In a stock pipeline, and in a run over it as float8, which exports and draws as well."""
    from diffusers import DiffusionPipeline

    folder = work / f"pocket_{family}"
    page = (folder / "README.md").read_text()
    assert f"- {family}: 3 steps, loss" in page and (folder / "contact_sheet.png").exists()
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    settings = {"width": 64, "height": 64, "num_inference_steps": 2, **card.MORE[family]}
    image = pipeline(prompt="a red apple, noto style", **settings).images[0]
    assert image.size == (64, 64)

    config = tmp_path / "run.toml"
    config.write_text(
        f"""
[run]
name = "ink"
output_dir = "{tmp_path / "out"}"
max_steps = 2
[model]
family = "{family}"
path = "{folder}"
[model.components.{FAMILIES[family].denoiser}]
dtype = "fp8_e4m3"
[adapter]
type = "dora"
[data]
resolution = 64
batch_size = 4
[[data.sources]]
path = "{work / "examples" / "icons" / "lessons"}"
[validation]
every_steps = 2
steps = 2
prompts = ["a red apple"]
"""
    )
    capsys.readouterr()
    assert cli.main(["--config", str(config)]) == 0
    said = capsys.readouterr().out
    assert "data 12 images: " in said and "0 missing" in said
    assert (tmp_path / "out" / "before_after.png").exists()


@pytest.mark.proof
def test_the_same_seed_gives_the_same_bytes_and_another_one_others(work: Path, tmp_path: Path) -> None:
    files = {}
    for name, seed in (("same", "0"), ("other", "1")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "icons.safetensors").symlink_to(work / "icons.safetensors")
        assert make.main(["--work", str(folder), "--steps", "3", "--seed", seed, *TRAININGS]) == 0
        files[name] = [folder / f"{part}.safetensors" for part in TRAININGS]
    for part, same, other in zip(TRAININGS, files["same"], files["other"], strict=True):
        made = work / f"{part}.safetensors"
        assert same.read_bytes() == made.read_bytes()
        one, two = load_file(made), load_file(other)
        assert any(not torch.equal(one[name], two[name]) for name in one if name.startswith("weights/")), part


@pytest.mark.proof
def test_another_seed_and_an_unfinished_autoencoder_are_refused(work: Path, tmp_path: Path, capsys) -> None:
    before = (work / "vae.safetensors").read_bytes()
    for part, read in (("vae", "vae"), ("sdxl", "vae"), ("flux-folder", "flux-guided")):
        assert make.main(["--work", str(work), "--steps", "3", "--seed", "1", part]) == 2
        assert f"{read}.safetensors is of seed 0, not of 1: choose another --work" in capsys.readouterr().err
    assert (work / "vae.safetensors").read_bytes() == before
    (tmp_path / "icons.safetensors").symlink_to(work / "icons.safetensors")
    assert make.main(["--work", str(tmp_path), "--seconds", "0", "vae", "sdxl"]) == 2
    assert "vae.safetensors stands at step 0 of 6500: go on with the part 'vae' first" in capsys.readouterr().err
    assert not (tmp_path / "sdxl.safetensors").exists()


def coloured(style: int, subject: int) -> list[int]:
    """RGBA that says whose icon it is."""
    return [subject // 256 * 80, subject % 256, 40 + 60 * style, 255]


class Eyes(torch.nn.Module):
    """An autoencoder whose latents are the picture's own colours, with the statistics that FLUX.2's has."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = torch.nn.BatchNorm2d(4 * 3)
        self.config = SimpleNamespace(batch_norm_eps=1e-4)

    def encode(self, values: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(latent_dist=SimpleNamespace(mean=values[..., :8, :8]))


@pytest.mark.slow
def test_trainings_get_no_picture_that_is_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the pictures themselves: those that each training gets are the allowed ones, each under its own caption."""
    styles = list(icons.SETS)
    rendered = {}
    for number, style in enumerate(styles):
        colours = [coloured(number, icons.SUBJECTS.index(name)) for name in icons.drawn_in(style)]
        whole = torch.tensor(colours, dtype=torch.uint8)[:, :, None, None]
        rendered[style] = whole.expand(-1, -1, icons.SIZE, icons.SIZE).contiguous()
    save_file(rendered, tmp_path / "icons.safetensors")
    got: dict[str, object] = {}
    eyes = Eyes()
    for name, module in (("vae", vae), ("sdxl", sdxl), ("flux", flux), ("flux2", flux2)):
        monkeypatch.setattr(module, "train", lambda shown, *_, name=name, **__: got.update({name: shown}))
    monkeypatch.setattr(flux2, "autoencoder", lambda: eyes)
    monkeypatch.setattr(flux, "distil", lambda shown, *_, **__: got.update({"flux-guided": shown}))
    monkeypatch.setattr(make, "autoencoder", lambda asked: eyes)
    assert make.main(["--work", str(tmp_path), *TRAININGS]) == 0
    allowed = {
        (style, name) for style in icons.TRAINED_STYLES for name in icons.SUBJECTS if name not in icons.left_out(style)
    }
    assert len(allowed) == 3 * (len(icons.SUBJECTS) - 20)

    def whose(colour: torch.Tensor) -> tuple[str, str]:
        red, green, blue = colour.round().int().tolist()
        return styles[(blue - 40) // 60], icons.SUBJECTS[red // 80 * 256 + green]

    assert {whose(icon[:3, 0, 0].float()) for drawn in got["vae"].values() for icon in drawn} == allowed
    scale, shift = make.latent_factors(SimpleNamespace(work=tmp_path, seed=0))
    for part in TRAININGS[1:]:
        shown: data.Examples = got[part]
        if part == "flux2":  # whose latents are patches, normalised by statistics
            deviation = torch.sqrt(eyes.bn.running_var + 1e-4)
            values = (shown.latents[:, :, 0, 0] * deviation + eyes.bn.running_mean)[:, ::4]
        else:
            values = shown.latents[:, :, 0, 0] / scale + (0.0 if part == "sdxl" else shift)
        colours = (values + 1) * 127.5
        seen = [whose(colour) for colour in colours]
        assert set(seen) == allowed and len(seen) == len(allowed)
        assert shown.captions == [icons.caption(name, style) for style, name in seen]
        assert shown.styleless == [icons.caption(name, None) for style, name in seen]


def test_every_epoch_shows_every_picture_that_a_training_got() -> None:
    count, seed = 50, 3
    drawn = torch.cat([training.epoch_order(seed, count, step * 8, 8) for step in range(25)])
    assert drawn.bincount(minlength=count).tolist() == [4] * count


def test_what_is_held_out() -> None:
    """No exam or lesson is left out of a trained style; the new style is none of them; 20 of each style are left out."""
    assert len(set(icons.LESSONS)) == 12 and len(set(icons.EXAMS)) == 60 and not set(icons.LESSONS) & set(icons.EXAMS)
    assert set(icons.LESSONS) | set(icons.EXAMS) <= set(icons.SUBJECTS)
    assert icons.NEW_STYLE not in icons.TRAINED_STYLES
    for style in icons.TRAINED_STYLES:
        left = icons.left_out(style)
        assert len(left) == 20 and not left & (set(icons.LESSONS) | set(icons.EXAMS))
        others = [icons.left_out(other) for other in icons.TRAINED_STYLES if other != style]
        assert not left & frozenset.union(*others), "what is left out of one style is known from the others"


def test_captions() -> None:
    assert icons.caption("red-apple", "noto") == "a red apple, noto style"
    assert icons.caption("octopus", "fluent flat") == "an octopus, fluent flat style"
    assert icons.caption("grapes", None) == "grapes"
