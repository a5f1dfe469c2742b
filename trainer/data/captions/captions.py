"""The report of missing, empty and too long captions, and the caption that an appearance trains on."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, field

from trainer.base import draws
from trainer.base.account import counted
from trainer.base.console import printable, shortlist
from trainer.base.errors import UserError
from trainer.base.text import holds, replaced
from trainer.base.types import Occurrence
from trainer.data.examples import Example

SHOWN = 3  # samples in a line


@dataclass(frozen=True)
class Tokens:
    """A text encoder's tokens. limit: the most that it reads. counts: tokens by text. Both include the special tokens."""

    limit: int
    counts: Mapping[str, int]


@dataclass(frozen=True)
class CaptionReport:
    """The report on captions at the start of a run. Samples count with all variants of their captions.

    missing: samples without a caption. empty: samples whose caption has a variant without text. truncated: by text encoder,
    samples with a variant of more tokens than it reads. tokens: by text encoder, of every variant. rows: padded length ->
    count of texts, for a denoiser that takes captions of one padded length at once.
    """

    photos: int
    missing: tuple[str, ...]
    empty: tuple[str, ...]
    truncated: Mapping[str, tuple[str, ...]]
    tokens: Mapping[str, Tokens] = field(default_factory=dict)
    rows: Mapping[int, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """The counts, and a line with the first few samples of each."""
        named = {"missing": self.missing, "empty": self.empty}
        named |= {f"truncated by {encoder}": samples for encoder, samples in self.truncated.items()}
        counts = ", ".join(f"{len(samples)} {kind}" for kind, samples in named.items())
        lines = [f"captions of {counted(self.photos, 'photo')}: {counts}"]
        lines += [f"  {kind}: {shortlist(samples, SHOWN)}" for kind, samples in named.items() if samples]
        if len(self.rows) > 1:
            sizes = ", ".join(f"{rows} ({count})" for rows, count in sorted(self.rows.items()))
            lines.append(f"  padded to {sizes} tokens: captions of several sizes in a batch are computed size by size")
        return "\n".join(lines)


def report(
    examples: Iterable[Example], *, tokens: Mapping[str, Tokens] | None = None, rows: Callable[[int], int] | None = None
) -> CaptionReport:
    """The report on the examples' captions. tokens: by text encoder, of every variant. rows: a caption's tokens -> its padded
    length, if captions of one padded length are computed at once."""
    by_sample = {example.photo.sample: example for example in examples}  # the same at every size
    tokens = tokens or {}
    too_long = {encoder: {text for text, n in t.counts.items() if n > t.limit} for encoder, t in tokens.items()}
    return CaptionReport(
        photos=len(by_sample),
        missing=tuple(sample for sample, example in by_sample.items() if not example.photo.caption_from),
        empty=tuple(sample for sample, e in by_sample.items() if e.photo.caption_from and "" in e.captions),
        truncated={
            encoder: tuple(sample for sample, example in by_sample.items() if not texts.isdisjoint(example.captions))
            for encoder, texts in too_long.items()
        },
        tokens=tokens,
        rows=Counter(rows(min(n, t.limit)) for t in tokens.values() for n in t.counts.values()) if rows else {},
    )


def frequency(examples: Iterable[Example]) -> dict[str, int]:
    """Caption -> the appearances in an epoch that may show it in one of its variants; tags instead of captions if the source
    splits captions into tags. Without regularisation images."""
    counts: Counter[str] = Counter()
    for example in {e.photo.sample: e for e in examples if not e.photo.source.regularisation}.values():
        rules, variants = example.photo.source.caption_rules, set(example.captions)
        texts = {tag for text in variants for tag in rules.tags(text)} if rules.by_tags else variants
        for text in texts:
            counts[text] += example.photo.repeats
    return dict(counts)


def triggers(examples: Iterable[Example]) -> tuple[str, ...]:
    """The triggers of the sources that show the subject, each once, in order."""
    sources = dict.fromkeys(example.photo.source for example in examples)
    return tuple(dict.fromkeys(s.caption_rules.trigger for s in sources if s.caption_rules.trigger and not s.regularisation))


def refuse_truncated(captions: CaptionReport) -> None:
    """Strict mode's check for length; `scan` makes those for missing and empty captions. Raises UserError."""
    too_long = [(sample, name) for name, samples in captions.truncated.items() for sample in samples]
    if lines := [f"  {printable(sample)}: too long for {name}" for sample, name in too_long]:
        raise UserError("captions would be truncated; shorten these:\n" + "\n".join(lines))


def draw(seed: int, occurrence: Occurrence, example: Example) -> str:
    """The caption that this appearance of the photo trains on: "" if it is dropped, else one of the example's."""
    if draws.uniform(seed, "caption_dropout", *astuple(occurrence)) < example.photo.source.caption_dropout:
        return ""
    return undropped(seed, occurrence, example)


def undropped(seed: int, occurrence: Occurrence, example: Example) -> str:
    """The caption of this appearance before dropout."""
    return example.captions[int(draws.uniform(seed, "caption", *astuple(occurrence)) * len(example.captions))]


def preserved(caption: str, example: Example, replacement: str) -> str:
    """The caption with `replacement` for its source's trigger; a regularisation image's caption unchanged. Raises UserError
    if the caption has the trigger in other letters."""
    source, rules = example.photo.source, example.photo.source.caption_rules
    if source.regularisation or not rules.trigger:
        return caption
    text = replaced(caption, rules.trigger, replacement)
    if holds(text, rules.trigger):
        raise UserError(
            f"{printable(example.sample)}: the trigger {rules.trigger!r} is not replaced in the caption {caption!r:.200}; "
            "write it in the letters of the trigger, and objective.preserve_as without it"
        )
    return text if replacement else text.strip(f" {rules.separator}")
