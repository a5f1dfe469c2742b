"""The config's keys; data_tables.py and training_tables.py have more. scripts/reference_pages.py writes docs/keys.md from the
texts below the keys."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from trainer.config import kinds
from trainer.config.data_tables import DataTable
from trainer.config.kinds import Cadence, Count, IntervalTable, PathText, Positive, ReadWith, Seed, Share, Strings, Table
from trainer.config.training_tables import EmaTable, MemoryTable, ObjectiveTable, OptimizerTable, ScheduleTable, StepTable


class RunTable(Table):
    """The run's name, folder and length."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]
    """Names the adapter files. Up to 200 letters, digits, `.`, `_` and `-`; a letter or digit first."""
    output_dir: kinds.GivenPath
    """The folder of all the run's files. `auto`: `outputs/NAME`, with the changes by `--set` behind the name."""
    seed: Seed = 0
    """Decides every random draw."""
    max_steps: Count | None = None
    """The number of updates. Give exactly one of this and `run.epochs`."""
    epochs: Count | None = None
    """The number of passes over the data. Give exactly one of this and `run.max_steps`."""
    stop_after: Count | None = None
    """Stop after this step as if interrupted: a checkpoint is written, and the exit status is 0."""
    deterministic: bool = False
    """Make a resumed run on CUDA end in the same bytes, too. Slower. On a CPU it is always so."""
    lost_after: Annotated[float, Field(ge=5)] = 60.0
    """Seconds without a heartbeat of one process until the others end. `torchrun --max-restarts` then restarts all."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device. `auto` is CUDA if there is a card, else the CPU."""

    @model_validator(mode="after")
    def _one_length(self) -> RunTable:
        if (self.max_steps is None) == (self.epochs is None):
            remedy = "both are given; --set run.epochs= takes out the one, --set run.max_steps= the other"
            remedy = remedy if self.epochs else "neither is given"
            raise ValueError(f"give exactly one of run.max_steps and run.epochs; {remedy}")
        return self


class ComponentTable(Table):
    """Storage and compute dtypes of one part of the model. NAME is its name in diffusers: `unet` (Flux: `transformer`),
    `text_encoder`, `text_encoder_2` or `vae`."""

    dtype: kinds.Dtype | None = None
    """The dtype of the stored weights. Left out: the file's if it is quantised; else bf16, and fp32 for the VAE."""
    backend: Literal["native", "quanto", "bitsandbytes"] | None = None
    """The quantiser. Left out: `native` for float8, `quanto` for int8, int4 and int2, `bitsandbytes` for nf4 and fp4."""
    exclude: Annotated[Strings, ReadWith("dtype", (*kinds.QUANTISED, None))] = ()
    """Layers that stay unquantised: patterns of their dotted names."""
    path: PathText | None = None
    """Load this part from a folder or a `.safetensors` file of its own."""
    compute: kinds.Compute | None = None
    """The compute dtype. Left out: fp32 for a text encoder or VAE stored as fp32, else `precision.compute`."""


class ModelTable(Table):
    """The base model."""

    family: str
    """The model's architecture."""
    path: kinds.GivenPath
    """A hub id, a diffusers folder, or one `.safetensors` file."""
    config: PathText | None = None
    """A single file's folder of configs, scheduler and tokenizers. Left out: the folder of its stem, else embedded ones."""
    revision: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$")] | None = None
    """A hub repository's branch, tag or commit. Left out: the newest commit."""
    variant: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")] | None = None
    """One of several sets of weight files (`fp16`); `none`: without a suffix. If neither files nor names identify the model:
    `dev`, `schnell` or `kontext` (Flux), `base` or `distilled` (FLUX.2 [klein]), `base` or `turbo` (Z-Image)."""
    allow_distilled: bool = False
    """Train a distilled model, which collapses, all the same."""
    prediction: Literal["auto", "epsilon", "v"] = "auto"
    """The model's prediction type. `auto` reads it from the model's scheduler."""
    zero_terminal_snr: Literal["auto"] | bool = "auto"
    """Whether the noise schedule ends in pure noise. `auto` reads it from the model's scheduler."""
    cache_dir: PathText | None = None
    """A folder that caches converted weights for the next start. Worth it for nf4 and fp4."""
    components: dict[str, ComponentTable] = {}
    """One table for each part of the model: below."""


class PrecisionTable(Table):
    """The number formats of the computation."""

    compute: kinds.Compute = "bf16"
    """The number format of activations. The adapter itself is always trained in fp32."""
    matmul: Literal["compute", "fp8"] = "compute"
    """`fp8` multiplies in float8 where the denoiser is stored as fp8_e4m3 and the card can do it."""
    loss_scale: Annotated[float, Field(ge=1)] = 65536.0
    """The first factor of the loss scaling. Used only if something computes in fp16."""


class VaeTable(Table):
    """The encoding of photos to latents."""

    encode: Literal["exact", "fast"] = "exact"
    """`fast`: an fp32 VAE multiplies in TF32 on a card. The latents differ; the start prints by how much."""


class RuleTable(Table):
    """Another rank or rate for some layers. If several rules match, later ones win."""

    component: str
    """The part of the model. Naming a text encoder adapts it, too."""
    match: str
    """A pattern of the layers' dotted names."""
    rank: Count | None = None
    """Their rank. Left out: `adapter.rank`."""
    alpha: Positive | None = None
    """Their alpha. Left out: `adapter.alpha`, else the rank."""
    lr: Positive | None = None
    """Their learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Their weight decay."""
    stop_step: Count | None = None
    """The last step that trains them."""


class AdapterTable(Table):
    """The adapter."""

    type: str = "lora"  # trainer/adapters/kinds.py knows the kinds
    """`lora`; `dora`, which also learns the length of each weight row; `lokr`, a Kronecker product of two small matrices."""
    rank: Count = 16
    """The width of A and B. A higher rank can hold more and makes a larger file."""
    alpha: Positive | None = None
    """The update is scaled by alpha / rank. Left out: the rank."""
    targets: str | Strings = "attention+mlp"
    """The denoiser's layers: `attention`, `attention+mlp`, `linear`, `all` (convolutions, too), or a list of patterns."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead."""
    factor: Annotated[Count | Literal[-1], ReadWith("adapter.type", ("lokr",))] = -1
    """The side of the smaller of the two matrices, for layers that it divides. -1: both sides as equal as possible."""
    decompose: Annotated[Literal["w2", "both", "none"], ReadWith("adapter.type", ("lokr",))] = "w2"
    """The matrices that are factored to rank `adapter.rank`, if that is below half of their longer side: the larger one
    (`w2`), both, or `none`. With `none` rank and alpha have no effect."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The chance that an element of an adapter's input is dropped. LoRA only."""
    rank_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The chance that one of a layer's ranks is dropped. LoRA only."""
    module_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The chance that a layer's whole update is dropped. LoRA only."""
    max_norm: Positive | None = None
    """A limit of each layer's update ||s B A||."""
    init_from: PathText | None = None
    """Start from this adapter file, from a folder that PEFT saved, or from a checkpoint's folder."""
    init_resize: Annotated[bool, ReadWith("adapter.init_from")] = False
    """Let the rank of `adapter.init_from` differ: grown without a change, or shrunk to the nearest."""
    under: PathText | None = None
    """A LoRA file that is applied, frozen, in training only: for distilled models."""
    kernels: Literal["auto", "triton", "torch"] = "auto"
    """`auto` is Triton on CUDA from compute capability 8.0 on, and plain PyTorch elsewhere."""
    rules: Annotated[tuple[RuleTable, ...], Field(strict=False)] = ()
    """Exceptions for some layers: below."""


class CheckpointTable(IntervalTable):
    """Checkpoints, from which a run can be resumed."""

    every_steps: Cadence = 500
    """How often. 0 is never. The last step always writes one."""
    every_minutes: Annotated[float, Field(ge=0)] = 10.0
    """Also this many minutes after the last one, at the end of a step. 0 is never."""
    keep_last: Count = 3
    """How many are kept. An older one is deleted only after the newest was read back and is valid."""
    background: bool = True
    """Write while the training goes on. The bytes are the same."""
    on_failure: Literal["stop", "continue"] = "stop"
    """If a checkpoint cannot be written: stop the run, or go on without it."""
    mirror: kinds.MirrorUrl | None = None
    """Copies checkpoints, adapter files and the report to a store, for example `"s3://BUCKET/PREFIX"` (docs/mirror.md)."""
    mirror_wait: Annotated[float, Field(ge=0), ReadWith("checkpoint.mirror")] = 600.0
    """Seconds that a start waits for a mirror that does not answer, and an end for the remaining files."""


class ExportTable(IntervalTable):
    """The adapter files."""

    every_steps: Cadence = 0
    """How often. 0 writes them only at the end. `NAME-STEP` files are never deleted."""
    first: Annotated[Cadence, Field(alias="from"), ReadWith("every_steps every_epochs")] = 0
    """No file before this step, or with `every_epochs` before the end of this epoch."""
    formats: Annotated[tuple[Literal["diffusers", "comfyui"], ...], Field(strict=False, min_length=1)] = (
        "diffusers",
        "comfyui",
    )
    """The formats of the files."""
    dtype: kinds.Compute = "fp32"
    """The dtype of their matrices; a DoRA's magnitudes stay fp32. The end of the run prints the rounding error."""
    dora_scale: Annotated[Literal["comfyui_released", "magnitude"], ReadWith("export.formats", ("comfyui",))] = (
        "comfyui_released"
    )
    """The meaning of `dora_scale` in the ComfyUI file: as ComfyUI's releases read it, or the magnitude itself."""
    trigger_phrase: str = ""
    """An entry of the file's header. Left empty: the triggers of the sources."""
    base_model: str = ""
    """The base model's hub id, for the model card. Left empty: `model.path`, if that is one."""
    license: str = ""
    """The adapter's licence, for example `"cc-by-4.0"`."""
    on_stop: bool = True
    """Write adapter files after a signal or `run.stop_after`, too, once the checkpoint is safe."""
    thumbnail: bool = False
    """Put the step's first sample into the file's header. Its bytes then depend on the samples."""


class SampleTable(Table):
    """One image that is drawn to watch the training. Give these, or `validation.prompts`."""

    prompt: str
    """The prompt."""
    negative: Annotated[str, ReadWith("cfg guidance", (None,), above=1)] = ""
    """The negative prompt. For Flux only with `cfg`."""
    width: Count | None = None
    """In pixels. Left out: the data's resolution."""
    height: Count | None = None
    """In pixels. Left out: the data's resolution."""
    seed: Seed | None = None
    """Left out: `validation.seed`."""
    steps: Count | None = None
    """Left out: `validation.steps`."""
    guidance: float | None = None
    """How closely the image follows the prompt. Left out: 5.0 for SDXL, 3.5 for Flux, 2.5 for Kontext."""
    cfg: Annotated[float, Field(gt=1)] | None = None
    """For a Flux whose distillation was undone: classifier-free guidance, by a second pass with `negative`."""
    strength: Share = 1.0
    """The adapter's strength."""
    references: Annotated[tuple[PathText, ...], Field(strict=False)] = ()
    """Files of reference images."""
    truth: PathText | None = None
    """The picture that the sample should look like. The report shows it beside the sample."""


class ValidationTable(IntervalTable):
    """Samples and the held-out loss."""

    every_steps: Cadence = 500
    """How often samples are drawn. 0 is never; otherwise also once before step 1."""
    loss_every_steps: Cadence = 0
    """How often the held-out loss is measured. 0 is never."""
    prompts: Literal["captions"] | Strings = ()
    """The prompts. "captions": two captions of the photos."""
    resolution: Count | None = None
    """Width and height in pixels of samples without their own. Left out: the largest of `data.resolution`."""
    samples: Annotated[tuple[SampleTable, ...], Field(strict=False)] = ()
    """Samples with more options: below."""
    seed: Seed = 0
    """The seed of samples, and of the held-out loss's draws."""
    steps: Count = 20
    """Sampling steps."""

    @model_validator(mode="after")
    def _one_list(self) -> ValidationTable:
        if self.prompts and self.samples:
            raise ValueError("give validation.prompts or [[validation.samples]], not both")
        return self


warnings.filterwarnings("ignore", 'Field name "json"')  # pydantic has an old method of that name


class LoggingTable(Table):
    """Logs and trackers, in addition to the run's own files."""

    tensorboard: bool = True
    """Write event files for TensorBoard."""
    wandb: bool = False
    """Send the numbers of metrics.jsonl to Weights & Biases, too (docs/watching.md)."""
    draws: bool = False
    """Log a digest of each step's noise and times, to compare the draws of two runs."""
    every_seconds: Annotated[float, Field(ge=1)] = 10.0
    """Seconds between two lines of progress, where there is no terminal (docs/watching.md)."""
    json: bool = False  # pyright: ignore[reportIncompatibleMethodOverride]
    """Write each line on stdout as a JSON object, for a log collector (docs/watching.md)."""


class Config(Table):
    """The whole config, a field for each table."""

    run: RunTable
    model: ModelTable
    data: DataTable
    precision: PrecisionTable = PrecisionTable()
    vae: VaeTable = VaeTable()
    adapter: AdapterTable = AdapterTable()
    objective: ObjectiveTable = ObjectiveTable()
    step: StepTable = StepTable()
    memory: MemoryTable = MemoryTable()
    optimizer: OptimizerTable = OptimizerTable()
    schedule: ScheduleTable = ScheduleTable()
    ema: EmaTable = EmaTable()
    checkpoint: CheckpointTable = CheckpointTable()
    export: ExportTable = ExportTable()
    validation: ValidationTable = ValidationTable()
    logging: LoggingTable = LoggingTable()

    @model_validator(mode="before")
    @classmethod
    def _steps_or_epochs(cls, tree: Any) -> Any:
        """An interval in epochs replaces the default in steps."""
        tables = tree.items() if isinstance(tree, dict) else ()
        counted = {name: table for name, table in tables if isinstance(table, dict) and table.get("every_epochs")}
        for name, table in counted.items():
            if table.get("every_steps"):
                keys = " and ".join(f"{name}.{key} = {table[key]!r}" for key in ("every_epochs", "every_steps"))
                raise ValueError(f"{keys} are both given; leave out one of them (--set {name}.every_steps= removes a key)")
        return tree | {name: table | {"every_steps": 0} for name, table in counted.items()} if counted else tree

    @model_validator(mode="after")
    def _check_graphs(self) -> Config:
        refusals = list(against_graphs(self))
        if "resident_blocks" in self.memory.fit_by:
            refusals.append(("'resident_blocks' in memory.fit_by", STREAMED))
        if self.step.graphs is True and refusals:
            raise ValueError("step.graphs = true cannot be combined with {}: {}; leave out one of them".format(*refusals[0]))
        return self


STREAMED = "which blocks lie on the card differs as a graph begins (docs/streaming.md#why-no-graphs)"


def against_graphs(config: Config) -> Iterator[tuple[str, str]]:
    """(setting, reason) for each setting that CUDA graphs cannot be combined with."""
    memory = config.memory
    if memory.offload != "none":
        yield f"memory.offload = {memory.offload!r}", STREAMED
    if memory.shard:
        yield "memory.shard = true", "a graph replays kernels alone, and the blocks are brought together by the program"
    if dropout := config.adapter.dropout:
        reason = "its masks are drawn inside the recorded step (adapter.rank_dropout and adapter.module_dropout are not)"
        yield f"adapter.dropout = {dropout}", reason
