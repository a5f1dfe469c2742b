"""Weighted captions against sd-scripts' arithmetic in fp64, written out from its public description.

`parse_prompt_attention` and `encode_tokens_with_weights` of kohya-ss/sd-scripts: round brackets multiply by 1.1, square ones
divide by it, `(text:number)` multiplies by the number; each text is tokenised alone; the last but one hidden state of each
token is multiplied by its weight, start, end and padding by 1; the pooled vector is not.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from trainer.models import FAMILIES
from trainer.models.base import Model
from trainer.models.sdxl import count_tokens
from trainer.models.shared.clip import weighted_parts
from trainer.models.tokenizers import build_clip_tokenizer

SDXL = FAMILIES["sdxl"]
ENCODERS = ("text_encoder", "text_encoder_2")


@pytest.mark.parametrize(
    ("caption", "parts"),
    [
        ("a plain bear, red: very", [("a plain bear, red: very", 1.0)]),
        ("an (important) word", [("an ", 1.0), ("important", 1.1), (" word", 1.0)]),
        ("(unbalanced", [("unbalanced", 1.1)]),
        ("[(both", [("both", 1.1 * (1 / 1.1))]),
        (r"\(literal\]", [("(literal]", 1.0)]),
        ("(unnecessary)(parens)", [("unnecessaryparens", 1.1)]),
        ("a (bear:1.25), [dark], (:2) (x:-.5)", [("a ", 1.0), ("bear", 1.25), (", ", 1.0), ("dark", 1 / 1.1),
                                                 (",  ", 1.0), ("x", -0.5)]),
        ("closed) and] more:1.2)", [("closed) and] more:1.2)", 1.0)]),
        ("(a (b:1.5) c:2)", [("a ", 2.0), ("b", 3.0), (" c", 2.0)]),
        ("", [("", 1.0)]),
        ("()", [("", 1.0)]),
    ],
)  # fmt: skip
def test_brackets_are_read_as_sd_scripts_reads_them(caption: str, parts: list[tuple[str, float]]) -> None:
    assert weighted_parts(caption) == parts


def test_the_example_of_the_description() -> None:
    found = weighted_parts("a (((house:1.3)) [on] a (hill:0.5), sun, (((sky))).")
    expected = [("a ", 1.0), ("house", 1.573), (" ", 1.1), ("on", 1.0), (" a ", 1.1), ("hill", 0.55), (", sun, ", 1.1),
                ("sky", 1.4641), (".", 1.1)]  # fmt: skip
    assert [text for text, _ in found] == [text for text, _ in expected]
    assert np.allclose([weight for _, weight in found], [weight for _, weight in expected], rtol=1e-15, atol=0)


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    config = CLIPTextConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
                            projection_dim=8, eos_token_id=49407)  # fmt: skip
    modules = {name: CLIPTextModelWithProjection(config).double().eval() for name in ENCODERS}
    tokenizers = {"tokenizer": build_clip_tokenizer(None), "tokenizer_2": build_clip_tokenizer(None, "!")}
    compute = dict.fromkeys(ENCODERS, torch.float64)
    return Model(modules, {}, tokenizers, {}, compute, torch.device("cpu"), {"weighted_captions": True, "clip_chunks": 1})


PIECES = [("a photo of a", 1.0), ("red bear", 1.3), ("on grass", 1 / 1.1), (", best quality", 1.0)]
CAPTION = "a photo of a (red bear:1.3) [on grass], best quality"


def expected_row(model: Model, encoder: str, pieces: list[tuple[str, float]]) -> tuple[np.ndarray, torch.Tensor]:
    """(hidden states of 77 tokens times their weights, the pooled vector), in fp64."""
    tokenizer = model.tokenizers[{"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2"}[encoder]]
    ids, weights = [49406], [1.0]
    for text, weight in pieces:
        own = [token for token in tokenizer(text).input_ids if token not in (49406, 49407)]
        ids, weights = ids + own, weights + [weight] * len(own)
    ids, weights = ids[:76] + [49407], weights[:76] + [1.0]
    weights += [1.0] * (77 - len(ids))
    ids += [tokenizer.pad_token_id] * (77 - len(ids))
    with torch.no_grad():
        output = model.modules[encoder](torch.tensor([ids]), output_hidden_states=True)
    states = output.hidden_states[-2][0].numpy()
    return np.stack([states[place] * weights[place] for place in range(77)]), output.text_embeds


@pytest.mark.parametrize("encoder", ENCODERS)
@torch.no_grad()
def test_each_tokens_state_is_multiplied_by_its_weight(model: Model, encoder: str) -> None:
    long = [("a bear " * 36, 1.0), ("red " * 10, 1.5)]
    captions = [CAPTION, "a bear " * 36 + "(" + "red " * 10 + ":1.5)", "no weights"]
    found = SDXL.encode(model, encoder, captions)
    for place, pieces in enumerate((PIECES, long, [("no weights", 1.0)])):
        states, pooled = expected_row(model, encoder, pieces)
        error = np.abs(found["sequence"][place].numpy() - states)
        assert (error <= 2.0**-24 * np.abs(states)).all()  # weights are fp32 there, too: a rounding of each
        if encoder == "text_encoder_2":
            assert torch.allclose(found["pooled"][place], pooled[0], rtol=1e-12, atol=1e-12)
    plain = Model(**{**vars(model), "options": {"clip_chunks": 1}})
    words = SDXL.encode(plain, encoder, captions)["sequence"]
    assert torch.equal(words[2], found["sequence"][2]) and not torch.allclose(words[0], found["sequence"][0])


@torch.no_grad()
def test_weights_go_over_several_chunks_and_brackets_are_no_tokens(model: Model) -> None:
    several = Model(**{**vars(model), "options": {"weighted_captions": True, "clip_chunks": 2}})
    caption = "a bear " * 40 + "(" + "red " * 10 + ":1.5)"
    found = SDXL.encode(several, "text_encoder", [caption])["sequence"][0].numpy()
    first, _ = expected_row(model, "text_encoder", [("a bear " * 37 + "a", 1.0)])
    second, _ = expected_row(model, "text_encoder", [("bear " + "a bear " * 2, 1.0), ("red " * 10, 1.5)])
    assert np.allclose(found, np.concatenate([first, second]), rtol=2.0**-23, atol=1e-12)
    assert count_tokens(several, [caption, "(a)"]) == {name: ([92, 3], 152) for name in ("tokenizer", "tokenizer_2")}
