"""Turns occurrences into batches: reads the cache and draws views and captions."""

import itertools
import signal
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from trainer.base import signals
from trainer.base.errors import DataError, UserError
from trainer.base.types import Batch, Conditioning
from trainer.data.batches.sampler import MicroBatch
from trainer.data.batches.sent import Sent
from trainer.data.cache.entries import Cache, MemoryCache
from trainer.data.cache.fill import latent_key, latents_of, mask_key, pixels, text_key
from trainer.data.captions import captions
from trainer.data.examples import Example
from trainer.data.images import views
from trainer.data.images.views import View
from trainer.data.sources import Place
from trainer.data.threads import starting


@dataclass(frozen=True)
class Encoders:
    """Encoders for runs without a cache. images: `encode` of `fill_latents`. prompts: captions -> conditioning."""

    images: Callable[[torch.Tensor], torch.Tensor]
    prompts: Callable[[list[str]], Conditioning]


@dataclass(kw_only=True)
class Reader:
    """Makes the Batch of a micro-batch: `reader[occurrences]`. A pure function of its arguments and the cache.

    examples: by sample. cache: holds all their views and masks; None: `encoders` encode each batch, with the same bytes.
    latent_side: pixels to a side of one latent. latent_fingerprint, text_fingerprint: of the cache's keys; no text
    fingerprint: captions are encoded live and `Batch.conditioning` is None. collate: stacks the conditioning of single
    captions. preserve_as: replaces triggers in `preserved_captions`; None: there are no such captions.
    """

    examples: Mapping[str, Example]
    cache: Cache | MemoryCache | None
    seed: int
    latent_side: int
    latent_fingerprint: str
    text_fingerprint: str | None
    collate: Callable[[Sequence[Conditioning]], Conditioning]
    encoders: Encoders | None = None
    preserve_as: str | None = None

    def __getitem__(self, occurrences: MicroBatch) -> Batch:
        return self.finish(self.read(occurrences))

    def read(self, occurrences: MicroBatch) -> Batch:
        """The part of a batch that a worker can make: with a cache the whole batch, without one pixels instead of latents."""
        latents, references, texts, preserved, placements, weights = [], [], [], [], [], []
        for occurrence in occurrences:
            example = self.examples[occurrence.sample]
            view = views.draw(self.seed, occurrence, example)
            latents.append(self._latents(example, view))
            references.append([self._latents(*image) for image in views.references(example, view)])
            placements.append(view.place(example))
            weights.append(self.loss_weights(example, view))
            texts.append(captions.draw(self.seed, occurrence, example))
            if self.preserve_as is not None:  # also if the caption is dropped
                caption = captions.undropped(self.seed, occurrence, example)
                preserved.append(captions.preserved(caption, example, self.preserve_as))
        return Batch(
            occurrences=occurrences,
            latents=torch.stack(latents),
            captions=tuple(texts),
            conditioning=None if self.text_fingerprint is None or self.cache is None else self.conditioning(texts),
            original_size=torch.tensor([p.original_size for p in placements], dtype=torch.int64),
            crop_top_left=torch.tensor([p.crop_top_left for p in placements], dtype=torch.int64),
            target_size=torch.tensor([p.target_size for p in placements], dtype=torch.int64),
            loss_weights=_stack(weights),
            references=tuple(map(torch.stack, zip(*references, strict=True))),
            preserved_captions=tuple(preserved),
            preserved=None if self.cache is None or not preserved else self.conditioning(preserved),
        )

    def _latents(self, example: Example, view: View) -> torch.Tensor:
        """The latents of one view from the cache; without a cache, its pixels."""
        if self.cache is None:
            return _read_unchanged(example.photo.image, lambda: pixels(example, view))
        return self.cache.get(latent_key(example, view, fingerprint=self.latent_fingerprint))["latents"]

    def loss_weights(self, example: Example, view: View) -> torch.Tensor | None:
        """fp32 [h, w]: the weight of each latent by its mask, times the photo's weight; None: 1 everywhere."""
        photo, side = example.photo, self.latent_side
        if photo.mask is None:
            width, height = example.bucket
            return None if photo.loss_weight == 1 else torch.full((height // side, width // side), photo.loss_weight)
        if self.cache is None:
            mask = _read_unchanged(photo.mask.place, lambda: views.mask_on_latents(example, view, side=side))
        else:
            mask = self.cache.get(mask_key(example, view, side=side))["mask"]
        return (mask + (1 - mask) * photo.source.unmasked_weight) * photo.loss_weight

    def finish(self, batch: Batch) -> Batch:
        """Completes the batch of `read`. May encode, so only the process with the encoders may call it."""
        if self.cache is not None:
            return batch
        encoders = self.encoders
        assert encoders is not None

        def encoded(images: torch.Tensor) -> torch.Tensor:
            return torch.stack([latents_of(image, encoders.images) for image in images])

        return replace(
            batch,
            latents=encoded(batch.latents),
            references=tuple(map(encoded, batch.references)),
            conditioning=None if self.text_fingerprint is None else self.conditioning(batch.captions),
            preserved=self.conditioning(batch.preserved_captions) if batch.preserved_captions else None,
        )

    def conditioning(self, texts: Sequence[str]) -> Conditioning:
        """The conditioning of these captions, stacked."""
        if self.cache is None:
            assert self.encoders is not None
            return self.collate([self.encoders.prompts([text]).to("cpu") for text in texts])
        keys = [text_key(text, fingerprint=self.text_fingerprint) for text in texts]
        return self.collate([Conditioning(**self.cache.get(key)) for key in keys])


def _stack(weights: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Stacks the weights; None counts as 1 everywhere. None if all are None."""
    one = next((torch.ones_like(weight) for weight in weights if weight is not None), None)
    return None if one is None else torch.stack([one if weight is None else weight for weight in weights])


def _read_unchanged(place: Place | None, read: Callable[[], torch.Tensor]) -> torch.Tensor:
    """`read()`, which reads a file as it was at the run's start. Raises DataError if the file changed or is gone."""
    try:
        return read()
    except (OSError, UserError) as error:
        change = "it changed since the run began, or under equal times before: --verify reads all"
        reason = getattr(error, "strerror", None) or change
        raise DataError(f"{place} can no longer be read ({reason}); restore it") from error


@dataclass(frozen=True)
class _Reads(Dataset):
    """The dataset that workers read."""

    reader: Reader

    def __getitem__(self, occurrences: MicroBatch) -> Sent:
        return Sent.of(self.reader.read(occurrences))


def iterate(
    updates: Iterable[Sequence[MicroBatch]], reader: Reader, *, num_workers: int, pin: bool = False
) -> Generator[list[Batch]]:
    """One list of Batches per update, in order. updates: this process's share of each (an empty one gives []), may be lazy
    and endless. The result does not depend on `num_workers`. Close the generator to end the workers early. pin: workers read
    into page-locked memory, so that the copy to the GPU overlaps with computing. Raises DataError if an entry can no longer
    be read, or if a worker died."""
    if num_workers == 0:
        for update in updates:
            yield [reader[occurrences] for occurrences in update]
        return
    updates, ahead = itertools.tee(updates)
    loader = DataLoader(
        _Reads(replace(reader, encoders=None)),  # they stay in this process
        sampler=(occurrences for update in ahead for occurrences in update),
        batch_size=None,
        num_workers=num_workers,
        pin_memory=pin,
        # A forked worker knows which cache entries are verified already.
        multiprocessing_context="fork" if sys.platform == "linux" else None,
        worker_init_fn=_start_worker,
        generator=torch.Generator(),  # the loader draws a seed for its workers: not from torch's global generator
    )
    with signals.blocked(), starting(num_workers):
        batches = iter(loader)
    try:
        for update in updates:
            yield [reader.finish(_next(batches)) for _ in update]
    finally:
        del batches  # joins the workers


def _next(batches: Iterator[Sent | Batch]) -> Batch:
    """The next batch. Raises DataError with the plain message of an error in a worker, and for a worker that died."""
    try:
        batch = next(batches)
        return batch.batch() if isinstance(batch, Sent) else batch  # pinned batches are unpacked already
    except RuntimeError as error:
        if isinstance(error, DataError):
            reason = str(error).splitlines()[-1].partition(": ")[2]
        elif str(error).startswith("DataLoader worker"):
            reason = f"{error}; if memory ran out, lower data.num_workers"
        else:
            raise
        # The frames would keep the loader, and so its workers: they ignore signals, and the program waits for their end.
        del batches
        traceback.clear_frames(error.__traceback__)
        raise DataError(reason) from None


def _start_worker(worker: int) -> None:
    """Leave signals to the main process, even if `signals.blocked` blocks none; share out the cache's memory."""
    for signum in signals.HANDLED:
        signal.signal(signum, signal.SIG_IGN)
    info = get_worker_info()
    if info.dataset.reader.cache is not None:
        info.dataset.reader.cache.share_memory(info.num_workers)
