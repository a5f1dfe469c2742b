"""Captions: what is missing, empty or too long, and which are dropped in training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass

from trainer import draws
from trainer.data.sources import Photo
from trainer.errors import UserError
from trainer.types import Occurrence


@dataclass(frozen=True)
class CaptionReport:
    """What to tell about the captions when a run starts; every field but the first holds the samples concerned.

    missing: no caption file.  empty: a file without text.
    truncated: by text encoder, captions of more tokens than it reads; the rest of such a caption is not trained on.
    """

    photos: int
    missing: tuple[str, ...]
    empty: tuple[str, ...]
    truncated: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        parts = [f"{len(self.missing)} missing", f"{len(self.empty)} empty"]
        parts += [f"{len(samples)} truncated by {name}" for name, samples in self.truncated.items()]
        return f"captions of {self.photos} photos: {', '.join(parts)}"


def report(
    photos: Sequence[Photo], *, encoders: Mapping[str, tuple[Callable[[str], int], int]] | None = None
) -> CaptionReport:
    """Count the captions. `encoders` maps a text encoder's name to (count_tokens, limit), special tokens in both."""
    truncated: dict[str, tuple[str, ...]] = {}
    for name, (count_tokens, limit) in (encoders or {}).items():
        too_long = {caption for caption in {photo.caption for photo in photos} if count_tokens(caption) > limit}
        truncated[name] = tuple(photo.sample for photo in photos if photo.caption in too_long)
    return CaptionReport(
        photos=len(photos),
        missing=tuple(photo.sample for photo in photos if not photo.has_caption),
        empty=tuple(photo.sample for photo in photos if photo.has_caption and not photo.caption),
        truncated=truncated,
    )


def refuse_truncated(captions: CaptionReport) -> None:
    """Strict mode's check for length; `scan` makes those for missing and empty captions. Raises UserError."""
    lines = [f"  {sample}: too long for {name}" for name, samples in captions.truncated.items() for sample in samples]
    if lines:
        raise UserError("captions would be truncated; shorten what is named here:\n" + "\n".join(lines))


def dropped(seed: int, occurrence: Occurrence, probability: float) -> bool:
    """Whether this appearance of the photo trains without its caption. 0.0 is never, 1.0 always."""
    return draws.uniform(seed, "caption_dropout", *astuple(occurrence)) < probability
