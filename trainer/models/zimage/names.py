"""The names of Z-Image's transformer in the original layout, and what its files hold beside weights.

Source of the original names: Tongyi-MAI/Z-Image (`src/zimage/transformer.py`) and the single files that ComfyUI reads, which
have query, key and value in one tensor (`convert_z_image_transformer_checkpoint_to_diffusers` of diffusers).
"""

from collections.abc import Mapping

from trainer.models.names import ComponentConfig, Names, Shape, check_head, how_many

MULTIPLE = 32  # tokens: images and captions are padded to a multiple
MODULATED = 256  # numbers of the time embedding that modulations read, at most
# Defaults of the class for keys missing from config.json.
DEFAULTS = {
    "axes_dims": [32, 48, 48], "cap_feat_dim": 2560, "dim": 3840, "in_channels": 16, "n_heads": 30, "n_layers": 30,
    "n_refiner_layers": 2,
}  # fmt: skip
# Layers of Qwen3 above the last that is read, its output layer, a norm of the transformer that nothing reads.
HARMLESS = ("*layers.35.*", "lm_head.weight", "*.lm_head.weight", "*norm_final.weight")


def transformer_names(config: ComponentConfig) -> Names:
    """ZImageTransformer2DModel."""
    names = Names(bias=False)
    width, head = config["dim"], config["dim"] // config["n_heads"]
    feed, read, patch = int(width / 3 * 8), min(width, MODULATED), 4 * config["in_channels"]

    def block(name: str, *, modulated: bool) -> None:
        qkv = {f"{name}.attention.to_{part}.weight": (width, width) for part in "qkv"}
        names.add(f"{name}.attention.qkv.weight", qkv)
        names.layer(f"{name}.attention.out", f"{name}.attention.to_out.0", (width, width))
        for part in "qk":
            names.layer(f"{name}.attention.{part}_norm", f"{name}.attention.norm_{part}", (head,))
        for layer, shape in (("w1", (feed, width)), ("w2", (width, feed)), ("w3", (feed, width))):
            names.same_layer(f"{name}.feed_forward.{layer}", shape)
        for norm in ("attention_norm1", "ffn_norm1", "attention_norm2", "ffn_norm2"):
            names.same_layer(f"{name}.{norm}", (width,))
        if modulated:
            names.same_layer(f"{name}.adaLN_modulation.0", (4 * width, read), bias=True)

    names.layer("x_embedder", "all_x_embedder.2-1", (width, patch), bias=True)
    names.layer("final_layer.linear", "all_final_layer.2-1.linear", (patch, width), bias=True)
    names.layer("final_layer.adaLN_modulation.1", "all_final_layer.2-1.adaLN_modulation.1", (width, read), bias=True)
    names.same_layer("t_embedder.mlp.0", (1024, 256), bias=True)
    names.same_layer("t_embedder.mlp.2", (read, 1024), bias=True)
    names.same_layer("cap_embedder.0", (config["cap_feat_dim"],))
    names.same_layer("cap_embedder.1", (width, config["cap_feat_dim"]), bias=True)
    for token in ("x_pad_token", "cap_pad_token"):
        names.add(token, {token: (1, width)})
    for i in range(config["n_refiner_layers"]):
        block(f"noise_refiner.{i}", modulated=True)
        block(f"context_refiner.{i}", modulated=False)
    for i in range(config["n_layers"]):
        block(f"layers.{i}", modulated=True)
    return names


def infer_transformer(shapes: Mapping[str, Shape], base: dict) -> dict:
    """Config values from the tensors' shapes, by the original names; {} for tensors of something else."""
    if not {"layers.0.attention.q_norm.weight", "cap_pad_token", "x_embedder.weight"} <= shapes.keys():
        return {}
    (head,), (width, patch) = shapes["layers.0.attention.q_norm.weight"], shapes["x_embedder.weight"]
    check_head(head, base["axes_dims"])
    return {
        "cap_feat_dim": shapes["cap_embedder.1.weight"][1],
        "dim": width,
        "in_channels": patch // 4,
        "n_heads": width // head,
        "n_kv_heads": width // head,
        "n_layers": how_many(shapes, "layers."),
        "n_refiner_layers": how_many(shapes, "noise_refiner."),
    }
