"""The original checkpoints' parameter names against the ones of diffusers and transformers, as data.

Used both ways: single files are read through these tables tensor by tensor, and kohya's adapter files take the original
module names from them. The tables follow from a component's config.json, so they hold for any depth and width.

Sources of the original names: Stability-AI/generative-models (`sgm/modules`), mlfoundations/open_clip (`model.py`),
black-forest-labs/flux (`src/flux/model.py`, `modules/layers.py`, `modules/autoencoder.py`).

The names on the library side are those of the *modules* in transformers >= 5.6, where `CLIPTextModel` lost its inner
`text_model.` and `CLIPTextModelWithProjection` kept it. Files of the diffusers layout follow the version that wrote
them: published SDXL and Flux folders have `text_model.` for both classes, a `CLIPTextModel` saved by transformers 5.6
or later has none. A reader of folders must accept both (one leading `text_model.` more or less); original single files
always have it, and so have kohya's adapter keys.

`T5EncoderModel` lists `encoder.embed_tokens.weight` in its state dict, but it is the parameter `shared.weight`: files
may hold either or both.

Legend: an "original" is a name in the original checkpoint, a "part" is a name in the library's module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from trainer.errors import UserError

Config = Mapping[str, Any]
Shape = tuple[int, ...]

SDXL_PREFIXES: dict[str, tuple[str, ...]] = {
    "unet": ("model.diffusion_model.",),
    "text_encoder": ("conditioner.embedders.0.transformer.",),
    "text_encoder_2": ("conditioner.embedders.1.model.",),
    "vae": ("first_stage_model.",),
}
FLUX_PREFIXES: dict[str, tuple[str, ...]] = {"transformer": ("model.diffusion_model.",)}

# Tensors that files hold beside the weights and that say nothing a loader needs: fnmatch patterns on the full name.
# `edm_mean`, `edm_std` (Playground 2.5), `edm_vpred.*` (CosXL) and `scaled_fp8` are missing on purpose: they change what the
# weights mean.
SDXL_HARMLESS = (
    # the objective's markers, read apart from the weights
    "v_pred",
    "*.v_pred",
    "ztsnr",
    "*.ztsnr",
    # the training script's own: average, schedule, the autoencoder's discriminator
    "model_ema.*",
    "denoiser.sigmas",
    "denoiser.log_sigmas",
    "betas",
    "alphas_cumprod*",
    "sqrt_*alphas_cumprod",
    "sqrt_recipm1_alphas_cumprod",
    "log_one_minus_alphas_cumprod",
    "posterior_*",
    "loss.*",
    "first_stage_model.loss.*",
    # buffers and contrastive heads of the text encoders
    "*.position_ids",
    "*.attn_mask",
    "logit_scale",
    "*.logit_scale",
    "text_projection.weight",
    "conditioner.embedders.0.transformer.text_projection*",
)
FLUX_HARMLESS = (
    "*.position_ids",
    "logit_scale",
    "*.logit_scale",
    "*text_projection.weight",
    # a whole CLIP given as the text encoder
    "vision_model.*",
    "visual_projection.weight",
    # the sentencepiece model inside single-file T5 encoders
    "spiece_model",
)


@dataclass(frozen=True)
class Link:
    """One tensor of the original checkpoint and the module parameters it becomes.

    original: full name, without the component's prefix, e.g. "double_blocks.0.img_attn.qkv.weight".
    parts: full parameter names whose rows, concatenated, are the original's rows.
    op: "rows" (plain concatenation along dim 0; with one part a rename), "swap_halves" (the two halves of the rows
    change places: shift and scale of Flux's last norm), "transpose" ([K, N] in the original, [N, K] in the module),
    "squeeze" (a 1x1 convolution [N, K, 1, 1] in the original, a Linear [N, K] in the module).
    """

    original: str
    parts: tuple[str, ...]
    op: str = "rows"


def join_parts(link: Link, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The original checkpoint's tensor from the module's, in the order of `link.parts`."""
    joined = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    if link.op == "swap_halves":
        return torch.cat(joined.chunk(2)[::-1])
    if link.op == "transpose":
        return joined.t()
    return joined[..., None, None] if link.op == "squeeze" else joined


def split_original(link: Link, original: torch.Tensor, rows: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """The module's tensors from the original checkpoint's; `rows` of each part. Inverse of `join_parts`."""
    if link.op == "swap_halves":
        original = torch.cat(original.chunk(2)[::-1])
    elif link.op == "transpose":
        original = original.t()
    elif link.op == "squeeze":
        original = original.flatten(1)
    return original.split(list(rows)) if len(rows) > 1 else (original,)


@dataclass
class _Table:
    """Links, and the shape of every module parameter, as they are laid down layer by layer."""

    links: list[Link] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)

    def add(self, original: str, parts: Mapping[str, Shape], op: str = "rows") -> None:
        self.links.append(Link(original, tuple(parts), op))
        self.shapes |= parts

    def layer(self, original: str, part: str, shape: Shape, bias: bool = True, op: str = "rows") -> None:
        """A Linear, convolution, norm or embedding: `.weight` of `shape`, `.bias` of its rows."""
        self.add(f"{original}.weight", {f"{part}.weight": shape}, op)
        if bias:
            self.add(f"{original}.bias", {f"{part}.bias": shape[:1]})

    def fused(self, weight: str, bias: str, outputs: Mapping[str, int], inputs: int) -> None:
        """Linears whose rows the original keeps in one tensor; `outputs`: rows by module name."""
        self.add(weight, {f"{part}.weight": (rows, inputs) for part, rows in outputs.items()})
        self.add(bias, {f"{part}.bias": (rows,) for part, rows in outputs.items()})


def sdxl_unet_links(config: Config) -> list[Link]:
    """UNet2DConditionModel of SDXL, original prefix `model.diffusion_model.`."""
    return _sdxl_unet(config).links


def vae_links(config: Config) -> list[Link]:
    """AutoencoderKL, original prefix `first_stage_model.` (SDXL) or none (Flux' ae.safetensors)."""
    return _vae(config).links


def clip_l_links(config: Config) -> list[Link]:
    """CLIPTextModel, original prefix `conditioner.embedders.0.transformer.`; only the inner `text_model.` goes."""
    return _clip(config, "").links


def open_clip_links(config: Config) -> list[Link]:
    """CLIPTextModelWithProjection, original prefix `conditioner.embedders.1.model.`."""
    return _open_clip(config).links


def flux_transformer_links(config: Config) -> list[Link]:
    """FluxTransformer2DModel, original prefix none or `model.diffusion_model.`."""
    return _flux(config).links


def parameter_shapes(class_name: str, config: Config) -> dict[str, Shape]:
    """Name and shape of every parameter of a diffusers or transformers class, without importing either."""
    return _TABLES[class_name](config).shapes


def _levels(value: int | Sequence[int], levels: int) -> list[int]:
    return [value] * levels if isinstance(value, int) else list(value)


def _sdxl_unet(config: Config) -> _Table:
    table = _Table()
    channels = list(config["block_out_channels"])
    levels = len(channels)
    layers = _levels(config["layers_per_block"], levels)
    depths = _levels(config["transformer_layers_per_block"], levels)
    contexts = _levels(config["cross_attention_dim"], levels)
    linear = config.get("use_linear_projection", False)
    embedding = channels[0] * 4

    def resnet(original: str, part: str, inputs: int, outputs: int) -> None:
        table.layer(f"{original}.in_layers.0", f"{part}.norm1", (inputs,))
        table.layer(f"{original}.in_layers.2", f"{part}.conv1", (outputs, inputs, 3, 3))
        table.layer(f"{original}.emb_layers.1", f"{part}.time_emb_proj", (outputs, embedding))
        table.layer(f"{original}.out_layers.0", f"{part}.norm2", (outputs,))
        table.layer(f"{original}.out_layers.3", f"{part}.conv2", (outputs, outputs, 3, 3))
        if inputs != outputs:
            table.layer(f"{original}.skip_connection", f"{part}.conv_shortcut", (outputs, inputs, 1, 1))

    def transformer(original: str, part: str, level: int) -> None:
        width, context = channels[level], contexts[level]

        def same(name: str, shape: Shape, bias: bool = True) -> None:
            table.layer(f"{original}.{name}", f"{part}.{name}", shape, bias)

        projection = (width, width) if linear else (width, width, 1, 1)
        same("norm", (width,))
        same("proj_in", projection)
        for block in (f"transformer_blocks.{i}" for i in range(depths[level])):
            for attention, inputs in (("attn1", width), ("attn2", context)):
                same(f"{block}.{attention}.to_q", (width, width), bias=False)
                same(f"{block}.{attention}.to_k", (width, inputs), bias=False)
                same(f"{block}.{attention}.to_v", (width, inputs), bias=False)
                same(f"{block}.{attention}.to_out.0", (width, width))
            same(f"{block}.ff.net.0.proj", (8 * width, width))  # GEGLU: values and gates
            same(f"{block}.ff.net.2", (width, 4 * width))
            for norm in ("norm1", "norm2", "norm3"):
                same(f"{block}.{norm}", (width,))
        same("proj_out", projection)

    table.layer("time_embed.0", "time_embedding.linear_1", (embedding, channels[0]))
    table.layer("time_embed.2", "time_embedding.linear_2", (embedding, embedding))
    if config.get("addition_embed_type") == "text_time":
        inputs = config["projection_class_embeddings_input_dim"]
        table.layer("label_emb.0.0", "add_embedding.linear_1", (embedding, inputs))
        table.layer("label_emb.0.2", "add_embedding.linear_2", (embedding, embedding))
    table.layer("input_blocks.0.0", "conv_in", (channels[0], config["in_channels"], 3, 3))

    # The original numbers its blocks without levels: one for every resnet, one more for every change of resolution.
    width, skips, index = channels[0], [channels[0]], count(1)
    for level, (kind, outputs) in enumerate(zip(config["down_block_types"], channels, strict=True)):
        for layer in range(layers[level]):
            original = f"input_blocks.{next(index)}"
            resnet(f"{original}.0", f"down_blocks.{level}.resnets.{layer}", width, outputs)
            if "CrossAttn" in kind:
                transformer(f"{original}.1", f"down_blocks.{level}.attentions.{layer}", level)
            width = outputs
            skips.append(width)
        if level < levels - 1:
            part = f"down_blocks.{level}.downsamplers.0.conv"
            table.layer(f"input_blocks.{next(index)}.0.op", part, (width, width, 3, 3))
            skips.append(width)

    resnet("middle_block.0", "mid_block.resnets.0", width, width)
    transformer("middle_block.1", "mid_block.attentions.0", levels - 1)
    resnet("middle_block.2", "mid_block.resnets.1", width, width)

    index = count(0)
    for block, kind in enumerate(config["up_block_types"]):
        level = levels - 1 - block
        attends = "CrossAttn" in kind
        for layer in range(layers[level] + 1):
            original = f"output_blocks.{next(index)}"
            resnet(f"{original}.0", f"up_blocks.{block}.resnets.{layer}", width + skips.pop(), channels[level])
            width = channels[level]
            if attends:
                transformer(f"{original}.1", f"up_blocks.{block}.attentions.{layer}", level)
            if layer == layers[level] and level > 0:
                part = f"up_blocks.{block}.upsamplers.0.conv"
                table.layer(f"{original}.{2 if attends else 1}.conv", part, (width, width, 3, 3))

    table.layer("out.0", "conv_norm_out", (width,))
    table.layer("out.2", "conv_out", (config["out_channels"], width, 3, 3))
    return table


def _vae(config: Config) -> _Table:
    table = _Table()
    channels, latent = list(config["block_out_channels"]), config["latent_channels"]
    layers, top = config["layers_per_block"], len(channels) - 1

    def resnet(original: str, part: str, inputs: int, outputs: int) -> None:
        for norm, conv, width in (("norm1", "conv1", inputs), ("norm2", "conv2", outputs)):
            table.layer(f"{original}.{norm}", f"{part}.{norm}", (width,))
            table.layer(f"{original}.{conv}", f"{part}.{conv}", (outputs, width, 3, 3))
        if inputs != outputs:
            table.layer(f"{original}.nin_shortcut", f"{part}.conv_shortcut", (outputs, inputs, 1, 1))

    def same(name: str, shape: Shape) -> None:
        table.layer(name, name, shape)

    def middle(side: str, width: int) -> None:
        resnet(f"{side}.mid.block_1", f"{side}.mid_block.resnets.0", width, width)
        resnet(f"{side}.mid.block_2", f"{side}.mid_block.resnets.1", width, width)
        if config.get("mid_block_add_attention", True):
            original, part = f"{side}.mid.attn_1", f"{side}.mid_block.attentions.0"
            table.layer(f"{original}.norm", f"{part}.group_norm", (width,))
            for theirs, ours in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("proj_out", "to_out.0")):
                table.layer(f"{original}.{theirs}", f"{part}.{ours}", (width, width), op="squeeze")

    same("encoder.conv_in", (channels[0], config["in_channels"], 3, 3))
    width = channels[0]
    for level, outputs in enumerate(channels):
        for layer in range(layers):
            part = f"encoder.down_blocks.{level}.resnets.{layer}"
            resnet(f"encoder.down.{level}.block.{layer}", part, width, outputs)
            width = outputs
        if level < top:
            part = f"encoder.down_blocks.{level}.downsamplers.0.conv"
            table.layer(f"encoder.down.{level}.downsample.conv", part, (width, width, 3, 3))
    middle("encoder", width)
    table.layer("encoder.norm_out", "encoder.conv_norm_out", (width,))
    same("encoder.conv_out", (2 * latent, width, 3, 3))  # mean and log variance
    if config.get("use_quant_conv", True):
        same("quant_conv", (2 * latent, 2 * latent, 1, 1))

    if config.get("use_post_quant_conv", True):
        same("post_quant_conv", (latent, latent, 1, 1))
    same("decoder.conv_in", (width, latent, 3, 3))
    middle("decoder", width)
    # The original counts the decoder's levels by resolution as well, so from the outside in.
    for level in range(top, -1, -1):
        block = top - level
        for layer in range(layers + 1):
            part = f"decoder.up_blocks.{block}.resnets.{layer}"
            resnet(f"decoder.up.{level}.block.{layer}", part, width, channels[level])
            width = channels[level]
        if level > 0:
            part = f"decoder.up_blocks.{block}.upsamplers.0.conv"
            table.layer(f"decoder.up.{level}.upsample.conv", part, (width, width, 3, 3))
    table.layer("decoder.norm_out", "decoder.conv_norm_out", (width,))
    same("decoder.conv_out", (config["out_channels"], width, 3, 3))
    return table


def _clip(config: Config, inner: str) -> _Table:
    """transformers' own names; `inner` is the module's prefix where the file has `text_model.`."""
    table = _Table()
    width, hidden = config["hidden_size"], config["intermediate_size"]

    def same(name: str, shape: Shape, bias: bool = True) -> None:
        table.layer(f"text_model.{name}", f"{inner}{name}", shape, bias)

    same("embeddings.token_embedding", (config["vocab_size"], width), bias=False)
    same("embeddings.position_embedding", (config["max_position_embeddings"], width), bias=False)
    for layer in (f"encoder.layers.{i}" for i in range(config["num_hidden_layers"])):
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            same(f"{layer}.self_attn.{projection}", (width, width))
        same(f"{layer}.layer_norm1", (width,))
        same(f"{layer}.mlp.fc1", (hidden, width))
        same(f"{layer}.mlp.fc2", (width, hidden))
        same(f"{layer}.layer_norm2", (width,))
    same("final_layer_norm", (width,))
    return table


def _open_clip(config: Config) -> _Table:
    table = _Table()
    width, hidden = config["hidden_size"], config["intermediate_size"]
    embeddings = "text_model.embeddings"
    table.layer("token_embedding", f"{embeddings}.token_embedding", (config["vocab_size"], width), bias=False)
    positions = (config["max_position_embeddings"], width)
    table.add("positional_embedding", {f"{embeddings}.position_embedding.weight": positions})
    for i in range(config["num_hidden_layers"]):
        original, part = f"transformer.resblocks.{i}", f"text_model.encoder.layers.{i}"
        attention = f"{original}.attn"
        outputs = {f"{part}.self_attn.{name}_proj": width for name in "qkv"}
        table.fused(f"{attention}.in_proj_weight", f"{attention}.in_proj_bias", outputs, width)
        table.layer(f"{attention}.out_proj", f"{part}.self_attn.out_proj", (width, width))
        table.layer(f"{original}.ln_1", f"{part}.layer_norm1", (width,))
        table.layer(f"{original}.ln_2", f"{part}.layer_norm2", (width,))
        table.layer(f"{original}.mlp.c_fc", f"{part}.mlp.fc1", (hidden, width))
        table.layer(f"{original}.mlp.c_proj", f"{part}.mlp.fc2", (width, hidden))
    table.layer("ln_final", "text_model.final_layer_norm", (width,))
    table.add("text_projection", {"text_projection.weight": (config["projection_dim"], width)}, "transpose")
    return table


def _t5(config: Config) -> _Table:
    table = _Table()
    width, hidden = config["d_model"], config["d_ff"]
    heads, inner = config["num_heads"], config["num_heads"] * config["d_kv"]
    gated = config["feed_forward_proj"].startswith("gated")

    def same(name: str, shape: Shape) -> None:
        table.layer(name, name, shape, bias=False)

    same("shared", (config["vocab_size"], width))
    for i in range(config["num_layers"]):
        attention, feed = f"encoder.block.{i}.layer.0", f"encoder.block.{i}.layer.1"
        for name in "qkv":
            same(f"{attention}.SelfAttention.{name}", (inner, width))
        same(f"{attention}.SelfAttention.o", (width, inner))
        if i == 0:  # later blocks add the first block's bias
            buckets = config["relative_attention_num_buckets"]
            same(f"{attention}.SelfAttention.relative_attention_bias", (buckets, heads))
        same(f"{attention}.layer_norm", (width,))
        for name in ("wi_0", "wi_1") if gated else ("wi",):
            same(f"{feed}.DenseReluDense.{name}", (hidden, width))
        same(f"{feed}.DenseReluDense.wo", (width, hidden))
        same(f"{feed}.layer_norm", (width,))
    same("encoder.final_layer_norm", (width,))
    return table


def _flux(config: Config) -> _Table:
    table = _Table()
    head = config["attention_head_dim"]
    width = config["num_attention_heads"] * head
    inputs = config["in_channels"]

    def embedder(original: str, part: str, inputs: int) -> None:
        table.layer(f"{original}.in_layer", f"time_text_embed.{part}.linear_1", (width, inputs))
        table.layer(f"{original}.out_layer", f"time_text_embed.{part}.linear_2", (width, width))

    def qk_norm(original: str, query: str, key: str) -> None:
        table.add(f"{original}.query_norm.scale", {f"{query}.weight": (head,)})
        table.add(f"{original}.key_norm.scale", {f"{key}.weight": (head,)})

    embedder("time_in", "timestep_embedder", 256)  # width of the sinusoidal embedding, fixed in both codes
    if config["guidance_embeds"]:
        embedder("guidance_in", "guidance_embedder", 256)
    embedder("vector_in", "text_embedder", config["pooled_projection_dim"])
    table.layer("txt_in", "context_embedder", (width, config["joint_attention_dim"]))
    table.layer("img_in", "x_embedder", (width, inputs))

    streams = (
        # original stream, modulation, feed-forward, q/k/v, output, norms of q and k
        ("img", "norm1", "ff", ("to_q", "to_k", "to_v"), "to_out.0", ("norm_q", "norm_k")),
        ("txt", "norm1_context", "ff_context", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out",
         ("norm_added_q", "norm_added_k")),
    )  # fmt: skip
    for i in range(config["num_layers"]):
        for stream, modulation, feed, qkv, output, norms in streams:
            original, part = f"double_blocks.{i}.{stream}", f"transformer_blocks.{i}"
            table.layer(f"{original}_mod.lin", f"{part}.{modulation}.linear", (6 * width, width))
            outputs = {f"{part}.attn.{name}": width for name in qkv}
            table.fused(f"{original}_attn.qkv.weight", f"{original}_attn.qkv.bias", outputs, width)
            qk_norm(f"{original}_attn.norm", *(f"{part}.attn.{norm}" for norm in norms))
            table.layer(f"{original}_attn.proj", f"{part}.attn.{output}", (width, width))
            table.layer(f"{original}_mlp.0", f"{part}.{feed}.net.0.proj", (4 * width, width))
            table.layer(f"{original}_mlp.2", f"{part}.{feed}.net.2", (width, 4 * width))

    for i in range(config["num_single_layers"]):
        original, part = f"single_blocks.{i}", f"single_transformer_blocks.{i}"
        table.layer(f"{original}.modulation.lin", f"{part}.norm.linear", (3 * width, width))
        outputs = {f"{part}.attn.{name}": width for name in ("to_q", "to_k", "to_v")} | {f"{part}.proj_mlp": 4 * width}
        table.fused(f"{original}.linear1.weight", f"{original}.linear1.bias", outputs, width)
        qk_norm(f"{original}.norm", f"{part}.attn.norm_q", f"{part}.attn.norm_k")
        table.layer(f"{original}.linear2", f"{part}.proj_out", (width, 5 * width))

    # The original's last modulation gives (shift, scale), diffusers' gives (scale, shift).
    for leaf, shape in (("weight", (2 * width, width)), ("bias", (2 * width,))):
        table.add(f"final_layer.adaLN_modulation.1.{leaf}", {f"norm_out.linear.{leaf}": shape}, "swap_halves")
    outputs = config.get("patch_size", 1) ** 2 * (config.get("out_channels") or inputs)
    table.layer("final_layer.linear", "proj_out", (outputs, width))
    return table


_CLIP_DEFAULTS: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 2048, "max_position_embeddings": 77, "num_hidden_layers": 12,
    "vocab_size": 49408,
}  # fmt: skip
# What the tables read, as the classes take it where a config.json leaves it out.
DEFAULTS: dict[str, dict[str, Any]] = {
    "UNet2DConditionModel": {
        "block_out_channels": [320, 640, 1280, 1280], "cross_attention_dim": 1280, "in_channels": 4,
        "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"], "layers_per_block": 2, "out_channels": 4,
        "transformer_layers_per_block": 1, "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
    },
    "FluxTransformer2DModel": {
        "attention_head_dim": 128, "guidance_embeds": False, "in_channels": 64, "joint_attention_dim": 4096,
        "num_attention_heads": 24, "num_layers": 19, "num_single_layers": 38, "pooled_projection_dim": 768,
    },
    "AutoencoderKL": {
        "block_out_channels": [64], "in_channels": 3, "latent_channels": 4, "layers_per_block": 1, "out_channels": 3,
    },
    "CLIPTextModel": _CLIP_DEFAULTS,
    "CLIPTextModelWithProjection": {**_CLIP_DEFAULTS, "projection_dim": 512},
    "T5EncoderModel": {
        "d_ff": 2048, "d_kv": 64, "d_model": 512, "feed_forward_proj": "relu", "num_heads": 8, "num_layers": 6,
        "relative_attention_num_buckets": 32, "vocab_size": 32128,
    },
}  # fmt: skip
_TABLES: dict[str, Callable[[Config], _Table]] = {
    "UNet2DConditionModel": _sdxl_unet,
    "FluxTransformer2DModel": _flux,
    "AutoencoderKL": _vae,
    "CLIPTextModel": lambda config: _clip(config, ""),
    "CLIPTextModelWithProjection": _open_clip,
    "T5EncoderModel": _t5,
}


def infer_config(kind: str, shapes: Mapping[str, Shape], base: dict) -> dict:
    """`base` with the widths and depths of an original single file.

    kind: the component's name in the pipeline. shapes: by original name, without the component's prefix.
    What shapes cannot say (activations, head counts, norm groups) stays as in `base`, the published model's config;
    heads keep the published head size. Files that do not have the original names give `base` unchanged.
    Raises UserError where the file has a shape that no config can be read from.
    """
    readers: tuple[tuple[str, str, Callable[[Mapping[str, Shape], dict], dict]], ...] = (
        ("unet", "input_blocks.0.0.weight", _infer_unet),
        ("transformer", "double_blocks.0.img_attn.norm.query_norm.scale", _infer_flux),
        ("vae", "encoder.mid.block_1.conv1.weight", _infer_vae),
        ("text_encoder", "text_model.embeddings.position_embedding.weight", _infer_clip),
        ("text_encoder_2", "positional_embedding", _infer_open_clip),
        ("text_encoder_2", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", _infer_t5),
    )
    for component, witness, read in readers:
        if kind == component and witness in shapes:
            return base | read(shapes, base)
    return dict(base)


def _how_many(shapes: Mapping[str, Shape], prefix: str) -> int:
    """Length of the list of modules `prefix`0, `prefix`1, ..."""
    return len({key.removeprefix(prefix).split(".")[0] for key in shapes if key.startswith(prefix)})


def _infer_unet(shapes: Mapping[str, Shape], base: dict) -> dict:
    channels, attends, depths, layers = [], [], [], []
    context, linear = base["cross_attention_dim"], base["use_linear_projection"]
    for level in range(_how_many(shapes, "input_blocks.")):  # more than there are levels: stops at the deepest
        start = 1 + sum(layers) + level
        end = start
        while f"input_blocks.{end}.0.in_layers.2.weight" in shapes:
            end += 1
        if end == start:
            break
        attention = f"input_blocks.{start}.1"
        layers.append(end - start)
        channels.append(shapes[f"input_blocks.{start}.0.in_layers.2.weight"][0])
        depths.append(_how_many(shapes, f"{attention}.transformer_blocks."))
        attends.append(depths[-1] > 0)
        if attends[-1]:
            context = shapes[f"{attention}.transformer_blocks.0.attn2.to_k.weight"][1]
            linear = len(shapes[f"{attention}.proj_in.weight"]) == 2
    if not channels or len(set(layers)) != 1:
        raise UserError(f"the UNet of this file has {layers} resnets a level; give its config with model.config")
    head = base["block_out_channels"][0] // _levels(base["attention_head_dim"], 1)[0]
    inferred = {
        "block_out_channels": channels,
        "attention_head_dim": [max(1, width // head) for width in channels],  # the number of heads, by an old mistake
        "cross_attention_dim": context,
        "down_block_types": [("CrossAttn" if attend else "") + "DownBlock2D" for attend in attends],
        "up_block_types": [("CrossAttn" if attend else "") + "UpBlock2D" for attend in reversed(attends)],
        "in_channels": shapes["input_blocks.0.0.weight"][1],
        "layers_per_block": layers[0],
        "out_channels": shapes["out.2.weight"][0],
        "transformer_layers_per_block": [depth or 1 for depth in depths],
        "use_linear_projection": linear,
    }
    if "label_emb.0.0.weight" in shapes:
        inferred["projection_class_embeddings_input_dim"] = shapes["label_emb.0.0.weight"][1]
    return inferred


def _infer_flux(shapes: Mapping[str, Shape], base: dict) -> dict:
    (head,) = shapes["double_blocks.0.img_attn.norm.query_norm.scale"]
    if head != sum(base["axes_dims_rope"]):
        raise UserError(
            f"the transformer of this file has heads of {head} (the published models: {sum(base['axes_dims_rope'])}), "
            "and how its rotary embedding divides them is written nowhere in it; give its config with model.config"
        )
    width, inputs = shapes["img_in.weight"]
    outputs = shapes["final_layer.linear.weight"][0]
    return {
        "attention_head_dim": head,
        "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
        "in_channels": inputs,
        "joint_attention_dim": shapes["txt_in.weight"][1],
        "num_attention_heads": width // head,
        "num_layers": _how_many(shapes, "double_blocks."),
        "num_single_layers": _how_many(shapes, "single_blocks."),
        "out_channels": None if outputs == inputs else outputs,
        "pooled_projection_dim": shapes["vector_in.in_layer.weight"][1],
    }


def _infer_vae(shapes: Mapping[str, Shape], base: dict) -> dict:
    levels = _how_many(shapes, "encoder.down.")
    return {
        "block_out_channels": [shapes[f"encoder.down.{i}.block.0.conv1.weight"][0] for i in range(levels)],
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "in_channels": shapes["encoder.conv_in.weight"][1],
        "latent_channels": shapes["decoder.conv_in.weight"][1],
        "layers_per_block": _how_many(shapes, "encoder.down.0.block."),
        "mid_block_add_attention": "encoder.mid.attn_1.q.weight" in shapes,
        "out_channels": shapes["decoder.conv_out.weight"][0],
        "use_quant_conv": "quant_conv.weight" in shapes,
        "use_post_quant_conv": "post_quant_conv.weight" in shapes,
    }


def _infer_clip(shapes: Mapping[str, Shape], base: dict) -> dict:
    positions, width = shapes["text_model.embeddings.position_embedding.weight"]
    return {
        "hidden_size": width,
        "intermediate_size": shapes["text_model.encoder.layers.0.mlp.fc1.weight"][0],
        "max_position_embeddings": positions,
        "num_attention_heads": max(1, width * base["num_attention_heads"] // base["hidden_size"]),
        "num_hidden_layers": _how_many(shapes, "text_model.encoder.layers."),
        "vocab_size": shapes["text_model.embeddings.token_embedding.weight"][0],
    }


def _infer_open_clip(shapes: Mapping[str, Shape], base: dict) -> dict:
    positions, width = shapes["positional_embedding"]
    return {
        "hidden_size": width,
        "intermediate_size": shapes["transformer.resblocks.0.mlp.c_fc.weight"][0],
        "max_position_embeddings": positions,
        "num_attention_heads": max(1, width * base["num_attention_heads"] // base["hidden_size"]),
        "num_hidden_layers": _how_many(shapes, "transformer.resblocks."),
        "projection_dim": shapes["text_projection"][1],
        "vocab_size": shapes["token_embedding.weight"][0],
    }


def _infer_t5(shapes: Mapping[str, Shape], base: dict) -> dict:
    attention = "encoder.block.0.layer.0.SelfAttention"
    buckets, heads = shapes[f"{attention}.relative_attention_bias.weight"]
    inner, width = shapes[f"{attention}.q.weight"]
    table = "shared.weight" if "shared.weight" in shapes else "encoder.embed_tokens.weight"
    return {
        "d_ff": shapes["encoder.block.0.layer.1.DenseReluDense.wo.weight"][1],
        "d_kv": inner // heads,
        "d_model": width,
        "num_heads": heads,
        "num_layers": _how_many(shapes, "encoder.block."),
        "relative_attention_num_buckets": buckets,
        "vocab_size": shapes[table][0],
    }
