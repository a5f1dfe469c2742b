"""Steps shared by the translations of all trainers: family, layers, formats, optimizer, schedule, renamed options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, get_args

from trainer import config as configs
from trainer.adapters.kinds import KINDS
from trainer.base import other_trainers
from trainer.base.errors import UserError
from trainer.config import ScheduleTable
from trainer.config.kinds import Compute, Dtype
from trainer.models import FAMILIES, Family
from trainer.optim.options import options_of
from trainer.optim.table import OPTIMIZERS
from workbench.importing.catalogues import facts, programs
from workbench.importing.draft import ABSENT, ASSUMED, DIFFERS, FILL, SAME, SWITCHES, UNKNOWN, Draft, Line, Options, nested
from workbench.importing.reading import as_number, as_share, literal, local_path

PHOTOS = "data/my_photos"  # placeholder for a folder of photos that the config does not name
CONV = "*conv*"
TEXT_LAYERS = "*layers.*"  # of a CLIP text encoder: its attention and MLP, not its embeddings and projections
PATHS = ("path", "output_dir", "init_from", "under", "config", "cache_dir", "references", "truth")
WRITE = re.compile(r"write (\w+) = (\"[^\"]+\"|\d+|true) in \[([\w.]+)\]")  # a sentence that sets a key
NEEDED = {"run.name": "any", "run.output_dir": "any", "run.max_steps": 1, "model.family": "any", "model.path": "any",
          "data.sources": [{"path": "any"}]}  # fmt: skip
OFF: tuple[Any, ...] = (None, False, "", [], {})


def set_family(draft: Draft, word: str | None, reason: str, model: str = "") -> Family | None:
    """Set model.family for another trainer's name `word`; None, and a refusal, if it is none of ours. model: a path whose
    name identifies the family if there is no word."""
    patterns, last = facts().model_names, model.replace("\\", "/").rpartition("/")[2].lower()
    guess = "" if word else next((family for family, pattern in patterns.items() if re.search(pattern, last)), "")
    word = word or guess
    name = draft.overrides.get("model.family") or other_trainers.value_for(word, FAMILIES)
    if name in FAMILIES:
        draft.set("model.family", name, reason)
        if guess and "model.family" not in draft.overrides:
            draft.note(ASSUMED, f"model.family = {name}, as the name says: {reason}; --set model.family=... says otherwise")
        return FAMILIES[name]
    absent = other_trainers.why_absent("model.family", word) or f"it should be one of {', '.join(FAMILIES)}"
    draft.refuse("model.family", f"{reason}: {absent}")
    return None


def set_path(draft: Draft, path: str | None, reason: str) -> None:
    """Set model.path; refuse another kind of model."""
    if absent := other_trainers.why_absent("model.path", path):
        draft.refuse("model.path", f"{reason}: {absent}")
    draft.set("model.path", path or "", reason)


def is_path(key: str) -> bool:
    """Whether the key's value, or each in its list, is a path."""
    return key.rstrip(".0123456789").rpartition(".")[2] in PATHS


def local_value(key: str, value: Any) -> Any:
    """A key's value; a Windows path as on this machine."""
    if isinstance(value, list):
        return [local_value(key, entry) for entry in value]
    return local_path(value) if isinstance(value, str) and is_path(key) else value


def set_run(draft: Draft, name: str, reason: str, folder: str, folder_reason: str) -> None:
    """Set the run's name, cleaned for file names, and its folder."""
    draft.set("run.name", re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._-") or "adapter", reason)
    draft.set("run.output_dir", folder, folder_reason)


def set_dtype(draft: Draft, component: str, value: str | None, reason: str) -> None:
    """Set a component's storage format, or note that there is none of that name."""
    dtype = other_trainers.value_for(value, get_args(Dtype))
    if dtype is None:
        draft.note(ABSENT, f"{reason}: no storage format of that name; the default is taken")
        return
    draft.set(f"model.components.{component}.dtype", dtype, reason)
    if dtype not in get_args(Compute) and other_trainers.plain(value or "") != dtype:
        draft.note(DIFFERS, f"{reason}: {dtype} here is another way to scale and round than there (docs/precision.md)")


def set_compute(draft: Draft, family: Family, value: str | None, reason: str, *, stores: bool = False) -> None:
    """Set the number format of the computation. stores: frozen weights without a format of their own have it, too."""
    dtype = other_trainers.value_for(value, get_args(Compute))
    if dtype is None:
        draft.note(ABSENT, f"{reason}: no number format of that name; the default is taken")
        return
    draft.set("precision.compute", dtype, reason)
    for component in (family.denoiser, *family.text_encoders) if stores else ():
        if f"model.components.{component}.dtype" not in draft.keys:
            draft.set(f"model.components.{component}.dtype", dtype, f"{reason}: the frozen weights have it there, too")


def set_targets(draft: Draft, family: Family) -> None:
    """Set the layers that the program adapts by default."""
    patterns = facts().targets[draft.trainer].get(family.name)
    if patterns is None:
        draft.note(FILL, f"adapter.targets: which layers {draft.trainer} adapts of this model was not looked up")
        return
    targets = patterns.split() if "*" in patterns else patterns
    draft.set("adapter.targets", targets, f"the layers that {draft.trainer} adapts")


def note_differences(draft: Draft) -> None:
    """Note the differences of every run of the program: with all models, then with this one."""
    differs = facts().differs[draft.trainer]
    for text in (*differs.get("", ()), *differs.get(draft.value("model.family"), ())):
        draft.note(DIFFERS, text)


def carry_plain(draft: Draft, options: Options) -> None:
    """Set the keys of options that are only renamed here, with the program's defaults."""
    options.ignore(*programs()["ignored"][draft.trainer].split())
    for name, (key, kind) in programs()["plain"][draft.trainer].items():
        draft.carry(options, name, key, kind)


def ask_for_photos(draft: Draft, reason: str) -> None:
    """Add a placeholder source, and note why it is to be filled in."""
    draft.sources.append({"path": (PHOTOS, "a stand-in: the photos' folder goes here")})
    draft.note(FILL, f"data.sources: {reason}")


def set_type(draft: Draft, kind: str, reason: str, dora: Line = (False, "")) -> None:
    """Set adapter.type, or refuse a kind that does not exist here. dora: a separate option that makes a LoRA a DoRA."""
    name = other_trainers.value_for(kind, KINDS)
    if name is None:
        words = " or ".join(f"a {adapter_kind.word}" for adapter_kind in KINDS.values())
        absent = other_trainers.why_absent("adapter.type", kind) or f"there is none: an adapter is {words}"
        draft.refuse("adapter.type", f"{reason}: {absent}")
    if dora[0] and name is not None and KINDS[name].form:
        draft.refuse("adapter.type", f"{dora[1]}: there is none: a DoRA over a {KINDS[name].word}")
        dora = (False, "")
    draft.set("adapter.type", *(("dora", dora[1]) if dora[0] else (name or "lora", reason)))


def set_scale(draft: Draft, rank: Line, alpha: Line) -> None:
    """Set rank and alpha."""
    draft.set("adapter.rank", *rank)
    draft.set("adapter.alpha", alpha[0], f"{alpha[1]}; the update is scaled by alpha / rank, here as there")


def set_matrices(draft: Draft, options: Options) -> None:
    """Set how the matrices of a LoKr are made; nothing for other kinds."""
    if draft.value("adapter.type") != "lokr":
        return
    names = programs()["lokr"][draft.trainer]
    parts = ("factor", "both", "whole", "tucker")  # "" for an option that the program lacks
    factor, decompose_both, full_matrix, tucker = (options.first(*names.get(part, "").split(" ")) for part in parts)
    draft.set("adapter.factor", *options.line(factor, "whole", -1))
    options.ignore(decompose_both, full_matrix, tucker)
    if options.flag(full_matrix):
        draft.set("adapter.decompose", "none", options.cite(full_matrix))
        for keys in (draft.keys, *draft.rules):  # whole matrices have no rank
            for key in ("adapter.rank", "adapter.alpha", "rank", "alpha"):
                keys.pop(key, None)
    elif options.flag(decompose_both):
        draft.set("adapter.decompose", "both", options.cite(decompose_both))
    if options.flag(tucker):
        draft.refuse("adapter.type", f"{options.cite(tucker)}: there is none: a LoKr with a Tucker core")


def carry_dropout(draft: Draft, options: Options, name: str, key: str) -> None:
    """Set a dropout, or note why the kind of adapter has none."""
    kind = KINDS.get(draft.value("adapter.type"), KINDS["lora"])
    if key not in kind.refuses:
        draft.carry(options, name, key, "number")
    elif options.number(name):
        draft.note(ABSENT, f"{options.cite(name)}: {kind.refuses[key]}")


def add_conv_rule(draft: Draft, family: Family, rank: Line, alpha: Line) -> None:
    """Add a rule for the denoiser's convolutions, if it has any."""
    reason, presets = rank[1], family.adapters.presets
    if presets["all"] == presets["linear"]:
        draft.note(SAME, f"{reason}: the denoiser of {family.name} has no convolutions")
        return
    draft.rules.append({"component": (family.denoiser, reason), "match": (CONV, reason), "rank": rank, "alpha": alpha})


def set_optimizer(draft: Draft, name: str, reason: str, options: Options) -> None:
    """Set the optimizer and its options: decay, betas and eps by our keys, the rest by the library's names."""
    optimizer = draft.overrides.get("optimizer.name") or other_trainers.value_for(name.rpartition(".")[2], OPTIMIZERS)
    if optimizer not in OPTIMIZERS:
        draft.refuse("optimizer.name", f"{reason}: no such optimizer here; there are {', '.join(OPTIMIZERS)}")
        return
    draft.set("optimizer.name", optimizer, reason)
    allowed, foreign = options_of(optimizer), facts().optimizers
    defaults = foreign["defaults"].get(draft.trainer, {}).get(optimizer, {})
    options = replace(options, values={**dict.fromkeys(defaults), **options.values}, defaults=defaults)
    for option in options.values:
        key, value = foreign["options"].get(option, option), options.get(option)
        reason = f"{options.cite(option)}, of the optimizer"
        if key in ("weight_decay", "eps") and value is not None:
            draft.set(f"optimizer.{key}", float(options.number(key)), reason)
        elif key == "betas":
            draft.set("optimizer.betas", [float(beta) for beta in options.numbers(key)], reason)
        elif key in allowed:
            draft.set(f"optimizer.options.{key}", value, reason)
        elif not _is_off(value):
            draft.note(ABSENT, f"{reason}: {optimizer} takes no such option here")


def suit_optimizer(draft: Draft) -> None:
    """Change the rate and schedule that do not suit the optimizer here, and note it."""
    name = draft.value("optimizer.name")
    if name not in OPTIMIZERS:
        return
    entry, (rate, reason) = OPTIMIZERS[name], draft.keys["optimizer.lr"]
    if entry.finds and not entry.finds.lr[0] <= rate <= entry.finds.lr[1]:
        draft.set("optimizer.lr", 1.0, f"{reason}; {name} finds the rate itself, and 1.0 is its factor")
        small = "so small that it would learn nothing; 1.0 is written"
        draft.note(DIFFERS, f"{reason}: a factor of the rate that {name} finds, {small}")
    for rule in draft.rules if entry.finds else ():
        if rule.get("lr", (rate, ""))[0] != rate:
            draft.note(DIFFERS, f"{rule['lr'][1]}: {name} takes one rate for all here")
        rule.pop("lr", None)
    schedule, reason = draft.keys["schedule.name"]
    if entry.schedules and schedule not in entry.schedules:
        draft.set("schedule.name", entry.schedules[0], reason)
        falling = f"{name} averages its weights in place of a falling rate; {entry.schedules[0]} is written"
        draft.note(DIFFERS, f"{reason}: {falling}")


def set_schedule(draft: Draft, name: str, reason: str, warmup: Line, *, idle_when_constant: bool) -> None:
    """Set the schedule and its warm-up. idle_when_constant: "constant" ignores the warm-up there."""
    schedule = other_trainers.value_for(name, get_args(ScheduleTable.model_fields["name"].annotation))
    if schedule is None:
        draft.refuse("schedule.name", f"{reason}: no such schedule here")
        return
    draft.set("schedule.name", schedule, reason)
    steps, reason = warmup
    if idle_when_constant and other_trainers.plain(name) == "constant" and steps:
        steps, reason = 0, f"{reason}, which {name} does not read there"
    draft.set("schedule.warmup", steps if 0 < steps < 1 else int(steps), reason)


def set_text_rates(draft: Draft, encoders: Mapping[str, tuple[float | None, str]]) -> None:
    """Add a rule for each trained text encoder. encoders: by name, (its rate, None for optimizer.lr; the reason)."""
    for name, (rate, reason) in encoders.items():
        lr = {} if rate is None else {"lr": (float(rate), reason)}
        draft.rules.append({"component": (name, reason), "match": (TEXT_LAYERS, "its attention and MLP"), **lr})


def set_ema(draft: Draft, decay: float, reason: str) -> None:
    """Set an average with this decay."""
    draft.set("ema.kind", "constant", reason)
    draft.set("ema.decay", decay, reason)
    draft.note(DIFFERS, f"{reason}: the average here follows faster in the first updates (docs/ema.md)")


def side_of(options: Options, name: str, text: str = "") -> int:
    """The side of the square with the area of "1024", 1024, "1024,768" or [1024, 768], to the nearest multiple of 8. text:
    reads this part of the option's value alone. Raises UserError if it is no size."""
    parts = [text] if text else options.entries(name)
    sides = [as_number(side) or 0 for part in parts for side in re.split(r"[,x]", str(part).strip().rstrip(","))]
    if not sides or not all(0 < side < 2**20 for side in sides):
        raise options.error(name, 'a size, such as 1024 or "1024,768"')
    return max(16, round((sides[0] * sides[-1]) ** 0.5 / 8) * 8)


def folder_name(path: str) -> str:
    """The last part of a path, of Windows or not, without its suffix."""
    return PurePosixPath(path.replace("\\", "/").rstrip("/")).stem


def carry_rest(draft: Draft, options: Options) -> None:
    """Translate the unread options by the table of names; note the reason for those without an equivalent."""
    for name, value in options.unread().items():
        here = _row_for(draft.trainer, f"{options.prefix.rpartition(' ')[2]}{name}") or ""
        reason = options.cite(name)
        if " " in here:
            _apply_sentence(draft, here, value, reason)
        elif here and here not in draft.keys and ".0." not in here and ".1." not in here:
            _rename(draft, here, value, reason)
        elif not here and not _is_off(value):
            draft.note(UNKNOWN, reason)


def _apply_sentence(draft: Draft, sentence: str, value: Any, reason: str) -> None:
    """Note the table's sentence for an option that is on, or set the key and the value that it names."""
    assignment = WRITE.fullmatch(sentence)
    if _is_off(value):
        return
    if sentence.startswith("leave it out"):
        draft.note(SAME, f"{reason}: {sentence.removeprefix('leave it out').lstrip(':; ')}")
    elif assignment and (as_number(value) or SWITCHES.get(str(value).lower())):
        if f"{assignment[3]}.{assignment[1]}" not in draft.keys:
            draft.set(f"{assignment[3]}.{assignment[1]}", literal(assignment[2].strip('"')), reason)
    else:
        draft.note(ABSENT, f"{reason}: {sentence}")


def _is_off(value: Any) -> bool:
    return value in OFF or as_number(value) == 0 or str(value).lower() == "false"


def _rename(draft: Draft, key: str, value: Any, reason: str) -> None:
    if value is None or value == "":
        return
    value = local_value(key, value)
    accepted = [candidate for candidate in (value, *_candidates(key, value)) if _accepts(key, candidate)]
    if accepted:
        draft.set(key, accepted[0], reason)
    elif not _is_off(value):
        draft.note(ABSENT, f"{reason}: {key} takes no such value here (docs/keys.md)")


def _candidates(key: str, value: Any) -> list[Any]:
    """Other forms of the value here: another word, or the same number, truth value or text as another type."""
    field = dict(configs.fields()).get(configs.generic(key))
    words = re.findall(r"'([\w+]+)'", str(field.annotation)) if field is not None else []
    word, share = other_trainers.value_for(value, words), as_share(value)
    number = as_number(value) if share is None else share
    forms = ([word] if word else []) + ([] if number is None else [number, float(number)])
    if isinstance(value, str) and value.lower() in SWITCHES:
        forms.append(SWITCHES[value.lower()])
    return [*forms, str(value)] if number is not None else forms


def _accepts(key: str, value: Any) -> bool:
    """Whether the key may have the value, in a config with only the required keys beside it."""
    try:
        configs.parse(nested({**NEEDED, key: value}))
    except UserError:
        return False
    return True


def _row_for(trainer: str, name: str) -> str | None:
    """The key, or the sentence, for an option of this trainer, by its whole name or the last part."""
    rows = {
        option: row["here"]
        for row in reversed([row for rows in other_trainers.tables().names.values() for row in rows])
        for option in row.get(trainer, "").split()
    }
    lasts = {option.rpartition(".")[2]: here for option, here in reversed(rows.items())}
    full_name = other_trainers.plain(name)
    return rows.get(full_name) or rows.get(full_name.rpartition(".")[2]) or lasts.get(full_name.rpartition(".")[2])
