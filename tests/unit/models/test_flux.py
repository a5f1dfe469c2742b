"""Flux's room: tokens, times, latents, lengths; a tiny Kontext against diffusers' pipeline bit by bit, and fp64 here."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import FluxKontextPipeline, FluxPipeline
from PIL import Image
from torch import nn
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention, silu

from scripts import make_model
from tests.unit.models.test_variants import DEV, UNGUIDED, lines, opened
from trainer.base.errors import UserError
from trainer.base.types import Conditioning
from trainer.data import buckets
from trainer.models import FAMILIES
from trainer.models.base import Markers, Model, SampleRequest
from trainer.models.flux import REFERENCE_SIZES, metadata, pack, sample, t5_length, unpack
from trainer.models.loading import load_tokenizers
from trainer.models.opening import open_model
from trainer.models.shared.flow import keep_time_exact, positions, resolution_shift
from trainer.models.shared.vae import encode_images
from trainer.models.weight_sets import Wanted

FLUX, CPU = FAMILIES["flux"], torch.device("cpu")
EULER, HEUN = ({"_class_name": f"FlowMatch{kind}DiscreteScheduler"} for kind in ("Euler", "Heun"))
CAPTIONS = ["turn the candle blue", "", "many words of a caption that is cut " * 120]


def test_tokens_are_two_by_two_patches_row_by_row() -> None:
    """As diffusers packs them."""
    from diffusers import FluxPipeline

    latents = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(pack(latents), FluxPipeline._pack_latents(latents, 2, 3, 4, 6))
    assert torch.equal(unpack(pack(latents), 4, 6), latents)
    assert positions(0, 2, 3, device="cpu").tolist() == [[0.0, row, column] for row in range(2) for column in range(3)]


def test_times_are_shifted_but_under_the_name_that_says_not() -> None:
    for timesteps, shift, found in (
        ("auto", "auto", resolution_shift), ("sigmoid", "auto", 1.0), ("auto", 3.0, 3.0),
    ):  # fmt: skip
        for scheduler in (EULER, HEUN):
            assert FLUX.images.objective(scheduler, Markers(), timesteps=timesteps, shift=shift).shift == found
    with pytest.raises(UserError, match="FlowMatchLCMScheduler', of a distilled model"):
        FLUX.images.objective({"_class_name": "FlowMatchLCMScheduler"}, Markers())
    with pytest.raises(UserError, match="_class_name = 'FlowMatchOther', which is not trained as flux"):
        FLUX.images.objective({"_class_name": "FlowMatchOther"}, Markers())


def test_the_time_embedding_gets_its_time_in_fp32() -> None:
    """diffusers casts it to the activations' dtype before it multiplies: of 0.501 in bf16 0.5 would be left."""
    seen = []

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time_text_embed = nn.Module()
            self.time_text_embed.timestep_embedder = nn.Identity()
            self.time_text_embed.forward = lambda *given: seen.append(given)

        def forward(self, hidden, timestep, guidance=None):
            time, more = timestep.to(hidden.dtype) * 1000, () if guidance is None else (guidance.to(hidden.dtype) * 1000,)
            self.time_text_embed(time, *more, hidden)

    transformer = Transformer()
    keep_time_exact(transformer, transformer.time_text_embed)
    hidden = torch.zeros(1, dtype=torch.bfloat16)
    transformer(hidden, timestep=torch.tensor([0.501]))
    transformer(hidden, timestep=torch.tensor([0.501]), guidance=torch.tensor([3.503]))
    assert [len(given) for given in seen] == [2, 3]
    assert all(given[0].item() == pytest.approx(501) and given[-1] is hidden for given in seen)
    assert seen[1][1].item() == pytest.approx(3503)


class Vae:
    config = SimpleNamespace(shift_factor=0.5, scaling_factor=4.0, block_out_channels=(1, 1))
    use_tiling = False

    def encode(self, pixels: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(latent_dist=SimpleNamespace(mean=pixels, sample=lambda: pixels + 1))


def test_latents_are_the_posteriors_mean_shifted_and_then_scaled() -> None:
    model = Model({"vae": Vae()}, {}, {}, {}, {}, torch.device("cpu"))
    assert encode_images(model, torch.full((1, 3, 8, 8), 2.0)).unique().tolist() == [(2.0 - 0.5) * 4.0]


def test_a_length_is_the_chosen_one_or_the_models_and_never_the_tokenizers_to_cut() -> None:
    def length(longest: int, guided: bool, **options: int) -> int:
        tokenizers = {"tokenizer_2": SimpleNamespace(model_max_length=longest)}
        return t5_length(
            Model({}, {"transformer": {"guidance_embeds": guided}}, tokenizers, {}, {}, torch.device("cpu"), options)
        )

    assert (length(512, True), length(512, False), length(128, True)) == (512, 256, 128)
    assert length(512, False, text_length=300) == 300
    with pytest.raises(
        UserError, match="data.text_length = 300 is more than the model's T5 tokenizer takes; use at most 256"
    ):
        length(256, True, text_length=300)


def test_gates_and_fp16_keep_the_products_of_a_recomputed_block() -> None:
    """A gate that is adapted needs a gradient, and a clip in fp16 reads what it clipped."""
    assert FLUX.memory.unread_beside(["transformer.transformer_blocks.0.attn.to_q"], half=False) == FLUX.memory.unread != ()
    for adapted, half in (
        ([], True), (["text_encoder.encoder.layers.0.mlp.fc1"], False),
        (["transformer.time_text_embed.timestep_embedder"], False),
        (["transformer.transformer_blocks.0.norm1.linear"], False),
    ):  # fmt: skip
        assert FLUX.memory.unread_beside(adapted, half=half) == ()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kontext") / "model"
    wanted = ["--size", "tiny", "--family", "flux", "--variant", "kontext", "--layout", "diffusers", str(folder)]
    assert make_model.main(wanted) == 0
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    """All parts in fp32, loaded as a run does."""
    source = open_model(FLUX, str(folder))
    parts = [component.name for component in FLUX.components]
    modules = {name: source.load(name, swap=lambda module: (), device=CPU).float() for name in parts}
    configs, compute = {name: source.config(name) for name in parts}, dict.fromkeys(parts, torch.float32)
    options = {"distillation": source.markers.distillation, "guidance": 1.5}
    return Model(modules, configs, load_tokenizers(FLUX, source), source.scheduler, compute, CPU, options)


@pytest.fixture(scope="module")
def stock(folder: Path) -> FluxKontextPipeline:
    pipeline = FluxKontextPipeline.from_pretrained(folder, torch_dtype=torch.float32, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def encoded(model: Model) -> Conditioning:
    with torch.no_grad():
        return FLUX.encode_prompts(model, CAPTIONS)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


class Shown(Exception):
    """Carries what the stock pipeline would encode."""


@pytest.mark.parametrize(
    "size", [(64, 64), (70, 83), (1000, 1000), (690, 1510), (1031, 517), (300, 2000), (2000, 300), (308, 247)]
)
def test_a_reference_is_shown_as_the_stock_pipeline_shows_it(stock, monkeypatch, size: tuple[int, int]) -> None:
    """Pixel by pixel: the whole image, at the size of the nearest aspect ratio of seventeen."""
    image = noise(*size)

    def stop(image: torch.Tensor, generator: object) -> None:
        raise Shown(image)

    monkeypatch.setattr(stock, "_encode_vae_image", stop)
    with pytest.raises(Shown) as shown:
        stock(image=[image], prompt="", height=64, width=64)
    bucket = buckets.nearest_size(*size, REFERENCE_SIZES, step=16)
    assert bucket in REFERENCE_SIZES and len(REFERENCE_SIZES) == 17
    ours = buckets.fit(image, bucket, crop=buckets.WHOLE)
    assert torch.equal(buckets.to_pixels(ours)[None], shown.value.args[0])


def test_captions_are_read_as_the_stock_pipeline_reads_them(stock, encoded: Conditioning) -> None:
    with torch.no_grad():
        sequence, pooled, ids = stock.encode_prompt(CAPTIONS, None)
    assert torch.equal(encoded.sequence, sequence) and torch.equal(encoded.pooled, pooled) and encoded.mask is None
    assert encoded.sequence.shape[:2] == (3, 512) and not ids.any()


def test_latents_are_the_stock_pipelines(model: Model, stock) -> None:
    pixels = torch.rand(2, 3, 48, 80, generator=torch.Generator().manual_seed(3)) * 2 - 1
    with torch.no_grad():
        assert torch.equal(encode_images(model, pixels), stock._encode_vae_image(pixels, None))


@pytest.mark.parametrize(("height", "width", "shown"), [(8, 8, None), (6, 10, None), (8, 8, (6, 10)), (6, 10, (10, 12))])
def test_the_velocity_is_the_stock_pipelines_and_that_of_fp64(
    model: Model, stock, encoded: Conditioning, height: int, width: int, shown: tuple[int, int] | None
) -> None:
    """Without a reference and with one, whose ids are the pipeline's own; what is predicted of it is cut off."""
    latents, time = drawn(2, 16, height, width), torch.tensor([0.501, 0.037])
    references = [] if shown is None else [drawn(2, 16, *shown, seed=7)]
    text, pooled = encoded.sequence[:2], encoded.pooled[:2]
    given = references[0] if references else None
    _, packed, ids, more = stock.prepare_latents(given, 2, 16, 8 * height, 8 * width, torch.float32, CPU, None, latents)
    tokens = stock._pack_latents(latents, 2, 16, height, width)
    batch = SimpleNamespace(references=tuple(references))  # it reads nothing else of the batch
    with torch.no_grad():
        ours = FLUX.images.predict(model, latents, time, Conditioning(text, None, pooled), batch)
        theirs = stock.transformer(
            hidden_states=tokens if packed is None else torch.cat([tokens, packed], 1), timestep=time,
            guidance=torch.full([2], 1.5), pooled_projections=pooled, encoder_hidden_states=text,
            txt_ids=torch.zeros(text.shape[1], 3), img_ids=ids if more is None else torch.cat([ids, more]),
            return_dict=False,
        )[0][:, : tokens.shape[1]]  # fmt: skip
    assert torch.equal(ours, stock._unpack_latents(theirs, 8 * height, 8 * width, 8))
    exact = forward(model.modules["transformer"], latents, time, 1.5, text, pooled, *references)
    assert (ours - exact).norm() <= 2**-18 * exact.norm()  # fp32 rounds by 2^-24, some sixty operations deep
    target = drawn(2, 16, height, width, seed=1)
    loss, wanted = ((ours - target) ** 2).mean(), ((exact - target) ** 2).mean()
    assert abs(loss.item() / wanted.item() - 1) < 1e-6


def forward(
    module: nn.Module, latents: torch.Tensor, time: torch.Tensor, guidance: float, text: torch.Tensor, pooled: torch.Tensor,
    *references: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The transformer in fp64, from its weights by the library's names: FLUX.1's reference (src/flux/model.py) in words.

    A modulation of each block; LayerNorms without weights; RMSNorm of queries and keys; three rotary axes of theta 10000,
    over neighbouring pairs; text first, all of it at position 0; GELU by tanh; the last modulation gives scale and then
    shift. A reference comes last, as image 1.
    """
    w = {name: parameter.double() for name, parameter in module.named_parameters()}
    heads, size = module.config.num_attention_heads, module.config.attention_head_dim

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def rms(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w[f"{name}.weight"]

    def norm(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift

    def split(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (heads, size)).transpose(1, 2)

    def turned(x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(turned(query), turned(key), value).transpose(1, 2).flatten(2)

    def feed(x: torch.Tensor, up: str, down: str) -> torch.Tensor:
        return linear(gelu(linear(x, up), approximate="tanh"), down)

    def embedded(values: torch.Tensor, name: str) -> torch.Tensor:
        return linear(silu(linear(values, f"time_text_embed.{name}.linear_1")), f"time_text_embed.{name}.linear_2")

    def waves(values: torch.Tensor) -> torch.Tensor:
        # The angles in fp32, as the reference makes them: at a guidance of 1500 their rounding is 6e-5, which is no fault.
        frequencies = torch.exp(-math.log(10000) * torch.arange(128, dtype=torch.float32) / 128)
        angles = ((1000 * values.float())[:, None] * frequencies).double()
        return torch.cat([angles.cos(), angles.sin()], -1)

    def patched(x: torch.Tensor) -> torch.Tensor:
        return torch.pixel_unshuffle(x.double(), 2).flatten(2).transpose(1, 2)

    length, shown = text.shape[1], (latents, *references)
    places = [(0, 0, 0)] * length + [
        (number, row, column)
        for number, each in enumerate(shown)
        for row in range(each.shape[2] // 2)
        for column in range(each.shape[3] // 2)
    ]
    axes = [
        torch.outer(
            torch.tensor([place[axis] for place in places]).double(), 10000.0 ** -(torch.arange(0, wide, 2).double() / wide)
        )
        for axis, wide in enumerate(module.config.axes_dims_rope)
    ]
    angles = torch.cat(axes, -1)
    turns = torch.polar(torch.ones_like(angles), angles)
    temb = embedded(waves(time), "timestep_embedder") + embedded(pooled.double(), "text_embedder")
    temb = temb + embedded(waves(torch.full_like(time, guidance)), "guidance_embedder")

    def modulation(name: str, count: int) -> tuple[torch.Tensor, ...]:
        return linear(silu(temb), f"{name}.linear")[:, None].chunk(count, -1)

    image = linear(torch.cat([patched(each) for each in shown], 1), "x_embedder")
    words = linear(text.double(), "context_embedder")
    for i in range(module.config.num_layers):
        at = f"transformer_blocks.{i}"
        of_image, of_text = modulation(f"{at}.norm1", 6), modulation(f"{at}.norm1_context", 6)
        a, b = norm(image, *of_image[:2]), norm(words, *of_text[:2])
        q, k, v = (
            torch.cat([split(linear(b, f"{at}.attn.add_{n}_proj")), split(linear(a, f"{at}.attn.to_{n}"))], 2) for n in "qkv"
        )
        q = torch.cat([rms(q[:, :, :length], f"{at}.attn.norm_added_q"), rms(q[:, :, length:], f"{at}.attn.norm_q")], 2)
        k = torch.cat([rms(k[:, :, :length], f"{at}.attn.norm_added_k"), rms(k[:, :, length:], f"{at}.attn.norm_k")], 2)
        out = attend(q, k, v)
        image = image + of_image[2] * linear(out[:, length:], f"{at}.attn.to_out.0")
        words = words + of_text[2] * linear(out[:, :length], f"{at}.attn.to_add_out")
        image = image + of_image[5] * feed(norm(image, *of_image[3:5]), f"{at}.ff.net.0.proj", f"{at}.ff.net.2")
        of_words = f"{at}.ff_context.net"
        words = words + of_text[5] * feed(norm(words, *of_text[3:5]), f"{of_words}.0.proj", f"{of_words}.2")
    both = torch.cat([words, image], 1)
    for i in range(module.config.num_single_layers):
        at = f"single_transformer_blocks.{i}"
        shift, scale, gate = modulation(f"{at}.norm", 3)
        x = norm(both, shift, scale)
        q, k, v = (split(linear(x, f"{at}.attn.to_{n}")) for n in "qkv")
        out = attend(rms(q, f"{at}.attn.norm_q"), rms(k, f"{at}.attn.norm_k"), v)
        hidden = gelu(linear(x, f"{at}.proj_mlp"), approximate="tanh")
        both = both + gate * linear(torch.cat([out, hidden], -1), f"{at}.proj_out")
    scale, shift = linear(silu(temb), "norm_out.linear")[:, None].chunk(2, -1)
    rows, columns = latents.shape[2] // 2, latents.shape[3] // 2
    out = linear(norm(both[:, length:], shift, scale), "proj_out")[:, : rows * columns]
    return torch.pixel_shuffle(out.transpose(1, 2).unflatten(2, (rows, columns)), 2)


@pytest.mark.parametrize("sizes", [(), pytest.param(((70, 83),), marks=pytest.mark.slow)])
def test_a_sample_is_the_stock_pipelines_at_the_size_that_is_asked_for(
    model: Model, stock, encoded: Conditioning, sizes: tuple[tuple[int, int], ...]
) -> None:
    """Whose own default is an image of a million pixels. Its guidance is 2.5, as in its examples."""
    images = tuple(noise(*size) for size in sizes)
    request = SampleRequest(CAPTIONS[0], "", 48, 64, seed=5, steps=3, guidance=None, images=images)
    first = Conditioning(encoded.sequence[:1], None, encoded.pooled[:1])
    with torch.no_grad():
        ours = sample(model, request, first, first)
    theirs = stock(
        prompt=CAPTIONS[0], width=48, height=64, num_inference_steps=3, guidance_scale=2.5, max_area=48 * 64,
        generator=torch.Generator("cpu").manual_seed(5), image=list(images) or None,
    ).images[0]  # fmt: skip
    assert ours.size == (48, 64) and np.array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize("variant", ["dev", "kontext"])
def test_with_cfg_a_sample_has_the_stock_pipelines_second_pass(
    model: Model, folder: Path, stock, encoded: Conditioning, monkeypatch, variant: str
) -> None:
    """Of a de-distilled model, which is told a guidance, or none of the kind: the negative prompt counts, and only then."""
    monkeypatch.setitem(model.options, "distillation", variant)
    passes = []
    hook = model.modules["transformer"].register_forward_hook(lambda *_: passes.append(1))
    request = SampleRequest(CAPTIONS[0], CAPTIONS[2], 48, 64, seed=5, steps=3, guidance=1.0, cfg=4.0)
    first, other = (Conditioning(encoded.sequence[at : at + 1], None, encoded.pooled[at : at + 1]) for at in (0, 2))
    with torch.no_grad():
        drawings = [sample(model, each, first, other) for each in (request, replace(request, cfg=None))]
    hook.remove()
    theirs = stock if variant == "kontext" else FluxPipeline(**stock.components)
    theirs.set_progress_bar_config(disable=True)
    wanted = theirs(
        prompt=CAPTIONS[0], negative_prompt=CAPTIONS[2], true_cfg_scale=4.0, width=48, height=64, num_inference_steps=3,
        guidance_scale=1.0, generator=torch.Generator("cpu").manual_seed(5),
        **{"max_area": 48 * 64} if variant == "kontext" else {},
    ).images[0]  # fmt: skip
    assert np.array_equal(np.asarray(drawings[0]), np.asarray(wanted)) and len(passes) == 6 + 3
    assert not np.array_equal(np.asarray(drawings[1]), np.asarray(wanted))


def test_a_folder_says_kontext_and_a_single_file_has_to_be_told(folder: Path, tmp_path: Path) -> None:
    """Between dev and Kontext, whose tensors are alike, the user's word comes first; never between these and schnell."""
    found = open_model(FLUX, str(folder))
    assert found.variant.name == "kontext" and "its pipeline" not in lines(found)
    assert f"the model is kontext or made of it, as {folder / 'model_index.json'} says" in lines(found)
    as_dev = open_model(FLUX, str(folder), wanted=Wanted("dev"))
    assert as_dev.variant.name == "dev" and "calls itself FluxKontextPipeline" in lines(as_dev)
    with pytest.raises(UserError, match="model.variant = 'schnell': the model is kontext"):
        lines(open_model(FLUX, str(folder), wanted=Wanted("schnell")))
    named = "flux1-dev-kontext_fp8_scaled.safetensors"
    untold, told = opened(tmp_path / "a", named, DEV), opened(tmp_path / "a", named, DEV, variant="kontext")
    assert (untold.variant.name, told.variant.name) == ("dev", "kontext")
    assert "set model.variant = 'kontext'" in lines(untold) and "its name" not in lines(told)
    assert opened(tmp_path / "b", "mine.safetensors", UNGUIDED, variant="kontext").variant.name == "kontext"


def test_the_variant_is_pinned_and_written_into_the_files(folder: Path, tmp_path: Path) -> None:
    """A resumed run would else be shown no references, in the same tensors."""
    told, untold = open_model(FLUX, str(folder)), open_model(FLUX, str(folder), wanted=Wanted("dev"))
    contents = told.contents((), str)
    assert contents.pop("variant") == "kontext" and contents == untold.contents((), str)
    config = told.config("transformer")
    assert metadata(config | {"_variant": "kontext"}, "")["modelspec.architecture"] == "flux-1-kontext/lora"
    assert metadata(config | {"_variant": "dev"}, "")["modelspec.architecture"] == "flux-1-dev/lora"


@pytest.mark.parametrize(("channels", "said"), [(384, "Flux Fill"), (128, r"a Control model")])
def test_fill_and_control_are_refused_by_name_whatever_the_key_says(
    folder: Path, tmp_path: Path, channels: int, said: str
) -> None:
    place = tmp_path / "model"
    shutil.copytree(folder, place)
    path = place / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"in_channels": channels, "out_channels": 64}))
    next((place / "transformer").glob("*.safetensors")).unlink()
    source = open_model(FLUX, str(place), wanted=Wanted("kontext"))
    with pytest.raises(UserError, match=f"reads {channels} channels .*: it is {said}"):
        FLUX.files.check({each.name: source.config(each.name) for each in FLUX.components}, channels)
