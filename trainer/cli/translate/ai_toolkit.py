"""What options of ai-toolkit mean: its YAML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.base import other_trainers
from trainer.cli.translate import common
from trainer.cli.translate.draft import ABSENT, FILL, Draft, Options
from trainer.cli.translate.kohya_gui import programs
from trainer.cli.translate.reading import literal, prompt_line
from trainer.models import Family

# The times of flow matching; a weighted loss or a learnt blend has no equivalent.
TIMES = {"sigmoid": ("sigmoid", None), "linear": ("uniform", 1.0), "shift": ("uniform", "auto")}
TABLES = ("network", "save", "train", "train.ema_config", "model", "sample")
DATASET, FLAGS = programs()["ai_toolkit_dataset"], programs()["ai_toolkit_flags"]

# Of an entry of sample.samples: what it is in a sample, and whether sample says it for those entries that do not.
SAMPLE = programs()["ai_toolkit_sample"]


def translate(draft: Draft, tree: Options, config: Path, data: Sequence[Path]) -> None:
    """Make the draft of a job's first process."""
    job = tree.table("config", "config.")
    processes = job.tables("process", "", tree.defaults)
    if not processes:
        raise job.wrong("process", "a list with a process")
    if len(processes) > 1:
        draft.note(ABSENT, f"config.process has {len(processes)}; the first is a run here")
    options = flattened(processes[0])
    if options.word("type") not in ("sd_trainer", "ui_trainer", "diffusion_trainer"):
        draft.cannot("adapter.type", f"{options.told('type')}: no training of an adapter with photos")
    family = _family(draft, options)
    if family is None:
        return
    name, told = job.word("name", "adapter"), job.told("name")
    folder = f"{options.word('training_folder')}/{name}"
    common.set_run(draft, name, told, folder, f"{options.told('training_folder')}, {told}")
    _length(draft, options)
    _network(draft, options, family)
    _training(draft, options, family)
    _precision(draft, options, family)
    for dataset in options.tables("datasets", "datasets.", {k: v for k, v in options.defaults.items() if "." not in k}):
        _source(draft, dataset, options)
    if not draft.sources:
        draft.sources.append({"path": (common.PHOTOS, "a stand-in: the photos' folder goes here")})
        draft.note(FILL, "data.sources: no folder of photos is named")
    _samples(draft, options)
    common.note_differences(draft, family)
    common.carry_rest(draft, options)


def flattened(options: Options) -> Options:
    """The options by dotted name; lists and what is below network_kwargs, optimizer_params and its like stay as they are."""
    while tables := [
        name
        for name, value in options.given.items()
        if name in TABLES or (isinstance(value, dict) and not name.endswith(("_kwargs", "_params")))
    ]:
        options = options.opened(*tables)
    return options


def _family(draft: Draft, options: Options) -> Family | None:
    arch = options.word("model.arch", "").partition(":")[0]
    told = options.told("model.arch")
    marks = [name for name in options.given if name.startswith("model.is_") and options.given[name] is True]
    for name in [name for name in options.given if name.startswith("model.is_")]:
        options.read.add(name) if name != "model.is_v_pred" else None
    if not arch and marks:
        kind = marks[0].removeprefix("model.is_")
        arch, told = kind, options.told(marks[0])
    common.set_path(draft, options.word("model.name_or_path", ""), options.told("model.name_or_path"))
    return common.set_family(draft, arch, told)


def _length(draft: Draft, options: Options) -> None:
    """A step is an update where gradient_accumulation is set, and a batch where gradient_accumulation_steps is."""
    steps, told = options.whole("train.steps"), options.told("train.steps")
    names = ("train.gradient_accumulation", "train.gradient_accumulation_steps")
    whole, parts = (options.whole(name) for name in names)
    name = names[0] if whole > 1 or not options.has(names[1]) else names[1]
    if parts < 0:
        draft.note(ABSENT, f"{options.told('train.gradient_accumulation_steps')}: one update for each epoch; 1 is written")
    accumulation = max(whole, parts, 1)
    if parts > 1:
        steps, told = max(1, steps // parts), f"{told} batches / {options.told('train.gradient_accumulation_steps')}"
    draft.set("run.max_steps", steps, told)
    draft.set("step.accumulation", accumulation, options.told(name))
    draft.set("step.max_grad_norm", float(options.number("train.max_grad_norm")), options.told("train.max_grad_norm"))
    name = "train.gradient_checkpointing"
    draft.set("memory.gradient_checkpointing", options.flag(name), options.told(name))
    draft.carry(options, "train.batch_size", "data.batch_size")
    every = options.whole("save.save_every")
    why = options.told("save.save_every")
    scale = parts if parts > 1 else 1
    draft.set("checkpoint.every_steps", max(1, every // scale), why)
    draft.set("export.every_steps", max(1, every // scale), f"{why}: the adapter's files, too; they stay")
    draft.carry(options, "save.max_step_saves_to_keep", "checkpoint.keep_last")
    name = "sample.sample_every"
    if options.flag("train.disable_sampling"):
        draft.set("validation.every_steps", 0, options.told("train.disable_sampling"))
    else:
        draft.set("validation.every_steps", max(1, options.whole(name) // scale), options.told(name))


def _network(draft: Draft, options: Options, family: Family) -> None:
    kind = options.word("network.type").lower()
    known = other_trainers.value_for(kind, ("lora", "dora"))
    if known is None:
        draft.cannot("adapter.type", f"{options.told('network.type')}: there is none: an adapter is a LoRA or a DoRA")
    draft.set("adapter.type", known or "lora", options.told("network.type"))
    rank = "network.rank" if options.has("network.rank") else "network.linear"
    alpha = "network.linear_alpha"
    if options.has("network.alpha") and not options.has(alpha):
        alpha = "network.alpha"
    options.pass_by("network.linear_alpha", "network.linear")
    if not options.has(rank):
        draft.cannot("adapter.rank", "network: neither linear nor rank is given")
        return
    common.set_scale(draft, (options.whole(rank), options.told(rank)), (float(options.number(alpha)), options.told(alpha)))
    common.set_targets(draft, family)
    kwargs = options.table("network.network_kwargs", "network_kwargs.")
    if only := kwargs.entries("only_if_contains"):
        draft.set("adapter.targets", [f"*{part}*" for part in only], kwargs.told("only_if_contains"))
    common.carry_rest(draft, kwargs)
    if options.has("network.conv") and "*" in str(draft.value("adapter.targets")):
        told = options.told("network.conv")
        conv = options.whole("network.conv")
        scale = (float(options.number("network.conv_alpha", conv)), options.told("network.conv_alpha", conv))
        rule = {"component": (family.denoiser, told), "match": (common.CONV, told), "rank": (conv, told), "alpha": scale}
        draft.rules.append(rule)


def _training(draft: Draft, options: Options, family: Family) -> None:
    name = "train.unet_lr" if options.has("train.unet_lr") else "train.lr"
    options.pass_by("train.lr")
    draft.set("optimizer.lr", float(options.number(name)), options.told(name))
    given = options.table("train.optimizer_params")
    # YAML reads 1e-5 as a word.
    given.given = {key: literal(value) if isinstance(value, str) else value for key, value in given.given.items()}
    common.set_optimizer(draft, options.word("train.optimizer"), options.told("train.optimizer"), given)
    none = (0, f"{draft.trainer} has no warm-up, unless the schedule's own options say so")
    scheduler = "train.lr_scheduler"
    common.set_schedule(draft, options.word(scheduler), options.told(scheduler), none, idle_when_constant=False)
    if options.flag("train.train_text_encoder"):
        rate = options.number("train.text_encoder_lr")
        why = options.told("train.train_text_encoder")
        common.set_text_rates(draft, dict.fromkeys(family.text_encoders, (rate, why)))
    if not options.flag("train.train_unet", True):
        draft.cannot("adapter.targets", "train.train_unet = false: the denoiser is always trained here")
    if options.flag("train.ema_config.use_ema"):
        decay = "train.ema_config.ema_decay"
        common.set_ema(draft, (options.number(decay), options.told(decay)))
    options.pass_by("train.ema_config.ema_decay")
    low, high = options.number("train.min_denoising_steps"), options.number("train.max_denoising_steps")
    if low or high not in (None, 999, 1000):
        draft.set(
            "objective.t_range", [(low or 0) / 1000, (high or 1000) / 1000], "train.min_denoising_steps, max_denoising_steps"
        )
    if "objective.shift" in family.reads:
        _times(draft, options)
    else:
        options.pass_by("train.timestep_type")
    if options.word("train.content_or_style") != "balanced":
        draft.note(
            ABSENT, f"{options.told('train.content_or_style')}: times with a preference are objective.timesteps = power here"
        )


def _times(draft: Draft, options: Options) -> None:
    kind, told = options.word("train.timestep_type"), options.told("train.timestep_type")
    if kind not in TIMES:
        draft.note(ABSENT, f"{told}: uniform times, which are weighed there in a way that is none of ours")
    times, shift = TIMES.get(kind, ("uniform", 1.0))
    draft.set("objective.timesteps", times, told)
    if shift is not None:
        draft.set("objective.shift", shift, told)
    if options.flag("train.linear_timesteps"):
        draft.note(
            ABSENT,
            f"{options.told('train.linear_timesteps')}: it weighs the loss by a bell there; here all times weigh alike",
        )


def _precision(draft: Draft, options: Options, family: Family) -> None:
    common.set_compute(draft, family, options.word("train.dtype"), options.told("train.dtype"))
    quantised = options.flag("model.quantize")
    if quantised:
        kind = options.word("model.qtype").partition("|")[0]
        common.set_dtype(draft, family.denoiser, kind, options.told("model.qtype"))
    if options.flag("model.quantize_te", quantised):
        common.set_dtype(draft, family.text_encoders[-1], options.word("model.qtype_te"), options.told("model.qtype_te"))
    for name in ("model.qtype", "model.qtype_te"):
        options.pass_by(name)


def _source(draft: Draft, table: Options, options: Options) -> None:
    """One dataset as a source; with a list of resolutions every photo is trained at each, there as here."""
    name = "folder_path" if table.has("folder_path") else "dataset_path"
    source: dict[str, tuple[Any, str]] = {"path": (table.word(name, common.PHOTOS), table.told(name))}
    source["repeats"] = (table.whole("num_repeats"), table.told("num_repeats"))
    sizes = [int(size) for size in table.numbers("resolution", least=16)]
    told = f"{table.told('resolution')}: the area of its square"
    source["resolution"] = (sizes if isinstance(table.get("resolution"), list) else sizes[0], told)
    source["caption_dropout"] = (float(table.number("caption_dropout_rate")), table.told("caption_dropout_rate"))
    for there, (here, kind) in DATASET.items():
        if value := getattr(table, kind)(there):
            source[here] = (float(value) if kind == "number" else value, table.told(there))
    if not (table.flag("shuffle_tokens") or table.number("token_dropout_rate")):
        source.pop("keep", None)
    if "trigger" not in source and options.word("trigger_word"):
        source["trigger"] = (options.word("trigger_word"), options.told("trigger_word"))
    if table.flag("is_reg"):
        source["regularisation"] = (True, table.told("is_reg"))
    draft.sources.append(source)
    control = "control_path"
    folders = [folder for folder in table.entries(control) if folder]
    if len(folders) == 1:
        source["references"] = (str(folders[0]), table.told(control))
    elif folders:
        draft.note(ABSENT, f"{table.told(control)}: one folder of references goes with a source")
    table.pass_by("cache_latents", "cache_latents_to_disk")
    common.carry_rest(draft, table)


def _samples(draft: Draft, options: Options) -> None:
    """The prompts, with their own flags; [trigger] in them is the trigger."""
    draft.carry(options, "sample.seed", "validation.seed")
    draft.carry(options, "sample.sample_steps", "validation.steps")
    seed, walk = options.whole("sample.seed"), options.flag("sample.walk_seed")
    listed = options.tables("sample.samples", "sample.samples.")
    plain = [
        Options({"prompt": str(line)}, options.file, prefix="sample.prompts ") for line in options.entries("sample.prompts")
    ]
    for place, entry in enumerate(listed or plain):
        line = entry.word("prompt", "").replace("[trigger]", options.word("trigger_word", ""))
        prompt, flags = prompt_line(line)
        sample: dict[str, tuple[Any, str]] = {"prompt": (prompt, "sample.samples" if listed else "sample.prompts")}
        if walk:
            sample["seed"] = (seed + place, f"{options.told('sample.seed')} + {place}: walk_seed")
        for there, (key, kind, is_shared) in SAMPLE.items():
            table, name = (entry, there) if entry.has(there) or not is_shared else (options, f"sample.{there}")
            value = None if table.get(name) is False else getattr(table, kind)(name)  # false is the default of neg there
            if value not in (None, ""):
                sample[key] = (float(value) if key == "strength" else value, table.told(name))
        sample |= {FLAGS[flag]: (value, f"--{flag}") for flag, value in flags.items() if flag in FLAGS}
        if idle := [flag for flag in flags if flag not in FLAGS]:
            draft.note(
                ABSENT,
                f"--{idle[0]} in a prompt: references of a sample are validation.samples.references, of models that edit",
            )
        draft.samples.append(sample)
        common.carry_rest(draft, entry)
