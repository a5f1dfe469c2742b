"""The settings of kohya_ss's window become the options that it gives sd-scripts. Expected values: by its own rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer import config as configs
from trainer.base.errors import UserError
from workbench.importing.draft import ABSENT, UNKNOWN
from workbench.importing.writing import config_of, draft_of, text_of

# As the window saves them: numbers in texts, empty texts for what is not set.
WINDOW: dict[str, Any] = {
    "LoRA_type": "Standard", "LyCORIS_preset": "full", "additional_parameters": "", "adaptive_noise_scale": 0,
    "bucket_no_upscale": True, "bucket_reso_steps": 64, "cache_latents": True, "caption_dropout_rate": 0.05,
    "clip_skip": "2", "conv_alpha": 4, "conv_dim": 8, "dora_wd": False, "dynamo_backend": "no", "enable_bucket": True,
    "epoch": "12", "factor": -1, "flux1_checkbox": False, "gpu_ids": "", "gradient_accumulation_steps": "2",
    "guidance_scale": 3.5, "keep_tokens": "1", "learning_rate": 0.001, "logging_dir": "", "lr_scheduler": "cosine",
    "lr_scheduler_args": "", "lr_scheduler_num_cycles": "", "lr_warmup": "10", "max_grad_norm": 1,
    "max_resolution": "768, 768", "max_token_length": "225", "max_train_epochs": "", "max_train_steps": "",
    "min_snr_gamma": 5, "mixed_precision": "bf16",
    "model_list": "custom", "module_dropout": 0, "network_alpha": 16, "network_dim": 32, "noise_offset": 0.05,
    "noise_offset_type": "Original", "multires_noise_iterations": 6, "multires_noise_discount": 0.3, "optimizer": "AdamW8bit",
    "optimizer_args": "weight_decay=0.1 betas=0.9,0.95", "output_dir": "L:/out", "output_name": "bear",
    "pretrained_model_name_or_path": "L:\\models\\sdxl.safetensors", "prior_loss_weight": 1, "rank_dropout": 0.1,
    "reg_data_dir": "", "sample_every_n_steps": 25, "sample_prompts": "a bear --w 768 --d 7\n# none\na fox", "sdxl": True,
    "sdxl_no_half_vae": True, "save_every_n_epochs": 0, "scale_weight_norms": 0, "seed": "42", "shuffle_caption": True,
    "stop_text_encoder_training": 0, "text_encoder_lr": 0.00005, "train_batch_size": 2, "train_data_dir": "L:/img",
    "unet_lr": 0.0002, "v2": False, "vae": "", "wandb_api_key": "", "xformers": "sdpa",
}  # fmt: skip
EXPECTED = {
    "run.name": "bear", "run.output_dir": "/mnt/l/out", "run.epochs": 12, "run.seed": 42, "model.family": "sdxl",
    "model.path": "/mnt/l/models/sdxl.safetensors", "data.sources.0.path": "/mnt/l/img", "data.batch_size": 2,
    "data.resolution": 768, "data.bucket_step": 64, "data.clip_chunks": 3, "data.caption_dropout": 0.05,
    "data.sources.0.shuffle": True, "data.sources.0.keep": 1, "adapter.rank": 32, "adapter.alpha": 16.0,
    "adapter.rank_dropout": 0.1, "adapter.rules.0.component": "text_encoder", "adapter.rules.0.lr": 5e-5,
    "optimizer.name": "adamw8bit", "optimizer.lr": 2e-4, "optimizer.weight_decay": 0.1, "optimizer.betas.1": 0.95,
    "schedule.name": "cosine", "schedule.warmup": 0.1, "objective.min_snr_gamma": 5, "objective.noise_offset": 0.05,
    "objective.multires_noise_iterations": 0, "precision.compute": "bf16", "step.accumulation": 2,
    "validation.every_steps": 25, "validation.samples.0.width": 768, "validation.samples.0.seed": 7,
    "validation.samples.1.prompt": "a fox",
}  # fmt: skip


def made(folder: Path, **changes: Any) -> tuple[dict[str, Any], Any]:
    (file := folder / "window.json").write_text(json.dumps({**WINDOW, **changes}))
    draft = draft_of(file)
    return configs.flatten(configs.tree(config_of(draft, file))), draft


def test_the_windows_settings_are_its_options(tmp_path: Path) -> None:
    found, draft = made(tmp_path)
    assert {key: found.get(key) for key in EXPECTED} == EXPECTED and "adapter.max_norm" not in found
    assert not draft.notes[ABSENT] and not draft.notes[UNKNOWN]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"max_train_steps": 800}, {"run.max_steps": 800}),
        ({"max_train_steps": 800, "max_train_epochs": 3}, {"run.epochs": 3}),
        ({"lr_warmup_steps": 30}, {"schedule.warmup": 30}), ({"lr_warmup": 0}, {"schedule.warmup": 0}),
        ({"noise_offset_type": "Multires"}, {"objective.noise_offset": 0.0, "objective.multires_noise_iterations": 6}),
        ({"text_encoder_lr": 0}, {"adapter.rules.0.component": None}),
        ({"unet_lr": 0, "text_encoder_lr": ""}, {"optimizer.lr": 1e-3}),
        ({"LoRA_type": "Kohya LoCon"}, {"adapter.rules.0.rank": 8, "adapter.rules.0.alpha": 4.0}),
        ({"LoRA_type": "LyCORIS/LoCon", "dora_wd": True, "rank_dropout": 0},
         {"adapter.type": "dora", "adapter.rules.0.rank": 8}),
        ({"LoRA_type": "LyCORIS/LoKr", "factor": 8, "decompose_both": True, "rank_dropout": 0, "module_dropout": 0},
         {"adapter.type": "lokr", "adapter.factor": 8, "adapter.decompose": "both", "adapter.rules.0.rank": 8}),
        ({"additional_parameters": '--optimizer_args "weight_decay=0.3" --flip_aug --train_data_dir "C:\\a b"'},
         {"optimizer.weight_decay": 0.3, "data.sources.0.path": "/mnt/c/a b", "data.sources.0.flip": True}),
        ({"sdxl": False, "flux1_checkbox": True, "LoRA_type": "Flux1", "timestep_sampling": "shift", "discrete_flow_shift": 2,
          "text_encoder_lr": 0, "sample_prompts": ""},
         {"model.family": "flux", "objective.shift": 2.0, "objective.guidance": 3.5}),
        ({"sdxl": "True", "max_token_length": 75}, {"model.family": "sdxl", "data.clip_chunks": 1}),
        ({"v_parameterization": True}, {"model.prediction": "v"}),
        ({"optimizer": "AdamW", "optimizer_args": "", "debiased_estimation_loss": True, "min_snr_gamma": 0},
         {"objective.weighting": "debiased", "optimizer.name": "adamw"}),
    ],
)  # fmt: skip
def test_a_setting_has_the_windows_own_meaning(tmp_path: Path, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    found, _ = made(tmp_path, **changes)
    assert {key: found.get(key) for key in expected} == expected


# What the window always saves, whatever the loss and the schedule are.
SAVED = {
    "bucket_no_upscale": True, "huber_c": 0.2, "huber_scale": 1, "huber_schedule": "exponential", "loss_type": "l2",
    "lr_scheduler_num_cycles": 3, "lr_scheduler_power": 2, "max_bucket_reso": 2048, "min_bucket_reso": 256,
}  # fmt: skip


def test_what_sd_scripts_does_not_read_there_either_is_no_note(tmp_path: Path) -> None:
    _, draft = made(tmp_path, **SAVED)
    assert not draft.notes[ABSENT] and not draft.notes[UNKNOWN]


@pytest.mark.parametrize(
    ("changes", "expected", "absent"),
    [
        ({"loss_type": "huber", "huber_scale": ""}, {"objective.huber_c": 0.2}, []),
        ({"loss_type": "smooth_l1", "huber_scale": ""}, {"objective.huber_schedule": "exponential"}, []),
        ({"lr_scheduler": "cosine_with_restarts"}, {"schedule.cycles": 3}, []),
        ({"lr_scheduler": "polynomial"}, {"schedule.power": 2.0}, []),
        ({"bucket_no_upscale": False}, {}, ["max_bucket_reso = 2048", "min_bucket_reso = 256"]),
    ],
)  # fmt: skip
def test_what_sd_scripts_reads_there_is_kept(
    tmp_path: Path, changes: dict[str, Any], expected: dict[str, Any], absent: list[str]
) -> None:
    found, draft = made(tmp_path, **{**SAVED, **changes})
    assert {key: found.get(key) for key in expected} == expected
    assert sorted(note.partition(":")[0] for note in draft.notes[ABSENT]) == absent


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"LoRA_type": "LyCORIS/LoHa"}, "adapter.type"), ({"LoRA_type": "LyCORIS/LoKr", "dora_wd": True}, "adapter.type"),
        ({"LoRA_type": "Kohya DyLoRA"}, "adapter.type"),
        ({"LoRA_type": "LoRA-FA"}, "adapter.type"), ({"sdxl": False}, "model.family"),
        ({"sdxl": False, "sd3_checkbox": True}, "model.family"), ({"unet_lr": 0}, "adapter.targets"),
        ({"optimizer": "DAdaptAdam", "optimizer_args": ""}, "optimizer.name"),
    ],
)  # fmt: skip
def test_what_would_train_something_else_is_refused(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=f"--set {key}="):
        made(tmp_path, **changes)


def test_settings_without_a_network_train_a_whole_model(tmp_path: Path) -> None:
    """Configs that kohya_ss's tabs for Dreambooth and finetuning saved are refused: they train no LoRA."""
    settings = {name: value for name, value in WINDOW.items() if name not in ("LoRA_type", "network_dim", "network_alpha")}
    (file := tmp_path / "window.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="--set adapter.type="):
        draft_of(file)


@pytest.mark.parametrize(
    ("files", "trigger"),
    [
        (["10_sks bear/1.jpg", "10_sks bear/2.PNG", "Thumbs.db"], "sks bear"),
        (["10_sks bear/1.jpg", "2_sks bear/1.jpg"], "sks bear"), (["10_sks bear/1.jpg", "5_sks fox/1.jpg"], ""),
        (["10_sks bear/1.jpg", "10_sks bear/1.txt"], ""), (["10_sks bear/1.jpg", "meta.jsonl"], ""),
        (["10_sks bear/1.jpg", "1.jpg"], ""), (["bear/1.jpg"], ""), ([], ""),
        (["10_sks bear/1.jpg", "10_sks bear/old/1.jpg"], ""),
    ],
)  # fmt: skip
def test_the_words_of_a_folder_without_captions_are_the_trigger(tmp_path: Path, files: list[str], trigger: str) -> None:
    """Where anything may be a caption, or another word, nothing is guessed. Words of classes are none."""
    for path in (tmp_path / folder / name for folder in ("img", "reg") for name in files):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    found, _ = made(tmp_path, train_data_dir=str(tmp_path / "img"), reg_data_dir=str(tmp_path / "reg"))
    assert [found[f"data.sources.{number}.trigger"] for number in (0, 1)] == [trigger, ""]


def test_the_head_names_the_window(tmp_path: Path) -> None:
    _, draft = made(tmp_path)
    first = text_of(draft, tmp_path / "window.json").partition("\n")[0]
    assert first.endswith("window.json (kohya_ss's window, which starts sd-scripts) by scripts/import_config.py.")


@pytest.mark.parametrize("wrong", [["big"], {"big": 1}, 0.5, "big", None, True])
def test_every_setting_may_be_of_a_wrong_kind(tmp_path: Path, wrong: Any) -> None:
    for name in WINDOW:
        try:
            made(tmp_path, **{name: wrong})
        except UserError as error:
            assert "window.json" in str(error), name
