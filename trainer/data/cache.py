"""Encoded photos and captions on disk, one safetensors file per entry, addressed by everything that went into it.

A changed photo, caption, preprocessing or encoder has another key, so a stale entry is never read. An entry's metadata
holds a SHA-256 of its tensors and metadata: a damaged file counts as missing and is made again.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import torch

from trainer.data import buckets
from trainer.data.buckets import Bucket
from trainer.data.sources import Photo, decode, in_threads
from trainer.errors import DataError, UserError
from trainer.files import remove_leftovers
from trainer.phases import QUIET, Phases
from trainer.tensorfile import TensorFile, serialize, write_tensors
from trainer.types import Conditioning

PREPROCESSING_VERSION = 1  # raise it when `sources.decode` or `buckets.fit` gives other pixels

Tensors = dict[str, torch.Tensor]
Entries = Iterator[tuple[Tensors, dict[str, str]]]  # with the metadata of each


def _key(kind: str, **inputs: object) -> str:
    text = json.dumps({"kind": kind, **inputs}, sort_keys=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def latent_key(image_sha256: str, *, bucket: Bucket, flip: bool, fingerprint: str) -> str:
    """The key of one photo's latents. `fingerprint` stands for the image encoder, its weights and its dtypes."""
    return _key(
        "latent",
        image=image_sha256,
        bucket=list(bucket),
        resize=f"cover {buckets.RESIZE_FILTER.name}, crop centre",
        flip=flip,
        version=PREPROCESSING_VERSION,
        encoder=fingerprint,
    )


def text_key(caption: str, *, fingerprint: str) -> str:
    """The key of one caption's conditioning. `fingerprint` stands for tokenizers and text encoders together."""
    return _key("text", caption=caption, encoder=fingerprint)


class Cache:
    """Entries in `directory`, the most recently used ones also in memory, up to `memory_bytes`.

    Every entry is verified once in a process, when it is first read or asked for in `missing`.
    """

    def __init__(self, directory: Path | str, *, memory_bytes: int = 2**30) -> None:
        self.directory = Path(directory)
        self.memory_bytes = memory_bytes
        self._memory: OrderedDict[str, Tensors] = OrderedDict()
        self._memory_used = 0
        self._verified: set[str] = set()
        self._not_finite: set[str] = set()

    def path(self, key: str) -> Path:
        return self.directory / key[:2] / f"{key}.safetensors"

    def missing(self, keys: Iterable[str], phases: Phases = QUIET) -> list[str]:
        """Those of the keys, each once and in order, that have no entry or a damaged one."""
        absent, keys = [], dict.fromkeys(keys)
        with phases("reading the cache", len(keys), "entry") as phase:
            for key in keys:
                if key not in self._verified and self._read(key) is None:
                    absent.append(key)
                phase.advance()
        return absent

    def put(self, key: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """Write an entry, atomically. `metadata` is for people who look into the file."""
        described = {**(metadata or {}), "key": key}
        if not _finite(tensors):
            described["finite"] = "no"
            self._not_finite.add(key)
        write_tensors(self.path(key), tensors, {**described, "sha256": _digest(tensors, described)})
        self._verified.add(key)
        self._forget(key)

    def is_finite(self, key: str) -> bool:
        """Whether all of a verified entry's values are."""
        assert key in self._verified
        return key not in self._not_finite

    def get(self, key: str) -> Tensors:
        """An entry's tensors, shared with later callers: do not change them. Raises DataError, naming the file."""
        if key in self._memory:
            self._memory.move_to_end(key)
            return self._memory[key]
        tensors = self._read(key)
        if tensors is None:
            raise DataError(f"cache entry {self.path(key)} is missing or damaged; start again and it is made anew")
        self._remember(key, tensors)
        return tensors

    def remove_leftovers(self) -> None:
        """Delete temporary files of processes that were killed while writing here. Not while this process writes."""
        remove_leftovers(self.directory.glob("*/.*.tmp"))

    def _read(self, key: str) -> Tensors | None:
        """The entry if it is there and sound. Its header is compared too, so that every byte of the file counts."""
        try:
            file = TensorFile(self.path(key))
            tensors = file.read_all()
        except UserError:  # missing, truncated, malformed
            return None
        if key not in self._verified:
            described = dict(file.metadata)
            if described.pop("sha256", None) != _digest(tensors, described) or described.get("key") != key:
                return None
            header = bytes(next(serialize(tensors, file.metadata)))
            with open(file.path, "rb") as raw:
                if raw.read(len(header)) != header:
                    return None
            self._verified.add(key)
            if "finite" in described:
                self._not_finite.add(key)
        return tensors

    def _remember(self, key: str, tensors: Tensors) -> None:
        size = sum(tensor.nbytes for tensor in tensors.values())
        if size > self.memory_bytes:
            return
        self._memory[key] = tensors
        self._memory_used += size
        while self._memory_used > self.memory_bytes:
            self._forget(next(iter(self._memory)))

    def _forget(self, key: str) -> None:
        if key in self._memory:
            self._memory_used -= sum(tensor.nbytes for tensor in self._memory.pop(key).values())


def fill_latents(
    cache: Cache,
    photos: Sequence[tuple[Photo, Bucket]],
    *,
    fingerprint: str,
    flip: bool,
    encode: Callable[[torch.Tensor], torch.Tensor],
    on_non_finite: Callable[[str], None],
    phases: Phases = QUIET,
) -> int:
    """Make the latents that are not cached yet, of the mirrored photos too if `flip`; returns how many were made.

    `encode` maps pixels, fp32 [1, 3, H, W] in [-1, 1] on the CPU, to normalised latents [1, C, h, w]. It gets one photo
    at a time, so that an entry does not depend on its neighbours. Entries hold "latents", fp32 [C, h, w].
    `on_non_finite` is told, in words, of every photo whose latents hold NaN or infinity, new or cached; where it raises,
    the new ones are not kept.
    Raises UserError if a photo changed after the scan.
    """
    wanted: dict[str, tuple[Photo, Bucket, bool]] = {}
    for photo, bucket in photos:
        for mirrored in (False, True) if flip else (False,):
            key = latent_key(photo.sha256, bucket=bucket, flip=mirrored, fingerprint=fingerprint)
            wanted.setdefault(key, (photo, bucket, mirrored))

    def made(todo: list[str]) -> Entries:
        with closing(in_threads(lambda key: _pixels(*wanted[key]), todo)) as pixels:
            for key, pixels_3HW in zip(todo, pixels, strict=True):
                latents = encode(pixels_3HW.unsqueeze(0)).detach().to("cpu", torch.float32).squeeze(0)
                yield {"latents": latents}, {"sample": wanted[key][0].sample}

    described = {key: f"the latents of {photo.sample} ({photo.path})" for key, (photo, _, _) in wanted.items()}
    return _fill(cache, described, made, on_non_finite, phases, "photo")


def fill_text(
    cache: Cache,
    captions: Iterable[str],
    *,
    fingerprint: str,
    encode: Callable[[list[str]], Conditioning],
    on_non_finite: Callable[[str], None],
    phases: Phases = QUIET,
) -> int:
    """Make the conditioning that is not cached yet, of each caption and of "" (dropped captions); returns how many.

    `encode` gets one caption at a time. Entries hold Conditioning.tensors() with a batch dimension of 1, in the dtypes
    that `encode` gives. `on_non_finite` as in `fill_latents`.
    """
    wanted = {text_key(caption, fingerprint=fingerprint): caption for caption in (*captions, "")}

    def made(todo: list[str]) -> Entries:
        for key in todo:
            tensors = encode([wanted[key]]).tensors()
            for name, tensor in tensors.items():
                assert tensor.shape[0] == 1, f"{name} of one caption has shape {list(tensor.shape)}"
            yield tensors, {}

    described = {key: f"the text encodings of {caption!r}" for key, caption in wanted.items()}
    return _fill(cache, described, made, on_non_finite, phases, "caption")


def _fill(
    cache: Cache,
    described: Mapping[str, str],
    made: Callable[[list[str]], Entries],
    on_non_finite: Callable[[str], None],
    phases: Phases,
    unit: str,
) -> int:
    """described: what each key stands for, in words. made: keys -> their entries."""
    cache.remove_leftovers()
    todo = cache.missing(described, phases)
    with phases(f"encoding {unit}s", len(todo), unit) as phase, phase.between_modules(), closing(made(todo)) as entries:
        for key, (tensors, metadata) in zip(todo, entries, strict=True):
            if not _finite(tensors):
                on_non_finite(described[key])
            cache.put(key, tensors, metadata)
            phase.advance()
    for key in described:
        if key not in todo and not cache.is_finite(key):
            on_non_finite(f"{described[key]}, as the cache holds them ({cache.path(key)}: delete it to encode anew),")
    return len(todo)


def _pixels(photo: Photo, bucket: Bucket, mirrored: bool) -> torch.Tensor:
    data = photo.path.read_bytes()
    # The key was made from the hash of the scan: other bytes must not be stored under it.
    if hashlib.sha256(data).hexdigest() != photo.sha256:
        raise UserError(f"{photo.path} changed while the run was starting; start again")
    return buckets.to_pixels(buckets.fit(decode(data), bucket, flip=mirrored)[0])


def _finite(tensors: Mapping[str, torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors.values() if t.is_floating_point())


def _digest(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 of the file these would make: names, dtypes, shapes, values and metadata."""
    digest = hashlib.sha256()
    for piece in serialize(tensors, metadata):
        digest.update(piece)
    return digest.hexdigest()
