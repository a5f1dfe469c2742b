"""Warnings on the prompts of samples: unlike any caption, or with syntax that other programs read as settings."""

import re
from collections.abc import Iterable, Sequence

from trainer.base.text import UNSPACED, folded, holds, in_word
from trainer.data.captions.captions import triggers
from trainer.data.examples import Example

# Flags of sd-scripts and of Midjourney; weights, networks, schedules, breaks and escapes of A1111's kind and of InvokeAI.
OTHERS = re.compile(
    r"(?<!\S)--[a-z]\w*|<\w+:[^<>]*>|\([^()]*:\s*[\d.]+\s*\)|\[[^][]*:\s*[\d.]+\s*\]|\(\(|\\[()]|[\w)]\+\+|\bBREAK\b"
    r"|(?i:\bnegative prompt:|\bsampler:|\bcfg scale:)|\bembedding:\w+"
)
WEIGHT = re.compile(r"\([^()]*:[\d.]+\)")
# Words that describe no content of a picture.
_COMMON = (
    "a an the this that these those of on in at by to for from with without and or but not no as is are was be it its "
    "his her their my your our one two some any very photo photos photograph picture image"
)
COMMON = frozenset(_COMMON.split())


class _Spaced(dict[int, str]):
    """A translation table by code point, after which a text splits into words at spaces."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        spaced = f" {character} " if UNSPACED.match(character) else " "
        self[code] = character if in_word(character) and character != "_" else spaced
        return self[code]


_SPACED = _Spaced()


def words(text: str) -> set[str]:
    """The words of a text in lower case, without COMMON ones."""
    return set(folded(text).translate(_SPACED).split()) - COMMON


def unread(prompts: Iterable[str], *, weighted: bool = False) -> list[str]:
    """A line on each prompt with syntax that other programs read as settings. weighted: brackets are weights here, too."""
    by_prompt = {prompt: [match[0].strip() for match in OTHERS.finditer(prompt)] for prompt in dict.fromkeys(prompts)}
    if weighted:
        by_prompt = {prompt: [mark for mark in marks if mark[0] not in "([\\"] for prompt, marks in by_prompt.items()}
    return [
        f"the prompt {prompt!r} has {', '.join(dict.fromkeys(marks))}, which other programs read as settings; here all of it "
        "is words: give [[validation.samples]] with width, height, negative, seed, steps and guidance, and no weights"
        for prompt, marks in by_prompt.items()
        if marks
    ]


def warnings(prompts: Iterable[str], examples: Sequence[Example]) -> list[str]:
    """A line on the prompts that share no word with any caption, and one on those without a trigger. Captions of
    regularisation images do not count. No warning for a prompt without words, or if no caption has any."""
    words_of = {prompt: words(prompt) for prompt in dict.fromkeys(prompts)}
    any_words, common, searched = False, set(), set().union(*words_of.values())
    for text in {text for e in examples if not e.photo.source.regularisation for text in e.captions}:
        terms = words(text)
        any_words = any_words or bool(terms)
        common |= terms & searched
        if common == searched and any_words:
            break
    strange = [prompt for prompt, terms in words_of.items() if any_words and terms and not terms & common]
    names = triggers(examples)
    without = [p for p in words_of if names and p not in strange and not any(holds(p, name) for name in names)]
    hardly = "no word with any caption or trigger: the samples will hardly show what is trained"
    perhaps = f"no trigger ({', '.join(names)}): the samples may not show what is trained"
    lines = []
    for mine, one, several, rest in ((strange, "shares", "share", hardly), (without, "has", "have", perhaps)):
        noun, verb = ("prompt", one) if len(mine) == 1 else ("prompts", several)
        lines += [f"the {noun} {', '.join(map(repr, mine))} {verb} {rest}"] if mine else []
    return lines
