"""Configs of other trainers, brought along by scripts/import_config.py, plan the appearances of their programs."""

from __future__ import annotations

import re
import shutil

import pytest

from scripts import import_config
from tests import foreign_configs
from tests.harness import PHOTOS, Workbench
from trainer.cli import main as cli

# By trainer: the model's folder, and the appearances of the folders' five photos each in an epoch, worked out by hand.
MADE = {
    "sd-scripts": ("sdxl", 5 * 10 + 5 * 2),
    "OneTrainer": ("sdxl", (5 * 3 + 5) * 3),  # at three sizes each
    "ai-toolkit": ("flux", 5 * 3 * 2 + 5),  # two sizes of the first folder
    "SimpleTuner": ("flux", 5 * 3),
}
FOLDERS = ("img/5_sks dog", "reg", "img", "named", "more")


@pytest.mark.parametrize("trainer", MADE)
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
