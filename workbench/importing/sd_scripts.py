"""Translates sd-scripts' TOML or command line, and its TOML of data."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.base import other_trainers
from trainer.base.errors import UserError
from trainer.data.images.kinds import CAPTIONS, IMAGES, TABLES
from trainer.data.layouts.folder import KOHYA_NAME
from trainer.models import Family
from trainer.plan.requirements import CFG
from workbench.importing import common
from workbench.importing.catalogues import facts, programs
from workbench.importing.draft import ABSENT, DIFFERS, FILL, SAME, Draft, Line, Options
from workbench.importing.reading import find_beside, literal, local_path, prompt_line, read_text, read_tree

# Options of a subset, and their keys in a source.
SUBSET = programs()["sd_scripts_subset"]
BY_TAGS = ("keep_tokens", "keep_tokens_separator", "caption_separator")  # read only where tags are shuffled or dropped
OF_SUBSETS = programs()["idle"]["sd-scripts"].split()  # noted for each subset that they apply to, not for its dataset
FLAGS = programs()["sd_scripts_flags"]
SEVERAL = ("network_args", "optimizer_args", "lr_scheduler_args", "text_encoder_lr")  # lists; without a value: empty


def translate(draft: Draft, tree: Options, config: Path, data: Sequence[Path]) -> None:
    """Fill the draft from a flat or sectioned config of sd-scripts. config: its path. data: further files."""
    base = _config_file(tree, config, data)
    options = _flat(tree, base)
    data = [path for path in data if path != base.file]
    family = _family(draft, options)
    if family is None:
        return
    common.set_path(draft, *options.line("pretrained_model_name_or_path", "word"))
    common.set_run(draft, *options.line("output_name", "word"), *options.line("output_dir", "word"))
    common.carry_plain(draft, options)
    _length(draft, options)
    _network(draft, options, family)
    _rates(draft, options, family)
    _precision(draft, options, family)
    _objective(draft, options, family)
    _data(draft, options, config, data)
    _intervals(draft, options, family, config, data)
    common.carry_rest(draft, options)


def _config_file(tree: Options, config: Path, data: Sequence[Path]) -> Options:
    """The options in the file of --config_file, else `tree`. Raises UserError if the file is not found."""
    name = tree.word("config_file")
    if not name:
        return tree
    name = name if name.endswith(".toml") else f"{name}.toml"
    path = find_beside(name, config, [path for path in data if name.endswith(path.name)])
    if path is None:
        raise UserError(f"{config}: {tree.cite('config_file')}: not found, and options stand in it; give it as --data")
    return Options({"options": read_tree(path)}, path).table("options")


def _flat(tree: Options, base: Options) -> Options:
    """The options in one table; the command line overrides --config_file."""
    flat: dict[str, Any] = {}
    values = {name: [] if value is True and name in SEVERAL else value for name, value in tree.values.items()}
    for name, value in [*base.values.items(), *values.items()]:
        flat |= value if isinstance(value, dict) else {name: value}
    return replace(tree, values=flat, file=tree.file if base is tree else f"{tree.file}, with {base.file}")


def _family(draft: Draft, options: Options) -> Family | None:
    """The family by the script's name, else by the network's module, else by the model's type or path."""
    script, module = options.word("script", ""), options.word("network_module", "")
    if script:
        return common.set_family(draft, script, f"{script}.py")
    if other_trainers.value_for(module, common.FAMILIES):
        return common.set_family(draft, module, options.cite("network_module"))
    option = options.first("model_train_type", "pretrained_model_name_or_path")
    unknown = "the config does not say which script it is for, so not which model"
    reason = options.cite(option) if options.has(option) else unknown
    return common.set_family(draft, None, reason, options.word(option, ""))


def _length(draft: Draft, options: Options) -> None:
    if options.whole("max_train_epochs"):
        draft.carry(options, "max_train_epochs", "run.epochs")
    else:
        draft.carry(options, "max_train_steps", "run.max_steps")
    if not options.has("seed"):
        draft.note(DIFFERS, "seed is left out: another one each time there, 0 here")


def _network(draft: Draft, options: Options, family: Family) -> None:
    network = _arguments(options, "network_args", "network_args ")
    algorithm = network.word("algo", "lora" if "lora" in options.word("network_module", "lora") else "other")
    reason = network.cite("algo", None if algorithm == "other" else "lora")
    common.set_type(draft, algorithm, reason, network.line("dora_wd", "flag"))
    common.set_scale(draft, options.line("network_dim", "whole"), options.line("network_alpha", "number"))
    common.set_targets(draft, family)
    if network.whole("conv_dim"):
        common.add_conv_rule(draft, family, network.line("conv_dim", "whole"), network.line("conv_alpha", "number", 1))
    common.set_matrices(draft, network)
    for name in ("rank_dropout", "module_dropout"):
        common.carry_dropout(draft, network, name, f"adapter.{name}")
    common.carry_rest(draft, network)


def _arguments(options: Options, name: str, prefix: str) -> Options:
    """The `key=value` pairs of an option, in one text or a list; values are numbers, truth values, lists or text."""
    texts = [part for entry in options.entries(name) for part in re.split(r"\s+(?=\w+\s*=)", str(entry).strip())]
    pairs = (text.partition("=") for text in texts)
    return Options({key.strip(): _value(value) for key, _, value in pairs}, options.file, prefix=prefix)


def _rates(draft: Draft, options: Options, family: Family) -> None:
    draft.carry(options, options.first("unet_lr", "learning_rate"), "optimizer.lr", "number")
    kind = "optimizer_type"
    common.set_optimizer(draft, options.word(kind) or "AdamW", options.cite(kind), _arguments(options, "optimizer_args", ""))
    schedule, warmup = options.line("lr_scheduler", "word"), options.line("lr_warmup_steps", "steps")
    common.set_schedule(draft, *schedule, warmup, idle_when_constant=True)
    if options.flag("network_train_text_encoder_only"):
        draft.refuse("adapter.targets", "network_train_text_encoder_only: the denoiser is always trained here")
    name = options.first("text_encoder_lr", "learning_rate")
    lrs = options.numbers(name) or options.numbers("learning_rate")
    # T5 alone is not trained by default there.
    clips = [name for name in family.text_encoders if family.component(name).class_name.startswith("CLIP")]
    if not options.flag("network_train_unet_only"):
        reason = f"{options.cite(name)}; network_train_unet_only is left out"
        rates = {name: (float(lrs[min(place, len(lrs) - 1)]), reason) for place, name in enumerate(clips)}
        common.set_text_rates(draft, {name: rate for name, rate in rates.items() if rate[0] > 0})


def _value(text: str) -> Any:
    return [literal(part.strip("()[] ")) for part in text.split(",") if part.strip("()[] ")] if "," in text else literal(text)


def _precision(draft: Draft, options: Options, family: Family) -> None:
    for name in ("fp8_base", "fp8_base_unet"):
        if options.flag(name):
            common.set_dtype(draft, family.denoiser, "float8", options.cite(name))
    common.set_compute(draft, family, *options.line("mixed_precision", "word"), stores=True)


def _objective(draft: Draft, options: Options, family: Family) -> None:
    low, high = options.number("min_timestep"), options.number("max_timestep")
    if low or high:
        reason = " and ".join(options.cite(name) for name in ("min_timestep", "max_timestep") if options.has(name))
        draft.set("objective.t_range", [(low or 0) / 1000, (1000 if high is None else high) / 1000], f"{reason}, of 1000")
    sampling, scheme = options.word("timestep_sampling"), options.word("weighting_scheme")
    scale, shift = options.line("sigmoid_scale", "number"), options.line("discrete_flow_shift", "number")
    (predicted, reason), guidance = options.line("model_prediction_type", "word"), options.line("guidance_scale", "number")
    if "objective.shift" not in family.reads:
        return
    _times(draft, options, sampling, scheme, scale, shift)
    draft.set("objective.guidance", *guidance)
    if predicted != "raw":
        draft.note(DIFFERS, f"{reason}: the velocity itself is trained here, as with raw there")


def _times(draft: Draft, options: Options, sampling: str, scheme: str, scale: Line, shift: Line) -> None:
    """Set the distribution of times. With `sigma` the scheme draws u, which counts from noise to photo there."""
    reason, scheme_reason = options.cite("timestep_sampling"), options.cite("weighting_scheme")
    if sampling == "sigma":
        times = {"none": "uniform", "logit_normal": "logit_normal", "mode": "mode"}.get(scheme)
        if times is None:
            draft.note(ABSENT, f"{scheme_reason}: it weighs the loss there; uniform times are drawn here")
        if times == "logit_normal" and options.has("logit_mean"):
            mean, mean_reason = options.line("logit_mean", "number")
            draft.set("objective.logit_mean", -mean, f"{mean_reason}: the other sign")
        times, reason = times or "uniform", f"{reason}, {scheme_reason}"
        draft.set("objective.shift", *shift)
    else:
        times = facts().times[draft.trainer].get(sampling)
        if times is None:
            draft.refuse("objective.timesteps", f"{reason}: no such distribution here")
            return
        if times != "uniform":
            draft.set("objective.logit_std", *scale)
        if sampling == "uniform":
            draft.set("objective.shift", 1.0, f"{reason}: not shifted")
        elif sampling == "shift":
            draft.set("objective.shift", *shift)
    draft.set("objective.timesteps", times, reason)


def _data(draft: Draft, options: Options, config: Path, data: Sequence[Path]) -> None:
    if options.has("resolution"):
        draft.set("data.resolution", common.side_of(options, "resolution"), options.cite("resolution"))
    for name, (_, kind) in SUBSET.items():
        getattr(options, kind)(name)  # read again for each source that does not set them
    draft.carry(options, "caption_dropout_rate", "data.caption_dropout", "number")
    if options.flag("weighted_captions"):
        draft.set("data.weighted_captions", True, options.cite("weighted_captions"))
    if options.whole("max_token_length"):
        chunks = math.ceil(options.whole("max_token_length", least=1) / 75)
        draft.set("data.clip_chunks", chunks, f"{options.cite('max_token_length')}, in chunks of 75")
    file = options.word("dataset_config")
    path = find_beside(file, config, data) if file else next(iter(data), None)
    if path is not None:
        tree = Options({"data": read_tree(path)}, path).table("data")
        for dataset in tree.tables("datasets", "datasets "):
            _dataset(draft, options, replace(dataset, values={**tree.table("general").values, **dataset.values}))
    elif options.has("train_data_dir"):
        for name in filter(options.has, ("train_data_dir", "reg_data_dir")):
            folder = {"image_dir": options.word(name), "is_reg": name == "reg_data_dir"}
            _source(draft, options, replace(options, values=folder), {}, numbered=name)
    else:
        missing = f"{options.cite('dataset_config')}: not found; give it as --data"
        common.ask_for_photos(draft, missing if file else "no folder of photos is named")


def _dataset(draft: Draft, options: Options, table: Options) -> None:
    """Apply one [[datasets]]: batch size and resolution for all of its subsets, then a source for each."""
    subsets = table.tables("subsets", "subset ")
    if not subsets:
        raise table.error("subsets", "a list of tables, each with its image_dir")
    if table.has("batch_size"):
        if draft.sources and draft.keys["data.batch_size"][0] != table.whole("batch_size"):
            draft.note(ABSENT, f"{table.cite('batch_size')}: one batch size is for all sources here")
        else:
            draft.carry(table, "batch_size", "data.batch_size")
    for subset in subsets:
        _source(draft, options, subset, table.values, numbered="")
    table.ignore(*SUBSET, *OF_SUBSETS, "resolution", "num_repeats", "batch_size")
    common.carry_rest(draft, table)


def _source(draft: Draft, options: Options, subset: Options, dataset: Mapping[str, Any], *, numbered: str) -> None:
    """Add a subset as a source. dataset: its defaults, before the options. numbered: the option that names a kohya folder."""
    names = (*SUBSET, *OF_SUBSETS, "num_repeats", "resolution", "class_tokens", "alpha_mask")
    defaults = {name: value for name, value in {**options.values, **dataset}.items() if name in names}
    table = Options({**defaults, **subset.values}, subset.file, {"num_repeats": 1}, prefix="" if numbered else "subset ")
    path = table.word("image_dir", "")
    source: dict[str, Line] = {"path": (path, options.cite(numbered) if numbered else table.cite("image_dir"))}
    if not numbered:
        repeats, reason = table.line("num_repeats", "whole")
        if match := KOHYA_NAME.fullmatch(common.folder_name(path)):
            quotient, rest = divmod(repeats, int(match[1]))
            if rest:
                counts = "the folder's number counts as repeats here, not there"
                draft.note(FILL, f"{path}: {counts}; rename the folder to train {repeats}")
            repeats, reason = repeats if rest else quotient, f"{reason}, over the folder's {match[1]}"
        source["repeats"] = (max(1, repeats), reason)
    if table.has("resolution") and not options.has("resolution"):
        source["resolution"] = (common.side_of(table, "resolution"), table.cite("resolution"))
    by_tags = table.flag("shuffle_caption") or table.number("caption_tag_dropout_rate")
    for name, (key, kind) in SUBSET.items():
        value, reason = table.line(name, kind)
        if value and (by_tags or name not in BY_TAGS) and value != draft.value(f"data.{key}"):
            source[key] = (f"{value.strip()} " if key == "separator" else value, reason)
        elif value and name in BY_TAGS and not by_tags and table.has(name):
            draft.note(SAME, f"{reason}: read only where tags are shuffled or dropped, there too")
    if options.flag("masked_loss"):
        alpha = ("alpha", table.cite("alpha_mask")) if table.flag("alpha_mask") else None
        source["masks"] = alpha or table.line("conditioning_data_dir", "word")
    if table.flag("is_reg"):
        source["regularisation"] = (True, table.cite("is_reg"))
        source["loss_weight"] = options.line("prior_loss_weight", "number")
        draft.note(DIFFERS, f"{path}: regularisation photos are repeated there until they are as many as the others")
    if table.has("class_tokens"):
        source["trigger"] = (table.word("class_tokens"), f"{table.cite('class_tokens')}: put before captions without it, too")
    elif words := _words_of(local_path(path)) if numbered and path and not table.flag("is_reg") else "":
        source["trigger"] = words, "the words of its folder; no photo has a caption"
    if not table.flag("enable_bucket") and not options.flag("enable_bucket"):
        draft.note(DIFFERS, "enable_bucket is left out: photos are cut to one shape there, to buckets of their shapes here")
    draft.sources.append(source)
    common.carry_rest(draft, table)


def _words_of(folder: str) -> str:
    """The one caption in the names of its kohya folders; "" if there are several, or captions in files."""
    files = [(file.suffix.lower(), KOHYA_NAME.fullmatch(file.parent.name)) for file in Path(folder).rglob("*")]
    words = {name and name[2] for suffix, name in files if suffix in IMAGES}
    captions = [suffix for suffix, _ in files if suffix in (*CAPTIONS, *TABLES)]
    return "" if captions or len(words) != 1 else words.pop() or ""


def _intervals(draft: Draft, options: Options, family: Family, config: Path, data: Sequence[Path]) -> None:
    name = "save_every_n_steps"
    if options.has(name):
        draft.carry(options, name, "checkpoint.every_steps")
        draft.set("export.every_steps", options.whole(name), f"{options.cite(name)}: the adapter's files, too")
    if options.has("save_last_n_steps") and options.has(name):
        last, reason = options.line("save_last_n_steps", "whole")
        count = max(1, math.ceil(last / options.whole(name, least=1)))
        draft.set("checkpoint.keep_last", count, f"{reason} / {options.cite(name)}; adapter files stay")
    name = "sample_every_n_steps"
    draft.set("validation.every_steps", options.whole(name, 0), options.cite(name))
    for every, table in (("save_every_n_epochs", "export"), ("sample_every_n_epochs", "validation")):
        if options.whole(every, 0) > 0 and not options.has(every.replace("epochs", "steps")):
            draft.in_epochs(table, *options.line(every, "whole"))
    _samples(draft, options, family, config, data)


def _samples(draft: Draft, options: Options, family: Family, config: Path, data: Sequence[Path]) -> None:
    """Add the prompts: lines of a file or of a window. For a model with a guidance input, --l is its cfg."""
    flags = FLAGS | ({"l": "cfg"} if CFG in family.reads else {})
    lines, reason = options.entries("sample_prompts"), "sample_prompts"
    if lines and not isinstance(options.get("sample_prompts"), list):
        path = find_beside(str(lines[0]), config, data)
        if path is None:
            draft.note(FILL, f"{options.cite(reason)}: not found; give it as --data, or write validation.prompts")
            return
        reason = f"{reason} = {path.name}"
        if path.suffix.lower() in (".json", ".toml"):
            draft.note(FILL, f"{reason}: tables of prompts; write them as [[validation.samples]]")
            return
        lines = read_text(path).splitlines()
    for text in lines:
        prompt, values = prompt_line(str(text))
        if prompt and not prompt.startswith("#"):
            sample = {"prompt": (prompt, reason)}
            sample |= {flags[flag]: (value, f"--{flag}") for flag, value in values.items() if flag in flags and value != ""}
            if "cfg" in sample and not (isinstance(cfg := sample["cfg"][0], (int, float)) and cfg > 1):
                del sample["cfg"]  # no second pass there either
            draft.samples.append(sample)
