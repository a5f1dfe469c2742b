"""A first config for a folder of photos: `train.py --new PHOTOS`. It is the config of configs/ for this machine's memory,
with the folder, a name, a trigger and sample prompts from the captions, and a length for so many photos."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit import TOMLDocument

from trainer import config as configs
from trainer.base.console import printable
from trainer.base.errors import UserError
from trainer.base.files import write_atomic
from trainer.base.progress import Phases
from trainer.base.text import holds
from trainer.config import Config
from trainer.config.reading import CONFIG_FOLDER
from trainer.config.tables import CheckpointTable
from trainer.data.memo import Memo
from trainer.data.scan import refuse_damaged
from trainer.data.sources import Photo
from trainer.models import family_named
from trainer.models.weight_sets import Wanted
from trainer.plan.data_sources import read_sources
from trainer.plan.fixed_draws import ENOUGH
from trainer.plan.run_plan import DataPlan, Length, plan_data
from trainer.run.session import Session
from trainer.runtime.device import Memory, check_device
from trainer.runtime.precision import COMPUTE_DTYPES
from workbench.adapter_files.opening import NamedModel, models_at
from workbench.commands.ports import PORTS
from workbench.planning.step_time import slow_in
from workbench.sources import LAYOUTS

Show = Callable[[Config, str | None], bool]
MODEL = "stabilityai/stable-diffusion-xl-base-1.0"  # the one that most adapters are for
VIEWS = 100  # of each photo in a run. A common start, not a measured one.
STEPS = 200, 3000  # the shortest and the longest that is written without being asked for
SAMPLED = 6  # times in a run
SAVED = 5  # times in a run, at least; adapter files are written as often
INTERVALS = ("checkpoint", "export", "validation")
HELD_OUT_FROM = 20  # photos; with fewer each is needed for the training
SHARE = 0.9  # of the captions that have to hold a phrase before it is the subject's name
WORDS = 5  # of a phrase at most
# Words that no name has.
COMMON = frozenset(
    re.findall(
        r"\w+",
        "a an and as at background by close drawing for from front her his image in is it its of on one painting photo "
        "photograph picture portrait shot side some that the their this to two up view with",
    )
)


def write_first_config(
    photos: str, *, model: str | None, memory: int | None, overrides: Sequence[str] = (), folder: Path, show: Show
) -> Path:
    """Write NAME.toml into `folder`, and return its path. Reads the photos and the headers of the model's files.

    model: as `model.path`; None takes MODEL. memory: bytes of the accelerator; None takes this machine's. overrides: as of
    --set. show(config, what is done where it does not fit, None of the last) -> whether it fits: plans the config once it is
    written; where it raises, nothing is left. Raises UserError where the photos have problems, the model cannot be read, an
    override is wrong, or NAME.toml is there.
    """
    phases = Phases(show=True)
    tree = _minimal(_name(photos), photos, model or MODEL)
    given = _override(tree, overrides)
    if model is not None and "model.path" in given:
        raise UserError(f"--model {model} and --set model.path={tree['model'].get('path')} both name the model; give one")
    config = configs.parse(tree)
    memo = Memo(layouts=LAYOUTS)
    scanned = read_sources(config, phases, memo)
    if not scanned.photos:
        why = "".join(f"\n  {problem}" for problem in scanned.damaged)
        raise UserError(f"--new {photos}: no photos can be read there; give a folder that holds some{why}")
    refuse_damaged(scanned)
    path = folder / f"{config.run.name}.toml"
    if path.exists():
        raise UserError(f"--new {photos}: {path} is there; train with it (--config {path}), or move it out of the way")
    named = _named(config, given)
    device = check_device(config) if memory is None else None
    presets = _presets(named, Memory.of(device, config).size if device is not None else memory)
    with ExitStack() as undo:
        undo.callback(path.unlink, missing_ok=True)
        for place, preset in enumerate(presets):
            document = _filled(preset, photos=photos, config=config, named=named, found=scanned.photos)
            compute = configs.parse(document.unwrap()).precision.compute
            on_cpu = device is not None and device.type == "cpu" and "precision.compute" not in given
            if on_cpu and slow_in(COMPUTE_DTYPES[compute]):
                _set(document, "precision", "compute", "fp32", f"this CPU is slow in {compute}")
            _override(document, overrides)
            chosen = configs.parse(document.unwrap())
            session = Session.open(chosen, only="measure", ports=PORTS)
            _set_found(document, session.source.found)
            planned = plan_data(session.config, session.source.family, processes=1, phases=phases, scanned=memo)
            _set_length(document, *planned, given)
            text = re.sub(r"(?<!\n)\n(?=\[)", "\n\n", tomlkit.dumps(document))  # an empty line before an added table
            head = f"# Written by train.py --new {printable(photos)}, from configs/{preset.name}. Change what you like.\n"
            head += "# All other keys have their defaults; docs/keys.md has every key.\n"
            write_atomic(path, [head.encode(), text[text.index("\n[run]") :].encode()])
            smaller = f"configs/{presets[place + 1].name} is tried" if place + 1 < len(presets) else None
            if show(configs.load(str(path), []), smaller):
                break
        undo.pop_all()
    return path


def _minimal(name: str, photos: str, model: str) -> dict[str, Any]:
    return {
        "run": {"name": name, "output_dir": f"outputs/{name}", "max_steps": STEPS[0]},
        "model": {"family": "new", "path": model},
        "data": {"sources": [{"path": photos}]},
    }


def _override(tree: dict[str, Any], overrides: Sequence[str]) -> set[str]:
    """Apply them, in place, and return their keys. In a document each has a comment."""
    keys = configs.override(tree, overrides)
    run = tree["run"]
    if isinstance(run, dict) and "run.epochs" in keys and "epochs" in run and "run.max_steps" not in keys:
        del run["max_steps"]
    for table in INTERVALS:  # the preset's, in steps
        if f"{table}.every_epochs" in keys and f"{table}.every_steps" not in keys and isinstance(tree[table], dict):
            tree[table].pop("every_steps", None)
    for key in keys if isinstance(tree, TOMLDocument) else ():
        item: Any = tree
        for part in key.split("."):
            item = item[int(part)] if isinstance(item, list) else item.get(part, {})
        if isinstance(item, tomlkit.items.Item):
            item.comment("as --set said")
    return set(keys)


def _named(config: Config, given: set[str]) -> NamedModel:
    model = config.model
    paths = {name: component.path for name, component in model.components.items() if component.path}
    wanted = Wanted(model.variant, revision=model.revision)
    models = models_at(model.path, config=model.config, component_paths=paths, wanted=wanted)
    if "model.family" not in given:
        return models[0]
    family_named(model.family)
    by_family = {named.family.name: named for named in reversed(models)}
    if model.family not in by_family:
        kinds = " or ".join(named.family.name for named in models)
        raise UserError(f"model.family = {model.family!r}: the model at {model.path} is one of {kinds}; leave the key out")
    return by_family[model.family]


def _presets(named: NamedModel, memory: int) -> list[Path]:
    """The family's configs for cards of a size, those that memory allows, the largest first; else the smallest alone."""
    paths = CONFIG_FOLDER.glob(f"{named.family.name}_*gb.toml")
    sizes = {int(path.stem.rpartition("_")[2].removesuffix("gb")): path for path in paths}
    if not sizes:
        raise UserError(f"--new: configs/ has none for {named.family.name}; begin with a copy of another config")
    # A card of 12 GB tells of somewhat less.
    return [sizes[size] for size in sorted(sizes, reverse=True) if size * 2**30 <= memory * 1.05] or [sizes[min(sizes)]]


def _set_found(document: TOMLDocument, parts: Mapping[str, Path]) -> None:
    for name, place in parts.items():
        components = document["model"].setdefault("components", tomlkit.table(is_super_table=True))
        table = components.setdefault(name, tomlkit.table())
        table["path"] = place.as_posix()
        table["path"].comment("found beside the model")


def _set_length(document: TOMLDocument, data: DataPlan, length: Length, given: set[str]) -> None:
    """So many steps that each photo is shown VIEWS times, within STEPS. given: keys that stay as they are."""
    an_epoch = sum(photo.repeats for photo in data.photos) / len(data.photos)  # times that a photo is shown
    least, most = STEPS
    steps = min(most, max(least, round(VIEWS / an_epoch * length.steps_per_epoch) // 10 * 10))
    if given.isdisjoint(("run.max_steps", "run.epochs")):
        times = round(steps / length.steps_per_epoch * an_epoch)
        _set(document, "run", "max_steps", steps, f"{len(data.photos)} photos, each about {times} times")
    else:
        steps = length.max_steps
    every, fifth = max(1, steps // SAMPLED), max(1, steps // SAVED)
    every -= every % 10 if every > 10 else 0
    intervals = {"checkpoint": min(fifth, CheckpointTable().every_steps), "export": fifth, "validation": every}
    for table in INTERVALS:
        if given.isdisjoint((f"{table}.every_steps", f"{table}.every_epochs")):
            _set(document, table, "every_steps", intervals[table])
    if data.held_out and "validation.loss_every_steps" not in given:
        _set(document, "validation", "loss_every_steps", every)


def _filled(preset: Path, *, photos: str, config: Config, named: NamedModel, found: Sequence[Photo]) -> TOMLDocument:
    """The preset with what is known of these photos and this model. config: what is given of it."""
    document = tomlkit.parse(preset.read_text(encoding="utf-8"))
    captions, name = [photo.caption for photo in found if photo.caption], config.run.name
    trigger = config.data.sources[0].trigger or (common_phrase(captions) if captions else name.replace("_", " "))
    _set(document, "run", "name", name)
    _set(document, "run", "output_dir", f"outputs/{name}")
    if config.model.path != document["model"]["path"]:
        _set(document, "model", "path", config.model.path)
    side = named.config("vae").get("sample_size", 1024)
    if side != 1024:
        _set(document, "data", "resolution", side, "what the model was made for")
    source = document["data"]["sources"][0]
    source["path"] = photos
    if trigger:
        source["trigger"] = trigger
        shared = "in nearly all captions; added where it is missing"
        source["trigger"].comment(shared if captions else "there are no captions: all photos get this")
    images = len({photo.sha256 for photo in found})
    if images >= HELD_OUT_FROM:
        apart = max(ENOUGH, images // 10)
        _set(document, "data", "held_out", apart, "not trained on: their loss tells learning from memorising")
    _set(document, "validation", "prompts", prompts(captions, trigger), "better: something that no photo shows")
    return document


def _set(document: TOMLDocument, table: str, key: str, value: object, comment: str = "") -> None:
    place = document.setdefault(table, tomlkit.table())
    place[key] = value
    place[key].trivia.comment_ws = place[key].trivia.comment = ""
    if comment:
        place[key].comment(comment)


def _name(photos: str) -> str:
    """The run's, from that of the folder, of `shards-{0..3}.tar`, or of a dataset."""
    last = re.split(r"[/\\:]", photos.rstrip("/\\"))[-1] or Path(photos).resolve().name
    last = Path(photos).resolve().name if last in (".", "..") else last
    word = re.sub(r"[^A-Za-z0-9_-]+", "_", re.sub(r"\.\w+$", "", last)).strip("_-")
    return re.sub(r"^\d+_(?=\w)", "", word) or "adapter"


def common_phrase(captions: Sequence[str]) -> str:
    """The longest phrase that nearly all captions hold, as the first of them writes it; "" where there is none. A single
    caption is it as a whole: nothing tells which of its words are the subject's."""
    texts = [re.findall(r"[\w'-]+", caption) for caption in captions]
    if len(texts) == 1 and len(texts[0]) > WORDS:
        return ""
    lowered = [[word.lower() for word in words] for words in texts]
    for length in range(WORDS, 0, -1):
        counts: Counter[tuple[str, ...]] = Counter()
        for words in lowered:
            counts.update({tuple(words[i : i + length]) for i in range(len(words) - length + 1)})
        often = [run for run, count in counts.items() if count >= SHARE * len(texts) and COMMON.isdisjoint(run)]
        if often:
            phrase = max(often, key=lambda run: (counts[run], run))
            return next(
                " ".join(words[i : i + length])
                for words, lower in zip(texts, lowered, strict=True)
                for i in range(len(words) - length + 1)
                if tuple(lower[i : i + length]) == phrase
            )
    return ""


def trigger_line(config: Config) -> str:
    """What `--new` says of the trigger that it found, or was given by --set."""
    trigger = config.data.sources[0].trigger
    if not trigger:
        return "no trigger: no words are in nearly all captions; name the subject in your prompts as the captions do"
    return f'trigger "{printable(trigger)}": name it in your prompts; a caption without it gets it'


def prompts(captions: Sequence[str], trigger: str) -> list[str]:
    """Two that the samples are drawn from: the first caption and one of the middle; without captions the trigger."""
    if not captions:
        return [trigger]
    texts = dict.fromkeys((captions[0], captions[len(captions) // 2]))
    return [each if not trigger or holds(each, trigger) else f"{trigger}, {each}" for each in texts]
