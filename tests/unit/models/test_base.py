"""What a family has without saying so."""

import torch

from trainer.models.base import collate
from trainer.types import Conditioning


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
