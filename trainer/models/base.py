"""The protocol every model family stands behind: data and functions, in parts. A field with a default is given where the
family differs."""

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
    # (config) -> the names of the original (single-file) layout; None where files have those of the library's module.
    names: Callable[[ComponentConfig], Names] | None = None
    defaults: ComponentConfig = field(default_factory=dict)  # what the family reads of config.json, and a file may leave out
    # (shapes, config) -> what the shapes of a single file, by its names without prefix, say instead of the published config:
    # no activations, head counts or norm groups; {} where the names are others. Raises UserError for an impossible shape.
    infer: Callable[[Mapping[str, Shape], dict], dict] = lambda shapes, config: {}
    prefixes: tuple[str, ...] = ()  # what stands before those names in a single file; without any of these, they stand alone
    file: str = "FILE.safetensors"  # what a file of this component alone is usually called
    blocks: tuple[str, ...] = ()  # of a text encoder, fnmatch patterns of its blocks, which can be streamed
    # (config) -> that of the module that is built, where not all that files hold is read.
    built: Callable[[ComponentConfig], ComponentConfig] = lambda config: config

    def inferred(self, shapes: Mapping[str, Shape], config: dict) -> dict:
        """What `infer` gives, of a file with the names of the original layout or of the module."""
        if (found := self.infer(shapes, config)) or self.names is None:
            return found
        return self.infer(under_original_names(shapes, self.names, {**self.defaults, **config}), config)

    def prefix_in(self, names: Collection[str]) -> str | None:
        """What stands before the component's names in a single file with these: a prefix, its folder's name, a denoiser's
        wrapping; None where none does."""
        wrapped = ("diffusion_model.", "model.") if self.role == "denoiser" else ()
        prefixes = (*self.prefixes, f"{self.name}.", *wrapped)
        return next((p for p in prefixes if any(name.startswith(p) for name in names)), None)


@dataclass(frozen=True)
class Markers:
    """What a checkpoint's files themselves say of its objective, by tensors that are no weights. edm: such a tensor, its
    model and its file, for a message. distillation: of `VariantPart.names`."""

    v_prediction: bool = False
    zero_terminal_snr: bool = False
    edm: str | None = None
    distillation: str | None = None


@dataclass
class Model:
    """The loaded parts of one model; what left memory is absent from `modules`. options: "objective", "distillation" as
    Markers, and the values of the config keys in `Family.reads`, by their last names."""

    modules: dict[str, nn.Module]
    configs: dict[str, dict[str, Any]]
    tokenizers: dict[str, Any]
    scheduler: dict[str, Any]
    compute: dict[str, torch.dtype]
    device: torch.device
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SampleRequest:
    """One image to draw: sizes in pixels, `guidance` None for the family's default, strength of the adapter. references: the
    files of the images that the model is shown; images: these, PIL images in RGB. cfg: None: no second pass."""

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
    """The PIL image that a pipeline of diffusers gives. guidance: where the request asks for none."""
    pipeline.set_progress_bar_config(disable=True)
    sizes = {"width": request.width, "height": request.height, "num_inference_steps": request.steps}
    guidance = guidance if request.guidance is None else request.guidance
    generator = torch.Generator("cpu").manual_seed(request.seed)
    return pipeline(**embedded, **sizes, guidance_scale=guidance, generator=generator).images[0]


def count_prompt_tokens(model: Model, captions: Sequence[str]) -> dict[str, tuple[list[int], int]]:
    """(tokens of each caption, special ones counted, before truncation; tokens it may have) of every tokenizer, by name."""
    found: dict[str, tuple[list[int], int]] = {}
    for name, tokenizer in model.tokenizers.items():
        counts: list[int] = []
        # Several at once, which a tokenizer shares out over the cores, and not all, whose ids would fill the memory.
        for start in range(0, len(captions), COUNTED_AT_ONCE):
            some = list(captions[start : start + COUNTED_AT_ONCE])
            counts += map(len, tokenizer(some, truncation=False, return_attention_mask=False, verbose=False).input_ids)
        found[name] = counts, tokenizer.model_max_length
    return found


def join(parts: Sequence[Mapping[str, torch.Tensor]]) -> Conditioning:
    """One conditioning of encoders that each give other tensors."""
    return Conditioning(**{name: tensor for part in parts for name, tensor in part.items()})


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
class TextPart:
    """How captions become a conditioning."""

    # (model, text encoder, captions) -> of each caption what that encoder reads: int64 [rows, L], on the CPU.
    tokens: Callable[[Model, str, Sequence[str]], Sequence[torch.Tensor]]
    # (model, text encoder, these, on its device) -> its tensors [B, ...] of their conditioning, by name, with gradients where
    # the encoder has any. What it computes follows from the shapes alone.
    encode: Callable[[Model, str, Sequence[torch.Tensor]], dict[str, torch.Tensor]]
    # (model, captions) -> for every tokenizer (tokens of each caption, tokens it may have).
    count: Callable[[Model, Sequence[str]], dict[str, tuple[list[int], int]]] = count_prompt_tokens
    # (what each text encoder gave, in their order) -> the conditioning.
    join: Callable[[Sequence[Mapping[str, torch.Tensor]]], Conditioning] = join
    collate: Callable[[Sequence[Conditioning]], Conditioning] = collate  # of one caption each -> theirs together
    # A caption's tokens -> its rows in the sequence, of a denoiser that takes captions of one number of rows at once.
    rows: Callable[[int], int] | None = None


@dataclass(frozen=True)
class ImagePart:
    """How images become latents, what is learned of them, and how new ones are drawn."""

    # (scheduler, markers, **values of `Family.reads`): raises UserError for an impossible choice, and for another objective.
    objective: Callable[..., Objective]
    # (model, pixels fp32 [B, 3, H, W] in [-1, 1]) -> normalised latents fp32 [B, C, h, w], posterior mean.
    encode: Callable[[Model, torch.Tensor], torch.Tensor]
    # (model, noised fp32 [B, C, h, w], time [B], conditioning, batch) -> the objective's prediction [B, C, h, w]. All tensors
    # are on the model's device, the batch's too, of which nothing else is there.
    predict: Callable[[Model, torch.Tensor, torch.Tensor, Conditioning, Batch], torch.Tensor]
    draw: Callable[[Model, SampleRequest, Conditioning, Conditioning], Any]  # (..., negative) -> PIL image
    timesteps: tuple[str, ...] = ()  # what objective.timesteps may be, where it is read; the first is what "auto" is
    size_multiple: int = 16  # the side in pixels of what one token of the denoiser stands for: image sizes are multiples
    latent_side: int = LATENT_SIDE
    references: ReferenceRule = ReferenceRule()
    # (component, module): changes, in place, what the library's forward gets wrong for training.
    adjust: Callable[[str, nn.Module], None] = lambda component, module: None
    # (model.variant, a request): of the pipeline's call, what only this family's takes, or has another default of.
    arguments: Callable[[str | None, SampleRequest], dict[str, Any]] = lambda variant, request: {}
    modular: str = ""  # the class of its pipeline's blocks in diffusers, where that is a modular one
    negative_text: bool = True  # whether its pipeline of diffusers takes the negative prompt as a text, and the prompt first

    def image_tokens(self, height: int, width: int) -> int:
        """The tokens of an image of so many pixels, for shifts that depend on them."""
        return (height // self.size_multiple) * (width // self.size_multiple)


@dataclass(frozen=True)
class AdapterPart:
    """The layers that an adapter may have, and what its files say, for those that read them."""

    presets: Mapping[str, tuple[str, ...]]  # of adapter.targets, by name: fnmatch patterns of the denoiser's layers
    # (component, config, whether photos have references) -> fnmatch patterns of layers whose output never reaches the loss.
    no_gradient: Callable[[str, dict, bool], tuple[str, ...]] = lambda component, config, references: ()
    # Component -> its unusual prefix in kohya files, or that as a function of its config. Behind one that ends in a dot,
    # names keep their dots.
    kohya: Mapping[str, str | Callable[[ComponentConfig], str]] = field(default_factory=dict)
    # Text encoder that diffusers' loader of adapters does not take, so a folder of PEFT's holds its adapter -> what stands
    # before its layers' names in the pipeline's module.
    peft: Mapping[str, str] = field(default_factory=dict)
    key_styles: tuple[KeyStyle, ...] = ()  # of adapter files, beside the usual ones (`Family.adapter_keys`)
    in_diffusers: tuple[str, ...] = ("lora", "dora")  # the kinds of files that its loader takes for this family
    not_in_sd_scripts: tuple[str, ...] = ()  # fnmatch patterns of full names of layers that it builds no LoRA module for
    not_behind_lycoris: tuple[str, ...] = ()  # the same of layers that ComfyUI does not know behind `lycoris_`
    metadata: Callable[[dict, str], dict[str, str]] = lambda config, prediction: {}  # what adapter files say of the family


@dataclass(frozen=True)
class FilePart:
    """What a model's files hold beside the components' weights, and where they are published."""

    # The name of a tokenizer's folder -> the text encoder it belongs to.
    tokenizers: Mapping[str, str] = field(default_factory=lambda: {"tokenizer": "text_encoder"})
    chat_templates: tuple[str, ...] = ()  # tokenizers that need one
    input_layer: str = ""  # the denoiser's parameter [N, channels, ...] that reads the latents
    # (configs by component, channels that `input_layer` reads): raises UserError for a model trained for something else.
    check: Callable[[Mapping[str, dict], int | None], None] = lambda configs, inputs: None
    harmless: tuple[str, ...] = ()  # fnmatch patterns of tensors beside the weights that say nothing a loader needs
    # (names of a single file's tensors, its variant) -> the folder of embedded configs that it takes; None: it needs its own.
    published: Callable[..., str | None] = lambda names, variant=None: None
    hub_ids: Mapping[str, str] = field(default_factory=dict)  # the published models -> the folders of their embedded configs
    scheduler: ComponentConfig | None = None  # of a folder that has none; None: a folder needs one


@dataclass(frozen=True)
class VariantPart:
    """The base model, the one distilled from it, and the one that edits, of a family that has several."""

    names: tuple[str, ...] = ()  # (the base model's, the distilled one's), which model.variant takes
    of_name: Callable[[str], str | None] = lambda name: None  # which of them a file's or repository's name says, if any
    of_config: Callable[[ComponentConfig], str | None] = lambda config: None  # which the denoiser's tensors show, if any
    # The one taken where nothing says which; None: the base where a pipeline's index says nothing, else the user is asked.
    presumed: str | None = None
    effect: Callable[[str, Mapping[str, Any]], str] = lambda variant, options: ""  # what it decides, for people
    editing: str = ""  # the name of the base's twin, in the same tensors, that alone is shown references; "": there is none
    editing_pipeline: str = ""  # its pipeline's class

    @property
    def every(self) -> tuple[str, ...]:
        """All names that model.variant takes."""
        return (*self.names, self.editing) if self.editing else self.names


@dataclass(frozen=True)
class MemoryPart:
    """What the denoiser's blocks and layers allow: to recompute, stream, compile, share, compute otherwise."""

    blocks: tuple[str, ...] = ()  # fnmatch patterns of the denoiser's blocks, the unit of gradient checkpointing
    block_order: Callable[[str], Any] = lambda name: 0  # what sorts them as a forward pass has them, where modules do not
    # fnmatch patterns of layers in them whose output is only added, or multiplied by what needs no gradient: no backward pass
    # needs its value, and a block that is recomputed leaves out these products.
    unread: tuple[str, ...] = ()
    # fnmatch patterns of layers, by full name, that those multipliers come from: adapted, they need a gradient.
    gates: tuple[str, ...] = ()
    clips: bool = True  # whether, in fp16, the blocks clip what they give: a clip's backward reads what it clipped
    skipped: tuple[str, ...] = ()  # fnmatch patterns of blocks whose input is read again outside of them
    compiled: tuple[str, ...] = ("*",)  # fnmatch patterns of those that step.compile compiles: many of few shapes
    # Component -> groups of endings of layer names: Linears that differ in nothing else read one unchanged tensor.
    shared_inputs: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    # (an attention layer of the denoiser, attend, kernels) -> a processor of diffusers for it that calls attend(query, key,
    # value, mask) as torch's scaled_dot_product_attention; None: the layer keeps its own.
    attention: Callable[[nn.Module, Callable[..., torch.Tensor], Kernels], Any] = lambda layer, attend, kernels: None
    no_fp16: Mapping[str, str] = field(default_factory=dict)  # component that does not compute in fp16 -> why

    def unread_beside(self, adapted: Iterable[str], *, half: bool) -> tuple[str, ...]:
        """`unread`, as far as it holds where these layers are adapted. half: whether gradients pass through fp16, where a
        clip's backward makes of NaN a gradient of zero, without a word."""
        gated = any(fnmatchcase(layer, pattern) for layer in adapted for pattern in self.gates)
        return () if gated or (half and self.clips) else self.unread


@dataclass(frozen=True)
class Family:
    """A model family, in parts. The values of `reads` reach `objective` by the keys' last names, and Model.options."""

    name: str
    components: tuple[Component, ...]  # in pipeline order; exactly one is the denoiser, one the vae
    text: TextPart
    images: ImagePart
    adapters: AdapterPart
    # Of the config keys that not every family reads (trainer/plan/requirements.py), those that this one does.
    reads: tuple[str, ...] = ()
    files: FilePart = field(default_factory=FilePart)
    variants: VariantPart = field(default_factory=VariantPart)
    memory: MemoryPart = field(default_factory=MemoryPart)

    def component(self, name: str) -> Component:
        """The component of that name."""
        return next(c for c in self.components if c.name == name)

    def ordered_blocks(self, name: str, module: nn.Module) -> dict[str, nn.Module]:
        """The blocks of a component by name, in the order of a forward pass."""
        blocks = find_blocks(module, self.blocks_of(name))
        if name == self.denoiser:
            return {block: blocks[block] for block in sorted(blocks, key=self.memory.block_order)}
        return blocks

    def blocks_of(self, name: str) -> tuple[str, ...]:
        """The fnmatch patterns of a component's blocks; none of one that has none."""
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
        """`TextPart.tokens` of every text encoder, by name."""
        return {name: self.text.tokens(model, name, captions) for name in self.text_encoders}

    def encode_tokens(self, model: Model, tokens: Mapping[str, Sequence[torch.Tensor]]) -> Conditioning:
        """The conditioning of `all_tokens` on the model's device, by all text encoders, which are in memory; with gradients
        where they have any."""
        made = self.text.join([self.text.encode(model, name, tokens[name]) for name in self.text_encoders])
        if self.text.rows is None:
            return made
        return replace(made, lengths=tuple(self.text.rows(len(ids)) for ids in tokens[self.text_encoders[-1]]))

    def encode(self, model: Model, encoder: str, captions: Sequence[str]) -> dict[str, torch.Tensor]:
        """What one text encoder gives of the captions' conditioning, as `TextPart.encode`."""
        return self.text.encode(model, encoder, [ids.to(model.device) for ids in self.text.tokens(model, encoder, captions)])

    def encode_prompts(self, model: Model, captions: Sequence[str]) -> Conditioning:
        """The captions' conditioning, by all text encoders, which are in memory; with gradients where they have any."""
        tokens = self.all_tokens(model, captions).items()
        return self.encode_tokens(model, {name: [ids.to(model.device) for ids in some] for name, some in tokens})

    def kohya_prefixes(self, config: Callable[[str], ComponentConfig]) -> dict[str, str]:
        """Component -> what stands before its keys in kohya files. config: of a component."""
        encoders = {name: f"lora_te{number}" for number, name in enumerate(self.text_encoders, 1)}
        own = {name: given if isinstance(given, str) else given(config(name)) for name, given in self.adapters.kohya.items()}
        return {self.denoiser: "lora_unet", **encoders, **own}

    def file_formats(self, kind: str, formats: Sequence[str]) -> tuple[str, ...]:
        """The formats of adapter files, of `formats`, in which that kind of adapter is written."""
        return tuple(format for format in formats if format != "diffusers" or kind in self.adapters.in_diffusers)

    @property
    def adapter_keys(self) -> tuple[KeyStyle, ...]:
        """Every way in which adapter files write the names of this family's layers: the usual ones (of kohya's with the names
        of the original layout, or diffusers' as LyCORIS and OneTrainer take them; ComfyUI's is "generic lora format" in
        comfy/lora.py), and its own."""
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
        """What stands before a layer's name in flat files of `convention`, else in kohya's with the library's names."""
        styles = [s for s in self.adapter_keys if s.component == component and s.flat and not s.original]
        own = [s for s in styles if s.convention == convention]
        return ([*own, *styles])[0].prefix.removesuffix("_")

    def module_links(self, component: str, config: ComponentConfig) -> list[Link]:
        """The links of the denoiser to the original layout, for kohya's names. A text encoder keeps the library's."""
        names = self.component(component).names
        return names(config).links if component == self.denoiser and names is not None else []
