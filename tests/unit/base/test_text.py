"""Text that people bring: what is read, what is dropped, and when words are the same in any alphabet."""

from __future__ import annotations

import codecs
import random
import re
import string
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.base.text import composed, decoded, folded, holds, invisible, opened, replaced, visible

FAMILY, PERSIAN = "\U0001f468\u200d\U0001f469\u200d\U0001f467\ufe0f", "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"
ENGLAND = "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f"


@pytest.mark.parametrize(
    "character",
    [
        "\ufeff",
        "\0",
        "\u200b",
        "\u2060",
        "\u00ad",
        "\u200e",
        "\u200f",
        "\u202b",
        "\u202e",
        "\u2066",
        "\u061c",
        "\x1b",
        "\x93",
    ],
)
def test_what_no_editor_shows_is_dropped_and_named(character: str) -> None:
    text = f"{character}a {character}{character}dog{character}"
    assert visible(text) == "a dog"
    assert invisible(text) == f"U+{ord(character):04X}" and not invisible("a dog")


@pytest.mark.parametrize(
    "text", [FAMILY, PERSIAN, ENGLAND, "\u2764\ufe0f", "a\tb\nc\r\n\x0bd", "caf\u00e9", "cafe\u0301", "a\u00a0b"]
)
def test_what_letters_and_emoji_need_stays(text: str) -> None:
    assert visible(text) == text and not invisible(text)


@given(st.text(string.printable))
def test_plain_text_stays_as_it_is(text: str) -> None:
    assert visible(text) == composed(text) == text and folded(text) == text.lower()


@pytest.mark.parametrize("coding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_file_is_read_in_the_codings_that_say_what_they_are(tmp_path: Path, coding: str) -> None:
    data = "a caf\u00e9,\r\n\u732b\n".encode(coding)
    assert decoded(data) == "a caf\u00e9,\r\n\u732b\n"
    (tmp_path / "a.txt").write_bytes(data)
    with opened(tmp_path / "a.txt") as file:
        assert file.read() == "a caf\u00e9,\n\u732b\n"


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 17\n"
REFUSED = [
    (LFS, "git lfs pull"),
    (b"/annex/objects/SHA256E-s17--0.txt\n", "git annex get"),
    (b"\xef\xbb\xbf \n<!DOCTYPE html>\n<title>404</title>", "an HTML page"),
    (b"<HTML><body>", "an HTML page"),
    (rb"{\rtf1\ansi a dog}", "save it as plain text"),
]


@pytest.mark.parametrize(("data", "said"), REFUSED)
def test_what_stands_in_place_of_a_text_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    (tmp_path / "a.csv").write_bytes(data)
    for read in (lambda: decoded(data), lambda: opened(tmp_path / "a.csv")):
        with pytest.raises(ValueError, match=re.escape(said)):
            read()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("a\nthe dog\u2019s".encode("cp1252"), "at byte 9, line 2: 0x92, \u2019 in Windows-1252"),
        ("\u7167\u7247".encode("gbk"), "not UTF-8 (at byte 0"),
        ("a dog".encode("utf-16-le"), "UTF-16 without its mark"),
        (b"\x89PNG\r\n\x1a\n", "not UTF-8 (at byte 0, line 1: 0x89"),
    ],
)
def test_another_coding_is_refused_with_how_to_save_it(data: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        decoded(data)
    assert str(refused.value).endswith("save it as UTF-8")


def test_utf16_is_refused_where_a_format_wants_utf8() -> None:
    with pytest.raises(ValueError, match="UTF-16 .* save it as UTF-8"):
        decoded("a = 1".encode("utf-16"), utf16=False)
    assert decoded(codecs.BOM_UTF8 + b"a = 1", utf16=False) == "a = 1"


@pytest.mark.parametrize(
    ("text", "words", "there"),
    [
        ("a SKS dog", "sks", True),
        ("a sks_dog", "sks", False),
        ("sks2, a dog", "sks", False),
        ("a photo of \u043a\u043e\u0442", "\u041a\u041e\u0422", True),
        ("\u043a\u043e\u0442\u0438\u043a", "\u043a\u043e\u0442", False),
        ("two caf\u00e9s", "caf\u00e9", False),
        ("a cafe\u0301 here", "caf\u00e9", True),
        ("a caf\u00e9", "cafe", False),
        ("a cafe\u0301", "cafe", False),
        ("Stra\u00dfe", "STRASSE", True),
        ("\u4e00\u53ea\u732b\u5728\u8fd9\u91cc", "\u732b", True),
        ("sks\u732b", "sks", True),
        ("sks\u732b", "\u732b", True),
        ("\u0e41\u0e21\u0e27\u0e14\u0e33", "\u0e41\u0e21\u0e27", True),
        ("\u0915\u0941\u0924\u094d\u0924\u093e", "\u0915", False),
        ("\u090f\u0915 \u0915\u0941\u0924\u094d\u0924\u093e", "\u0915\u0941\u0924\u094d\u0924\u093e", True),
        (f"{PERSIAN}", "\u0645\u06cc", False),
        ("a \u2764\ufe0f", "\u2764", True),
        (f"a {FAMILY}", "\U0001f468", False),
        ("a s\u200bks dog", "sks", True),
        ("a <sks>", "<sks>", True),
    ],
)
def test_words_are_whole_ones_in_every_alphabet(text: str, words: str, there: bool) -> None:
    assert holds(text, words) is there
    assert holds(unicodedata.normalize("NFD", text), words) is there
    assert holds(text, unicodedata.normalize("NFD", words)) is there


@pytest.mark.parametrize(
    ("text", "words", "instead", "made"),
    [
        ("a photo of sks dog, sks dog", "sks dog", "dog", "a photo of dog, dog"),
        ("an SKS dog's bed", "sks", "old", "an old dog's bed"),
        ("sksdog and asks", "sks", "x", "sksdog and asks"), ("a sks", "sks", "", "a"), ("a sks dog", "sks", "", "a dog"),
        ("a\u0301 dog, cafe\u0301", "caf\u00e9", "bar", "\u00e1 dog, bar"), ("aa aa", "aa", "aa aa", "aa aa aa aa"),
        ("\u732b\u732b", "\u732b", "\u72ac", "\u72ac\u72ac"), ("", "a", "b", ""),
    ],
)  # fmt: skip
def test_words_are_replaced_where_they_are_whole(text: str, words: str, instead: str, made: str) -> None:
    assert replaced(text, words, instead) == made


def test_plain_words_are_compared_as_a_search_for_whole_words_does() -> None:
    rng = random.Random(0)
    word = "[A-Za-z0-9_]"
    for _ in range(5000):
        text, words = ("".join(rng.choices("aB_ .1<", k=rng.randint(1, most))) for most in (12, 3))
        searched = re.search(f"(?<!{word}){re.escape(words)}(?!{word})", text, re.IGNORECASE)
        assert holds(text, words) == (searched is not None), (text, words)
