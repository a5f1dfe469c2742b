"""The pocket FLUX.2 klein: a Qwen3 of 27 narrow layers with a tokenizer of its own, and FLUX.2's transformer.

It is a base model: it learns the velocity, with 10 % empty captions, and guidance takes a second pass. Its autoencoder is the
pocket Flux's, with statistics of its latents in place of a scale.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2, Flux2Transformer2DModel
from torch import nn
from torch.nn.functional import mse_loss
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from examples.pocket import CONFIGS, data, flux, icons, training, vae
from scripts.make_model import qwen_tokenizer_files, train_bpe, write_texts
from trainer.models import flux2
from trainer.models.shared import patched_vae

BATCH = 64
EMPTY, STYLELESS = 0.1, 0.1
TEXT_LENGTH = 28  # tokens of every caption's chat message, padded; the longest has 27
TRANSFORMER, QWEN, SCHEDULER = (CONFIGS["flux2"][part] for part in ("transformer", "qwen", "scheduler"))


@cache
def tokenizer_files() -> dict[str, str]:
    words = ["user", "assistant", *flux.caption_words()]
    return qwen_tokenizer_files(train_bpe(words, 5000), words)


@cache
def tokenizer():
    with tempfile.TemporaryDirectory() as folder:
        write_texts(Path(folder), tokenizer_files())
        return AutoTokenizer.from_pretrained(folder)


def text_ids(captions: list[str]) -> torch.Tensor:
    """int64 [N, 2, TEXT_LENGTH]: ids, and which of them are no padding, as the trainer makes them."""
    model = SimpleNamespace(tokenizers={"tokenizer": tokenizer()}, options={"text_length": TEXT_LENGTH})
    return torch.stack(list(flux2.tokens(model, "text_encoder", captions)))


class Denoiser(nn.Module):
    """What is trained together. The names of its parts are the pipeline's."""

    def __init__(self):
        super().__init__()
        self.transformer = Flux2Transformer2DModel(**TRANSFORMER)
        self.text_encoder = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer()), **QWEN))

    def forward(self, noised, time, ids):
        """noised fp32 [B, C, 4, 4], time [B] in [0, 1], ids int64 [B, 2, TEXT_LENGTH] -> the velocity [B, C, 4, 4]."""
        model = SimpleNamespace(
            modules={"text_encoder": self.text_encoder.model, "transformer": self.transformer},
            compute={"text_encoder": torch.float32},
        )
        # Read after the last layer, which the whole Qwen3 would follow with its norm.
        sequence = flux2.encode_text(model, "text_encoder", ids.unbind())["sequence"]
        return flux2.predict(model, noised, time, SimpleNamespace(sequence=sequence), SimpleNamespace(references=()))


def build(seed: int) -> Denoiser:
    torch.manual_seed(seed)
    module = Denoiser()
    module.text_encoder.model.norm = nn.Identity()
    nn.init.normal_(module.text_encoder.get_input_embeddings().weight, std=0.3)
    # As DiT begins (Peebles & Xie 2022, arXiv 2212.09748): blocks that add nothing, an output of zero.
    for name, parameter in module.transformer.named_parameters():
        if "_modulation" in name or name.startswith("proj_out."):
            nn.init.zeros_(parameter)
    return module


@torch.no_grad()
def know_unknown_words(module: Denoiser) -> None:
    """Tokens that no caption has get the mean of the style words' embeddings, in place of the random ones they began with."""
    captions = [icons.caption(name, style) for style in (*icons.TRAINED_STYLES, None) for name in icons.SUBJECTS]
    table, empty = module.text_encoder.get_input_embeddings().weight, text_ids([""])[:, 0].flatten()
    words = [text_ids([f" {style}"])[:, 0].flatten() for style in icons.TRAINED_STYLES]
    mean = torch.stack([table[ids[~torch.isin(ids, empty)]].mean(0) for ids in words]).mean(0)
    known = torch.zeros(len(table), dtype=torch.bool)
    known[text_ids([*captions, ""])[:, 0].flatten()] = True
    table[~known] = mean


def autoencoder() -> AutoencoderKLFlux2:
    """The pocket Flux's, without statistics yet."""
    trained = AutoencoderKL.from_pretrained(Path(__file__).resolve().parents[1] / "pocket_flux" / "vae")
    module = AutoencoderKLFlux2(**vae.CONFIG)
    module.load_state_dict(trained.state_dict(), strict=False)
    return module.eval().requires_grad_(False)


def examples(rendered: Path) -> tuple[data.Examples, AutoencoderKLFlux2]:
    """What is shown, and the autoencoder with the statistics of all of it."""
    module = autoencoder()
    shown = data.examples(module, rendered, scale=1.0, shift=0.0)
    latents = patched_vae.patches(shown.latents)
    module.bn.running_mean.copy_(latents.mean((0, 2, 3)))
    module.bn.running_var.copy_(latents.var((0, 2, 3)))
    mean, deviation = module.bn.running_mean, torch.sqrt(module.bn.running_var + module.config.batch_norm_eps)
    normalised = (latents - mean.view(1, -1, 1, 1)) / deviation.view(1, -1, 1, 1)
    return data.Examples(normalised, shown.captions, shown.styleless), module


def train(shown: data.Examples, state: Path, *, seed: int, steps: int, seconds: float) -> Denoiser:
    module = build(seed)
    kinds = text_ids(shown.captions), text_ids(shown.styleless)
    empty = text_ids([""])

    def loss(step: int) -> torch.Tensor:
        draw = training.generator(seed, step)
        chosen = training.epoch_order(seed, len(shown.latents), step * BATCH, BATCH)
        time = torch.sigmoid(torch.randn(BATCH, generator=draw))
        latents = shown.latents[chosen]
        noise = torch.randn(latents.shape, generator=draw)
        chance = torch.rand(BATCH, 1, 1, generator=draw)
        whole, plain = (kind[chosen] for kind in kinds)
        ids = torch.where(chance < EMPTY, empty, torch.where(chance < EMPTY + STYLELESS, plain, whole))
        with torch.autocast("cpu", torch.bfloat16):
            predicted = module(torch.lerp(latents, noise, time.view(-1, 1, 1, 1)), time, ids)
        return mse_loss(predicted.float(), noise - latents)

    training.train(module, loss, state, seed=seed, steps=steps, peak=1e-3, seconds=seconds)
    return module
