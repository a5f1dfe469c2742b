"""AutoencoderKLFlux2 of FLUX.2 and FLUX.3: latents of 2 x 2 patches, normalised by statistics in the VAE.

Source of the original names: black-forest-labs/flux2 (`src/flux2/autoencoder.py`).
"""

from collections.abc import Mapping
from typing import Any

import torch

from trainer.models.base import LATENT_SIDE, Component, Model
from trainer.models.names import ComponentConfig, Names, Shape
from trainer.models.shared import vae

COUNTER = "*bn.num_batches_tracked"  # the statistics' counter, in its files
# Defaults of the class for keys missing from config.json.
DEFAULTS = {
    "batch_norm_eps": 1e-4, "block_out_channels": [128, 256, 512, 512], "in_channels": 3, "latent_channels": 32,
    "layers_per_block": 2, "out_channels": 3,
}  # fmt: skip


def patches(latents: torch.Tensor) -> torch.Tensor:
    """[B, C, H, W] -> [B, 4C, H/2, W/2]: each 2 x 2 patch one latent, channel-major."""
    return torch.pixel_unshuffle(latents, 2)


def statistics(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, standard deviation) of each channel of the patches, fp32 [1, 4C, 1, 1]."""
    mean, variance = (each.float().view(1, -1, 1, 1) for each in (module.bn.running_mean, module.bn.running_var))
    return mean, torch.sqrt(variance + module.config.batch_norm_eps)


def encode_images(model: Model, pixels: torch.Tensor) -> torch.Tensor:
    """Latents [B, 128, H/16, W/16] of pixels [B, 3, H, W] from -1 to 1: the posterior's mean in patches, normalised."""
    module = model.modules["vae"]
    latents = patches(vae.posterior_mean(module, pixels.to(model.device)))
    mean, deviation = statistics(module)
    return (latents - mean) / deviation


def decode(model: Model, latents: torch.Tensor) -> torch.Tensor:
    """Pixels [B, 3, H, W] from -1 to 1 of normalised latents [B, 128, H/16, W/16]."""
    module = model.modules["vae"]
    mean, deviation = statistics(module)
    latents = torch.pixel_shuffle(latents * deviation + mean, 2)
    height, width = (LATENT_SIDE * side for side in latents.shape[-2:])
    return vae.for_size(module, width, height).decode(latents, return_dict=False)[0]


def names(config: ComponentConfig) -> Names:
    """AutoencoderKLFlux2, with the statistics of its latents."""
    names = vae.vae_names(config, quant="encoder.quant_conv", post_quant="decoder.post_quant_conv")
    for name in ("bn.running_mean", "bn.running_var"):
        names.add(name, {name: (4 * config["latent_channels"],)})
    return names


def infer(shapes: Mapping[str, Shape], base: dict) -> dict:
    """Config values from the tensors' shapes; {} for tensors of something else."""
    config = vae.infer_vae(shapes, base)
    if config:
        decoder = [shapes[f"decoder.up.{i}.block.0.conv2.weight"][0] for i in range(len(config["block_out_channels"]))]
        config["decoder_block_out_channels"] = None if decoder == config["block_out_channels"] else decoder
        config["use_quant_conv"] = "encoder.quant_conv.weight" in shapes
        config["use_post_quant_conv"] = "decoder.post_quant_conv.weight" in shapes
    return config


COMPONENT = Component(
    "vae", "diffusers", "AutoencoderKLFlux2", "vae", ("*",), names, DEFAULTS, infer, ("vae.",), "flux2-vae.safetensors"
)
