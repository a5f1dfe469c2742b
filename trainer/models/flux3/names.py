"""The names of FLUX.3's transformer in the original layout, and what its files hold beside weights.

Source of the original names: black-forest-labs/flux-3-image-klein, as `convert_flux3_transformer_checkpoint_to_diffusers` of
diffusers reads them. No layer has a bias.
"""

from collections.abc import Mapping

from trainer.models.names import SWAP, ComponentConfig, Names, Shape, check_head, how_many
from trainer.models.shared import patched_vae

# Defaults of the class for keys missing from config.json.
DEFAULTS = {
    "attention_head_dim": 128, "axes_dims_rope": [32, 32, 32, 32], "cond_in_channels": 128, "flow_map": False,
    "in_channels": 128, "joint_attention_dim": 20480, "mlp_ratio": 3.0, "num_attention_heads": 24, "num_layers": 5,
    "num_single_layers": 28, "timestep_channels": 256,
}  # fmt: skip
LAYERS = tuple(range(4, 33, 4))  # Qwen3-VL's hidden states after so many layers are read
IMAGE, REFERENCES, TEXT = "image", "image_cond", "txt"  # the kinds of tokens
# Layers above the last that is read, what sees images, the output layer, what training alone had.
HARMLESS = (
    "*layers.3[2-9].*", "*visual.*", "lm_head.weight", "*.lm_head.weight", patched_vae.COUNTER, "*repa_projectors.*",
)  # fmt: skip


def transformer_names(config: ComponentConfig) -> Names:
    """Flux3Transformer2DModel."""
    names = Names(bias=False)
    head, times = config["attention_head_dim"], config["timestep_channels"]
    width = config["num_attention_heads"] * head
    feed = int(width * config["mlp_ratio"])

    def blocks(original: str, part: str, count: int) -> None:
        for i in range(count):
            for theirs, ours in (("q_proj", "to_q"), ("k_proj", "to_k"), ("v_proj", "to_v"), ("attn_out", "to_out.0")):
                names.layer(f"{original}.{i}.{theirs}", f"{part}.{i}.attn.{ours}", (width, width))
            names.qk_norm(f"{original}.{i}.norm", f"{part}.{i}.attn", head)
            names.layer(f"{original}.{i}.mlp_in", f"{part}.{i}.ff.linear_in", (2 * feed, width))
            names.layer(f"{original}.{i}.mlp_out", f"{part}.{i}.ff.linear_out", (width, feed))

    for original, part in (("time_in", "timestep_embedder"), ("ref_time_in", "target_timestep_embedder")):
        if original == "time_in" or config["flow_map"]:
            names.embedder(original, part, times, width)
    for modulation in ("early_stream_modulations", "single_stream_modulations"):
        for kind in (IMAGE, REFERENCES, TEXT):
            names.layer(f"{modulation}.{kind}.lin", f"{modulation}.{kind}.linear", (3 * width, width))
    for kind, key in ((IMAGE, "in_channels"), (REFERENCES, "cond_in_channels")):
        names.layer(f"emb_in.{kind}", f"x_embedders.{kind}", (width, config[key]))
        blocks(f"content_mode_blocks.{kind}", f"mode_blocks.{kind}", config["num_layers"])
    names.layer("txt_in", "context_embedder", (width, config["joint_attention_dim"]))
    blocks("txt_mode_blocks", "txt_mode_blocks", config["num_layers"])
    blocks("single_blocks", "single_transformer_blocks", config["num_single_layers"])
    names.layer("final_layer.image.adaLN_modulation.1", "norm_out.linear", (2 * width, width), op=SWAP)
    names.layer("final_layer.image.linear", "proj_out", (config["in_channels"], width))
    return names


def infer_transformer(shapes: Mapping[str, Shape], base: dict) -> dict:
    """Config values from the tensors' shapes, by the original names; {} for tensors of something else."""
    norm = "single_blocks.0.norm.query_norm.scale"
    if norm not in shapes or "emb_in.image.weight" not in shapes:
        return {}
    (head,), (width, channels) = shapes[norm], shapes["emb_in.image.weight"]
    check_head(head, base["axes_dims_rope"])
    return {
        "attention_head_dim": head,
        "cond_in_channels": shapes["emb_in.image_cond.weight"][1],
        "flow_map": "ref_time_in.in_layer.weight" in shapes,
        "in_channels": channels,
        "joint_attention_dim": shapes["txt_in.weight"][1],
        "mlp_ratio": shapes["single_blocks.0.mlp_out.weight"][1] / width,
        "num_attention_heads": width // head,
        "num_layers": how_many(shapes, "txt_mode_blocks."),
        "num_single_layers": how_many(shapes, "single_blocks."),
        "timestep_channels": shapes["time_in.in_layer.weight"][1],
    }
