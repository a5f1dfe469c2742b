"""Translates SimpleTuner's JSON, and its list of data backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from trainer.models import Family
from workbench.importing import common
from workbench.importing.catalogues import facts, programs
from workbench.importing.draft import ABSENT, DIFFERS, Draft, Line, Options
from workbench.importing.reading import find_beside, local_path, read_tree

CAPTIONS = {"textfile": "auto", "filename": "filename", "instanceprompt": "none", "parquet": "auto", "huggingface": "auto"}
IDLE = programs()["idle"]["SimpleTuner"].split()


def translate(draft: Draft, options: Options, config: Path, data: Sequence[Path]) -> None:
    """Fill the draft from a config. data: the list of data backends."""
    if options.word("model_type") != "lora":
        draft.refuse("adapter.type", f"{options.cite('model_type')}: there is none: an adapter is trained")
    if options.flag("controlnet") or options.flag("control"):
        draft.refuse("adapter.type", "controlnet: there is none: an adapter of the model itself is trained")
    family = common.set_family(draft, *options.line("model_family", "word"))
    if family is None:
        return
    _path(draft, options, family)
    folder, reason = options.line("output_dir", "word")
    common.set_run(draft, local_path(folder).rstrip("/").rpartition("/")[2], reason, folder, reason)
    common.carry_plain(draft, options)
    _length(draft, options)
    _network(draft, options, family, config, data)
    _rates(draft, options)
    _precision(draft, options, family)
    _times(draft, options, family)
    _data(draft, options, family, config, data)
    _samples(draft, options)
    board, reason = options.line("report_to", "word")
    for key in ("logging.tensorboard", "logging.wandb"):
        draft.set(key, board in (key.partition(".")[2], "all"), reason)
    if options.get("tread_config"):
        draft.note(ABSENT, f"{options.cite('tread_config')}: some tokens skip blocks there; here all go through all blocks")
    common.carry_rest(draft, options)


def _path(draft: Draft, options: Options, family: Family) -> None:
    name, flavours = "pretrained_model_name_or_path", facts().flavours[family.name]
    flavour = options.word("model_flavour", flavours[""])
    reason = options.cite("model_flavour", flavour)
    if flavour == family.variants.editing:
        draft.set("model.variant", flavour, reason)
    if options.has(name):
        common.set_path(draft, *options.line(name, "word"))
    elif flavour in flavours:
        common.set_path(draft, flavours[flavour], reason)
    else:
        draft.refuse("model.path", f"{reason}: which model that is was not looked up")


def _length(draft: Draft, options: Options) -> None:
    epochs, reason = options.line("num_train_epochs", "whole")
    if options.whole("max_train_steps", 0) > 0:
        draft.carry(options, "max_train_steps", "run.max_steps")
    else:
        draft.set("run.epochs", max(1, epochs), reason)
    if options.word("grad_clip_method") == "value":
        draft.note(DIFFERS, f"{options.cite('grad_clip_method')}: each number is clipped there, their norm here")
    name = options.first("checkpointing_steps", "checkpoint_step_interval")
    draft.carry(options, name, "checkpoint.every_steps")
    draft.set("export.every_steps", options.whole(name), f"{options.cite(name)}: the adapter's files, too; they stay")
    for table in ("checkpoint", "validation"):
        if options.whole(f"{table}_epoch_interval"):
            draft.in_epochs(table, *options.line(f"{table}_epoch_interval", "whole"))
    if options.flag("use_ema"):
        common.set_ema(draft, *options.line("ema_decay", "number", 0.995))


def _lycoris(draft: Draft, options: Options, config: Path, data: Sequence[Path]) -> None:
    name, reason = options.line("lycoris_config", "word", "")
    file = find_beside(name, config, [path for path in data if path.name == PurePosixPath(name).name]) if name else None
    if file is None:
        draft.refuse("adapter.type", f"{reason}: LyCORIS' own config says which kind it is: give it as --data, too")
        return
    network = Options(dict(read_tree(file)), file, {"linear_dim": 4, "linear_alpha": 1, "algo": "lora"}, "lycoris_config ")
    common.set_type(draft, *network.line("algo", "word"), network.line("dora_wd", "flag"))
    common.set_scale(draft, network.line("linear_dim", "whole"), network.line("linear_alpha", "number"))
    common.set_matrices(draft, network)
    preset, reason = network.table("apply_preset", "apply_preset "), network.cite("apply_preset")
    if layers := preset.entries("target_module"):
        draft.set("adapter.targets", "attention+mlp" if "FeedForward" in layers else "attention", reason)
    for kind in preset.get("module_algo_map") or ():
        only = "a factor or rank of its own; here one factor is for all layers"
        draft.note(ABSENT, f"{reason}, module_algo_map {kind}: {only}")
    network.ignore("multiplier", "apply_preset")
    common.carry_rest(draft, network)


def _network(draft: Draft, options: Options, family: Family, config: Path, data: Sequence[Path]) -> None:
    common.set_targets(draft, family)
    if options.word("lora_type") == "lycoris":
        _lycoris(draft, options, config, data)
        options.ignore("lora_rank", "lora_alpha", "lora_dropout", "use_dora", "lycoris_config")
        return
    (kind, reason), dora = options.line("lora_type", "word"), options.line("use_dora", "flag")
    common.set_type(draft, "lora" if kind == "standard" else "other", reason, dora)
    rank = options.line("lora_rank", "whole")
    alpha, reason = options.line("lora_alpha", "number", rank[0])
    reason = reason if options.has("lora_alpha") else "lora_alpha is left out: the rank there, too"
    common.set_scale(draft, rank, (alpha, reason))
    if not dora[0]:
        draft.carry(options, "lora_dropout", "adapter.dropout", "number")
    layers = facts().layers_option[draft.trainer]
    if options.word(layers) != "all":
        draft.refuse("adapter.targets", f"{options.cite(layers)}: write the layers as patterns")


def _rates(draft: Draft, options: Options) -> None:
    rate, reason = options.line("learning_rate", "number")
    draft.set("optimizer.lr", rate, reason)
    arguments: dict[str, Any] = {"weight_decay": options.number("adam_weight_decay")}
    if options.has("optimizer_beta1") and options.has("optimizer_beta2"):
        arguments["betas"] = [options.number("optimizer_beta1"), options.number("optimizer_beta2")]
    if options.has("adam_epsilon"):
        arguments["eps"] = options.number("adam_epsilon")
    common.set_optimizer(draft, *options.line("optimizer", "word"), Options(arguments, options.file))
    warmup = options.line("lr_warmup_steps", "number")
    common.set_schedule(draft, *options.line("lr_scheduler", "word"), warmup, idle_when_constant=True)
    if options.has("lr_end") and rate and draft.value("schedule.name") == "polynomial":
        draft.set("schedule.end", options.number("lr_end") / rate, f"{options.cite('lr_end')} / learning_rate")


def _precision(draft: Draft, options: Options, family: Family) -> None:
    common.set_compute(draft, family, *options.line("mixed_precision", "word"))
    encoders = {f"text_encoder_{place}_precision": name for place, name in enumerate(family.text_encoders, start=1)}
    for name, component in {"base_model_precision": family.denoiser, **encoders}.items():
        if options.word(name, "no_change") != "no_change":
            common.set_dtype(draft, component, *options.line(name, "word"))


def _times(draft: Draft, options: Options, family: Family) -> None:
    numbers = ("flow_schedule_shift", "flow_sigmoid_scale", facts().guidance[draft.trainer])
    shift, scale, guidance = (options.line(name, "number") for name in numbers)
    uniform, auto = (options.line(f"flow_{name}", "flag") for name in ("use_uniform_schedule", "schedule_auto_shift"))
    if not options.flag("offset_noise"):
        options.ignore("noise_offset", "noise_offset_probability")
    if "objective.shift" not in family.reads:
        return
    if options.flag("flow_use_beta_schedule"):
        draft.refuse("objective.timesteps", f"{options.cite('flow_use_beta_schedule')}: no such distribution here")
    reason = options.cite("flow_use_uniform_schedule", False)
    draft.set("objective.timesteps", "uniform" if uniform[0] else "logit_normal", reason)
    if not uniform[0]:
        draft.set("objective.logit_std", *scale)
    follows = auto[0] and not shift[0]
    draft.set("objective.shift", *(("auto", auto[1]) if follows else (shift[0] or 1.0, shift[1])))
    if "objective.guidance" in family.reads or options.has(facts().guidance[draft.trainer]):
        draft.set("objective.guidance", *guidance)


def _data(draft: Draft, options: Options, family: Family, config: Path, data: Sequence[Path]) -> None:
    draft.set("data.resolution", _side(options, options), options.cite("resolution"))
    file = options.word("data_backend_config")
    path = find_beside(file, config, data) if file else next(iter(data), None)
    tree = Options({"backends": read_tree(path) if path else []}, path or config)
    backends = tree.tables("backends", "backend ", options.defaults)
    editing = family.variants.editing
    edits = "data.sources.*.references" in family.reads and (not editing or draft.value("model.variant") == editing)
    references = [table for table in backends if edits and str(table.get("conditioning_type")).startswith("reference")]
    folders = {table.word("id"): table.line("instance_data_dir", "word") for table in references}
    for backend in backends:
        if backend.word("dataset_type", "image") == "image" and not backend.flag("disabled") and backend not in references:
            _source(draft, backend, options, folders)
    if not draft.sources:
        common.ask_for_photos(draft, f"{options.cite('data_backend_config')}: not found; give it as --data")


def _side(table: Options, options: Options) -> int:
    """The value of data.resolution. "area" is in megapixels, rounded to aspect_bucket_alignment."""
    sizes, types = (table if table.has(name) else options for name in ("resolution", "resolution_type"))
    if types.word("resolution_type") == "area":
        step = options.whole("aspect_bucket_alignment", least=1)
        return max(step, round((sizes.number("resolution", least=0) * 1e6) ** 0.5 / step) * step)
    return common.side_of(sizes, "resolution")


def _source(draft: Draft, table: Options, options: Options, references: Mapping[str, Line]) -> None:
    """Add a backend as a source; repeats there exclude the first appearance. references: (folder, reason) by id."""
    hub = table.word("type") == "huggingface"
    name = "dataset_name" if hub else "instance_data_dir"
    path = table.word(name, common.PHOTOS)
    source: dict[str, Line] = {"path": (f"hf:{path}" if hub else path, table.cite(name))}
    source["repeats"] = (1 + table.whole("repeats"), f"1 + {table.cite('repeats')}")
    if table.has("resolution"):
        source["resolution"] = (_side(table, options), f"{table.cite('resolution')}, {table.cite('resolution_type')}")
    crop = table.flag("crop")
    if table.has("crop") and not crop:
        draft.set("data.crop", "none", table.cite("crop"))
    if table.word("resolution_type") == "pixel" and not (crop and table.word("crop_aspect", "square") == "square"):
        shorter = "is the shorter side there, the side of a square as large here"
        draft.note(DIFFERS, f"{path}: {table.cite('resolution')} {shorter}")
    elif crop:
        draft.note(DIFFERS, f"{path}: {table.cite('crop')}: photos are cut to squares there, to buckets of their shapes here")
    strategy, reason = table.line("caption_strategy", "word")
    if strategy not in CAPTIONS:
        draft.note(ABSENT, f"{path}: {reason}: no such place of captions here; `auto` is written")
    source["captions"] = (CAPTIONS.get(strategy, "auto"), reason)
    if strategy == "textfile":
        source["caption_lines"] = (True, "one line of a caption file at each appearance there")
    if strategy == "instanceprompt":
        trigger, reason = table.line("instance_prompt", "word")
        source["trigger"] = (trigger or "", f"{reason}: the caption of every photo")
    images = [references[name] for name in table.entries("conditioning_data") if name in references]
    if images:
        folders = [folder for folder, _ in images]
        source["references"] = (folders if len(folders) > 1 else folders[0], "; ".join(reason for _, reason in images))
    sampling = "conditioning_multidataset_sampling"
    if len(images) > 1 and options.word(sampling, "random") == "random":
        reason = options.cite(sampling, "random")
        draft.note(DIFFERS, f"{path}: {reason}: one of its {len(images)} references at a time there, all of them here")
    if table.flag("is_regularisation_data"):
        source["regularisation"] = (True, table.cite("is_regularisation_data"))
    if table.number("probability", 1) != 1:
        draft.note(ABSENT, f"{path}: {table.cite('probability')}: an epoch here has every source whole; repeats weigh them")
    draft.sources.append(source)
    table.ignore(*IDLE, "instance_prompt", "probability", "repeats")
    common.carry_rest(draft, table)


def _samples(draft: Draft, options: Options) -> None:
    every, reason = options.line(options.first("validation_steps", "validation_step_interval"), "whole")
    if options.flag("validation_disable"):
        draft.set("validation.every_steps", 0, options.cite("validation_disable"))
        draft.keys.pop("validation.every_epochs", None)
    elif "validation.every_epochs" not in draft.keys:
        draft.set("validation.every_steps", every, reason)
    prompt, (size, reason) = options.word("validation_prompt"), options.line("validation_resolution", "word")
    guidance, negative = options.line("validation_guidance", "number"), options.line("validation_negative_prompt", "word")
    if not prompt:
        return
    sample = {"prompt": (prompt, "validation_prompt"), "guidance": guidance}
    sides = (size or "").split(",")[0].lower().split("x")
    if all(side.isdigit() for side in sides):
        sample |= {"width": (int(sides[0]), reason), "height": (int(sides[-1]), reason)}
    if negative[0]:
        sample["negative"] = negative
    if (cfg := options.line("validation_guidance_real", "number"))[0] not in (None, 1, 1.0):
        sample["cfg"] = cfg
    draft.samples.append(sample)
