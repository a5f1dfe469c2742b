"""From occurrences to batches: reads the cache and applies the draws that belong to data (flip, caption dropout)."""

import contextlib
import itertools
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from trainer import draws, signals
from trainer.data import buckets, captions
from trainer.data.buckets import Bucket
from trainer.data.cache import Cache, latent_key, text_key
from trainer.data.sampler import MicroBatch
from trainer.data.sources import Photo
from trainer.errors import DataError
from trainer.types import Batch, Conditioning, Occurrence

FLIP_PROBABILITY = 0.5


@dataclass(kw_only=True)
class Reader(Dataset):
    """Makes the Batch of a micro-batch: `reader[occurrences]`. A pure function of its arguments and the cache.

    photos: each with its bucket, by sample. flip: mirror every other appearance; the cache must hold both variants.
    caption_dropout: the probability that an appearance trains on "".
    latent_fingerprint, text_fingerprint: as the cache was filled with; no text fingerprint means that captions are
    encoded live and `Batch.conditioning` is None.
    collate: puts the conditioning of single captions side by side.
    """

    photos: Mapping[str, tuple[Photo, Bucket]]
    cache: Cache
    seed: int
    flip: bool
    caption_dropout: float
    latent_fingerprint: str
    text_fingerprint: str | None
    collate: Callable[[Sequence[Conditioning]], Conditioning]

    def flipped(self, occurrence: Occurrence) -> bool:
        """Whether this appearance of the photo is mirrored."""
        return self.flip and draws.uniform(self.seed, "flip", *astuple(occurrence)) < FLIP_PROBABILITY

    def __getitem__(self, occurrences: MicroBatch) -> Batch:
        latents, texts, placements = [], [], []
        for occurrence in occurrences:
            photo, bucket = self.photos[occurrence.sample]
            flip = self.flipped(occurrence)
            key = latent_key(photo.sha256, bucket=bucket, flip=flip, fingerprint=self.latent_fingerprint)
            latents.append(self.cache.get(key)["latents"])
            placements.append(buckets.place(photo.width, photo.height, bucket, flip=flip))
            dropped = captions.dropped(self.seed, occurrence, self.caption_dropout)
            texts.append("" if dropped else photo.caption)
        return Batch(
            occurrences=occurrences,
            latents=torch.stack(latents),
            captions=tuple(texts),
            conditioning=None if self.text_fingerprint is None else self.conditioning(texts),
            original_size=torch.tensor([p.original_size for p in placements], dtype=torch.int64),
            crop_top_left=torch.tensor([p.crop_top_left for p in placements], dtype=torch.int64),
            target_size=torch.tensor([p.target_size for p in placements], dtype=torch.int64),
        )

    def conditioning(self, texts: Sequence[str]) -> Conditioning:
        """Of these captions, side by side, from the cache."""
        keys = [text_key(text, fingerprint=self.text_fingerprint) for text in texts]
        return self.collate([Conditioning.from_tensors(self.cache.get(key)) for key in keys])


def iterate(updates: Iterable[Sequence[MicroBatch]], reader: Reader, *, num_workers: int) -> Iterator[list[Batch]]:
    """One list of Batches per update, in order; `updates` holds this process's share of each (an empty one gives []).

    Raises DataError where an entry cannot be read any more, or a worker died.

    `updates` may be lazy and go on over many epochs: with workers it is read a few batches ahead, in this process. The
    result does not depend on `num_workers`. Close the generator to end the workers early.
    """
    if num_workers == 0:
        for update in updates:
            yield [reader[occurrences] for occurrences in update]
        return
    updates, ahead = itertools.tee(updates)
    loader = DataLoader(
        reader,
        sampler=(occurrences for update in ahead for occurrences in update),
        batch_size=None,
        num_workers=num_workers,
        # A forked worker knows which cache entries are verified already.
        multiprocessing_context="fork" if sys.platform == "linux" else None,
        worker_init_fn=_start_worker,
        generator=torch.Generator(),  # the loader draws a seed for its workers: not from torch's global generator
    )
    with _signals_blocked():
        batches = iter(loader)
    try:
        for update in updates:
            yield [_next(batches) for _ in update]
    finally:
        del batches  # joins the workers


def _next(batches: Iterator[Batch]) -> Batch:
    """Raises DataError in plain words for what the loader wraps in a worker's traceback, and for a worker that died."""
    try:
        return next(batches)
    except RuntimeError as error:
        if isinstance(error, DataError):
            said = str(error).splitlines()[-1].partition(": ")[2]
        elif str(error).startswith("DataLoader worker"):
            said = f"{error}; if memory ran out, a lower data.num_workers needs less"
        else:
            raise
        # The frames would keep the loader, and so its workers: they ignore signals, and the program waits for their end.
        del batches
        traceback.clear_frames(error.__traceback__)
        raise DataError(said) from None


def _start_worker(worker: int) -> None:
    """Leave signals to the main process, which ends the current step first; share out the cache's memory.

    Where `_signals_blocked` works, it has seen to the signals already.
    """
    for signum in signals.HANDLED:
        signal.signal(signum, signal.SIG_IGN)
    info = get_worker_info()
    info.dataset.cache.memory_bytes //= info.num_workers


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Hold back a run's signals while workers start, who inherit it: no signal meets them before `_start_worker`."""
    if not hasattr(signal, "pthread_sigmask") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals.HANDLED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
