"""AutoencoderKL: the component, its names in original files, and images in tiles."""

from collections.abc import Mapping
from typing import Any

import torch

from trainer.base import tiles
from trainer.models.base import Component, Model
from trainer.models.names import ComponentConfig, Names, Shape, how_many

# Defaults of the class for keys missing from config.json.
DEFAULTS = {"block_out_channels": [64], "in_channels": 3, "latent_channels": 4, "layers_per_block": 1, "out_channels": 3}


def vae_names(config: ComponentConfig, *, quant: str = "quant_conv", post_quant: str = "post_quant_conv") -> Names:
    """The VAE's names and shapes. quant, post_quant: original names of the convolutions between encoder, latents, decoder."""
    names = Names()
    channels, latent = list(config["block_out_channels"]), config["latent_channels"]
    layers, top = config["layers_per_block"], len(channels) - 1

    def resnet(original: str, part: str, inputs: int, outputs: int) -> None:
        for norm, conv, width in (("norm1", "conv1", inputs), ("norm2", "conv2", outputs)):
            names.layer(f"{original}.{norm}", f"{part}.{norm}", (width,))
            names.layer(f"{original}.{conv}", f"{part}.{conv}", (outputs, width, 3, 3))
        if inputs != outputs:
            names.layer(f"{original}.nin_shortcut", f"{part}.conv_shortcut", (outputs, inputs, 1, 1))

    def middle(side: str, width: int) -> None:
        resnet(f"{side}.mid.block_1", f"{side}.mid_block.resnets.0", width, width)
        resnet(f"{side}.mid.block_2", f"{side}.mid_block.resnets.1", width, width)
        if config.get("mid_block_add_attention", True):
            original, part = f"{side}.mid.attn_1", f"{side}.mid_block.attentions.0"
            names.layer(f"{original}.norm", f"{part}.group_norm", (width,))
            for theirs, ours in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("proj_out", "to_out.0")):
                names.layer(f"{original}.{theirs}", f"{part}.{ours}", (width, width), op="squeeze")

    def resnets(original: str, part: str, count: int, inputs: int, outputs: int) -> None:
        for layer in range(count):
            resnet(f"{original}.{layer}", f"{part}.{layer}", outputs if layer else inputs, outputs)

    names.same_layer("encoder.conv_in", (channels[0], config["in_channels"], 3, 3))
    width = channels[0]
    for level, outputs in enumerate(channels):
        original, part = f"encoder.down.{level}", f"encoder.down_blocks.{level}"
        resnets(f"{original}.block", f"{part}.resnets", layers, width, outputs)
        width = outputs
        if level < top:
            names.layer(f"{original}.downsample.conv", f"{part}.downsamplers.0.conv", (width, width, 3, 3))
    middle("encoder", width)
    names.layer("encoder.norm_out", "encoder.conv_norm_out", (width,))
    names.same_layer("encoder.conv_out", (2 * latent, width, 3, 3))  # mean and log variance
    if config.get("use_quant_conv", True):
        names.layer(quant, "quant_conv", (2 * latent, 2 * latent, 1, 1))

    if config.get("use_post_quant_conv", True):
        names.layer(post_quant, "post_quant_conv", (latent, latent, 1, 1))
    width = (channels := list(config.get("decoder_block_out_channels") or channels))[-1]
    names.same_layer("decoder.conv_in", (width, latent, 3, 3))
    middle("decoder", width)
    # The original counts the decoder's levels by resolution as well, so from the outside in.
    for level in range(top, -1, -1):
        original, part = f"decoder.up.{level}", f"decoder.up_blocks.{top - level}"
        resnets(f"{original}.block", f"{part}.resnets", layers + 1, width, channels[level])
        width = channels[level]
        if level > 0:
            names.layer(f"{original}.upsample.conv", f"{part}.upsamplers.0.conv", (width, width, 3, 3))
    names.layer("decoder.norm_out", "decoder.conv_norm_out", (width,))
    names.same_layer("decoder.conv_out", (config["out_channels"], width, 3, 3))
    return names


def infer_vae(shapes: Mapping[str, Shape], base: dict) -> dict:
    """Config values from the tensors' shapes; {} for tensors of something else."""
    if "encoder.mid.block_1.conv1.weight" not in shapes:
        return {}
    levels = how_many(shapes, "encoder.down.")
    return {
        "block_out_channels": [shapes[f"encoder.down.{i}.block.0.conv1.weight"][0] for i in range(levels)],
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "in_channels": shapes["encoder.conv_in.weight"][1],
        "latent_channels": shapes["decoder.conv_in.weight"][1],
        "layers_per_block": how_many(shapes, "encoder.down.0.block."),
        "mid_block_add_attention": "encoder.mid.attn_1.q.weight" in shapes,
        "out_channels": shapes["decoder.conv_out.weight"][0],
        "use_quant_conv": "quant_conv.weight" in shapes,
        "use_post_quant_conv": "post_quant_conv.weight" in shapes,
    }


def for_size(module: Any, width: int, height: int) -> Any:
    """The VAE, set up for an image of that size: whole, or in tiles, which diffusers blends where they overlap."""
    side = tiles.side(width, height)
    module.use_tiling = side is not None
    if side is not None:
        module.tile_overlap_factor = tiles.OVERLAP
        module.tile_sample_min_size = side
        module.tile_latent_min_size = side // 2 ** (len(module.config.block_out_channels) - 1)
    return module


def posterior_mean(module: Any, pixels: torch.Tensor) -> torch.Tensor:
    """fp32 [B, C, h, w] of pixels [B, 3, H, W] in [-1, 1]."""
    return for_size(module, pixels.shape[-1], pixels.shape[-2]).encode(pixels).latent_dist.mean.float()


def encode_images(model: Model, pixels: torch.Tensor) -> torch.Tensor:
    """Latents [B, 16, H/8, W/8] of pixels [B, 3, H, W] from -1 to 1: the posterior's mean, shifted and scaled."""
    module = model.modules["vae"]
    mean = posterior_mean(module, pixels.to(model.device))
    return (mean - module.config.shift_factor) * module.config.scaling_factor


def component(prefix: str, file: str) -> Component:
    """The VAE as a component. prefix: before its names in a single file. file: usual name of a file of it alone."""
    return Component("vae", "diffusers", "AutoencoderKL", "vae", ("*",), vae_names, DEFAULTS, infer_vae, (prefix,), file)
