"""Captions: what is missing, empty or too long, which an appearance trains on, and how often."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from trainer.base.errors import UserError
from trainer.base.types import Occurrence
from trainer.data.caption_rules import CaptionRules
from trainer.data.captions import captions
from trainer.data.captions.captions import Tokens
from trainer.data.examples import Example
from trainer.data.sources import File, Photo, Source

SOURCE = Source(0, "photos")


def example(name: str, *variants: str, found: bool = True, source: Source = SOURCE, size: str = "") -> Example:
    photo = Photo(
        f"0/{name}", source, File("photos", name), (64, 64), variants[0], 1, "0" * 64, caption_from=".txt" if found else ""
    )
    return Example(photo.sample + size, photo, (64, 64), variants)


def counted(limit: int, examples: list[Example]) -> Tokens:
    """A tokenizer for which every word is one token."""
    return Tokens(limit, {text: len(text.split()) for e in examples for text in e.captions})


@pytest.mark.parametrize("probability", [0.0, 0.05, 0.5, 1.0])
def test_what_an_appearance_trains_on_is_drawn_for_it(probability: float) -> None:
    occurrences = [Occurrence(epoch, "0/a.jpg", repeat) for epoch in range(50) for repeat in range(40)]
    one = example("a.jpg", "a", "b", "c", source=replace(SOURCE, caption_dropout=probability))
    drawn = Counter(captions.draw(7, occurrence, one) for occurrence in occurrences)
    spread = 5 * (2000 * probability * (1 - probability)) ** 0.5
    assert abs(drawn[""] - 2000 * probability) <= spread
    for text in "abc":
        assert abs(drawn[text] - 2000 * (1 - probability) / 3) <= 5 * (2000 * 2 / 9) ** 0.5
    assert set(drawn) <= {"", "a", "b", "c"}


def test_all_variants_are_counted_and_a_photo_of_several_sizes_once() -> None:
    examples = [
        example("0.jpg", "one", "one two three"),
        example("1.jpg", ""),
        example("2.jpg", "", found=False),
        example("3.jpg", "one", ""),
        example("4.jpg", "sks", found=False, size="@512"),
        example("4.jpg", "sks", found=False, size="@768"),
    ]
    report = captions.report(examples, tokens={"clip": counted(2, examples), "t5": counted(3, examples)})
    assert (report.photos, report.missing, report.empty) == (5, ("0/2.jpg", "0/4.jpg"), ("0/1.jpg", "0/3.jpg"))
    assert report.truncated == {"clip": ("0/0.jpg",), "t5": ()}
    assert report.tokens["clip"].counts["one two three"] == 3
    assert str(report).splitlines() == [
        "captions of 5 photos: 2 missing, 2 empty, 1 truncated by clip, 0 truncated by t5",
        "  missing: 0/2.jpg, 0/4.jpg",
        "  empty: 0/1.jpg, 0/3.jpg",
        "  truncated by clip: 0/0.jpg",
    ]
    with pytest.raises(UserError, match="0/0.jpg: too long for clip"):
        captions.refuse_truncated(report)
    captions.refuse_truncated(captions.report(examples))
    assert str(captions.report(examples[:1])) == "captions of 1 photo: 0 missing, 0 empty"


def test_the_first_samples_are_shown_and_all_are_kept() -> None:
    report = captions.report([example(f"{i}.jpg", "", found=False) for i in range(50)])
    assert "  missing: 0/0.jpg, 0/1.jpg, 0/2.jpg and 47 more" in str(report)
    assert len(report.missing) == 50


BEAR = [example("a.jpg", "a photo of sks plush bear on a log"), example("b.jpg", "the bear, grass")]


def test_frequencies_are_of_captions_or_of_tags_with_their_triggers() -> None:
    tagged = replace(SOURCE, caption_rules=CaptionRules(shuffle=True, trigger="sks"))
    lined = replace(SOURCE, caption_rules=CaptionRules(lines=True, trigger="sks"))
    examples = [example("0.jpg", "a dog, sun"), example("1.jpg", "a dog, sun"), example("2.jpg", "", found=False)]
    assert captions.frequency(examples) == {"a dog, sun": 2, "": 1}
    examples = [example("0.jpg", "sks, a, b", "sks, b, a", source=tagged), example("1.jpg", "sks, b", source=tagged)]
    assert captions.frequency(examples) == {"sks": 2, "a": 1, "b": 2}
    examples = [example("0.jpg", "sks, a dog", "sks, two dogs, sea", source=lined)]
    assert captions.frequency(examples) == {"sks, a dog": 1, "sks, two dogs, sea": 1}
    many = [replace(e, photo=replace(e.photo, repeats=3), sample=e.sample + size) for e in examples for size in ("@1", "@2")]
    assert set(captions.frequency(many).values()) == {3}


def test_the_prior_is_not_the_subject() -> None:
    prior = example("b.jpg", "a photo of a dog", source=replace(SOURCE, regularisation=True))
    assert captions.frequency([*BEAR, prior]) == captions.frequency(BEAR)


def test_triggers_are_those_of_the_subject() -> None:
    sources = [
        Source(index, "photos", caption_rules=CaptionRules(trigger=trigger), regularisation=other)
        for index, (trigger, other) in enumerate([("b", False), ("", False), ("c", True), ("a", False), ("b", False)])
    ]
    assert captions.triggers([example(f"{s.index}.jpg", "text", source=s) for s in sources]) == ("b", "a")
