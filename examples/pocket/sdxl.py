"""The pocket SDXL: two CLIP text encoders and SDXL's UNet, trained together from nothing, on the autoencoder's latents."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import EulerDiscreteScheduler, UNet2DConditionModel
from torch import nn
from torch.nn.functional import mse_loss
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from examples.pocket import CONFIGS, data, training

BATCH = 96
EMPTY = 0.1  # share of captions that are empty, for classifier-free guidance
STYLELESS = 0.1  # share of captions that name no style
GAMMA = 5.0  # min-SNR (Hang et al. 2023, arXiv 2303.09556)
UNET, SCHEDULER = CONFIGS["sdxl"]["unet"], CONFIGS["sdxl"]["scheduler"]


class Denoiser(nn.Module):
    """What is trained together. The names of its parts are the pipeline's."""

    def __init__(self):
        super().__init__()
        self.unet = UNet2DConditionModel(**UNET)
        self.text_encoder = CLIPTextModel(CLIPTextConfig(**data.CLIP))
        self.text_encoder_2 = CLIPTextModelWithProjection(CLIPTextConfig(**data.CLIP, hidden_act="gelu"))

    def forward(self, noised, timesteps, ids, sizes):
        """noised fp32 [B, C, 8, 8], timesteps int64 [B], token ids int64 [B, 77], time ids fp32 [B, 6] -> epsilon."""
        # Both tokenizers give the same ids but for what pads: the first pads with the end token, the second with "!" (0).
        first = self.text_encoder(ids, output_hidden_states=True)
        end = ids.argmax(dim=-1, keepdim=True)
        padded = torch.where(torch.arange(ids.shape[1]) > end, 0, ids)
        second = self.text_encoder_2(padded, output_hidden_states=True)
        sequence = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
        added = {"text_embeds": second.text_embeds, "time_ids": sizes}
        return self.unet(noised, timesteps, sequence, added_cond_kwargs=added, return_dict=False)[0]


def build(seed: int) -> Denoiser:
    torch.manual_seed(seed)
    module = Denoiser()
    # The libraries leave tables at 0.02; of so few numbers a word needs larger ones to be told from another at once.
    for encoder in (module.text_encoder, module.text_encoder_2):
        nn.init.normal_(encoder.get_input_embeddings().weight, std=0.3)
    return module


def signal(timesteps: torch.Tensor) -> torch.Tensor:
    """alpha-bar, fp32 [B]."""
    return EulerDiscreteScheduler(**SCHEDULER).alphas_cumprod[timesteps]


def time_ids(count: int, draw: torch.Generator) -> torch.Tensor:
    """fp32 [count, 6]. The original sizes are at random: a larger picture of an icon says nothing else."""
    original = torch.randint(64, 513, (count, 1), generator=draw).float().expand(count, 2)
    return torch.cat([original, torch.zeros(count, 2), torch.full((count, 2), 64.0)], dim=1)


def train(examples: data.Examples, state: Path, *, seed: int, steps: int, seconds: float) -> Denoiser:
    module = build(seed)
    tokens = data.clip_ids(examples.captions)
    styleless = data.clip_ids(examples.styleless)
    empty = data.clip_ids([""])

    def loss(step: int) -> torch.Tensor:
        draw = training.generator(seed, step)
        chosen = training.epoch_order(seed, len(tokens), step * BATCH, BATCH)
        chance = torch.rand(BATCH, 1, generator=draw)
        ids = torch.where(chance < EMPTY, empty, torch.where(chance < EMPTY + STYLELESS, styleless[chosen], tokens[chosen]))
        timesteps = torch.randint(0, 1000, (BATCH,), generator=draw)
        latents = examples.latents[chosen]
        noise = torch.randn(latents.shape, generator=draw)
        kept = signal(timesteps).view(-1, 1, 1, 1)
        noised = kept.sqrt() * latents + (1 - kept).sqrt() * noise
        with torch.autocast("cpu", torch.bfloat16):
            predicted = module(noised, timesteps, ids, time_ids(BATCH, draw))
        snr = kept / (1 - kept)
        return (mse_loss(predicted.float(), noise, reduction="none") * (GAMMA / snr).clamp(max=1.0)).mean()

    training.train(module, loss, state, seed=seed, steps=steps, peak=1.2e-3, seconds=seconds)
    return module
