"""The keys of the training: objective, step, memory, optimizer, schedule, average."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from trainer.config.kinds import Beta, Count, FitText, Positive, ReadWith, Share, StepsOrShare, Table


def _check_range(t_range: tuple[float, float]) -> tuple[float, float]:
    if not t_range[0] < t_range[1]:
        raise ValueError("it leaves no timestep; give [low, high], shares of the way to noise, low below high")
    return t_range


ROBUST = ReadWith("objective.loss", ("huber", "smooth_l1"))


class ObjectiveTable(Table):
    """The training objective: loss, weighting, timesteps and noise."""

    loss: Literal["mse", "huber", "smooth_l1"] = "mse"
    """How an error counts. `huber` and `smooth_l1` count outliers less."""
    huber_c: Annotated[float, Field(gt=0, le=1), ROBUST] = 0.1
    """Errors far above it count linearly."""
    huber_schedule: Annotated[Literal["constant", "exponential", "snr"], ROBUST] = "snr"
    """How `objective.huber_c` changes with the noise."""
    weighting: Literal["none", "min_snr", "soft_min_snr", "debiased", "p2"] | None = None
    """How much each amount of noise counts. Left out: `min_snr` if `objective.min_snr_gamma` is given, else `none`."""
    min_snr_gamma: Annotated[Positive | None, ReadWith("objective.weighting", ("min_snr", "soft_min_snr", None))] = None
    """The gamma. 5 is usual, for models that predict noise."""
    p2_gamma: Annotated[Positive, ReadWith("objective.weighting", ("p2",))] = 1.0
    """The exponent."""
    p2_k: Annotated[Positive, ReadWith("objective.weighting", ("p2",))] = 1.0
    """The constant."""
    timesteps: Literal["auto", "uniform", "logit_normal", "sigmoid", "mode", "cosmap", "power"] = "auto"
    """The distribution of timesteps. `auto`: `logit_normal` for Flux, `uniform` for SDXL and FLUX.2, else `sigmoid`."""
    shift: Literal["auto"] | Positive = "auto"
    """Moves the times towards noise; 1.0 is none. `auto` follows the resolution (3.16 at 1024 px), but for
    `uniform` times on FLUX.2; on FLUX.3 and Z-Image it is the scheduler's."""
    logit_mean: float = 0.0
    """For `logit_normal` and `sigmoid`: above 0 more noise."""
    logit_std: Positive = 1.0
    """For `logit_normal` and `sigmoid`: the spread."""
    mode_scale: Annotated[float, Field(ge=-1, le=1.75)] = 1.29
    """For `mode`: above 0 more of the middle, below 0 more of both ends."""
    power: Positive = 1.0
    """For `power`: above 1 more noise."""
    t_range: Annotated[tuple[Share, Share], Field(strict=False), AfterValidator(_check_range)] = (0.0, 1.0)
    """Train only these times: shares of the way from the photo (0) to noise (1)."""
    stratified: bool = False
    """Spread the times of each update evenly: less noise in the gradient."""
    noise_offset: Annotated[float, Field(ge=0)] = 0.0
    """Shifts the noise of whole channels, for dark and light images. 0.05 is usual."""
    multires_noise_iterations: Annotated[int, Field(ge=0)] = 0
    """Adds noise of several sizes. 6 is usual; 0 adds none."""
    multires_noise_discount: Annotated[float, Field(gt=0, le=1), ReadWith("objective.multires_noise_iterations")] = 0.3
    """The strength of each size, as against the size before it."""
    input_perturbation: Annotated[float, Field(ge=0)] = 0.0
    """More noise in what the model sees than in its target. 0.1 in its paper."""
    guidance: Annotated[float, Field(ge=0)] = 1.0
    """The value of the model's guidance embedding in training. Samples have their own."""
    preserve: Annotated[float, Field(ge=0)] = 0.0
    """Weight of a loss that keeps the model's predictions without the trigger. Two more passes. 0 is off."""
    preserve_as: Annotated[str, ReadWith("objective.preserve")] = ""
    """The text that replaces the trigger there, for example the class. Left empty: nothing."""

    @model_validator(mode="after")
    def _one_noise(self) -> ObjectiveTable:
        if self.noise_offset and (count := self.multires_noise_iterations):
            conflict = f"objective.noise_offset = {self.noise_offset:g} and objective.multires_noise_iterations = {count}"
            raise ValueError(f"{conflict} both add low frequencies to the noise; set one of them")
        return self


class StepTable(Table):
    """One update."""

    accumulation: Count = 1
    """Micro-batches to one update."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradients are clipped at this norm. 0 clips nothing."""
    non_finite: Literal["stop", "skip"] = "stop"
    """What to do at a value that is not finite: stop the run, or skip the update."""
    max_skipped: Annotated[Count, ReadWith("step.non_finite", ("skip",))] = 10
    """So many updates of the run are skipped. One more stops it."""
    compile: Literal["none", "blocks", "auto"] = "none"
    """Compile each kind of block, which takes minutes. `auto`: on CUDA, if it saves more; a resumed run keeps the choice."""
    attention: Literal["auto", "flash", "cudnn", "efficient", "math"] = "auto"
    """Torch's kernel for the denoiser's attention. `auto`: by the card."""
    graphs: Literal["auto"] | bool = "auto"
    """Replay micro-batches as CUDA graphs, one a size. Same bytes; more memory. `auto`: on CUDA unless a key forbids it."""


Blocks = Literal["auto"] | Annotated[int, Field(ge=0)]
MayChange = Literal["checkpointing", "resident_blocks", "optimizer_bits", "batch"]


def _check_distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    if duplicates := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(f"{duplicates[0]!r} stands there twice; name each once, in the order in which they may be changed")
    return names


FitBy = Annotated[tuple[MayChange, ...], Field(strict=False, min_length=1), AfterValidator(_check_distinct)]


class MemoryTable(Table):
    """Ways to need less memory."""

    gradient_checkpointing: Literal["selective"] | bool | Count = False
    """Recompute blocks in backward: none, every n-th, all but attention (`"selective"`), or all. Slower, same bytes."""
    fit: FitText | None = None
    """Fit the run into this much memory, for example `"12GiB"`, or into the card's: `"auto"`."""
    fit_by: Annotated[FitBy, ReadWith("memory.fit")] = ("checkpointing",)
    """Settings that may change to fit: first the last of these, as little as possible, then the one before it."""
    offload: Literal["none", "blocks"] = "none"
    """Keep the frozen base in host memory, and stream it block by block. Slower, same bytes."""
    resident_blocks: Annotated[Blocks, ReadWith("memory.offload", ("blocks",))] = "auto"
    """How many blocks of the denoiser stay on the device. `auto` is the most that fit; on a CPU 0."""
    shard: bool = False
    """Shard the frozen base over the processes, block by block. Slower, same bytes."""

    @model_validator(mode="after")
    def _check_shard(self) -> MemoryTable:
        other = f"memory.offload = {self.offload!r}" if self.offload != "none" else ""
        other = other or ("'resident_blocks' in memory.fit_by" if "resident_blocks" in self.fit_by else "")
        if self.shard and other:
            raise ValueError(
                f"memory.shard = true cannot be combined with {other}, which puts blocks in host memory: what the other "
                "processes have is brought together on the device; leave out one of them"
            )
        return self


class OptimizerTable(Table):
    """How the adapter learns."""

    name: str = "adamw"
    """The optimizer."""
    lr: Positive = 1e-4
    """The learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Pulls weights towards zero. Never applied to a DoRA's magnitudes."""
    betas: Annotated[tuple[Beta, ...], Field(strict=False, min_length=2, max_length=3)] | None = None
    """The decay rates of the optimizer's averages. Left out: the library's own."""
    eps: Positive | None = None
    """A small number in the denominator. Left out: the library's own."""
    lora_plus: Positive = 1.0
    """The rate of B, as a multiple of A's."""
    text_encoder_lr: Positive | None = None
    """The rate of text encoders, where a rule adapts one."""
    magnitude_lr: Positive | None = None
    """The rate of a DoRA's magnitudes."""
    options: dict[str, Any] = {}  # trainer/optim/options.py knows the kinds
    """Other arguments of the library's optimizer, by its own names."""


FALLING = ("linear", "cosine", "cosine_restarts", "polynomial", "rex", "wsd")


class ScheduleTable(Table):
    """How the learning rate changes."""

    name: Literal["constant", "linear", "cosine", "cosine_restarts", "polynomial", "rex", "wsd"] = "constant"
    """The shape of the schedule after the warm-up."""
    warmup: StepsOrShare = 0.05
    """How long the rate rises at the start: a number of steps, or a share of the schedule below 1."""
    total_steps: Count | None = None
    """The length of the schedule. Left out: the run's length at its first start, which is then frozen."""
    end: Annotated[Share, ReadWith("schedule.name", FALLING)] = 0.0
    """The rate at the end, as a share of the rate."""
    cycles: Annotated[Count, ReadWith("schedule.name", ("cosine_restarts",))] = 2
    """How many."""
    power: Annotated[Positive, ReadWith("schedule.name", ("polynomial",))] = 2.0
    """The exponent."""
    decay: Annotated[StepsOrShare, ReadWith("schedule.name", ("wsd",))] = 0.2
    """How long the fall at the end is, in steps or as a share."""


class EmaTable(Table):
    """An average of the weights over the updates, kept beside them."""

    kind: Literal["none", "constant"] = "none"
    """`constant` averages with one decay."""
    decay: Annotated[float, Field(gt=0, lt=1), ReadWith("ema.kind", ("constant",))] = 0.999
    """The share of the average that stays at an update; in the first updates less."""
