"""Every key of the contract, its type, its default. The tree is frozen and strict."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from trainer.errors import UserError
from trainer.files import parse_size

Dtype = Literal["fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "int2", "nf4", "fp4"]
Compute = Literal["fp32", "bf16", "fp16"]
Count = Annotated[int, Field(ge=1)]
Cadence = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Strings = Annotated[tuple[str, ...], Field(strict=False)]
Colour = Annotated[str, Field(pattern=r"^#[0-9a-fA-F]{6}$"), AfterValidator(str.lower)]


def expand_home(path: str, given_as: str = "") -> str:
    """`path` with a leading `~` or `~user` as that home folder. Raises UserError where there is no such home.

    given_as: an argument of the command line, for the message; a key of the config is named by `parse`.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        prefix, home = f"{given_as} {path}: " if given_as else "", path.partition("/")[0]
        raise UserError(f"{prefix}there is no home folder {home}; write ./{home} for a folder of that name here")
    return expanded


def check_size(text: str) -> str:
    """Raises ValueError for what `parse_size` cannot read."""
    parse_size(text)
    return text


def expand_source(path: str) -> str:
    """As `expand_home`, also behind the `hf:` of a dataset."""
    return "hf:" + expand_home(path[3:]) if path.startswith("hf:") else expand_home(path)


# Every path that a config gives, so that nothing below this file knows of `~`.
PathText = Annotated[str, AfterValidator(expand_home)]
SizeText = Annotated[str, AfterValidator(check_size)]
GivenPath = Annotated[str, Field(min_length=1), AfterValidator(expand_home)]


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, validate_default=False)


class RunTable(Table):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    output_dir: GivenPath
    seed: Seed = 0
    max_steps: Count | None = None
    epochs: Count | None = None
    stop_after: Count | None = None
    deterministic: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"

    @model_validator(mode="after")
    def _one_length(self) -> RunTable:
        if (self.max_steps is None) == (self.epochs is None):
            given = "both are" if self.epochs is not None else "neither is"
            raise ValueError(
                f"give exactly one of run.max_steps and run.epochs; {given} given (--set run.max_steps= removes a key)"
            )
        return self


class ComponentTable(Table):
    dtype: Dtype | None = None
    backend: Literal["native", "quanto", "bitsandbytes"] | None = None
    exclude: Strings = ()
    path: PathText | None = None
    compute: Compute | None = None


class ModelTable(Table):
    family: str
    path: GivenPath
    config: PathText | None = None
    variant: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")] | None = None
    prediction: Literal["auto", "epsilon", "v"] = "auto"
    zero_terminal_snr: Literal["auto"] | bool = "auto"
    cache_dir: PathText | None = None
    components: dict[str, ComponentTable] = {}


class PrecisionTable(Table):
    compute: Compute = "bf16"
    matmul: Literal["compute", "fp8"] = "compute"
    loss_scale: Annotated[float, Field(ge=1)] = 65536.0
    loss_scale_growth_interval: Count = 2000


class RuleTable(Table):
    component: str
    match: str
    rank: Count | None = None
    alpha: Positive | None = None
    lr: Positive | None = None
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    stop_step: Count | None = None


class AdapterTable(Table):
    type: Literal["lora", "dora"] = "lora"
    rank: Count = 16
    alpha: Positive | None = None
    targets: str | Strings = "attention+mlp"
    rslora: bool = False
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    rank_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    module_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    max_norm: Positive | None = None
    init_from: PathText | None = None
    init_resize: bool = False
    kernels: Literal["auto", "triton", "torch"] = "auto"
    rules: Annotated[tuple[RuleTable, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _resize_needs_a_file(self) -> AdapterTable:
        if self.init_resize and self.init_from is None:
            raise ValueError("adapter.init_resize = true belongs to adapter.init_from; leave it out, or name a file there")
        return self

    @model_validator(mode="after")
    def _dropout_is_lora_only(self) -> AdapterTable:
        if self.type == "dora" and self.dropout:
            raise ValueError(
                f"adapter.dropout = {self.dropout} cannot be combined with adapter.type = 'dora': DoRA's row scale couples "
                "the dropped path with the base; set adapter.dropout = 0 or adapter.type = 'lora'"
            )
        for key in ("rank_dropout", "module_dropout"):
            if self.type == "dora" and (rate := getattr(self, key)):
                raise ValueError(
                    f"adapter.{key} = {rate} cannot be combined with adapter.type = 'dora': DoRA divides by the norm of the "
                    "whole W + s B A, and with a part of it left out the rows would not have the magnitudes' lengths; set "
                    f"adapter.{key} = 0 or adapter.type = 'lora'"
                )
        return self


def _different(resolutions: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(resolutions)) < len(resolutions):
        raise ValueError("each resolution once; to show photos more often, raise repeats")
    return resolutions


Resolution = Annotated[int, Field(ge=16, multiple_of=8)]
Resolutions = Resolution | Annotated[tuple[Resolution, ...], Field(strict=False, min_length=1), AfterValidator(_different)]


Masks = Literal["none", "files", "alpha"]
Unmasked = Annotated[float, Field(ge=0, lt=1)]  # at 1 a mask would change nothing


class SourceTable(Table):
    path: Annotated[str, AfterValidator(expand_source)]
    repeats: Count = 1
    captions: Literal["auto", "filename", "folder", "none"] = "auto"
    image_column: str | None = None
    caption_column: str | None = None
    masks: Masks | None = None
    unmasked_weight: Unmasked | None = None
    loss_weight: Positive = 1.0
    regularisation: bool = False
    resolution: Resolutions | None = None
    flip: bool | None = None
    caption_dropout: Share | None = None
    caption_lines: bool = False
    wildcards: bool = False
    separator: Annotated[str, Field(min_length=1)] = ", "
    keep: Annotated[int, Field(ge=0)] = 0
    tag_dropout: Share = 0.0
    shuffle: bool = False
    prefix: str = ""
    suffix: str = ""
    trigger: str = ""


def _count_or_share(held_out: int | float) -> int | float:
    if held_out < 0:
        raise ValueError("give a count of photos, or a share of them below 1; 0 holds out none")
    if isinstance(held_out, float) and held_out >= 1:
        everything = "a share of 1.0 would hold out everything" if held_out == 1 else "a share must be below 1"
        count = "1 holds out one photo" if held_out < 2 else f"{int(held_out)} holds out {int(held_out)} photos"
        raise ValueError(f"{everything}; write 0.1 for a tenth, or a count without a point: {count}")
    return held_out


class DataTable(Table):
    sources: Annotated[tuple[SourceTable, ...], Field(strict=False, min_length=1)]
    resolution: Resolutions = 1024
    batch_size: Count = 1
    short_batches: Literal["keep", "merge"] = "keep"
    held_out: Annotated[int | float, AfterValidator(_count_or_share)] = 0
    num_workers: Annotated[int, Field(ge=0)] = 0
    bucket_step: Annotated[int, Field(ge=8, multiple_of=8)] | None = None
    enlarge: bool = False
    background: Colour = "#ffffff"
    masks: Masks = "none"
    unmasked_weight: Unmasked = 0.0
    crop_jitter: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    colour_jitter: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    image_variants: Annotated[int, Field(ge=2)] = 4
    flip: bool = False
    caption_dropout: Share = 0.05
    caption_variants: Count = 8
    strict_captions: bool = False
    cache: Literal["disk", "memory", "none"] = "disk"
    cache_limit: SizeText | None = None
    cache_text: Literal["auto"] | bool = "auto"
    text_length: Count | None = None
    clip_chunks: Annotated[int, Field(ge=1, le=3)] = 1
    cache_dir: PathText | None = None

    @model_validator(mode="after")
    def _a_subject(self) -> DataTable:
        if all(source.regularisation for source in self.sources):
            raise ValueError("data.sources: all have regularisation = true; at least one must hold the subject, without it")
        return self


def _a_range(t_range: tuple[float, float]) -> tuple[float, float]:
    low, high = t_range
    if not low < high:
        raise ValueError("it leaves no timestep; give [low, high], shares of the way to noise, low below high")
    return t_range


class ObjectiveTable(Table):
    loss: Literal["mse", "huber", "smooth_l1"] = "mse"
    huber_c: Annotated[float, Field(gt=0, le=1)] = 0.1
    huber_schedule: Literal["constant", "exponential", "snr"] = "snr"
    weighting: Literal["none", "min_snr", "soft_min_snr", "debiased", "p2"] | None = None
    min_snr_gamma: Positive | None = None
    p2_gamma: Positive = 1.0
    p2_k: Positive = 1.0
    timesteps: Literal["auto", "uniform", "logit_normal", "sigmoid", "mode", "cosmap", "power"] = "auto"
    shift: Literal["auto"] | Positive = "auto"
    logit_mean: float = 0.0
    logit_std: Positive = 1.0
    mode_scale: Annotated[float, Field(ge=-1, le=1.75)] = 1.29
    power: Positive = 1.0
    t_range: Annotated[tuple[Share, Share], Field(strict=False), AfterValidator(_a_range)] = (0.0, 1.0)
    stratified: bool = False
    noise_offset: Annotated[float, Field(ge=0)] = 0.0
    multires_noise_iterations: Annotated[int, Field(ge=0)] = 0
    multires_noise_discount: Annotated[float, Field(gt=0, le=1)] = 0.3
    input_perturbation: Annotated[float, Field(ge=0)] = 0.0
    guidance: Annotated[float, Field(ge=0)] = 1.0

    @model_validator(mode="after")
    def _one_noise(self) -> ObjectiveTable:
        if self.noise_offset and self.multires_noise_iterations:
            raise ValueError(
                f"objective.noise_offset = {self.noise_offset:g} and objective.multires_noise_iterations = "
                f"{self.multires_noise_iterations} both add low frequencies to the noise; set one of them"
            )
        return self


class StepTable(Table):
    accumulation: Count = 1
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    non_finite: Literal["stop", "skip"] = "stop"
    max_skipped: Count = 10


class MemoryTable(Table):
    gradient_checkpointing: bool | Count = False
    fit: SizeText | None = None


class OptimizerTable(Table):
    name: str = "adamw"
    lr: Positive = 1e-4
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    betas: Annotated[tuple[Beta, ...], Field(strict=False, min_length=2, max_length=3)] | None = None
    eps: Positive | None = None
    min_8bit_size: Count = 4096
    lora_plus: Positive = 1.0
    text_encoder_lr: Positive | None = None
    magnitude_lr: Positive | None = None
    options: dict[str, Any] = {}  # trainer/optim/options.py knows the kinds


def _steps_or_share(given: int | float) -> int | float:
    if given < 0:
        raise ValueError("give a number of steps, or a share of the schedule below 1; 0 is none")
    if isinstance(given, float) and given >= 1:
        steps = "1 is one step" if given < 2 else f"{int(given)} are {int(given)} steps"
        raise ValueError(f"a share must be below 1; write 0.05 for a twentieth, or steps without a point: {steps}")
    return given


StepsOrShare = Annotated[int | float, AfterValidator(_steps_or_share)]


class ScheduleTable(Table):
    name: Literal["constant", "linear", "cosine", "cosine_restarts", "polynomial", "rex", "wsd"] = "constant"
    warmup: StepsOrShare = 0.05
    total_steps: Count | None = None
    end: Share = 0.0
    cycles: Count = 2
    power: Positive = 2.0
    decay: StepsOrShare = 0.2


class EmaTable(Table):
    kind: Literal["none", "constant", "power"] = "none"
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    snapshot_every_steps: Cadence = 0


class CheckpointTable(Table):
    every_steps: Cadence = 500
    keep_last: Count = 3
    background: bool = True
    on_failure: Literal["stop", "continue"] = "stop"


class ExportTable(Table):
    every_steps: Cadence = 0
    formats: Annotated[tuple[Literal["diffusers", "comfyui"], ...], Field(strict=False, min_length=1)] = (
        "diffusers",
        "comfyui",
    )
    dora_scale: Literal["comfyui_released", "magnitude"] = "comfyui_released"
    trigger_phrase: str = ""
    base_model: str = ""
    license: str = ""
    license_link: str = ""
    on_stop: bool = True
    thumbnail: bool = False

    @model_validator(mode="after")
    def _a_link_of_a_licence(self) -> ExportTable:
        if self.license_link and not self.license:
            raise ValueError("export.license_link belongs to export.license, the licence's name; give both, or neither")
        return self


class SampleTable(Table):
    prompt: str
    negative: str = ""
    width: Count | None = None
    height: Count | None = None
    seed: Seed | None = None
    steps: Count | None = None
    guidance: float | None = None
    strength: Share = 1.0
    truth: str | None = None


class ValidationTable(Table):
    every_steps: Cadence = 500
    loss_every_steps: Cadence = 0
    prompts: Strings = ()
    samples: Annotated[tuple[SampleTable, ...], Field(strict=False)] = ()
    seed: Seed = 0
    steps: Count = 20

    @model_validator(mode="after")
    def _one_list(self) -> ValidationTable:
        if self.prompts and self.samples:
            raise ValueError("give validation.prompts or [[validation.samples]], not both")
        return self


class LoggingTable(Table):
    tensorboard: bool = True


class Config(Table):
    run: RunTable
    model: ModelTable
    data: DataTable
    precision: PrecisionTable = PrecisionTable()
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
