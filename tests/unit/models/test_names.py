"""The key tables against the libraries' modules, diffusers' own converters and the published parameter counts."""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from fnmatch import fnmatchcase

import diffusers
import pytest
import torch
import transformers
from diffusers.loaders import single_file_utils

from scripts import make_model as maker
from tests.harness import ROOT
from trainer.base.errors import UserError
from trainer.base.types import Link
from trainer.models import FAMILIES
from trainer.models.building import shapes_of
from trainer.models.names import join_parts, split_original
from trainer.models.tokenizers import load_tokenizer

PUBLISHED = ROOT / "trainer" / "models" / "published"
# By class; of those that both families have, the one with a table.
COMPONENTS = {c.class_name: c for family in ("zimage", "flux3", "flux2", "flux", "sdxl") for c in FAMILIES[family].components}
LINKS = {name: lambda config, names=c.names: names(config).links for name, c in COMPONENTS.items() if c.names}
# Files have the class's own names, with its inner `text_model.`.
LINKS["CLIPTextModel"] = lambda config: [Link(f"text_model.{name}", (name,)) for name in maker.clip_shapes(config)]
DEFAULTS = {name: c.defaults for name, c in COMPONENTS.items() if c.defaults}
PREFIXES = {c.name: c.prefixes for c in FAMILIES["sdxl"].components}
COUNTS = {
    ("sdxl", "unet"): 2_567_463_684,
    ("sdxl", "text_encoder"): 123_060_480,
    ("sdxl", "text_encoder_2"): 694_659_840,
    ("sdxl", "vae"): 83_653_863,
    ("flux-dev", "transformer"): 11_901_408_320,
    ("flux-dev", "text_encoder"): 123_060_480,
    ("flux-dev", "text_encoder_2"): 4_762_310_656,
    ("flux-dev", "vae"): 83_819_683,
    ("flux-schnell", "transformer"): 11_891_178_560,
    ("flux2-klein-4b", "transformer"): 3_875_544_576,
    ("flux2-klein-9b", "transformer"): 9_078_581_248,
    ("flux3-klein-base", "transformer"): 5_538_458_368,
    ("zimage", "transformer"): 6_154_908_736,
}
TINY = {
    "sdxl": maker.tiny_sdxl(1400),
    "flux-dev": maker.tiny_flux("flux-dev", 1400, 1400),
    "flux-schnell": maker.tiny_flux("flux-schnell", 1400, 1400),
    "flux2-klein-4b": maker.tiny_flux2("flux2-klein-4b"),
    "flux2-klein-9b": maker.tiny_flux2("flux2-klein-9b"),
    "flux3-klein-base": maker.tiny_flux3("flux3-klein-base"),
    "zimage": maker.tiny_zimage("zimage"),
}


def published(family: str, component: str) -> dict:
    return json.loads((PUBLISHED / family / component / "config.json").read_text())


def class_of(family: str, component: str) -> tuple[str, str]:
    part = maker.index_of(family)[component]
    return tuple(part[-1]["type_hint"] if isinstance(part[-1], dict) else part)


def parameter_shapes(class_name: str, config: dict) -> dict[str, tuple[int, ...]]:
    """As the tables have them, or the module where there is none. T5's embedding table once."""
    shapes = shapes_of(COMPONENTS[class_name], config)
    shapes.pop("encoder.embed_tokens.weight", None)
    return shapes


def infer_config(family: str, component: str, shapes: dict, config: dict) -> dict:
    return config | FAMILIES[family].component(component).infer(shapes, config)


def meta_shapes(library: str, class_name: str, config: dict) -> dict[str, tuple[int, ...]]:
    cls = getattr({"diffusers": diffusers, "transformers": transformers}[library], class_name)
    with torch.device("meta"):
        module = cls.from_config(config) if library == "diffusers" else cls(cls.config_class.from_dict(config))
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def original_shapes(class_name: str, config: dict) -> dict[str, tuple[int, ...]]:
    """By original name, had from the module's shapes as the writer has its tensors."""
    shapes = parameter_shapes(class_name, config)
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    links = LINKS[class_name](config)
    return {link.original: tuple(join_parts(link, [tensors[p] for p in link.parts]).shape) for link in links}


def ours(links: list[Link], originals: dict, shapes: dict, prefix: str = "") -> dict[str, torch.Tensor]:
    converted = {}
    for link in links:
        rows = [shapes[part][0] for part in link.parts]
        pieces = split_original(link, originals[prefix + link.original], rows)
        converted |= dict(zip(link.parts, pieces, strict=True))
    return converted


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("denoiser", ["transformer"])
@pytest.mark.parametrize("family", ["flux-dev", "flux2-klein-4b", "flux3-klein-base"])
def test_presets_leave_out_no_layer_of_a_block_that_has_another_name(family: str, denoiser: str) -> None:
    """unsloth #8267: of single blocks `to_out` was left out, where the others' is `to_out.0`. Layers of gates are apart."""
    (_, class_name), presets = class_of(family, denoiser), FAMILIES[family.partition("-")[0]].adapters.presets
    with torch.device("meta"):
        module = getattr(diffusers, class_name).from_config(published(family, denoiser))
    layers = {name for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)}
    in_blocks = {name for name in layers if re.search(r"(transformer|mode)_blocks\.", name) and ".norm" not in name}
    for preset, wanted in (("attention+mlp", in_blocks), ("linear", layers), ("all", layers)):
        assert {name for name in layers if any(fnmatchcase(name, each) for each in presets[preset])} == wanted
    outs = {name for name in presets["attention"] if name.endswith(("to_out", "to_out.0"))}
    assert len(outs) == 2 or family != "flux2-klein-4b"


@pytest.mark.parametrize("source", ["tiny", "published"])
@pytest.mark.parametrize(("family", "component"), list(COUNTS))
def test_table_covers_every_parameter_exactly_once(family, component, source):
    library, class_name = class_of(family, component)
    config = TINY[family][component] if source == "tiny" else published(family, component)
    wanted = meta_shapes(library, class_name, config)
    assert parameter_shapes(class_name, config) == wanted
    if source == "published":
        total = sum(torch.Size(shape).numel() for shape in wanted.values())
        assert total == COUNTS[family, component]
    if class_name in LINKS:
        links = LINKS[class_name](config)
        assert Counter(part for link in links for part in link.parts) == Counter(list(wanted))
        assert max(Counter(link.original for link in links).values()) == 1


def test_other_unet_depths_are_covered():
    config = TINY["sdxl"]["unet"] | {
        "block_out_channels": [16, 32],
        "attention_head_dim": [2, 2],
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
        "transformer_layers_per_block": 2,
        "layers_per_block": 1,
        "use_linear_projection": False,
    }
    assert parameter_shapes("UNet2DConditionModel", config) == meta_shapes("diffusers", "UNet2DConditionModel", config)


@pytest.fixture(scope="module")
def sdxl_file() -> dict[str, torch.Tensor]:
    configs = TINY["sdxl"]
    draw = maker.own_stream(1)
    weights = {c: maker.random_weights(c, class_of("sdxl", c)[1], config, draw) for c, config in configs.items()}
    tensors = maker.sdxl_single_file(configs, weights, "epsilon")
    return {name: t if isinstance(t, torch.Tensor) else t.make() for name, t in tensors.items()}


def test_unet_and_vae_agree_with_diffusers(sdxl_file):
    configs = TINY["sdxl"]
    for component, convert in (
        ("unet", single_file_utils.convert_ldm_unet_checkpoint),
        ("vae", single_file_utils.convert_ldm_vae_checkpoint),
    ):
        class_name = class_of("sdxl", component)[1]
        links, (prefix,) = LINKS[class_name](configs[component]), PREFIXES[component]
        mine = ours(links, sdxl_file, parameter_shapes(class_name, configs[component]), prefix)
        assert_equal(mine, convert(dict(sdxl_file), configs[component]))


def test_text_encoders_agree_with_diffusers(sdxl_file):
    configs = TINY["sdxl"]
    (prefix,) = PREFIXES["text_encoder"]
    shapes = parameter_shapes("CLIPTextModel", configs["text_encoder"])
    mine = ours(LINKS["CLIPTextModel"](configs["text_encoder"]), sdxl_file, shapes, prefix)
    theirs = single_file_utils.convert_ldm_clip_checkpoint(dict(sdxl_file))
    theirs = {name.removeprefix("text_model."): tensor for name, tensor in theirs.items()}
    assert theirs.pop("embeddings.position_ids") is not None
    assert_equal(mine, theirs)

    (prefix,) = PREFIXES["text_encoder_2"]
    config = configs["text_encoder_2"]
    shapes = parameter_shapes("CLIPTextModelWithProjection", config)
    mine = ours(LINKS["CLIPTextModelWithProjection"](config), sdxl_file, shapes, prefix)
    assert_equal(mine, single_file_utils.convert_open_clip_checkpoint(None, dict(sdxl_file), prefix))


@pytest.mark.parametrize("family", ["flux-dev", "flux-schnell"])
def test_flux_agrees_with_diffusers(family):
    # diffusers' converter has the published width written into it; it never looks at columns, so one is enough.
    config = published(family, "transformer") | {"num_layers": 2, "num_single_layers": 2}
    generator = torch.Generator().manual_seed(0)
    originals = {
        name: torch.randn((shape[0], 1) if len(shape) == 2 else shape, generator=generator)
        for name, shape in original_shapes("FluxTransformer2DModel", config).items()
    }
    shapes = parameter_shapes("FluxTransformer2DModel", config)
    mine = ours(LINKS["FluxTransformer2DModel"](config), originals, shapes)
    assert_equal(mine, single_file_utils.convert_flux_transformer_checkpoint_to_diffusers(dict(originals)))


def test_names_of_the_published_single_files():
    # Names of sd_xl_base_1.0.safetensors, flux1-dev.safetensors and ae.safetensors, written out. diffusers' converters
    # take more names than exist, so agreeing with them does not show that the originals are named right.
    named = {
        ("sdxl", "unet"): {
            "label_emb.0.0.weight": "add_embedding.linear_1.weight",
            "input_blocks.3.0.op.weight": "down_blocks.0.downsamplers.0.conv.weight",
            "input_blocks.8.1.transformer_blocks.9.attn2.to_k.weight": (
                "down_blocks.2.attentions.1.transformer_blocks.9.attn2.to_k.weight"
            ),
            "middle_block.2.in_layers.2.weight": "mid_block.resnets.1.conv1.weight",
            "output_blocks.2.2.conv.weight": "up_blocks.0.upsamplers.0.conv.weight",
            "output_blocks.5.2.conv.bias": "up_blocks.1.upsamplers.0.conv.bias",
            "output_blocks.8.0.skip_connection.weight": "up_blocks.2.resnets.2.conv_shortcut.weight",
            "out.2.weight": "conv_out.weight",
        },
        ("flux-dev", "vae"): {
            "encoder.down.1.block.0.nin_shortcut.weight": "encoder.down_blocks.1.resnets.0.conv_shortcut.weight",
            "decoder.mid.attn_1.proj_out.weight": "decoder.mid_block.attentions.0.to_out.0.weight",
            "decoder.up.3.upsample.conv.weight": "decoder.up_blocks.0.upsamplers.0.conv.weight",
            "decoder.up.0.block.2.conv2.weight": "decoder.up_blocks.3.resnets.2.conv2.weight",
        },
        ("flux-dev", "transformer"): {
            "guidance_in.out_layer.weight": "time_text_embed.guidance_embedder.linear_2.weight",
            "double_blocks.18.txt_attn.proj.bias": "transformer_blocks.18.attn.to_add_out.bias",
            "single_blocks.37.norm.key_norm.scale": "single_transformer_blocks.37.attn.norm_k.weight",
            "final_layer.adaLN_modulation.1.weight": "norm_out.linear.weight",
        },
        ("sdxl", "text_encoder_2"): {
            "positional_embedding": "text_model.embeddings.position_embedding.weight",
            "transformer.resblocks.31.mlp.c_proj.weight": "text_model.encoder.layers.31.mlp.fc2.weight",
            "text_projection": "text_projection.weight",
        },
    }
    for (family, component), names in named.items():
        links = {link.original: link for link in LINKS[class_of(family, component)[1]](published(family, component))}
        for original, part in names.items():
            assert links[original].parts == (part,)


@pytest.mark.parametrize("op", ["rows", "swap_halves", "transpose", "squeeze"])
def test_join_and_split_are_inverse(op):
    link = Link("original", ("part",), op)
    part = torch.randn(6, 4)
    (back,) = split_original(link, join_parts(link, [part]), [6])
    assert torch.equal(back, part)
    assert join_parts(link, [part]).shape == {"transpose": (4, 6), "squeeze": (6, 4, 1, 1)}.get(op, (6, 4))


def test_harmless_patterns_match_no_weight():
    sdxl, flux = FAMILIES["sdxl"], FAMILIES["flux"]
    transformer = flux.component("transformer").prefixes
    files = (
        (sdxl.files.harmless, "sdxl", PREFIXES),
        (flux.files.harmless, "flux-dev", {"transformer": ("", *transformer), "vae": ("",)}),
    )
    for patterns, family, prefixes in files:
        for component, (prefix, *_) in prefixes.items():
            links = LINKS[class_of(family, component)[1]](published(family, component))
            names = {prefix + link.original for link in links}
            assert not [name for name in names for pattern in patterns if fnmatchcase(name, pattern)]


def test_harmless_patterns_match_what_files_have():
    for name in (
        "model_ema.diffusion_modelinput_blocks00weight",
        "denoiser.sigmas",
        "v_pred",
        "model.diffusion_model.ztsnr",
        "conditioner.embedders.0.transformer.text_model.embeddings.position_ids",
        "conditioner.embedders.1.model.logit_scale",
    ):
        assert any(fnmatchcase(name, pattern) for pattern in FAMILIES["sdxl"].files.harmless), name
    for name in ("edm_mean", "edm_vpred.sigma_max", "model.diffusion_model.edm_vpred.sigma_min"):
        assert not any(fnmatchcase(name, pattern) for pattern in FAMILIES["sdxl"].files.harmless), name


WIDTHS = {
    "unet": {
        "attention_head_dim": [2, 4],
        "block_out_channels": [128, 256],
        "cross_attention_dim": 96,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "in_channels": 9,
        "layers_per_block": 1,
        "projection_class_embeddings_input_dim": 256,
        "transformer_layers_per_block": [1, 3],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    },
    "transformer": {
        "guidance_embeds": False,
        "in_channels": 384,
        "joint_attention_dim": 96,
        "num_attention_heads": 2,
        "num_layers": 3,
        "num_single_layers": 12,
        "out_channels": 64,
        "pooled_projection_dim": 48,
    },
    "vae": {
        "block_out_channels": [32, 64],
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "latent_channels": 8,
        "layers_per_block": 1,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
    },
    "text_encoder": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 2,
        "num_hidden_layers": 11,
        "vocab_size": 100,
    },
    "text_encoder_2": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 2,
        "num_hidden_layers": 3,
        "projection_dim": 64,
        "vocab_size": 100,
    },
}


@pytest.mark.parametrize("component", list(WIDTHS))
def test_config_is_read_back_from_shapes(component):
    family = "flux-dev" if component == "transformer" else "sdxl"
    class_name = class_of(family, component)[1]
    base = published(family, component)
    config = base | WIDTHS[component]
    inferred = infer_config(family.partition("-")[0], component, original_shapes(class_name, config), base)
    assert {name: inferred[name] for name in config} == config


@pytest.mark.parametrize("family", ["flux-dev", "flux-schnell"])
def test_the_published_shapes_give_the_published_config(family):
    config = published(family, "transformer")
    shapes = original_shapes("FluxTransformer2DModel", config)
    assert infer_config("flux", "transformer", shapes, published("flux-dev", "transformer")) == config


def test_t5_config_is_read_back_from_shapes():
    base = published("flux-dev", "text_encoder_2")
    config = base | {"d_model": 64, "d_kv": 8, "num_heads": 4, "d_ff": 96, "num_layers": 2, "vocab_size": 50}
    assert infer_config("flux", "text_encoder_2", parameter_shapes("T5EncoderModel", config), base) == config


def test_config_stays_for_names_of_the_library():
    base = published("sdxl", "unet")
    assert infer_config("sdxl", "unet", {"conv_in.weight": (8, 4, 3, 3)}, base) == base


def test_unknown_rotary_division_is_refused():
    shapes = original_shapes("FluxTransformer2DModel", TINY["flux-dev"]["transformer"])
    with pytest.raises(UserError, match=r"heads of 16 .* model\.config"):
        infer_config("flux", "transformer", shapes, published("flux-dev", "transformer"))


def test_embedded_clip_tokenizers():
    first, second = (load_tokenizer(PUBLISHED / "sdxl" / name, name) for name in ("tokenizer", "tokenizer_2"))
    ids = [49406, 320, 1125, 539, 320, 2368, 49407]  # as OpenAI's and the published tokenizers give them
    for tokenizer, padding in ((first, 49407), (second, 0)):
        assert len(tokenizer) == 49408
        got = tokenizer("a photo of a cat", padding="max_length", truncation=True).input_ids
        assert got == ids + [padding] * (77 - len(ids))


def test_missing_t5_tokenizer_names_the_remedy():
    with pytest.raises(UserError, match=r"model\.config .*tokenizer_2/"):
        load_tokenizer(PUBLISHED / "flux-dev/tokenizer_2", "tokenizer_2")


def test_every_prefix_is_something_that_stands_before_a_name():
    """An empty one stood in the tables, and no reader took it."""
    for family in FAMILIES.values():
        assert all(prefix.endswith(".") for component in family.components for prefix in component.prefixes)


@pytest.mark.parametrize("class_name", sorted(DEFAULTS))
def test_what_a_config_leaves_out_is_what_its_class_takes(class_name: str) -> None:
    ours = DEFAULTS[class_name]
    if hasattr(diffusers, class_name):
        parameters = inspect.signature(getattr(diffusers, class_name).__init__).parameters
        theirs = {name: parameters[name].default for name in ours}
    else:
        config = getattr(transformers, class_name).config_class()
        theirs = {name: getattr(config, name) for name in ours}
    assert ours == {name: list(value) if isinstance(value, tuple) else value for name, value in theirs.items()}
    assert parameter_shapes(class_name, ours)  # nothing else is read without a default


@pytest.mark.parametrize("family", ["sdxl", "flux-dev", "flux-schnell"])
def test_published_configs_leave_none_of_these_out(family: str) -> None:
    """So what is filled in changes none of their digests, by which caches are found."""
    for name, (_, class_name) in json.loads(
        (PUBLISHED / family / "model_index.json").read_text(), object_pairs_hook=parts_of
    ):
        assert DEFAULTS[class_name].keys() <= published(family, name).keys()


def parts_of(pairs: list) -> list:
    return [(name, kind) for name, kind in pairs if isinstance(kind, list) and kind[1] in DEFAULTS]
