"""Z-Image's room on a tiny model, against diffusers' own pipeline bit by bit and a forward pass in fp64 written here."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import ZImagePipeline
from diffusers.models.transformers.transformer_z_image import ZSingleStreamAttnProcessor
from PIL import Image
from torch import nn
from torch.nn.functional import layer_norm, scaled_dot_product_attention, silu

from scripts import make_model
from trainer.base.errors import UserError
from trainer.base.types import Conditioning
from trainer.data.captions import captions as reports
from trainer.engine.graphs import shapes_of
from trainer.models import FAMILIES
from trainer.models.base import Markers, Model, SampleRequest
from trainer.models.loading import load_tokenizers
from trainer.models.opening import open_model
from trainer.models.shared.vae import encode_images
from trainer.models.zimage import distillation, rows, sample

FAMILY, CPU = FAMILIES["zimage"], torch.device("cpu")
EULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 6.0}
# 24, 13, 47 and 512 tokens, of which 32, 32, 64 and 512 rows are read.
CAPTIONS = ["a photo of zwx candle on a table", "", "a photo of zwx candle on a table " * 3, "many words of a caption " * 120]
ROWS = (32, 32, 64, 512)


def load(folder: Path, parts: tuple[str, ...] = ("text_encoder", "transformer", "vae")) -> Model:
    source = open_model(FAMILY, str(folder))
    modules = {name: source.load(name, swap=lambda module: (), device=CPU).float() for name in parts}
    configs = {component.name: source.config(component.name) for component in FAMILY.components}
    compute = dict.fromkeys(configs, torch.float32)
    tokenizers = load_tokenizers(FAMILY, source)
    return Model(modules, configs, tokenizers, source.scheduler, compute, CPU, {"distillation": source.markers.distillation})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("zimage") / "model"
    assert make_model.main(["--size", "tiny", "--family", "zimage", "--layout", "diffusers", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    """All parts in fp32, loaded as a run does."""
    return load(folder)


@pytest.fixture(scope="module")
def stock(folder: Path) -> ZImagePipeline:
    pipeline = ZImagePipeline.from_pretrained(folder, torch_dtype=torch.float32, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def encoded(model: Model) -> Conditioning:
    with torch.no_grad():
        return FAMILY.encode_prompts(model, CAPTIONS)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def part(encoded: Conditioning, *indices: int) -> Conditioning:
    """These captions, as if they came from the cache one by one."""
    alone = [Conditioning(encoded.sequence[i : i + 1, : ROWS[i]], encoded.mask[i : i + 1, : ROWS[i]]) for i in indices]
    return FAMILY.text.collate(alone)


def real(conditioning: Conditioning) -> list[torch.Tensor]:
    """Of each caption the rows of its tokens, as the stock pipeline has them."""
    return [sequence[mask] for sequence, mask in zip(conditioning.sequence, conditioning.mask, strict=True)]


def test_captions_are_read_as_the_stock_pipeline_reads_them(model: Model, stock, encoded: Conditioning) -> None:
    """Of each the rows of its tokens alone, before Qwen3's last layer; the limit of 512 cuts."""
    with torch.no_grad():
        theirs, _ = stock.encode_prompt(list(CAPTIONS), device=CPU, do_classifier_free_guidance=False)
    assert [len(each) for each in theirs] == [24, 13, 47, 512]
    assert all(map(torch.equal, real(encoded), theirs))
    assert encoded.lengths == ROWS and encoded.sequence.shape == (4, 512, 32)
    counts, most = FAMILY.text.count(model, CAPTIONS)["tokenizer"]
    assert most == 512 and counts[:3] == [24, 13, 47] and counts[3] > 512


def test_the_chat_message_has_no_think_block(model: Model) -> None:
    """Qwen3's template adds an empty one with thinking off, as klein has it."""
    (ids,) = FAMILY.text.tokens(model, "text_encoder", CAPTIONS[:1])
    read = model.tokenizers["tokenizer"].decode(ids)
    assert read == f"<|im_start|>user\n{CAPTIONS[0]}<|im_end|>\n<|im_start|>assistant\n"


def test_the_last_layer_is_not_built(model: Model, stock) -> None:
    assert len(stock.text_encoder.model.layers) == 36 and len(model.modules["text_encoder"].layers) == 35


@pytest.mark.parametrize(("width", "height"), [(64, 64), (48, 80)])
def test_latents_are_flux(model: Model, stock, width: int, height: int) -> None:
    """The posterior's mean; the stock pipeline undoes it as it decodes."""
    pixels = torch.rand(2, 3, height, width, generator=torch.Generator().manual_seed(3)) * 2 - 1
    with torch.no_grad():
        ours, mode = encode_images(model, pixels), stock.vae.encode(pixels).latent_dist.mode()
    assert torch.equal(ours, (mode - 0.1159) * 0.3611) and ours.shape == (2, 16, height // 8, width // 8)


def velocity(model: Model, latents: torch.Tensor, time: torch.Tensor, text: Conditioning) -> torch.Tensor:
    return FAMILY.images.predict(model, latents, time, text, None)


def stock_velocity(stock, latents: torch.Tensor, time: torch.Tensor, text: Conditioning) -> torch.Tensor:
    """As the pipeline calls its transformer: lists of the rows that are there, time reversed, the result negated."""
    images = list(latents.unsqueeze(2).unbind())
    return -torch.stack(stock.transformer(images, 1 - time, real(text), return_dict=False)[0]).squeeze(2)


@pytest.mark.parametrize(
    ("height", "width", "captions"), [(8, 8, (0, 1)), (6, 10, (0, 1)), (6, 10, (2, 2)), (4, 4, (3, 3)), (16, 8, (2,))]
)
def test_the_velocity_is_the_stock_pipelines_and_that_of_fp64(
    model: Model, stock, encoded, height: int, width: int, captions: tuple[int, ...]
) -> None:
    """Also of images whose tokens are no multiple of 32."""
    count = len(captions)
    latents, time, text = drawn(count, 16, height, width), torch.tensor([0.501, 0.037])[:count], part(encoded, *captions)
    with torch.no_grad():
        ours = velocity(model, latents, time, text)
        assert torch.equal(ours, stock_velocity(stock, latents, time, text))
    module = model.modules["transformer"]
    exact = torch.cat([forward(module, *each) for each in zip(latents, time, real(text), strict=True)])
    assert (ours - exact).norm() <= 2**-18 * exact.norm()  # fp32 rounds by 2^-24, some sixty operations deep
    target = drawn(count, 16, height, width, seed=1)
    loss, wanted = ((ours - target) ** 2).mean(), ((exact - target) ** 2).mean()
    assert abs(loss.item() / wanted.item() - 1) < 1e-6


def forward(module: nn.Module, latents: torch.Tensor, time: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """The velocity [1, C, h, w] in fp64, from the weights by the library's names: the reference (src/zimage/transformer.py)
    in words.

    Image and caption are padded to multiples of 32 by learned tokens and refined, each alone; the caption stands behind the
    image. Norms before and after each product, gates by tanh, scales of 1 + s, no shifts. Three rotary axes of theta 256,
    over neighbouring pairs: a caption's token i is at (1 + i, 0, 0), a pixel's at (1 + the caption's rows, row, column), and
    the image's padding at the origin.
    """
    w = {name: parameter.double() for name, parameter in module.named_parameters()}
    heads, (_, high, wide) = module.config.n_heads, latents.shape
    rows_of_image, columns = high // 2, wide // 2

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        out = x @ w[f"{name}.weight"].T
        return out + w[f"{name}.bias"] if f"{name}.bias" in w else out

    def rms(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w[f"{name}.weight"]

    def to_multiple(x: torch.Tensor, token: str) -> torch.Tensor:
        return torch.cat([x, w[token].expand(-len(x) % 32, -1)])

    def turns(places: list[tuple[int, ...]]) -> torch.Tensor:
        axes = [
            torch.outer(
                torch.tensor([place[axis] for place in places]).double(), 256.0 ** -(torch.arange(0, d, 2) / d).double()
            )
            for axis, d in enumerate(module.config.axes_dims)
        ]
        angles = torch.cat(axes, -1).float().double()  # the reference's table is of fp32
        return torch.polar(torch.ones_like(angles), angles)

    def block(x: torch.Tensor, at: str, turn: torch.Tensor, *, modulated: bool = True) -> torch.Tensor:
        scale_a, gate_a, scale_f, gate_f = 0.0, 1.0, 0.0, 1.0
        if modulated:
            scale_a, gate_a, scale_f, gate_f = linear(temb, f"{at}.adaLN_modulation.0").chunk(4, -1)
            gate_a, gate_f = gate_a.tanh(), gate_f.tanh()

        def turned(y: torch.Tensor) -> torch.Tensor:
            pairs = torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * turn[:, None]).flatten(-2).transpose(0, 1)

        y = rms(x, f"{at}.attention_norm1") * (1 + scale_a)
        q, k, v = (linear(y, f"{at}.attention.to_{n}").unflatten(-1, (heads, -1)) for n in "qkv")
        q, k = turned(rms(q, f"{at}.attention.norm_q")), turned(rms(k, f"{at}.attention.norm_k"))
        out = scaled_dot_product_attention(q[None], k[None], v.transpose(0, 1)[None])[0].transpose(0, 1).flatten(1)
        x = x + gate_a * rms(linear(out, f"{at}.attention.to_out.0"), f"{at}.attention_norm2")
        y = rms(x, f"{at}.ffn_norm1") * (1 + scale_f)
        feed = silu(linear(y, f"{at}.feed_forward.w1")) * linear(y, f"{at}.feed_forward.w3")
        return x + gate_f * rms(linear(feed, f"{at}.feed_forward.w2"), f"{at}.ffn_norm2")

    # The arguments are the reference's own, of fp32: near a time of 963 its numbers are 6e-5 apart.
    frequencies = torch.exp(-math.log(10000) * torch.arange(128, dtype=torch.float32) / 128)
    arguments = (1000 * (1 - time) * frequencies).double()
    embedded = torch.cat([arguments.cos(), arguments.sin()], -1)[None]
    temb = linear(silu(linear(embedded, "t_embedder.mlp.0")), "t_embedder.mlp.2")

    patches = latents.double().unflatten(1, (-1, 2)).unflatten(3, (-1, 2)).permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1)
    count = len(patches)
    image = to_multiple(linear(patches, "all_x_embedder.2-1"), "x_pad_token")
    words = to_multiple(linear(rms(text.double(), "cap_embedder.0"), "cap_embedder.1"), "cap_pad_token")
    of_words = turns([(1 + i, 0, 0) for i in range(len(words))])
    places = [(1 + len(words), row, column) for row in range(rows_of_image) for column in range(columns)]
    of_image = turns(places + [(0, 0, 0)] * (len(image) - count))
    for i in range(module.config.n_refiner_layers):
        image = block(image, f"noise_refiner.{i}", of_image)
        words = block(words, f"context_refiner.{i}", of_words, modulated=False)
    both, of_both = torch.cat([image, words]), torch.cat([of_image, of_words])
    for i in range(module.config.n_layers):
        both = block(both, f"layers.{i}", of_both)
    scale = linear(silu(temb), "all_final_layer.2-1.adaLN_modulation.1")
    out = linear(layer_norm(both, both.shape[-1:], eps=1e-6) * (1 + scale), "all_final_layer.2-1.linear")[:count]
    out = out.view(rows_of_image, columns, 2, 2, -1).permute(4, 0, 2, 1, 3).reshape(1, -1, high, wide)
    return -out


def test_captions_of_several_lengths_are_computed_length_by_length(model: Model, stock, encoded) -> None:
    """Each as in a batch of its own length alone, without a mask, in the batch's order; what a graph is recorded for says
    which."""
    order = (2, 0, 3, 1)
    latents, time, text = drawn(4, 16, 8, 6), torch.tensor([0.1, 0.4, 0.7, 0.9]), part(encoded, *order)
    assert text.lengths == (64, 32, 512, 32)
    masks = []
    layers = [layer for layer in model.modules["transformer"].modules() if hasattr(layer, "set_processor")]
    hooks = [
        layer.register_forward_pre_hook(lambda m, a, keys: masks.append(keys["attention_mask"]), with_kwargs=True)
        for layer in layers
    ]
    with torch.no_grad():
        ours = velocity(model, latents, time, text)
        assert masks and all(mask is None for mask in masks)
        for indices in ((0,), (1, 3), (2,)):
            few = list(indices)
            alone = part(encoded, *(order[i] for i in few))
            assert torch.equal(ours[few], stock_velocity(stock, latents[few], time[few], alone)), few
    for hook in hooks:
        hook.remove()
    assert shapes_of(text) != shapes_of(part(encoded, 0, 2, 3, 1)) and shapes_of(text) == shapes_of(part(encoded, 2, 1, 3, 0))


def test_padding_reaches_no_gradient_and_the_learned_token_stands_for_it(model: Model, encoded) -> None:
    """Whatever the rows of the padding hold."""
    text, latents, time = part(encoded, 0), drawn(1, 16, 4, 4), torch.tensor([0.3])
    sequence = text.sequence.clone().requires_grad_()
    velocity(model, latents, time, Conditioning(sequence, text.mask, lengths=text.lengths)).square().sum().backward()
    assert bool(sequence.grad[0, :24].any(1).all()) and not sequence.grad[0, 24:].any()
    with torch.no_grad():
        other = torch.where(text.mask[..., None], text.sequence, 7.0)
        assert torch.equal(
            velocity(model, latents, time, text), velocity(model, latents, time, Conditioning(other, text.mask))
        )


def test_how_many_padded_lengths_a_run_has_is_said() -> None:
    assert [rows(count) for count in (1, 32, 33, 512)] == [32, 32, 64, 512]
    tokens = {"text_encoder": reports.Tokens(512, {"a": 24, "b": 13, "c": 45, "d": 600})}
    said = str(reports.report([], tokens=tokens, rows=rows))
    assert "padded to 32 (2), 64 (1), 512 (1) tokens: captions of several sizes in a batch are computed size by size" in said
    assert "padded" not in str(reports.report([], tokens=tokens))


def test_our_attention_is_the_librarys(model: Model, encoded: Conditioning) -> None:
    """Bit by bit: on real angles, and with a mask, where a sample's captions differ in length."""
    from trainer.models.zimage import Angles

    transformer = model.modules["transformer"]
    layers = [layer for layer in transformer.modules() if hasattr(layer, "set_processor")]
    ours = [layer.processor for layer in layers]
    lists = [drawn(16, 1, 6, 10), drawn(16, 1, 6, 10, seed=1)], torch.tensor([0.3, 0.6]), real(part(encoded, 0, 2))
    with torch.no_grad():
        made = transformer(*lists, return_dict=False)[0]
        angles = transformer.rope_embedder
        assert isinstance(angles, Angles)
        transformer.rope_embedder = angles.rope
        for layer in layers:
            layer.set_processor(ZSingleStreamAttnProcessor())
        theirs = transformer(*lists, return_dict=False)[0]
    transformer.rope_embedder = angles
    for layer, processor in zip(layers, ours, strict=True):
        layer.set_processor(processor)
    assert all(map(torch.equal, made, theirs))


def test_the_time_is_exact_in_weights_of_16_bits(folder: Path, encoded) -> None:
    """diffusers rounds its sine and cosine to the dtype of the first layer's weight, whatever the model computes in."""
    model = load(folder, ("transformer",))
    embedder = model.modules["transformer"].t_embedder
    with torch.no_grad():
        exact = embedder(torch.tensor([501.0]))
        embedder.mlp.to(torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = embedder(torch.tensor([501.0]))
        embedder.mlp.float()
    assert half.dtype == torch.bfloat16
    assert (half.float() - exact).norm() < 2**-7 * exact.norm()


def test_the_blocks_compute_in_the_dtype_of_their_tokens(model: Model, encoded) -> None:
    """The learned tokens, kept in fp32, would make all of them fp32, and what is saved for the backward pass larger."""
    transformer, dtypes = model.modules["transformer"], []
    for block in (transformer.noise_refiner[0], transformer.context_refiner[0]):
        block.register_forward_pre_hook(lambda module, given: dtypes.append(given[0].dtype))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        velocity(model, drawn(1, 16, 6, 10), torch.tensor([0.3]), part(encoded, 0))
    assert dtypes == [torch.bfloat16] * 2


@pytest.mark.parametrize(("kind", "guidance", "passes"), [("base", 4.0, 3), ("turbo", 0.0, 3)])
def test_a_sample_is_the_stock_pipelines(model: Model, stock, encoded, kind: str, guidance: float, passes: int) -> None:
    """With a negative prompt of another length beside the prompt, for which the pipeline makes a mask. Turbo's has none."""
    model.options = {"distillation": kind}
    captions = []
    hook = model.modules["transformer"].register_forward_pre_hook(lambda module, given: captions.append(len(given[2])))
    request = SampleRequest(CAPTIONS[0], CAPTIONS[2], 48, 64, seed=5, steps=3, guidance=None)
    with torch.no_grad():
        ours = sample(model, request, part(encoded, 0), part(encoded, 2))
    hook.remove()
    theirs = stock(
        prompt=CAPTIONS[0], negative_prompt=CAPTIONS[2], width=48, height=64, num_inference_steps=3, guidance_scale=guidance,
        generator=torch.Generator("cpu").manual_seed(5),
    ).images[0]  # fmt: skip
    assert isinstance(ours, Image.Image) and np.array_equal(np.asarray(ours), np.asarray(theirs))
    assert captions == [1 + bool(guidance)] * passes


def test_times_are_a_sigmoids_and_others_are_shifted_as_the_scheduler_shifts() -> None:
    base = Markers(distillation="base")
    for timesteps, shift in (("auto", 1.0), ("sigmoid", 1.0), ("uniform", 6.0), ("logit_normal", 6.0)):
        found = FAMILY.images.objective(EULER, base, timesteps=timesteps)
        assert found.shift == shift and found.times.timesteps == ("sigmoid" if timesteps == "auto" else timesteps)
    assert FAMILY.images.objective(EULER, base, shift=3.0).shift == 3.0
    # As diffusers' script draws them: an index of the shifted table.
    from diffusers import FlowMatchEulerDiscreteScheduler

    table = FlowMatchEulerDiscreteScheduler(shift=6.0).sigmas.double()
    found = FAMILY.images.objective(EULER, base, timesteps="uniform")
    u = (1000 - torch.arange(1000).double()) / 1000
    torch.testing.assert_close(found.time(u, 4096).double(), table, rtol=1e-6, atol=0)


def test_turbo_is_refused_unless_it_is_allowed() -> None:
    """By its name, or, in a folder of another name, by its scheduler."""
    base, turbo, shifted = Markers(distillation="base"), Markers(distillation="turbo"), EULER | {"shift": 3.0}
    for scheduler, markers, why in (
        (EULER, turbo, "as its name or model.variant says"),
        (shifted, base, "scheduler's shift, 3"),
    ):
        with pytest.raises(UserError, match=rf"Turbo, the distilled model .*{why}.*model\.allow_distilled = true"):
            FAMILY.images.objective(scheduler, markers)
        FAMILY.images.objective(scheduler, markers, allow_distilled=True)
    with pytest.raises(UserError, match=r"no name says .* set model\.variant = 'base' or 'turbo'"):
        FAMILY.images.objective(EULER, Markers())
    names = {
        "Tongyi-MAI/Z-Image": "base", "z_image_bf16": "base", "Z-Image-De-Turbo": "base", "z_image_de_turbo_v1_bf16": "base",
        "Tongyi-MAI/Z-Image-Turbo": "turbo", "z_image_turbo_bf16": "turbo", "ZIT_v2": "turbo",
        "my_z_image_style": None, "turbonaut": None,
    }  # fmt: skip
    assert {name: distillation(name) for name in names} == names


def test_a_single_file_of_turbo_gets_its_scheduler(tmp_path: Path) -> None:
    """diffusers takes every file of Z-Image for Turbo's."""
    for name, kind, shift in (("z_image_turbo_bf16", "turbo", 3.0), ("z_image_bf16", "base", 6.0)):
        out = tmp_path / kind / f"{name}.safetensors"
        options = ["--size", "full", "--variant", kind, "--sparse", "--family", "zimage", "--layout", "single_file"]
        assert make_model.main([*options, str(out)]) == 0
        shutil.rmtree(out.with_suffix(""))
        source = open_model(FAMILY, str(out))
        assert source.scheduler["shift"] == shift and source.variant.name == kind
        config = source.config("transformer")
        assert (config["dim"], config["n_layers"], config["n_refiner_layers"]) == (3840, 30, 2)
        source.verify("transformer")


def test_a_tokenizer_without_a_chat_template_is_refused(folder: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    settings = model / "tokenizer" / "tokenizer_config.json"
    config = json.loads(settings.read_text())
    del config["chat_template"]
    settings.write_text(json.dumps(config))
    with pytest.raises(UserError, match="the tokenizer in .* has no chat template"):
        open_model(FAMILY, str(model)).check_tokenizers()


@pytest.mark.parametrize(
    ("component", "changed", "said"),
    [
        ("transformer", {"siglip_feat_dim": 1152}, "siglip_feat_dim = 1152: it is Z-Image-Omni, which is not trained here"),
        ("text_encoder", {"num_hidden_layers": 28}, "has 28 layers, and the text is read after layer 35"),
        ("text_encoder", {"hidden_size": 48}, r"cap_feat_dim = 32, the numbers .* config.json \(hidden_size\) give 48"),
        ("vae", {"latent_channels": 4}, r"reads 16 channels and predicts 4 \(out_channels\), the vae gives 4: they do not"),
        ("vae", {"shift_factor": None}, "shift_factor = None"),
    ],
)  # fmt: skip
def test_parts_that_do_not_belong_together_are_refused(folder: Path, component: str, changed: dict, said: str) -> None:
    source = open_model(FAMILY, str(folder))
    configs = {part.name: source.config(part.name) for part in FAMILY.components}
    FAMILY.files.check(configs, 16)
    with pytest.raises(UserError, match=said):
        FAMILY.files.check(configs | {component: configs[component] | changed}, 16)


def test_no_product_is_left_out_where_blocks_run_again() -> None:
    """A norm behind each of them reads what it gave."""
    assert FAMILY.memory.unread_beside(["transformer.layers.0.attention.to_q"], half=False) == ()
