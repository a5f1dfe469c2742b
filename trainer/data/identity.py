"""Digests of a run's photos, so that a resumed run can name those that changed."""

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence

import torch

from trainer.data.examples import Example

NAMES, CONTENTS, CAPTIONS = "photos", "contents of the photos", "captions"
DIGEST_BYTES = 4  # of a photo: enough to name the photos that changed. The SHA-256 over all photos detects the change
MAX_NAMES_BYTES = 2**30


def parts(examples: Sequence[Example]) -> dict[str, list]:
    """Everything in the data that a step depends on, by kind: a JSON value for each example."""
    return {
        NAMES: [example.sample for example in examples],
        CONTENTS: [example.photo.contents for example in examples],
        # A single caption is not a list, so that the digest is that of runs from before variants existed.
        CAPTIONS: [e.captions[0] if len(e.captions) == 1 else list(e.captions) for e in examples],
        "repeats": [example.photo.repeats for example in examples],
        "buckets": [list(example.bucket) for example in examples],
    }


def fingerprint(examples: Sequence[Example]) -> dict[str, str]:
    """SHA-256 of each part."""
    return {name: hashlib.sha256(json.dumps(values).encode()).hexdigest() for name, values in parts(examples).items()}


def photo_digests(examples: Sequence[Example]) -> dict[str, torch.Tensor]:
    """The digests of the photos by part, uint8 [photos, DIGEST_BYTES]; "photos": their names, uint8, a deflated JSON list."""
    places: dict[str, list[int]] = {}
    for place, example in enumerate(examples):
        places.setdefault(example.photo.sample, []).append(place)

    def digests(values: list) -> bytes:
        # A photo at several sizes has one content and one caption: each value counts once.
        texts = ("".join(dict.fromkeys(json.dumps(values[place]) for place in group)) for group in places.values())
        return b"".join(hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest() for text in texts)

    columns = {name: digests(values) for name, values in parts(examples).items() if name != NAMES}
    packed = {name: _bytes(column).view(-1, DIGEST_BYTES) for name, column in columns.items()}
    return {NAMES: _bytes(zlib.compress(json.dumps(list(places)).encode()))} | packed


def differences(old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Kind of change -> names of photos: "added", "removed", "other contents", or else "other captions", "other repeats", ...
    old, new: of `photo_digests`. Raises ValueError if they are malformed."""
    old_names, new_names = _names(old[NAMES]), _names(new[NAMES])
    changes = {
        "added": [name for name in new_names if name not in old_names],
        "removed": [name for name in old_names if name not in new_names],
    }
    common, changed = [name for name in new_names if name in old_names], set[str]()
    for part in (CONTENTS, *sorted(new.keys() - {NAMES, CONTENTS})):
        if part not in old:  # no photo had such a part
            continue
        before, after = _column(old[part], len(old_names)), _column(new[part], len(new_names))
        names = [name for name in common if before[old_names[name]] != after[new_names[name]] and name not in changed]
        changes[f"other {'contents' if part == CONTENTS else part}"] = names
        changed.update(names if part == CONTENTS else ())
    return {change: names for change, names in changes.items() if names}


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _names(packed: torch.Tensor) -> dict[str, int]:
    """Name -> place, from the deflated JSON list."""
    unpacking = zlib.decompressobj()
    try:
        names = json.loads(unpacking.decompress(packed.numpy().tobytes(), MAX_NAMES_BYTES))
    except zlib.error as error:
        raise ValueError(f"the photos' names: {error}") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("the photos' names are no list of names")
    return {name: place for place, name in enumerate(names)}


def _column(digests: torch.Tensor, count: int) -> list[bytes]:
    if digests.dtype != torch.uint8 or digests.shape != (count, DIGEST_BYTES):
        raise ValueError(f"digests of {count} photos are {digests.dtype} {list(digests.shape)}")
    data = digests.numpy().tobytes()
    return [data[start : start + DIGEST_BYTES] for start in range(0, len(data), DIGEST_BYTES)]
