"""The names of FLUX.2's transformer in the original layout, and what its files hold beside weights.

Source of the original names: black-forest-labs/flux2 (`src/flux2/model.py`). No layer of the transformer
has a bias.
"""

from collections.abc import Mapping

from trainer.models.names import SWAP, ComponentConfig, Names, Shape
from trainer.models.shared import flow, patched_vae

# Defaults of the class for keys missing from config.json.
DEFAULTS = {
    "attention_head_dim": 128, "axes_dims_rope": [32, 32, 32, 32], "guidance_embeds": True, "in_channels": 128,
    "joint_attention_dim": 15360, "mlp_ratio": 3.0, "num_attention_heads": 48, "num_layers": 8, "num_single_layers": 48,
    "timestep_guidance_channels": 256,
}  # fmt: skip

LAYERS = (9, 18, 27)  # Qwen3's hidden states after so many layers are read; 0: its embeddings
# Layers above the last that is read, the output layer, a counter of the VAE's statistics.
HARMLESS = (
    "*layers.2[789].*", "*layers.[3-9][0-9].*", "lm_head.weight", "*.lm_head.weight", patched_vae.COUNTER,
)  # fmt: skip


def transformer_names(config: ComponentConfig) -> Names:
    """Flux2Transformer2DModel."""
    names = Names(bias=False)
    head, times = config["attention_head_dim"], config["timestep_guidance_channels"]
    width = config["num_attention_heads"] * head
    feed = int(width * config["mlp_ratio"])

    for original, part in (("time_in", "timestep_embedder"), ("guidance_in", "guidance_embedder")):
        if original == "time_in" or config["guidance_embeds"]:
            names.embedder(original, f"time_guidance_embed.{part}", times, width)
    for modulation, count in (("double_stream_modulation_img", 6), ("double_stream_modulation_txt", 6),
                              ("single_stream_modulation", 3)):  # fmt: skip
        names.layer(f"{modulation}.lin", f"{modulation}.linear", (count * width, width))
    names.layer("img_in", "x_embedder", (width, config["in_channels"]))
    names.layer("txt_in", "context_embedder", (width, config["joint_attention_dim"]))

    for i in range(config["num_layers"]):
        for stream, suffix, qkv, output, norms in flow.STREAMS:
            original, part = f"double_blocks.{i}.{stream}", f"transformer_blocks.{i}"
            names.add(f"{original}_attn.qkv.weight", {f"{part}.attn.{name}.weight": (width, width) for name in qkv})
            names.qk_norm(f"{original}_attn.norm", f"{part}.attn", head, *norms)
            names.layer(f"{original}_attn.proj", f"{part}.attn.{output}", (width, width))
            names.layer(f"{original}_mlp.0", f"{part}.ff{suffix}.linear_in", (2 * feed, width))
            names.layer(f"{original}_mlp.2", f"{part}.ff{suffix}.linear_out", (width, feed))

    for i in range(config["num_single_layers"]):
        original, part = f"single_blocks.{i}", f"single_transformer_blocks.{i}.attn"
        names.layer(f"{original}.linear1", f"{part}.to_qkv_mlp_proj", (3 * width + 2 * feed, width))
        names.qk_norm(f"{original}.norm", part, head)
        names.layer(f"{original}.linear2", f"{part}.to_out", (width, width + feed))

    names.layer("final_layer.adaLN_modulation.1", "norm_out.linear", (2 * width, width), op=SWAP)
    outputs = (config.get("patch_size") or 1) ** 2 * (config.get("out_channels") or config["in_channels"])
    names.layer("final_layer.linear", "proj_out", (outputs, width))
    return names


def infer_transformer(shapes: Mapping[str, Shape], base: dict) -> dict:
    """`flow.infer_transformer`, and the values that FLUX.2 alone has."""
    config = flow.infer_transformer(shapes, base)
    if not config:
        return {}
    feed, width = shapes["double_blocks.0.img_mlp.2.weight"][1], shapes["img_in.weight"][0]
    return config | {"mlp_ratio": feed / width, "timestep_guidance_channels": shapes["time_in.in_layer.weight"][1]}
