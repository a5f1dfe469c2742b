"""The pocket Flux: a CLIP for the pooled vector, a small T5 with a tokenizer of its own, Flux's transformer.

It is made in two parts, as Flux dev was made of Flux pro: first the transformer learns the velocity, with 10 % empty captions
and guidance 1; then a copy learns to draw in one pass what classifier-free guidance draws in two, for any guidance.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel
from torch import nn
from torch.nn.functional import mse_loss
from transformers import AutoTokenizer, CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from examples.pocket import CONFIGS, data, icons, training
from scripts.make_model import t5_tokenizer_files, t5_vocabulary, train_bpe, write_texts
from trainer.models.flux import pack
from trainer.models.shared.flow import positions

BATCH = 64
EMPTY, STYLELESS = 0.1, 0.1
LONGEST = 16  # CLIP's tokens of a caption
T5_LENGTH = 16  # of every caption, padded; the longest has 11 tokens
STRONGEST = 6.0  # guidance that the second part learns, from 1 on
GUIDED = 0.75  # of its captions
TRANSFORMER, T5, SCHEDULER = (CONFIGS["flux"][part] for part in ("transformer", "t5", "scheduler"))


def caption_words() -> list[str]:
    """What the T5 tokenizer is made of: the words of all captions, the commoner ones first."""
    captions = [icons.caption(name, style).replace(",", " ,") for style in icons.SETS for name in icons.SUBJECTS]
    words = [word for caption in captions for word in caption.split()]
    return sorted(set(words), key=lambda word: (-words.count(word), word))


@cache
def t5_files() -> dict[str, str]:
    words = caption_words()
    return t5_tokenizer_files(t5_vocabulary(words, train_bpe(words, 600)), T5_LENGTH)


@cache
def t5_tokenizer():
    with tempfile.TemporaryDirectory() as folder:
        write_texts(Path(folder), t5_files())
        return AutoTokenizer.from_pretrained(folder)


def t5_ids(captions: list[str]) -> torch.Tensor:
    """int64 [N, T5_LENGTH]."""
    return t5_tokenizer()(
        captions, padding="max_length", max_length=T5_LENGTH, truncation=True, return_tensors="pt"
    ).input_ids


class Denoiser(nn.Module):
    """What is trained together. The names of its parts are the pipeline's."""

    def __init__(self):
        super().__init__()
        self.transformer = FluxTransformer2DModel(**TRANSFORMER)
        self.text_encoder = CLIPTextModel(CLIPTextConfig(**data.CLIP))
        self.text_encoder_2 = T5EncoderModel(T5Config(vocab_size=len(t5_tokenizer()), **T5))

    def forward(self, noised, time, clip_ids, t5_ids, guidance):
        """noised fp32 [B, C, 8, 8], time [B] in [0, 1], token ids, guidance [B] -> the velocity of packed latents."""
        # CLIP is causal, and the longest caption ends before: what is cut off changes nothing.
        pooled = self.text_encoder(clip_ids[:, :LONGEST]).pooler_output
        sequence = self.text_encoder_2(t5_ids)[0]
        return self.transformer(
            hidden_states=pack(noised),
            encoder_hidden_states=sequence,
            pooled_projections=pooled,
            timestep=time,
            guidance=guidance,
            img_ids=positions(0, *(side // 2 for side in noised.shape[-2:]), device=noised.device),
            txt_ids=torch.zeros(sequence.shape[1], 3),
            return_dict=False,
        )[0]


def build(seed: int) -> Denoiser:
    torch.manual_seed(seed)
    module = Denoiser()
    nn.init.normal_(module.text_encoder.get_input_embeddings().weight, std=0.3)
    # As DiT begins (Peebles & Xie 2022, arXiv 2212.09748): blocks that add nothing, an output of zero.
    for name, parameter in module.transformer.named_parameters():
        modulation = any(f".{norm}.linear." in name for norm in ("norm", "norm1", "norm1_context"))
        if modulation or name.startswith("proj_out."):
            nn.init.zeros_(parameter)
    return module


@torch.no_grad()
def know_unknown_words(module: Denoiser) -> None:
    """Tokens that no caption has get the mean of the style words' embeddings, in place of the random ones they began with.

    "A bear, ink style" is then a bear in no style that the model could name. Random rows would spoil the bear.
    """
    captions = [icons.caption(name, style) for style in (*icons.TRAINED_STYLES, None) for name in icons.SUBJECTS]
    for encoder, ids_of in ((module.text_encoder, data.clip_ids), (module.text_encoder_2, t5_ids)):
        table = encoder.get_input_embeddings().weight
        empty = ids_of([""]).flatten()
        words = [ids_of([style]).flatten() for style in icons.TRAINED_STYLES]
        mean = torch.stack([table[ids[~torch.isin(ids, empty)]].mean(0) for ids in words]).mean(0)
        known = torch.zeros(len(table), dtype=torch.bool)
        known[ids_of([*captions, ""]).flatten()] = True
        table[~known] = mean


class Captions:
    """Token ids of captions, without their style, and of the empty one, drawn as they are needed."""

    def __init__(self, examples: data.Examples):
        self.kinds = [(data.clip_ids(texts), t5_ids(texts)) for texts in (examples.captions, examples.styleless)]
        count = len(examples.captions)
        self.empty = tuple(ids.expand(count, -1) for ids in (data.clip_ids([""]), t5_ids([""])))

    def drawn(self, chosen: torch.Tensor, chance: torch.Tensor) -> list[torch.Tensor]:
        """CLIP's and T5's ids of the chosen captions; chance fp32 [B, 1] says which kind each one is."""
        whole, styleless = self.kinds
        return [
            torch.where(chance < EMPTY, none[chosen], torch.where(chance < EMPTY + STYLELESS, plain[chosen], full[chosen]))
            for full, plain, none in zip(whole, styleless, self.empty, strict=True)
        ]


def noised_batch(examples: data.Examples, seed: int, step: int):
    """(chosen, generator, time [B], noised latents, velocity), with timesteps as the trainer draws them for Flux."""
    draw = training.generator(seed, step)
    chosen = training.epoch_order(seed, len(examples.latents), step * BATCH, BATCH)
    time = torch.sigmoid(torch.randn(BATCH, generator=draw))
    latents = examples.latents[chosen]
    noise = torch.randn(latents.shape, generator=draw)
    mixed = torch.lerp(latents, noise, time.view(-1, 1, 1, 1))
    return chosen, draw, time, mixed, pack(noise - latents)


def train(examples: data.Examples, state: Path, *, seed: int, steps: int, seconds: float) -> Denoiser:
    module = build(seed)
    captions = Captions(examples)

    def loss(step: int) -> torch.Tensor:
        chosen, draw, time, mixed, velocity = noised_batch(examples, seed, step)
        ids = captions.drawn(chosen, torch.rand(BATCH, 1, generator=draw))
        with torch.autocast("cpu", torch.bfloat16):
            predicted = module(mixed, time, *ids, torch.ones(BATCH))
        return mse_loss(predicted.float(), velocity)

    training.train(module, loss, state, seed=seed, steps=steps, peak=1e-3, seconds=seconds)
    return module


def distil(examples: data.Examples, first: Path, state: Path, *, seed: int, steps: int, seconds: float) -> Denoiser:
    """The second part: `first` is the state of `train`."""
    teacher = training.load_average(build(seed), first, seed=seed).requires_grad_(False)
    module = training.load_average(build(seed), first, seed=seed)
    captions = Captions(examples)

    def loss(step: int) -> torch.Tensor:
        chosen, draw, time, mixed, velocity = noised_batch(examples, seed + 1, step)
        ids = captions.drawn(chosen, torch.rand(BATCH, 1, generator=draw))
        guidance = 1 + (STRONGEST - 1) * torch.rand(BATCH, generator=draw)
        guidance = torch.where(torch.rand(BATCH, generator=draw) < GUIDED, guidance, torch.ones(BATCH))
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                ones = torch.ones(BATCH)
                told = teacher(mixed, time, *ids, ones).float()
                untold = teacher(mixed, time, *(none[chosen] for none in captions.empty), ones).float()
            predicted = module(mixed, time, *ids, guidance)
        scale = guidance.view(-1, 1, 1)
        target = torch.where(scale > 1, untold + scale * (told - untold), velocity)
        return mse_loss(predicted.float(), target)

    training.train(module, loss, state, seed=seed, steps=steps, peak=3e-4, seconds=seconds)
    return module
