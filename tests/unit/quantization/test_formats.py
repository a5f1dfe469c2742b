from __future__ import annotations

import pytest
import torch

from trainer.quantization import ALL_FORMATS, formats


@pytest.mark.parametrize("format", [f for f in ALL_FORMATS if getattr(f, "bits", None)], ids=lambda format: format.name)
def test_a_weight_in_pieces_is_the_whole_one(monkeypatch, format) -> None:
    weight = torch.randn(13, 256, generator=torch.Generator().manual_seed(0))
    payloads = []
    for elements in (formats.PIECE_ELEMENTS, 1):
        monkeypatch.setattr(formats, "PIECE_ELEMENTS", elements)
        payloads.append(format.empty_payload(weight.shape, "cpu"))
        format.quantize_into(weight, payloads[-1])
    assert all(torch.equal(payloads[0][name], payloads[1][name]) for name in payloads[0])
