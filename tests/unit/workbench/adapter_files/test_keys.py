"""Keys of adapter files at the published sizes, against diffusers' modules on the meta device and its own converters.

Every number of a converted adapter says where it comes from, so that a swapped, shared or mistaken row is seen.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from diffusers.loaders import lora_conversion_utils as theirs
from diffusers.utils import convert_unet_state_dict_to_peft

from trainer.adapters.portable import Factors, Portable, recipe
from trainer.base.tensorfile import Recipe, write_tensors
from trainer.base.types import KeyStyle
from trainer.models.building import build
from workbench.adapter_files.keys import key_table, parsed
from workbench.adapter_files.opening import NamedModel, open_adapter, published
from workbench.adapters.convert import FORMATS, tensors_of

LABELS = {"sdxl": "sdxl", "flux-dev": "flux", "flux-schnell": "flux"}


def model(label: str) -> NamedModel:
    return next(m for m in published(LABELS[label]) if m.label == label)


def telling(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Numbers that fp32 holds, other ones for each seed, no two alike and none of them zero."""
    return 1 + seed / 4096 + torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def whole_adapter(of: NamedModel, components: list[str], *, rank: int = 1, dora: bool = False) -> Portable:
    """On every layer, with numbers of its own."""
    layers = {}
    for number, (name, shape) in enumerate(of.full_layers(components).items()):
        kernel = (1,) * (len(shape) - 2)
        factors = Factors(
            recipe(telling((rank, *shape[1:]), 3 * number)),
            recipe(telling((shape[0], rank, *kernel), 3 * number + 1)),
            0.5 * rank,
        )
        m = recipe(telling(shape[:1], 3 * number + 2).abs()) if dora else None
        layers[name] = dataclasses.replace(factors, magnitude=m)
    return Portable(layers)


def made(tensors) -> dict[str, torch.Tensor]:
    return {name: t.make() if isinstance(t, Recipe) else t for name, t in tensors.items()}


def same(one: Portable, other: Portable) -> None:
    assert one.layers.keys() == other.layers.keys()
    for name, factors in one.layers.items():
        found = other.layers[name]
        assert found.scaling == factors.scaling, name
        assert found.tensors().keys() == factors.tensors().keys(), name
        for kind, tensor in factors.tensors().items():
            assert torch.equal(found.tensors()[kind].make(), tensor.make()), (name, kind)


@pytest.mark.slow
@pytest.mark.parametrize("label", LABELS)
def test_the_tables_have_the_published_layers_one_to_one(label: str) -> None:
    """Each style names each layer once, under a key of its own; the layers are those of diffusers' class."""
    of = model(label)
    assert len(of.adaptable) == 3
    for component in of.adaptable:
        module = build(of.family.component(component), of.config(component))
        wanted = {
            name: tuple(layer.weight.shape)
            for name, layer in module.named_modules()
            if isinstance(layer, (torch.nn.Linear, torch.nn.Conv2d))
        }
        assert of.layers(component) == wanted and list(of.layers(component)) != []
        layers, links = {component: wanted}, {component: of.modules(component)}
        styles = [style for style in of.family.adapter_keys if style.component == component]
        assert len(styles) >= 3
        for style in styles:
            table = key_table([style], layers, links)
            covered = [part for module in table.values() for part in module.link.parts]
            if style.links:  # of some layers alone
                assert set(covered) <= {f"{component}.{name}" for name in wanted}, style
                continue
            assert sorted(covered) == sorted(f"{component}.{name}" for name in wanted), style
            single = len([link for link in links[component] if set(link.parts) <= wanted.keys()])
            assert len(table) == (single if style.original else len(wanted)), style


def encoder_stems(label: str) -> dict[str, str]:
    """By sd-scripts' names of the text encoders' layers, written out here, ours. networks/lora.py, lora_flux.py."""
    clip = ["self_attn_q_proj", "self_attn_k_proj", "self_attn_v_proj", "self_attn_out_proj", "mlp_fc1", "mlp_fc2"]
    dotted = {end: end.replace("attn_", "attn.").replace("mlp_", "mlp.") for end in clip}
    wanted = {
        f"lora_te1_text_model_encoder_layers_{i}_{end}": f"text_encoder.encoder.layers.{i}.{name}"
        for i in range(12)
        for end, name in dotted.items()
    }
    if label == "sdxl":
        return wanted | {
            f"lora_te2_text_model_encoder_layers_{i}_{end}": f"text_encoder_2.text_model.encoder.layers.{i}.{name}"
            for i in range(32)
            for end, name in dotted.items()
        }
    t5 = {f"layer_0_SelfAttention_{end}": f"layer.0.SelfAttention.{end}" for end in "qkvo"}
    t5 |= {f"layer_1_DenseReluDense_{end}": f"layer.1.DenseReluDense.{end}" for end in ("wi_0", "wi_1", "wo")}
    return wanted | {
        f"lora_te3_encoder_block_{i}_{end}": f"text_encoder_2.encoder.block.{i}.{name}"
        for i in range(24)
        for end, name in t5.items()
    }


@pytest.mark.parametrize("label", LABELS)
def test_kohyas_names_of_the_text_encoders_are_sd_scripts(label: str) -> None:
    """No layer of one encoder is under a name of the other."""
    of = model(label)
    encoders = [name for name in of.adaptable if name != of.family.denoiser]
    adapter = whole_adapter(of, encoders)
    stems, ours = parsed(tensors_of(adapter, of, "kohya", None, []), "ours"), encoder_stems(label)
    assert stems.keys() - ours.keys() <= {"lora_te2_text_projection"} and ours.keys() <= stems.keys()
    assert sorted(ours.values()) == sorted(name for name in adapter.layers if not name.endswith("text_projection"))
    state = made(tensors_of(adapter, of, "kohya", None, []))
    for stem, name in ours.items():
        assert torch.equal(state[stems[stem]["a"]], adapter.layers[name].a.make()), stem
        assert torch.equal(state[stems[stem]["b"]], adapter.layers[name].b.make()), stem


def test_a_stem_of_two_meanings_is_a_fault_of_the_table() -> None:
    style = KeyStyle("kohya", "unet", "lora_unet_", flat=True)
    with pytest.raises(AssertionError, match="lora_unet_a_b has two meanings"):
        key_table([style], {"unet": ["a.b", "a_b"]}, {})


ALL_WAYS = [(label, to) for label in LABELS for to in FORMATS if to != "lora"]
QUICK_WAYS = [("sdxl", "kohya"), ("flux-dev", "kohya"), ("flux-schnell", "diffusers")]


@pytest.mark.parametrize(
    ("label", "to"), [way if way in QUICK_WAYS else pytest.param(*way, marks=pytest.mark.slow) for way in ALL_WAYS]
)
def test_every_layer_travels_to_every_format_and_back(label: str, to: str, tmp_path: Path) -> None:
    """All layers of the denoiser and of both text encoders, at full size, bit for bit, through a file."""
    of = model(label)
    adapter = whole_adapter(of, of.adaptable)
    assert {name.partition(".")[0] for name in adapter.layers} == set(of.adaptable)
    path = tmp_path / "a.safetensors"
    tensors = tensors_of(adapter, of, to, None, [])
    metadata = dict(of.hints)
    if to == "diffusers":
        from trainer.adapters.export import diffusers_metadata

        metadata |= diffusers_metadata(adapter)
    write_tensors(path, tensors, metadata)
    opened = open_adapter(path)
    assert opened.labels[0] == label and len(opened.read.absent) == 0
    same(adapter, opened.portable)


def test_kohyas_flux_names_are_those_that_diffusers_converts() -> None:
    """Its converter of sd-scripts' files gives the layers, the rows and the halves that ours has."""
    of = model("flux-dev")
    adapter = whole_adapter(of, ["transformer"])
    # diffusers bakes the scale into A, and forgets alphas outside of the blocks: a scale of one.
    adapter = adapter.with_layers({n: dataclasses.replace(f, alpha=float(f.rank)) for n, f in adapter.layers.items()})
    converted = theirs._convert_kohya_flux_lora_to_diffusers(made(tensors_of(adapter, of, "kohya", None, [])))
    # Outside of the blocks it leaves out its own prefix.
    converted = {name if name.startswith("transformer.") else f"transformer.{name}": t for name, t in converted.items()}
    split = parsed(converted, "theirs")
    assert split.keys() == adapter.layers.keys()
    for name, factors in adapter.layers.items():
        a, b = (converted[split[name][role]] for role in "ab")
        assert torch.equal(a, factors.a.make()) and torch.equal(b, factors.b.make()), name


@pytest.mark.parametrize("to", ["kohya", "onetrainer"])
def test_kohyas_sdxl_names_are_those_that_diffusers_converts(to: str) -> None:
    """Both block naming schemes: of the original, and of diffusers."""
    of = model("sdxl")
    adapter = whole_adapter(of, ["unet"])
    if to == "onetrainer":  # diffusers' converter makes one name of these two
        adapter = adapter.with_layers({n: f for n, f in adapter.layers.items() if "add_embedding" not in n})
    state = made(tensors_of(adapter, of, to, None, []))
    config = type("Config", (), {"layers_per_block": 2})
    state = theirs._maybe_map_sgm_blocks_to_diffusers(state, config)
    converted, alphas = theirs._convert_non_diffusers_lora_to_diffusers(state)
    peft = convert_unet_state_dict_to_peft(converted)
    assert len(alphas) == len(adapter.layers)
    found = parsed(peft, "theirs")
    assert found.keys() == adapter.layers.keys()
    for name, factors in adapter.layers.items():
        assert torch.equal(peft[found[name]["a"]], factors.a.make()) and torch.equal(peft[found[name]["b"]], factors.b.make())
    # As diffusers wrote them before PEFT, they are read as well.
    assert parsed(converted, "theirs").keys() == adapter.layers.keys()
