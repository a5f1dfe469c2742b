"""Translates OneTrainer's JSON, and its JSON of concepts and samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from trainer.models import Family
from workbench.importing import common
from workbench.importing.catalogues import facts, programs
from workbench.importing.draft import ABSENT, DIFFERS, FILL, Draft, Line, Options
from workbench.importing.reading import find_beside, read_tree

ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4")
TABLES = ("unet", "prior", "transformer", *ENCODERS, "vae", "quantization", "optimizer")
LISTS = {"concepts": "concept ", "samples": "sample "}  # beside the options, with the prefix of their entries in messages
CONCEPTS, SAMPLES = LISTS
WEIGHTS = {"MIN_SNR_GAMMA": "min_snr", "DEBIASED_ESTIMATION": "debiased", "P2": "p2"}
SAMPLE = programs()["onetrainer_sample"]
IDLE = programs()["idle"]["OneTrainer"].split()
PROMPTS = {"sample": "auto", "filename": "filename", "concept": "none"}


def translate(draft: Draft, options: Options, config: Path, data: Sequence[Path]) -> None:
    """Fill the draft from a preset or a saved config. data: the files of concepts and samples."""
    options = options.flattened(*TABLES)
    if options.word("training_method") != "LORA":
        draft.refuse("adapter.type", f"{options.cite('training_method')}: there is none: an adapter is trained")
    family = common.set_family(draft, *options.line("model_type", "word"))
    common.set_path(draft, *options.line("base_model_name", "word"))
    if family is None:
        return
    destination, reason = options.line("output_model_destination", "word")
    common.set_run(draft, common.folder_name(destination), reason, *options.line("workspace_dir", "word"))
    _network(draft, options, family)
    _rates(draft, options, family)
    common.carry_plain(draft, options)
    _precision(draft, options, family)
    _objective(draft, options, family)
    sizes = _data(draft, options, config, data)
    _length(draft, options, sizes)
    _samples(draft, options, config, data)
    if options.has("output_model_format"):
        draft.set("export.formats", ["diffusers", "comfyui"], f"{options.cite('output_model_format')}: both are written")
    common.carry_rest(draft, options)


def _length(draft: Draft, options: Options, sizes: int) -> None:
    """Set the epochs. With several resolutions a photo has one of them an epoch there, all of them here."""
    epochs, reason = options.line("epochs", "whole")
    if sizes > 1:
        draft.note(DIFFERS, f"{options.cite('resolution')}: a photo has one of them an epoch there, all of them here")
        epochs, reason = max(1, round(epochs / sizes)), f"{reason} / {sizes} resolutions"
    draft.set("run.epochs", epochs, reason)
    clip = "clip_grad_norm"
    if options.is_null(clip):
        draft.set("step.max_grad_norm", 0.0, f"{clip} = null: nothing is clipped there")
    else:
        draft.carry(options, clip, "step.max_grad_norm", "number")
    name = "gradient_checkpointing"
    checkpointing = options.get(name) == "CPU_OFFLOADED" or options.flag(name)
    draft.set("memory.gradient_checkpointing", checkpointing, options.cite(name))
    if options.word("ema") != "OFF":
        common.set_ema(draft, *options.line("ema_decay", "number"))
        every = "ema_update_step_interval"
        draft.note(DIFFERS, f"{options.cite(every)}: here the average follows every update, so the same decay forgets sooner")
    if options.word("backup_after_unit") == "MINUTE":
        draft.carry(options, "backup_after", "checkpoint.every_minutes", "number")
        draft.set("checkpoint.every_steps", 0, options.cite("backup_after_unit"))
    else:
        _every(draft, options, "backup_after", "checkpoint.every_steps")


def _every(draft: Draft, options: Options, name: str, key: str) -> None:
    unit, reason = options.word(f"{name}_unit"), options.cite(name)
    if unit == "STEP":
        draft.carry(options, name, key)
    elif unit == "EPOCH":
        draft.in_epochs(key.partition(".")[0], options.whole(name), f"{reason} epochs")
    elif unit != "NEVER":
        draft.note(ABSENT, f"{reason} {unit}: {key} counts steps; its default is taken")


def _network(draft: Draft, options: Options, family: Family) -> None:
    common.set_type(draft, *options.line("peft_type", "word"), options.line("lora_decompose", "flag"))
    is_lokr = draft.value("adapter.type") == "lokr"
    if is_lokr and not options.has("lokr_dim"):
        draft.refuse("adapter.rank", "lokr_dim is left out: what it is there was not looked up")
    rank = options.line("lokr_dim" if is_lokr and options.has("lokr_dim") else "lora_rank", "whole")
    common.set_scale(draft, rank, options.line("lora_alpha", "number"))
    common.set_matrices(draft, options)
    if is_lokr and options.flag("lokr_weight_decompose"):
        draft.refuse("adapter.type", f"{options.cite('lokr_weight_decompose')}: there is none: a DoRA over a LoKr")
    options.ignore(*(name for name in options.values if name.startswith("lokr_")))
    common.set_targets(draft, family)
    preset, words = options.word("layer_filter_preset", ""), options.word("layer_filter", "")
    reason = options.cite("layer_filter" if words else "layer_filter_preset")
    patterns, regex = facts().layer_presets[family.name].get(preset), options.flag("layer_filter_regex")
    if preset and (not words or (regex and patterns is not None)):  # a preset's own expression means the same as its name
        if patterns is None:
            draft.note(ABSENT, f"{reason}: a preset that was not looked up; all layers are trained")
        words, regex = patterns or "", False
    if regex and words:
        takes = "adapter.targets takes patterns (docs/adapter_options.md)"
        draft.refuse("adapter.targets", f"{reason}: a regular expression; {takes}")
    elif words:
        draft.set("adapter.targets", [f"*{word.strip()}*" for word in words.split(",")], reason)


def _rates(draft: Draft, options: Options, family: Family) -> None:
    name = options.first(f"{family.denoiser}.learning_rate", "learning_rate")
    scale, reason = _scale(options)
    draft.set("optimizer.lr", float(options.number(name)) * scale, options.cite(name) + reason)
    kind = options.word("optimizer.optimizer", "ADAMW")
    reason = f"optimizer = {kind}" if options.has("optimizer.optimizer") else "optimizer is left out: ADAMW there"
    names = ("optimizer.beta1", "optimizer.beta2")
    betas = [options.number(name) for name in names if options.has(name)]
    unread = {key: value for key, value in options.unread().items() if key.startswith("optimizer.")}
    options.ignore(*unread)
    arguments = {key.partition(".")[2]: value for key, value in unread.items() if value not in common.OFF}
    arguments |= {"betas": betas} if len(betas) == 2 else {}
    common.set_optimizer(draft, kind, reason, Options(arguments, options.file))
    schedule, warmup = "learning_rate_scheduler", options.line("learning_rate_warmup_steps", "number")
    common.set_schedule(draft, *options.line(schedule, "word"), warmup, idle_when_constant=False)
    rates = {}
    for encoder in family.text_encoders:
        rate = options.number(f"{encoder}.learning_rate")
        if options.flag(f"{encoder}.train", True):
            rates[encoder] = (rate * scale if rate is not None else None, options.cite(f"{encoder}.train", True))
            stop = f"{encoder}.stop_training_after"
            if not options.is_null(stop) and options.word(f"{stop}_unit") != "NEVER":
                draft.note(DIFFERS, f"{options.cite(stop, 30)} epochs: a rule's stop_step counts steps, so it is not written")
            options.ignore(stop, f"{stop}_unit")
    common.set_text_rates(draft, rates)
    if not options.flag(f"{family.denoiser}.train", True):
        draft.refuse("adapter.targets", f"{family.denoiser}.train = false: the denoiser is always trained here")


def _scale(options: Options) -> tuple[float, str]:
    """(the factor of the rate, its reason) of learning_rate_scaler: the root of the photos in a batch or an update, or 1."""
    kind, reason = options.line("learning_rate_scaler", "word")
    sizes = ("batch_size", "gradient_accumulation_steps")
    names = {"BATCH": sizes[:1], "GRADIENT_ACCUMULATION": sizes[1:], "BOTH": sizes}.get(kind, ())
    product = math.prod(options.whole(name, least=1) for name in names)
    return product**0.5, f" x sqrt({product}): {reason}" if names else ""


def _precision(draft: Draft, options: Options, family: Family) -> None:
    common.set_compute(draft, family, *options.line("train_dtype", "word"))
    for part in (family.denoiser, *family.text_encoders, family.vae):
        name = f"{part}.weight_dtype"
        if options.word(name, "NONE") != "NONE":
            common.set_dtype(draft, part, *options.line(name, "word"))
    name = "quantization.layer_filter"
    if options.has(name):
        draft.note(DIFFERS, f"{options.cite(name)}: here all layers but the sensitive ones are quantised")
    streamed = [name for name in options.values if name.endswith("offload_fraction") and options.number(name)]
    if streamed:
        draft.set("memory.offload", "blocks", ", ".join(map(options.cite, streamed)))
    if options.flag("compile"):
        draft.set("step.compile", "blocks", options.cite("compile"))


def _objective(draft: Draft, options: Options, family: Family) -> None:
    kind, reason = options.line("timestep_distribution", "word")
    bias, (weight, weight_reason) = options.line("noising_bias", "number"), options.line("noising_weight", "number")
    shift, dynamic = options.line("timestep_shift", "number"), options.line("dynamic_timestep_shifting", "flag")
    times = facts().times[draft.trainer].get(kind)
    if times is None:
        draft.refuse("objective.timesteps", f"{reason}: no such distribution here")
    elif kind != "UNIFORM" or "objective.shift" in family.reads:
        draft.set("objective.timesteps", times, reason)
    if kind == "LOGIT_NORMAL":
        draft.set("objective.logit_mean", *bias)
        draft.set("objective.logit_std", 1.0 + weight, f"1 + {weight_reason}")
    elif kind == "HEAVY_TAIL":
        draft.set("objective.mode_scale", weight, weight_reason)
    if "objective.shift" in family.reads:
        draft.set("objective.shift", *(("auto", dynamic[1]) if dynamic[0] else shift))
    names = ("min_noising_strength", "max_noising_strength")
    low, high = (options.number(name) for name in names)
    if low or high not in (None, 1.0):
        draft.set("objective.t_range", [float(low or 0), float(1 if high is None else high)], ", ".join(names))
    (weights, reason), strength = options.line("loss_weight_fn", "word"), options.line("loss_weight_strength", "number")
    if weights in WEIGHTS:
        draft.set("objective.weighting", WEIGHTS[weights], reason)
        if weights != "DEBIASED_ESTIMATION":
            draft.set(f"objective.{WEIGHTS[weights]}_gamma", *strength)
    elif weights != "CONSTANT":
        draft.note(ABSENT, f"{reason}: no such weighting here; all times weigh alike")
    losses = {name for name in ("mse", "mae", "log_cosh", "huber") if options.number(f"{name}_strength")}
    if losses == {"huber"}:
        draft.set("objective.loss", "huber", options.cite("huber_strength"))
    elif losses - {"mse"}:
        draft.note(ABSENT, "mae_strength and its like: one loss is trained here, the squared error")


def _data(draft: Draft, options: Options, config: Path, data: Sequence[Path]) -> int:
    """Set sources and resolution; returns the number of resolutions."""
    sizes = [common.side_of(options, "resolution", part) for part in options.word("resolution").split(",")]
    draft.set("data.resolution", sizes if len(sizes) > 1 else sizes[0], options.cite("resolution"))
    draft.set("data.caption_dropout", 0.0, f"{draft.trainer} drops no whole captions")
    file = find_beside(options.word("concept_file_name"), config, [path for path in data if "sample" not in path.name])
    for concept in _enabled_tables(options, CONCEPTS, file):
        _source(draft, concept.flattened("image", "text"))
    if not draft.sources:
        common.ask_for_photos(draft, f"{options.cite('concept_file_name')}, not found; give it as --data")
    return len(sizes)


def _enabled_tables(options: Options, name: str, path: Path | None) -> list[Options]:
    """The enabled tables of a list in the config, else in the file `path`."""
    tables = options.tables(name, LISTS[name])
    if path and not tables:
        tables = Options({name: read_tree(path)}, path).tables(name, LISTS[name])
    return [table for table in tables if table.flag("enabled", True)]


def _source(draft: Draft, table: Options) -> None:
    path = table.word("path", "")
    source: dict[str, Line] = {"path": (path, table.cite("path"))}
    name = "balancing" if table.has("balancing") or not table.has("repeats") else "repeats"
    repeats = table.number(name, 1.0)
    if table.word("balancing_strategy", "REPEATS") != "REPEATS":
        draft.note(ABSENT, f"{path}: {table.cite('balancing_strategy')}: a number of photos an epoch; repeats = 1 is written")
        repeats = 1.0
    elif repeats != round(repeats):
        draft.note(DIFFERS, f"{path}: {table.cite(name)}: repeats are whole here; the nearest is written")
    source["repeats"] = (max(1, round(repeats)), table.cite(name, 1.0))
    kind = table.word("type", "STANDARD")
    if kind == "VALIDATION" or table.flag("validation_concept"):
        if draft.sources and "held_out" not in draft.sources[-1]:
            draft.sources[-1]["held_out"] = (path, "photos for validation alone")
        else:
            draft.note(ABSENT, f"{path}: photos for validation alone; set held_out of a source to it. It is left out")
        return
    if kind == "PRIOR_PREDICTION":
        plain = "a prior that the model itself predicts; they are plain photos here"
        draft.note(ABSENT, f"{path}: {table.cite('type')}: {plain}")
    prompts = table.word("text.prompt_source", "sample")
    source["captions"] = (PROMPTS.get(prompts, "auto"), table.cite("text.prompt_source"))
    if prompts == "sample":
        source["caption_lines"] = (True, "one line of a caption file at each appearance there")
    elif prompts == "concept":
        remedy = "one of its lines at each appearance; write a trigger, or captions"
        draft.note(FILL, f"{path}: {table.cite('text.prompt_path')}: {remedy}")
    table.ignore("text.prompt_path")
    source["flip"] = table.line("image.enable_random_flip", "flag", True)
    if table.flag("image.enable_crop_jitter", True):
        draft.note(DIFFERS, f"{path}: {table.cite('image.enable_crop_jitter', True)}: data.crop_jitter is off here")
    if table.number("loss_weight", 1.0) != 1.0:
        source["loss_weight"] = table.line("loss_weight", "number")
    if table.flag("text.enable_tag_shuffling"):
        source["shuffle"] = (True, table.cite("text.enable_tag_shuffling"))
        source["keep"] = table.line("text.keep_tags_count", "whole", 1)
        separator, reason = table.line("text.tag_delimiter", "word", ",")
        source["separator"] = (f"{separator.strip()} ", reason)
    if table.flag("image.enable_resolution_override"):
        override = "image.resolution_override"
        source["resolution"] = (common.side_of(table, override), table.cite(override))
    draft.sources.append(source)
    idle = [key for key, value in table.unread().items() if value in (*common.OFF, 0, 0.0, "FULL", "NONE")]
    table.ignore(*idle, *IDLE)
    common.carry_rest(draft, table)


def _samples(draft: Draft, options: Options, config: Path, data: Sequence[Path]) -> None:
    _every(draft, options, "sample_after", "validation.every_steps")
    name = "sample_definition_file_name"
    file = find_beside(options.word(name), config, [path for path in data if "sample" in path.name])
    if options.has(name) and not (file or options.has(SAMPLES)):
        draft.note(FILL, f"{options.cite(name)}: not found; give it as --data, or write prompts")
    for table in _enabled_tables(options, SAMPLES, file):
        rows = {name: row for name, row in SAMPLE.items() if table.has(name) and table.get(name) != ""}
        sample = {key: (getattr(table, kind)(name), f"samples {name}") for name, (key, kind) in rows.items()}
        draft.samples.append({"prompt": (table.word("prompt", ""), "samples prompt")} | sample)
