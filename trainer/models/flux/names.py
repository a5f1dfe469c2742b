"""The names of Flux's transformer in the original layout, and what its files hold beside weights."""

import re
from collections.abc import Iterator, Mapping, Sequence

from trainer.base.types import KeyStyle, Link
from trainer.models.names import SWAP, ComponentConfig, Names, Shape, how_many
from trainer.models.shared import flow

# Defaults of the class for keys missing from config.json.
DEFAULTS = {
    "attention_head_dim": 128, "guidance_embeds": False, "in_channels": 64, "joint_attention_dim": 4096,
    "num_attention_heads": 24, "num_layers": 19, "num_single_layers": 38, "pooled_projection_dim": 768,
}  # fmt: skip

TIMES = 256  # width of the sinusoidal embedding, fixed in both codes
# The last: what a whole CLIP given as the text encoder has, and the sentencepiece model inside single-file T5 encoders.
HARMLESS = (
    "*.position_ids", "logit_scale", "*.logit_scale",
    "*text_projection.weight",
    "vision_model.*", "visual_projection.weight", "spiece_model",
)  # fmt: skip


def other_names(links: Sequence[Link]) -> Iterator[Link]:
    """The modules that XLabs trains, under its names: a block's attention is a processor, and linear1 has q, k and v alone.
    Also OneTrainer's name of the embedder."""
    for link in links:
        if match := re.fullmatch(r"(double_blocks\.\d+)\.(img|txt)_attn\.(qkv|proj)", link.original):
            yield Link(f"{match[1]}.processor.{match[3]}_lora{1 if match[2] == 'img' else 2}", link.parts)
        elif match := re.fullmatch(r"(single_blocks\.\d+)\.linear([12])", link.original):
            name, parts = ("qkv", link.parts[:3]) if match[2] == "1" else ("proj", link.parts)
            yield from (Link(f"{match[1]}.{between}{name}", parts) for between in ("processor.", ""))
        elif link.original == "img_in":
            yield Link("img_in.proj", link.parts)


# Names in adapter files. OneTrainer counts T5 as the second encoder (modules/util/convert/lora/convert_flux_lora.py),
# sd-scripts as the third.
KEY_STYLES = (
    KeyStyle("OneTrainer", "transformer", "lora_transformer_", flat=True),
    KeyStyle("OneTrainer", "text_encoder_2", "lora_te2_", flat=True),
    KeyStyle("diffusers", "text_encoder", "text_encoder.text_model."),
    KeyStyle("ComfyUI generic", "text_encoder", "text_encoders.clip_l.transformer.text_model."),
    KeyStyle("ComfyUI generic", "text_encoder_2", "text_encoders.t5xxl.transformer."),
    KeyStyle("ComfyUI generic", "text_encoder", "lora_te_text_model_", flat=True),
    KeyStyle("OneTrainer with original names", "text_encoder", "clip_l.text_model."),
    KeyStyle("OneTrainer with original names", "text_encoder_2", "t5."),
    KeyStyle("OneTrainer with original names", "transformer", "transformer.", original=True, links=other_names),
    KeyStyle("XLabs", "transformer", "", original=True, links=other_names),
    KeyStyle("XLabs", "transformer", "diffusion_model.", original=True, links=other_names),
)


def transformer_names(config: ComponentConfig) -> Names:
    """FluxTransformer2DModel."""
    names = Names()
    head = config["attention_head_dim"]
    width = config["num_attention_heads"] * head
    inputs = config["in_channels"]

    names.embedder("time_in", "time_text_embed.timestep_embedder", TIMES, width)
    if config["guidance_embeds"]:
        names.embedder("guidance_in", "time_text_embed.guidance_embedder", TIMES, width)
    names.embedder("vector_in", "time_text_embed.text_embedder", config["pooled_projection_dim"], width)
    names.layer("txt_in", "context_embedder", (width, config["joint_attention_dim"]))
    names.layer("img_in", "x_embedder", (width, inputs))

    for i in range(config["num_layers"]):
        for stream, suffix, qkv, output, norms in flow.STREAMS:
            original, part = f"double_blocks.{i}.{stream}", f"transformer_blocks.{i}"
            names.layer(f"{original}_mod.lin", f"{part}.norm1{suffix}.linear", (6 * width, width))
            outputs = {f"{part}.attn.{name}": width for name in qkv}
            names.fused(f"{original}_attn.qkv.weight", f"{original}_attn.qkv.bias", outputs, width)
            names.qk_norm(f"{original}_attn.norm", f"{part}.attn", head, *norms)
            names.layer(f"{original}_attn.proj", f"{part}.attn.{output}", (width, width))
            names.layer(f"{original}_mlp.0", f"{part}.ff{suffix}.net.0.proj", (4 * width, width))
            names.layer(f"{original}_mlp.2", f"{part}.ff{suffix}.net.2", (width, 4 * width))

    for i in range(config["num_single_layers"]):
        original, part = f"single_blocks.{i}", f"single_transformer_blocks.{i}"
        names.layer(f"{original}.modulation.lin", f"{part}.norm.linear", (3 * width, width))
        outputs = {f"{part}.attn.{name}": width for name in ("to_q", "to_k", "to_v")} | {f"{part}.proj_mlp": 4 * width}
        names.fused(f"{original}.linear1.weight", f"{original}.linear1.bias", outputs, width)
        names.qk_norm(f"{original}.norm", f"{part}.attn", head)
        names.layer(f"{original}.linear2", f"{part}.proj_out", (width, 5 * width))

    names.layer("final_layer.adaLN_modulation.1", "norm_out.linear", (2 * width, width), op=SWAP)
    outputs = (config.get("patch_size") or 1) ** 2 * (config.get("out_channels") or inputs)
    names.layer("final_layer.linear", "proj_out", (outputs, width))
    return names


def infer_transformer(shapes: Mapping[str, Shape], base: dict) -> dict:
    """`flow.infer_transformer`, and the value that FLUX.1 alone has."""
    config = flow.infer_transformer(shapes, base)
    return config and config | {"pooled_projection_dim": shapes["vector_in.in_layer.weight"][1]}


def infer_t5(shapes: Mapping[str, Shape], base: dict) -> dict:
    """Config values of T5's encoder from the shapes of its tensors, which files name as the library does."""
    attention = "encoder.block.0.layer.0.SelfAttention"
    if f"{attention}.relative_attention_bias.weight" not in shapes:
        return {}
    buckets, heads = shapes[f"{attention}.relative_attention_bias.weight"]
    inner, width = shapes[f"{attention}.q.weight"]
    table = "shared.weight" if "shared.weight" in shapes else "encoder.embed_tokens.weight"
    return {
        "d_ff": shapes["encoder.block.0.layer.1.DenseReluDense.wo.weight"][1],
        "d_kv": inner // heads,
        "d_model": width,
        "num_heads": heads,
        "num_layers": how_many(shapes, "encoder.block."),
        "relative_attention_num_buckets": buckets,
        "vocab_size": shapes[table][0],
    }
