"""A model family: data and functions, in parts. A family sets a field with a default only if it differs."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import pad

from trainer.base.memory import find_blocks
from trainer.base.protocols import Kernels
from trainer.base.types import Batch, Conditioning, KeyStyle, Link, ReferenceRule, separate
from trainer.models.names import ComponentConfig, Names, Shape, under_original_names
from trainer.objectives import Objective

COUNTED_AT_ONCE = 1000
LATENT_SIDE = 8  # pixels to a side of one latent, in nearly every VAE


@dataclass(frozen=True)
class Component:
    """One part of a pipeline, named as in diffusers."""

    name: str
    library: Literal["diffusers", "transformers"]
    class_name: str
    role: Literal["denoiser", "text_encoder", "vae"]
    sensitive: tuple[str, ...] = ()  # fnmatch patterns of layers that stay in 16 bit when the component is quantised
    # (config) -> names in the original (single-file) layout; None: files have the library's names.
    names: Callable[[ComponentConfig], Names] | None = None
    defaults: ComponentConfig = field(default_factory=dict)  # values for keys missing from config.json
    # (shapes by names without prefix, published config) -> config values that a single file's shapes show: no activations,
    # head counts or norm groups; {} for other names. Raises UserError for an impossible shape.
    infer: Callable[[Mapping[str, Shape], dict], dict] = lambda shapes, config: {}
    prefixes: tuple[str, ...] = ()  # before those names in a single file; names without any of these stand alone
    file: str = "FILE.safetensors"  # usual name of a file of this component alone
    blocks: tuple[str, ...] = ()  # fnmatch patterns of a text encoder's blocks, which can be streamed
    # (config) -> config of the module that is built, if only a part of the files is read.
    shorten: Callable[[ComponentConfig], ComponentConfig] = lambda config: config

    def inferred(self, shapes: Mapping[str, Shape], config: dict) -> dict:
        """`infer` for a file with the names of the original layout or of the module."""
        if (values := self.infer(shapes, config)) or self.names is None:
            return values
        return self.infer(under_original_names(shapes, self.names, {**self.defaults, **config}), config)

    def prefix_in(self, names: Collection[str]) -> str | None:
        """The prefix of the component in a single file with these names: its own, its folder's name, a denoiser's wrapping;
        None if no name has one."""
        wrapped = ("diffusion_model.", "model.") if self.role == "denoiser" else ()
        prefixes = (*self.prefixes, f"{self.name}.", *wrapped)
        return next((p for p in prefixes if any(name.startswith(p) for name in names)), None)


@dataclass(frozen=True)
class Markers:
    """A checkpoint's objective, by marker tensors in its files. edm: an EDM marker's name, model and file, for a
    message. distillation: one of `VariantPart.names`, or None if unknown."""

    v_prediction: bool = False
    zero_terminal_snr: bool = False
    edm: str | None = None
    distillation: str | None = None


@dataclass
class Model:
    """The loaded parts of one model. modules: those in memory. options: "objective", "distillation" as in Markers, and the
    values of the config keys in `Family.reads`, by their last names."""

    modules: dict[str, nn.Module]
    configs: dict[str, dict[str, Any]]
    tokenizers: dict[str, Any]
    scheduler: dict[str, Any]
    compute: dict[str, torch.dtype]
    device: torch.device
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SampleRequest:
    """One image to draw. width, height: pixels. guidance: None: the family's default. strength: the adapter's. references:
    files of the images that the model is shown; images: the same as PIL images in RGB. cfg: None: no second pass."""

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
    cfg: float | None = None


def draw(pipeline: Any, request: SampleRequest, guidance: float, **embedded: Any) -> Any:
    """The PIL image that a pipeline of diffusers draws. guidance: default for a request without."""
    pipeline.set_progress_bar_config(disable=True)
    sizes = {"width": request.width, "height": request.height, "num_inference_steps": request.steps}
    guidance = guidance if request.guidance is None else request.guidance
    generator = torch.Generator("cpu").manual_seed(request.seed)
    return pipeline(**embedded, **sizes, guidance_scale=guidance, generator=generator).images[0]


def count_prompt_tokens(model: Model, captions: Sequence[str]) -> dict[str, tuple[list[int], int]]:
    """(tokens of each caption before truncation, special ones included; tokens that are read) by tokenizer."""
    by_tokenizer: dict[str, tuple[list[int], int]] = {}
    for name, tokenizer in model.tokenizers.items():
        counts: list[int] = []
        # In batches: a tokenizer spreads a batch over the cores, and the ids of all captions would fill the memory.
        for start in range(0, len(captions), COUNTED_AT_ONCE):
            batch = list(captions[start : start + COUNTED_AT_ONCE])
            counts += map(len, tokenizer(batch, truncation=False, return_attention_mask=False, verbose=False).input_ids)
        by_tokenizer[name] = counts, tokenizer.model_max_length
    return by_tokenizer


def join(parts: Sequence[Mapping[str, torch.Tensor]]) -> Conditioning:
    """One conditioning from encoders that each give different tensors."""
    return Conditioning(**{name: tensor for part in parts for name, tensor in part.items()})


def collate(parts: Sequence[Conditioning]) -> Conditioning:
    """Several captions' conditioning side by side. Shorter sequences are padded with zeros, which the mask excludes."""
    lengths = [part.sequence.shape[1] for part in parts]
    sequences = [pad(p.sequence, (0, 0, 0, max(lengths) - length)) for p, length in zip(parts, lengths, strict=True)]
    mask = None
    if len(set(lengths)) > 1 or any(part.mask is not None for part in parts):
        masks = [torch.ones_like(p.sequence[..., 0], dtype=torch.bool) if p.mask is None else p.mask for p in parts]
        mask = torch.cat([pad(m, (0, max(lengths) - length)) for m, length in zip(masks, lengths, strict=True)])
    pooled = None if parts[0].pooled is None else torch.cat([part.pooled for part in parts])
    return Conditioning(torch.cat(sequences), mask, pooled)


@dataclass(frozen=True)
class TextPart:
    """How captions become a conditioning."""

    # (model, text encoder, captions) -> each caption's ids for that encoder: int64 [rows, L], on the CPU.
    tokens: Callable[[Model, str, Sequence[str]], Sequence[torch.Tensor]]
    # (model, text encoder, these ids on its device) -> its tensors [B, ...] of the conditioning, by name, with gradients if
    # the encoder has any. The computation depends on shapes alone.
    encode: Callable[[Model, str, Sequence[torch.Tensor]], dict[str, torch.Tensor]]
    # (model, captions) -> (tokens of each caption, tokens that are read) by tokenizer.
    count: Callable[[Model, Sequence[str]], dict[str, tuple[list[int], int]]] = count_prompt_tokens
    # (each text encoder's tensors, in order) -> the conditioning.
    join: Callable[[Sequence[Mapping[str, torch.Tensor]]], Conditioning] = join
    collate: Callable[[Sequence[Conditioning]], Conditioning] = collate  # one caption's each -> a batch's
    # Tokens of a caption -> its rows in the sequence, if the denoiser takes captions of one number of rows at once.
    rows: Callable[[int], int] | None = None


@dataclass(frozen=True)
class ImagePart:
    """How images become latents, the objective, and how images are drawn."""

    # (scheduler, markers, **values of `Family.reads`): raises UserError for an impossible choice or an untrained objective.
    objective: Callable[..., Objective]
    # (model, pixels fp32 [B, 3, H, W] in [-1, 1]) -> normalised latents fp32 [B, C, h, w], the posterior's mean.
    encode: Callable[[Model, torch.Tensor], torch.Tensor]
    # (model, noised fp32 [B, C, h, w], time [B], conditioning, batch) -> the objective's prediction [B, C, h, w]. All,
    # the batch's tensors too, are on the model's device.
    predict: Callable[[Model, torch.Tensor, torch.Tensor, Conditioning, Batch], torch.Tensor]
    draw: Callable[[Model, SampleRequest, Conditioning, Conditioning], Any]  # (..., negative) -> PIL image
    timesteps: tuple[str, ...] = ()  # values of objective.timesteps; the first is "auto"
    size_multiple: int = 16  # pixels to a side of one token of the denoiser: image sizes are multiples
    latent_side: int = LATENT_SIDE
    references: ReferenceRule = ReferenceRule()
    # (component, module): corrects the library's forward for training, in place.
    adjust: Callable[[str, nn.Module], None] = lambda component, module: None
    # (model.variant, request) -> arguments of the pipeline's call that only this family has, or with another default.
    arguments: Callable[[str | None, SampleRequest], dict[str, Any]] = lambda variant, request: {}
    modular: str = ""  # class of the blocks of diffusers' modular pipeline, if it has one
    negative_text: bool = True  # whether diffusers' pipeline takes the negative prompt as a text, and the prompt first

    def image_tokens(self, height: int, width: int) -> int:
        """The tokens of an image of height x width pixels."""
        return (height // self.size_multiple) * (width // self.size_multiple)


@dataclass(frozen=True)
class AdapterPart:
    """The layers that an adapter may have, and its files' names and metadata."""

    presets: Mapping[str, tuple[str, ...]]  # fnmatch patterns of the denoiser's layers, by a name in adapter.targets
    # (component, config, whether photos have references) -> fnmatch patterns of layers whose output never reaches the loss.
    no_gradient: Callable[[str, dict, bool], tuple[str, ...]] = lambda component, config, references: ()
    # Component -> its unusual prefix in kohya files, or a function of its config. Names keep their dots after a prefix that
    # ends in one.
    kohya: Mapping[str, str | Callable[[ComponentConfig], str]] = field(default_factory=dict)
    # Text encoder that diffusers' adapter loader does not take (a PEFT folder holds its adapter) -> prefix of its layers'
    # names in the pipeline's module.
    peft: Mapping[str, str] = field(default_factory=dict)
    key_styles: tuple[KeyStyle, ...] = ()  # of adapter files, besides the usual ones (`Family.adapter_keys`)
    in_diffusers: tuple[str, ...] = ("lora", "dora")  # adapter kinds that diffusers' loader takes for this family
    not_in_sd_scripts: tuple[str, ...] = ()  # fnmatch patterns of layers, by full name, without a LoRA module there
    not_behind_lycoris: tuple[str, ...] = ()  # the same for layers that ComfyUI does not know behind `lycoris_`
    metadata: Callable[[dict, str], dict[str, str]] = lambda config, prediction: {}  # the family's entries in adapter files


@dataclass(frozen=True)
class FilePart:
    """A model's files besides the components' weights, and where they are published."""

    # A tokenizer's folder -> the text encoder it belongs to.
    tokenizers: Mapping[str, str] = field(default_factory=lambda: {"tokenizer": "text_encoder"})
    chat_templates: tuple[str, ...] = ()  # tokenizers that need a chat template
    input_layer: str = ""  # the denoiser's parameter [N, channels, ...] that reads the latents
    # (configs by component, channels that `input_layer` reads): raises UserError for a model trained for something else.
    check: Callable[[Mapping[str, dict], int | None], None] = lambda configs, inputs: None
    harmless: tuple[str, ...] = ()  # fnmatch patterns of tensors that may stand beside the weights unread
    # (names of a single file's tensors, its variant) -> the folder of its embedded configs; None: it needs its own.
    published: Callable[..., str | None] = lambda names, variant=None: None
    hub_ids: Mapping[str, str] = field(default_factory=dict)  # published models -> folders of their embedded configs
    scheduler: ComponentConfig | None = None  # for a folder without one; None: a folder needs one


@dataclass(frozen=True)
class VariantPart:
    """A family's base model, the one distilled from it, and the one that edits images, if it has several."""

    names: tuple[str, ...] = ()  # (base, distilled), as in model.variant
    of_name: Callable[[str], str | None] = lambda name: None  # the variant by a file's or repository's name; None: unknown
    of_config: Callable[[ComponentConfig], str | None] = lambda config: None  # by the denoiser's tensors; None: unknown
    # The variant if unknown; None: the base if a pipeline's index says nothing, else the user is asked.
    presumed: str | None = None
    effect: Callable[[str, Mapping[str, Any]], str] = lambda variant, options: ""  # the variant's effects, for people
    editing: str = ""  # the variant with the base's tensors that alone is shown references; "": none
    editing_pipeline: str = ""  # class of its pipeline

    @property
    def every(self) -> tuple[str, ...]:
        """All variants that model.variant may name."""
        return (*self.names, self.editing) if self.editing else self.names


@dataclass(frozen=True)
class MemoryPart:
    """How the denoiser's blocks and layers may be recomputed, streamed, compiled, and share inputs."""

    blocks: tuple[str, ...] = ()  # fnmatch patterns of the denoiser's blocks, the unit of gradient checkpointing
    block_order: Callable[[str], Any] = lambda name: 0  # sort key of their forward order, if the modules' order differs
    # fnmatch patterns of layers in blocks whose output is only added, or multiplied by a tensor without gradient: no backward
    # pass needs its value, and a recomputed block leaves out the product.
    unread: tuple[str, ...] = ()
    # fnmatch patterns of layers, by full name, that compute those multipliers: adapted, they need a gradient.
    gates: tuple[str, ...] = ()
    clips: bool = True  # whether blocks clip their output in fp16: a clip's backward reads its input
    skipped: tuple[str, ...] = ()  # fnmatch patterns of blocks whose input is read again outside of them
    compiled: tuple[str, ...] = ("*",)  # fnmatch patterns of blocks that step.compile compiles: many of few shapes
    # Component -> groups of suffixes of layer names: Linears whose names differ in these alone read one tensor.
    shared_inputs: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    # (attention layer of the denoiser, attend, kernels) -> a processor of diffusers that calls attend(query, key, value,
    # mask) like torch's scaled_dot_product_attention; None: the layer keeps its own.
    attention: Callable[[nn.Module, Callable[..., torch.Tensor], Kernels], Any] = lambda layer, attend, kernels: None
    no_fp16: Mapping[str, str] = field(default_factory=dict)  # component that cannot compute in fp16 -> reason

    def unread_beside(self, adapted: Iterable[str], *, half: bool) -> tuple[str, ...]:
        """`unread`; none if an adapted layer is one of `gates`, or if half and `clips`. half: whether gradients pass through
        fp16, where a clip's backward silently turns NaN into a gradient of zero."""
        gated = any(fnmatchcase(layer, pattern) for layer in adapted for pattern in self.gates)
        return () if gated or (half and self.clips) else self.unread


@dataclass(frozen=True)
class Family:
    """A model family. The values of `reads` are passed to `objective`, by the keys' last names, and to Model.options."""

    name: str
    components: tuple[Component, ...]  # in pipeline order; exactly one is the denoiser, one the vae
    text: TextPart
    images: ImagePart
    adapters: AdapterPart
    # The config keys that this family reads, of those that not every family does (trainer/plan/requirements.py).
    reads: tuple[str, ...] = ()
    files: FilePart = field(default_factory=FilePart)
    variants: VariantPart = field(default_factory=VariantPart)
    memory: MemoryPart = field(default_factory=MemoryPart)

    def component(self, name: str) -> Component:
        """A component by its name."""
        return next(c for c in self.components if c.name == name)

    def ordered_blocks(self, name: str, module: nn.Module) -> dict[str, nn.Module]:
        """A component's blocks by name, in the order of a forward pass."""
        blocks = find_blocks(module, self.blocks_of(name))
        if name == self.denoiser:
            return {block: blocks[block] for block in sorted(blocks, key=self.memory.block_order)}
        return blocks

    def blocks_of(self, name: str) -> tuple[str, ...]:
        """The fnmatch patterns of a component's blocks."""
        return self.memory.blocks if name == self.denoiser else self.component(name).blocks

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
        """`TextPart.tokens` by text encoder."""
        return {name: self.text.tokens(model, name, captions) for name in self.text_encoders}

    def encode_tokens(self, model: Model, tokens: Mapping[str, Sequence[torch.Tensor]]) -> Conditioning:
        """The conditioning of `all_tokens`, which are on the model's device, by the text encoders, which are in memory; with
        gradients if they have any."""
        conditioning = self.text.join([self.text.encode(model, name, tokens[name]) for name in self.text_encoders])
        if self.text.rows is None:
            return conditioning
        return replace(conditioning, lengths=tuple(self.text.rows(len(ids)) for ids in tokens[self.text_encoders[-1]]))

    def encode(self, model: Model, encoder: str, captions: Sequence[str]) -> dict[str, torch.Tensor]:
        """One text encoder's tensors of the captions' conditioning (`TextPart.encode`)."""
        return self.text.encode(model, encoder, [ids.to(model.device) for ids in self.text.tokens(model, encoder, captions)])

    def encode_prompts(self, model: Model, captions: Sequence[str]) -> Conditioning:
        """The captions' conditioning by all text encoders, which are in memory; with gradients if they have any."""
        tokens = self.all_tokens(model, captions).items()
        return self.encode_tokens(model, {name: [ids.to(model.device) for ids in some] for name, some in tokens})

    def kohya_prefixes(self, config: Callable[[str], ComponentConfig]) -> dict[str, str]:
        """Component -> prefix of its keys in kohya files. config: a component's config by its name."""
        encoders = {name: f"lora_te{number}" for number, name in enumerate(self.text_encoders, 1)}
        unusual = {name: p if isinstance(p, str) else p(config(name)) for name, p in self.adapters.kohya.items()}
        return {self.denoiser: "lora_unet", **encoders, **unusual}

    def file_formats(self, kind: str, formats: Sequence[str]) -> tuple[str, ...]:
        """The formats, out of `formats`, in which that kind of adapter is written."""
        return tuple(format for format in formats if format != "diffusers" or kind in self.adapters.in_diffusers)

    @property
    def adapter_keys(self) -> tuple[KeyStyle, ...]:
        """All conventions for this family's layer names in adapter files: the usual ones (kohya's has the original layout's
        names, or diffusers' as in LyCORIS and OneTrainer; ComfyUI's is "generic lora format" in comfy/lora.py), and its own.
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
            if isinstance(prefix := self.adapters.kohya.get(name, f"lora_te{number}"), str):
                styles.append(KeyStyle("kohya", name, f"{prefix}_", flat=True))
        return (*styles, *self.adapters.key_styles)

    def flat_prefix(self, component: str, convention: str) -> str:
        """Prefix of a layer's name in flat files of `convention`, else in kohya's with the library's names."""
        styles = [s for s in self.adapter_keys if s.component == component and s.flat and not s.original]
        exact = [s for s in styles if s.convention == convention]
        return (exact or styles)[0].prefix.removesuffix("_")

    def module_links(self, component: str, config: ComponentConfig) -> list[Link]:
        """The denoiser's links to the original layout, for kohya's names; none for a text encoder, which keeps the library's
        names."""
        names = self.component(component).names
        return names(config).links if component == self.denoiser and names is not None else []
