"""A batch arrives as it was sent: values, dtypes and shapes, also of odd tensors."""

import pytest
import torch

from trainer.base.types import Batch
from trainer.data.batches import sent


@pytest.mark.parametrize("large", [0, 2**40], ids=["all in shared memory", "all as bytes"])
def test_odd_tensors_arrive_as_they_were(monkeypatch, large):
    monkeypatch.setattr(sent, "LARGE", large)
    odd = torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4).transpose(0, 2)  # not contiguous
    batch = Batch((), odd, ("ä",), None, torch.empty(0, 2, dtype=torch.int64), odd > 3, torch.tensor(float("nan")), None)
    sending = sent.Sent.of(batch)
    kept = [value for value in vars(sending.packed).values() if isinstance(value, torch.Tensor)]
    assert len(kept) == (4 if large == 0 else 0)
    back = sending.batch()
    for name in ("latents", "original_size", "crop_top_left", "target_size"):
        was, now = getattr(batch, name), getattr(back, name)
        assert torch.equal(was.nan_to_num(7), now.nan_to_num(7)) and was.dtype == now.dtype and was.shape == now.shape
        now.add_(0) if now.dtype != torch.bool else now.logical_not_()  # may be written to, without a warning
    assert (back.captions, back.conditioning, back.loss_weights) == (("ä",), None, None)
