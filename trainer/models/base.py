"""The protocol every model family stands behind: data (components, names, presets) and a few functions.

A family is one folder here and one line in FAMILIES. It must give what has no default below; a field with a default is
given where the family differs.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import pad

from trainer.base.memory import find_blocks
from trainer.base.types import Batch, Conditioning, KeyStyle, Link, separate
from trainer.models.names import ComponentConfig, Names, Shape, under_original_names
from trainer.objectives import Objective

COUNTED_AT_ONCE = 1000
LATENT_SIDE = 8  # pixels to a side of one latent, in nearly every VAE


@dataclass(frozen=True)
class Component:
    """One part of a pipeline, named as in diffusers.

    sensitive: fnmatch patterns of layers that stay in 16 bit when the component is quantised.
    names(config): the names of the original (single-file) layout; None where files have those of the library's module.
    defaults: of config.json, what the family reads and a file may leave out, as the library's class takes it.
    infer(shapes, config): what the shapes of a single file, by its names without prefix, say instead of the published config.
      What they cannot say (activations, head counts, norm groups) is left out, and all of it where the names are others.
      Raises UserError for a shape that no config can be read from.
    prefixes: what stands before those names in a single file; without any of these, the names stand alone.
    file: what a file of this component alone is usually called.
    blocks: of a text encoder, fnmatch patterns of its blocks, which can be streamed; of the denoiser `Family.blocks`.
    built(config): the config of the module that is built, where not all that files hold is read.
    """

    name: str
    library: Literal["diffusers", "transformers"]
    class_name: str
    role: Literal["denoiser", "text_encoder", "vae"]
    sensitive: tuple[str, ...] = ()
    names: Callable[[ComponentConfig], Names] | None = None
    defaults: ComponentConfig = field(default_factory=dict)
    infer: Callable[[Mapping[str, Shape], dict], dict] = lambda shapes, config: {}
    prefixes: tuple[str, ...] = ()
    file: str = "FILE.safetensors"
    blocks: tuple[str, ...] = ()
    built: Callable[[ComponentConfig], ComponentConfig] = lambda config: config

    def inferred(self, shapes: Mapping[str, Shape], config: dict) -> dict:
        """What `infer` gives, of a file with the names of the original layout or of the module."""
        if (found := self.infer(shapes, config)) or self.names is None:
            return found
        return self.infer(under_original_names(shapes, self.names, {**self.defaults, **config}), config)

    def prefix_in(self, names: Collection[str]) -> str | None:
        """What stands before the component's names in a single file with these; None where none of its prefixes does. A file
        may also name it by its folder in diffusers, and wrap a denoiser in `model.`."""
        wrapped = ("diffusion_model.", "model.") if self.role == "denoiser" else ()
        prefixes = (*self.prefixes, f"{self.name}.", *wrapped)
        return next((p for p in prefixes if any(name.startswith(p) for name in names)), None)


@dataclass(frozen=True)
class Markers:
    """What a checkpoint's files themselves say of its objective: tensors that are no weights, by name.

    edm: the tensor that says EDM, its model and its file, for a message. distillation: of `Family.distillations`.
    """

    v_prediction: bool = False
    zero_terminal_snr: bool = False
    edm: str | None = None
    distillation: str | None = None


@dataclass
class Model:
    """The loaded parts of one model. Components that left memory are absent from `modules`.

    options: "objective", "distillation" as Markers, and the values of the config keys in `Family.reads`, by their last names.
    """

    modules: dict[str, nn.Module]
    configs: dict[str, dict[str, Any]]
    tokenizers: dict[str, Any]
    scheduler: dict[str, Any]
    compute: dict[str, torch.dtype]
    device: torch.device
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SampleRequest:
    """One image to draw: sizes in pixels, `guidance` None for the family's default, strength of the adapter.

    references: the files of the images that the model is shown; images: these, PIL images in RGB.
    """

    prompt: str
    negative: str
    width: int
    height: int
    seed: int
    steps: int
    guidance: float | None
    strength: float = 1.0
    references: tuple[str, ...] = ()
    images: tuple[Any, ...] = field(default=(), compare=False, repr=False)


def draw(pipeline: Any, request: SampleRequest, guidance: float, **embedded: Any) -> Any:
    """The PIL image that a pipeline of diffusers gives. guidance: where the request asks for none."""
    pipeline.set_progress_bar_config(disable=True)
    sizes = {"width": request.width, "height": request.height, "num_inference_steps": request.steps}
    guidance = guidance if request.guidance is None else request.guidance
    generator = torch.Generator("cpu").manual_seed(request.seed)
    return pipeline(**embedded, **sizes, guidance_scale=guidance, generator=generator).images[0]


def count_prompt_tokens(model: Model, captions: Sequence[str]) -> dict[str, tuple[list[int], int]]:
    """(tokens of each caption, special ones counted, before truncation; tokens it may have) of every tokenizer, by name."""
    counts = {name: _counts(tokenizer, captions) for name, tokenizer in model.tokenizers.items()}
    return {name: (own, model.tokenizers[name].model_max_length) for name, own in counts.items()}


def _counts(tokenizer: Any, captions: Sequence[str]) -> list[int]:
    """Several at once, which a tokenizer shares out over the cores, and not all, whose ids would fill the memory."""
    counts: list[int] = []
    for start in range(0, len(captions), COUNTED_AT_ONCE):
        some = list(captions[start : start + COUNTED_AT_ONCE])
        counts += map(len, tokenizer(some, truncation=False, return_attention_mask=False, verbose=False).input_ids)
    return counts


def join(parts: Sequence[Mapping[str, torch.Tensor]]) -> Conditioning:
    """One conditioning of encoders that each give other tensors."""
    return Conditioning.from_tensors({name: tensor for part in parts for name, tensor in part.items()})


def collate(parts: Sequence[Conditioning]) -> Conditioning:
    """Several captions' conditioning side by side. A shorter sequence gets zeros at its end, which the mask leaves out."""
    lengths = [part.sequence.shape[1] for part in parts]
    sequences = [pad(p.sequence, (0, 0, 0, max(lengths) - length)) for p, length in zip(parts, lengths, strict=True)]
    mask = None
    if len(set(lengths)) > 1 or any(part.mask is not None for part in parts):
        masks = [torch.ones_like(p.sequence[..., 0], dtype=torch.bool) if p.mask is None else p.mask for p in parts]
        mask = torch.cat([pad(m, (0, max(lengths) - length)) for m, length in zip(masks, lengths, strict=True)])
    pooled = None if parts[0].pooled is None else torch.cat([part.pooled for part in parts])
    return Conditioning(torch.cat(sequences), mask, pooled)


@dataclass(frozen=True)
class Family:
    """A model family. `components` in pipeline order; exactly one is the denoiser, one the vae.

    presets: of adapter.targets, by name: fnmatch patterns of the denoiser's layers.
    size_multiple: image sizes in pixels are multiples of it: the side of what one token of the denoiser stands for.
    latent_side: pixels to a side of one latent.
    objective(scheduler, markers, **choices) -> Objective; raises UserError for an impossible choice, and for an objective
      that is not this one.
    encode_images(model, pixels fp32 [B, 3, H, W] in [-1, 1]) -> normalised latents fp32 [B, C, h, w], posterior mean.
    tokens(model, text encoder, captions) -> of each caption what that encoder reads: int64 [rows, L], on the CPU.
    encode_text(model, text encoder, these, on its device) -> what it gives of their conditioning: tensors [B, ...] by their
      names there, with gradients where the encoder has any. What it computes follows from the shapes alone.
    predict(model, noised fp32 [B, C, h, w], time [B], conditioning, batch) -> the objective's prediction [B, C, h, w]. All
      tensors are on the model's device, the batch's too, of which nothing else is there.
    sample(model, request, conditioning, negative) -> PIL image.
    reads: of the config keys that not every family reads (trainer/plan/requirements.py), those that this one does.
    `objective` gets
      their values by their last names, and so does Model.options.
    timesteps: what objective.timesteps may be, where it is read; the first is what "auto" is.
    tokenizers: the name of a tokenizer's folder -> the text encoder it belongs to. chat_templates: those that need one.
    input_layer: the denoiser's parameter [N, channels, ...] that reads the latents.
    check(configs by component, channels that `input_layer` reads): raises UserError for a model of this architecture that is
      trained for something else.
    harmless: fnmatch patterns of tensors that files hold beside the weights and that say nothing a loader needs.
    distillations: of a family that has a base model and a distilled one, their names, which `model.variant` takes.
    distillation(name of a file or repository) -> which of them it is; None: the name does not say.
    shown(the denoiser's config) -> which of them its tensors show; None: they do not.
    presumed: the one that a model is taken for of which nothing says it; None: a base model where a pipeline's index says
      nothing, and else the user is asked.
    follows(one of them, values of the config keys in `reads`) -> what it decides, for people.
    published(names of a single file's tensors, which of the distillations it is) -> the folder of embedded configs that it
      takes; None: it needs its own.
    hub_ids: the published models, by id -> the folder of their embedded configs.
    count_tokens(model, captions) -> for every tokenizer (tokens of each caption, tokens it may have).
    join(what each text encoder gave, in their order) -> the conditioning.
    collate(conditionings of one caption each) -> theirs together.
    attention(an attention layer of the denoiser, attend) -> a processor of diffusers for it that calls
      attend(query, key, value, mask) as torch's scaled_dot_product_attention; None: the layer keeps its own.
    adjust(component, module) -> changes, in place, what the library's forward gets wrong for training.
    blocks: fnmatch patterns of the denoiser's blocks, the unit of gradient checkpointing.
    block_order(a block's name) -> what sorts them as a forward pass has them, where the modules lie in another order.
    unread: fnmatch patterns of layers in them whose output is only added, or multiplied by what needs no gradient. Nothing
      needs its value in a backward pass, so a block that is recomputed leaves out these products.
    skipped: fnmatch patterns of blocks whose input is read again outside of them.
    compiled: fnmatch patterns of those that step.compile compiles: many of few shapes.
    clips: whether, in fp16, the blocks clip what they give: a clip's backward reads what it clipped.
    gates: fnmatch patterns of layers, by full name, that those multipliers come from: adapted, they need a gradient.
    shared_inputs: component -> groups of endings of layer names; Linears that differ in nothing else read one tensor,
      which is not changed in between.
    no_gradient(component, config) -> fnmatch patterns of layers whose output never reaches the loss.
    kohya: component -> prefix of its keys in kohya files, where it is not the usual one, or a function of its config that
      gives it. Behind one that ends in a dot, names keep their dots.
    no_fp16: component that does not compute in fp16 -> why.
    negative_text: whether its pipeline of diffusers takes the negative prompt as a text, and the prompt first.
    peft: text encoder that diffusers' loader of adapters does not take -> what stands before its layers' names in the
      pipeline's module. Its adapter goes into a folder of PEFT's, and not into the file for diffusers.
    key_styles: of adapter files, beside the usual ones (`adapter_keys`).
    not_in_sd_scripts: fnmatch patterns of full names of layers that sd-scripts builds no LoRA module for.
    metadata(the denoiser's config, what is predicted) -> what adapter files say of the family.
    """

    name: str
    components: tuple[Component, ...]
    presets: Mapping[str, tuple[str, ...]]
    size_multiple: int
    objective: Callable[..., Objective]
    encode_images: Callable[[Model, torch.Tensor], torch.Tensor]
    tokens: Callable[[Model, str, Sequence[str]], Sequence[torch.Tensor]]
    encode_text: Callable[[Model, str, Sequence[torch.Tensor]], dict[str, torch.Tensor]]
    predict: Callable[[Model, torch.Tensor, torch.Tensor, Conditioning, Batch], torch.Tensor]
    sample: Callable[[Model, SampleRequest, Conditioning, Conditioning], Any]
    latent_side: int = LATENT_SIDE
    reads: tuple[str, ...] = ()
    timesteps: tuple[str, ...] = ()
    tokenizers: Mapping[str, str] = field(default_factory=lambda: {"tokenizer": "text_encoder"})
    input_layer: str = ""
    check: Callable[[Mapping[str, dict], int | None], None] = lambda configs, inputs: None
    harmless: tuple[str, ...] = ()
    distillations: tuple[str, ...] = ()
    distillation: Callable[[str], str | None] = lambda name: None
    shown: Callable[[ComponentConfig], str | None] = lambda config: None
    presumed: str | None = None
    follows: Callable[[str, Mapping[str, Any]], str] = lambda variant, options: ""
    published: Callable[..., str | None] = lambda names, variant=None: None
    hub_ids: Mapping[str, str] = field(default_factory=dict)
    count_tokens: Callable[[Model, Sequence[str]], dict[str, tuple[list[int], int]]] = count_prompt_tokens
    join: Callable[[Sequence[Mapping[str, torch.Tensor]]], Conditioning] = join
    collate: Callable[[Sequence[Conditioning]], Conditioning] = collate
    attention: Callable[[nn.Module, Callable[..., torch.Tensor]], Any] = lambda layer, attend: None
    adjust: Callable[[str, nn.Module], None] = lambda component, module: None
    blocks: tuple[str, ...] = ()
    block_order: Callable[[str], Any] = lambda name: 0
    unread: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ("*",)
    clips: bool = True
    gates: tuple[str, ...] = ()
    shared_inputs: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    no_gradient: Callable[[str, dict], tuple[str, ...]] = lambda component, config: ()
    kohya: Mapping[str, str | Callable[[ComponentConfig], str]] = field(default_factory=dict)
    no_fp16: Mapping[str, str] = field(default_factory=dict)
    negative_text: bool = True
    chat_templates: tuple[str, ...] = ()
    peft: Mapping[str, str] = field(default_factory=dict)
    key_styles: tuple[KeyStyle, ...] = ()
    not_in_sd_scripts: tuple[str, ...] = ()
    metadata: Callable[[dict, str], dict[str, str]] = lambda config, prediction: {}

    def component(self, name: str) -> Component:
        """The component of that name."""
        return next(c for c in self.components if c.name == name)

    def ordered_blocks(self, name: str, module: nn.Module) -> dict[str, nn.Module]:
        """The blocks of a component by name, in the order of a forward pass."""
        blocks = find_blocks(module, self.blocks_of(name))
        if name == self.denoiser:
            return {block: blocks[block] for block in sorted(blocks, key=self.block_order)}
        return blocks

    def blocks_of(self, name: str) -> tuple[str, ...]:
        """The fnmatch patterns of a component's blocks; none of one that has none."""
        return self.blocks if name == self.denoiser else self.component(name).blocks

    @property
    def denoiser(self) -> str:
        """The denoiser's name."""
        return next(c.name for c in self.components if c.role == "denoiser")

    @property
    def vae(self) -> str:
        """The VAE's name."""
        return next(c.name for c in self.components if c.role == "vae")

    @property
    def text_encoders(self) -> tuple[str, ...]:
        """The text encoders' names, in order."""
        return tuple(c.name for c in self.components if c.role == "text_encoder")

    def all_tokens(self, model: Model, captions: Sequence[str]) -> dict[str, Sequence[torch.Tensor]]:
        """`tokens` of every text encoder, by name."""
        return {name: self.tokens(model, name, captions) for name in self.text_encoders}

    def encode_tokens(self, model: Model, tokens: Mapping[str, Sequence[torch.Tensor]]) -> Conditioning:
        """The conditioning of `all_tokens` on the model's device, by all text encoders, which are in memory; with gradients
        where they have any."""
        return self.join([self.encode_text(model, name, tokens[name]) for name in self.text_encoders])

    def encode(self, model: Model, encoder: str, captions: Sequence[str]) -> dict[str, torch.Tensor]:
        """What one text encoder gives of the captions' conditioning, as `encode_text`."""
        return self.encode_text(model, encoder, [ids.to(model.device) for ids in self.tokens(model, encoder, captions)])

    def encode_prompts(self, model: Model, captions: Sequence[str]) -> Conditioning:
        """The captions' conditioning, by all text encoders, which are in memory; with gradients where they have any."""
        return self.join([self.encode(model, name, captions) for name in self.text_encoders])

    def unread_beside(self, adapted: Iterable[str], *, half: bool) -> tuple[str, ...]:
        """`unread`, as far as it holds where these layers are adapted.

        half: whether gradients pass through fp16. Of NaN a clip's backward makes a gradient of zero, without a word.
        """
        gated = any(fnmatchcase(layer, pattern) for layer in adapted for pattern in self.gates)
        return () if gated or (half and self.clips) else self.unread

    def kohya_prefixes(self, config: Callable[[str], ComponentConfig]) -> dict[str, str]:
        """Component -> what stands before its keys in kohya files. config: of a component."""
        encoders = {name: f"lora_te{number}" for number, name in enumerate(self.text_encoders, 1)}
        own = {name: given if isinstance(given, str) else given(config(name)) for name, given in self.kohya.items()}
        return {self.denoiser: "lora_unet", **encoders, **own}

    @property
    def adapter_keys(self) -> tuple[KeyStyle, ...]:
        """Every way in which adapter files write the names of this family's layers.

        The usual ones, of the denoiser, are those of diffusers and PEFT, kohya (names of the original layout, or diffusers'
        as LyCORIS and OneTrainer take them from a diffusers model), SimpleTuner and ComfyUI (comfy/lora.py, "generic lora
        format"); of the text encoders those of diffusers, PEFT and kohya.
        """
        denoiser = self.denoiser
        styles = [
            KeyStyle("diffusers", denoiser, f"{denoiser}."),
            KeyStyle("PEFT", denoiser, "base_model.model."),
            KeyStyle("diffusers without prefix", denoiser, ""),
            KeyStyle("kohya", denoiser, "lora_unet_", original=True, flat=True),
            KeyStyle("kohya with diffusers names", denoiser, "lora_unet_", flat=True),
            KeyStyle("SimpleTuner's LyCORIS", denoiser, "lycoris_", flat=True),
            KeyStyle("ComfyUI generic", denoiser, "diffusion_model.", original=True),
            KeyStyle("original names", denoiser, "", original=True),
            KeyStyle("PEFT of the original model", denoiser, "base_model.model.diffusion_model.", original=True),
            KeyStyle("PEFT of the original model", denoiser, "base_model.model.", original=True),
            KeyStyle("OneTrainer with original names", denoiser, f"{denoiser}.", original=True),
            KeyStyle("OneTrainer with original names", denoiser, f"{denoiser}.", original=True, links=separate),
        ]
        for number, name in enumerate(self.text_encoders, 1):
            styles.append(KeyStyle("diffusers", name, f"{name}."))
            if isinstance(prefix := self.kohya.get(name, f"lora_te{number}"), str):
                styles.append(KeyStyle("kohya", name, f"{prefix}_", flat=True))
        return (*styles, *self.key_styles)

    def flat_prefix(self, component: str, convention: str) -> str:
        """What stands before a layer's name, with underscores for dots, in files of `convention`; if it has none of its own,
        in kohya's with the library's names."""
        styles = [s for s in self.adapter_keys if s.component == component and s.flat and not s.original]
        own = [s for s in styles if s.convention == convention]
        return ([*own, *styles])[0].prefix.removesuffix("_")

    def module_links(self, component: str, config: ComponentConfig) -> list[Link]:
        """The links of the denoiser to the original layout, for kohya's names; none of a text encoder, which keeps the
        library's."""
        names = self.component(component).names
        return names(config).links if component == self.denoiser and names is not None else []

    def image_tokens(self, height: int, width: int) -> int:
        """The tokens of an image of so many pixels, for shifts that depend on them."""
        return (height // self.size_multiple) * (width // self.size_multiple)
