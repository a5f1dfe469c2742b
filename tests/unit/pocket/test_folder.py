"""What a pocket model's folder gives a stock pipeline is what the model was trained with."""

from __future__ import annotations

import copy

import torch
from diffusers import Flux2KleinPipeline
from torch import nn
from transformers import AutoTokenizer, Qwen3ForCausalLM

from examples.pocket.folder import with_a_last_layer
from tests.harness import ROOT

KLEIN = ROOT / "examples" / "pocket_flux2"
TRAINED = 27  # layers, behind which there was no norm


def test_a_stock_pipeline_reads_the_last_layer_that_was_trained_with_as_it_was_trained() -> None:
    encoder = Qwen3ForCausalLM.from_pretrained(KLEIN / "text_encoder", torch_dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(KLEIN / "tokenizer")
    alone = copy.deepcopy(encoder)
    alone.model.layers, alone.model.norm = alone.model.layers[:TRAINED], nn.Identity()

    def read(model: Qwen3ForCausalLM) -> torch.Tensor:
        with torch.no_grad():
            return Flux2KleinPipeline._get_qwen3_prompt_embeds(
                model, tokenizer, "a red apple, noto style", max_sequence_length=28
            )

    trained = read(alone)
    assert torch.equal(read(encoder), trained)
    alone.model.norm = nn.RMSNorm(encoder.config.hidden_size, 1e-6)
    assert not torch.allclose(read(alone), trained, rtol=0.1), "behind the norm it is another"
    assert torch.equal(read(with_a_last_layer(alone)), trained)
