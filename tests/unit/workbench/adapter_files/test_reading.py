"""Files of every kind: what they say is read, in whatever keys; what is no LoRA, or not whole, is refused by name."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch

from scripts.make_model import write_sparse
from tests.integration.test_mutated_files import hostile_files, put, tensor_mutant
from trainer.adapters.portable import is_finite
from trainer.base.errors import UserError
from trainer.base.tensorfile import Recipe, TensorFile, serialize, write_tensors
from workbench.adapter_files.opening import OpenedAdapter, open_adapter

Q, PROJ = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q", "unet.conv_in"
A, B = torch.arange(2 * 1280.0).view(2, 1280), torch.arange(1280 * 2.0).view(1280, 2)
FLUX_Q = "transformer.transformer_blocks.0.attn.to_q"
SINGLE = "transformer.single_transformer_blocks.3"


def opened(tmp_path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None, **more) -> OpenedAdapter:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {key: tensor.clone() for key, tensor in tensors.items()}, metadata)
    return open_adapter(path, **more)


def pair(a: str, b: str) -> dict[str, torch.Tensor]:
    return {a: A, b: B}


INNER = Q.removeprefix("unet.")
DOTTED = "middle_block.1.transformer_blocks.0.attn1.to_q"
FLAT = DOTTED.replace(".", "_")
FORMS = {
    "diffusers": pair(f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"),
    "diffusers 0.2x": pair(f"{Q}.lora.down.weight", f"{Q}.lora.up.weight"),
    "diffusers processors": pair(
        f"{Q.replace('to_q', 'processor.to_q')}_lora.down.weight", f"{Q.replace('to_q', 'processor.to_q')}_lora.up.weight"
    ),
    "PEFT's own": pair(f"base_model.model.{INNER}.lora_A.weight", f"base_model.model.{INNER}.lora_B.weight"),
    "PEFT's state": pair(
        f"base_model.model.{INNER}.lora_A.default.weight", f"base_model.model.{INNER}.lora_B.default.weight"
    ),
    "no prefix": pair(f"{INNER}.lora_A.weight", f"{INNER}.lora_B.weight"),
    "kohya": pair(f"lora_unet_{FLAT}.lora_down.weight", f"lora_unet_{FLAT}.lora_up.weight"),
    "kohya, diffusers' names": pair(
        f"lora_unet_{INNER.replace('.', '_')}.lora_down.weight", f"lora_unet_{INNER.replace('.', '_')}.lora_up.weight"
    ),
    "SimpleTuner": pair(
        f"lycoris_{INNER.replace('.', '_')}.lora_down.weight", f"lycoris_{INNER.replace('.', '_')}.lora_up.weight"
    ),
    "ComfyUI": pair(
        "diffusion_model.middle_block.1.transformer_blocks.0.attn1.to_q.lora_down.weight",
        "diffusion_model.middle_block.1.transformer_blocks.0.attn1.to_q.lora_up.weight",
    ),
    "ComfyUI, PEFT's ends": pair(
        "diffusion_model.middle_block.1.transformer_blocks.0.attn1.to_q.lora_A.weight",
        "diffusion_model.middle_block.1.transformer_blocks.0.attn1.to_q.lora_B.weight",
    ),
    "no ends": pair(f"{Q}.lora_A", f"{Q}.lora_B"),
    "processors without prefix": pair(
        f"{INNER.replace('to_q', 'processor.to_q')}_lora.down.weight",
        f"{INNER.replace('to_q', 'processor.to_q')}_lora.up.weight",
    ),
    "OneTrainer, original names": pair(f"unet.{DOTTED}.lora_down.weight", f"unet.{DOTTED}.lora_up.weight"),
    "original names": pair(f"{DOTTED}.lora_A.weight", f"{DOTTED}.lora_B.weight"),
    "of a whole checkpoint": pair(
        f"model.diffusion_model.{DOTTED}.lora_A.weight", f"model.diffusion_model.{DOTTED}.lora_B.weight"
    ),
    "PEFT of the original": pair(
        f"base_model.model.diffusion_model.{DOTTED}.lora_A.default.weight",
        f"base_model.model.diffusion_model.{DOTTED}.lora_B.default.weight",
    ),
    "PEFT of the bare original": pair(f"base_model.model.{DOTTED}.lora_A.weight", f"base_model.model.{DOTTED}.lora_B.weight"),
    "PEFT's model in a pipeline": pair(
        f"unet.base_model.model.{INNER}.lora_A.weight", f"unet.base_model.model.{INNER}.lora_B.weight"
    ),
    "compiled and wrapped": pair(
        f"module.unet._orig_mod.{INNER}.lora_A.weight", f"module.unet._orig_mod.{INNER}.lora_B.weight"
    ),
    "an underscore at the end": pair(f"lora_unet_{FLAT}_.lora_down.weight", f"lora_unet_{FLAT}_.lora_up.weight"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_is_read_under_every_name(tmp_path: Path, form: str) -> None:
    read = opened(tmp_path, FORMS[form])
    assert read.model.family.name == "sdxl" and list(read.portable.layers) == [Q]
    factors = read.portable.layers[Q]
    assert torch.equal(factors.a.make(), A) and torch.equal(factors.b.make(), B)
    assert factors.scaling == 1.0 and list(read.read.alphas) == ["not given: the scale is 1"]
    assert sum(read.read.conventions.values()) == 1


def test_of_a_text_encoder_the_inner_name_may_be_there_or_not(tmp_path: Path) -> None:
    """The module lost its `text_model.` in transformers 5.6. Alone its keys do not say of which family they are."""
    a, b, inner = torch.ones(2, 768), torch.ones(768, 2), "encoder.layers.3.self_attn.k_proj"
    flat = f"lora_te1_text_model_{inner.replace('.', '_')}"
    for stem in (f"text_encoder.{inner}", f"text_encoder.text_model.{inner}", flat,
                 f"text_encoders.clip_l.transformer.text_model.{inner}"):  # fmt: skip
        keys = {f"{stem}.lora_down.weight": a, f"{stem}.lora_up.weight": b}
        with pytest.raises(UserError, match="are those of flux and sdxl alike.*give --family"):
            opened(tmp_path, keys)
        for family in ("sdxl", "flux"):
            assert list(opened(tmp_path, keys, family=family).portable.layers) == [f"text_encoder.{inner}"]
        said = opened(tmp_path, keys, {"ss_base_model_version": "flux1"})
        assert said.model.family.name == "flux" and said.labels == ("flux-dev", "flux-schnell")


def test_t5_is_known_under_the_numbers_of_both_trainers(tmp_path: Path) -> None:
    for number in (2, 3):  # OneTrainer's, sd-scripts'
        stem = f"lora_te{number}_encoder_block_1_layer_0_SelfAttention_q"
        keys = {f"{stem}.lora_down.weight": torch.ones(1, 4096), f"{stem}.lora_up.weight": torch.ones(4096, 1)}
        assert list(opened(tmp_path, keys).portable.layers) == ["text_encoder_2.encoder.block.1.layer.0.SelfAttention.q"]


def test_the_scale_is_read_from_where_it_stands(tmp_path: Path) -> None:
    keys = FORMS["kohya"]
    stem = next(iter(keys)).partition(".")[0]
    for alpha in (torch.tensor(1.5), torch.tensor([1.5], dtype=torch.bfloat16), torch.tensor([[1.5]], dtype=torch.float64)):
        assert opened(tmp_path, {**keys, f"{stem}.alpha": alpha}).portable.layers[Q].scaling == 0.75
    for kind in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):  # sd-scripts' tools write integers
        assert opened(tmp_path, {**keys, f"{stem}.alpha": torch.tensor(3, dtype=kind)}).portable.layers[Q].scaling == 1.5
    peft = FORMS["diffusers"]
    for said, scaling in (
        ({"unet.lora_alpha": 3, "unet.r": 2}, 1.5),
        ({"unet.lora_alpha": 3, "unet.alpha_pattern": {f"^{INNER}": 5}}, 2.5),
        ({"unet.lora_alpha": 3, "unet.alpha_pattern": {"attn1.to_q": 5}}, 2.5),
        ({"unet.lora_alpha": 3, "unet.alpha_pattern": {"^attn1.to_q": 5}}, 1.5),
        ({"unet.lora_alpha": 3, "unet.use_rslora": True}, 3 / 2**0.5),
        ({"text_encoder.lora_alpha": 3}, 1.0),
    ):
        read = opened(tmp_path, peft, {"lora_adapter_metadata": json.dumps(said)})
        assert read.portable.layers[Q].scaling == scaling, said


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "Expecting property name"), ("[]", "not a JSON object"),
     ('{"unet.lora_alpha": "8"}', "'8' is no number to scale by"),
     ('{"unet.lora_alpha": NaN}', "no number"), ('{"unet.lora_alpha": 0}', "no number to scale by"),
     ('{"unet.lora_alpha": 1' + "0" * 400 + "}", "no number"), ("[" * 100_000, "RecursionError"),
     ('{"unet.lora_alpha": 1' + "0" * 5000 + "}", "4300"),
     ('{"unet.lora_alpha": 1, "unet.alpha_pattern": {"(a+)+$": 1}}', "the pattern .* which is no layer's name")],
)  # fmt: skip
def test_metadata_that_do_not_give_a_scale_are_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=f"a.safetensors: the header's lora_adapter_metadata.*{words}.*save the file again"):
        opened(tmp_path, FORMS["diffusers"], {"lora_adapter_metadata": text})


STEM = f"lora_unet_{FLAT}"


def test_a_magnitude_is_of_the_axis_that_its_shape_says(tmp_path: Path) -> None:
    for key, m, axis in (
        (f"{STEM}.dora_scale", torch.arange(1280.0).view(1280, 1), "output"),
        (f"{STEM}.dora_scale", torch.arange(1280.0).view(1, 1280), "input"),
        (f"{STEM}.lora_magnitude_vector", torch.arange(1280.0), "output"),
        (f"{STEM}.lora_magnitude_vector.weight", torch.arange(1280.0), "output"),
        (f"{STEM}.lora_magnitude_vector.default.weight", torch.arange(1280.0), "output"),
    ):
        read = opened(tmp_path, {**FORMS["kohya"], key: m}).portable
        factors = read.layers[Q]
        assert read.kind.magnitudes and factors.axis == axis and torch.equal(factors.magnitude.make(), torch.arange(1280.0))
    conv = {"lora_unet_input_blocks_0_0.lora_down.weight": torch.ones(2, 4, 3, 3),
            "lora_unet_input_blocks_0_0.lora_up.weight": torch.ones(320, 2, 1, 1)}  # fmt: skip
    for shape, axis in (((320, 1, 1, 1), "output"), ((1, 4, 1, 1), "input")):
        read = opened(tmp_path, {**conv, "lora_unet_input_blocks_0_0.dora_scale": torch.ones(shape)}).portable
        assert read.layers[PROJ].axis == axis
    peft = {f"{PROJ}.lora_A.weight": conv["lora_unet_input_blocks_0_0.lora_down.weight"],
            f"{PROJ}.lora_B.weight": conv["lora_unet_input_blocks_0_0.lora_up.weight"],
            f"{PROJ}.lora_magnitude_vector": torch.ones(1, 320, 1, 1)}  # fmt: skip
    assert opened(tmp_path, peft).portable.layers[PROJ].axis == "output"


REFUSED = {
    "LoHa": ({f"{STEM}.hada_w1_a": A}, r"is LoHa \(Hadamard products; LyCORIS.* write it\), which is neither"),
    "LoKr": ({f"{STEM}.lokr_t2": A, f"{STEM}.lokr_w2_a": A},
             r"is a LoKr with a Tucker core .*lokr_t2.*; merge it .*adapter.py extract MERGED MODEL OUT"),
    "Tucker": ({**FORMS["kohya"], f"{STEM}.lora_mid.weight": A}, r"a core \(lora_mid\) \[2, 1280\], which do not fit"),
    "OFT": ({f"{STEM}.oft_blocks": A}, "OFT or BOFT .*OneTrainer.*; merge it into its model"),
    "difference": ({f"{STEM}.diff": A}, "with whole differences of weights.*train_norm.*; merge it"),
    "norms": ({**FORMS["kohya"], "diffusion_model.k_norm.diff": A}, "whole differences .*'diffusion_model.k_norm.diff'"),
    "Control LoRA": ({"double_blocks.0.img_attn.norm.query_norm.scale": A, "img_in.lora_B.bias": A}, "Control LoRA of Flux"),
    "biases": ({**FORMS["diffusers"], f"{Q}.lora_B.bias": A}, "a LoRA with biases"),
    "textual inversion": ({"bundle_emb.word.clip_l": A, "emb_params": A}, "is a textual inversion .* and no adapter"),
    "a model": ({"model.diffusion_model.out.2.weight": A}, "has keys that no adapter file has: 'model.diffusion_model.out.2"),
    "nothing": ({}, "holds no tensors"),
    "only A": ({f"{STEM}.lora_down.weight": A}, r"has no B \(lora_B, lora_up\), only .*it is not whole"),
    "only alpha": ({**FORMS["diffusers"], f"{STEM}.alpha": torch.tensor(1.0)}, "has no A"),
    "unknown layer": ({**FORMS["kohya"], "lora_unet_input_blocks_99_0.alpha": A},
                      "1 of its 2 modules .*'lora_unet_input_bl.*--base"),
    "unknown model": (pair("transformer_blocks.0.txt_mlp.lora_A.weight", "transformer_blocks.0.txt_mlp.lora_B.weight"),
                      r"those of no model that is known here \(sdxl, flux-dev, flux-schnell, .*zimage-turbo\)"),
    "twice": ({**FORMS["kohya"], **FORMS["diffusers"]}, "to_q twice, as '"),
    "one tensor twice": ({**FORMS["diffusers"], f"{Q}.lora.down.weight": A}, "has one tensor twice"),
    "integers": ({f"{STEM}.lora_down.weight": A.int(), f"{STEM}.lora_up.weight": B}, "int32 in .*floating point"),
    "another size": ({f"{STEM}.lora_down.weight": A[:, :640], f"{STEM}.lora_up.weight": B},
                     r"A \[2, 640\] and B \[1280, 2\], which do not fit"),
    "ranks differ": ({f"{STEM}.lora_down.weight": A[:1], f"{STEM}.lora_up.weight": B}, "do not fit each other"),
    "alpha of many": ({**FORMS["kohya"], f"{STEM}.alpha": torch.ones(2)}, "and is to be one number"),
    "alpha not finite": ({**FORMS["kohya"], f"{STEM}.alpha": torch.tensor(float("nan"))}, "is nan, not a number to scale by"),
    "flat magnitude": ({**FORMS["kohya"], f"{STEM}.dora_scale": torch.ones(1280)}, r"magnitude of shape \[1280\]"),
    "two magnitudes": ({**FORMS["kohya"], f"{STEM}.dora_scale": torch.ones(1280, 1),
                        f"{STEM}.lora_magnitude_vector": torch.ones(1280)}, "which of them counts"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_mapped_is_refused_with_its_keys(tmp_path: Path, case: str) -> None:
    tensors, words = REFUSED[case]
    with pytest.raises(UserError, match=words):
        opened(tmp_path, tensors)


def test_a_rank_that_no_layer_has_asks_for_no_memory(tmp_path: Path, monkeypatch) -> None:
    """A header is a few bytes, and a file of holes as large as it likes."""
    rank, kind = 10**6, torch.float8_e4m3fn
    shapes = {"lora_down": (rank, 4, 3, 3), "lora_up": (320, rank, 1, 1)}
    path = tmp_path / "a.safetensors"
    write_sparse(path, {f"lora_unet_input_blocks_0_0.{n}.weight": Recipe(kind, s, lambda: 1 / 0) for n, s in shapes.items()})
    monkeypatch.setattr(TensorFile, "read", lambda self, name, *a: 1 / 0)
    with pytest.raises(UserError, match="'lora_unet_input_blocks_0_0' has rank 1000000, and 16384 is the most"):
        open_adapter(path)


@pytest.mark.parametrize(
    ("files", "remedy"),
    [
        (["adapter.safetensors", "state.json"], r"is a folder; it is a checkpoint; .* scripts/adapter.py export \S+ FOLDER"),
        (["b.safetensors", "a.safetensors"], "is a folder; give one of its files: a.safetensors, b.safetensors"),
        (["a.txt"], "is a folder; it holds no .safetensors file"),
    ],
)
def test_a_folder_is_told_from_a_file(tmp_path: Path, files: list[str], remedy: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=remedy):
        open_adapter(tmp_path)


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"\x80\x02.")
    with pytest.raises(UserError, match="not a .safetensors file"):
        open_adapter(path)


def fused_keys(up: torch.Tensor, down: torch.Tensor, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    stem = "lora_unet_single_blocks_3_linear1"
    tensors = {"lora_up.weight": up, "lora_down.weight": down} | more
    return {f"{stem}.{key}": tensor for key, tensor in tensors.items()}


NAMES = [f"{SINGLE}.attn.to_q", f"{SINGLE}.attn.to_k", f"{SINGLE}.attn.to_v", f"{SINGLE}.proj_mlp"]
ROWS = [3072, 3072, 3072, 12288]


@pytest.mark.parametrize("ranks", [(2, 2, 2, 2), (1, 3, 0, 5), (4, 0, 4, 0), (0, 0, 0, 3), "shared"])
def test_a_fused_module_is_split_exactly(tmp_path: Path, ranks) -> None:
    """Into layers of their own ranks where B is block-diagonal; else all have the one A."""
    g = torch.Generator().manual_seed(1)
    total = 6 if ranks == "shared" else sum(ranks)
    up, down = torch.randn(sum(ROWS), total, generator=g), torch.randn(total, 3072, generator=g)
    if ranks != "shared":
        kept = torch.block_diag(*(torch.ones(rows, rank) for rows, rank in zip(ROWS, ranks, strict=True)))
        up = up * kept
    read = opened(tmp_path, fused_keys(up, down, alpha=torch.tensor(float(total))))
    wanted = [n for n, rank in zip(NAMES, [6] * 4 if ranks == "shared" else ranks, strict=True) if rank]
    assert list(read.portable.layers) == wanted
    column = 0
    for name, rows in zip(NAMES, up.split(ROWS), strict=True):
        if name not in read.portable.layers:
            assert not rows.any()
            continue
        factors = read.portable.layers[name]
        own = slice(None) if ranks == "shared" else slice(column, column + ranks[NAMES.index(name)])
        assert (
            factors.scaling == 1.0
            and torch.equal(factors.a.make(), down[own])
            and torch.equal(factors.b.make(), rows[:, own])
        )
        if ranks != "shared":
            column = own.stop
            assert not rows[:, : own.start].any() and not rows[:, own.stop :].any()
    form = "shared" if ranks == "shared" else "block-diagonal"
    assert read.read.fused == {form: 1}


def test_an_untrained_fused_module_is_split_evenly(tmp_path: Path) -> None:
    """B of zeros says nothing of its columns."""
    read = opened(tmp_path, fused_keys(torch.zeros(sum(ROWS), 8), torch.arange(8 * 3072.0).view(8, 3072)))
    assert [f.rank for f in read.portable.layers.values()] == [2, 2, 2, 2]
    assert torch.equal(torch.cat([f.a.make() for f in read.portable.layers.values()]), torch.arange(8 * 3072.0).view(8, 3072))


DOUBLE = "transformer.transformer_blocks.0.attn"


@pytest.mark.parametrize("prefix", ["", "diffusion_model."])
@pytest.mark.parametrize(
    ("number", "names"), [(1, ("to_q", "to_k", "to_v")), (2, ("add_q_proj", "add_k_proj", "add_v_proj"))]
)
def test_xlabs_processors_are_the_attention_of_both_streams(tmp_path: Path, prefix: str, number: int, names) -> None:
    up, down = torch.randn(9216, 4), torch.randn(4, 3072)
    stem, out = f"{prefix}double_blocks.0.processor.qkv_lora{number}", "to_out.0" if number == 1 else "to_add_out"
    proj = {f"{stem.replace('qkv', 'proj')}.{end}.weight": t for end, t in (("down", down), ("up", up[:3072]))}
    read = opened(tmp_path, {f"{stem}.down.weight": down, f"{stem}.up.weight": up, **proj}, family="flux")
    layers = read.portable.layers
    assert list(layers) == [f"{DOUBLE}.{name}" for name in (*names, out)] or set(layers) == {
        f"{DOUBLE}.{name}" for name in (*names, out)
    }
    for name, rows in zip(names, up.split(3072), strict=True):
        assert torch.equal(layers[f"{DOUBLE}.{name}"].b.make(), rows)


def test_xlabs_adapts_q_k_and_v_of_a_single_block_alone(tmp_path: Path) -> None:
    for between in ("processor.", ""):
        stem = f"single_blocks.3.{between}qkv_lora"
        keys = {f"{stem}.down.weight": torch.ones(4, 3072), f"{stem}.up.weight": torch.ones(9216, 4)}
        assert list(opened(tmp_path, keys, family="flux").portable.layers) == NAMES[:3]


def test_onetrainer_numbers_the_layers_of_a_module(tmp_path: Path) -> None:
    keys: dict[str, torch.Tensor] = {}
    for index, rows in enumerate(ROWS):
        stem = f"transformer.single_blocks.3.linear1.{index}"
        keys |= {
            f"{stem}.lora_down.weight": torch.ones(1, 3072),
            f"{stem}.lora_up.weight": torch.full((rows, 1), 1.0 + index),
        }
    stem = "transformer.img_in.proj"
    keys |= {f"{stem}.lora_down.weight": torch.ones(1, 64), f"{stem}.lora_up.weight": torch.ones(3072, 1)}
    layers = opened(tmp_path, keys, family="flux").portable.layers
    assert set(layers) == {*NAMES, "transformer.x_embedder"}
    assert [float(layers[name].b.make()[0, 0]) for name in NAMES] == [1, 2, 3, 4]


def test_a_scalar_of_lycoris_is_one_more_factor(tmp_path: Path) -> None:
    alpha = {f"{STEM}.alpha": torch.tensor(2.0)}
    read = opened(tmp_path, {**FORMS["kohya"], **alpha, f"{STEM}.scalar": torch.tensor(0.5)})
    assert read.portable.layers[Q].scaling == 0.5 and "LyCORIS' scalar" in read.read.account.lines()[0]
    untrained = opened(tmp_path, {**FORMS["kohya"], **alpha, f"{STEM}.scalar": torch.tensor(0.0)}).portable.layers[Q]
    assert not untrained.b.make().any() and untrained.scaling == 1.0


def test_a_tucker_core_is_multiplied_into_a(tmp_path: Path) -> None:
    """As the three convolutions one after another, in fp64."""
    g, stem = torch.Generator().manual_seed(3), "lora_unet_input_blocks_0_0"
    down, mid, up = (torch.randn(*shape, generator=g) for shape in ((2, 4, 1, 1), (2, 2, 3, 3), (320, 2, 1, 1)))
    keys = {f"{stem}.lora_down.weight": down, f"{stem}.lora_mid.weight": mid, f"{stem}.lora_up.weight": up}
    factors = opened(tmp_path, keys).portable.layers[PROJ]
    x = torch.randn(1, 4, 5, 5, generator=g).double()
    conv = torch.nn.functional.conv2d
    wanted = conv(conv(conv(x, down.double()), mid.double(), padding=1), up.double())
    made = conv(conv(x, factors.a.make().double(), padding=1), factors.b.make().double())
    assert factors.rank == 2 and torch.allclose(made, wanted, rtol=1e-5, atol=1e-5)


def test_what_dora_scale_means_is_said_where_the_header_does_not_say_it(tmp_path: Path) -> None:
    keys = {**FORMS["kohya"], f"{STEM}.alpha": torch.tensor(2.0), f"{STEM}.dora_scale": torch.ones(1280, 1)}
    for args in (None, "no JSON", "[]", json.dumps({"dora_wd": "True", "wd_on_output": "True"})):
        read = opened(tmp_path, keys, {"ss_network_args": args} if args else None)
        (line,) = read.read.account.lines()
        assert (
            line.startswith("assumed: 1 magnitude: dora_scale in ") and "norm by rows" in line and "ss_network_args" in line
        )
        assert read.portable.meaning == "magnitude"
    for meaning in ("comfyui_released", "magnitude"):
        read = opened(tmp_path, keys, {"ss_network_args": json.dumps({"dora_scale": f"{meaning}: said"})})
        assert not read.read.account.lines() and read.portable.meaning == meaning
    peft = {**FORMS["diffusers"], f"{Q}.alpha": torch.tensor(2.0), f"{Q}.magnitude": torch.ones(1280)}  # ai-toolkit's
    assert not opened(tmp_path, peft).read.account.lines() and opened(tmp_path, peft).portable.layers[Q].axis == "output"


def test_bundled_embeddings_are_left_out_by_name(tmp_path: Path) -> None:
    words = [f"bundle_emb.token{n}.clip_l" for n in range(5)]
    keys = {**FORMS["kohya"], f"{STEM}.alpha": torch.tensor(2.0), **dict.fromkeys(words, torch.ones(2, 768))}
    read = opened(tmp_path, keys)
    said = read.read.account.lines()
    assert list(read.portable.layers) == [Q] and said[0] == "left out: 5 tensors" and "bundle_emb.token0.clip_l" in said[1]


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path, monkeypatch) -> None:
    from trainer.base.tensorfile import TensorFile

    read = opened(tmp_path, {**FORMS["kohya"], f"{STEM}.alpha": torch.tensor(1.0)})
    names = []
    monkeypatch.setattr(TensorFile, "read", lambda self, name, *a: names.append(name) or torch.ones(()))
    again = open_adapter(read.path)  # its alpha
    assert names == [f"{STEM}.alpha"]
    again.portable.layers[Q].a.make()
    assert names[1:] == [f"{STEM}.lora_down.weight"]


def whole_file() -> bytes:
    """A DoRA of a Linear, a convolution and, as metadata, everything that is read of these."""
    conv = {"a": torch.ones(2, 4, 3, 3), "b": torch.ones(320, 2, 1, 1)}
    keys = {f"{Q}.lora_A.weight": A[:1], f"{Q}.lora_B.weight": B[:, :1], f"{Q}.lora_magnitude_vector": torch.ones(1280),
            f"{PROJ}.lora_A.weight": conv["a"], f"{PROJ}.lora_B.weight": conv["b"], f"{PROJ}.alpha": torch.tensor(2.0),
            f"{PROJ}.dora_scale": torch.ones(320, 1, 1, 1)}  # fmt: skip
    metadata = {
        "lora_adapter_metadata": json.dumps({"unet.lora_alpha": 1, "unet.alpha_pattern": {f"^{INNER}": 2}}),
        "ss_network_args": json.dumps({"dora_scale": "comfyui_released: said"}), "ss_base_model_version": "sdxl_base_v1-0",
    }  # fmt: skip
    return b"".join(map(bytes, serialize({key: t.contiguous() for key, t in keys.items()}, metadata)))


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.proof)])
def test_a_mutated_file_is_read_well_formed_or_refused(tmp_path: Path, count: int) -> None:
    """One UserError, that can be printed; what is read fits the model, whatever its header says."""
    whole, path, refused = whole_file(), tmp_path / "a.safetensors", 0
    hostile = list(hostile_files())
    for number in range(count):
        mutant = hostile[number] if number < len(hostile) else tensor_mutant(whole, random.Random(number))
        put(path, mutant)
        try:
            read = open_adapter(path)
        except UserError as error:
            assert type(error) is UserError and str(error).encode(), number
            refused += 1
            continue
        for name, factors in read.portable.layers.items():
            shape = read.model.layers("unet")[name.removeprefix("unet.")]
            assert factors.weight_shape == shape and math.isfinite(factors.scaling), number
            for tensor in factors.tensors().values():
                made = tensor.make()
                assert (made.dtype, tuple(made.shape)) == (tensor.dtype, tensor.shape), number
    put(path, whole)
    assert len(open_adapter(path).portable.layers) == 2 and refused > count / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("place", [0, 17, 63])
def test_one_value_that_is_not_finite_is_found_wherever_it_stands(dtype: torch.dtype, place: int) -> None:
    values = torch.linspace(-400, 400, 64).to(dtype)
    assert is_finite(values) and is_finite(values[:0]) and is_finite(values.view(8, 8).t()) and is_finite(values[0])
    for wrong in (math.nan, math.inf, -math.inf):
        if not math.isfinite(float(torch.tensor(wrong).to(dtype))):
            there = values.float().index_fill(0, torch.tensor([place]), wrong).to(dtype)
            assert not is_finite(there) and not is_finite(there.view(8, 8).t()), wrong


@pytest.mark.parametrize(("rows", "family"), [(21504, "flux"), (27648, "flux2")])
def test_layers_of_one_name_are_told_apart_by_their_sizes(tmp_path: Path, rows: int, family: str) -> None:
    """Flux and FLUX.2 klein 4B have single blocks of one name and one width."""
    stem = "lora_unet_single_blocks_3_linear1"
    read = opened(tmp_path, {f"{stem}.lora_up.weight": torch.ones(rows, 2), f"{stem}.lora_down.weight": torch.ones(2, 3072)})
    assert read.model.family.name == family
    alike = {f"lora_unet_double_blocks_0_img_attn_qkv.lora_{end}.weight": torch.ones(shape)
             for end, shape in (("up", (9216, 2)), ("down", (2, 3072)))}  # fmt: skip
    with pytest.raises(UserError, match="its keys are those of flux and flux2 alike, .* give --family"):
        opened(tmp_path, alike)
    assert opened(tmp_path, alike, {"modelspec.architecture": "flux-2-klein-4b/lora"}).model.label == "flux2-klein-4b"
    assert opened(tmp_path, alike, family=family).model.family.name == family
