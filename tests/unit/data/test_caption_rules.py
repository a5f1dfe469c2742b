"""What a caption becomes before it is trained on: finite variants, each a pure function of its key."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.caption_rules import CaptionRules, holds

words = st.text("abcxyzÄß熊 -", min_size=1, max_size=8).map(str.strip).filter(bool)
tag_lists = st.lists(words, min_size=1, max_size=12)
seeds = st.integers(0, 2**62)
samples = st.text(max_size=12)


def variants_of(rules: CaptionRules, caption: str, seed: int = 7, sample: str = "0/a.jpg") -> tuple[str, ...]:
    return rules.variants_of(caption, seed=seed, sample=sample)


@given(st.text(), seeds, samples)
def test_by_default_a_caption_stays_as_it_is(caption: str, seed: int, sample: str) -> None:
    assert variants_of(CaptionRules(), caption, seed, sample) == (caption,)


@pytest.mark.slow
@given(tag_lists, st.integers(0, 14), st.integers(1, 9), seeds, samples)
def test_shuffled_forms_are_permutations_that_keep_the_first_tags(tags, keep, variants, seed, sample) -> None:
    found = variants_of(CaptionRules(shuffle=True, keep=keep, variants=variants), ", ".join(tags), seed, sample)
    assert len(found) == (variants if len(tags) - keep > 1 else 1)
    for text in found:
        parts = text.split(", ")
        assert sorted(parts) == sorted(tags)
        assert parts[:keep] == tags[:keep]


def test_every_permutation_is_as_likely_as_the_others() -> None:
    found = Counter(variants_of(CaptionRules(shuffle=True, keep=1, variants=6000), "k, a, b, c"))
    assert len(found) == 6
    assert all(abs(count - 1000) <= 5 * (6000 * 5 / 36) ** 0.5 for count in found.values())


@given(tag_lists, st.integers(0, 5), st.floats(0.01, 1), seeds)
def test_dropped_tags_leave_the_others_in_order(tags, keep, share, seed) -> None:
    for text in variants_of(CaptionRules(tag_dropout=share, keep=keep), ", ".join(tags), seed):
        left = iter(tags)
        parts = text.split(", ") if text else []
        assert all(part in left for part in parts)
        assert parts[:keep] == tags[:keep]


@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("shuffle", [False, True])
def test_tags_are_dropped_as_often_as_asked(share: float, shuffle: bool) -> None:
    """Each by itself: how many of one variant are dropped spreads as independent draws do."""
    tags = [f"t{i}" for i in range(10)]
    found = variants_of(CaptionRules(tag_dropout=share, keep=2, shuffle=shuffle, variants=3000), ", ".join(tags))
    counts = Counter(tag for text in found for tag in text.split(", "))
    spread = 5 * (3000 * share * (1 - share)) ** 0.5
    assert counts["t0"] == counts["t1"] == 3000
    assert all(abs(3000 * (1 - share) - counts[tag]) <= spread for tag in tags[2:])
    lengths = [len(text.split(", ")) - 2 for text in found]
    mean = sum(lengths) / 3000
    assert sum((length - mean) ** 2 for length in lengths) / 3000 == pytest.approx(8 * share * (1 - share), rel=0.15)


@given(tag_lists, seeds, samples, st.integers(1, 8))
def test_a_form_is_a_function_of_its_key_alone(tags, seed, sample, variants) -> None:
    """Neither the number of variants nor any other source's keys move it."""
    rules = CaptionRules(shuffle=True, tag_dropout=0.3, variants=variants)
    caption = ", ".join(tags)
    found = variants_of(rules, caption, seed, sample)
    assert found == variants_of(rules, caption, seed, sample)
    more = variants_of(replace(rules, variants=variants + 3), caption, seed, sample)
    assert more[: len(found)] == found
    assert variants_of(replace(rules, trigger="§"), caption, seed, sample) == tuple(
        ", ".join(filter(None, ("§", text))) for text in found
    )


def test_forms_differ_by_seed_sample_and_number() -> None:
    rules, caption = CaptionRules(shuffle=True), ", ".join(map(str, range(20)))
    found = [
        *variants_of(rules, caption),
        *variants_of(rules, caption, seed=8),
        *variants_of(rules, caption, sample="0/b.jpg"),
    ]
    assert len(set(found)) == 3 * rules.variants


def test_forms_never_change() -> None:
    """A cache and a checkpoint hold them: another draw would be another run."""
    rules = CaptionRules(wildcards=True, shuffle=True, tag_dropout=0.25, keep=1, trigger="sks", variants=3)
    assert variants_of(rules, "dog, {red|blue} hat, sun, sea, sand") == (
        "sks, dog, red hat, sand, sun",
        "sks, dog, sand, sea",
        "sks, dog, sand, sun, sea, red hat",
    )


@pytest.mark.parametrize(
    ("separator", "caption", "tags"),
    [
        (", ", "a,b ,  c,,", "a, b, c"),
        (",", "a, b", "a,b"),
        ("|", "a, b | c", "a, b|c"),
        (" ", "a  b\nc", "a b c"),
        (" || ", "a || b|c", "a || b|c"),
    ],
)
def test_separators(separator: str, caption: str, tags: str) -> None:
    """The spaces around one do not count; joined as it is written."""
    assert set(variants_of(CaptionRules(shuffle=True, keep=9, separator=separator), caption)) == {tags}


@pytest.mark.parametrize(
    ("caption", "first", "free", "last"),
    [
        ("k, l ||| a, b, c", "k, l", "abc", ""),
        ("k, ||| a, b, ||| y, z", "k", "ab", "y, z"),
        ("||| a, b", "", "ab", ""),
        ("k, l|||", "k, l", "", ""),
        ("k ||| a ||| y ||| z", "k", "a", "y ||| z"),
        ("k, a, b", "k", "ab", ""),  # without it the first tag is kept
    ],
)
def test_what_stands_before_the_separator_is_kept(caption: str, first: str, free: str, last: str) -> None:
    """As sd-scripts' keep_tokens_separator."""
    rules = CaptionRules(shuffle=True, keep=1, keep_separator="|||", variants=200)
    orders = {", ".join(filter(None, (first, *order, last))) for order in permutations(free)}
    assert set(variants_of(rules, caption)) == orders
    assert len(variants_of(rules, caption)) == (200 if len(free) > 1 else 1)
    dropped = variants_of(CaptionRules(tag_dropout=1.0, keep_separator="|||"), caption)
    assert set(dropped) == {", ".join(filter(None, (first, last)))} or "|||" not in caption


def test_lines_are_captions_of_equal_chances() -> None:
    caption = "a dog\n\n  two dogs \nx, y"
    assert variants_of(CaptionRules(lines=True), caption) == ("a dog", "two dogs", "x, y")
    assert variants_of(CaptionRules(), caption) == (caption,), "off by default"
    assert variants_of(CaptionRules(lines=True), "") == ("",)
    found = variants_of(CaptionRules(lines=True, shuffle=True, variants=4), caption)
    assert found[:8] == ("a dog",) * 4 + ("two dogs",) * 4
    assert len(found) == 12 and set(found[8:]) <= {"x, y", "y, x"}
    tags = ", ".join(map(str, range(20)))
    assert len(set(variants_of(CaptionRules(lines=True, shuffle=True, variants=4), f"{tags}\n{tags}"))) == 8, (
        "numbers of their own"
    )


def test_wildcards() -> None:
    assert variants_of(CaptionRules(), "a {red|blue} dog") == ("a {red|blue} dog",), "off by default"
    rules = CaptionRules(wildcards=True, variants=400)
    found = Counter(variants_of(rules, "a {red|blue} dog {on grass|}"))
    assert set(found) == {f"a {colour} dog {where}" for colour in ("red", "blue") for where in ("on grass", "")}
    assert all(abs(count - 100) <= 5 * 75**0.5 for count in found.values())
    assert set(variants_of(rules, "{a|{b|c} d}")) == {"a", "b d", "c d"}
    for literal in ("a {red} dog", "a } b {", ":{", "{{x}}"):
        assert variants_of(rules, literal) == (literal,)


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("a photo of a bear", "sks bear, a photo of a bear"),
        ("a photo of SKS Bear, on a beach", "a photo of SKS Bear, on a beach"),
        ("sks bears", "sks bear, sks bears"),
        ("", "sks bear"),
    ],
)
def test_a_trigger_is_put_in_front_where_it_is_missing(caption: str, expected: str) -> None:
    assert variants_of(CaptionRules(trigger="sks bear"), caption) == (expected,)


def test_a_trigger_stays_when_its_tag_is_dropped() -> None:
    found = variants_of(CaptionRules(trigger="sks", tag_dropout=0.5, variants=50), "sks, beach, sun")
    assert all(text.split(", ").count("sks") == 1 for text in found)
    assert "sks" in found


def test_words_are_held_as_words() -> None:
    assert holds("a man, standing", "man") and holds("<sks> dog", "<sks>") and holds("一只小熊在海滩", "小熊")
    assert not holds("a woman", "man") and not holds("mans", "man")


@pytest.mark.parametrize(
    ("prefix", "suffix", "expected"),
    [
        ("a photo of ", "", "a photo of dog"),
        ("a photo of", "", "a photo of dog"),
        ("", ", high quality", "dog, high quality"),
        ("(", ")", "(dog)"),
        ("", "outside", "dog outside"),
    ],
)
def test_prefix_and_suffix(prefix: str, suffix: str, expected: str) -> None:
    """As they are written, but no two words grow together."""
    assert variants_of(CaptionRules(prefix=prefix, suffix=suffix), "dog") == (expected,)


def test_the_prefix_may_hold_the_trigger() -> None:
    assert variants_of(CaptionRules(prefix="a photo of sks ", trigger="sks"), "dog") == ("a photo of sks dog",)
    assert variants_of(CaptionRules(prefix="a photo of ", trigger="sks"), "") == ("sks, a photo of",)
