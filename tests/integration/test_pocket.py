"""The pocket models are made from packages of icons to diffusers folders, which the trainer and stock pipelines load."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from scripts.pocket import icons, make

ROOT = Path(__file__).resolve().parents[2]
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
    parts = ["icons", "examples", "vae", "sdxl", "sdxl-folder", "flux", "flux-guided", "flux-folder"]
    assert make.main(["--work", str(folder), "--steps", "3", *parts]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_the_folder_draws_and_trains(work: Path, family: str, tmp_path: Path) -> None:
    """In a stock pipeline, and in a run over it as float8, which exports and draws as well."""
    from diffusers import DiffusionPipeline

    folder = work / f"pocket_{family}"
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 25e6
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    more = {"max_sequence_length": 16} if family == "flux" else {}
    image = pipeline("a red apple, noto style", width=64, height=64, num_inference_steps=2, **more).images[0]
    assert image.size == (64, 64)

    denoiser = {"sdxl": "unet", "flux": "transformer"}[family]
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
[model.components.{denoiser}]
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
    done = subprocess.run([sys.executable, "train.py", "--config", str(config)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "12 images x 1 repeats" in done.stdout and "0 missing" in done.stdout
    assert (tmp_path / "out" / "before_after.png").exists()


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_and_another_one_others(work: Path, tmp_path: Path) -> None:
    files = {}
    for name, seed in (("same", "0"), ("other", "1")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "icons.safetensors").symlink_to(work / "icons.safetensors")
        assert make.main(["--work", str(folder), "--steps", "3", "--seed", seed, "vae", "sdxl"]) == 0
        files[name] = [(folder / f"{part}.safetensors").read_bytes() for part in ("vae", "sdxl")]
    made = [(work / f"{part}.safetensors").read_bytes() for part in ("vae", "sdxl")]
    assert files["same"] == made
    assert all(one != two for one, two in zip(files["other"], made, strict=True))


def test_what_is_held_out_is_not_learned() -> None:
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
