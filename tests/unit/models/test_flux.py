"""What Flux's room does without a weight: tokens, times, latents, lengths."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainer.base.errors import UserError
from trainer.models import FAMILIES
from trainer.models.base import Markers, Model
from trainer.models.flux import encode_images, image_ids, pack, t5_length, unpack
from trainer.models.shared.flow import keep_time_exact, resolution_shift

FLUX = FAMILIES["flux"]
EULER, HEUN = ({"_class_name": f"FlowMatch{kind}DiscreteScheduler"} for kind in ("Euler", "Heun"))


def test_tokens_are_two_by_two_patches_row_by_row() -> None:
    """As diffusers packs them."""
    from diffusers import FluxPipeline

    latents = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(pack(latents), FluxPipeline._pack_latents(latents, 2, 3, 4, 6))
    assert torch.equal(unpack(pack(latents), 4, 6), latents)
    assert image_ids(4, 6).tolist() == [[0.0, row, column] for row in range(2) for column in range(3)]


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
