"""What SDXL's room decides without a weight: the objective, the size conditioning, how many tokens a caption may have."""

from __future__ import annotations

from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.base.errors import UserError
from trainer.base.types import Batch, Occurrence
from trainer.models import FAMILIES
from trainer.models.base import Markers, Model
from trainer.models.sdxl import BETAS, count_tokens, time_ids

SDXL = FAMILIES["sdxl"]
SCHEDULER = {"_class_name": "EulerDiscreteScheduler", "prediction_type": "epsilon"} | BETAS


NO_MARKERS = Markers()


def objective(markers: Markers = NO_MARKERS, prediction: Any = "auto", zero: Any = "auto", **scheduler: Any):
    return SDXL.images.objective(SCHEDULER | scheduler, markers, prediction=prediction, zero_terminal_snr=zero)


def test_the_objective_is_as_asked_or_as_the_markers_or_as_the_scheduler_says() -> None:
    for found, prediction, zero in (
        (objective(), "epsilon", False),
        (objective(prediction_type=None), "epsilon", False),
        (objective(prediction_type="v_prediction"), "v", False),
        (objective(prediction_type="v_prediction", rescale_betas_zero_snr=True), "v", True),
        (objective(Markers(v_prediction=True)), "v", False),
        (objective(Markers(v_prediction=True, zero_terminal_snr=True)), "v", True),
        (objective(Markers(v_prediction=True, zero_terminal_snr=True), "epsilon", False), "epsilon", False),
    ):
        assert (found.prediction, found.zero_terminal_snr) == (prediction, zero)


@pytest.mark.parametrize(
    ("markers", "scheduler", "said"),
    [
        (Markers(edm="a.safetensors holds 'edm_mean'"), {}, "a.safetensors holds 'edm_mean': an EDM model"),
        (Markers(), {"prediction_type": "sample"}, "prediction_type = 'sample', which is not trained here"),
        (Markers(), {"use_flow_sigmas": True}, "use_flow_sigmas = True: flow matching or EDM"),
        (Markers(), {"timestep_type": "continuous"}, "timestep_type = 'continuous': flow matching or EDM"),
        (
            Markers(),
            {"_class_name": "LCMScheduler"},
            "'LCMScheduler', of a distilled model .latent consistency., which is not",
        ),
        (
            Markers(),
            {"_class_name": "FlowMatchEulerDiscreteScheduler"},
            "of a flow-matching model, which is not trained as sdxl",
        ),
    ],
)
def test_another_objective_is_refused(markers: Markers, scheduler: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        objective(markers, **scheduler)


def test_the_size_conditioning_is_original_size_crop_and_target() -> None:
    sizes = [torch.tensor([[1, 2]]), torch.tensor([[3, 4]]), torch.tensor([[5, 6]])]
    batch = Batch((Occurrence(0, "a", 0),), torch.zeros(1, 4, 8, 8), ("",), None, *sizes)
    assert time_ids(batch).tolist() == [[1, 2, 3, 4, 5, 6]]


class Tokenizer:
    """A token a word, between a start and an end."""

    model_max_length, bos_token_id, eos_token_id, pad_token_id = 77, 1, 2, 2

    def __call__(self, captions: list[str], **_: Any) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[[1, *range(3, 3 + len(caption.split())), 2] for caption in captions])


def test_a_caption_may_have_the_tokens_of_all_its_chunks() -> None:
    for chunks, room in ((1, 77), (3, 227)):
        tokenizers = {"tokenizer": Tokenizer(), "tokenizer_2": Tokenizer()}
        model = Model({}, {}, tokenizers, {}, {}, torch.device("cpu"), {"clip_chunks": chunks})
        assert count_tokens(model, ["a b c"]) == {"tokenizer": ([5], room), "tokenizer_2": ([5], room)}


def test_the_text_is_the_last_but_one_layer_of_both_and_the_second_ones_projection() -> None:
    def encoder(ids: torch.Tensor, output_hidden_states: bool) -> SimpleNamespace:
        layers = [torch.full((len(ids), ids.shape[1], 2), float(layer)) for layer in range(4)]
        return SimpleNamespace(hidden_states=layers, text_embeds=ids.float())

    names = ("text_encoder", "text_encoder_2")
    tokenizers = {"tokenizer": Tokenizer(), "tokenizer_2": Tokenizer()}
    compute = dict.fromkeys(names, torch.float32)
    model = Model(dict.fromkeys(names, encoder), {}, tokenizers, {}, compute, torch.device("cpu"), {"clip_chunks": 2})
    first, second = (FAMILIES["sdxl"].encode(model, name, ["a b c", "word " * 100]) for name in names)
    assert first.keys() == {"sequence"} and second.keys() == {"sequence", "pooled"}
    assert all(part["sequence"].shape == (2, 154, 2) and part["sequence"].eq(2.0).all() for part in (first, second))
    assert second["pooled"].shape == (2, 77) and second["pooled"][1, 1] == 3  # of the first chunk


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["{}v_pred", "{}ztsnr", "text_encoders.clip_l.transformer.text_projection.weight"])
def test_what_says_nothing_of_the_weights_is_let_pass_behind_a_prefix(family: str, name: str) -> None:
    marker = "{}" in name
    for full in {name.format(""), name.format("model.diffusion_model.")}:
        passes = any(fnmatchcase(full, pattern) for pattern in FAMILIES[family].files.harmless)
        assert passes == (family == ("sdxl" if marker else "flux")), full
