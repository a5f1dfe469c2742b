"""Encodings on disk, in memory or nowhere: what a step sees is the same, and exactly what changed is encoded again."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.harness import PHOTOS, ROOT, Workbench
from tests.unit.data.cache.test_fill import entries_of
from trainer import config as configs
from trainer import kernels
from trainer.base.digests import FileDigests
from trainer.base.errors import DataError, UserError
from trainer.base.progress import QUIET
from trainer.base.run_layout import in_use
from trainer.base.tensorfile import TensorFile
from trainer.base.types import Occurrence
from trainer.data.cache import fill
from trainer.data.cache.entries import Cache
from trainer.data.images import views
from trainer.engine import step
from trainer.engine.components import Components
from trainer.engine.encoding import encode
from trainer.plan.data_sources import open_cache
from trainer.plan.run_plan import make_plan, open_source, resolve
from trainer.runtime.device import start_processes
from workbench.commands import main as cli

# --- the sequence of what the steps draw ------------------------------------------------------------------------------

RECORDER = """
import os, sys
from pathlib import Path
from tests.integration.test_caches import recorder
from workbench.commands import main as cli
from trainer.engine import step

step.draw_time_and_noise = recorder(Path(f"{os.environ['RECORD']}.{os.environ.get('RANK', '0')}"))
sys.exit(cli.main(sys.argv[1:]))
"""


def recorder(record: Path):
    """What takes the place of `step.draw_time_and_noise`, and adds a line for each micro-batch to `record`."""
    draw = step.draw_time_and_noise

    def digest(tensor: torch.Tensor) -> str:
        return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]

    def recorded(batch, **more):
        time, noise = draw(batch, **more)
        told = {name: tensor for name, tensor in vars(batch).items() if hasattr(tensor, "shape")}
        told |= {"conditioning " + name: tensor for name, tensor in batch.conditioning.tensors().items()}
        told |= {"time": time, "noise": noise}
        assert (batch.loss_weights is None) == ("loss_weights" not in told)
        lines = []
        for i, occurrence in enumerate(batch.occurrences):
            where = [occurrence.epoch, occurrence.sample, occurrence.repeat, batch.captions[i]]
            where += [batch.target_size[i].tolist(), batch.crop_top_left[i].tolist(), float(time[i])]
            lines.append([*where, {name: digest(tensor[i]) for name, tensor in told.items()}])
        with record.open("a") as file:
            print(json.dumps(lines), file=file)
        return time, noise

    return recorded


def varied(bench: Workbench) -> Path:
    """Photos, most with a mask, with tags that are shuffled and wildcards."""
    folder = bench.tmp / "varied"
    if not folder.exists():
        shutil.copytree(PHOTOS, folder)
        for number in range(5):
            (folder / f"0{number}.txt").write_text(f"bear {number}, {{red|green|blue}}, grey rock, bushes, a toy")
        for number in range(4):
            with Image.open(folder / f"0{number}.jpg") as photo:
                mask(photo.size, number).save(folder / f"0{number}.mask.png")
    return folder


def mask(size: tuple[int, int], number: int) -> Image.Image:
    """White but for a black band at the left."""
    made = Image.new("L", size, 255)
    made.paste(0, (0, 0, (number + 1) * size[0] // 8, size[1]))
    return made


def sequence(bench: Workbench, kind: str, workers: int, processes: int) -> list[object]:
    """Of a short run: what each sample of each micro-batch was, in the order of the updates."""
    name = f"{kind}-{workers}-{processes}"
    tree = bench.tree(
        run__output_dir=str(bench.tmp / name), run__max_steps=9, run__stop_after=8, step__accumulation=2 // processes,
        adapter__targets=["*attn1.to_q"], data__flip=True, data__caption_dropout=0.3, data__batch_size=1,
        data__masks="files", data__crop_jitter=0.3, data__unmasked_weight=0.1,
        data__sources=[{"path": str(varied(bench)), "repeats": 2, "shuffle": True, "wildcards": True}],
        data__cache=kind, data__num_workers=workers,
        data__cache_dir=str(bench.tmp / "cache"),
    )  # fmt: skip
    script, record, path = bench.tmp / "recorded.py", bench.tmp / f"{name}.jsonl", bench.write(tree, f"{name}.toml")
    if processes == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step, "draw_time_and_noise", recorder(Path(f"{record}.0")))
            assert cli.main(["--config", str(path)]) == 0
    else:
        script.write_text(RECORDER)
        launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--standalone"]
        done = subprocess.run(
            [sys.executable, *launch, str(script), "--config", str(path)],
            cwd=ROOT, capture_output=True, text=True, timeout=500,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RECORD": str(record)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    of_ranks = [[json.loads(line) for line in Path(f"{record}.{r}").read_text().splitlines()] for r in range(processes)]
    # Ten micro-batches to an epoch, two to an update: none is short.
    return [batch for together in zip(*of_ranks, strict=True) for batch in together]


@pytest.mark.parametrize(
    ("kind", "workers", "processes"),
    [
        pytest.param("memory", 2, 1, marks=pytest.mark.slow),
        pytest.param("none", 0, 1, marks=pytest.mark.slow),
        pytest.param("none", 0, 2, marks=pytest.mark.proof),
        pytest.param("disk", 1, 2, marks=pytest.mark.proof),
    ],
)
def test_the_sequence_is_the_same(bench: Workbench, models: Path, kind: str, workers: int, processes: int) -> None:
    """(sample, bucket, crop, caption, timestep, noise), recorded where the step draws; and what the denoiser gets."""
    kept = models / "the sequence.json"
    if not kept.exists():
        kept.write_text(json.dumps(sequence(bench, "disk", 0, 1)))
        for folder in ("disk-0-1", "cache"):
            shutil.rmtree(bench.tmp / folder)
        for path in bench.tmp.glob("disk-0-1.jsonl.*"):
            path.unlink()
    expected = json.loads(kept.read_text())
    samples = [sample for batch in expected for sample in batch]
    assert len(samples) == 16 and {sample[3] == "" for sample in samples} == {True, False}, "captions are dropped"
    assert {"loss_weights" in sample[-1] for sample in samples} == {True, False}, "some photos have masks"
    of_photo: dict[str, list[list]] = {}
    for sample in samples:
        of_photo.setdefault(sample[1], []).append(sample)
    differ = {name: max(len({json.dumps(sample[place]) for sample in some}) for some in of_photo.values())
              for name, place in (("caption", 3), ("crop", 5))}  # fmt: skip
    assert differ["caption"] > 2 and differ["crop"] > 1, "of one photo"
    assert max(len({sample[-1].get("loss_weights") for sample in some}) for some in of_photo.values()) > 1
    assert sequence(bench, kind, workers, processes) == expected
    files = [path for path in bench.tmp.rglob("*.safetensors") if not {"checkpoints", "adapters"} & {*path.parts}]
    assert bool(files) == (kind == "disk"), "nothing is written, but where it is asked for"


@pytest.mark.slow
def test_every_cache_gives_the_same_batches(bench: Workbench) -> None:
    """The short form of the above, without steps: what the readers give, from the tiny models' own encoders."""
    batches = []
    for kind in ("disk", "memory", "none"):
        _, reader = encoded(bench, data__cache=kind, data__flip=True)
        micro_batch = tuple(
            Occurrence(epoch, sample, 0) for epoch, sample in enumerate(sorted(reader.examples)) if sample < "0/03"
        )
        each = [reader[(occurrence,)] for occurrence in micro_batch]
        batches.append([
            (batch.captions, *(tensor.numpy().tobytes() for tensor in (batch.latents, batch.crop_top_left)),
             *(tensor.numpy().tobytes() for tensor in batch.conditioning.tensors().values()))
            for batch in each
        ])  # fmt: skip
    assert batches[0] == batches[1] == batches[2] and len(batches[0]) == 3


# --- what is encoded again --------------------------------------------------------------------------------------------


def encoded(bench: Workbench, model: Path | None = None, **overrides):
    """(the line that says what was encoded, reader) of a start, as far as its encodings go."""
    overrides = {"data__cache_dir": str(bench.tmp / "cache"), "adapter__targets": ["*attn1.to_q"]} | overrides
    config = configs.parse(bench.tree(**overrides | ({"model__path": str(model)} if model else {})))
    source = open_source(config)
    config = resolve(config, source)
    peers, said = start_processes(config), []
    peers.say = said.append
    plan = make_plan(config, source, processes=1, phases=QUIET)
    folder = Path(config.data.cache_dir)
    # Each start hashes the model's files itself.
    digests = FileDigests(bench.tmp / f"digests-{os.urandom(4).hex()}.json", QUIET)
    components = Components(
        plan.model, kernels=kernels.choose("auto", peers.device), digests=digests, processes=peers, phases=QUIET
    )
    reader = encode(plan, components, open_cache(config.data, folder), on_non_finite=pytest.fail)
    return [line for line in said if "cache" in line], reader


def made(bench: Workbench, **overrides) -> tuple[int, int]:
    """(latents, texts) that a start encodes."""
    (line,), _ = encoded(bench, **overrides)
    counts = re.fullmatch(r"cache: (\d+) latents and (\d+) texts encoded, the rest was there", line)
    return int(counts[1]), int(counts[2])


@pytest.mark.slow
def test_exactly_the_masks_and_crops_that_changed_are_made_again(bench: Workbench) -> None:
    photos = varied(bench)
    two = [{"path": str(photos)}, {"path": str(PHOTOS)}]

    def line(**overrides) -> str:
        (said,), _ = encoded(bench, **{"data__sources": two, "data__masks": "files"} | overrides)
        return said.removeprefix("cache: ").removesuffix(" encoded, the rest was there")

    assert line() == "5 latents, 4 masks and 11 texts", "the photos of both sources are the same"
    assert line() == "0 latents, 0 masks and 0 texts"
    with Image.open(photos / "02.jpg") as photo:
        mask(photo.size, 5).save(photos / "02.mask.png")
    assert line() == "0 latents, 1 masks and 0 texts"
    # Another crop rule: each photo has three more views, and so has its mask. The crop at the centre is there, and where two
    # rules give one crop it is there, too.
    known: set[tuple] = set()
    for jitter in (0.0, 0.2, 0.1):
        (said,), reader = encoded(bench, data__sources=two, data__masks="files", data__crop_jitter=jitter)
        crops = {
            (what, *place.resized_size, *place.crop_top_left)
            for example in reader.examples.values()
            for place in (view.place(example) for view in views.every(reader.seed, example))
            for what in (example.photo.sha256, example.photo.mask and example.photo.mask.sha256)
            if what
        }
        masks = {example.photo.mask and example.photo.mask.sha256 for example in reader.examples.values()}
        new = [sum((crop[0] in masks) == of_masks for crop in crops - known) for of_masks in (False, True)]
        assert not jitter or (new[0] > 20 and new[1] > 8)
        assert not jitter or f"cache: {new[0]} latents, {new[1]} masks and 0 texts encoded" in said
        known |= crops
    # Other buckets, of one source.
    larger = [two[0] | {"resolution": 128}, two[1]]
    assert line(data__sources=larger) == "5 latents, 4 masks and 0 texts"
    assert line(data__sources=larger) == line() == line(data__crop_jitter=0.2) == "0 latents, 0 masks and 0 texts"
    assert line(data__masks="none") == "0 latents and 0 texts"


def change_a_weight(folder: Path, tensor: str) -> None:
    (path,) = folder.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[TensorFile(path).entries[tensor].start] ^= 1
    path.write_bytes(data)


@pytest.mark.slow
def test_exactly_what_changed_is_encoded_again(bench: Workbench, monkeypatch) -> None:
    photos = Path(shutil.copytree(PHOTOS, bench.tmp / "photos"))
    model = Path(shutil.copytree(bench.models / "sdxl", bench.tmp / "model"))
    use = {"data__sources": [{"path": str(photos)}], "model": model}
    count = len(list(photos.glob("*.jpg")))
    texts = len({path.read_text().strip() for path in photos.glob("*.txt")} | {""})
    assert made(bench, **use) == (count, texts)
    assert made(bench, **use) == (0, 0)

    with open(photos / "01.jpg", "r+b") as image:  # one byte of its comment, or of what follows the image
        image.seek(0, os.SEEK_END)
        image.write(b"\0")
    assert made(bench, **use) == (1, 0)

    caption = photos / "02.txt"
    caption.write_text(caption.read_text().strip() + "!")
    assert made(bench, **use) == (0, 1)

    assert made(bench, **use, data__resolution=128) == (count, 0)
    assert made(bench, **use, data__flip=True) == (count, 0)
    monkeypatch.setattr(fill, "PREPROCESSING_VERSION", fill.PREPROCESSING_VERSION + 1)  # how pixels are cropped
    assert made(bench, **use) == (count, 0)

    change_a_weight(model / "vae", "encoder.conv_in.weight")
    assert made(bench, **use) == (count, 0)
    (name,) = [
        name for name in TensorFile(next((model / "text_encoder").glob("*.safetensors"))).entries if "1.mlp.fc1.w" in name
    ]
    change_a_weight(model / "text_encoder", name)
    assert made(bench, **use) == (0, texts)

    packs = {path: path.read_bytes() for path in (bench.tmp / "cache").rglob("*.safetensors")}
    before, wanted = entries_of(bench.tmp / "cache"), _keys(bench, use)
    latents, conditioning = (
        next(key for key, data in before.items() if key in wanted and (b'"sample"' in data) == is_latents)
        for is_latents in (True, False)
    )
    for key, expected in ((latents, (1, 0)), (conditioning, (0, 1))):
        for path, whole in packs.items():
            path.write_bytes(whole.replace(before[key], before[key][:-5] + b"#" + before[key][-4:]))
        with pytest.raises(DataError, match=key):
            Cache(bench.tmp / "cache").get(key)
        assert made(bench, **use) == expected
    again = Cache(bench.tmp / "cache")
    assert again.missing(before) == [] and all(again.get(key) for key in before), "made again, all sound"
    assert _copies(bench.tmp / "cache", latents) == [before[latents]] * 2, "with the same bytes"
    assert made(bench, **use) == (0, 0)


def _copies(folder: Path, key: str) -> list[bytes]:
    packs = map(TensorFile, folder.glob("packs/*.safetensors"))
    return [pack.read(key).numpy().tobytes() for pack in packs if key in pack.entries]


def _keys(bench: Workbench, use: dict) -> set[str]:
    """Of the entries that the present data and encoders need."""
    asked: set[str] = set()

    class Asked(Cache):
        def missing(self, keys, phases=QUIET):
            asked.update(keys)
            return []

        def is_finite(self, key):
            return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.plan.data_sources.Cache", Asked)
        patch.setattr("trainer.engine.encoding.Cache", Asked)
        encoded(bench, **use)
    return asked


@pytest.mark.slow
def test_one_encoder_is_in_memory_at_a_time(bench: Workbench, monkeypatch) -> None:
    """The text encoders one after another, then the VAE, which stays where samples are drawn."""
    load, seen = Components.load, []

    def watched(self, name):
        module = load(self, name)
        if seen[-1:] != [{*self.model.modules}]:
            seen.append({*self.model.modules})
        return module

    monkeypatch.setattr(Components, "load", watched)
    encoded(bench, validation__every_steps=1, validation__prompts=["a"])
    assert seen == [{"text_encoder"}, {"text_encoder_2"}, {"vae"}]
    seen.clear()
    encoded(bench)
    assert seen == [], "nothing is missing, so nothing is loaded"


# --- the modes --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_without_a_cache_the_encoders_stay_and_only_what_is_drawn_is_encoded(bench: Workbench, monkeypatch) -> None:
    count = []
    encode_images = Components.encode_images
    monkeypatch.setattr(Components, "encode_images", lambda self, pixels: count.append(1) or encode_images(self, pixels))
    (line,), reader = encoded(bench, data__cache="none")
    assert re.fullmatch(
        r"cache: none; vae, text_encoder, text_encoder_2 stay in memory \(.* MiB\), photos are encoded when they are drawn",
        line,
    )
    assert count == [] and not (bench.tmp / "cache").exists()
    reader[(Occurrence(0, "0/01.jpg", 0),)]
    assert len(count) == 1
    reader[(Occurrence(0, "0/01.jpg", 0),)]
    assert len(count) == 2, "nothing is kept"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"data__cache": "memory", "data__cache_limit": "1GB"},
         "data.cache_limit = '1GB' has no effect with data.cache = 'memory'; leave it out, or set data.cache = 'disk'"),
        ({"data__cache": "none", "data__cache_text": True},
         "data.cache_text = True has no effect with data.cache = 'none'; leave it out, or set data.cache = 'memory'"),
        ({"data__cache_limit": "20"}, "data.cache_limit = '20': write a number and its unit, for example \"20GB\""),
        ({"data__cache": "ram"}, "data.cache = 'ram': use one of 'disk', 'memory', 'none'"),
    ],
)  # fmt: skip
def test_choices_that_cannot_be_are_refused(bench: Workbench, wrong: dict, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        open_source(configs.parse(bench.tree(**wrong)))


@pytest.mark.slow
def test_the_limit_is_said(bench: Workbench) -> None:
    lines, _ = encoded(bench, data__cache_limit="1kB")
    assert re.fullmatch(
        r"warning: data.cache_limit = '1kB': the cache holds .* more, all of it in use by this run.*", lines[-1]
    )
    for path in (bench.tmp / "cache").rglob("*.safetensors"):
        os.utime(path, (1e9, 1e9))
    lines, _ = encoded(bench, data__cache_limit="1kB", data__resolution=128)
    # The texts are claimed again, before anything is encoded; the latents of the other resolution by nobody.
    assert "cache: 1 files that no run uses were deleted (data.cache_limit = '1kB')" in lines
    assert in_use(bench.tmp / "cache").read_bytes() == b""
