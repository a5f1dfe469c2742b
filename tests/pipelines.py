"""The stock pipelines of diffusers that tests hold a family against, loaded from a tiny model's folder in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


class Reader:
    """As FLUX.3's pipeline uses its processor of images and texts, for texts alone."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.apply_chat_template = tokenizer, tokenizer.apply_chat_template


def flux3(folder: Path) -> Any:
    """FLUX.3's modular pipeline without its prompt upsampler."""
    from diffusers import AutoencoderKLFlux2, Flux3AutoBlocks, Flux3Transformer2DModel
    from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

    blocks = Flux3AutoBlocks()
    blocks.sub_blocks.pop("prompt_upsampler")
    pipeline = blocks.init_pipeline()
    classes = {"transformer": Flux3Transformer2DModel, "text_encoder": Qwen3VLForConditionalGeneration,
               "vae": AutoencoderKLFlux2}  # fmt: skip
    parts = {name: cls.from_pretrained(folder / name, torch_dtype=torch.float32).eval() for name, cls in classes.items()}
    pipeline.update_components(**parts, tokenizer=Reader(AutoTokenizer.from_pretrained(folder / "tokenizer")))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def stock(family: str, folder: Path) -> Any:
    """The pipeline of a family."""
    import diffusers

    if family == "flux3":
        return flux3(folder)
    cls = {"flux2": diffusers.Flux2KleinPipeline, "zimage": diffusers.ZImagePipeline}[family]
    return cls.from_pretrained(folder, torch_dtype=torch.float32)
