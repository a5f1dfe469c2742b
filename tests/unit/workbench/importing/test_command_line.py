"""Configs as they lie on Windows disks: paths, shells, encodings. Each becomes the config that its Linux twin becomes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from scripts import import_config
from tests import foreign_configs
from trainer import config as configs
from trainer.base.errors import UserError
from workbench.importing.draft import ASSUMED, DIFFERS, FILL, SAME, UNKNOWN
from workbench.importing.reading import local_path, read_tree
from workbench.importing.writing import config_of, draft_of, note_missing

OPTIONS = "--output_name bear --network_module networks.lora --network_train_unet_only --network_dim 32"


def made(file: Path, *overrides: str) -> tuple[dict[str, Any], Any]:
    draft = draft_of(file, overrides=overrides)
    return configs.flatten(configs.tree(config_of(draft, file))), draft


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("C:/AI/x", "/mnt/c/AI/x"), ("d:\\AI data\\x", "/mnt/d/AI data/x"), ('"E:\\img"', "/mnt/e/img"),
        ("C:\\AI\\", "/mnt/c/AI"), ("\\\\?\\C:\\AI\\x", "/mnt/c/AI/x"), ("\\\\nas\\share\\x", "/mnt/nas/share/x"),
        ("//nas/share/x", "/mnt/nas/share/x"), ("\\\\wsl$\\Ubuntu\\home\\me\\x", "/home/me/x"),
        ("\\\\wsl.localhost\\Ubuntu\\home\\me", "/home/me"), (".\\img\\5_dog", "./img/5_dog"), ("img\\x", "img/x"),
        ("file:///C:/AI/x", "/mnt/c/AI/x"), ("%USERPROFILE%\\x", "~/x"), ("\\\\?\\UNC\\nas\\share", "/mnt/nas/share"),
        ("stabilityai/sdxl", "stabilityai/sdxl"), ("/data/x", "/data/x"), ("hf:me/photos", "hf:me/photos"), ("", ""),
    ],
)  # fmt: skip
@pytest.mark.skipif(os.name == "nt", reason="on Windows its paths stay")
def test_a_path_of_windows_is_written_as_wsl_has_it(there: str, here: str) -> None:
    assert local_path(there) == here


def test_a_name_with_a_backslash_that_is_there_stays(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a\\b").mkdir()
    assert local_path("a\\b") == "a\\b"


SHELLS = {
    "caret.bat": "@echo off\nREM accelerate launch sdxl_train_network.py --network_dim=1\ncall venv\\Scripts\\activate.bat\n"
    'accelerate launch "./sdxl_train_network.py" ^\n --pretrained_model_name_or_path="D:\\AI\\x y.safetensors" ^\n'
    f' --train_data_dir="D:\\img\\" {OPTIONS} > log.txt 2>&1 && pause\n',
    "variables.cmd": 'set DISK=D:\\AI\nset "MODEL=%disk%\\x y.safetensors"\n'
    "set MORE=--network_dim 32 --train_data_dir d:\\img\n"
    "accelerate launch C:\\kohya\\sdxl_train_network.py --pretrained_model_name_or_path=\"%MODEL%\" --output_name=it's "
    f"{OPTIONS} %MORE%\npause\n",
    "wrapped.bat": 'cmd /k "cd C:\\kohya & activate & accelerate launch "./sdxl_train_network.py" '
    f'--pretrained_model_name_or_path="D:\\AI\\x y.safetensors" --train_data_dir=D:\\img {OPTIONS}"\n',
    "backtick.ps1": "# a note\n$model = 'D:\\AI\\x y.safetensors' # the model\n$dim = 32 # rank\n"
    "$extra = @(\"--network_dim=$dim\",\n"
    '"--train_data_dir=D:\\img")\naccelerate launch sdxl_train_network.py `\n  --pretrained_model_name_or_path=$model `  \n'
    "  --network_module=networks.lora --network_train_unet_only --output_name bear @extra; Write-Output done\n",
    "copied.txt": ">> accelerate launch sdxl_train_network.py `\n"
    ">>  --pretrained_model_name_or_path=\"D:\\AI\\x y.safetensors\" `\n"
    f">>  --train_data_dir=D:\\img {OPTIONS}\n",
    "passed.bat": "set DIM=32 & rem the rank\naccelerate launch sdxl_train_network.py --network_dim %DIM% "
    f'--pretrained_model_name_or_path="D:\\AI\\x y.safetensors" --train_data_dir D:\\img {OPTIONS} %*\n',
    "blanks.txt": 'accelerate launch sdxl_train_network.py --pretrained_model_name_or_path "D:\\AI\\x y.safetensors" '
    f"--train_data_dir D:\\img {OPTIONS}\n",
    "named.sh": "SCRIPT=./sdxl_train_network.py\nM='/mnt/d/AI/x y.safetensors'; accelerate launch $SCRIPT "
    f'--pretrained_model_name_or_path "$M" --train_data_dir /mnt/d/img {OPTIONS} "$@"\n',
    "array.sh": "DIM=${DIM:-32}\nARGS=(\n  --network_dim $DIM\n  --network_module \"networks.lora\"\n"
    "  --network_train_unet_only\n)\n"
    "cd x && accelerate launch sdxl_train_network.py --pretrained_model_name_or_path '/mnt/d/AI/x y.safetensors' \\\n"
    '  --output_name bear --train_data_dir "/mnt/d/img" "${ARGS[@]}" | tee log.txt # --network_dim 4\n',
}  # fmt: skip


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("name", SHELLS)
def test_a_command_is_read_as_its_shell_reads_it(tmp_path: Path, name: str, encoding: str) -> None:
    (file := tmp_path / name).write_bytes(SHELLS[name].replace("\n", "\r\n").encode(encoding))
    found, draft = made(file)
    expected = {"model.family": "sdxl", "model.path": "/mnt/d/AI/x y.safetensors", "data.sources.0.path": "/mnt/d/img",
                "adapter.rank": 32, "run.name": "bear"}  # fmt: skip
    assert {key: found[key] for key in expected} == expected and not draft.notes[UNKNOWN]


def test_options_that_a_script_adds_are_named(tmp_path: Path) -> None:
    lines = '$ext_args = [System.Collections.ArrayList]::new()\nif ($x) {\n [void]$ext_args.Add("--flip_aug")\n}\n'
    command = (
        f"python sdxl_train_network.py --pretrained_model_name_or_path m --train_data_dir i {OPTIONS} --sdpa $ext_args\n"
    )
    (file := tmp_path / "train.ps1").write_text(lines + command)
    assert made(file)[1].notes[UNKNOWN] == ['$ext_args = ["--flip_aug"]']


@pytest.mark.parametrize("trainer", foreign_configs.MADE)
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_an_encoding_of_windows_changes_nothing(tmp_path: Path, trainer: str, encoding: str) -> None:
    file = foreign_configs.write(tmp_path, trainer)
    plain = made(file)[0]
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_text(encoding="utf-8").replace("\n", "\r\n").encode(encoding))
    assert made(file)[0] == plain


@pytest.mark.parametrize("trainer", foreign_configs.MADE)
def test_paths_of_windows_become_those_of_wsl_whoever_wrote_them(tmp_path: Path, trainer: str) -> None:
    file = foreign_configs.write(tmp_path, trainer, "Q:/models/m.safetensors")
    found, draft = made(file)
    note_missing(draft, config_of(draft, file))
    assert found["model.path"] == "/mnt/q/models/m.safetensors"
    assert "model.path: /mnt/q/models/m.safetensors is not on this machine" in draft.notes[FILL]


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("a.toml", 'path = "C:\\Users\\new\\x"', "path"), ("a.toml", 'path = "C:\\\\Users\\\\new\\\\x"', "path"),
        ("a.json", '{"path": "C:\\Users\\new\\x"}', "path"), ("a.yaml", 'path: "C:\\Users\\new\\x"', "path"),
        ("a.yaml", "path: C:\\Users\\new\\x", "path"),
    ],
)  # fmt: skip
def test_a_path_with_single_backslashes_is_read_as_it_was_meant(tmp_path: Path, name: str, text: str, key: str) -> None:
    (file := tmp_path / name).write_text(text + "\n")
    assert read_tree(file)[key] == "C:\\Users\\new\\x"


TOML = """pretrained_model_name_or_path = "M:/models/NAME"
train_data_dir = "PHOTOS"
network_module = "networks.lora"
network_train_unet_only = true
unet_lr = 2e-4
optimizer_type = "Prodigy"
optimizer_args = ["decouple=True", "weight_decay=0.02", "d_coef=3", "use_bias_correction=True", "fsdp_in_use=False"]
max_train_epochs = 3
save_every_n_epochs = 2
sample_every_n_epochs = 1
sample_prompts = "M:/prompts.txt"
max_token_length = 150
cache_latents = true
scale_weight_norms = 0
"""


def config(folder: Path, name: str = "sd_xl_base_1.0.safetensors", photos: str = "N:/photos") -> Path:
    (file := folder / "old.toml").write_text(TOML.replace("NAME", name).replace("PHOTOS", photos))
    (folder / "prompts.txt").write_text("a bear\n")
    return file


def test_what_the_same_option_means_here_is_written_and_no_loss(tmp_path: Path) -> None:
    found, draft = made(config(tmp_path))
    expected = {
        "model.family": "sdxl", "data.clip_chunks": 2, "optimizer.name": "prodigy", "optimizer.weight_decay": 0.02,
        "optimizer.options.weight_decouple": True, "optimizer.options.bias_correction": True,
        "optimizer.options.safeguard_warmup": False, "optimizer.options.d_coef": 3, "optimizer.lr": 1.0, "run.epochs": 3,
    }  # fmt: skip
    assert {key: found[key] for key in expected} == expected and not draft.notes["No equivalent here"]
    assert any(note.startswith("cache_latents = true: latents are cached") for note in draft.notes[SAME])
    assert any(note.startswith("unet_lr = 0.0002: a factor of the rate") for note in draft.notes[DIFFERS])
    assert "sd_xl_base" in draft.notes[ASSUMED][0]


@pytest.mark.parametrize(
    ("name", "family"),
    [("ponyDiffusionV6XL.safetensors", "sdxl"), ("flux1-dev.safetensors", "flux"), ("FLUX.2-klein-4B", "flux2"),
     ("animagine-xl-3.1.safetensors", "sdxl"), ("illustriousXL_v01.safetensors", "sdxl")],
)  # fmt: skip
def test_a_models_name_tells_its_family(tmp_path: Path, name: str, family: str) -> None:
    assert draft_of(config(tmp_path, name)).value("model.family") == family


@pytest.mark.parametrize("name", ["v1-5-pruned.safetensors", "sd3_medium.safetensors", "mymodel.safetensors"])
def test_a_model_of_no_family_here_is_asked_for(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"--set model.family=VALUE"):
        draft_of(config(tmp_path, name))
    assert draft_of(config(tmp_path, name), overrides=["model.family=flux"]).value("model.family") == "flux"


def test_epochs_stay_epochs(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = str(config(tmp_path))
    assert import_config.main([file, "--out", "a.toml", "--set", "validation.every_steps=7"]) == 0
    found = configs.flatten(configs.tree(configs.load("a.toml", [])))
    intervals = {
        (table, unit): found[f"{table}.every_{unit}"] for table in ("export", "validation") for unit in ("steps", "epochs")
    }
    assert intervals == {
        ("export", "steps"): 0, ("export", "epochs"): 2, ("validation", "steps"): 7, ("validation", "epochs"): 0
    }  # fmt: skip
    assert found["checkpoint.every_steps"] == 500
    capsys.readouterr()
    assert import_config.main([file, "--out", "b.toml"]) == 0
    assert configs.load("b.toml", []).validation.every_epochs == 1
    said = capsys.readouterr().out
    *_, filled, last = said.splitlines()
    assert "is not on this machine" in filled and last.startswith("next: fill that in, then python train.py --config b.toml")


EASY = {"base_model": "D:/x", "img_folder": "D:/i", "save_json_folder": "D:/j", "optimizer_type": "AdamW"}
REFUSED = {
    "diffusion-pipe": ("a.toml", "dataset = 'd'\nmicro_batch_size_per_gpu = 1\npipeline_stages = 1\n[model]\na = 1\n"),
    "LoRA_Easy_Training_Scripts": ("a.json", json.dumps(EASY)),
    # kohya-ss/musubi-tuner#908: its options of Z-Image, of which sd-scripts has most.
    "musubi-tuner": (
        "run.sh",
        "accelerate launch src/musubi_tuner/zimage_train_network.py --dit z.safetensors --text_encoder q.safetensors "
        "--network_module networks.lora_zimage --network_dim 32 --dataset_config dataset.toml",
    ),
    "SimpleTuner (its environment file)": ("env.sh", "export MODEL_TYPE='lora'\r\nexport TRACKER_RUN_NAME=a\r\n"),
}


@pytest.mark.parametrize("program", REFUSED)
def test_a_config_of_another_program_is_refused_by_its_name(tmp_path: Path, program: str) -> None:
    name, text = REFUSED[program]
    (file := tmp_path / name).write_text(text)
    with pytest.raises(UserError) as refused:
        draft_of(file)
    assert str(refused.value).startswith(f"{file}: a config of {program}, which is not read here; ")


@pytest.mark.parametrize(("name", "key"), [("vae", "model.components.vae.path"), ("network_weights", "adapter.init_from")])
def test_a_path_that_is_only_called_otherwise_is_one_here(tmp_path: Path, name: str, key: str) -> None:
    (file := config(tmp_path)).write_text(f"{file.read_text()}{name} = 'W:\\x\\y.safetensors'\n")
    assert made(file)[0][key] == "/mnt/w/x/y.safetensors"


def test_a_size_may_have_a_blank(tmp_path: Path) -> None:
    (file := tmp_path / "a.sh").write_text(
        f"python sdxl_train_network.py --pretrained_model_name_or_path m --train_data_dir i --resolution=768, 768 {OPTIONS}\n"
    )
    assert made(file)[0]["data.resolution"] == 768
