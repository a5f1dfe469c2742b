"""Small configs of other trainers, with their own keys and made for the tests, and where those that they publish are."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.harness import ROOT

# A folder beside the checkout, or the one that is named; it is no part of the project.
SHARED = Path(os.environ.get("OTHER_CONFIGS") or ROOT.parent / "shared" / "data" / "other_configs")
FACTS = SHARED.parent.parent / "facts" / "other_trainers_options.json"

SD_SCRIPTS = {
    "train.sh": r"""#!/bin/bash
# sdxl_train_network.py in a comment is no command
accelerate launch --num_processes 1 sdxl_train_network.py --pretrained_model_name_or_path=MODEL \
  --dataset_config data.toml --output_dir out --output_name "my lora" --network_module networks.lora --network_dim 32 \
  --network_alpha 16 --network_args "conv_dim=8" "conv_alpha=4" "rank_dropout=0.1" --learning_rate 1e-4 --unet_lr 2e-4 \
  --text_encoder_lr 5e-5 3e-5 --optimizer_type AdamW8bit --optimizer_args weight_decay=0.1 betas=0.9,0.99 \
  --lr_scheduler cosine_with_restarts --lr_scheduler_num_cycles 3 --lr_warmup_steps 10 --max_train_epochs 8 \
  --gradient_accumulation_steps 2 --min_snr_gamma 5 --noise_offset 0.05 --mixed_precision bf16 --gradient_checkpointing \
  --save_every_n_steps 20 --save_last_n_steps 60 --sample_prompts prompts.txt --sample_every_n_steps 10 --seed 42 \
  --clip_skip 2 --min_timestep 100 --no_such_option 3
""",
    "data.toml": """[general]
shuffle_caption = true
keep_tokens = 1

[[datasets]]
resolution = [1024, 768]
batch_size = 4
enable_bucket = true

  [[datasets.subsets]]
  image_dir = "img/5_sks dog"
  num_repeats = 10
  caption_dropout_rate = 0.1

  [[datasets.subsets]]
  image_dir = "reg"
  is_reg = true
  num_repeats = 2
""",
    "prompts.txt": "a dog on a beach --w 768 --h 1024 --d 7 --s 25 --l 6.5 --n blurry, ugly\n# no prompt\n",
}

ONETRAINER = {
    "config.json": json.dumps(
        {
            "training_method": "LORA", "model_type": "STABLE_DIFFUSION_XL_10_BASE", "base_model_name": "MODEL",
            "output_model_destination": "models/bear.safetensors", "learning_rate": 1e-4, "learning_rate_scaler": "BOTH",
            "batch_size": 2, "gradient_accumulation_steps": 8, "epochs": 12, "resolution": "512,768,1024",
            "learning_rate_warmup_steps": 5, "concept_file_name": "concepts.json", "loss_weight_fn": "MIN_SNR_GAMMA",
            "train_dtype": "BFLOAT_16", "unet": {"weight_dtype": "FLOAT_8"},
            "text_encoder": {"train": True, "learning_rate": 1e-5},
            "text_encoder_2": {"train": False}, "layer_filter_preset": "attn-mlp", "backup_after": 5,
            "optimizer": {"optimizer": "ADAMW_8BIT", "weight_decay": 0.02, "beta1": 0.9, "beta2": 0.95},
        }
    ),
    "concepts.json": json.dumps(
        [
            {"path": "img", "balancing": 3.0, "text": {"prompt_source": "sample", "enable_tag_shuffling": True}},
            {"path": "off", "enabled": False},
            {"path": "named", "text": {"prompt_source": "filename"}, "image": {"enable_random_flip": False}},
        ]
    ),
}  # fmt: skip

AI_TOOLKIT = {
    "config.yaml": """job: extension
config:
  name: bear
  process:
    - type: sd_trainer
      training_folder: out
      trigger_word: sks
      network: {type: lora, linear: 8, linear_alpha: 4}
      save: {save_every: 100, max_step_saves_to_keep: 2}
      datasets:
        - folder_path: img
          num_repeats: 3
          caption_dropout_rate: 0.05
          resolution: [512, 768]
        - folder_path: more
          resolution: 512
      train:
        batch_size: 2
        steps: 400
        gradient_accumulation_steps: 4
        lr: 2e-4
        optimizer: adamw8bit
        optimizer_params: {weight_decay: 1e-5}
        timestep_type: linear
        dtype: bf16
        ema_config: {use_ema: true, ema_decay: 0.99}
      model: {name_or_path: MODEL, arch: flux, quantize: true}
      sample:
        sample_every: 200
        width: 1024
        height: 768
        prompts: ["[trigger] on a beach", "a bear --w 512 --d 9"]
        neg: ugly
        seed: 42
        walk_seed: true
        guidance_scale: 4
"""
}

SIMPLETUNER = {
    "config.json": json.dumps(
        {
            "--model_family": "flux", "--model_type": "lora", "--pretrained_model_name_or_path": "MODEL", "--lora_rank": 8,
            "--data_backend_config": "config/backends.json", "--learning_rate": 3e-4, "--num_train_epochs": 4,
            "--max_train_steps": 0, "--train_batch_size": 2, "--optimizer": "adamw_bf16", "--lr_scheduler": "polynomial",
            "--lr_end": 3e-5, "--lr_warmup_steps": 4, "--base_model_precision": "int8-quanto", "--seed": 7,
            "--output_dir": "out/bear", "--flow_schedule_shift": 0, "--flow_schedule_auto_shift": True,
            "--validation_prompt": "a bear", "--validation_resolution": "1024x768",
        }
    ),
    "backends.json": json.dumps(
        [
            {"id": "photos", "type": "local", "instance_data_dir": "img", "repeats": 2, "resolution": 0.5,
             "resolution_type": "area", "caption_strategy": "textfile"},
            {"id": "text", "type": "local", "dataset_type": "text_embeds", "default": True, "cache_dir": "cache"},
            {"id": "off", "type": "local", "instance_data_dir": "off", "disabled": True},
        ]
    ),
}  # fmt: skip

MADE = {"sd-scripts": SD_SCRIPTS, "OneTrainer": ONETRAINER, "ai-toolkit": AI_TOOLKIT, "SimpleTuner": SIMPLETUNER}


def write(folder: Path, trainer: str, model: str = "MODEL") -> Path:
    """The files of a trainer's config in `folder`, with `model` as its model. Returns the first."""
    for name, text in MADE[trainer].items():
        (folder / name).write_text(text.replace("MODEL", model), encoding="utf-8")
    return folder / next(iter(MADE[trainer]))


# As they lie on Windows disks: the photos and the model are where --set says.
WINDOWS = {
    "old.toml": """pretrained_model_name_or_path = "E:/models/sdXL_v10.safetensors"
train_data_dir = "E:/pets/img"
output_dir = 'E:\\pets\\model'
output_name = "pets"
resolution = "512,512"
network_module = "networks.lora"
network_dim = 8
unet_lr = 5e-5
optimizer_type = "Prodigy"
optimizer_args = ["decouple=True", "d_coef=1.5", "use_bias_correction=True"]
train_batch_size = 3
max_train_epochs = 4
save_every_n_epochs = 2
sample_every_n_epochs = 1
sample_prompts = 'E:\\pets\\prompts.txt'
max_token_length = 150
cache_latents = true
mixed_precision = "bf16"
""",
    "train.bat": '@echo off\r\naccelerate launch "C:\\kohya\\sdxl_train_network.py" ^\r\n --train_data_dir="E:\\my pets\\img"'
    ' --pretrained_model_name_or_path=E:\\models\\x.safetensors ^\r\n --resolution=512,512 --network_dim=8 '
    "--output_name=pets --network_module=networks.lora --max_train_steps=40 --train_batch_size=3\r\npause\r\n",
    "window.json": json.dumps(
        {"LoRA_type": "Standard", "sdxl": True, "pretrained_model_name_or_path": "E:\\models\\x.safetensors",
         "train_data_dir": "E:\\pets\\img", "output_dir": "", "output_name": "pets", "max_resolution": "512,512",
         "epoch": "4", "lr_warmup": 5, "lr_scheduler": "cosine", "learning_rate": 0.0001, "unet_lr": 0.0001,
         "text_encoder_lr": 0, "network_dim": 8, "network_alpha": 4, "optimizer": "AdamW", "train_batch_size": "3",
         "save_every_n_epochs": 1,
         "sample_prompts": "a cat --w 256 --h 256", "sample_every_n_epochs": 2, "max_token_length": "225", "seed": ""}
    ),
}  # fmt: skip
