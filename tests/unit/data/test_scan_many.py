"""A source of very many files: found, read, put into buckets, and the first batch of it, in bounded memory and in calls in
proportion to its photos. How long that takes, benchmarks/data.py says."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests import photos as photos_of
from tests.harness import ROOT
from trainer.data.sources import Source

SIZES = [(24, 16), (16, 24), (20, 20), (24, 20)]

# In a process of its own: what it takes is measured from the libraries on. Arguments: the source, and one with a tenth of
# its photos.
PROGRAM = """
import json, sys, threading, tracemalloc
import torch
from trainer.data.batches import sampler
from trainer.data.examples import examples
from trainer.data.batches.loader import Encoders, Reader, iterate
from tests.photos import scan
from trainer.data.sources import Source
from trainer.models.base import collate
from trainer.base.types import Conditioning

def encode(pixels):
    return torch.nn.functional.avg_pool2d(pixels, 8)
def prompts(texts):
    return Conditioning(torch.tensor([[[float(text.split()[-1])]] for text in texts]))

def work(path):
    "Up to the first batch: what it had."
    encoded = []
    photos = scan([Source(0, path, resolutions=(64,))]).photos
    made = examples(photos, step=16, enlarge=True, seed=0)
    scanned = tracemalloc.get_traced_memory()[1]
    reader = Reader(examples={example.sample: example for example in made}, cache=None, seed=0, latent_side=8,
                    latent_fingerprint="vae", text_fingerprint="text", collate=collate,
                    encoders=Encoders(lambda pixels: encoded.append(pixels) or encode(pixels), prompts))
    updates = sampler.all_updates(made, seed=0, batch_size=4, group=1, after=0)
    batches = iterate(updates, reader, num_workers=0)
    (batch,) = next(batches)
    batches.close()
    numbers = [int(occurrence.sample[-10:-4]) for occurrence in batch.occurrences]
    assert [text.split()[-1] for text in batch.captions] == list(map(str, numbers))
    assert batch.conditioning.sequence.flatten().tolist() == numbers
    assert len(encoded) == len(batch.latents), "no more than the batch is encoded"
    bytes = tracemalloc.get_traced_memory()[1]
    return {"photos": len(photos), "batch": len(batch.latents), "captions": len({photo.caption for photo in photos}),
            "buckets": len({example.bucket for example in made}), "scanned_bytes": scanned, "bytes": bytes}

def calls(path):
    "How many functions are called, in all threads."
    counts = []
    def count(frame, event, argument):
        counts[-1] += event in ("call", "c_call")
    def begin(frame, event, argument):  # each thread has a place of its own
        counts.append(0)
        sys.setprofile(count)
    threading.setprofile(begin)
    counts.append(0)
    sys.setprofile(count)
    work(path)
    sys.setprofile(None)
    threading.setprofile(None)
    return sum(counts)

many, tenth = sys.argv[1:]
work(tenth)  # what is made once is made
fewer, more = calls(tenth), calls(many)
tracemalloc.start()
print(json.dumps(work(many) | {"more": more / fewer}))
"""


def files(first: int, count: int) -> Iterator[tuple[str, bytes]]:
    """Names and bytes of so many photos of a few hundred bytes, each with a caption, a thousand to a folder."""
    encoded = []
    for size in SIZES:
        buffer = io.BytesIO()
        Image.new("RGB", size, (*size, 9)).save(buffer, "PNG")
        encoded.append(buffer.getvalue())
    for number in range(first, first + count):
        name = f"{number // 1000:03d}/{number:06d}"
        yield f"{name}.png", encoded[number % len(SIZES)] + number.to_bytes(4, "big")
        yield f"{name}.txt", f"a photo of sks plush bear, number {number}".encode()


def fill(root: Path, count: int) -> Path:
    for name, content in files(0, count):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def fill_archives(root: Path, count: int) -> str:
    """The same photos and captions, 10,000 to an archive. Their pattern."""
    root.mkdir()
    for first in range(0, count, 10_000):
        with tarfile.open(root / f"{first:06d}.tar", "w") as archive:
            for name, content in files(first, min(10_000, count - first)):
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return f"{root}/*.tar"


@pytest.mark.parametrize(
    ("layout", "count"),
    [
        pytest.param(fill, 1000, id="folder-1000"),
        pytest.param(fill_archives, 1000, id="archives-1000", marks=pytest.mark.slow),
        pytest.param(fill, 100_000, id="folder-100000", marks=pytest.mark.proof),
        pytest.param(fill_archives, 100_000, id="archives-100000", marks=pytest.mark.proof),
    ],
)
def test_many_files(layout: Callable[[Path, int], Path | str], count: int, tmp_path: Path) -> None:
    paths = [str(layout(tmp_path / name, number)) for name, number in (("many", count), ("tenth", count // 10))]
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, *paths], capture_output=True, text=True, cwd=ROOT, check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    found = json.loads(process.stdout)
    assert (found["photos"], found["captions"], found["batch"]) == (count, count, 4) and found["buckets"] >= 3
    # Ten times the photos, at most ten times the calls: nothing looks at all of them for each.
    assert found["more"] < 10.5, found
    # 100,000 in 80 MB, with the order of an epoch 100 MB. The libraries' own caches are a few MB.
    assert found["scanned_bytes"] < 8e6 + 80e6 * count / 100_000, found
    assert found["bytes"] < 8e6 + 100e6 * count / 100_000, found


def test_a_folder_is_listed_once_and_no_file_is_asked_for(tmp_path: Path, monkeypatch) -> None:
    for folder in ("a", "b/c"):
        (tmp_path / folder).mkdir(parents=True)
        for number in range(20):
            for suffix in (".png", ".txt", ".mask.png", ".md"):
                (tmp_path / folder / f"{number}{suffix}").touch()
    calls = []
    for name in ("scandir", "stat", "lstat", "listdir", "open"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, _real=real, _name=name, **k: calls.append(_name) or _real(*a, **k))
    listing = photos_of.listing(Source(0, str(tmp_path), masks="files"))
    monkeypatch.undo()
    assert len(listing.photos) == 40 and all(item.mask and item.caption for item in listing.photos)
    assert calls.count("scandir") == 4 and len(calls) <= 4 + 4 + 2, calls
