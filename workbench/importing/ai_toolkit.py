"""Translates ai-toolkit's YAML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.models import Family
from workbench.importing import common
from workbench.importing.catalogues import programs
from workbench.importing.draft import ABSENT, UNKNOWN, Draft, Line, Options
from workbench.importing.reading import literal, prompt_line

# The times of flow matching; a weighted loss or a learnt blend has no equivalent.
TIMES = {"sigmoid": ("sigmoid", None), "linear": ("uniform", 1.0), "shift": ("uniform", "auto")}
TABLES = ("network", "save", "train", "train.ema_config", "model", "sample")
# SAMPLE: options of an entry of sample.samples, and whether `sample` has their default.
DATASET, FLAGS, SAMPLE = (programs()[f"ai_toolkit_{name}"] for name in ("dataset", "flags", "sample"))


def translate(draft: Draft, tree: Options, config: Path, data: Sequence[Path]) -> None:
    """Fill the draft from a job's first process."""
    job = tree.table("config", "config.")
    processes = job.tables("process", "", tree.defaults)
    if not processes:
        raise job.error("process", "a list with a process")
    if len(processes) > 1:
        draft.note(ABSENT, f"config.process has {len(processes)}; the first is a run here")
    options = flatten(processes[0])
    if options.word("type") not in ("sd_trainer", "ui_trainer", "diffusion_trainer"):
        draft.refuse("adapter.type", f"{options.cite('type')}: no training of an adapter with photos")
    family = _family(draft, options)
    if family is None:
        return
    name, reason = job.word("name", "adapter"), job.cite("name")
    folder, folder_reason = options.line("training_folder", "word")
    common.set_run(draft, name, reason, f"{folder}/{name}", f"{folder_reason}, {reason}")
    common.carry_plain(draft, options)
    _length(draft, options)
    _network(draft, options, family)
    _training(draft, options, family)
    _precision(draft, options, family)
    for dataset in options.tables("datasets", "datasets.", {k: v for k, v in options.defaults.items() if "." not in k}):
        _source(draft, dataset, options)
    if not draft.sources:
        common.ask_for_photos(draft, "no folder of photos is named")
    _samples(draft, options)
    common.carry_rest(draft, options)


def flatten(options: Options) -> Options:
    """The options by dotted name; lists, and tables such as network_kwargs and optimizer_params, stay as they are."""
    closed = ("_kwargs", "_params")
    while tables := [n for n, v in options.values.items() if n in TABLES or (isinstance(v, dict) and not n.endswith(closed))]:
        options = options.flattened(*tables)
    return options


def _family(draft: Draft, options: Options) -> Family | None:
    arch, reason = options.word("model.arch", "").partition(":")[0], options.cite("model.arch")
    marks = [name for name in options.values if name.startswith("model.is_")]
    options.ignore(*(name for name in marks if name != "model.is_v_pred"))
    if enabled := [] if arch else [name for name in marks if options.values[name] is True]:
        arch, reason = enabled[0].removeprefix("model.is_"), options.cite(enabled[0])
    common.set_path(draft, *options.line("model.name_or_path", "word"))
    family = common.set_family(draft, arch, reason)
    if family is not None and family.variants.editing and arch.endswith(f"_{family.variants.editing}"):
        draft.set("model.variant", family.variants.editing, reason)
    return family


def _length(draft: Draft, options: Options) -> None:
    """A step is an update with gradient_accumulation, and a batch with gradient_accumulation_steps."""
    steps, reason = options.line("train.steps", "whole")
    whole, whole_reason = options.line("train.gradient_accumulation", "whole")
    parts, parts_reason = options.line("train.gradient_accumulation_steps", "whole")
    if parts < 0:
        draft.note(ABSENT, f"{parts_reason}: one update for each epoch; 1 is written")
    if parts > 1:
        steps, reason = max(1, steps // parts), f"{reason} batches / {parts_reason}"
    draft.set("run.max_steps", steps, reason)
    by_parts = whole <= 1 and options.has("train.gradient_accumulation_steps")
    draft.set("step.accumulation", max(whole, parts, 1), parts_reason if by_parts else whole_reason)
    scale = max(parts, 1)
    every, reason = options.line("save.save_every", "whole")
    draft.set("checkpoint.every_steps", max(1, every // scale), reason)
    draft.set("export.every_steps", max(1, every // scale), f"{reason}: the adapter's files, too; they stay")
    every, reason = options.line("sample.sample_every", "whole")
    if options.flag("train.disable_sampling"):
        draft.set("validation.every_steps", 0, options.cite("train.disable_sampling"))
    else:
        draft.set("validation.every_steps", max(1, every // scale), reason)


def _network(draft: Draft, options: Options, family: Family) -> None:
    common.set_type(draft, *options.line("network.type", "word"))
    rank = options.first("network.rank", "network.linear")
    alpha = options.first("network.linear_alpha", "network.alpha", "network.linear_alpha")
    full = "network.lokr_full_rank"
    if not options.has(rank) and not (draft.value("adapter.type") == "lokr" and options.flag(full)):
        draft.refuse("adapter.rank", "network: neither linear nor rank is given")
        return
    common.set_scale(draft, options.line(rank, "whole"), options.line(alpha, "number"))
    common.set_targets(draft, family)
    kwargs = options.table("network.network_kwargs", "network_kwargs.")
    if only := kwargs.entries("only_if_contains"):
        draft.set("adapter.targets", [f"*{part}*" for part in only], kwargs.cite("only_if_contains"))
    common.carry_rest(draft, kwargs)
    if options.has("network.conv") and "*" in str(draft.value("adapter.targets")):
        conv = options.line("network.conv", "whole")
        common.add_conv_rule(draft, family, conv, options.line("network.conv_alpha", "number", conv[0]))
    common.set_matrices(draft, options)


def _training(draft: Draft, options: Options, family: Family) -> None:
    draft.carry(options, options.first("train.unet_lr", "train.lr"), "optimizer.lr", "number")
    arguments = options.table("train.optimizer_params")
    # YAML reads 1e-5 as a word.
    arguments.values = {key: literal(value) if isinstance(value, str) else value for key, value in arguments.values.items()}
    common.set_optimizer(draft, *options.line("train.optimizer", "word"), arguments)
    warmup = (0, f"{draft.trainer} has no warm-up, unless the schedule's own options say so")
    common.set_schedule(draft, *options.line("train.lr_scheduler", "word"), warmup, idle_when_constant=False)
    if options.flag("train.train_text_encoder"):
        rate, reason = options.number("train.text_encoder_lr"), options.cite("train.train_text_encoder")
        common.set_text_rates(draft, dict.fromkeys(family.text_encoders, (rate, reason)))
    if not options.flag("train.train_unet", True):
        draft.refuse("adapter.targets", "train.train_unet = false: the denoiser is always trained here")
    if options.flag("train.ema_config.use_ema"):
        common.set_ema(draft, *options.line("train.ema_config.ema_decay", "number"))
    low, high = options.number("train.min_denoising_steps"), options.number("train.max_denoising_steps")
    if low or high not in (None, 999, 1000):
        reason = "train.min_denoising_steps, max_denoising_steps"
        draft.set("objective.t_range", [(low or 0) / 1000, (high or 1000) / 1000], reason)
    if "objective.shift" in family.reads:
        _times(draft, options)
    preserve, weight, noun = (f"train.diff_output_preservation{end}" for end in ("", "_multiplier", "_class"))
    if options.flag(preserve):
        reason = f"{options.cite(preserve)}, {options.cite(weight, 1)}"
        draft.set("objective.preserve", options.number(weight, 1.0, least=0), reason)
        draft.set("objective.preserve_as", *options.line(noun, "word", ""))
    blank = "train.blank_prompt_preservation"
    if options.flag(blank):
        without = "the blank caption is held there; objective.preserve holds captions without their trigger"
        draft.note(ABSENT, f"{options.cite(blank)}: {without}")
    options.ignore(preserve, weight, noun, f"{blank}_multiplier")
    preferred, reason = options.line("train.content_or_style", "word")
    if preferred != "balanced":
        draft.note(ABSENT, f"{reason}: times with a preference are objective.timesteps = power here")


def _times(draft: Draft, options: Options) -> None:
    kind, reason = options.line("train.timestep_type", "word")
    if kind not in TIMES:
        draft.note(ABSENT, f"{reason}: uniform times, which are weighed there in a way that is none of ours")
    times, shift = TIMES.get(kind, ("uniform", 1.0))
    draft.set("objective.timesteps", times, reason)
    if shift is not None:
        draft.set("objective.shift", shift, reason)
    weighs, reason = options.line("train.linear_timesteps", "flag")
    if weighs:
        draft.note(ABSENT, f"{reason}: it weighs the loss by a bell there; here all times weigh alike")


def _precision(draft: Draft, options: Options, family: Family) -> None:
    common.set_compute(draft, family, *options.line("train.dtype", "word"))
    quantised = options.flag("model.quantize")
    if quantised:
        common.set_dtype(draft, family.denoiser, options.word("model.qtype").partition("|")[0], options.cite("model.qtype"))
    if options.flag("model.quantize_te", quantised):
        common.set_dtype(draft, family.text_encoders[-1], *options.line("model.qtype_te", "word"))


def _source(draft: Draft, table: Options, options: Options) -> None:
    """Add a dataset as a source. A list of resolutions trains every photo at each, there as here."""
    name = table.first("folder_path", "dataset_path")
    source: dict[str, Line] = {"path": (table.word(name, common.PHOTOS), table.cite(name))}
    source["repeats"] = table.line("num_repeats", "whole")
    sizes = [int(size) for size in table.numbers("resolution", least=16)]
    reason = f"{table.cite('resolution')}: the area of its square"
    source["resolution"] = (sizes if isinstance(table.get("resolution"), list) else sizes[0], reason)
    source["caption_dropout"] = table.line("caption_dropout_rate", "number")
    source |= {key: pair for name, (key, kind) in DATASET.items() if (pair := table.line(name, kind))[0]}
    if not (table.flag("shuffle_tokens") or table.number("token_dropout_rate")):
        source.pop("keep", None)
    if "trigger" not in source and options.word("trigger_word"):
        source["trigger"] = options.line("trigger_word", "word")
    draft.sources.append(source)
    numbered = [f"control_path_{place}" for place in (1, 2, 3)]  # of its window; they replace the list
    controls = [name for name in numbered if table.get(name)] or ["control_path"]
    if folders := [str(folder) for name in controls for folder in table.entries(name) if folder]:
        source["references"] = (folders if len(folders) > 1 else folders[0], ", ".join(map(table.cite, controls)))
    table.ignore("control_path", *numbered)
    table.ignore(*programs()["idle"]["ai-toolkit"].split())
    if table.number("network_weight", 1) != 1:
        draft.note(UNKNOWN, table.cite("network_weight"))
    common.carry_rest(draft, table)


def _samples(draft: Draft, options: Options) -> None:
    """Add the prompts, with their own flags; [trigger] in them stands for the trigger."""
    seed, walk = options.whole("sample.seed"), options.flag("sample.walk_seed")
    entries = options.tables("sample.samples", "sample.samples.")
    texts = options.entries("sample.prompts")
    prompts = [Options({"prompt": str(text)}, options.file, prefix="sample.prompts ") for text in texts]
    for place, entry in enumerate(entries or prompts):
        text = entry.word("prompt", "").replace("[trigger]", options.word("trigger_word", ""))
        prompt, flags = prompt_line(text)
        sample: dict[str, Line] = {"prompt": (prompt, "sample.samples" if entries else "sample.prompts")}
        if walk:
            sample["seed"] = (seed + place, f"{options.cite('sample.seed')} + {place}: walk_seed")
        for option, (key, kind, is_shared) in SAMPLE.items():
            table, name = (entry, option) if entry.has(option) or not is_shared else (options, f"sample.{option}")
            value = None if table.get(name) is False else getattr(table, kind)(name)  # false is the default of neg there
            if value not in (None, ""):
                sample[key] = (float(value) if key == "strength" else value, table.cite(name))
        sample |= {FLAGS[flag]: (value, f"--{flag}") for flag, value in flags.items() if flag in FLAGS}
        if (reference := flags.pop("ctrl_img", None)) is not None:
            sample["references"] = ([reference], "--ctrl_img")
        if idle := [flag for flag in flags if flag not in FLAGS]:
            references = "references of a sample are validation.samples.references, of models that edit"
            draft.note(ABSENT, f"--{idle[0]} in a prompt: {references}")
        draft.samples.append(sample)
        common.carry_rest(draft, entry)
