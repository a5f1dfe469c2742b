"""Configs of other trainers, brought along by scripts/import_config.py, plan the appearances of their programs."""

from __future__ import annotations

import re
import shutil

import pytest

from scripts import import_config
from tests import foreign_configs
from tests.harness import PHOTOS, Workbench
from trainer import config as configs
from workbench.commands import main as cli

pytestmark = pytest.mark.tool("importing")

# By trainer: the model's folder, and the appearances of the folders' five photos each in an epoch, worked out by hand.
MADE = {
    "sd-scripts": ("sdxl", 5 * 10 + 5 * 2),
    "OneTrainer": ("sdxl", (5 * 3 + 5) * 3),  # at three sizes each
    "ai-toolkit": ("flux", 5 * 3 * 2 + 5),  # two sizes of the first folder
    "SimpleTuner": ("flux", 5 * 3),
}
FOLDERS = ("img/5_sks dog", "reg", "img", "named", "more")


@pytest.mark.parametrize(
    "trainer", [pytest.param(name, marks=[] if name == "sd-scripts" else pytest.mark.slow) for name in MADE]
)
def test_a_config_of_another_trainer_plans_its_appearances(bench: Workbench, capsys, monkeypatch, trainer: str) -> None:
    monkeypatch.chdir(bench.tmp)
    family, appearances = MADE[trainer]
    file = foreign_configs.write(bench.tmp, trainer, str(bench.models / family))
    for folder in FOLDERS[:2] if trainer == "sd-scripts" else FOLDERS[2:]:
        shutil.copytree(PHOTOS, bench.tmp / folder)
    assert import_config.main([str(file), "--out", "made.toml"]) == 0
    assert cli.main(["--config", "made.toml", "--plan"]) == 0
    planned = capsys.readouterr().out
    assert images_an_epoch(planned) == appearances, planned


# By file: what the plan's config has, worked out by hand.
WINDOWS = {
    "old.toml": {
        "run.epochs": 4, "data.clip_chunks": 2, "optimizer.lr": 1.0, "optimizer.options.d_coef": 1.5,
        "export.every_epochs": 2, "validation.every_epochs": 1,
    },
    "train.bat": {"run.max_steps": 40, "run.name": "pets", "export.every_steps": 0},
    "window.json": {
        "run.epochs": 4, "data.clip_chunks": 3, "schedule.warmup": 0.05, "validation.samples.0.width": 256,
        "export.every_epochs": 1, "validation.every_epochs": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "window.json" else pytest.mark.slow) for name in WINDOWS]
)
def test_a_config_from_a_windows_disk_passes_the_plan(bench: Workbench, capsys, monkeypatch, name: str) -> None:
    monkeypatch.chdir(bench.tmp)
    (bench.tmp / name).write_text(foreign_configs.WINDOWS[name], newline="")
    there = [f"model.path={bench.models / 'sdxl'}", f"data.sources.0.path={PHOTOS}", "run.output_dir=out"]
    assert import_config.main([name, "--out", "made.toml", "--set", *there]) == 0
    *_, following = capsys.readouterr().out.splitlines()
    assert following.endswith("python train.py --config made.toml --plan")
    assert cli.main(["--config", "made.toml", "--plan"]) == 0
    found = configs.flatten(configs.tree(configs.load("made.toml", [])))
    assert {key: found[key] for key in WINDOWS[name]} == WINDOWS[name]


def images_an_epoch(planned: str) -> int:
    """The sum over the buckets that a plan lists."""
    (listed,) = re.findall(r"buckets \(images an epoch\) ([^;\n]*)", planned)
    return sum(map(int, re.findall(r"\d+x\d+: (\d+)", listed)))


@pytest.mark.skipif(not foreign_configs.SHARED.is_dir(), reason="the published configs are not beside the checkout")
@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("ai-toolkit/train_lora_flux_24gb.yaml", "flux"),
        ("onetrainer/SDXL__sdxl_1.0_LoRA.json", "sdxl"),
        ("simpletuner/flux.peft-lora.json", "flux"),
    ],
)
def test_a_published_config_plans_on_a_small_model(bench: Workbench, capsys, name: str, family: str) -> None:
    made = str(bench.tmp / "made.toml")
    there = [f"model.path={bench.models / family}", f"data.sources.0.path={PHOTOS}", f"run.output_dir={bench.tmp / 'out'}"]
    assert import_config.main([str(foreign_configs.SHARED / name), "--out", made, "--set", *there]) == 0
    # The config may ask for a card that this machine lacks.
    assert cli.main(["--config", made, "--plan", "--set", "run.device=cpu"]) == 0
    assert "steps" in capsys.readouterr().out
