from __future__ import annotations

import torch

from trainer.base.types import Conditioning
from trainer.models.shared import clip


def test_sequences_of_any_two_lengths_stand_side_by_side_each_repeated() -> None:
    two, three = torch.arange(2.0).view(1, 2, 1), torch.arange(10.0, 13.0).view(1, 3, 1)
    assert clip.repeated([two, three]).squeeze(2).tolist() == [[0, 1] * 3, [10, 11, 12] * 2]
    pooled = torch.ones(1, 4)
    together = clip.collate([Conditioning(two, pooled=pooled), Conditioning(three, pooled=2 * pooled)])
    assert together.sequence.shape == (2, 6, 1) and together.pooled.tolist() == [[1.0] * 4, [2.0] * 4]


def test_rows_of_a_caption_are_one_after_the_other_and_the_first_is_pooled() -> None:
    hidden, pooled = torch.arange(6.0).view(3, 2, 1), torch.arange(3.0).view(3, 1)
    assert clip.rows_joined(hidden, [2, 1]).squeeze(2).tolist() == [[0, 1, 2, 3], [4, 5, 4, 5]]
    assert clip.first_rows(pooled, [2, 1]).tolist() == [[0.0], [2.0]]


def test_open_clips_names_have_the_shapes_of_its_modules() -> None:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    sizes = {"hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 30,
             "max_position_embeddings": 7, "projection_dim": 5}  # fmt: skip
    with torch.device("meta"):
        module = CLIPTextModelWithProjection(CLIPTextConfig(**sizes))
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert clip.open_clip_names(sizes).shapes == shapes
