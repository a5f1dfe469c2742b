"""The names of SDXL's UNet in the original layout, and what its single files hold beside weights."""

from collections.abc import Mapping, Sequence
from itertools import count

from trainer.base.errors import UserError
from trainer.base.types import KeyStyle
from trainer.models.names import ComponentConfig, Names, Shape, each_level, how_many

# Defaults of the class for keys missing from config.json.
DEFAULTS = {
    "block_out_channels": [320, 640, 1280, 1280], "cross_attention_dim": 1280, "in_channels": 4,
    "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"], "layers_per_block": 2, "out_channels": 4,
    "transformer_layers_per_block": 1, "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
}  # fmt: skip

# Tensors that files hold beside the weights and that say nothing a loader needs: fnmatch patterns on the full name.
# `edm_mean`, `edm_std` (Playground 2.5), `edm_vpred.*` (CosXL) and `scaled_fp8` are missing on purpose: they change what the
# weights mean.
HARMLESS = (
    # the objective's markers, read apart from the weights
    "v_pred", "*.v_pred", "ztsnr", "*.ztsnr",
    # the training script's own: average, schedule, the autoencoder's discriminator
    "model_ema.*", "denoiser.sigmas", "denoiser.log_sigmas", "betas", "alphas_cumprod*", "sqrt_*alphas_cumprod",
    "log_one_minus_alphas_cumprod", "posterior_*", "loss.*", "first_stage_model.loss.*",
    # buffers and contrastive heads of the text encoders; a whole CLIP given as one
    "*.position_ids", "*.attn_mask", "logit_scale", "*.logit_scale", "text_projection.weight",
    "conditioner.embedders.0.transformer.text_projection*", "vision_model.*", "visual_projection.weight",
)  # fmt: skip

# Names in adapter files. The first encoder's module has no inner `text_model.`, which files of diffusers and ComfyUI have; in
# the second one's it is part of the name.
KEY_STYLES = (
    KeyStyle("diffusers", "text_encoder", "text_encoder.text_model."),
    KeyStyle("ComfyUI generic", "text_encoder", "text_encoders.clip_l.transformer.text_model."),
    KeyStyle("ComfyUI generic", "text_encoder_2", "text_encoders.clip_g.transformer."),
    KeyStyle("ComfyUI generic", "text_encoder", "lora_te_text_model_", flat=True),
    KeyStyle("OneTrainer with original names", "text_encoder", "clip_l.text_model."),
    KeyStyle("OneTrainer with original names", "text_encoder_2", "clip_g."),
)


def unet_names(config: ComponentConfig) -> Names:
    """UNet2DConditionModel of SDXL."""
    if config.get("class_embed_type") == "identity":  # no tensor shows it
        raise UserError("the unet's config.json has class_embed_type = 'identity': steps have no class labels; leave it out")
    unet = _UNet(config)
    names, channels, embedding = unet.names, unet.channels, unet.embedding
    names.layer("time_embed.0", "time_embedding.linear_1", (embedding, channels[0]))
    names.layer("time_embed.2", "time_embedding.linear_2", (embedding, embedding))
    if config.get("addition_embed_type") == "text_time":
        inputs = config["projection_class_embeddings_input_dim"]
        names.layer("label_emb.0.0", "add_embedding.linear_1", (embedding, inputs))
        names.layer("label_emb.0.2", "add_embedding.linear_2", (embedding, embedding))
    names.layer("input_blocks.0.0", "conv_in", (channels[0], config["in_channels"], 3, 3))

    unet.down(config["down_block_types"])
    width = channels[-1]
    unet.resnet("middle_block.0", "mid_block.resnets.0", width, width)
    unet.transformer("middle_block.1", "mid_block.attentions.0", len(channels) - 1)
    unet.resnet("middle_block.2", "mid_block.resnets.1", width, width)
    unet.up(config["up_block_types"])
    names.layer("out.0", "conv_norm_out", (channels[0],))
    names.layer("out.2", "conv_out", (config["out_channels"], channels[0], 3, 3))
    return names


class _UNet:
    """A UNet's blocks, named in order. The original numbers them without levels: one for every resnet, one more for every
    change of resolution. skips: channels of the skip connections that are still open."""

    def __init__(self, config: ComponentConfig) -> None:
        self.names, self.channels = Names(), list(config["block_out_channels"])
        levels = len(self.channels)
        self.layers = each_level(config["layers_per_block"], levels)
        self.depths = each_level(config["transformer_layers_per_block"], levels)
        self.contexts = each_level(config["cross_attention_dim"], levels)
        self.linear = config.get("use_linear_projection", False)
        self.embedding = self.channels[0] * 4
        self.skips: list[int] = [self.channels[0]]

    def resnet(self, original: str, part: str, inputs: int, outputs: int) -> None:
        self.names.layer(f"{original}.in_layers.0", f"{part}.norm1", (inputs,))
        self.names.layer(f"{original}.in_layers.2", f"{part}.conv1", (outputs, inputs, 3, 3))
        self.names.layer(f"{original}.emb_layers.1", f"{part}.time_emb_proj", (outputs, self.embedding))
        self.names.layer(f"{original}.out_layers.0", f"{part}.norm2", (outputs,))
        self.names.layer(f"{original}.out_layers.3", f"{part}.conv2", (outputs, outputs, 3, 3))
        if inputs != outputs:
            self.names.layer(f"{original}.skip_connection", f"{part}.conv_shortcut", (outputs, inputs, 1, 1))

    def transformer(self, original: str, part: str, level: int) -> None:
        width, context = self.channels[level], self.contexts[level]

        def layer(name: str, shape: Shape, bias: bool = True) -> None:
            self.names.layer(f"{original}.{name}", f"{part}.{name}", shape, bias)

        projection = (width, width) if self.linear else (width, width, 1, 1)
        layer("norm", (width,))
        layer("proj_in", projection)
        for block in (f"transformer_blocks.{i}" for i in range(self.depths[level])):
            for attention, inputs in (("attn1", width), ("attn2", context)):
                layer(f"{block}.{attention}.to_q", (width, width), bias=False)
                layer(f"{block}.{attention}.to_k", (width, inputs), bias=False)
                layer(f"{block}.{attention}.to_v", (width, inputs), bias=False)
                layer(f"{block}.{attention}.to_out.0", (width, width))
            layer(f"{block}.ff.net.0.proj", (8 * width, width))  # GEGLU: values and gates
            layer(f"{block}.ff.net.2", (width, 4 * width))
            for norm in ("norm1", "norm2", "norm3"):
                layer(f"{block}.{norm}", (width,))
        layer("proj_out", projection)

    def down(self, kinds: Sequence[str]) -> None:
        width, index = self.channels[0], count(1)
        for level, (kind, outputs) in enumerate(zip(kinds, self.channels, strict=True)):
            for layer in range(self.layers[level]):
                original = f"input_blocks.{next(index)}"
                self.resnet(f"{original}.0", f"down_blocks.{level}.resnets.{layer}", width, outputs)
                if "CrossAttn" in kind:
                    self.transformer(f"{original}.1", f"down_blocks.{level}.attentions.{layer}", level)
                width = outputs
                self.skips.append(width)
            if level < len(self.channels) - 1:
                part = f"down_blocks.{level}.downsamplers.0.conv"
                self.names.layer(f"input_blocks.{next(index)}.0.op", part, (width, width, 3, 3))
                self.skips.append(width)

    def up(self, kinds: Sequence[str]) -> None:
        width, index = self.channels[-1], count(0)
        for block, kind in enumerate(kinds):
            level = len(self.channels) - 1 - block
            attends = "CrossAttn" in kind
            for layer in range(self.layers[level] + 1):
                original = f"output_blocks.{next(index)}"
                inputs = width + self.skips.pop()
                width = self.channels[level]
                self.resnet(f"{original}.0", f"up_blocks.{block}.resnets.{layer}", inputs, width)
                if attends:
                    self.transformer(f"{original}.1", f"up_blocks.{block}.attentions.{layer}", level)
                if layer == self.layers[level] and level > 0:
                    part = f"up_blocks.{block}.upsamplers.0.conv"
                    self.names.layer(f"{original}.{2 if attends else 1}.conv", part, (width, width, 3, 3))


def infer_unet(shapes: Mapping[str, Shape], base: dict) -> dict:
    """Config values from the tensors' shapes; {} for tensors of something else."""
    if "input_blocks.0.0.weight" not in shapes:
        return {}
    channels, depths, layers = [], [], []
    context, linear = base["cross_attention_dim"], base["use_linear_projection"]
    for level in range(how_many(shapes, "input_blocks.")):  # more than there are levels: stops at the deepest
        start = 1 + sum(layers) + level
        end = start
        while f"input_blocks.{end}.0.in_layers.2.weight" in shapes:
            end += 1
        if end == start:
            break
        attention = f"input_blocks.{start}.1"
        layers.append(end - start)
        channels.append(shapes[f"input_blocks.{start}.0.in_layers.2.weight"][0])
        depths.append(how_many(shapes, f"{attention}.transformer_blocks."))
        if depths[-1]:
            context = shapes[f"{attention}.transformer_blocks.0.attn2.to_k.weight"][1]
            linear = len(shapes[f"{attention}.proj_in.weight"]) == 2
    if not channels or len(set(layers)) != 1:
        raise UserError(f"the UNet of this file has {layers} resnets a level; give its config with model.config")
    head = base["block_out_channels"][0] // each_level(base["attention_head_dim"], 1)[0]
    inferred = {
        "block_out_channels": channels,
        "attention_head_dim": [max(1, width // head) for width in channels],  # the number of heads, by an old mistake
        "cross_attention_dim": context,
        "down_block_types": [("CrossAttn" if depth else "") + "DownBlock2D" for depth in depths],
        "up_block_types": [("CrossAttn" if depth else "") + "UpBlock2D" for depth in reversed(depths)],
        "in_channels": shapes["input_blocks.0.0.weight"][1],
        "layers_per_block": layers[0],
        "out_channels": shapes["out.2.weight"][0],
        "transformer_layers_per_block": [depth or 1 for depth in depths],
        "use_linear_projection": linear,
    }
    if "label_emb.0.0.weight" in shapes:
        inferred["projection_class_embeddings_input_dim"] = shapes["label_emb.0.0.weight"][1]
    return inferred


def block_order(name: str) -> tuple[int, ...]:
    """Sort key of the UNet's blocks by name, in the order of a forward pass: in each stage a resnet comes before the
    transformer beside it. diffusers' modules have all transformers of a stage first, and the middle at the end."""
    stage, *parts = name.split(".")
    numbers = [int(part) for part in parts if part.isdigit()]
    of_stage = 0 if stage == "mid_block" else numbers.pop(0)
    return ("down_blocks", "mid_block", "up_blocks").index(stage), of_stage, numbers[0], len(numbers), *numbers[1:]
