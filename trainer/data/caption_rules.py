"""The variants of a caption that are trained on: finitely many, so that each can be encoded once, and pure functions of
(seed, purpose, sample, the variant's number)."""

import re
from dataclasses import dataclass

from trainer.base import draws
from trainer.base.text import holds, in_word

WILDCARD = re.compile(r"\{([^{}|]*(?:\|[^{}|]*)+)\}")  # the innermost: without braces inside


@dataclass(frozen=True, kw_only=True)
class CaptionRules:
    """How a source's captions are changed; by default they stay as they were found.

    The fields act in this order:
    lines: every line that is not blank is a caption of its own, with as many variants as any other.
    wildcards: `{a|b}` becomes one of its options; options may contain wildcards. Braces without a `|` stay as they are.
    separator: the text between tags, as it joins them. Spaces around it are ignored when a caption is split into tags.
    keep: the number of first tags that are neither dropped nor moved. tag_dropout: the probability that one of the others is
    dropped. keep_separator: tags before it, and after a second one, are kept in place of the first `keep` tags.
    shuffle: put the others in a random order.
    prefix, suffix: put before and after; a space is added where two words would join.
    trigger: put in front, with the separator, if the text does not contain it as whole words, in any case.
    variants: the number of variants of a caption that varies.
    """

    lines: bool = False
    wildcards: bool = False
    separator: str = ", "
    keep: int = 0
    keep_separator: str = ""
    tag_dropout: float = 0.0
    shuffle: bool = False
    prefix: str = ""
    suffix: str = ""
    trigger: str = ""
    variants: int = 8

    @property
    def by_tags(self) -> bool:
        """Whether captions are taken apart into tags."""
        return self.shuffle or self.tag_dropout > 0

    def variants_of(self, caption: str, *, seed: int, sample: str) -> tuple[str, ...]:
        """The variants of this caption, equally likely; some may be equal. One if nothing varies."""
        lines = [line.strip() for line in caption.splitlines() if line.strip()] or [""]
        texts = lines if self.lines else [caption]
        each = self.variants if any(map(self._varies, texts)) else 1
        return tuple(
            self._add_ends(self._variant(text, seed, sample, index * each + variant))
            for index, text in enumerate(texts)
            for variant in range(each)
        )

    def tags(self, text: str) -> list[str]:
        """The texts between separators."""
        return [tag for part in text.split(self.separator.strip() or None) if (tag := part.strip())]

    def _varies(self, text: str) -> bool:
        if self.wildcards and WILDCARD.search(text):
            return True
        free = len(self._parts(text)[1]) if self.by_tags else 0
        return free > 1 or (free == 1 and self.tag_dropout > 0)

    def _parts(self, text: str) -> tuple[list[str], list[str], list[str]]:
        """(first tags that are kept, the others, last ones that are kept), as sd-scripts parts a caption."""
        if self.keep_separator and self.keep_separator in text:
            first, free, *last = (self.tags(part) for part in text.split(self.keep_separator, 2))
            return first, free, last[0] if last else []
        tags = self.tags(text)
        return tags[: self.keep], tags[self.keep :], []

    def _variant(self, text: str, seed: int, sample: str, number: int) -> str:
        """A variant by its number: its wildcards and tags are drawn."""
        place = 0
        while self.wildcards and (match := WILDCARD.search(text)):
            options = match[1].split("|")
            option = options[int(draws.uniform(seed, "wildcard", sample, number, place) * len(options))]
            text, place = text[: match.start()] + option + text[match.end() :], place + 1
        if not self.by_tags:
            return text
        first, free, last = self._parts(text)
        if self.tag_dropout:
            chances = draws.uniforms(len(free), seed, "tag_dropout", sample, number)
            free = [tag for tag, chance in zip(free, chances, strict=True) if chance >= self.tag_dropout]
        if self.shuffle:
            order = draws.uniforms(len(free), seed, "tag_order", sample, number)
            free = [tag for _, tag in sorted(zip(order, free, strict=True))]
        return self.separator.join(first + free + last)

    def _add_ends(self, text: str) -> str:
        if self.prefix or self.suffix:
            text = _join(_join(self.prefix, text), self.suffix).strip()
        if self.trigger and not holds(text, self.trigger):
            text = self.separator.join(filter(None, (self.trigger, text)))
        return text


def _join(before: str, after: str) -> str:
    last = before[-1:]
    are_words = (last.isalnum() or (in_word(last) and last != "_")) and after[:1].isalnum()
    return f"{before} {after}" if are_words else before + after
