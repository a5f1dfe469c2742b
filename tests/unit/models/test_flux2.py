"""FLUX.2's room on a tiny model, against diffusers' own pipeline bit by bit and a forward pass in fp64 written here."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import Flux2KleinPipeline
from PIL import Image
from torch import nn
from torch.nn.functional import layer_norm, scaled_dot_product_attention, silu

from scripts import make_model
from trainer.base.errors import UserError
from trainer.base.types import Conditioning
from trainer.data import buckets
from trainer.kernels import dora_torch
from trainer.models import FAMILIES
from trainer.models.base import Markers, Model, SampleRequest
from trainer.models.flux2 import distillation, sample
from trainer.models.loading import load_tokenizers
from trainer.models.opening import open_model
from trainer.models.shared.flow import positions, resolution_shift
from trainer.models.shared.patched_vae import encode_images, patches
from trainer.models.weight_sets import Wanted

FAMILY, CPU = FAMILIES["flux2"], torch.device("cpu")
EULER = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
CAPTIONS = ["a photo of zwx candle on a table", "", "many words of a caption that is cut " * 120]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("flux2") / "model"
    assert make_model.main(["--size", "tiny", "--family", "flux2", "--layout", "diffusers", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    """All parts in fp32, loaded as a run does."""
    source = open_model(FAMILY, str(folder))
    parts = [component.name for component in FAMILY.components]
    modules = {name: source.load(name, swap=lambda module: (), device=CPU).float() for name in parts}
    configs = {name: source.config(name) for name in parts}
    compute = dict.fromkeys(parts, torch.float32)
    tokenizers = load_tokenizers(FAMILY, source)
    return Model(modules, configs, tokenizers, source.scheduler, compute, CPU, {"distillation": source.markers.distillation})


@pytest.fixture(scope="module")
def stock(folder: Path) -> Flux2KleinPipeline:
    pipeline = Flux2KleinPipeline.from_pretrained(folder, torch_dtype=torch.float32, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def encoded(model: Model) -> Conditioning:
    with torch.no_grad():
        return FAMILY.encode_prompts(model, CAPTIONS)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def photo(width: int, height: int) -> torch.Tensor:
    return torch.rand(2, 3, height, width, generator=torch.Generator().manual_seed(3)) * 2 - 1


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("size", [(64, 64), (70, 83), (1024, 1024), (1025, 1024), (2000, 700), (1333, 2001)])
def test_a_reference_is_shown_as_the_stock_pipeline_shows_it(stock, size: tuple[int, int]) -> None:
    """Pixel by pixel: its own size in multiples of 16, shrunk where it is larger than 1024 x 1024."""
    image, processor = noise(*size), stock.image_processor
    bucket = buckets.reference_bucket(*size, step=16)
    theirs = processor._resize_if_exceeds_area(image)
    width, height = (side // 16 * 16 for side in theirs.size)
    assert bucket == (width, height)
    ours = buckets.to_pixels(buckets.show_reference(image, bucket))
    assert torch.equal(ours[None], processor.preprocess(theirs, height=height, width=width, resize_mode="crop"))
    flipped = buckets.to_pixels(buckets.show_reference(image, bucket, flip=True))
    assert torch.equal(flipped, ours.flip(2))


@pytest.mark.parametrize("size", [(63, 64), (64, 513), (1000, 100)])
def test_a_reference_that_the_stock_pipeline_refuses_is_refused(stock, size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="too small|too extreme"):
        stock.image_processor.check_image_input(noise(*size))
    with pytest.raises(ValueError, match=f"{size[0]} x {size[1]} pixels; a reference has sides of at least 64 pixels"):
        buckets.reference_bucket(*size, step=16)


@pytest.mark.slow
def test_captions_are_read_as_the_stock_pipeline_reads_them(model: Model, stock, encoded: Conditioning) -> None:
    """Each alone, whatever stands beside it; all 512 rows, none of them masked, and the padding's are not zero."""
    with torch.no_grad():
        theirs, ids = stock.encode_prompt(CAPTIONS)
    assert torch.equal(encoded.sequence, theirs) and encoded.mask is None and encoded.pooled is None
    assert encoded.sequence.shape == (3, 512, 3 * 32) and bool(encoded.sequence[1].any(1).all())
    assert torch.equal(positions(0, 1, 1, 512, device=CPU), ids[0].float())
    counts, most = FAMILY.text.count(model, CAPTIONS)["tokenizer"]
    assert most == 512 and counts[1] < counts[0] < 512 < counts[2]


@pytest.mark.slow
def test_padding_has_the_positions_that_follow_the_caption(model: Model, encoded: Conditioning) -> None:
    """Whatever the library makes of a mask: of padding transformers 4.57 made position 1, and 5 made 0 (diffusers' flux3)."""
    ids, present = torch.stack(list(FAMILY.text.tokens(model, "text_encoder", CAPTIONS))).unbind(1)
    mask = torch.ones(512, 512, dtype=torch.bool).tril() & present.bool()[:, None, None, :]
    with torch.no_grad():
        states = model.modules["text_encoder"](
            ids, attention_mask=mask, position_ids=torch.arange(512)[None], use_cache=False, output_hidden_states=True
        ).hidden_states
    assert torch.equal(encoded.sequence, torch.cat([states[layer] for layer in (9, 18, 27)], dim=-1))


def test_the_chat_message_ends_with_an_empty_think_block(model: Model) -> None:
    """Which Qwen3's template adds with thinking off; diffusion-pipe left the template out, and its loss stayed high."""
    tokenizer, (tokens, *_) = model.tokenizers["tokenizer"], FAMILY.text.tokens(model, "text_encoder", CAPTIONS[:1])
    ids, present = tokens
    read = tokenizer.decode(ids[present.bool()])
    assert read == f"<|im_start|>user\n{CAPTIONS[0]}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert ids.shape == (512,) and present.sum() < 60 and set(ids[~present.bool()].tolist()) == {tokenizer.pad_token_id}


def test_no_layer_is_built_above_the_last_that_is_read(model: Model, stock) -> None:
    assert len(stock.text_encoder.model.layers) == 28 and len(model.modules["text_encoder"].layers) == 27


@pytest.mark.parametrize(("width", "height"), [(64, 64), (48, 80)])
def test_latents_are_the_stock_pipelines(model: Model, stock, width: int, height: int) -> None:
    """The posterior's mode, in patches, normalised by statistics that stay as they are."""
    vae, pixels = model.modules["vae"], photo(width, height)
    before = [each.clone() for each in (vae.bn.running_mean, vae.bn.running_var)]
    with torch.no_grad():
        ours = encode_images(model, pixels)
        assert torch.equal(ours, stock._encode_vae_image(pixels, None))
        again = stock._unpatchify_latents(ours * torch.sqrt(before[1] + 1e-4).view(1, -1, 1, 1) + before[0].view(1, -1, 1, 1))
        decoded, theirs = vae.decode(again).sample, stock.vae.decode(stock.vae.encode(pixels).latent_dist.mode()).sample
    assert ours.shape == (2, 16, height // 16, width // 16) and not vae.training
    assert all(map(torch.equal, before, (vae.bn.running_mean, vae.bn.running_var)))
    torch.testing.assert_close(decoded, theirs, rtol=0, atol=1e-5)  # what normalising and its inverse round


def test_patches_are_the_stock_pipelines() -> None:
    latents = drawn(2, 3, 4, 6)
    assert torch.equal(patches(latents), Flux2KleinPipeline._patchify_latents(latents))


def velocity(
    model: Model, latents: torch.Tensor, time: torch.Tensor, text: torch.Tensor, *references: torch.Tensor
) -> torch.Tensor:
    batch = SimpleNamespace(references=references)  # it reads nothing else of the batch
    return FAMILY.images.predict(model, latents, time, Conditioning(text), batch)


@pytest.mark.parametrize(("height", "width", "shown"), [(4, 4, ()), (3, 5, ()), (4, 4, ((3, 5),)), (3, 5, ((4, 4), (2, 6)))])
def test_the_velocity_is_the_stock_pipelines_and_that_of_fp64(
    model: Model, stock, encoded, height: int, width: int, shown: tuple[tuple[int, int], ...]
) -> None:
    """Also with one and with two references, whose order counts."""
    latents, time = drawn(2, 16, height, width), torch.tensor([0.501, 0.037])
    references = [drawn(2, 16, *size, seed=7 + index) for index, size in enumerate(shown)]
    text = encoded.sequence[:2]
    img_ids = stock._prepare_latent_ids(latents)
    if references:
        img_ids = torch.cat([img_ids, stock._prepare_image_ids([each[:1] for each in references]).expand(2, -1, -1)], 1)
    with torch.no_grad():
        ours = velocity(model, latents, time, text, *references)
        theirs = stock.transformer(
            hidden_states=torch.cat([stock._pack_latents(each) for each in (latents, *references)], 1),
            encoder_hidden_states=text, timestep=time, guidance=None, txt_ids=stock._prepare_text_ids(text),
            img_ids=img_ids, return_dict=False,
        )[0][:, : height * width]  # fmt: skip
        if len(references) > 1:
            turned = velocity(model, latents, time, text, *references[::-1])
            assert (turned - ours).norm() > 1e-4 * ours.norm()
    assert torch.equal(ours, theirs.transpose(1, 2).unflatten(2, (height, width)))
    exact = forward(model.modules["transformer"], latents, time, text, *references)
    assert (ours - exact).norm() <= 2**-18 * exact.norm()  # fp32 rounds by 2^-24, some sixty operations deep
    target = drawn(2, 16, height, width, seed=1)
    loss, wanted = ((ours - target) ** 2).mean(), ((exact - target) ** 2).mean()
    assert abs(loss.item() / wanted.item() - 1) < 1e-6


def forward(
    module: nn.Module, latents: torch.Tensor, time: torch.Tensor, text: torch.Tensor, *references: torch.Tensor
) -> torch.Tensor:
    """The transformer in fp64, from its weights by the library's names: the FLUX.2 reference (src/flux2/model.py) in words.

    One modulation for all blocks of a kind; LayerNorms without weights; RMSNorm of queries and keys; four rotary axes of
    theta 2000, over neighbouring pairs; text first; SwiGLU; the last modulation gives scale and then shift. References come
    last, as images 10, 20, ...
    """
    w = {name: parameter.double() for name, parameter in module.named_parameters()}
    heads, size = module.config.num_attention_heads, module.config.attention_head_dim

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}.weight"].T

    def rms(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w[f"{name}.weight"]

    def norm(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift

    def split(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (heads, size)).transpose(1, 2)

    def swiglu(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return silu(gate) * up

    def turned(x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(turned(query), turned(key), value).transpose(1, 2).flatten(2)

    (_, _, rows, columns), length = latents.shape, text.shape[1]
    images = [(10 * number, *each.shape[-2:]) for number, each in enumerate((latents, *references))]
    places = [(0, 0, 0, at) for at in range(length)] + [
        (number, row, column, 0) for number, high, wide in images for row in range(high) for column in range(wide)
    ]
    axes = [
        torch.outer(
            torch.tensor([place[axis] for place in places]).double(), 2000.0 ** -(torch.arange(0, width, 2).double() / width)
        )
        for axis, width in enumerate(module.config.axes_dims_rope)
    ]
    angles = torch.cat(axes, -1)
    turns = torch.polar(torch.ones_like(angles), angles)

    frequencies = torch.exp(-math.log(10000) * torch.arange(128).double() / 128)
    arguments = 1000 * time.double()[:, None] * frequencies
    embedded = torch.cat([arguments.cos(), arguments.sin()], -1)
    embed = "time_guidance_embed.timestep_embedder"
    temb = linear(silu(linear(embedded, f"{embed}.linear_1")), f"{embed}.linear_2")

    def modulation(name: str, count: int) -> tuple[torch.Tensor, ...]:
        return linear(silu(temb), f"{name}.linear")[:, None].chunk(count, -1)

    image, words = (
        linear(torch.cat([e.double().flatten(2).transpose(1, 2) for e in (latents, *references)], 1), "x_embedder"),
        linear(text.double(), "context_embedder"),
    )
    of_image, of_text = (modulation(f"double_stream_modulation_{kind}", 6) for kind in ("img", "txt"))
    for i in range(module.config.num_layers):
        at = f"transformer_blocks.{i}"
        a, b = norm(image, *of_image[:2]), norm(words, *of_text[:2])
        q, k, v = (
            torch.cat([split(linear(b, f"{at}.attn.add_{n}_proj")), split(linear(a, f"{at}.attn.to_{n}"))], 2) for n in "qkv"
        )
        q = torch.cat([rms(q[:, :, :length], f"{at}.attn.norm_added_q"), rms(q[:, :, length:], f"{at}.attn.norm_q")], 2)
        k = torch.cat([rms(k[:, :, :length], f"{at}.attn.norm_added_k"), rms(k[:, :, length:], f"{at}.attn.norm_k")], 2)
        out = attend(q, k, v)
        image = image + of_image[2] * linear(out[:, length:], f"{at}.attn.to_out.0")
        words = words + of_text[2] * linear(out[:, :length], f"{at}.attn.to_add_out")
        feed = swiglu(linear(norm(image, *of_image[3:5]), f"{at}.ff.linear_in"))
        image = image + of_image[5] * linear(feed, f"{at}.ff.linear_out")
        feed = swiglu(linear(norm(words, *of_text[3:5]), f"{at}.ff_context.linear_in"))
        words = words + of_text[5] * linear(feed, f"{at}.ff_context.linear_out")
    both, of_both = torch.cat([words, image], 1), modulation("single_stream_modulation", 3)
    for i in range(module.config.num_single_layers):
        at = f"single_transformer_blocks.{i}.attn"
        fused = linear(norm(both, *of_both[:2]), f"{at}.to_qkv_mlp_proj")
        q, k, v = (split(part) for part in fused[..., : 3 * heads * size].chunk(3, -1))
        out = attend(rms(q, f"{at}.norm_q"), rms(k, f"{at}.norm_k"), v)
        both = both + of_both[2] * linear(torch.cat([out, swiglu(fused[..., 3 * heads * size :])], -1), f"{at}.to_out")
    scale, shift = linear(silu(temb), "norm_out.linear")[:, None].chunk(2, -1)
    out = linear(norm(both[:, length:], shift, scale), "proj_out")
    return out[:, : rows * columns].transpose(1, 2).unflatten(2, (rows, columns))


def test_our_attention_is_the_librarys(model: Model, encoded: Conditioning) -> None:
    """Of both kinds of blocks, with torch's own attention put in."""
    latents, time, transformer = drawn(1, 16, 4, 4), torch.tensor([0.3]), model.modules["transformer"]
    layers = {name: layer for name, layer in transformer.named_modules() if hasattr(layer, "set_processor")}
    before = {name: layer.processor for name, layer in layers.items()}
    with torch.no_grad():
        theirs = velocity(model, latents, time, encoded.sequence[:1])
        for layer in layers.values():
            layer.set_processor(FAMILY.memory.attention(layer, scaled_dot_product_attention, dora_torch))
        ours = velocity(model, latents, time, encoded.sequence[:1])
    for name, layer in layers.items():
        layer.set_processor(before[name])
    assert len({type(FAMILY.memory.attention(layer, None, dora_torch)) for layer in layers.values()}) == 2
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "guidance", "sizes"),
    [("base", 4.0, ()), ("distilled", 1.0, ()), pytest.param("base", 4.0, ((70, 83), (1100, 1000)), marks=pytest.mark.slow)],
)
def test_a_sample_is_the_stock_pipelines(
    model: Model, stock, encoded: Conditioning, kind: str, guidance: float, sizes: tuple[tuple[int, int], ...]
) -> None:
    """The base model takes a second pass for its guidance, the distilled one none. Also with references."""
    model.options = {"distillation": kind}
    passes = []
    hook = model.modules["transformer"].register_forward_hook(lambda *_: passes.append(1))
    shown = tuple(noise(*size, seed=index) for index, size in enumerate(sizes))
    request = SampleRequest(CAPTIONS[0], "", 48, 64, seed=5, steps=3, guidance=None, images=shown)
    with torch.no_grad():
        ours = sample(model, request, Conditioning(encoded.sequence[:1]), Conditioning(encoded.sequence[1:2]))
    hook.remove()
    stock.register_to_config(is_distilled=kind == "distilled")
    theirs = stock(
        prompt=CAPTIONS[0], width=48, height=64, num_inference_steps=3, guidance_scale=guidance,
        generator=torch.Generator("cpu").manual_seed(5), image=list(shown) or None,
    ).images[0]  # fmt: skip
    assert isinstance(ours, Image.Image) and np.array_equal(np.asarray(ours), np.asarray(theirs))
    assert len(passes) == (6 if kind == "base" else 3)


def test_times_are_uniform_and_others_are_shifted_by_the_resolution() -> None:
    base = Markers(distillation="base")
    for timesteps, shift in (("auto", 1.0), ("uniform", 1.0), ("sigmoid", 1.0), ("logit_normal", resolution_shift)):
        found = FAMILY.images.objective(EULER, base, timesteps=timesteps)
        assert found.shift == shift and found.times.timesteps == ("uniform" if timesteps == "auto" else timesteps)
    assert FAMILY.images.objective(EULER, base, shift=3.0).shift == 3.0


def test_a_distilled_model_is_refused_unless_it_is_allowed() -> None:
    with pytest.raises(UserError, match=r"the distilled model .* training it collapses.*model\.allow_distilled = true"):
        FAMILY.images.objective(EULER, Markers(distillation="distilled"))
    FAMILY.images.objective(EULER, Markers(distillation="distilled"), allow_distilled=True)
    with pytest.raises(
        UserError, match=r"neither .*is_distilled.* nor its name .* set model\.variant = 'base' or 'distilled'"
    ):
        FAMILY.images.objective(EULER, Markers())
    names = ("FLUX.2-klein-base-4B", "flux-2-klein-9b", "my_finetune", "base", "my-klein-style", "database-klein-4b")
    assert [distillation(name) for name in names] == ["base", "distilled", None, None, None, "distilled"]


@pytest.mark.slow
def test_base_or_distilled_is_told_by_the_index_else_by_what_is_asked_for_else_by_the_name(folder: Path, tmp_path) -> None:
    def told(path: Path, **how) -> str | None:
        return open_model(FAMILY, str(path), **how).markers.distillation

    made = {}
    for layout, name in (("diffusers", "model"), ("single_file", "mine.safetensors")):
        made[layout] = tmp_path / "distilled" / name
        wanted = ["--size", "tiny", "--family", "flux2", "--layout", layout, "--variant", "distilled"]
        assert make_model.main([*wanted, str(made[layout])]) == 0
    whole = made["diffusers"]
    assert told(folder) == "base" and told(whole) == told(made["single_file"]) == "distilled"
    for part in (whole / "transformer", whole / "transformer" / "diffusion_pytorch_model.safetensors"):
        assert told(folder, component_paths={"transformer": str(part)}) == "distilled"
    named = tmp_path / "flux-2-klein-4b.safetensors"
    made["single_file"].rename(named)
    assert told(folder, component_paths={"transformer": str(named)}) == "distilled"
    with pytest.raises(
        UserError,
        match=r"model\.variant = 'base': the model is distilled, as .*json says \(is_distilled = true\); leave it out",
    ):
        told(whole, wanted=Wanted("base"))
    silent = tmp_path / "FLUX.2-klein-4B"
    silent.symlink_to(folder)
    assert (told(silent), told(silent, wanted=Wanted("base"))) == ("distilled", "base")
    index = json.loads((whole / "model_index.json").read_text())
    (whole / "model_index.json").write_text(json.dumps(index | {"_class_name": "Flux2KleinKVPipeline"}))
    with pytest.raises(UserError, match="keeps keys and values of its references"):
        told(whole)


def test_a_tokenizer_without_a_chat_template_is_refused(folder: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    settings = model / "tokenizer" / "tokenizer_config.json"
    config = json.loads(settings.read_text())
    template = config.pop("chat_template")
    settings.write_text(json.dumps(config))
    with pytest.raises(UserError, match="the tokenizer in .* has no chat template"):
        open_model(FAMILY, str(model)).check_tokenizers()
    (model / "tokenizer" / "chat_template.jinja").write_text(template)
    open_model(FAMILY, str(model)).check_tokenizers()


@pytest.mark.parametrize(
    ("component", "changed", "said"),
    [
        ("transformer", {"guidance_embeds": True}, r"it is FLUX\.2 \[dev\], which is not trained here"),
        ("text_encoder", {"num_hidden_layers": 20}, "has 20 layers, and the text is read after layers 9, 18, 27"),
        ("text_encoder", {"hidden_size": 48}, r"= 96, the numbers .* config.json \(hidden_size\) give 48 \+ 48 \+ 48"),
        ("vae", {"latent_channels": 8}, r"reads 16 channels and predicts 32 \(out_channels\), the vae gives 8 \(each in 4\)"),
    ],
)  # fmt: skip
def test_parts_that_do_not_belong_together_are_refused(folder: Path, component: str, changed: dict, said: str) -> None:
    source = open_model(FAMILY, str(folder))
    configs = {part.name: source.config(part.name) for part in FAMILY.components}
    FAMILY.files.check(configs, 16)
    with pytest.raises(UserError, match=said):
        FAMILY.files.check(configs | {component: configs[component] | changed}, 16)


@pytest.mark.slow
def test_a_single_file_says_its_size_by_its_shapes(tmp_path: Path) -> None:
    """diffusers takes every file of FLUX.2 for one of dev's size."""
    out = tmp_path / "flux-2-klein-base-9b.safetensors"
    options = ["--size", "full", "--variant", "9b", "--sparse", "--family", "flux2", "--layout", "single_file"]
    assert make_model.main([*options, str(out)]) == 0
    alone = tmp_path / "alone" / out.name
    alone.parent.mkdir()
    out.rename(alone)
    source = open_model(FAMILY, str(alone))
    config = source.config("transformer")
    assert (config["num_layers"], config["num_single_layers"], config["joint_attention_dim"]) == (8, 24, 12288)
    assert source.config("text_encoder")["hidden_size"] == 4096  # of the embedded configs
    source.verify("transformer")


def test_a_gate_that_is_adapted_needs_what_it_multiplies() -> None:
    assert (
        FAMILY.memory.unread_beside(["transformer.transformer_blocks.0.attn.to_q"], half=False) == FAMILY.memory.unread != ()
    )
    for adapted in ("transformer.double_stream_modulation_img.linear", "transformer.single_stream_modulation.linear",
                    "transformer.time_guidance_embed.timestep_embedder.linear_1"):  # fmt: skip
        assert FAMILY.memory.unread_beside([adapted], half=False) == ()
