"""The protocol every model family stands behind: data (components, key tables, presets) and a few functions.

How families that are not here yet would fit, written down before the protocol froze:

- Qwen-Image: one LLM encoder gives `Conditioning.sequence` with `mask` (variable length, padded in the batch); its 5-D VAE
  with per-channel mean and std lives in `encode_images` / `sample` (latents stay [B, C, H, W] outside: one frame); its
  dynamic shift is the family's `objective`.
- FLUX.2-klein: features of several LLM layers, stacked, are `sequence`; 128-channel latents are only a number here;
  reference images of differing sizes are `Batch.references`, packed and given position ids in `predict`.
- An edit model: control images are `Batch.references` too; `predict` concatenates them as its model wants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from trainer.models.keys import Link
from trainer.objectives import Objective
from trainer.types import Batch, Conditioning


@dataclass(frozen=True)
class Component:
    """One part of a pipeline, named as in diffusers.

    sensitive: fnmatch patterns of layers that stay in 16 bit when the component is quantised.
    links: the original (single-file) layout's names, from the component's config; None where files use diffusers names.
    prefixes: what stands before those names in a single file; without any of these, the names stand alone.
    """

    name: str
    library: Literal["diffusers", "transformers"]
    class_name: str
    role: Literal["denoiser", "text_encoder", "vae"]
    sensitive: tuple[str, ...] = ()
    links: Callable[[dict], list[Link]] | None = None
    prefixes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Markers:
    """What a checkpoint's files themselves say of its objective: tensors that are no weights, by name.

    edm: the tensor that says EDM, its model and its file, for a message.
    """

    v_prediction: bool = False
    zero_terminal_snr: bool = False
    edm: str | None = None


@dataclass
class Model:
    """The loaded parts of one model. Components that left memory are absent from `modules`."""

    modules: dict[str, nn.Module]
    configs: dict[str, dict[str, Any]]
    tokenizers: dict[str, Any]
    scheduler: dict[str, Any]
    compute: dict[str, torch.dtype]
    device: torch.device
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SampleRequest:
    """One image to draw: sizes in pixels, `guidance` None for the family's default, strength of the adapter."""

    prompt: str
    negative: str
    width: int
    height: int
    seed: int
    steps: int
    guidance: float | None
    strength: float = 1.0


@dataclass(frozen=True)
class Family:
    """A model family. `components` in pipeline order; exactly one is the denoiser, one the vae.

    input_layer: the denoiser's parameter [N, channels, ...] that reads the latents.
    check(configs by component, channels that `input_layer` reads): raises UserError for a model of this architecture that is
      trained for something else.
    negative_prompts: whether a sample is guided away from one.
    hub_ids: the published models, by id -> the folder of their embedded configs.
    tokenizers: their folders' names. size_multiple: image sizes in pixels are multiples of it.
    objective(scheduler, markers, **choices) -> Objective; raises UserError for an impossible choice, and for an objective
      that is not this one.
    encode_images(model, pixels fp32 [B, 3, H, W] in [-1, 1]) -> normalised latents fp32 [B, C, h, w], posterior mean.
    encode_prompts(model, captions) -> Conditioning, with gradients where the encoders have any.
    predict(model, noised fp32 [B, C, h, w], time [B], conditioning, batch) -> the objective's prediction [B, C, h, w].
    image_tokens(height, width) -> tokens of an image of that many pixels, for shifts that depend on it.
    sample(model, request, conditioning, negative) -> PIL image.
    adjust(component, module) -> changes, in place, what the library's forward gets wrong for training.
    blocks: fnmatch patterns of the denoiser's blocks, the unit of gradient checkpointing.
    unread: fnmatch patterns of Linears in them whose output is only added, or multiplied by what needs no gradient. Nothing
      needs its value in a backward pass, so a block that is recomputed leaves out these products.
    shared_inputs: component -> groups of endings of layer names; Linears that differ in nothing else read one tensor.
    no_gradient(component, config) -> fnmatch patterns of layers whose output never reaches the loss.
    module_links(component, config) -> Links to the original layout, for kohya's names; empty where names stay.
    kohya_prefix: component -> prefix of its keys in kohya files.
    """

    name: str
    components: tuple[Component, ...]
    input_layer: str
    check: Callable[[Mapping[str, dict], int], None]
    negative_prompts: bool
    tokenizers: tuple[str, ...]
    size_multiple: int
    presets: Mapping[str, tuple[str, ...]]
    harmless: tuple[str, ...]
    published: Callable[[set[str]], str]
    hub_ids: Mapping[str, str]
    infer_config: Callable[[str, Mapping[str, tuple[int, ...]], dict], dict]
    objective: Callable[..., Objective]
    encode_images: Callable[[Model, torch.Tensor], torch.Tensor]
    encode_prompts: Callable[[Model, Sequence[str]], Conditioning]
    count_tokens: Callable[[Model, str], dict[str, tuple[int, int]]]
    predict: Callable[[Model, torch.Tensor, torch.Tensor, Conditioning, Batch], torch.Tensor]
    image_tokens: Callable[[int, int], int]
    sample: Callable[[Model, SampleRequest, Conditioning, Conditioning], Any]
    adjust: Callable[[str, nn.Module], None]
    blocks: tuple[str, ...]
    unread: tuple[str, ...]
    shared_inputs: Mapping[str, tuple[tuple[str, ...], ...]]
    no_gradient: Callable[[str, dict], tuple[str, ...]]
    module_links: Callable[[str, dict], list[Link]]
    kohya_prefix: Mapping[str, str]
    metadata: Callable[[dict, str], dict[str, str]]

    def component(self, name: str) -> Component:
        return next(c for c in self.components if c.name == name)

    @property
    def denoiser(self) -> str:
        return next(c.name for c in self.components if c.role == "denoiser")

    @property
    def vae(self) -> str:
        return next(c.name for c in self.components if c.role == "vae")

    @property
    def text_encoders(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.components if c.role == "text_encoder")
