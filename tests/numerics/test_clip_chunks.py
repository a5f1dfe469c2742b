"""Captions beyond 75 tokens in chunks, against ComfyUI's way written out: both families' tiny encoders, fp64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.harness import Workbench, built
from trainer.base.types import Conditioning
from trainer.models import FAMILIES, flux, sdxl
from trainer.models.base import Model
from trainer.models.shared import clip

LENGTHS = (0, 1, 7, 74, 75, 76, 149, 150, 151, 225, 226, 300)


@pytest.fixture(scope="module")
def loaded(models, tmp_path_factory) -> Iterator[dict[str, Model]]:
    """By family: tokenizers and text encoders, these in fp64."""
    found = {}
    for family in ("sdxl", "flux"):
        bench = Workbench(models, tmp_path_factory.mktemp(family))
        with built(bench.config(family, data__cache_text=False)) as run:
            model = run.model
            for name in run.family.text_encoders:
                model.modules[name] = run.components.source.load(
                    name, swap=lambda module: None, device=torch.device("cpu"), fill=lambda module: ()
                ).double()
                model.compute[name] = torch.float64
            found[family] = model
    yield found


def text_of(tokenizer: Any, count: int) -> str:
    """A text of exactly so many tokens."""
    words = itertools.islice(itertools.cycle(["bear", "a", "on", "the", "beach", "!", "7", "q"]), count)
    text = ""
    for word in words:
        while len(tokenizer(f"{text} {word}", verbose=False).input_ids) - 2 > count and len(word) > 1:
            word = word[0]
        if len(tokenizer(f"{text} {word}", verbose=False).input_ids) - 2 > count:
            break
        text = f"{text} {word}"
    while len(tokenizer(text, verbose=False).input_ids) - 2 < count:
        text += " a"
    assert len(tokenizer(text, verbose=False).input_ids) - 2 == count
    return text


def comfy_batches(tokenizer: Any, text: str, pad: int) -> list[list[int]]:
    """SDTokenizer.tokenize_with_weights for a text without weights: one group of tokens, which is broken where it is long."""
    ids = tokenizer(text, verbose=False).input_ids if text else tokenizer("").input_ids
    start, end, group = ids[0], ids[-1], ids[1:-1]
    batch, batches = [start], []
    batches.append(batch)
    while group:
        if len(group) + len(batch) > 77 - 1:
            remaining = 77 - len(batch) - 1
            batch += group[:remaining]
            batch.append(end)
            group = group[remaining:]
            batch = [start]
            batches.append(batch)
        else:
            batch += group
            group = []
    batch.append(end)
    batch += [pad] * (77 - len(batch))
    return batches


def hidden_states(module: Any, ids: list[int]) -> tuple[torch.Tensor, ...]:
    return module(torch.tensor([ids]), output_hidden_states=True).hidden_states


def pooled_of(module: Any, ids: list[int], end: int) -> torch.Tensor:
    """The last layer's output at the first end token, after the final norm."""
    text_model = getattr(module, "text_model", module)
    return text_model.final_layer_norm(hidden_states(module, ids)[-1])[:, ids.index(end)]


@pytest.mark.parametrize("chunks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
@torch.no_grad()
def test_sdxl_reads_chunks_as_comfyui_does(loaded: dict[str, Model], chunks: int) -> None:
    model = loaded["sdxl"]
    model.options = {**model.options, "clip_chunks": chunks}
    first, second = model.tokenizers["tokenizer"], model.tokenizers["tokenizer_2"]
    for count in LENGTHS:
        text = text_of(first, count)
        encoded, pooled = [], None
        for tokenizer, pad, name in ((first, first.eos_token_id, "text_encoder"), (second, 0, "text_encoder_2")):
            batches = comfy_batches(tokenizer, text, pad)[:chunks]
            assert len(batches) == max(1, min(chunks, -(-count // 75)))
            encoded.append(torch.cat([hidden_states(model.modules[name], ids)[-2] for ids in batches], dim=1))
            if name == "text_encoder_2":
                at_end = pooled_of(model.modules[name], batches[0], tokenizer.eos_token_id)
                pooled = at_end @ model.modules[name].text_projection.weight.T
        given = sdxl.FAMILY.encode_prompts(model, [text])
        assert given.mask is None and given.sequence.dtype == torch.float64
        torch.testing.assert_close(given.sequence, torch.cat(encoded, dim=-1), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(given.pooled, pooled, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
@torch.no_grad()
def test_flux_is_told_the_first_chunks_pooled_vector_whatever_the_length(loaded: dict[str, Model]) -> None:
    """ComfyUI gives Flux the first row's: the one that a cut caption has. So more chunks would change nothing."""
    model = loaded["flux"]
    tokenizer = model.tokenizers["tokenizer"]
    for count in LENGTHS:
        text = text_of(tokenizer, count)
        first = comfy_batches(tokenizer, text, tokenizer.eos_token_id)[0]
        expected = pooled_of(model.modules["text_encoder"], first, tokenizer.eos_token_id)
        given = flux.FAMILY.encode_prompts(model, [text]).pooled
        torch.testing.assert_close(given, expected, rtol=1e-11, atol=1e-11)


@torch.no_grad()
def test_captions_of_different_lengths_side_by_side_are_each_as_alone(loaded: dict[str, Model], bench: Workbench) -> None:
    """Encoded together, put together from single ones, and what the denoiser makes of them."""
    model = loaded["sdxl"]
    model.options = {**model.options, "clip_chunks": 3}
    texts = [text_of(model.tokenizers["tokenizer"], count) for count in (5, 100, 200)]
    alone = [sdxl.FAMILY.encode_prompts(model, [text]) for text in texts]
    assert [one.sequence.shape[1] for one in alone] == [77, 154, 231]
    together, collated = sdxl.FAMILY.encode_prompts(model, texts), clip.collate(alone)
    assert together.sequence.shape[1] == collated.sequence.shape[1] == 462
    for given in (together, collated):
        for index, one in enumerate(alone):
            repeated = one.sequence.repeat(1, 462 // one.sequence.shape[1], 1)
            torch.testing.assert_close(given.sequence[index : index + 1], repeated, rtol=1e-11, atol=1e-11)
            torch.testing.assert_close(given.pooled[index : index + 1], one.pooled, rtol=1e-11, atol=1e-11)
    query = torch.randn(1, 1, 9, together.sequence.shape[-1], dtype=torch.float64)
    for index, one in enumerate(alone):
        attended = [
            torch.nn.functional.scaled_dot_product_attention(query, tokens[:, None], tokens[:, None])
            for tokens in (one.sequence, collated.sequence[index : index + 1])
        ]
        torch.testing.assert_close(*attended, rtol=1e-11, atol=1e-11)


def test_one_chunk_gives_the_ids_that_it_always_did(loaded: dict[str, Model]) -> None:
    model = loaded["sdxl"]
    tokenizers = [model.tokenizers[name] for name in ("tokenizer", "tokenizer_2")]
    texts = [text_of(tokenizers[0], count) for count in (0, 3, 75, 80)]
    ids, more = (clip.chunked_ids(tokenizers, texts, chunks) for chunks in (1, 3))
    for own, longer, tokenizer in zip(ids, more, tokenizers, strict=True):
        assert [len(each) for each in own] == [1] * 4 and [len(each) for each in longer] == [1, 1, 1, 2]
        assert torch.equal(torch.cat(own), clip.clip_ids(tokenizer, texts))
        assert torch.equal(torch.cat([each[:1] for each in longer]), torch.cat(own)), "a first chunk is what a cut caption is"


def test_captions_of_one_length_are_put_together_without_a_copy_more(loaded: dict[str, Model]) -> None:
    parts = [Conditioning(torch.randn(1, 77, 4), pooled=torch.randn(1, 2)) for _ in range(3)]
    whole = clip.collate(parts)
    assert torch.equal(whole.sequence, torch.cat([part.sequence for part in parts])) and whole.mask is None
    assert torch.equal(whole.pooled, torch.cat([part.pooled for part in parts]))


@pytest.mark.slow
def test_tokens_are_counted_for_many_captions_as_for_one(loaded: dict[str, Model]) -> None:
    for family, model in loaded.items():
        model.options = {**model.options, "clip_chunks": 2}
        texts = [text_of(model.tokenizers["tokenizer"], count) for count in (0, 3, 75, 80)] * 300  # beyond one portion
        for name, (counts, limit) in FAMILIES[family].text.count(model, texts).items():
            alone = [len(model.tokenizers[name](text, verbose=False).input_ids) for text in texts[:4]]
            assert counts == alone * 300
            if family == "sdxl":
                assert limit == 152
