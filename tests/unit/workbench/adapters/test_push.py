"""What may be sent to a hub: adapter files that change something, by what is in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainer.base.errors import NonFiniteError, UserError
from trainer.base.tensorfile import write_tensors
from workbench.adapters.push import check, files_of

LAYERS = [f"unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_{part}" for part in "qkv"]


def adapter(path: Path, *b: float) -> Path:
    """Of three layers, B of each filled with one number."""
    tensors = {}
    for layer, value in zip(LAYERS, b, strict=True):
        tensors |= {f"{layer}.lora_A.weight": torch.ones(2, 1280), f"{layer}.lora_B.weight": torch.full((1280, 2), value)}
    write_tensors(path, tensors, {})
    return path


@pytest.mark.parametrize("b", [(1.0, 0.0, 0.0), (0.0, 0.0, 1.0), (1.0, 1.0, 1.0)])
def test_one_layer_that_changes_something_is_enough(tmp_path: Path, b: tuple[float, ...]) -> None:
    check(adapter(tmp_path / "a.safetensors", *b), None, "sdxl")


def test_what_changes_nothing_or_is_not_finite_is_not_sent(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"every B \(or A\) is zero, so it changes nothing; nothing was sent"):
        check(adapter(tmp_path / "a.safetensors", 0.0, 0.0, 0.0), None, "sdxl")
    for place, value in enumerate((float("nan"), float("inf"), -float("inf"))):
        b = [1.0, 1.0, 1.0]
        b[place] = value
        with pytest.raises(NonFiniteError, match=f"B of {LAYERS[place]} is not finite; nothing was sent"):
            check(adapter(tmp_path / "a.safetensors", *b), None, "sdxl")
    write_tensors(tmp_path / "model.safetensors", {"conv_in.weight": torch.ones(4, 4)}, {})
    with pytest.raises(UserError, match="\nnothing was sent: push sends adapter files"):
        check(tmp_path / "model.safetensors", None, "sdxl")


def test_the_files_of_a_run_are_sent_and_no_others(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no .safetensors file"):
        files_of(tmp_path)
    for name in (
        "a.safetensors",
        "a_comfyui.safetensors",
        "README.md",
        "notes.txt",
        "images/0.png",
        "images/0.tmp",
        "b/c.png",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert list(files_of(tmp_path)) == ["a.safetensors", "a_comfyui.safetensors", "README.md", "images/0.png"]
