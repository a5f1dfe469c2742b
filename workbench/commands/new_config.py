"""`train.py --new PHOTOS`: writes a first config for a folder of photos. It is the one of configs/ for this machine's memory,
with the folder, a name, a trigger and sample prompts from the captions, and a length by the number of photos."""

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
STEPS = 200, 3000  # the shortest and the longest default length
SAMPLED = 6  # times in a run
SAVED = 5  # times in a run, at least; adapter files are written as often
INTERVALS = ("checkpoint", "export", "validation")
HELD_OUT_FROM = 20  # photos; with fewer, training needs each of them
SHARE = 0.9  # of the captions must contain a phrase that is taken for the subject's name
WORDS = 5  # of a phrase at most
# Words that no name contains.
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

    model: as `model.path`; None: MODEL. memory: bytes of the accelerator; None: this machine's. overrides: of --set. show:
    (config, remedy if it does not fit; None for the last preset) -> whether it fits; plans the written config; if it raises,
    the file is removed. Raises UserError for photos, model or overrides that cannot be used, and if NAME.toml exists.
    """
    phases = Phases(show=True)
    tree = _minimal(_name(photos), photos, model or MODEL)
    keys = _override(tree, overrides)
    if model is not None and "model.path" in keys:
        raise UserError(f"--model {model} and --set model.path={tree['model'].get('path')} both name the model; give one")
    config = configs.parse(tree)
    memo = Memo(layouts=LAYOUTS)
    scanned = read_sources(config, phases, memo)
    if not scanned.photos:
        problems = "".join(f"\n  {problem}" for problem in scanned.damaged)
        raise UserError(f"--new {photos}: no photos can be read there; give a folder that holds some{problems}")
    refuse_damaged(scanned)
    path = folder / f"{config.run.name}.toml"
    if path.exists():
        raise UserError(f"--new {photos}: {path} is there; train with it (--config {path}), or move it out of the way")
    named_model = _find_model(config, keys)
    device = check_device(config) if memory is None else None
    presets = _presets(named_model, Memory.of(device, config).size if device is not None else memory)
    with ExitStack() as undo:
        undo.callback(path.unlink, missing_ok=True)
        for index, preset in enumerate(presets):
            document = _filled(preset, photos=photos, config=config, named=named_model, scanned=scanned.photos)
            compute = configs.parse(document.unwrap()).precision.compute
            on_cpu = device is not None and device.type == "cpu" and "precision.compute" not in keys
            if on_cpu and slow_in(COMPUTE_DTYPES[compute]):
                _set(document, "precision", "compute", "fp32", f"this CPU is slow in {compute}")
            _override(document, overrides)
            session = Session.open(configs.parse(document.unwrap()), only="measure", ports=PORTS)
            _set_component_paths(document, session.source.found)
            data, length = plan_data(session.config, session.source.family, processes=1, phases=phases, scanned=memo)
            _set_length(document, data, length, keys)
            text = re.sub(r"(?<!\n)\n(?=\[)", "\n\n", tomlkit.dumps(document))  # an empty line before an added table
            head = f"# Written by train.py --new {printable(photos)}, from configs/{preset.name}. Change what you like.\n"
            head += "# All other keys have their defaults; docs/keys.md has every key.\n"
            write_atomic(path, [head.encode(), text[text.index("\n[run]") :].encode()])
            smaller = f"configs/{presets[index + 1].name} is tried" if index + 1 < len(presets) else None
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
    """Apply --set overrides in place; returns their keys. In a document each gets a comment."""
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


def _find_model(config: Config, keys: set[str]) -> NamedModel:
    """The model at model.path. keys: set by --set; model.family among them decides between families."""
    model = config.model
    paths = {name: component.path for name, component in model.components.items() if component.path}
    wanted = Wanted(model.variant, revision=model.revision)
    models = models_at(model.path, config=model.config, component_paths=paths, wanted=wanted)
    if "model.family" not in keys:
        return models[0]
    family_named(model.family)
    by_family = {named.family.name: named for named in reversed(models)}
    if model.family not in by_family:
        kinds = " or ".join(named.family.name for named in models)
        raise UserError(f"model.family = {model.family!r}: the model at {model.path} is one of {kinds}; leave the key out")
    return by_family[model.family]


def _presets(named: NamedModel, memory: int) -> list[Path]:
    """The family's configs for cards that memory allows, the largest first; else the one for the smallest card."""
    paths = CONFIG_FOLDER.glob(f"{named.family.name}_*gb.toml")
    sizes = {int(path.stem.rpartition("_")[2].removesuffix("gb")): path for path in paths}
    if not sizes:
        raise UserError(f"--new: configs/ has none for {named.family.name}; begin with a copy of another config")
    # A card of 12 GB reports somewhat less.
    return [sizes[size] for size in sorted(sizes, reverse=True) if size * 2**30 <= memory * 1.05] or [sizes[min(sizes)]]


def _set_component_paths(document: TOMLDocument, paths: Mapping[str, Path]) -> None:
    for name, path in paths.items():
        components = document["model"].setdefault("components", tomlkit.table(is_super_table=True))
        table = components.setdefault(name, tomlkit.table())
        table["path"] = path.as_posix()
        table["path"].comment("found beside the model")


def _set_length(document: TOMLDocument, data: DataPlan, length: Length, keys: set[str]) -> None:
    """Set a length that shows each photo VIEWS times, within STEPS, and intervals, except keys of --set."""
    repeats = sum(photo.repeats for photo in data.photos) / len(data.photos)  # mean per epoch
    least, most = STEPS
    steps = min(most, max(least, round(VIEWS / repeats * length.steps_per_epoch) // 10 * 10))
    if keys.isdisjoint(("run.max_steps", "run.epochs")):
        views = round(steps / length.steps_per_epoch * repeats)
        _set(document, "run", "max_steps", steps, f"{len(data.photos)} photos, each about {views} times")
    else:
        steps = length.max_steps
    every, fifth = max(1, steps // SAMPLED), max(1, steps // SAVED)
    every -= every % 10 if every > 10 else 0
    intervals = {"checkpoint": min(fifth, CheckpointTable().every_steps), "export": fifth, "validation": every}
    for table in INTERVALS:
        if keys.isdisjoint((f"{table}.every_steps", f"{table}.every_epochs")):
            _set(document, table, "every_steps", intervals[table])
    if data.held_out and "validation.loss_every_steps" not in keys:
        _set(document, "validation", "loss_every_steps", every)


def _filled(preset: Path, *, photos: str, config: Config, named: NamedModel, scanned: Sequence[Photo]) -> TOMLDocument:
    """The preset with values for these photos and this model. photos: of --new. config: the minimal one, with overrides."""
    document = tomlkit.parse(preset.read_text(encoding="utf-8"))
    captions, name = [photo.caption for photo in scanned if photo.caption], config.run.name
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
        comment = "in nearly all captions; added where it is missing"
        source["trigger"].comment(comment if captions else "there are no captions: all photos get this")
    images = len({photo.sha256 for photo in scanned})
    if images >= HELD_OUT_FROM:
        count = max(ENOUGH, images // 10)
        _set(document, "data", "held_out", count, "not trained on: their loss tells learning from memorising")
    _set(document, "validation", "prompts", prompts(captions, trigger), "better: something that no photo shows")
    return document


def _set(document: TOMLDocument, table: str, key: str, value: object, comment: str = "") -> None:
    keys = document.setdefault(table, tomlkit.table())
    keys[key] = value
    keys[key].trivia.comment_ws = keys[key].trivia.comment = ""
    if comment:
        keys[key].comment(comment)


def _name(photos: str) -> str:
    """The run's name, from a folder, `shards-{0..3}.tar`, or a dataset."""
    last = re.split(r"[/\\:]", photos.rstrip("/\\"))[-1] or Path(photos).resolve().name
    last = Path(photos).resolve().name if last in (".", "..") else last
    word = re.sub(r"[^A-Za-z0-9_-]+", "_", re.sub(r"\.\w+$", "", last)).strip("_-")
    return re.sub(r"^\d+_(?=\w)", "", word) or "adapter"


def common_phrase(captions: Sequence[str]) -> str:
    """The longest phrase in nearly all captions, as the first of them spells it; "" if there is none. A single caption only
    counts as a whole: nothing tells which of its words name the subject."""
    texts = [re.findall(r"[\w'-]+", caption) for caption in captions]
    if len(texts) == 1 and len(texts[0]) > WORDS:
        return ""
    for length in range(WORDS, 0, -1):
        counts, spellings = Counter[tuple[str, ...]](), dict[tuple[str, ...], str]()
        for words in texts:
            runs = [words[start : start + length] for start in range(len(words) - length + 1)]
            phrases = [tuple(word.lower() for word in run) for run in runs]
            counts.update(set(phrases))
            for phrase, run in zip(phrases, runs, strict=True):
                spellings.setdefault(phrase, " ".join(run))
        shared = [phrase for phrase, count in counts.items() if count >= SHARE * len(texts) and COMMON.isdisjoint(phrase)]
        if shared:
            return spellings[max(shared, key=lambda phrase: (counts[phrase], phrase))]
    return ""


def trigger_line(config: Config) -> str:
    """The line of `--new` about the trigger."""
    trigger = config.data.sources[0].trigger
    if not trigger:
        return "no trigger: no words are in nearly all captions; name the subject in your prompts as the captions do"
    return f'trigger "{printable(trigger)}": name it in your prompts; a caption without it gets it'


def prompts(captions: Sequence[str], trigger: str) -> list[str]:
    """Prompts for samples, at most two: the first and the middle caption; without captions the trigger."""
    if not captions:
        return [trigger]
    texts = dict.fromkeys((captions[0], captions[len(captions) // 2]))
    return [text if not trigger or holds(text, trigger) else f"{trigger}, {text}" for text in texts]
