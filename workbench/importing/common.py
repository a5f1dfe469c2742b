"""What the translations of all trainers need: the family, its layers and formats, optimizers, schedules, plain renames."""

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
from workbench.importing.reading import as_number, as_share, literal, path_here

PHOTOS = "data/my_photos"  # stands for the folder of photos that a config does not name
CONV = "*conv*"
TEXT_LAYERS = "*layers.*"  # of a CLIP text encoder: its attention and MLP, without what stands around the layers
PATHS = ("path", "output_dir", "init_from", "under", "config", "cache_dir", "references", "truth")
WRITE = re.compile(r"write (\w+) = (\"[^\"]+\"|\d+|true) in \[([\w.]+)\]")  # a sentence that is a line of a config
NEEDED = {"run.name": "any", "run.output_dir": "any", "run.max_steps": 1, "model.family": "any", "model.path": "any",
          "data.sources": [{"path": "any"}]}  # fmt: skip
OFF: tuple[Any, ...] = (None, False, "", [], {})


def set_family(draft: Draft, word: str | None, why: str, model: str = "") -> Family | None:
    """Write model.family for what another trainer calls `word`; None, and a refusal, where it is none of ours. model: a path
    whose name tells the family where no word does."""
    patterns, last = facts().model_names, model.replace("\\", "/").rpartition("/")[2].lower()
    guessed = "" if word else next((family for family, pattern in patterns.items() if re.search(pattern, last)), "")
    word = word or guessed
    name = draft.fixed.get("model.family") or other_trainers.value_for(word, FAMILIES)
    if name in FAMILIES:
        draft.set("model.family", name, why)
        if guessed and "model.family" not in draft.fixed:
            draft.note(ASSUMED, f"model.family = {name}, as the name says: {why}; --set model.family=... says otherwise")
        return FAMILIES[name]
    absent = other_trainers.why_absent("model.family", word) or f"it should be one of {', '.join(FAMILIES)}"
    draft.cannot("model.family", f"{why}: {absent}")
    return None


def set_path(draft: Draft, path: str | None, why: str) -> None:
    """Write model.path; refuse another kind of model."""
    if absent := other_trainers.why_absent("model.path", path):
        draft.cannot("model.path", f"{why}: {absent}")
    draft.set("model.path", path or "", why)


def is_path(key: str) -> bool:
    """Whether the key's value, or each of its list, is a file or a folder."""
    return key.rstrip(".0123456789").rpartition(".")[2] in PATHS


def place_here(key: str, value: Any) -> Any:
    """The value of a key; a path of Windows as it is on this machine."""
    if isinstance(value, list):
        return [place_here(key, each) for each in value]
    return path_here(value) if isinstance(value, str) and is_path(key) else value


def set_run(draft: Draft, name: str, why: str, folder: str, why_folder: str) -> None:
    """Write the run's name, as files may be named, and its folder."""
    draft.set("run.name", re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._-") or "adapter", why)
    draft.set("run.output_dir", folder, why_folder)


def set_dtype(draft: Draft, component: str, value: str | None, why: str) -> None:
    """Write the storage format of a component, or say that there is none of that name."""
    known = other_trainers.value_for(value, get_args(Dtype))
    if known is None:
        draft.note(ABSENT, f"{why}: no storage format of that name; the default is taken")
        return
    draft.set(f"model.components.{component}.dtype", known, why)
    if known not in get_args(Compute) and other_trainers.plain(value or "") != known:
        draft.note(DIFFERS, f"{why}: {known} here is another way to scale and round than there (docs/precision.md)")


def set_compute(draft: Draft, family: Family, value: str | None, why: str, *, stores: bool = False) -> None:
    """Write the number format of the computation. stores: the frozen weights have it, too, where nothing else is said."""
    known = other_trainers.value_for(value, get_args(Compute))
    if known is None:
        draft.note(ABSENT, f"{why}: no number format of that name; the default is taken")
        return
    draft.set("precision.compute", known, why)
    for component in (family.denoiser, *family.text_encoders) if stores else ():
        if f"model.components.{component}.dtype" not in draft.keys:
            draft.set(f"model.components.{component}.dtype", known, f"{why}: the frozen weights have it there, too")


def set_targets(draft: Draft, family: Family) -> None:
    """Write the layers that the program adapts where its config does not say."""
    patterns = facts().targets[draft.trainer].get(family.name)
    if patterns is None:
        draft.note(FILL, f"adapter.targets: which layers {draft.trainer} adapts of this model was not looked up")
        return
    targets = patterns.split() if "*" in patterns else patterns
    draft.set("adapter.targets", targets, f"the layers that {draft.trainer} adapts")


def note_differences(draft: Draft) -> None:
    """Say what the program does otherwise in every run: with all models, then with this one."""
    differs = facts().differs[draft.trainer]
    for text in (*differs.get("", ()), *differs.get(draft.value("model.family"), ())):
        draft.note(DIFFERS, text)


def carry_plain(draft: Draft, options: Options) -> None:
    """Write what is only called otherwise here, with the program's default where its config is silent."""
    options.pass_by(*programs()["passed_by"][draft.trainer].split())
    for name, (key, kind) in programs()["plain"][draft.trainer].items():
        draft.carry(options, name, key, kind)


def ask_for_photos(draft: Draft, why: str) -> None:
    """Write a source that stands for the photos, and say why it is to be filled in."""
    draft.sources.append({"path": (PHOTOS, "a stand-in: the photos' folder goes here")})
    draft.note(FILL, f"data.sources: {why}")


def set_type(draft: Draft, kind: str, why: str, dora: Line = (False, "")) -> None:
    """Write adapter.type, or refuse a kind that there is not. dora: an option of its own that makes a LoRA a DoRA."""
    known = other_trainers.value_for(kind, KINDS)
    if known is None:
        words = " or ".join(f"a {each.word}" for each in KINDS.values())
        absent = other_trainers.why_absent("adapter.type", kind) or f"there is none: an adapter is {words}"
        draft.cannot("adapter.type", f"{why}: {absent}")
    if dora[0] and known is not None and KINDS[known].form:
        draft.cannot("adapter.type", f"{dora[1]}: there is none: a DoRA over a {KINDS[known].word}")
        dora = (False, "")
    draft.set("adapter.type", *(("dora", dora[1]) if dora[0] else (known or "lora", why)))


def set_scale(draft: Draft, rank: Line, alpha: Line) -> None:
    """Write rank and alpha, each with its reason."""
    draft.set("adapter.rank", *rank)
    draft.set("adapter.alpha", alpha[0], f"{alpha[1]}; the update is scaled by alpha / rank, here as there")


def set_matrices(draft: Draft, options: Options, *, factor: str, both: str = "", whole: str = "", tucker: str = "") -> None:
    """Write how the matrices of a LoKr are made, by what the options are called there; of other kinds nothing."""
    if draft.value("adapter.type") != "lokr":
        return
    draft.set("adapter.factor", *options.line(factor, "whole", -1))
    options.pass_by(both, whole, tucker)
    if whole and options.flag(whole):
        draft.set("adapter.decompose", "none", options.told(whole))
        for keys in (draft.keys, *draft.rules):  # of whole matrices there is no rank
            for key in ("adapter.rank", "adapter.alpha", "rank", "alpha"):
                keys.pop(key, None)
    elif both and options.flag(both):
        draft.set("adapter.decompose", "both", options.told(both))
    if tucker and options.flag(tucker):
        draft.cannot("adapter.type", f"{options.told(tucker)}: there is none: a LoKr with a Tucker core")


def carry_dropout(draft: Draft, options: Options, name: str, key: str) -> None:
    """Write a dropout, or say why the kind of adapter has none."""
    kind = KINDS.get(draft.value("adapter.type"), KINDS["lora"])
    if key not in kind.refuses:
        draft.carry(options, name, key, "number")
    elif options.number(name):
        draft.note(ABSENT, f"{options.told(name)}: {kind.refuses[key]}")


def add_conv_rule(draft: Draft, family: Family, rank: Line, alpha: Line) -> None:
    """Write a rule for the denoiser's convolutions, where it has any."""
    why, presets = rank[1], family.adapters.presets
    if presets["all"] == presets["linear"]:
        draft.note(SAME, f"{why}: the denoiser of {family.name} has no convolutions")
        return
    draft.rules.append({"component": (family.denoiser, why), "match": (CONV, why), "rank": rank, "alpha": alpha})


def set_optimizer(draft: Draft, name: str, why: str, options: Options) -> None:
    """Write the optimizer and what it is given: decay, betas and eps by our keys, the rest by the library's names."""
    known = draft.fixed.get("optimizer.name") or other_trainers.value_for(name.rpartition(".")[2], OPTIMIZERS)
    if known not in OPTIMIZERS:
        draft.cannot("optimizer.name", f"{why}: no such optimizer here; there are {', '.join(OPTIMIZERS)}")
        return
    draft.set("optimizer.name", known, why)
    taken, there_called = options_of(known), facts().optimizers
    defaults = there_called["defaults"].get(draft.trainer, {}).get(known, {})
    options = replace(options, given={**dict.fromkeys(defaults), **options.given}, defaults=defaults)
    for there in options.given:
        key, value = there_called["options"].get(there, there), options.get(there)
        line = f"{options.told(there)}, of the optimizer"
        if key in ("weight_decay", "eps") and value is not None:
            draft.set(f"optimizer.{key}", float(options.number(key)), line)
        elif key == "betas":
            draft.set("optimizer.betas", [float(beta) for beta in options.numbers(key)], line)
        elif key in taken:
            draft.set(f"optimizer.options.{key}", value, line)
        elif not _is_off(value):
            draft.note(ABSENT, f"{line}: {known} takes no such option here")


def suit_optimizer(draft: Draft) -> None:
    """Change what the optimizer here does not go with, and say so."""
    name = draft.value("optimizer.name")
    if name not in OPTIMIZERS:
        return
    entry, (rate, why) = OPTIMIZERS[name], draft.keys["optimizer.lr"]
    if entry.finds and not entry.finds.lr[0] <= rate <= entry.finds.lr[1]:
        draft.set("optimizer.lr", 1.0, f"{why}; {name} finds the rate itself, and 1.0 is its factor")
        small = "so small that it would learn nothing; 1.0 is written"
        draft.note(DIFFERS, f"{why}: a factor of the rate that {name} finds, {small}")
    for rule in draft.rules if entry.finds else ():
        if rule.get("lr", (rate, ""))[0] != rate:
            draft.note(DIFFERS, f"{rule['lr'][1]}: {name} takes one rate for all here")
        rule.pop("lr", None)
    schedule, why = draft.keys["schedule.name"]
    if entry.schedules and schedule not in entry.schedules:
        draft.set("schedule.name", entry.schedules[0], why)
        draft.note(DIFFERS, f"{why}: {name} averages its weights in place of a falling rate; {entry.schedules[0]} is written")


def set_schedule(draft: Draft, name: str, why: str, warmup: Line, *, idle_when_constant: bool) -> None:
    """Write the schedule and its warm-up. idle_when_constant: "constant" has none there, whatever is written."""
    known = other_trainers.value_for(name, get_args(ScheduleTable.model_fields["name"].annotation))
    if known is None:
        draft.cannot("schedule.name", f"{why}: no such schedule here")
        return
    draft.set("schedule.name", known, why)
    steps, line = warmup
    if idle_when_constant and other_trainers.plain(name) == "constant" and steps:
        steps, line = 0, f"{line}, which {name} does not read there"
    draft.set("schedule.warmup", steps if 0 < steps < 1 else int(steps), line)


def set_text_rates(draft: Draft, encoders: Mapping[str, tuple[float | None, str]]) -> None:
    """Write a rule for each text encoder that is trained, by its name, with its rate (None: optimizer.lr)."""
    for name, (rate, why) in encoders.items():
        lr = {} if rate is None else {"lr": (float(rate), why)}
        draft.rules.append({"component": (name, why), "match": (TEXT_LAYERS, "its attention and MLP"), **lr})


def set_ema(draft: Draft, decay: float, why: str) -> None:
    """Write an average with this decay."""
    draft.set("ema.kind", "constant", why)
    draft.set("ema.decay", decay, why)
    draft.note(DIFFERS, f"{why}: the average here follows faster in the first updates (docs/ema.md)")


def side_of(options: Options, name: str, text: str = "") -> int:
    """The side of a square as large as "1024", 1024, "1024,768" or [1024, 768], to the nearest multiple of 8. text: that
    part of the option's value alone. Raises UserError for what is no size."""
    parts = [text] if text else options.entries(name)
    sides = [as_number(side) or 0 for part in parts for side in re.split(r"[,x]", str(part).strip().rstrip(","))]
    if not sides or not all(0 < side < 2**20 for side in sides):
        raise options.wrong(name, 'a size, such as 1024 or "1024,768"')
    return max(16, round((sides[0] * sides[-1]) ** 0.5 / 8) * 8)


def folder_name(path: str) -> str:
    """The last part of a path without its suffix, of Windows or not."""
    return PurePosixPath(path.replace("\\", "/").rstrip("/")).stem


def carry_rest(draft: Draft, options: Options) -> None:
    """Write what nothing has read and what is only called otherwise; say why of what there is nothing for."""
    for name, value in options.rest().items():
        here = _row_for(draft.trainer, f"{options.prefix.rpartition(' ')[2]}{name}") or ""
        line = options.told(name)
        if " " in here:
            _sentence(draft, here, value, line)
        elif here and here not in draft.keys and ".0." not in here and ".1." not in here:
            _rename(draft, here, value, line)
        elif not here and not _is_off(value):
            draft.note(UNKNOWN, line)


def _sentence(draft: Draft, here: str, value: Any, line: str) -> None:
    """Say what a sentence says of an option that is on, or write the key and the value that it names."""
    written = WRITE.fullmatch(here)
    if _is_off(value):
        return
    if here.startswith("leave it out"):
        draft.note(SAME, f"{line}: {here.removeprefix('leave it out').lstrip(':; ')}")
    elif written and (as_number(value) or SWITCHES.get(str(value).lower())):
        if f"{written[3]}.{written[1]}" not in draft.keys:
            draft.set(f"{written[3]}.{written[1]}", literal(written[2].strip('"')), line)
    else:
        draft.note(ABSENT, f"{line}: {here}")


def _is_off(value: Any) -> bool:
    return value in OFF or as_number(value) == 0 or str(value).lower() == "false"


def _rename(draft: Draft, key: str, value: Any, why: str) -> None:
    if value is None or value == "":
        return
    value = place_here(key, value)
    taken = [candidate for candidate in (value, *_ours(key, value)) if _takes(key, candidate)]
    if taken:
        draft.set(key, taken[0], why)
    elif not _is_off(value):
        draft.note(ABSENT, f"{why}: {key} takes no such value here (docs/keys.md)")


def _ours(key: str, value: Any) -> list[Any]:
    """What the value may be called here: another word, or the same number, truth value or text as another kind."""
    field = dict(configs.fields()).get(configs.generic(key))
    words = re.findall(r"'([\w+]+)'", str(field.annotation)) if field is not None else []
    named, share = other_trainers.value_for(value, words), as_share(value)
    number = as_number(value) if share is None else share
    ours = ([named] if named else []) + ([] if number is None else [number, float(number)])
    if isinstance(value, str) and value.lower() in SWITCHES:
        ours.append(SWITCHES[value.lower()])
    return [*ours, str(value)] if number is not None else ours


def _takes(key: str, value: Any) -> bool:
    """Whether the key may have the value, in a config with nothing else but what it needs."""
    try:
        configs.parse(nested({**NEEDED, key: value}))
    except UserError:
        return False
    return True


def _row_for(trainer: str, name: str) -> str | None:
    """The key, or the sentence, for an option of this trainer, by its whole name or the last part of it."""
    rows = {
        known: row["here"]
        for row in reversed([row for rows in other_trainers.tables().names.values() for row in rows])
        for known in row.get(trainer, "").split()
    }
    lasts = {known.rpartition(".")[2]: here for known, here in reversed(rows.items())}
    whole = other_trainers.plain(name)
    return rows.get(whole) or rows.get(whole.rpartition(".")[2]) or lasts.get(whole.rpartition(".")[2])
