"""What options of sd-scripts mean: its TOML or command line, and its TOML of data."""

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
from trainer.data.layouts.kohya import NAME
from trainer.models import Family
from trainer.plan.requirements import CFG
from workbench.importing import common
from workbench.importing.catalogues import facts, programs
from workbench.importing.draft import ABSENT, DIFFERS, FILL, SAME, Draft, Line, Options
from workbench.importing.reading import find_beside, literal, path_here, prompt_line, read_text, read_tree

# What a subset may say, and what it is in a source.
SUBSET = programs()["sd_scripts_subset"]
BY_TAGS = ("keep_tokens", "keep_tokens_separator", "caption_separator")  # read only where tags are shuffled or dropped
OF_SUBSETS = programs()["idle"]["sd-scripts"].split()  # said of each subset that they hold for, and not of its dataset
FLAGS = programs()["sd_scripts_flags"]
SEVERAL = ("network_args", "optimizer_args", "lr_scheduler_args", "text_encoder_lr")  # may stand without a value: none


def translate(draft: Draft, tree: Options, config: Path, data: Sequence[Path]) -> None:
    """Make the draft of a flat or sectioned config of sd-scripts. config: its path; data: files given beside it."""
    below = _config_file(tree, config, data)
    options = _flat(tree, below)
    data = [path for path in data if path != below.file]
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
    """What the file of --config_file says; the same options where none is named. Raises UserError where it is not found."""
    named = tree.word("config_file")
    if not named:
        return tree
    named = named if named.endswith(".toml") else f"{named}.toml"
    path = find_beside(named, config, [path for path in data if named.endswith(path.name)])
    if path is None:
        raise UserError(f"{config}: {tree.told('config_file')}: not found, and options stand in it; give it as --data")
    return Options({"options": read_tree(path)}, path).table("options")


def _flat(tree: Options, below: Options) -> Options:
    """The options in one table, those of --config_file below those of the command line."""
    flat: dict[str, Any] = {}
    given = {name: [] if value is True and name in SEVERAL else value for name, value in tree.given.items()}
    for name, value in [*below.given.items(), *given.items()]:
        flat |= value if isinstance(value, dict) else {name: value}
    return replace(tree, given=flat, file=tree.file if below is tree else f"{tree.file}, with {below.file}")


def _family(draft: Draft, options: Options) -> Family | None:
    """The script's name says it; else the network's module, else the text encoders that a model of one family has."""
    script, module = options.word("script", ""), options.word("network_module", "")
    if script:
        return common.set_family(draft, script, f"{script}.py")
    if other_trainers.value_for(module, common.FAMILIES):
        return common.set_family(draft, module, options.told("network_module"))
    named = options.first("model_train_type", "pretrained_model_name_or_path")
    why = options.told(named) if options.has(named) else "the config does not say which script it is for, so not which model"
    return common.set_family(draft, None, why, options.word(named, ""))


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
    why = network.told("algo", None if algorithm == "other" else "lora")
    common.set_type(draft, algorithm, why, network.line("dora_wd", "flag"))
    common.set_scale(draft, options.line("network_dim", "whole"), options.line("network_alpha", "number"))
    common.set_targets(draft, family)
    if network.whole("conv_dim"):
        common.add_conv_rule(draft, family, network.line("conv_dim", "whole"), network.line("conv_alpha", "number", 1))
    tucker = network.first("use_cp", "use_tucker")
    common.set_matrices(draft, network, factor="factor", both="decompose_both", whole="full_matrix", tucker=tucker)
    for name in ("rank_dropout", "module_dropout"):
        common.carry_dropout(draft, network, name, f"adapter.{name}")
    common.carry_rest(draft, network)


def _arguments(options: Options, name: str, prefix: str) -> Options:
    """The `key=value` of an option that takes several, in one text or a list: numbers, truth values, lists or text."""
    each = [part for entry in options.entries(name) for part in re.split(r"\s+(?=\w+\s*=)", str(entry).strip())]
    pairs = (part.partition("=") for part in each)
    return Options({key.strip(): _value(value) for key, _, value in pairs}, options.file, prefix=prefix)


def _rates(draft: Draft, options: Options, family: Family) -> None:
    draft.carry(options, options.first("unet_lr", "learning_rate"), "optimizer.lr", "number")
    kind = "optimizer_type"
    common.set_optimizer(draft, options.word(kind) or "AdamW", options.told(kind), _arguments(options, "optimizer_args", ""))
    schedule, warmup = options.line("lr_scheduler", "word"), options.line("lr_warmup_steps", "steps")
    common.set_schedule(draft, *schedule, warmup, idle_when_constant=True)
    if options.flag("network_train_text_encoder_only"):
        draft.cannot("adapter.targets", "network_train_text_encoder_only: the denoiser is always trained here")
    line = options.first("text_encoder_lr", "learning_rate")
    lrs = options.numbers(line) or options.numbers("learning_rate")
    # T5 alone is left out if the program is not told otherwise.
    clips = [name for name in family.text_encoders if family.component(name).class_name.startswith("CLIP")]
    if not options.flag("network_train_unet_only"):
        why = f"{options.told(line)}; network_train_unet_only is left out"
        rates = {name: (float(lrs[min(place, len(lrs) - 1)]), why) for place, name in enumerate(clips)}
        common.set_text_rates(draft, {name: rate for name, rate in rates.items() if rate[0] > 0})


def _value(text: str) -> Any:
    return [literal(part.strip("()[] ")) for part in text.split(",") if part.strip("()[] ")] if "," in text else literal(text)


def _precision(draft: Draft, options: Options, family: Family) -> None:
    for name in ("fp8_base", "fp8_base_unet"):
        if options.flag(name):
            common.set_dtype(draft, family.denoiser, "float8", options.told(name))
    common.set_compute(draft, family, *options.line("mixed_precision", "word"), stores=True)


def _objective(draft: Draft, options: Options, family: Family) -> None:
    low, high = options.number("min_timestep"), options.number("max_timestep")
    if low or high:
        line = " and ".join(options.told(name) for name in ("min_timestep", "max_timestep") if options.has(name))
        draft.set("objective.t_range", [(low or 0) / 1000, (1000 if high is None else high) / 1000], f"{line}, of 1000")
    sampling, scheme = options.word("timestep_sampling"), options.word("weighting_scheme")
    scale, shift = options.line("sigmoid_scale", "number"), options.line("discrete_flow_shift", "number")
    (predicted, line), guidance = options.line("model_prediction_type", "word"), options.line("guidance_scale", "number")
    if "objective.shift" not in family.reads:
        return
    _times(draft, options, sampling, scheme, scale, shift)
    draft.set("objective.guidance", *guidance)
    if predicted != "raw":
        draft.note(DIFFERS, f"{line}: the velocity itself is trained here, as with raw there")


def _times(draft: Draft, options: Options, sampling: str, scheme: str, scale: Line, shift: Line) -> None:
    """Write the distribution of times: of `sigma` the scheme draws, and its u counts from noise to photo there."""
    line, weighed = options.told("timestep_sampling"), options.told("weighting_scheme")
    if sampling == "sigma":
        times = {"none": "uniform", "logit_normal": "logit_normal", "mode": "mode"}.get(scheme)
        if times is None:
            draft.note(ABSENT, f"{weighed}: it weighs the loss there; uniform times are drawn here")
        if times == "logit_normal" and options.has("logit_mean"):
            mean, why = options.line("logit_mean", "number")
            draft.set("objective.logit_mean", -mean, f"{why}: the other sign")
        times, line = times or "uniform", f"{line}, {weighed}"
        draft.set("objective.shift", *shift)
    else:
        times = facts().times[draft.trainer].get(sampling)
        if times is None:
            draft.cannot("objective.timesteps", f"{line}: no such distribution here")
            return
        if times != "uniform":
            draft.set("objective.logit_std", *scale)
        if sampling == "uniform":
            draft.set("objective.shift", 1.0, f"{line}: not shifted")
        elif sampling == "shift":
            draft.set("objective.shift", *shift)
    draft.set("objective.timesteps", times, line)


def _data(draft: Draft, options: Options, config: Path, data: Sequence[Path]) -> None:
    if options.has("resolution"):
        draft.set("data.resolution", common.side_of(options, "resolution"), options.told("resolution"))
    for name, (_, kind) in SUBSET.items():
        getattr(options, kind)(name)  # they are read again for each source, where these do not say it
    draft.carry(options, "caption_dropout_rate", "data.caption_dropout", "number")
    if options.flag("weighted_captions"):
        draft.set("data.weighted_captions", True, options.told("weighted_captions"))
    if options.whole("max_token_length"):
        chunks = math.ceil(options.whole("max_token_length", least=1) / 75)
        draft.set("data.clip_chunks", chunks, f"{options.told('max_token_length')}, in chunks of 75")
    named = options.word("dataset_config")
    path = find_beside(named, config, data) if named else next(iter(data), None)
    if path is not None:
        tree = Options({"data": read_tree(path)}, path).table("data")
        for dataset in tree.tables("datasets", "datasets "):
            _dataset(draft, options, replace(dataset, given={**tree.table("general").given, **dataset.given}))
    elif options.has("train_data_dir"):
        for name in [name for name in ("train_data_dir", "reg_data_dir") if options.has(name)]:
            folder = {"image_dir": options.word(name), "is_reg": name == "reg_data_dir"}
            _source(draft, options, replace(options, given=folder), {}, numbered=name)
    else:
        line = f"{options.told('dataset_config')}: not found; give it as --data"
        common.ask_for_photos(draft, line if named else "no folder of photos is named")


def _dataset(draft: Draft, options: Options, table: Options) -> None:
    """One [[datasets]]: what it says of batch and size for all of its subsets, then a source for each."""
    subsets = table.tables("subsets", "subset ")
    if not subsets:
        raise table.wrong("subsets", "a list of tables, each with its image_dir")
    if table.has("batch_size"):
        if draft.sources and draft.keys["data.batch_size"][0] != table.whole("batch_size"):
            draft.note(ABSENT, f"{table.told('batch_size')}: one batch size is for all sources here")
        else:
            draft.carry(table, "batch_size", "data.batch_size")
    for subset in subsets:
        _source(draft, options, subset, table.given, numbered="")
    table.pass_by(*SUBSET, *OF_SUBSETS, "resolution", "num_repeats", "batch_size")
    common.carry_rest(draft, table)


def _source(draft: Draft, options: Options, subset: Options, dataset: Mapping[str, Any], *, numbered: str) -> None:
    """One subset as a source. dataset: what holds for it, before the options. numbered: the option that names a kohya
    folder."""
    names = (*SUBSET, *OF_SUBSETS, "num_repeats", "resolution", "class_tokens", "alpha_mask")
    around = {name: value for name, value in {**options.given, **dataset}.items() if name in names}
    table = Options({**around, **subset.given}, subset.file, {"num_repeats": 1}, prefix="" if numbered else "subset ")
    path = table.word("image_dir", "")
    source: dict[str, Line] = {"path": (path, options.told(numbered) if numbered else table.told("image_dir"))}
    if not numbered:
        repeats, why = table.line("num_repeats", "whole")
        if match := NAME.fullmatch(common.folder_name(path)):
            over, rest = divmod(repeats, int(match[1]))
            if rest:
                counts = "the folder's number counts as repeats here, not there"
                draft.note(FILL, f"{path}: {counts}; rename the folder to train {repeats}")
            repeats, why = repeats if rest else over, f"{why}, over the folder's {match[1]}"
        source["repeats"] = (max(1, repeats), why)
    if table.has("resolution") and not options.has("resolution"):
        source["resolution"] = (common.side_of(table, "resolution"), table.told("resolution"))
    by_tags = table.flag("shuffle_caption") or table.number("caption_tag_dropout_rate")
    for name, (key, kind) in SUBSET.items():
        value, why = table.line(name, kind)
        if value and (by_tags or name not in BY_TAGS) and value != draft.value(f"data.{key}"):
            source[key] = (f"{value.strip()} " if key == "separator" else value, why)
        elif value and name in BY_TAGS and not by_tags and table.has(name):
            draft.note(SAME, f"{why}: read only where tags are shuffled or dropped, there too")
    if options.flag("masked_loss"):
        alpha = ("alpha", table.told("alpha_mask")) if table.flag("alpha_mask") else None
        source["masks"] = alpha or table.line("conditioning_data_dir", "word")
    if table.flag("is_reg"):
        source["regularisation"] = (True, table.told("is_reg"))
        source["loss_weight"] = options.line("prior_loss_weight", "number")
        draft.note(DIFFERS, f"{path}: regularisation photos are repeated there until they are as many as the others")
    if table.has("class_tokens"):
        source["trigger"] = (table.word("class_tokens"), f"{table.told('class_tokens')}: put before captions without it, too")
    elif words := _words_of(path_here(path)) if numbered and path and not table.flag("is_reg") else "":
        source["trigger"] = words, "the words of its folder; no photo has a caption"
    if not table.flag("enable_bucket") and not options.flag("enable_bucket"):
        draft.note(DIFFERS, "enable_bucket is left out: photos are cut to one shape there, to buckets of their shapes here")
    draft.sources.append(source)
    common.carry_rest(draft, table)


def _words_of(folder: str) -> str:
    """The one caption that kohya's folders in it have by their names; "" where there are several, or others."""
    files = [(file.suffix.lower(), NAME.fullmatch(file.parent.name)) for file in Path(folder).rglob("*")]
    words = {name and name[2] for suffix, name in files if suffix in IMAGES}
    captions = [suffix for suffix, _ in files if suffix in (*CAPTIONS, *TABLES)]
    return "" if captions or len(words) != 1 else words.pop() or ""


def _intervals(draft: Draft, options: Options, family: Family, config: Path, data: Sequence[Path]) -> None:
    name = "save_every_n_steps"
    if options.has(name):
        draft.carry(options, name, "checkpoint.every_steps")
        draft.set("export.every_steps", options.whole(name), f"{options.told(name)}: the adapter's files, too")
    if options.has("save_last_n_steps") and options.has(name):
        last, why = options.line("save_last_n_steps", "whole")
        count = max(1, math.ceil(last / options.whole(name, least=1)))
        draft.set("checkpoint.keep_last", count, f"{why} / {options.told(name)}; adapter files stay")
    name = "sample_every_n_steps"
    draft.set("validation.every_steps", options.whole(name, 0), options.told(name))
    for every, table in (("save_every_n_epochs", "export"), ("sample_every_n_epochs", "validation")):
        if options.whole(every, 0) > 0 and not options.has(every.replace("epochs", "steps")):
            draft.in_epochs(table, *options.line(every, "whole"))
    _samples(draft, options, family, config, data)


def _samples(draft: Draft, options: Options, family: Family, config: Path, data: Sequence[Path]) -> None:
    """The prompts: lines of a file or of a window. Of a model that is told a guidance, --l is the other one beside it."""
    flags = FLAGS | ({"l": "cfg"} if CFG in family.reads else {})
    listed, told = options.entries("sample_prompts"), "sample_prompts"
    if listed and not isinstance(options.get("sample_prompts"), list):
        path = find_beside(str(listed[0]), config, data)
        if path is None:
            draft.note(FILL, f"{options.told(told)}: not found; give it as --data, or write validation.prompts")
            return
        told = f"{told} = {path.name}"
        if path.suffix.lower() in (".json", ".toml"):
            draft.note(FILL, f"{told}: tables of prompts; write them as [[validation.samples]]")
            return
        listed = read_text(path).splitlines()
    for line in listed:
        prompt, given = prompt_line(str(line))
        if prompt and not prompt.startswith("#"):
            sample = {"prompt": (prompt, told)}
            sample |= {flags[flag]: (value, f"--{flag}") for flag, value in given.items() if flag in flags and value != ""}
            if "cfg" in sample and not (isinstance(cfg := sample["cfg"][0], (int, float)) and cfg > 1):
                del sample["cfg"]  # there, too, no second pass
            draft.samples.append(sample)
