"""Writes a tiny model of the third family, as diffusers and transformers write their folders."""

from __future__ import annotations

import json
from pathlib import Path

import torch

WORDS = "describe the picture : a photo of sks plush bear on beach in snow table with red green blue small large"


def make(folder: Path) -> None:
    """folder: in diffusers' layout, without a weight that is not drawn from one seed."""
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2Model

    vocabulary = {word: number for number, word in enumerate(["<unk>", "<pad>", *dict.fromkeys(WORDS.split())])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", model_max_length=64)
    with torch.random.fork_rng(devices=[]):  # of the CPU: a pretended accelerator of another test has none
        torch.manual_seed(0)
        text_encoder = Qwen2Model(
            Qwen2Config(
                vocab_size=len(vocabulary), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
            )
        )  # fmt: skip
        transformer = QwenImageTransformer2DModel(
            in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=32, axes_dims_rope=(4, 6, 6),
        )  # fmt: skip
        vae = AutoencoderKLQwenImage(
            base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.1, -0.1, 0.2, 0.0],
            latents_std=[0.5, 0.6, 0.7, 0.8],
        )  # fmt: skip
    parts = {"text_encoder": text_encoder, "transformer": transformer, "vae": vae, "tokenizer": tokenizer}
    for name, part in parts.items():
        part.save_pretrained(folder / name)
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps({"_class_name": "OwnScheduler"}))
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "ThirdPipeline"}))
