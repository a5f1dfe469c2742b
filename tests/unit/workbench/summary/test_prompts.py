"""Prompts that no caption is like, and those with what other programs read as settings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.data.captions.test_captions import BEAR, SOURCE, example
from trainer.data.caption_rules import CaptionRules
from workbench.summary import prompts

TRIGGERED = [example("a.jpg", "sks, a dog", source=replace(SOURCE, caption_rules=CaptionRules(trigger="sks")))]


@pytest.mark.parametrize(
    ("asked", "examples", "expected"),
    [
        (["A photo of SKS Plush Bear on a beach"], BEAR, []),
        (["a photo of a cat on the beach"], BEAR, ["the prompt 'a photo of a cat on the beach' shares no word with"]),
        (["cat", "bear", "cat", "sea"], BEAR, ["the prompts 'cat', 'sea' share no word with"]),
        (["", "a photo of the"], BEAR, []),
        (["cat"], [example("a.jpg", "")], []),
        (["sks on a beach"], TRIGGERED, []),
        (["a dog on a beach"], TRIGGERED, ["the prompt 'a dog on a beach' has no trigger (sks)"]),
        (["a cat"], TRIGGERED, ["the prompt 'a cat' shares no word"]),
        (["熊在海滩"], [example("a.jpg", "一只小熊")], []),
        (["海滩"], [example("a.jpg", "一只小熊")], ["the prompt '海滩' shares no word"]),
        (["плюшевый медведь"], [example("a.jpg", "Медведь, лес")], []),
    ],
)  # fmt: skip
def test_prompts_that_share_no_word_or_trigger_are_named(asked, examples, expected) -> None:
    told = prompts.warnings(asked, examples)
    assert len(told) == len(expected)
    assert all(line.startswith(start) for line, start in zip(told, expected, strict=True)), told


def test_the_prior_is_not_the_subject() -> None:
    prior = example("b.jpg", "a photo of a dog", source=replace(SOURCE, regularisation=True))
    (line,) = prompts.warnings(["a dog on the moon"], [*BEAR, prior])
    assert line.startswith("the prompt 'a dog on the moon' shares no word with")
    assert prompts.warnings(["a dog"], [example("a.jpg", ""), prior]) == [], "no word of the subject is known"


@pytest.mark.parametrize(
    ("prompt", "marks"),
    [
        ("a shape --w 128 --h 64 --n blurry --d 1 --l 7 --s 20", "--w, --h, --n, --d, --l, --s"),
        ("--ar 16:9 a dog", "--ar"),
        ("a dog <lora:bear:0.8>", "<lora:bear:0.8>"),
        ("a (red:1.2) dog, [cat:0.5]", "(red:1.2), [cat:0.5]"),
        ("a dog BREAK a cat", "BREAK"),
        ("a dog\nNegative prompt: blurry\nSteps: 20, Sampler: Euler", "Negative prompt:, Sampler:"),
        (r"saber \(fate\), ((red))", r"\(, \), (("),
        ("a dog++", "g++"),
    ],
)
def test_what_other_programs_read_as_settings_is_named(prompt: str, marks: str) -> None:
    (line,) = prompts.unread([prompt, prompt])
    assert f"has {marks}, which other programs read" in line and "[[validation.samples]]" in line


@pytest.mark.parametrize(
    "prompt",
    ["a dog -- and a cat", "a well-lit dog", "a {red|blue} dog", "a dog (of 3)", "3:2, a dog", "break, C+", "a < b > c", ""],
)
def test_plain_prompts_have_no_settings(prompt: str) -> None:
    assert not prompts.unread([prompt])


def test_words_are_of_every_alphabet() -> None:
    assert (
        prompts.words("Caf\u00e9, the \u043a\u043e\u0442")
        == prompts.words("cafe\u0301 \u041a\u041e\u0422")
        == {"caf\u00e9", "\u043a\u043e\u0442"}
    )
    assert prompts.words("\u0915\u0941\u0924\u094d\u0924\u093e sks_dog") == {
        "\u0915\u0941\u0924\u094d\u0924\u093e",
        "sks",
        "dog",
    }
    assert prompts.words("\u7ea2\u732b") == {"\u7ea2", "\u732b"}


def test_weights_are_no_strange_settings_where_they_are_read() -> None:
    prompt = r"(bear:1.2), [dark:0.5], \(x\), <lora:a:1> --w 512"
    (line,) = prompts.unread([prompt])
    assert "has (bear:1.2), [dark:0.5], \\(, \\), <lora:a:1>, --w, which other programs read as settings" in line
    (line,) = prompts.unread([prompt], weighted=True)
    assert "has <lora:a:1>, --w, which other programs read as settings" in line
    assert prompts.unread(["(bear:1.2)"], weighted=True) == []
