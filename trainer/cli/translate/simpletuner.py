"""What options of SimpleTuner mean: its JSON, and its list of data backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.base import other_trainers
from trainer.cli.translate import common
from trainer.cli.translate.draft import ABSENT, DIFFERS, FILL, Draft, Options
from trainer.cli.translate.reading import find_beside, read_tree
from trainer.models import Family

CAPTIONS = {"textfile": "auto", "filename": "filename", "instanceprompt": "none", "parquet": "auto", "huggingface": "auto"}
REPORTS = {"tensorboard": (True, False), "wandb": (False, True), "all": (True, True)}
# Of a backend, what has no effect on the photos that are trained.
IDLE = ("id", "type", "dataset_type", "default", "cache_dir", "cache_dir_vae", "metadata_backend", "maximum_image_size",
        "target_downsample_size", "disabled", "crop", "crop_style", "crop_aspect")  # fmt: skip


def translate(draft: Draft, tree: Mapping[str, Any], config: Path, data: Sequence[Path]) -> None:
    """Make the draft of a config. data: the list of data backends."""
    options = Options(dict(tree), other_trainers.facts().defaults[draft.trainer])
    if options.get("model_type") != "lora":
        draft.cannot("adapter.type", f"{options.told('model_type')}: there is none: an adapter is trained")
    if options.get("controlnet") or options.get("control"):
        draft.cannot("adapter.type", "controlnet: there is none: an adapter of the model itself is trained")
    family = common.set_family(draft, str(options.get("model_family")), options.told("model_family"))
    if family is None:
        return
    _path(draft, options, family)
    folder = str(options.get("output_dir"))
    common.set_run(
        draft, folder.rstrip("/").rpartition("/")[2], options.told("output_dir"), folder, options.told("output_dir")
    )
    _length(draft, options)
    _network(draft, options, family)
    _rates(draft, options)
    _precision(draft, options, family)
    _times(draft, options, family)
    _data(draft, options, config, data)
    _samples(draft, options)
    common.note_differences(draft, family)
    options.pass_by("quantize_via", "push_to_hub", "hub_model_id", "vae_batch_size")
    boards = REPORTS.get(str(options.get("report_to")), (False, False))
    draft.set("logging.tensorboard", boards[0], options.told("report_to"))
    draft.set("logging.wandb", boards[1], options.told("report_to"))
    if options.get("tread_config"):
        draft.note(ABSENT, f"{options.told('tread_config')}: some tokens skip blocks there; here all go through all blocks")
    common.carry_rest(draft, options)


def _path(draft: Draft, options: Options, family: Family) -> None:
    """The model: named, else by its flavour, else the flavour that the program takes."""
    name = "pretrained_model_name_or_path"
    if options.has(name):
        common.set_path(draft, str(options.get(name)), options.told(name))
        return
    flavours = other_trainers.facts().flavours[family.name]
    flavour = str(options.get("model_flavour") or flavours[""])
    told = options.told("model_flavour") if options.has("model_flavour") else f"model_flavour is left out: {flavour} there"
    if flavour not in flavours:
        draft.cannot("model.path", f"{told}: which model that is was not looked up")
        return
    common.set_path(draft, flavours[flavour], told)


def _length(draft: Draft, options: Options) -> None:
    steps, epochs = options.get("max_train_steps"), options.get("num_train_epochs")
    if steps and steps > 0:
        draft.set("run.max_steps", steps, options.told("max_train_steps"))
    else:
        draft.set("run.epochs", max(1, int(epochs)), options.told("num_train_epochs"))
    draft.carry(options, "seed", "run.seed")
    draft.carry(options, "train_batch_size", "data.batch_size")
    draft.carry(options, "gradient_accumulation_steps", "step.accumulation")
    draft.set("step.max_grad_norm", float(options.get("max_grad_norm")), options.told("max_grad_norm"))
    if options.get("grad_clip_method") == "value":
        draft.note(DIFFERS, f"{options.told('grad_clip_method')}: each number is clipped there, their norm here")
    draft.carry(options, "gradient_checkpointing", "memory.gradient_checkpointing")
    name = "checkpoint_step_interval" if not options.has("checkpointing_steps") else "checkpointing_steps"
    draft.carry(options, name, "checkpoint.every_steps")
    draft.set("export.every_steps", options.get(name), f"{options.told(name)}: the adapter's files, too; they stay")
    draft.carry(options, "checkpoints_total_limit", "checkpoint.keep_last")
    if options.get("use_ema"):
        common.set_ema(draft, (options.get("ema_decay", 0.995), options.told("ema_decay", 0.995)))


def _network(draft: Draft, options: Options, family: Family) -> None:
    if options.get("lora_type") != "standard":
        draft.cannot("adapter.type", f"{options.told('lora_type')}: there is none: an adapter is a LoRA or a DoRA")
    dora = bool(options.get("use_dora"))
    draft.set("adapter.type", "dora" if dora else "lora", options.told("use_dora" if dora else "lora_type"))
    rank, alpha = options.get("lora_rank"), options.get("lora_alpha")
    why = options.told("lora_alpha") if alpha is not None else "lora_alpha is left out: the rank there, too"
    common.set_scale(draft, (rank, options.told("lora_rank")), (rank if alpha is None else alpha, why))
    if not dora:
        draft.set("adapter.dropout", float(options.get("lora_dropout")), options.told("lora_dropout"))
    common.set_targets(draft, family)
    layers = other_trainers.facts().layers_option[draft.trainer]
    if options.get(layers) != "all":
        draft.cannot("adapter.targets", f"{options.told(layers)}: write the layers as patterns")


def _rates(draft: Draft, options: Options) -> None:
    rate = float(options.get("learning_rate"))
    draft.set("optimizer.lr", rate, options.told("learning_rate"))
    name = str(options.get("optimizer"))
    given: dict[str, Any] = {"weight_decay": options.get("adam_weight_decay")}
    if options.has("optimizer_beta1") and options.has("optimizer_beta2"):
        given["betas"] = [options.get("optimizer_beta1"), options.get("optimizer_beta2")]
    if options.has("adam_epsilon"):
        given["eps"] = options.get("adam_epsilon")
    common.set_optimizer(draft, name, options.told("optimizer"), given)
    schedule, warmup = str(options.get("lr_scheduler")), options.get("lr_warmup_steps")
    told = options.told("lr_scheduler")
    common.set_schedule(draft, schedule, told, (warmup, options.told("lr_warmup_steps")), idle_when_constant=True)
    if options.has("lr_end") and draft.value("schedule.name") == "polynomial":
        draft.set("schedule.end", float(options.get("lr_end")) / rate, f"{options.told('lr_end')} / learning_rate")


def _precision(draft: Draft, options: Options, family: Family) -> None:
    common.set_compute(draft, family, options.get("mixed_precision"), options.told("mixed_precision"))
    name = "base_model_precision"
    if options.get(name) != "no_change":
        common.set_dtype(draft, family.denoiser, options.get(name), options.told(name))
    for place, encoder in enumerate(family.text_encoders, start=1):
        name = f"text_encoder_{place}_precision"
        if options.get(name) not in (None, "no_change"):
            common.set_dtype(draft, encoder, options.get(name), options.told(name))


def _times(draft: Draft, options: Options, family: Family) -> None:
    told_guidance = other_trainers.facts().guidance[draft.trainer]
    names = (
        "flow_schedule_shift",
        "flow_sigmoid_scale",
        "flow_use_uniform_schedule",
        "flow_schedule_auto_shift",
        told_guidance,
    )
    shift, scale, uniform, auto, guidance = (options.get(name) for name in names)
    if not options.get("offset_noise"):
        options.pass_by("noise_offset", "noise_offset_probability")
    if "objective.shift" not in family.reads:
        return
    if options.get("flow_use_beta_schedule"):
        draft.cannot("objective.timesteps", f"{options.told('flow_use_beta_schedule')}: no such distribution here")
    draft.set(
        "objective.timesteps", "uniform" if uniform else "logit_normal", options.told("flow_use_uniform_schedule", False)
    )
    if not uniform:
        draft.set("objective.logit_std", float(scale), options.told("flow_sigmoid_scale"))
    follows = bool(auto) and not shift
    told = options.told("flow_schedule_auto_shift" if follows else "flow_schedule_shift")
    draft.set("objective.shift", "auto" if follows else float(shift or 1.0), told)
    draft.set("objective.guidance", float(guidance), options.told(told_guidance))


def _data(draft: Draft, options: Options, config: Path, data: Sequence[Path]) -> None:
    name = "caption_dropout_probability"
    draft.set("data.caption_dropout", float(options.get(name)), options.told(name))
    draft.set("data.resolution", _side(options, options), options.told("resolution"))
    for name in ("resolution_type", "aspect_bucket_alignment"):
        options.pass_by(name)
    named = options.get("data_backend_config")
    path = find_beside(str(named), config, data) if named else next(iter(data), None)
    for backend in read_tree(path) if path else ():
        if backend.get("dataset_type", "image") == "image" and not backend.get("disabled"):
            _source(draft, Options(dict(backend), options.defaults, prefix="backend "), options)
    if not draft.sources:
        draft.sources.append({"path": (common.PHOTOS, "a stand-in: the photos' folder goes here")})
        draft.note(FILL, f"data.sources: {options.told('data_backend_config')}: not found; give it as --data")


def _side(table: Options, options: Options) -> int:
    """data.resolution. "area" counts megapixels; the sides are rounded to aspect_bucket_alignment there."""
    size = float(table.get("resolution") if table.has("resolution") else options.get("resolution"))
    kind = table.get("resolution_type") if table.has("resolution_type") else options.get("resolution_type")
    if kind == "area":
        step = int(options.get("aspect_bucket_alignment"))
        return max(step, round((size * 1e6) ** 0.5 / step) * step)
    return common.side_of(size)


def _source(draft: Draft, table: Options, options: Options) -> None:
    """One backend as a source. repeats there are those beside the first appearance."""
    hub = table.get("type") == "huggingface"
    name = "dataset_name" if hub else "instance_data_dir"
    path = str(table.get(name) or common.PHOTOS)
    source: dict[str, tuple[Any, str]] = {"path": (f"hf:{path}" if hub else path, table.told(name))}
    source["repeats"] = (1 + int(table.get("repeats") or 0), f"1 + {table.told('repeats')}")
    if table.has("resolution"):
        source["resolution"] = (_side(table, options), f"{table.told('resolution')}, {table.told('resolution_type')}")
    if table.get("resolution_type") == "pixel" and not (table.get("crop") and table.get("crop_aspect", "square") == "square"):
        draft.note(
            DIFFERS, f"{path}: {table.told('resolution')} is the shorter side there, the side of a square as large here"
        )
    elif table.get("crop"):
        draft.note(DIFFERS, f"{path}: {table.told('crop')}: photos are cut to squares there, to buckets of their shapes here")
    strategy = str(table.get("caption_strategy"))
    if strategy not in CAPTIONS:
        draft.note(ABSENT, f"{path}: {table.told('caption_strategy')}: no such place of captions here; `auto` is written")
    source["captions"] = (CAPTIONS.get(strategy, "auto"), table.told("caption_strategy"))
    if strategy == "textfile":
        source["caption_lines"] = (True, "one line of a caption file at each appearance there")
    if strategy == "instanceprompt":
        source["trigger"] = (
            str(table.get("instance_prompt")),
            f"{table.told('instance_prompt')}: the caption of every photo",
        )
    if table.get("is_regularisation_data"):
        source["regularisation"] = (True, table.told("is_regularisation_data"))
    if table.get("probability") not in (None, 1, 1.0):
        draft.note(ABSENT, f"{path}: {table.told('probability')}: an epoch here has every source whole; repeats weigh them")
    draft.sources.append(source)
    table.pass_by(*IDLE, "instance_prompt", "probability", "repeats")
    common.carry_rest(draft, table)


def _samples(draft: Draft, options: Options) -> None:
    every = "validation_step_interval" if not options.has("validation_steps") else "validation_steps"
    draft.set("validation.every_steps", 0 if options.get("validation_disable") else options.get(every), options.told(every))
    draft.carry(options, "validation_num_inference_steps", "validation.steps")
    draft.carry(options, "validation_seed", "validation.seed")
    prompt, size = options.get("validation_prompt"), str(options.get("validation_resolution") or "")
    guidance, negative = options.get("validation_guidance"), options.get("validation_negative_prompt")
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
