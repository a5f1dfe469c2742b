"""Mutated tables, `.json` captions and masks: each is named before training, or read for what it says. No crash, no hang."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import random
import subprocess
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from tests.harness import ROOT
from tests.unit.data.images.test_decode_mutated import encoded

CHILD = """
import json, sys, warnings
warnings.simplefilter("ignore")
from trainer.data.scan import survey
from trainer.data.sources import Source
found = survey([Source(0, sys.argv[1], masks="files")])
photos = {p.sample: (p.caption, p.mask and p.mask.sha256) for p in found.photos}
print(json.dumps({"damaged": found.damaged, "left_out": found.left_out, "photos": photos}))
"""

ROWS = [{"file_name": "a.png", "text": "a sks bear, on a log"}, {"file_name": "b.png", "text": "caf\u00e9 and a bear"}]
WORDS = ("caption", "text", "prompt")


def as_csv() -> bytes:
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, list(ROWS[0]))
    writer.writeheader()
    writer.writerows(ROWS)
    return buffer.getvalue().encode()


def as_parquet() -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), buffer)
    return buffer.getvalue()


def from_parquet(data: bytes) -> list[dict[str, Any]]:
    """None where its parts contradict each other: then no photo may be trained on."""
    try:
        return pyarrow.parquet.read_table(io.BytesIO(data)).to_pylist()
    except pyarrow.ArrowInvalid:
        return []


# By name of the file: its bytes, and its rows as read here.
SOUND: dict[str, bytes] = {
    "metadata.jsonl": "\n".join(json.dumps(row) for row in ROWS).encode(),
    "metadata.csv": as_csv(),
    "metadata.parquet": as_parquet(),
    "a.json": json.dumps({"caption": "caf\u00e9 and a bear", "tags": ["sks", 1], "nested": {"a": None}}).encode(),
    "a.mask.png": encoded(Image.effect_noise((48, 32), 60), "PNG"),
}
READ: dict[str, Callable[[bytes], list[dict[str, Any]]]] = {
    "metadata.jsonl": lambda data: [json.loads(line) for line in data.decode("utf-8-sig").split("\n") if line.strip()],
    "metadata.csv": lambda data: list(csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline=""))),
    "metadata.parquet": lambda data: from_parquet(data),
    "a.json": lambda data: [json.loads(data.decode("utf-8-sig")) | {"file_name": "a.png"}],
}


def shown(text: str) -> str:
    """The text without control and format characters: a mutation makes no letters of emoji or Persian."""
    return "".join(each for each in text if each in "\t\n\v\f\r\x85" or unicodedata.category(each) not in ("Cc", "Cf"))


def mutated(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    """(what was done, the bytes)."""
    done, data = rng.choice(["bytes", "bytes", "bytes", "cut", "empty", "text", "deep", "sound", "marked"]), bytearray(data)
    if done == "bytes":
        for _ in range(rng.choice([1, 1, 3, 10])):
            data[rng.randrange(len(data))] = rng.choice([0, 34, 44, 10, 255, rng.randrange(256)])
    elif done == "cut":
        del data[rng.randrange(1, len(data)) :]
    elif done == "marked":
        data[:0] = b"\xef\xbb\xbf"
    return done, {"empty": b"", "text": rng.randbytes(rng.randrange(1, 300)), "deep": b"[" * 100_000}.get(done, bytes(data))


@pytest.mark.slow
@pytest.mark.parametrize("count", [pytest.param(5000, marks=pytest.mark.proof), 250])
def test_each_is_named_or_read_for_what_it_says(tmp_path: Path, count: int) -> None:
    rng, files = random.Random(count), {}
    images = {name: encoded(Image.effect_noise((48, 32), 60).convert("RGB"), "PNG") for name in ("a.png", "b.png")}
    for number in range(count):
        folder, kind = tmp_path / f"{number:05}", rng.choice(sorted(SOUND))
        folder.mkdir()
        for name, data in images.items():
            (folder / name).write_bytes(data)
        done, data = mutated(rng, SOUND[kind])
        (folder / kind).write_bytes(data)
        files[folder.name] = kind, done, data

    child = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", CHILD, str(tmp_path)],
        capture_output=True, text=True, timeout=300, cwd=ROOT,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
    found = json.loads(child.stdout.splitlines()[-1])
    assert all(line.startswith(f"{tmp_path}/") for line in found["damaged"])
    named = Counter(line.removeprefix(f"{tmp_path}/")[:5] for line in found["damaged"])
    left_out = {what.removeprefix(f"{tmp_path}/") for what, _ in found["left_out"]}
    read = Counter()
    for folder, (kind, done, data) in files.items():
        about = (folder, kind, done)
        assert folder not in named or done != "sound", about
        if folder in named:
            continue
        assert done not in ("text", "deep") or kind == "metadata.csv", about
        rows = {row["file_name"]: row for row in READ[kind](data)} if kind in READ else {}
        for name in images:
            sample = f"0/{folder}/{name}"
            if sample not in found["photos"]:
                assert kind.startswith("metadata") and name not in rows and f"{folder}/{name}" in left_out, about
                continue
            caption, mask = found["photos"][sample]
            column = next((word for word in WORDS if word in rows.get(name, {})), None)
            assert caption == (shown(rows[name][column] or "").strip() if column else ""), about
            expected = hashlib.sha256(data).hexdigest() if (kind, name) == ("a.mask.png", "a.png") else None
            assert mask == expected, about
            read[kind] += 1
    assert min(read[kind] for kind in SOUND) > 0 and len(named) > count / 4
