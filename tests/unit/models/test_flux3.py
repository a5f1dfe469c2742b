"""FLUX.3's room on a tiny model, against diffusers' modular pipeline bit by bit and a forward pass in fp64 written here."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers.modular_pipelines.flux3 import before_denoise, encoders
from diffusers.modular_pipelines.flux3.image_processor import Flux3ImageProcessor
from PIL import Image
from torch import nn
from torch.nn.functional import layer_norm, scaled_dot_product_attention, silu

from scripts import make_model
from tests.pipelines import flux3
from trainer.base.errors import UserError
from trainer.base.types import Conditioning
from trainer.data import buckets
from trainer.kernels import dora_torch
from trainer.models import FAMILIES
from trainer.models.base import Markers, Model, SampleRequest
from trainer.models.flux3 import positions, rows, sample, text_length, text_positions
from trainer.models.loading import load_tokenizers
from trainer.models.opening import open_model
from trainer.models.shared.patched_vae import encode_images

FAMILY, CPU = FAMILIES["flux3"], torch.device("cpu")
# 24, 13, 113 and 80 tokens, in windows of 80, 80, 160 and 80.
CAPTIONS = ["a photo of zwx candle on a table", "", "a photo of zwx candle on a table " * 9, "photo" + " photo" * 66]
ROWS = (80, 80, 160, 80)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("flux3") / "model"
    assert make_model.main(["--size", "tiny", "--family", "flux3", "--layout", "diffusers", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    """All parts in fp32, loaded as a run does."""
    source = open_model(FAMILY, str(folder))
    names = [component.name for component in FAMILY.components]
    modules = {name: source.load(name, swap=lambda module: (), device=CPU).float() for name in names}
    configs, compute = {name: source.config(name) for name in names}, dict.fromkeys(names, torch.float32)
    return Model(modules, configs, load_tokenizers(FAMILY, source), source.scheduler, compute, CPU)


@pytest.fixture(scope="module")
def stock(folder: Path):
    return flux3(folder)


@pytest.fixture(scope="module")
def encoded(model: Model) -> Conditioning:
    with torch.no_grad():
        return FAMILY.encode_prompts(model, CAPTIONS)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def part(encoded: Conditioning, *indices: int) -> Conditioning:
    """These captions, as if they came from the cache one by one."""
    return FAMILY.text.collate([Conditioning(encoded.sequence[i : i + 1, : ROWS[i]]) for i in indices])


def noise(width: int, height: int, seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def test_captions_are_read_as_the_stock_pipeline_reads_them(model: Model, stock, encoded: Conditioning) -> None:
    """Each in its own window, padding and all, whatever stands beside it."""
    read = encoders.Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds
    with torch.no_grad():
        theirs = [read(stock.text_encoder, stock.tokenizer, caption) for caption in CAPTIONS]
    assert tuple(each.shape[1] for each in theirs) == encoded.lengths == ROWS and theirs[0].shape[2] == 8 * 32
    assert all(torch.equal(encoded.sequence[i : i + 1, :length], theirs[i]) for i, length in enumerate(ROWS))
    assert not encoded.sequence[0, 80:].any() and encoded.mask is None
    assert FAMILY.text.count(model, CAPTIONS) == {"tokenizer": ([24, 13, 113, 80], 8192)}
    assert [rows(count) for count in (1, 80, 81, 8161, 8192)] == [80, 80, 160, 8192, 8192]


def test_neither_what_sees_images_nor_a_layer_above_the_last_that_is_read_is_built(model: Model, stock) -> None:
    assert len(stock.text_encoder.model.language_model.layers) == 36 and len(model.modules["text_encoder"].layers) == 32
    assert not any("visual" in name for name, _ in model.modules["text_encoder"].named_modules())


@pytest.mark.parametrize(("width", "height"), [(64, 64), (48, 80)])
def test_latents_are_the_stock_pipelines(model: Model, stock, width: int, height: int) -> None:
    pixels = torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(3)) * 2 - 1
    state = stock.blocks.sub_blocks["vae_encoder"].sub_blocks["image_conditioning"].sub_blocks["encode"]
    with torch.no_grad():
        ours = encode_images(model, pixels)
        assert torch.equal(ours, latents_of(stock, state, pixels)) and ours.shape == (1, 16, height // 16, width // 16)


def latents_of(stock, step, pixels: torch.Tensor) -> torch.Tensor:
    """Of the pipeline's own step."""
    from diffusers.modular_pipelines.modular_pipeline import PipelineState

    state = PipelineState()
    state.set("condition_images", [pixels])
    return step(stock, state)[1].get("image_cond_latents")[0]


def velocity(
    model: Model, latents: torch.Tensor, time: torch.Tensor, text: Conditioning, *shown: torch.Tensor
) -> torch.Tensor:
    batch = SimpleNamespace(references=shown)  # it reads nothing else of the batch
    return FAMILY.images.predict(model, latents, time, text, batch)


def stock_velocity(
    stock, latents: torch.Tensor, time: torch.Tensor, text: Conditioning, *shown: torch.Tensor
) -> torch.Tensor:
    """As the pipeline's steps make the inputs of its transformer."""

    def ids(each: torch.Tensor, at: int) -> torch.Tensor:
        return before_denoise._prepare_image_ids(*each.shape[-2:], 0.5, at)

    def pack(each: torch.Tensor) -> torch.Tensor:
        return each.flatten(2).transpose(1, 2)

    references = {} if not shown else {
        "image_cond_hidden_states": torch.cat([pack(each) for each in shown], 1),
        "image_cond_ids": torch.cat([ids(each, -1 - index) for index, each in enumerate(shown)]),
    }  # fmt: skip
    out = stock.transformer(
        hidden_states=pack(latents), encoder_hidden_states=text.sequence, timestep=time, img_ids=ids(latents, 0),
        txt_ids=before_denoise.Flux3TextRoPEInputsStep._prepare_text_ids(text.sequence), return_dict=False, **references,
    )[0]  # fmt: skip
    return out.transpose(1, 2).unflatten(2, latents.shape[-2:])


@pytest.mark.parametrize(
    ("size", "captions", "shown"),
    [((4, 4), (0, 1), ()), ((3, 5), (2,), ()), ((4, 4), (0, 3), ((3, 5),)), ((3, 5), (1, 0), ((4, 4), (2, 6)))],
)
def test_the_velocity_is_the_stock_pipelines_and_that_of_fp64(model: Model, stock, encoded, size, captions, shown) -> None:
    """Also with one and with two references, whose order counts."""
    count = len(captions)
    latents, time, text = drawn(count, 16, *size), torch.tensor([0.501, 0.037])[:count], part(encoded, *captions)
    references = [drawn(count, 16, *each, seed=7 + index) for index, each in enumerate(shown)]
    with torch.no_grad():
        ours = velocity(model, latents, time, text, *references)
        assert torch.equal(ours, stock_velocity(stock, latents, time, text, *references))
        if len(references) > 1:
            turned = velocity(model, latents, time, text, *references[::-1])
            assert (turned - ours).norm() > 1e-4 * ours.norm()
    exact = forward(model.modules["transformer"], latents, time, text.sequence, *references)
    assert (ours - exact).norm() <= 2**-18 * exact.norm()  # fp32 rounds by 2^-24, some sixty operations deep
    target = drawn(count, 16, *size, seed=1)
    loss, wanted = ((ours - target) ** 2).mean(), ((exact - target) ** 2).mean()
    assert abs(loss.item() / wanted.item() - 1) < 1e-6


def forward(
    module: nn.Module, latents: torch.Tensor, time: torch.Tensor, text: torch.Tensor, *references: torch.Tensor
) -> torch.Tensor:
    """The transformer in fp64, from its weights by the library's names, in words.

    Text, image and references each pass blocks of their own, alone, then all of them the others, text first. In a block,
    attention and SwiGLU read one modulated input. Modulations of a kind of tokens are shared by its blocks; the image is at
    its time, all else at time 0. RMSNorm of queries and keys; four rotary axes of theta 10000, over neighbouring pairs; rows
    and columns count half; the last modulation gives scale and then shift.
    """
    w = {name: parameter.double() for name, parameter in module.named_parameters()}
    heads, size = module.config.num_attention_heads, module.config.attention_head_dim

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}.weight"].T

    def rms(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w[f"{name}.weight"]

    def turns(places: list[tuple[float, ...]]) -> torch.Tensor:
        axes = [
            torch.outer(
                torch.tensor([place[axis] for place in places]).double(), 10000.0 ** -(torch.arange(0, d, 2).double() / d)
            )
            for axis, d in enumerate(module.config.axes_dims_rope)
        ]
        angles = torch.cat(axes, -1)
        return torch.polar(torch.ones_like(angles), angles)

    def block(x: torch.Tensor, at: str, modulation: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        def split(name: str) -> torch.Tensor:
            return linear(y, f"{at}.attn.to_{name}").unflatten(-1, (heads, size)).transpose(1, 2)

        def turned(z: torch.Tensor) -> torch.Tensor:
            return torch.view_as_real(torch.view_as_complex(z.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)

        shift, scale, gate = modulation.chunk(3, -1)
        y = layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift
        query, key = turned(rms(split("q"), f"{at}.attn.norm_q")), turned(rms(split("k"), f"{at}.attn.norm_k"))
        out = scaled_dot_product_attention(query, key, split("v")).transpose(1, 2).flatten(2)
        half, other = linear(y, f"{at}.ff.linear_in").chunk(2, -1)
        return x + gate * (linear(out, f"{at}.attn.to_out.0") + linear(silu(half) * other, f"{at}.ff.linear_out"))

    frequencies = torch.exp(-math.log(10000) * torch.arange(128).double() / 128)

    def embedded(at: torch.Tensor) -> torch.Tensor:
        arguments = 1000 * at.double()[:, None] * frequencies
        waves = torch.cat([arguments.cos(), arguments.sin()], -1)
        return linear(silu(linear(waves, "timestep_embedder.linear_1")), "timestep_embedder.linear_2")[:, None]

    times = {"txt": embedded(torch.zeros_like(time)), "image": embedded(time), "image_cond": embedded(torch.zeros_like(time))}
    images = {"image": [latents], "image_cond": list(references)}
    streams, angles = {"txt": linear(text.double(), "context_embedder")}, {}
    angles["txt"] = turns([(0, 0, 0, at) for at in range(text.shape[1])])
    for kind, several in images.items():
        if several:
            packed = torch.cat([each.double().flatten(2).transpose(1, 2) for each in several], 1)
            streams[kind] = linear(packed, f"x_embedders.{kind}")
            angles[kind] = turns([
                (0, row / 2, column / 2, 0 if kind == "image" else -1 - number)
                for number, each in enumerate(several) for row in range(each.shape[2]) for column in range(each.shape[3])
            ])  # fmt: skip
    joint = []
    for kind, x in streams.items():
        early, late = (linear(silu(times[kind]), f"{when}_stream_modulations.{kind}.linear") for when in ("early", "single"))
        for i in range(module.config.num_layers):
            x = block(x, f"{'txt_mode_blocks' if kind == 'txt' else f'mode_blocks.{kind}'}.{i}", early, angles[kind])
        joint.append((x, late.expand(-1, x.shape[1], -1), angles[kind]))
    x, modulation, turn = (torch.cat(each, dim) for each, dim in zip(zip(*joint, strict=True), (1, 1, 0), strict=True))
    for i in range(module.config.num_single_layers):
        x = block(x, f"single_transformer_blocks.{i}", modulation, turn)
    x = x[:, text.shape[1] :][:, : latents.shape[2] * latents.shape[3]]
    scale, shift = linear(silu(times["image"]), "norm_out.linear").chunk(2, -1)
    out = linear(layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift, "proj_out")
    return out.transpose(1, 2).unflatten(2, latents.shape[-2:])


def test_captions_of_several_windows_are_computed_window_by_window(model: Model, stock, encoded) -> None:
    """Each as in a batch of its own window alone, in the batch's order, with its own references."""
    order = (2, 0, 3)
    latents, time, text = drawn(3, 16, 4, 3), torch.tensor([0.1, 0.4, 0.9]), part(encoded, *order)
    shown = drawn(3, 16, 2, 2, seed=5)
    assert text.lengths == (160, 80, 80)
    with torch.no_grad():
        ours = velocity(model, latents, time, text, shown)
        for few in ([0], [1, 2]):
            alone = part(encoded, *(order[i] for i in few))
            assert torch.equal(ours[few], stock_velocity(stock, latents[few], time[few], alone, shown[few])), few


def test_positions_are_the_stock_pipelines() -> None:
    assert torch.equal(positions(torch.zeros(1, 2, 3, 5), -2), before_denoise._prepare_image_ids(3, 5, 0.5, -2))
    assert torch.equal(text_positions(7, CPU), before_denoise.Flux3TextRoPEInputsStep._prepare_text_ids(torch.zeros(1, 7, 2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_attention_is_the_librarys(stock, dtype: torch.dtype) -> None:
    """With torch's own attention put in: what is normed and turned in fp32 is rounded once."""
    layer = stock.transformer.single_transformer_blocks[0].attn
    projections = (layer.to_q, layer.to_k, layer.to_v, layer.to_out[0])
    x, turn = drawn(2, 12, 64).to(dtype), stock.transformer.pos_embed(torch.arange(48.0).view(12, 4))
    before = layer.processor
    with torch.no_grad():
        for each in projections:
            each.to(dtype)
        theirs = layer(x, image_rotary_emb=turn)
        layer.set_processor(FAMILY.memory.attention(layer, scaled_dot_product_attention, dora_torch))
        ours = layer(x, image_rotary_emb=turn)
    layer.set_processor(before)
    for each in projections:
        each.float()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("sizes", [(), ((70, 83),), ((70, 83), (96, 65))])
def test_a_sample_is_the_stock_pipelines(model: Model, stock, encoded, sizes: tuple[tuple[int, int], ...]) -> None:
    """With a second pass for its guidance, beside a negative prompt of another window; with references, too."""
    shown = tuple(noise(*size, seed=index) for index, size in enumerate(sizes))
    request = SampleRequest(CAPTIONS[0], CAPTIONS[2], 48, 64, seed=5, steps=2, guidance=None, images=shown)
    with torch.no_grad():
        ours = sample(model, request, part(encoded, 0), part(encoded, 2))
    given = {"image": list(shown)} if shown else {}
    theirs = stock(
        prompt=CAPTIONS[0], negative_prompt=CAPTIONS[2], width=48, height=64, num_inference_steps=2, output="images",
        generator=torch.Generator("cpu").manual_seed(5), **given,
    )[0]  # fmt: skip
    assert isinstance(ours, Image.Image) and np.array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize("size", [(70, 83), (64, 64), (96, 65), pytest.param((2050, 2044), marks=pytest.mark.slow)])
def test_references_are_shown_as_the_pipeline_shows_them(size: tuple[int, int]) -> None:
    """One whole, in a frame of its mirrored edges, up to 4 megapixels; several with their edges cut, up to 1."""
    image, processor = noise(*size, seed=1), Flux3ImageProcessor()
    for count, mode, show in ((1, "fill", buckets.framed), (2, "crop", buckets.show_reference)):
        bucket = buckets.reference_size(*size, FAMILY.images.references, count, step=16)
        theirs, _ = processor.preprocess(image, resize_mode=mode)
        assert theirs.shape[-2:] == bucket[::-1] and torch.equal(buckets.to_pixels(show(image, bucket))[None], theirs)


@pytest.mark.parametrize("size", [(2050, 2044), (4300, 600), (2064, 2033)])
def test_a_reference_that_is_kept_whole_is_shrunk_until_its_frame_fits(size: tuple[int, int]) -> None:
    processor, image = Flux3ImageProcessor(), Image.new("L", size)
    shrunk = processor._resize_if_canvas_exceeds_area(image)
    bucket = buckets.framed_bucket(*size, step=16)
    assert bucket == processor._get_canvas_height_width(*shrunk.size) and math.prod(bucket) <= 4 * 2**20
    assert next(s for s in buckets._shrunk(*size) if s[0] <= bucket[0] and s[1] <= bucket[1]) == shrunk.size


def test_times_are_a_sigmoids_and_others_are_shifted_as_the_scheduler_shifts(model: Model) -> None:
    """A folder need not have the scheduler that the pipeline makes itself."""
    assert model.scheduler["shift"] == 6.93
    for timesteps, shift in (("auto", 1.0), ("sigmoid", 1.0), ("uniform", 6.93)):
        found = FAMILY.images.objective(model.scheduler, Markers(), timesteps=timesteps)
        assert found.shift == shift and found.times.timesteps == ("sigmoid" if timesteps == "auto" else timesteps)


def test_the_distilled_model_is_refused(folder: Path, tmp_path: Path) -> None:
    """By its config, and as a single file by its tensors."""
    made = ["--size", "tiny", "--family", "flux3", "--variant", "flow_map", "--layout"]
    for layout, name in (("diffusers", "model"), ("single_file", "model.safetensors")):
        out = tmp_path / layout / name
        assert make_model.main([*made, layout, str(out)]) == 0
        with pytest.raises(UserError, match="the distilled FLUX.3 .*for which there is no objective here"):
            open_model(FAMILY, str(out)).check_kind()


@pytest.mark.parametrize(
    ("component", "changed", "said"),
    [
        ("text_encoder", {"num_hidden_layers": 28}, "has 28 layers, and the text is read after layers 4, 8, .* 32; use"),
        ("text_encoder", {"hidden_size": 48}, r"= 256, the numbers .* config.json \(hidden_size\) give 48 \+ 48"),
        ("vae", {"latent_channels": 8}, r"reads 16 channels and predicts 32 \(out_channels\), the vae gives 8 \(each in 4\)"),
    ],
)  # fmt: skip
def test_parts_that_do_not_belong_together_are_refused(folder: Path, component: str, changed: dict, said: str) -> None:
    source = open_model(FAMILY, str(folder))
    configs = {part.name: source.config(part.name) for part in FAMILY.components}
    FAMILY.files.check(configs, 16)
    with pytest.raises(UserError, match=said):
        FAMILY.files.check(configs | {component: configs[component] | changed}, 16)


def test_products_that_are_only_added_are_left_out_unless_a_gate_is_adapted() -> None:
    few = ["transformer.single_transformer_blocks.0.attn.to_q"]
    assert FAMILY.memory.unread_beside(few, half=True) == ("*.attn.to_out.0", "*.ff.linear_out")
    assert FAMILY.memory.unread_beside([*few, "transformer.early_stream_modulations.txt.linear"], half=False) == ()


def test_more_tokens_than_the_model_reads_are_refused(model: Model) -> None:
    for chosen, said in ((160, 160), (None, 8192), (8192, 8192)):
        assert text_length(replace(model, options={"text_length": chosen})) == said
    with pytest.raises(UserError, match=r"data\.text_length = 8193 is more than FLUX\.3 takes; use at most 8192"):
        text_length(replace(model, options={"text_length": 8193}))
