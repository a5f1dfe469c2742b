"""LoKr's shapes and files are LyCORIS': which sides, what is a pair, the scale; and a file is read as what it says."""

from __future__ import annotations

import itertools
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

from trainer.adapters import export, lokr, sd_scripts
from trainer.adapters.kinds import KINDS, kind_named
from trainer.adapters.portable import Portable, made_of, recipe
from trainer.base.errors import UserError
from trainer.base.tensorfile import write_tensors
from trainer.models import FAMILIES
from workbench.adapter_files.opening import NamedModel, OpenedAdapter, open_adapter, published

Q, CONV = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q", "unet.conv_in"
FLUX_Q = "transformer.transformer_blocks.0.attn.to_q"
STEM = "lora_unet_middle_block_1_transformer_blocks_0_attn1_to_q"


@pytest.mark.parametrize(
    ("size", "sides"),
    # What its `factorization` gives (lycoris/functional/general.py, 4.1.3) for the factors -1, 2, 4, 8, 16.
    [
        (127, [(1, 127)] * 5), (128, [(8, 16), (2, 64), (4, 32), (8, 16), (8, 16)]),
        (250, [(10, 25), (2, 125), (2, 125), (5, 50), (10, 25)]), (360, [(18, 20), (2, 180), (4, 90), (8, 45), (15, 24)]),
        (512, [(16, 32), (2, 256), (4, 128), (8, 64), (16, 32)]), (1024, [(32, 32), (2, 512), (4, 256), (8, 128), (16, 64)]),
        (1, [(1, 1)] * 5),
    ],
)  # fmt: skip
def test_a_size_is_parted_as_lycoris_parts_it(size: int, sides: list[tuple[int, int]]) -> None:
    assert [lokr.factorization(size, factor) for factor in (-1, 2, 4, 8, 16)] == sides


@pytest.mark.parametrize(
    ("shape", "rank", "keys", "wanted"),
    [
        ((3072, 3072), 16, {}, {"lokr_w1": (48, 48), "lokr_w2_a": (64, 16), "lokr_w2_b": (16, 64)}),
        ((3072, 3072), 32, {}, {"lokr_w1": (48, 48), "lokr_w2": (64, 64)}),  # not less than half of 64
        ((3072, 3072), 23, {"decompose": "both"},
         {"lokr_w1_a": (48, 23), "lokr_w1_b": (23, 48), "lokr_w2_a": (64, 23), "lokr_w2_b": (23, 64)}),
        ((3072, 3072), 24, {"decompose": "both"}, {"lokr_w1": (48, 48), "lokr_w2_a": (64, 24), "lokr_w2_b": (24, 64)}),
        ((3072, 3072), 1, {"decompose": "none"}, {"lokr_w1": (48, 48), "lokr_w2": (64, 64)}),
        ((3072, 12288), 8, {"factor": 16}, {"lokr_w1": (16, 16), "lokr_w2_a": (192, 8), "lokr_w2_b": (8, 768)}),
        ((640, 320, 3, 3), 4, {}, {"lokr_w1": (20, 16), "lokr_w2_a": (32, 4), "lokr_w2_b": (4, 20, 3, 3)}),
        ((640, 320, 3, 3), 16, {}, {"lokr_w1": (20, 16), "lokr_w2": (32, 20, 3, 3)}),
    ],
)  # fmt: skip
def test_a_layer_has_the_matrices_that_lycoris_gives_it(shape, rank: int, keys: dict, wanted: dict) -> None:
    kind = kind_named("lokr", {"factor": -1, "decompose": "w2", "rank": rank} | keys)
    sizes = kind.shapes(shape, rank)
    assert sizes == wanted and list(sizes) == [end for end in kind.ends if end in sizes]
    whole = {"lokr_w1", "lokr_w2"} == set(sizes)
    assert kind.scaling(sizes, rank, 2.0, False) == (1.0 if whole else 2.0 / rank)
    assert kind.scaling(sizes, rank, 2.0, True) == (1.0 if whole else 2.0 / rank**0.5)


def values(shape: tuple[int, ...], rank: int, **keys) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(sum(shape) + rank)
    return {end: torch.randn(size, generator=g) for end, size in lokr.shapes(shape, rank, **keys).items()}


def read_by_comfyui(tensors: dict[str, torch.Tensor], stem: str, shape: tuple[int, ...]) -> torch.Tensor:
    """comfy/weight_adapter/lokr.py (v0.3.64), written again: the change of a weight, in fp64."""
    given = {end: tensors[f"{stem}.{end}"].double() for end in lokr.ENDS if f"{stem}.{end}" in tensors}
    rank = None
    if (w1 := given.get("lokr_w1")) is None:
        rank = given["lokr_w1_b"].shape[0]
        w1 = torch.mm(given["lokr_w1_a"], given["lokr_w1_b"])
    if (w2 := given.get("lokr_w2")) is None:
        rank = given["lokr_w2_b"].shape[0]
        w2 = torch.mm(given["lokr_w2_a"], given["lokr_w2_b"])
    if w2.dim() == 4:
        w1 = w1.unsqueeze(2).unsqueeze(2)
    scale = float(tensors[f"{stem}.alpha"]) / rank if f"{stem}.alpha" in tensors and rank is not None else 1.0
    return scale * torch.kron(w1, w2).reshape(shape)


def dense(factors) -> torch.Tensor:
    a, b = factors.a.make().double().flatten(1), factors.b.make().double().flatten(1)
    return (factors.scaling * (b @ a)).view(factors.weight_shape)


def opened(tmp_path: Path, tensors: dict[str, torch.Tensor], family: str = "sdxl") -> OpenedAdapter:
    write_tensors(tmp_path / "a.safetensors", tensors)
    return open_adapter(tmp_path / "a.safetensors", published(family))


CASES = [(2, {}), (2, {"decompose": "both"}), (2, {"decompose": "none"}), (9999, {}), (3, {"factor": 4})]


@pytest.mark.parametrize(("rank", "keys"), CASES)
def test_a_file_is_read_as_comfyui_reads_it(tmp_path: Path, rank: int, keys: dict) -> None:
    """A written one too: a convolution's w2_b is flat there."""
    scaling = 1.0 if rank == 9999 or keys.get("decompose") == "none" else 0.75
    layers = {
        name: made_of({end: recipe(value) for end, value in values(shape, rank, **keys).items()}, scaling)
        for name, shape in ((Q, (1280, 1280)), (CONV, (320, 4, 3, 3)))
    }
    portable = Portable(layers)
    assert portable.kind is KINDS["lokr"] and all(factors.changes() for factors in layers.values())
    stems = {Q: STEM, CONV: "lora_unet_input_blocks_0_0"}
    recipes = sd_scripts.kohya_tensors(portable, modules={"unet": ()}, prefixes={"unet": "lora_unet"}, rows=len)
    tensors = {key: each.make() if hasattr(each, "make") else each for key, each in recipes.items()}
    renamed = {f"lora_unet_{name.removeprefix('unet.').replace('.', '_')}": stem for name, stem in stems.items()}
    tensors = {renamed[key.partition(".")[0]] + "." + key.partition(".")[2]: tensor for key, tensor in tensors.items()}
    assert all(tensor.dim() in (0, 2) or key.endswith("lokr_w2") for key, tensor in tensors.items())
    read = opened(tmp_path, tensors).portable
    assert read.kind is KINDS["lokr"] and read.layers.keys() == layers.keys()
    for name, factors in read.layers.items():
        theirs = read_by_comfyui(tensors, stems[name], factors.weight_shape)
        for ours in (dense(factors), dense(layers[name])):
            assert (ours - theirs).norm() <= 2**-20 * theirs.norm()
        assert factors.matrices.keys() == layers[name].matrices.keys()
        assert all(torch.equal(factors.matrices[end].make(), each.make()) for end, each in layers[name].matrices.items())


def test_where_the_original_layout_fuses_layers_each_keeps_its_own_name() -> None:
    """Of three products no one can be made, and one key holds one; SDXL's keys are kohya's."""
    family = FAMILIES["flux"]
    factors = made_of({end: recipe(value) for end, value in values((3072, 3072), 4).items()}, 2.0)
    of = published("flux")[0]
    tensors = sd_scripts.kohya_tensors(
        Portable({FLUX_Q: factors, FLUX_Q.replace("to_q", "to_k"): factors}),
        modules={"transformer": of.modules("transformer")},
        prefixes=family.kohya_prefixes(of.config), rows=len,
    )  # fmt: skip
    assert {key.partition(".")[0] for key in tensors} == {f"lycoris_transformer_blocks_0_attn_to_{each}" for each in "qk"}
    assert float(tensors["lycoris_transformer_blocks_0_attn_to_q.alpha"]) == 8.0  # of rank 4


# The layers that ComfyUI knows behind `lycoris_` (comfy/lora.py with `flux_to_diffusers` and `z_image_to_diffusers` of
# comfy/utils.py, 17358c8 and 09708ea). It has one table for Flux and FLUX.2; none for FLUX.3, whose layers stand alone.
BEHIND_LYCORIS = {
    "flux": r"(x|context)_embedder|time_text_embed\.(timestep|text|guidance)_embedder\.linear_[12]|norm_out\.linear|proj_out|"
    r"transformer_blocks\.\d+\.(attn\.(to_[qkv]|add_[qkv]_proj|to_out\.0|to_add_out)|norm1(_context)?\.linear|"
    r"ff(_context)?\.(net\.0\.proj|net\.2|linear_in|linear_out))|"
    r"single_transformer_blocks\.\d+\.(attn\.(to_[qkv]|to_qkv_mlp_proj|to_out)|proj_mlp|proj_out|norm\.linear)",
    "zimage": r"all_final_layer\.2-1\.(linear|adaLN_modulation\.1)|all_x_embedder\.2-1|cap_embedder\.1|t_embedder\.mlp\.[02]|"
    r"(layers|context_refiner|noise_refiner)\.\d+\.(attention\.to_([qkv]|out\.0)|feed_forward\.w[123]|adaLN_modulation\.0)",
}


@pytest.mark.parametrize(("family", "table"), [("flux", "flux"), ("flux2", "flux"), ("flux3", ""), ("zimage", "zimage")])
@pytest.mark.parametrize("keys", [{}, {"factor": 3}])
def test_comfyui_knows_every_layer_and_changes_it_as_trained(tmp_path: Path, family: str, table: str, keys: dict) -> None:
    """Behind `lycoris_` or under its original name; the last layer's rows are in another order there. And read here again."""
    small = {
        "num_attention_heads": 2, "attention_head_dim": 24, "num_layers": 1, "num_single_layers": 1, "dim": 48,
        "joint_attention_dim": 64, "n_heads": 2, "n_layers": 1,
    }  # fmt: skip
    large = published(family)[0].config
    of = NamedModel(
        FAMILIES[family], "small", lambda name: {key: small.get(key, value) for key, value in large(name).items()}
    )
    wanted = FAMILIES[family].adapters.presets["linear"]
    shapes = {
        name: shape for name, shape in of.full_layers(("transformer",)).items()
        if len(shape) == 2 and any(fnmatchcase(name.partition(".")[2], each) for each in wanted)
    }  # fmt: skip
    # Of layers of one kind the first: the others have its shape.
    firsts = {re.sub(r"\d+", "N", name): name for name in reversed(shapes)}
    layers = {
        name: made_of({end: recipe(value) for end, value in values(shapes[name], 1, **keys).items()}, 0.5)
        for name in firsts.values()
    }
    modules = {"transformer": of.modules("transformer")}
    recipes = sd_scripts.kohya_tensors(
        Portable(layers), modules=modules, prefixes=FAMILIES[family].kohya_prefixes(of.config),
        rows=lambda name: shapes[name][0], not_behind_lycoris=FAMILIES[family].adapters.not_behind_lycoris,
    )  # fmt: skip
    tensors = {key: each.make() if hasattr(each, "make") else each for key, each in recipes.items()}
    links = {part: link for link in modules["transformer"] for part in link.parts}
    stems = {key.partition(".")[0] for key in tensors}
    for name, factors in layers.items():
        own, link = name.partition(".")[2], links[name.partition(".")[2]]
        stem = f"lora_unet_{link.original.replace('.', '_')}"
        if behind := bool(table) and stem not in stems:
            assert re.fullmatch(BEHIND_LYCORIS[table], own), own
            stem = f"lycoris_{own.replace('.', '_')}"
        stems.remove(stem)
        if f"{stem}.lora_up.weight" in tensors:  # w1 has an odd number of rows, whose halves cannot be swapped
            assert link.swap and keys
            up, down = (tensors[f"{stem}.lora_{each}.weight"].double() for each in ("up", "down"))
            theirs = float(tensors[f"{stem}.alpha"]) / len(down) * up @ down
        else:
            theirs = read_by_comfyui(tensors, stem, factors.weight_shape)
        if link.swap and not behind:
            theirs = torch.cat(theirs.chunk(2)[::-1])
        ours = dense(factors)
        assert (theirs - ours).norm() <= 2**-20 * ours.norm(), name
    assert not stems
    write_tensors(tmp_path / "a.safetensors", tensors)
    read = open_adapter(tmp_path / "a.safetensors", [of]).portable
    assert read.layers.keys() == layers.keys()
    for name, factors in layers.items():
        assert (dense(read.layers[name]) - dense(factors)).norm() <= 2**-20 * dense(factors).norm(), name


def test_in_diffusers_keys_the_scale_is_in_the_first_matrix() -> None:
    own = values((64, 48), 2)
    tensors = export.diffusers_tensors(Portable({FLUX_Q: made_of({k: recipe(v) for k, v in own.items()}, 0.5)}))
    assert tensors.keys() == {f"{FLUX_Q}.{end}" for end in own}
    assert torch.equal(tensors[f"{FLUX_Q}.lokr_w1"].make(), 0.5 * own["lokr_w1"])
    assert torch.equal(tensors[f"{FLUX_Q}.lokr_w2_a"].make(), own["lokr_w2_a"])


def test_a_fused_module_of_another_program_becomes_loras_of_its_layers(tmp_path: Path) -> None:
    """Its product has no such form for q, k and v by themselves."""
    own = values((9216, 3072), 2)
    stem = "diffusion_model.double_blocks.0.img_attn.qkv"
    tensors = {f"{stem}.{end}": value for end, value in own.items()} | {f"{stem}.alpha": torch.tensor(1.0)}
    portable = opened(tmp_path, tensors, "flux").portable
    assert portable.kind is KINDS["lora"] and not any(factors.matrices for factors in portable.layers.values())
    whole = read_by_comfyui(tensors, stem, (9216, 3072))
    parts = torch.cat([dense(portable.layers[FLUX_Q.replace("to_q", f"to_{each}")]) for each in "qkv"])
    assert (parts - whole).norm() <= 2**-20 * whole.norm()


def test_lycoris_scalar_is_one_more_factor_and_a_whole_one_ignores_alpha(tmp_path: Path) -> None:
    for keys, scale in (({}, 0.25 * 3 / 2), ({"decompose": "none"}, 0.25)):
        own = values((1280, 1280), 2, **keys)
        tensors = {f"{STEM}.{end}": value for end, value in own.items()}
        tensors |= {f"{STEM}.alpha": torch.tensor(3.0), f"{STEM}.scalar": torch.tensor(0.25)}
        read = opened(tmp_path, tensors).portable.layers[Q]
        assert read.scaling == pytest.approx(scale, rel=1e-12)


W1, W2 = torch.ones(32, 32), torch.ones(40, 40)
REFUSED = {
    "no w2": ({"lokr_w1": W1}, "which do not make the layer's weight"),
    "half a pair": ({"lokr_w1": W1, "lokr_w2_a": W2}, "which do not make the layer's weight"),
    "both forms": ({"lokr_w1": W1, "lokr_w2": W2, "lokr_w2_a": W2, "lokr_w2_b": W2}, "which do not make the layer's weight"),
    "another size": (
        {"lokr_w1": W1, "lokr_w2": W2[:39]},
        r"lokr_w2 \[39, 40\], which do not make .*\[1280, 1280\]; the file is",
    ),
    "ranks that differ": ({"lokr_w1": W1, "lokr_w2_a": W2[:, :3], "lokr_w2_b": W2[:4]}, "which do not make"),
    "DoRA over it": ({"lokr_w1": W1, "lokr_w2": W2, "dora_scale": torch.ones(1280, 1)}, "is a LoKr with .*dora_scale"),
    "a LoRA beside it": ({"lokr_w1": W1, "lokr_w2": W2, "lora_down.weight": W1}, "is a LoKr with .*lora_down"),
    "Tucker": ({"lokr_w1": W1, "lokr_t2": W2}, r"is a LoKr with a Tucker core .*merge it into its model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_whole_product_is_refused(tmp_path: Path, case: str) -> None:
    tensors, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        opened(tmp_path, {f"{STEM}.{end}": tensor for end, tensor in tensors.items()})


@pytest.mark.parametrize("decompose", ["w2", "both", "none"])
@pytest.mark.parametrize("shape", [(96, 64), (64, 256), (30, 8, 3, 3)])
def test_lycoris_itself_has_these_matrices_this_scale_and_this_weight(shape: tuple[int, ...], decompose: str) -> None:
    """Where it is installed (4.1.3 was): what it makes of a layer, and of our tensors put in there."""
    modules = pytest.importorskip("lycoris.modules.lokr", reason="LyCORIS is no dependency; pip install lycoris-lora")
    layer = torch.nn.Linear(shape[1], shape[0]) if len(shape) == 2 else torch.nn.Conv2d(shape[1], shape[0], shape[2:])
    for rank, factor in itertools.product((1, 2, 4, 50), (-1, 4, 8)):
        how = {"decompose_both": decompose == "both", "full_matrix": decompose == "none"}
        theirs = modules.LokrModule("x", layer, lora_dim=rank, alpha=3.0, factor=factor, **how)
        own = values(shape, rank, factor=factor, decompose=decompose)
        factors = made_of({end: recipe(value) for end, value in own.items()}, 1.0 if lokr.is_whole(own) else 3.0 / rank)
        tensors = {end: each.make() for end, each in factors.named_matrices("").items()}
        held = {end: each for end, each in theirs.named_parameters() if end.startswith("lokr")}
        assert {end: each.shape for end, each in held.items()} == {end: each.shape for end, each in tensors.items()}
        assert theirs.scale == pytest.approx(factors.scaling)
        with torch.no_grad():
            for end, each in held.items():
                each.copy_(tensors[end])
            weight = theirs.get_weight(torch.Size(shape)).double()
        assert (weight - factors.scaling * lokr.product(own)).norm() <= 2**-20 * weight.norm()
