"""What options of ai-toolkit mean: its YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.base import other_trainers
from trainer.cli.translate import common
from trainer.cli.translate.draft import ABSENT, FILL, Draft, Options
from trainer.cli.translate.reading import prompt_line
from trainer.models import Family

# The times of flow matching; a weighted loss or a learnt blend has no equivalent.
TIMES = {"sigmoid": ("sigmoid", None), "linear": ("uniform", 1.0), "shift": ("uniform", "auto")}
DATASET = {
    "caption_dropout_rate": "caption_dropout", "token_dropout_rate": "tag_dropout", "shuffle_tokens": "shuffle",
    "keep_tokens": "keep", "flip_x": "flip", "trigger_word": "trigger", "loss_multiplier": "loss_weight",
}  # fmt: skip
FLAGS = {"w": "width", "h": "height", "d": "seed", "seed": "seed", "l": "guidance", "cfg": "guidance", "s": "steps",
         "steps": "steps", "n": "negative", "m": "strength", "network_multiplier": "strength"}  # fmt: skip


def translate(draft: Draft, tree: Mapping[str, Any], config: Path, data: Sequence[Path]) -> None:
    """Make the draft of a job's first process."""
    job = tree["config"]
    processes = job.get("process") or [{}]
    if len(processes) > 1:
        draft.note(ABSENT, f"config.process has {len(processes)}; the first is a run here")
    options = Options(flattened(processes[0]), other_trainers.facts().defaults[draft.trainer])
    if str(options.get("type")) not in ("sd_trainer", "ui_trainer", "diffusion_trainer"):
        draft.cannot("adapter.type", f"{options.told('type')}: no training of an adapter with photos")
    family = _family(draft, options)
    if family is None:
        return
    name = str(job.get("name", "adapter"))
    folder = f"{options.get('training_folder')}/{name}"
    common.set_run(draft, name, f"config.name = {name}", folder, f"{options.told('training_folder')}, config.name = {name}")
    _length(draft, options)
    _network(draft, options, family)
    _training(draft, options, family)
    _precision(draft, options, family)
    for dataset in options.get("datasets") or ():
        _source(
            draft,
            Options(dict(dataset), {k: v for k, v in options.defaults.items() if "." not in k}, prefix="datasets."),
            options,
        )
    if not draft.sources:
        draft.sources.append({"path": (common.PHOTOS, "a stand-in: the photos' folder goes here")})
        draft.note(FILL, "data.sources: no folder of photos is named")
    _samples(draft, options, family)
    common.note_differences(draft, family)
    common.carry_rest(draft, options)


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The options by dotted name; lists and what is below network_kwargs, optimizer_params and its like stay as they are."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and not name.endswith(("_kwargs", "_params")):
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _family(draft: Draft, options: Options) -> Family | None:
    arch = str(options.get("model.arch") or "").partition(":")[0]
    told = options.told("model.arch")
    marks = [name for name in options.given if name.startswith("model.is_") and options.given[name] is True]
    for name in [name for name in options.given if name.startswith("model.is_")]:
        options.read.add(name) if name != "model.is_v_pred" else None
    if not arch and marks:
        kind = marks[0].removeprefix("model.is_")
        arch, told = kind, options.told(marks[0])
    path = options.get("model.name_or_path") or ""
    common.set_path(draft, str(path), options.told("model.name_or_path"))
    return common.set_family(draft, arch, told)


def _length(draft: Draft, options: Options) -> None:
    """A step is an update where gradient_accumulation is set, and a batch where gradient_accumulation_steps is."""
    steps, told = options.get("train.steps"), options.told("train.steps")
    whole, parts = options.get("train.gradient_accumulation"), options.get("train.gradient_accumulation_steps")
    name = (
        "train.gradient_accumulation"
        if whole > 1 or not options.has("train.gradient_accumulation_steps")
        else ("train.gradient_accumulation_steps")
    )
    if parts < 0:
        draft.note(ABSENT, f"{options.told('train.gradient_accumulation_steps')}: one update for each epoch; 1 is written")
    accumulation = max(whole, parts, 1)
    if parts > 1:
        steps, told = max(1, steps // parts), f"{told} batches / {options.told('train.gradient_accumulation_steps')}"
    draft.set("run.max_steps", steps, told)
    draft.set("step.accumulation", accumulation, options.told(name))
    draft.set("step.max_grad_norm", float(options.get("train.max_grad_norm")), options.told("train.max_grad_norm"))
    draft.carry(options, "train.gradient_checkpointing", "memory.gradient_checkpointing")
    draft.carry(options, "train.batch_size", "data.batch_size")
    every = options.get("save.save_every")
    why = options.told("save.save_every")
    scale = parts if parts > 1 else 1
    draft.set("checkpoint.every_steps", max(1, every // scale), why)
    draft.set("export.every_steps", max(1, every // scale), f"{why}: the adapter's files, too; they stay")
    draft.carry(options, "save.max_step_saves_to_keep", "checkpoint.keep_last")
    if options.get("train.disable_sampling"):
        draft.set("validation.every_steps", 0, options.told("train.disable_sampling"))
    else:
        draft.set(
            "validation.every_steps", max(1, options.get("sample.sample_every") // scale), options.told("sample.sample_every")
        )


def _network(draft: Draft, options: Options, family: Family) -> None:
    kind = str(options.get("network.type")).lower()
    known = other_trainers.value_for(kind, ("lora", "dora"))
    if known is None:
        draft.cannot("adapter.type", f"{options.told('network.type')}: there is none: an adapter is a LoRA or a DoRA")
    draft.set("adapter.type", known or "lora", options.told("network.type"))
    rank = "network.rank" if options.has("network.rank") else "network.linear"
    alpha = "network.linear_alpha" if options.has("network.linear_alpha") else "network.alpha"
    options.pass_by("network.linear_alpha", "network.linear")
    if not options.has(rank):
        draft.cannot("adapter.rank", "network: neither linear nor rank is given")
        return
    common.set_scale(
        draft,
        (options.get(rank), options.told(rank)),
        (
            options.get(alpha, options.get("network.linear_alpha")),
            options.told(alpha if options.has(alpha) else "network.linear_alpha"),
        ),
    )
    common.set_targets(draft, family)
    kwargs = Options(dict(options.get("network.network_kwargs") or {}), prefix="network_kwargs.")
    if only := kwargs.get("only_if_contains"):
        draft.set("adapter.targets", [f"*{part}*" for part in only], kwargs.told("only_if_contains"))
    common.carry_rest(draft, kwargs)
    if options.has("network.conv") and "*" in str(draft.value("adapter.targets")):
        told = options.told("network.conv")
        rank = int(options.get("network.conv"))
        alpha = (float(options.get("network.conv_alpha", rank)), options.told("network.conv_alpha", rank))
        rule = {"component": (family.denoiser, told), "match": (common.CONV, told), "rank": (rank, told), "alpha": alpha}
        draft.rules.append(rule)


def _training(draft: Draft, options: Options, family: Family) -> None:
    name = "train.unet_lr" if options.has("train.unet_lr") else "train.lr"
    options.pass_by("train.lr")
    draft.set("optimizer.lr", float(options.get(name)), options.told(name))
    given = dict(options.get("train.optimizer_params") or {})
    common.set_optimizer(draft, str(options.get("train.optimizer")), options.told("train.optimizer"), _numbers(given))
    none = (0, f"{draft.trainer} has no warm-up, unless the schedule's own options say so")
    scheduler = "train.lr_scheduler"
    common.set_schedule(draft, options.get(scheduler), options.told(scheduler), none, idle_when_constant=False)
    if options.get("train.train_text_encoder"):
        rate = options.get("train.text_encoder_lr")
        why = options.told("train.train_text_encoder")
        common.set_text_rates(draft, {each: (rate and float(rate), why) for each in family.text_encoders})
    options.pass_by("train.train_unet")
    if options.given.get("train.train_unet") is False:
        draft.cannot("adapter.targets", "train.train_unet = false: the denoiser is always trained here")
    if options.get("train.ema_config.use_ema"):
        decay = "train.ema_config.ema_decay"
        common.set_ema(draft, (options.get(decay), options.told(decay)))
    options.pass_by("train.ema_config.ema_decay")
    low, high = options.get("train.min_denoising_steps"), options.get("train.max_denoising_steps")
    if low or high not in (None, 999, 1000):
        draft.set(
            "objective.t_range", [(low or 0) / 1000, (high or 1000) / 1000], "train.min_denoising_steps, max_denoising_steps"
        )
    if "objective.shift" in family.reads:
        _times(draft, options)
    else:
        options.pass_by("train.timestep_type")
    if options.get("train.content_or_style") != "balanced":
        draft.note(
            ABSENT, f"{options.told('train.content_or_style')}: times with a preference are objective.timesteps = power here"
        )


def _numbers(given: dict[str, Any]) -> dict[str, Any]:
    """The values as numbers where YAML read them as words: 1e-5 is one to it."""
    from trainer.cli.translate.reading import literal

    return {key: literal(value) if isinstance(value, str) else value for key, value in given.items()}


def _times(draft: Draft, options: Options) -> None:
    kind, told = str(options.get("train.timestep_type")), options.told("train.timestep_type")
    if kind not in TIMES:
        draft.note(ABSENT, f"{told}: uniform times, which are weighed there in a way that is none of ours")
    times, shift = TIMES.get(kind, ("uniform", 1.0))
    draft.set("objective.timesteps", times, told)
    if shift is not None:
        draft.set("objective.shift", shift, told)
    if options.get("train.linear_timesteps"):
        draft.note(
            ABSENT,
            f"{options.told('train.linear_timesteps')}: it weighs the loss by a bell there; here all times weigh alike",
        )


def _precision(draft: Draft, options: Options, family: Family) -> None:
    common.set_compute(draft, family, options.get("train.dtype"), options.told("train.dtype"))
    quantised = options.get("model.quantize")
    if quantised:
        common.set_dtype(
            draft, family.denoiser, str(options.get("model.qtype")).partition("|")[0], options.told("model.qtype")
        )
    if options.get("model.quantize_te", quantised):
        common.set_dtype(draft, family.text_encoders[-1], options.get("model.qtype_te"), options.told("model.qtype_te"))
    for name in ("model.qtype", "model.qtype_te"):
        options.pass_by(name)


def _source(draft: Draft, table: Options, options: Options) -> None:
    """One dataset as a source; with a list of resolutions every photo is trained at each, there as here."""
    name = "folder_path" if table.has("folder_path") else "dataset_path"
    source: dict[str, tuple[Any, str]] = {"path": (str(table.get(name, common.PHOTOS)), table.told(name))}
    source["repeats"] = (int(table.get("num_repeats")), table.told("num_repeats"))
    sizes = table.get("resolution")
    source["resolution"] = (
        sizes if isinstance(sizes, int) else list(sizes),
        f"{table.told('resolution')}: the area of its square",
    )
    source["caption_dropout"] = (float(table.get("caption_dropout_rate")), table.told("caption_dropout_rate"))
    for there, here in DATASET.items():
        if table.has(there) and table.get(there) not in (*common.OFF, 0) and here not in source:
            value = table.get(there)
            source[here] = (float(value) if isinstance(value, float) or here == "loss_weight" else value, table.told(there))
    if not (table.get("shuffle_tokens") or table.get("token_dropout_rate")):
        source.pop("keep", None)
    if "trigger" not in source and options.has("trigger_word"):
        source["trigger"] = (options.get("trigger_word"), options.told("trigger_word"))
    if table.get("is_reg"):
        source["regularisation"] = (True, table.told("is_reg"))
    draft.sources.append(source)
    control = "control_path"
    if table.get(control):
        if isinstance(table.get(control), str):
            source["references"] = (table.get(control), table.told(control))
        else:
            draft.note(ABSENT, f"{table.told(control)}: one folder of references goes with a source")
    for flag in ("cache_latents", "cache_latents_to_disk"):
        table.pass_by(flag)
    common.carry_rest(draft, table)


def _samples(draft: Draft, options: Options, family: Family) -> None:
    """The prompts, with their own flags; [trigger] in them is the trigger."""
    shared = {
        "width": "sample.width",
        "height": "sample.height",
        "guidance": "sample.guidance_scale",
        "negative": "sample.neg",
    }
    draft.carry(options, "sample.seed", "validation.seed")
    draft.carry(options, "sample.sample_steps", "validation.steps")
    seed, walk = options.get("sample.seed"), options.get("sample.walk_seed")
    for name in shared.values():
        options.pass_by(name)
    asked = options.get("sample.samples") or [{"prompt": prompt} for prompt in options.get("sample.prompts") or ()]
    for place, given in enumerate(asked):
        prompt, flags = prompt_line(str(given.get("prompt", "")).replace("[trigger]", str(options.get("trigger_word") or "")))
        sample: dict[str, tuple[Any, str]] = {"prompt": (prompt, "sample.prompts")}
        for key, name in shared.items():
            if options.get(name) not in common.OFF:
                sample[key] = (options.get(name), options.told(name))
        if walk:
            sample["seed"] = (seed + place, f"{options.told('sample.seed')} + {place}: walk_seed")
        sample |= {FLAGS[flag]: (value, f"--{flag}") for flag, value in flags.items() if flag in FLAGS}
        if idle := [flag for flag in flags if flag not in FLAGS]:
            draft.note(
                ABSENT,
                f"--{idle[0]} in a prompt: references of a sample are validation.samples.references, of models that edit",
            )
        draft.samples.append(sample)
