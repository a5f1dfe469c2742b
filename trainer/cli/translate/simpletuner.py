"""What options of SimpleTuner mean: its JSON, and its list of data backends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.base import other_trainers
from trainer.cli.translate import common
from trainer.cli.translate.draft import ABSENT, DIFFERS, FILL, Draft, Options
from trainer.cli.translate.reading import find_beside, path_here, read_tree
from trainer.models import Family

CAPTIONS = {"textfile": "auto", "filename": "filename", "instanceprompt": "none", "parquet": "auto", "huggingface": "auto"}
REPORTS = {"tensorboard": (True, False), "wandb": (False, True), "all": (True, True)}
# Of a backend, what has no effect on the photos that are trained.
IDLE = ("id", "type", "dataset_type", "default", "cache_dir", "cache_dir_vae", "metadata_backend", "maximum_image_size",
        "target_downsample_size", "disabled", "crop", "crop_style", "crop_aspect")  # fmt: skip


def translate(draft: Draft, options: Options, config: Path, data: Sequence[Path]) -> None:
    """Make the draft of a config. data: the list of data backends."""
    if options.word("model_type") != "lora":
        draft.cannot("adapter.type", f"{options.told('model_type')}: there is none: an adapter is trained")
    if options.flag("controlnet") or options.flag("control"):
        draft.cannot("adapter.type", "controlnet: there is none: an adapter of the model itself is trained")
    family = common.set_family(draft, options.word("model_family"), options.told("model_family"))
    if family is None:
        return
    _path(draft, options, family)
    folder, told = options.word("output_dir"), options.told("output_dir")
    common.set_run(draft, path_here(folder).rstrip("/").rpartition("/")[2], told, folder, told)
    _length(draft, options)
    _network(draft, options, family)
    _rates(draft, options)
    _precision(draft, options, family)
    _times(draft, options, family)
    _data(draft, options, config, data)
    _samples(draft, options)
    common.note_differences(draft, family)
    options.pass_by("quantize_via", "push_to_hub", "hub_model_id", "vae_batch_size")
    boards = REPORTS.get(options.word("report_to"), (False, False))
    draft.set("logging.tensorboard", boards[0], options.told("report_to"))
    draft.set("logging.wandb", boards[1], options.told("report_to"))
    if options.get("tread_config"):
        draft.note(ABSENT, f"{options.told('tread_config')}: some tokens skip blocks there; here all go through all blocks")
    common.carry_rest(draft, options)


def _path(draft: Draft, options: Options, family: Family) -> None:
    """The model: named, else by its flavour, else the flavour that the program takes."""
    name = "pretrained_model_name_or_path"
    if options.has(name):
        common.set_path(draft, options.word(name), options.told(name))
        return
    flavours = other_trainers.facts().flavours[family.name]
    flavour = options.word("model_flavour", flavours[""])
    told = options.told("model_flavour") if options.has("model_flavour") else f"model_flavour is left out: {flavour} there"
    if flavour not in flavours:
        draft.cannot("model.path", f"{told}: which model that is was not looked up")
        return
    common.set_path(draft, flavours[flavour], told)


def _length(draft: Draft, options: Options) -> None:
    steps, epochs = options.whole("max_train_steps", 0), options.whole("num_train_epochs")
    if steps > 0:
        draft.set("run.max_steps", steps, options.told("max_train_steps"))
    else:
        draft.set("run.epochs", max(1, epochs), options.told("num_train_epochs"))
    draft.carry(options, "seed", "run.seed")
    draft.carry(options, "train_batch_size", "data.batch_size")
    draft.carry(options, "gradient_accumulation_steps", "step.accumulation")
    draft.set("step.max_grad_norm", float(options.number("max_grad_norm")), options.told("max_grad_norm"))
    if options.word("grad_clip_method") == "value":
        draft.note(DIFFERS, f"{options.told('grad_clip_method')}: each number is clipped there, their norm here")
    name = "gradient_checkpointing"
    draft.set("memory.gradient_checkpointing", options.flag(name), options.told(name))
    name = "checkpoint_step_interval" if not options.has("checkpointing_steps") else "checkpointing_steps"
    draft.carry(options, name, "checkpoint.every_steps")
    draft.set("export.every_steps", options.whole(name), f"{options.told(name)}: the adapter's files, too; they stay")
    for name, key in (("checkpoint_epoch_interval", "checkpoint"), ("validation_epoch_interval", "validation")):
        if options.whole(name):
            draft.epochs[f"{key}.every_steps"] = (options.whole(name), options.told(name))
    draft.carry(options, "checkpoints_total_limit", "checkpoint.keep_last")
    if options.flag("use_ema"):
        common.set_ema(draft, (options.number("ema_decay", 0.995), options.told("ema_decay", 0.995)))


def _network(draft: Draft, options: Options, family: Family) -> None:
    if options.word("lora_type") != "standard":
        draft.cannot("adapter.type", f"{options.told('lora_type')}: there is none: an adapter is a LoRA or a DoRA")
    dora = options.flag("use_dora")
    draft.set("adapter.type", "dora" if dora else "lora", options.told("use_dora" if dora else "lora_type"))
    rank = options.whole("lora_rank")
    alpha = float(options.number("lora_alpha", rank))
    why = options.told("lora_alpha") if options.has("lora_alpha") else "lora_alpha is left out: the rank there, too"
    common.set_scale(draft, (rank, options.told("lora_rank")), (alpha, why))
    if not dora:
        draft.set("adapter.dropout", float(options.number("lora_dropout")), options.told("lora_dropout"))
    common.set_targets(draft, family)
    layers = other_trainers.facts().layers_option[draft.trainer]
    if options.word(layers) != "all":
        draft.cannot("adapter.targets", f"{options.told(layers)}: write the layers as patterns")


def _rates(draft: Draft, options: Options) -> None:
    rate = float(options.number("learning_rate"))
    draft.set("optimizer.lr", rate, options.told("learning_rate"))
    given: dict[str, Any] = {"weight_decay": options.number("adam_weight_decay")}
    if options.has("optimizer_beta1") and options.has("optimizer_beta2"):
        given["betas"] = [options.number("optimizer_beta1"), options.number("optimizer_beta2")]
    if options.has("adam_epsilon"):
        given["eps"] = options.number("adam_epsilon")
    common.set_optimizer(draft, options.word("optimizer"), options.told("optimizer"), Options(given, options.file))
    schedule, warmup = options.word("lr_scheduler"), options.number("lr_warmup_steps")
    told = options.told("lr_scheduler")
    common.set_schedule(draft, schedule, told, (warmup, options.told("lr_warmup_steps")), idle_when_constant=True)
    if options.has("lr_end") and rate and draft.value("schedule.name") == "polynomial":
        draft.set("schedule.end", options.number("lr_end") / rate, f"{options.told('lr_end')} / learning_rate")


def _precision(draft: Draft, options: Options, family: Family) -> None:
    common.set_compute(draft, family, options.word("mixed_precision"), options.told("mixed_precision"))
    name = "base_model_precision"
    if options.word(name) != "no_change":
        common.set_dtype(draft, family.denoiser, options.word(name), options.told(name))
    for place, encoder in enumerate(family.text_encoders, start=1):
        name = f"text_encoder_{place}_precision"
        if options.word(name, "no_change") != "no_change":
            common.set_dtype(draft, encoder, options.word(name), options.told(name))


def _times(draft: Draft, options: Options, family: Family) -> None:
    told_guidance = other_trainers.facts().guidance[draft.trainer]
    numbers = ("flow_schedule_shift", "flow_sigmoid_scale", told_guidance)
    shift, scale, guidance = (options.number(name) for name in numbers)
    uniform, auto = (options.flag(name) for name in ("flow_use_uniform_schedule", "flow_schedule_auto_shift"))
    if not options.flag("offset_noise"):
        options.pass_by("noise_offset", "noise_offset_probability")
    if "objective.shift" not in family.reads:
        return
    if options.flag("flow_use_beta_schedule"):
        draft.cannot("objective.timesteps", f"{options.told('flow_use_beta_schedule')}: no such distribution here")
    draft.set(
        "objective.timesteps", "uniform" if uniform else "logit_normal", options.told("flow_use_uniform_schedule", False)
    )
    if not uniform:
        draft.set("objective.logit_std", float(scale), options.told("flow_sigmoid_scale"))
    follows = auto and not shift
    told = options.told("flow_schedule_auto_shift" if follows else "flow_schedule_shift")
    draft.set("objective.shift", "auto" if follows else float(shift or 1.0), told)
    draft.set("objective.guidance", float(guidance), options.told(told_guidance))


def _data(draft: Draft, options: Options, config: Path, data: Sequence[Path]) -> None:
    name = "caption_dropout_probability"
    draft.set("data.caption_dropout", float(options.number(name)), options.told(name))
    draft.set("data.resolution", _side(options, options), options.told("resolution"))
    for name in ("resolution_type", "aspect_bucket_alignment"):
        options.pass_by(name)
    named = options.word("data_backend_config")
    path = find_beside(named, config, data) if named else next(iter(data), None)
    listed = Options({"backends": read_tree(path) if path else []}, path or config)
    for backend in listed.tables("backends", "backend ", options.defaults):
        if backend.word("dataset_type", "image") == "image" and not backend.flag("disabled"):
            _source(draft, backend, options)
    if not draft.sources:
        draft.sources.append({"path": (common.PHOTOS, "a stand-in: the photos' folder goes here")})
        draft.note(FILL, f"data.sources: {options.told('data_backend_config')}: not found; give it as --data")


def _side(table: Options, options: Options) -> int:
    """data.resolution. "area" counts megapixels; the sides are rounded to aspect_bucket_alignment there."""
    sized, typed = (table if table.has(name) else options for name in ("resolution", "resolution_type"))
    if typed.word("resolution_type") == "area":
        step = options.whole("aspect_bucket_alignment", least=1)
        return max(step, round((sized.number("resolution", least=0) * 1e6) ** 0.5 / step) * step)
    return common.side_of(sized, "resolution")


def _source(draft: Draft, table: Options, options: Options) -> None:
    """One backend as a source. repeats there are those beside the first appearance."""
    hub = table.word("type") == "huggingface"
    name = "dataset_name" if hub else "instance_data_dir"
    path = table.word(name, common.PHOTOS)
    source: dict[str, tuple[Any, str]] = {"path": (f"hf:{path}" if hub else path, table.told(name))}
    source["repeats"] = (1 + table.whole("repeats"), f"1 + {table.told('repeats')}")
    if table.has("resolution"):
        source["resolution"] = (_side(table, options), f"{table.told('resolution')}, {table.told('resolution_type')}")
    crop = table.flag("crop")
    if table.word("resolution_type") == "pixel" and not (crop and table.word("crop_aspect", "square") == "square"):
        draft.note(
            DIFFERS, f"{path}: {table.told('resolution')} is the shorter side there, the side of a square as large here"
        )
    elif crop:
        draft.note(DIFFERS, f"{path}: {table.told('crop')}: photos are cut to squares there, to buckets of their shapes here")
    strategy = table.word("caption_strategy")
    if strategy not in CAPTIONS:
        draft.note(ABSENT, f"{path}: {table.told('caption_strategy')}: no such place of captions here; `auto` is written")
    source["captions"] = (CAPTIONS.get(strategy, "auto"), table.told("caption_strategy"))
    if strategy == "textfile":
        source["caption_lines"] = (True, "one line of a caption file at each appearance there")
    if strategy == "instanceprompt":
        source["trigger"] = (
            table.word("instance_prompt", ""),
            f"{table.told('instance_prompt')}: the caption of every photo",
        )
    if table.flag("is_regularisation_data"):
        source["regularisation"] = (True, table.told("is_regularisation_data"))
    if table.number("probability", 1) != 1:
        draft.note(ABSENT, f"{path}: {table.told('probability')}: an epoch here has every source whole; repeats weigh them")
    draft.sources.append(source)
    table.pass_by(*IDLE, "instance_prompt", "probability", "repeats")
    common.carry_rest(draft, table)


def _samples(draft: Draft, options: Options) -> None:
    every = "validation_step_interval" if not options.has("validation_steps") else "validation_steps"
    draft.set(
        "validation.every_steps", 0 if options.flag("validation_disable") else options.whole(every), options.told(every)
    )
    draft.carry(options, "validation_num_inference_steps", "validation.steps")
    draft.carry(options, "validation_seed", "validation.seed")
    prompt, size = options.word("validation_prompt"), options.word("validation_resolution", "")
    guidance, negative = options.number("validation_guidance"), options.word("validation_negative_prompt")
    if not prompt:
        return
    sample = {"prompt": (prompt, "validation_prompt"), "guidance": (float(guidance), options.told("validation_guidance"))}
    sides = size.split(",")[0].lower().split("x")
    if all(side.isdigit() for side in sides):
        told = options.told("validation_resolution")
        sample |= {"width": (int(sides[0]), told), "height": (int(sides[-1]), told)}
    if negative:
        sample["negative"] = (negative, options.told("validation_negative_prompt"))
    draft.samples.append(sample)
