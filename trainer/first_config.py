"""A first config for a folder of photos: `train.py --new PHOTOS`.

It is the config of configs/ for this machine's memory (`sdxl_12gb.toml` and its like), with the folder, a name, a trigger and
sample prompts from the captions, and a length for so many photos. The plan says whether it fits. Comments say where values
come from.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import tomlkit
from tomlkit import TOMLDocument

from trainer import config as configs
from trainer import quantization
from trainer.adapter_files import NamedModel, models_at
from trainer.config.reading import CONFIG_FOLDER
from trainer.data.scan import refuse_damaged
from trainer.data.sources import Photo
from trainer.dataset import read_sources
from trainer.devices import Memory, accelerator_of, check_device
from trainer.errors import UserError
from trainer.files import write_atomic
from trainer.forecast import forecast
from trainer.phases import Phases
from trainer.plan import Plan, make_plan, open_source, resolve
from trainer.terminal import printable

MODEL = "stabilityai/stable-diffusion-xl-base-1.0"  # the one that most adapters are for
VIEWS = 100  # of each photo in a run. A common start, not a measured one.
STEPS = 200, 3000  # the shortest and the longest that is written without being asked for
SAMPLED = 6  # times in a run
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


def write_first_config(photos: str, *, model: str | None, memory: int | None, folder: Path) -> Path:
    """Write NAME.toml into `folder`, and return its path. Reads the photos and the headers of the model's files.

    model: as `model.path`; None takes MODEL. memory: bytes of the accelerator; None takes this machine's.
    Raises UserError where the photos have problems, the model cannot be read, or NAME.toml is there.
    """
    phases = Phases(show=True)
    scanned = read_sources(configs.parse({**_MINIMAL, "data": {"sources": [{"path": photos}]}}).data, phases)
    if not scanned.photos:
        why = "".join(f"\n  {problem}" for problem in scanned.damaged)
        raise UserError(f"--new {photos}: no photos can be read there; give a folder that holds some{why}")
    refuse_damaged(scanned)
    name = _name(photos)
    path = folder / f"{name}.toml"
    if path.exists():
        raise UserError(f"--new {photos}: {path} is there; train with it (--config {path}), or move it out of the way")
    named = models_at(model or MODEL, quantization.recognise)[0]
    for preset in _presets(named, memory):
        document = _filled(preset, name=name, photos=photos, model=model or MODEL, named=named, found=scanned.photos)
        plan, fits = _planned(document, memory, phases)
        if fits:
            break
    _set_length(document, plan)
    text = tomlkit.dumps(document)
    head = (
        f"# Written by train.py --new {printable(photos)}, from configs/{preset.name}. Change what you like.\n"
        "# All other keys have their defaults; docs/keys.md has every key.\n"
    )
    write_atomic(path, [head.encode(), text[text.index("\n[run]") :].encode()])
    return path


_MINIMAL = {"run": {"name": "new", "output_dir": "outputs/new", "max_steps": 1}, "model": {"family": "new", "path": "new"}}


def _presets(named: NamedModel, memory: int | None) -> list[Path]:
    """The family's configs for cards of a size, those that memory allows, the largest first; else the smallest alone."""
    sizes = {}
    for path in CONFIG_FOLDER.glob(f"{named.family.name}_*gb.toml"):
        size = re.fullmatch(r".*_(\d+)gb", path.stem)
        assert size is not None
        sizes[int(size[1])] = path
    if not sizes:
        raise UserError(f"--new: configs/ has none for {named.family.name}; begin with a copy of another config")
    if memory is None:
        config = configs.load(str(sizes[min(sizes)]), [])
        memory = Memory.of(check_device(config), config).size
    # A card of 12 GB tells of somewhat less.
    return [sizes[size] for size in sorted(sizes, reverse=True) if size * 2**30 <= memory * 1.05] or [sizes[min(sizes)]]


def _planned(document: TOMLDocument, memory: int | None, phases: Phases) -> tuple[Plan, bool]:
    """The plan, and whether it fits."""
    config = configs.parse(document.unwrap())
    source = open_source(config)
    config = resolve(config, source)
    there = accelerator_of(config, memory) if memory is not None else Memory.of(check_device(config), config)
    plan = make_plan(config, source, processes=1, phases=phases)
    return plan, forecast(plan, there.kernels, base=there.base).fits(there.size)


def _set_length(document: TOMLDocument, plan: Plan) -> None:
    """So many steps that each photo is shown VIEWS times, within STEPS. Batches of a bucket may be short: the plan knows."""
    an_epoch = sum(photo.repeats for photo in plan.photos) / len(plan.photos)  # times that a photo is shown
    least, most = STEPS
    steps = min(most, max(least, round(VIEWS / an_epoch * plan.steps_per_epoch) // 10 * 10))
    times = round(steps / plan.steps_per_epoch * an_epoch)
    _set(document, "run", "max_steps", steps, f"{len(plan.photos)} photos, each about {times} times")
    every = max(1, steps // SAMPLED // 10 * 10)
    _set(document, "validation", "every_steps", every)
    if plan.held_out:
        _set(document, "validation", "loss_every_steps", every)


def _filled(preset: Path, *, name: str, photos: str, model: str, named: NamedModel, found: Sequence[Photo]) -> TOMLDocument:
    """The preset with what is known of these photos and this model."""
    document = tomlkit.parse(preset.read_text(encoding="utf-8"))
    captions = [photo.caption for photo in found if photo.caption]
    trigger = common_phrase(captions) if captions else name.replace("_", " ")
    _set(document, "run", "name", name)
    _set(document, "run", "output_dir", f"outputs/{name}")
    _set(document, "model", "path", model)
    side = named.config("vae").get("sample_size", 1024)
    if side != 1024:
        _set(document, "data", "resolution", side, "what the model was made for")
    source = document["data"]["sources"][0]
    source["path"] = photos
    if trigger:
        source["trigger"] = trigger
        told = (
            "in nearly all captions; added where it is missing" if captions else "there are no captions: all photos get this"
        )
        source["trigger"].comment(told)
    if len(found) >= HELD_OUT_FROM:
        _set(document, "data", "held_out", len(found) // 10, "not trained on: their loss tells learning from memorising")
    _set(document, "validation", "prompts", prompts(captions, trigger), "better: something that no photo shows")
    return document


def _set(document: TOMLDocument, table: str, key: str, value: object, comment: str = "") -> None:
    found = document[table]
    found[key] = value
    if comment:
        found[key].comment(comment)


def _name(photos: str) -> str:
    """Of the run, from the folder's name; of `shards-{0..3}.tar` and of a dataset, from theirs."""
    last = re.split(r"[/\\:]", photos.rstrip("/\\"))[-1] or Path(photos).resolve().name
    last = Path(photos).resolve().name if last in (".", "..") else last
    word = re.sub(r"[^A-Za-z0-9_-]+", "_", re.sub(r"\.\w+$", "", last)).strip("_-")
    return re.sub(r"^\d+_(?=\w)", "", word) or "adapter"


def common_phrase(captions: Sequence[str]) -> str:
    """The longest phrase that nearly all captions hold, as most of them write it; "" where there is none."""
    told = [re.findall(r"[\w'-]+", caption) for caption in captions]
    for length in range(WORDS, 0, -1):
        counts: dict[tuple[str, ...], int] = {}
        for words in told:
            lower = [word.lower() for word in words]
            runs = {tuple(lower[i : i + length]) for i in range(len(lower) - length + 1)}
            for run in runs:
                counts[run] = counts.get(run, 0) + 1
        often = [run for run, count in counts.items() if count >= SHARE * len(told) and not COMMON & {*run}]
        if often:
            chosen = max(often, key=lambda run: (counts[run], run))
            return next(
                " ".join(words[i : i + length])
                for words in told
                for i in range(len(words) - length + 1)
                if tuple(word.lower() for word in words[i : i + length]) == chosen
            )
    return ""


def prompts(captions: Sequence[str], trigger: str) -> list[str]:
    """Two that the samples are drawn from: the first caption and one of the middle; without captions the trigger."""
    if not captions:
        return [trigger]
    chosen = dict.fromkeys((captions[0], captions[len(captions) // 2]))
    holds = trigger.lower()
    return [each if holds in each.lower() else f"{trigger}, {each}" for each in chosen]
