"""What options of OneTrainer mean: its JSON, and its JSON of concepts and samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.base import other_trainers
from trainer.cli.translate import common
from trainer.cli.translate.draft import ABSENT, DIFFERS, FILL, Draft, Options
from trainer.cli.translate.reading import find_beside, read_tree
from trainer.models import Family

PARTS = ("unet", "prior", "transformer", "text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4", "vae",
         "quantization", "optimizer")  # fmt: skip
LISTS = {"concepts": "sources of photos", "samples": "prompts"}  # beside the options
WEIGHTS = {"MIN_SNR_GAMMA": "min_snr", "DEBIASED_ESTIMATION": "debiased", "P2": "p2"}
PROMPTS = {"sample": "auto", "filename": "filename", "concept": "none"}


def translate(draft: Draft, tree: Mapping[str, Any], config: Path, data: Sequence[Path]) -> None:
    """Make the draft of a preset or a saved config. data: the files of concepts and samples."""
    flat = {name: value for name, value in tree.items() if name not in {*PARTS, *LISTS}}
    flat |= {f"{part}.{name}": value for part in PARTS for name, value in (tree.get(part) or {}).items()}
    options = Options(flat, other_trainers.facts().defaults[draft.trainer])
    if str(options.get("training_method")) != "LORA":
        draft.cannot("adapter.type", f"{options.told('training_method')}: there is none: an adapter is trained")
    family = common.set_family(draft, str(options.get("model_type")), options.told("model_type"))
    common.set_path(draft, str(options.get("base_model_name") or ""), options.told("base_model_name"))
    if family is None:
        return
    name = common.folder_name(str(options.get("output_model_destination")))
    told = options.told("output_model_destination")
    common.set_run(draft, name, told, str(options.get("workspace_dir")), options.told("workspace_dir"))
    _network(draft, options, family)
    _rates(draft, options, family)
    _precision(draft, options, family)
    _objective(draft, options, family)
    sizes = _data(draft, options, tree, config, data)
    _length(draft, options, sizes)
    _samples(draft, options, tree, config, data)
    common.note_differences(draft, family)
    if options.has("output_model_format"):
        draft.set("export.formats", ["diffusers", "comfyui"], f"{options.told('output_model_format')}: both are written")
    options.pass_by("output_model_format")
    common.carry_rest(draft, options)


def _length(draft: Draft, options: Options, sizes: int) -> None:
    """Epochs. Of several resolutions each photo has one an epoch there and all of them here."""
    epochs, told = int(options.get("epochs")), options.told("epochs")
    if sizes > 1:
        draft.note(DIFFERS, f"{options.told('resolution')}: a photo has one of them an epoch there, all of them here")
        epochs, told = max(1, round(epochs / sizes)), f"{told} / {sizes} resolutions"
    draft.set("run.epochs", epochs, told)
    draft.carry(options, "batch_size", "data.batch_size")
    draft.carry(options, "gradient_accumulation_steps", "step.accumulation")
    draft.set("step.max_grad_norm", float(options.get("clip_grad_norm") or 0), options.told("clip_grad_norm"))
    value = options.get("gradient_checkpointing")
    draft.set("memory.gradient_checkpointing", value not in (False, "OFF"), options.told("gradient_checkpointing"))
    if str(options.get("ema")) != "OFF":
        common.set_ema(draft, (options.get("ema_decay"), options.told("ema_decay")))
        every = "ema_update_step_interval"
        draft.note(DIFFERS, f"{options.told(every)}: here the average follows every update, so the same decay forgets sooner")
    options.pass_by("ema_decay", "ema_update_step_interval")
    unit = str(options.get("backup_after_unit"))
    if unit == "MINUTE":
        draft.set("checkpoint.every_minutes", float(options.get("backup_after")), options.told("backup_after"))
        draft.set("checkpoint.every_steps", 0, options.told("backup_after_unit"))
    elif unit == "STEP":
        draft.carry(options, "backup_after", "checkpoint.every_steps")
    elif unit != "NEVER":
        draft.note(
            ABSENT, f"{options.told('backup_after')} {unit}: checkpoint.every_steps counts steps; its default is taken"
        )
    options.pass_by("backup_after")


def _network(draft: Draft, options: Options, family: Family) -> None:
    kind = other_trainers.value_for(options.get("peft_type"), ("lora", "dora"))
    if kind is None:
        draft.cannot("adapter.type", f"{options.told('peft_type')}: there is none: an adapter is a LoRA or a DoRA")
    dora = bool(options.get("lora_decompose"))
    draft.set("adapter.type", "dora" if dora else "lora", options.told("lora_decompose" if dora else "peft_type"))
    names = ("lora_rank", "lora_alpha")
    common.set_scale(draft, *((options.get(name), options.told(name)) for name in names))
    common.set_targets(draft, family)
    preset, words = str(options.get("layer_filter_preset") or ""), str(options.get("layer_filter") or "")
    told = options.told("layer_filter" if words else "layer_filter_preset")
    if not words and preset:
        found = other_trainers.facts().layer_presets[family.name].get(preset)
        if found is None:
            draft.note(ABSENT, f"{told}: a preset that was not looked up; all layers are trained")
        words = found or ""
    if options.get("layer_filter_regex") and words:
        draft.cannot(
            "adapter.targets", f"{told}: a regular expression; adapter.targets takes patterns (docs/adapter_options.md)"
        )
    elif words:
        draft.set("adapter.targets", [f"*{word.strip()}*" for word in words.split(",")], told)


def _rates(draft: Draft, options: Options, family: Family) -> None:
    own = f"{family.denoiser}.learning_rate"
    name = own if options.has(own) else "learning_rate"
    scale, why = _scale(options)
    draft.set("optimizer.lr", float(options.get(name)) * scale, options.told(name) + why)
    options.pass_by("learning_rate")
    given = {
        key.partition(".")[2]: value
        for key, value in options.given.items()
        if key.startswith("optimizer.") and value is not None
    }
    options.read.update(key for key in options.given if key.startswith("optimizer."))
    kind = str(given.pop("optimizer", "ADAMW"))
    betas = [given.pop(key) for key in ("beta1", "beta2") if key in given]
    given = {key: value for key, value in given.items() if value not in common.OFF}
    told = f"optimizer = {kind}" if options.has("optimizer.optimizer") else "optimizer is left out: ADAMW there"
    common.set_optimizer(draft, kind, told, given | ({"betas": betas} if len(betas) == 2 else {}))
    warmup = "learning_rate_warmup_steps"
    common.set_schedule(
        draft, str(options.get("learning_rate_scheduler")), options.told("learning_rate_scheduler"),
        (options.get(warmup), options.told(warmup)), idle_when_constant=False,
    )  # fmt: skip
    rates = {}
    for encoder in family.text_encoders:
        rate = options.get(f"{encoder}.learning_rate")
        if options.get(f"{encoder}.train", True):
            rates[encoder] = (float(rate) * scale if rate is not None else None, options.told(f"{encoder}.train", True))
            stop = f"{encoder}.stop_training_after"
            draft.note(DIFFERS, f"{options.told(stop, 30)} epochs: a rule's stop_step counts steps, so it is not written")
            options.pass_by(stop, f"{stop}_unit")
    common.set_text_rates(draft, rates)
    if options.given.get(f"{family.denoiser}.train") is False:
        draft.cannot("adapter.targets", f"{family.denoiser}.train = false: the denoiser is always trained here")
    options.pass_by(f"{family.denoiser}.train")


def _scale(options: Options) -> tuple[float, str]:
    """learning_rate_scaler: the root of the photos in a batch, in an update, or 1."""
    kind = str(options.get("learning_rate_scaler"))
    counted = {"BATCH": ("batch_size",), "GRADIENT_ACCUMULATION": ("gradient_accumulation_steps",)}
    names = counted.get(kind, ("batch_size", "gradient_accumulation_steps") if kind == "BOTH" else ())
    product = 1
    for name in names:
        product *= int(options.get(name))
    return product**0.5, f" x sqrt({product}): {options.told('learning_rate_scaler')}" if names else ""


def _precision(draft: Draft, options: Options, family: Family) -> None:
    common.set_compute(draft, family, options.get("train_dtype"), options.told("train_dtype"))
    for part in (family.denoiser, *family.text_encoders, family.vae):
        name = f"{part}.weight_dtype"
        if options.has(name) and options.get(name) != "NONE":
            common.set_dtype(draft, part, options.get(name), options.told(name))
    if options.has("quantization.layer_filter"):
        draft.note(
            DIFFERS, f"{options.told('quantization.layer_filter')}: here all layers but the sensitive ones are quantised"
        )
    for name in ("quantization.layer_filter", "quantization.layer_filter_preset", "quantization.layer_filter_regex"):
        options.pass_by(name)
    moved = [name for name in options.given if name.endswith("offload_fraction") and options.get(name)]
    if moved:
        draft.set("memory.offload", "blocks", ", ".join(options.told(name) for name in moved))
    if options.get("compile"):
        draft.set("step.compile", "blocks", options.told("compile"))


def _objective(draft: Draft, options: Options, family: Family) -> None:
    kind, told = str(options.get("timestep_distribution")), options.told("timestep_distribution")
    bias, weight = options.get("noising_bias"), options.get("noising_weight")
    shift, dynamic = float(options.get("timestep_shift")), options.get("dynamic_timestep_shifting")
    times = other_trainers.facts().times[draft.trainer].get(kind)
    if times is None:
        draft.cannot("objective.timesteps", f"{told}: no such distribution here")
    elif kind != "UNIFORM" or "objective.shift" in family.reads:
        draft.set("objective.timesteps", times, told)
    if kind == "LOGIT_NORMAL":
        draft.set("objective.logit_mean", float(bias), options.told("noising_bias"))
        draft.set("objective.logit_std", 1.0 + float(weight), f"1 + {options.told('noising_weight')}")
    elif kind == "HEAVY_TAIL":
        draft.set("objective.mode_scale", float(weight), options.told("noising_weight"))
    if "objective.shift" in family.reads:
        name = "dynamic_timestep_shifting" if dynamic else "timestep_shift"
        draft.set("objective.shift", "auto" if dynamic else shift, options.told(name))
    low, high = options.get("min_noising_strength"), options.get("max_noising_strength")
    if low or high not in (None, 1.0):
        draft.set(
            "objective.t_range",
            [float(low or 0), float(1 if high is None else high)],
            "min_noising_strength, max_noising_strength",
        )
    weights, strength = str(options.get("loss_weight_fn")), options.get("loss_weight_strength")
    if weights in WEIGHTS:
        draft.set("objective.weighting", WEIGHTS[weights], options.told("loss_weight_fn"))
        gamma = {"MIN_SNR_GAMMA": "min_snr_gamma", "P2": "p2_gamma"}.get(weights)
        if gamma:
            draft.set(f"objective.{gamma}", float(strength), options.told("loss_weight_strength"))
    elif weights != "CONSTANT":
        draft.note(ABSENT, f"{options.told('loss_weight_fn')}: no such weighting here; all times weigh alike")
    losses = {name: options.get(name) for name in ("mse_strength", "mae_strength", "log_cosh_strength", "huber_strength")}
    if losses["huber_strength"] and not any(value for name, value in losses.items() if name != "huber_strength"):
        draft.set("objective.loss", "huber", options.told("huber_strength"))
    elif any(value for name, value in losses.items() if name != "mse_strength"):
        draft.note(ABSENT, "mae_strength and its like: one loss is trained here, the squared error")


def _data(draft: Draft, options: Options, tree: Mapping[str, Any], config: Path, data: Sequence[Path]) -> int:
    """Write sources and resolution. Returns how many resolutions there are."""
    sizes = [common.side_of(part) for part in str(options.get("resolution")).split(",")]
    draft.set("data.resolution", sizes if len(sizes) > 1 else sizes[0], options.told("resolution"))
    draft.set("data.caption_dropout", 0.0, f"{draft.trainer} drops no whole captions")
    named = str(options.get("concept_file_name"))
    concepts = tree.get("concepts")
    if not concepts:
        found = find_beside(named, config, [path for path in data if "sample" not in path.name])
        concepts = read_tree(found) if found else []
    for concept in concepts:
        table = Options(_inner(concept), {"balancing": 1.0}, prefix="concept ")
        if table.get("enabled") is not False:
            _source(draft, table)
    if not draft.sources:
        draft.sources.append({"path": (common.PHOTOS, "a stand-in: the photos' folder goes here")})
        draft.note(FILL, f"data.sources: {options.told('concept_file_name')}, not found; give it as --data")
    return len(sizes)


def _inner(concept: Mapping[str, Any]) -> dict[str, Any]:
    flat = {name: value for name, value in concept.items() if not isinstance(value, dict)}
    return flat | {f"{part}.{name}": value for part in ("image", "text") for name, value in (concept.get(part) or {}).items()}


def _source(draft: Draft, table: Options) -> None:
    path = str(table.get("path", ""))
    source: dict[str, tuple[Any, str]] = {"path": (path, table.told("path"))}
    name = "balancing" if table.has("balancing") or not table.has("repeats") else "repeats"
    repeats = float(table.get(name, 1.0))
    if str(table.get("balancing_strategy") or "REPEATS") != "REPEATS":
        draft.note(ABSENT, f"{path}: {table.told('balancing_strategy')}: a number of photos an epoch; repeats = 1 is written")
        repeats = 1.0
    elif repeats != round(repeats):
        draft.note(DIFFERS, f"{path}: {table.told(name)}: repeats are whole here; the nearest is written")
    source["repeats"] = (max(1, round(repeats)), table.told(name))
    kind = str(table.get("type") or "STANDARD")
    if kind == "VALIDATION" or table.get("validation_concept"):
        draft.note(
            ABSENT, f"{path}: photos for validation alone; data.held_out takes some of the others here. It is left out"
        )
        return
    if kind == "PRIOR_PREDICTION":
        draft.note(
            ABSENT, f"{path}: {table.told('type')}: a prior that the model itself predicts; they are plain photos here"
        )
    prompts = str(table.get("text.prompt_source") or "sample")
    source["captions"] = (PROMPTS.get(prompts, "auto"), table.told("text.prompt_source"))
    if prompts == "sample":
        source["caption_lines"] = (True, "one line of a caption file at each appearance there")
    elif prompts == "concept":
        draft.note(
            FILL,
            f"{path}: {table.told('text.prompt_path')}: one of its lines at each appearance; write a trigger, or captions",
        )
    table.pass_by("text.prompt_path")
    source["flip"] = (bool(table.get("image.enable_random_flip", True)), table.told("image.enable_random_flip", True))
    if table.get("image.enable_crop_jitter", True):
        draft.note(DIFFERS, f"{path}: {table.told('image.enable_crop_jitter', True)}: data.crop_jitter is off here")
    if table.get("loss_weight", 1.0) != 1.0:
        source["loss_weight"] = (float(table.get("loss_weight")), table.told("loss_weight"))
    if table.get("text.enable_tag_shuffling"):
        source["shuffle"] = (True, table.told("text.enable_tag_shuffling"))
    if "shuffle" in source:
        for there, here, otherwise in (("text.keep_tags_count", "keep", 1), ("text.tag_delimiter", "separator", ",")):
            value = table.get(there, otherwise)
            source[here] = (f"{value.strip()} " if here == "separator" else value, table.told(there, otherwise))
    if table.get("image.enable_resolution_override"):
        override = "image.resolution_override"
        source["resolution"] = (common.side_of(table.get(override)), table.told(override))
    draft.sources.append(source)
    idle = [key for key, value in table.rest().items() if value in (*common.OFF, 0, 0.0, "FULL", "NONE")]
    table.read.update(
        [*idle, "name", "seed", "concept_stats", "include_subdirectories", "image_variations", "text_variations"]
    )
    common.carry_rest(draft, table)


def _samples(draft: Draft, options: Options, tree: Mapping[str, Any], config: Path, data: Sequence[Path]) -> None:
    unit = str(options.get("sample_after_unit"))
    if unit == "STEP":
        draft.carry(options, "sample_after", "validation.every_steps")
    elif unit != "NEVER":
        draft.note(
            ABSENT, f"{options.told('sample_after')} {unit}: validation.every_steps counts steps; its default is taken"
        )
    options.pass_by("sample_after")
    listed = {**dict.fromkeys(LISTS), **tree}["samples"]
    if not listed:
        found = find_beside(
            str(options.get("sample_definition_file_name")), config, [path for path in data if "sample" in path.name]
        )
        listed = read_tree(found) if found else []
    names = {
        "negative_prompt": "negative",
        "width": "width",
        "height": "height",
        "seed": "seed",
        "diffusion_steps": "steps",
        "cfg_scale": "guidance",
    }
    for given in listed:
        if given.get("enabled", True):
            sample = {"prompt": (given["prompt"], "samples prompt")}
            sample |= {names[key]: (value, f"samples {key}") for key, value in given.items() if key in names and value != ""}
            draft.samples.append(sample)
