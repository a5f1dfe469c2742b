"""A third family, as a new one comes into the program: this folder, and one line in trainer.models.FAMILIES.

It is Qwen-Image in small, with a time convention of its own. The denoiser is another than the other families'. One language
model gives features of the caption's own length, with a mask. The VAE has a time axis, and latents normalised channel by
channel. No component has a table of names: files hold those of the libraries. Time runs backwards: t = 1 is the photo.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer.base.types import Batch, Conditioning
from trainer.models import base
from trainer.models.base import Markers, Model, SampleRequest, collate
from trainer.objectives import AtTime, Objective

TEMPLATE = "describe the picture : {}"


@dataclass(frozen=True)
class Backwards(Objective):
    """x_t = t x_0 + (1 - t) noise, t in (0, 1), drawn the later the more tokens there are; target = x_0 - noise."""

    def time(self, u: torch.Tensor, tokens: int) -> torch.Tensor:
        return (u ** (1 + tokens / 4096)).float()

    def time_at(self, share: torch.Tensor) -> torch.Tensor:
        return share.float()

    def path(self, time: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return time, 1 - time

    def target(self, latents: torch.Tensor, noise: torch.Tensor, at: AtTime) -> torch.Tensor:
        return latents - noise

    def weight(self, time: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(time), dtype=torch.float32)

    def describe(self) -> str:
        return "flow from noise to photo"


def objective(scheduler: Mapping[str, Any], markers: Markers) -> Backwards:
    return Backwards()


def normaliser(model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, standard deviation) of the latents, [C, 1, 1] each."""
    config = model.modules["vae"].config
    return tuple(torch.tensor(v, device=model.device)[:, None, None] for v in (config.latents_mean, config.latents_std))


def encode_images(model: Model, pixels: torch.Tensor) -> torch.Tensor:
    mean, std = normaliser(model)
    frames = model.modules["vae"].encode(pixels[:, :, None].to(model.device)).latent_dist.mean
    return (frames[:, :, 0].float() - mean) / std


def tokens(model: Model, encoder: str, captions: Sequence[str]) -> Sequence[torch.Tensor]:
    tokenizer = model.tokenizers["tokenizer"]
    return [tokenizer(TEMPLATE.format(caption), return_tensors="pt").input_ids for caption in captions]


def encode_text(model: Model, encoder: str, tokens: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    def one(ids: torch.Tensor) -> Conditioning:
        features = model.modules[encoder](ids).last_hidden_state.to(model.compute[encoder])
        return Conditioning(features, torch.ones_like(ids, dtype=torch.bool))

    return collate([one(ids) for ids in tokens]).tensors()


def predict(
    model: Model, noised: torch.Tensor, time: torch.Tensor, conditioning: Conditioning, batch: Batch | None
) -> torch.Tensor:
    count, channels, height, width = noised.shape
    rows, columns = height // 2, width // 2
    patches = noised.view(count, channels, rows, 2, columns, 2).permute(0, 2, 4, 1, 3, 5)
    tokens = model.modules["transformer"](
        hidden_states=patches.reshape(count, rows * columns, channels * 4),
        encoder_hidden_states=conditioning.sequence,
        encoder_hidden_states_mask=conditioning.mask,
        timestep=1 - time,
        img_shapes=[[(1, rows, columns)]] * count,
        return_dict=False,
    )[0]
    patches = tokens.view(count, rows, columns, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return -patches.reshape(count, channels, height, width)


@torch.no_grad()
def sample(model: Model, request: SampleRequest, conditioning: Conditioning, negative: Conditioning):
    from PIL import Image

    both, vae = collate([conditioning, negative]), model.modules["vae"]
    size = (1, vae.config.z_dim, request.height // 8, request.width // 8)
    x = torch.randn(size, generator=torch.Generator("cpu").manual_seed(request.seed)).to(model.device)
    guidance = 4.0 if request.guidance is None else request.guidance
    for step in range(request.steps):
        time = torch.full((2,), step / request.steps, device=model.device)
        wanted, unwanted = predict(model, x.expand(2, -1, -1, -1), time, both, None).chunk(2)
        x = x + (unwanted + guidance * (wanted - unwanted)) / request.steps
    mean, std = normaliser(model)
    pixels = vae.decode((x * std + mean)[:, :, None]).sample[0, :, 0]
    return Image.fromarray(((pixels.clamp(-1, 1) + 1) * 127.5).byte().permute(1, 2, 0).cpu().numpy())


def no_gradient(component: str, config: dict, references: bool) -> tuple[str, ...]:
    """The last block's text goes nowhere."""
    last = f"transformer_blocks.{config.get('num_layers', 0) - 1}"
    return (f"{last}.attn.to_add_out", f"{last}.txt_mlp.*") if component == "transformer" else ()


ATTENTION = ("*.attn.to_?", "*.attn.to_out.0", "*.attn.add_?_proj", "*.attn.to_add_out")
FAMILY = base.Family(
    name="third",
    components=(
        base.Component("text_encoder", "transformers", "Qwen2Model", "text_encoder"),
        base.Component("transformer", "diffusers", "QwenImageTransformer2DModel", "denoiser", sensitive=("img_in", "txt_in")),
        base.Component("vae", "diffusers", "AutoencoderKLQwenImage", "vae", sensitive=("*",)),
    ),
    text=base.TextPart(tokens, encode_text),
    images=base.ImagePart(objective, encode_images, predict, sample),
    adapters=base.AdapterPart({"attention": ATTENTION, "attention+mlp": (*ATTENTION, "*_mlp.net.*")}, no_gradient),
    reads=("validation.samples.*.negative",),
    memory=base.MemoryPart(blocks=("transformer_blocks.*",)),
)
