"""What a family has without saying so."""

from types import SimpleNamespace

import torch

from trainer.base.types import Conditioning
from trainer.models import FAMILIES
from trainer.models.base import SampleRequest, collate, draw


def caption(length: int, *, mask: bool = False, pooled: bool = True) -> Conditioning:
    sequence = torch.rand(1, length, 3, generator=torch.Generator().manual_seed(length))
    return Conditioning(sequence, torch.arange(length)[None] > 0 if mask else None, sequence.mean(1) if pooled else None)


def test_captions_of_one_length_stay_as_they_are() -> None:
    parts = [caption(4), caption(4)]
    together = collate(parts)
    assert together.mask is None
    assert torch.equal(together.sequence, torch.cat([part.sequence for part in parts]))
    assert torch.equal(together.pooled, torch.cat([part.pooled for part in parts]))


def test_a_shorter_caption_is_padded_and_the_mask_says_where() -> None:
    parts = [caption(2, pooled=False), caption(4, mask=True, pooled=False)]
    together = collate(parts)
    assert together.pooled is None
    assert together.mask.tolist() == [[True, True, False, False], [False, True, True, True]]
    assert torch.equal(together.sequence[0, :2], parts[0].sequence[0]) and not together.sequence[0, 2:].any()
    assert torch.equal(together.sequence[1], parts[1].sequence[0])


def test_a_mask_that_an_encoder_gave_is_kept_where_nothing_is_padded() -> None:
    assert collate([caption(3, mask=True)]).mask.tolist() == [[False, True, True]]


def test_a_guidance_of_zero_is_one() -> None:
    asked = []

    class Pipeline:
        def set_progress_bar_config(self, disable: bool) -> None: ...

        def __call__(self, **given):
            asked.append(given["guidance_scale"])
            return SimpleNamespace(images=["an image"])

    for guidance in (None, 0.0, 2.0):
        assert draw(Pipeline(), SampleRequest("", "", 64, 64, 0, 1, guidance), 5.0) == "an image"
    assert asked == [5.0, 0.0, 2.0]


def test_flat_names_are_the_conventions_own_or_kohyas() -> None:
    flux = FAMILIES["flux"]
    assert flux.flat_prefix("transformer", "OneTrainer") == "lora_transformer"
    assert flux.flat_prefix("transformer", "kohya with diffusers names") == "lora_unet"
    assert flux.flat_prefix("text_encoder", "OneTrainer") == "lora_te1_text_model", "it has none of its own"
