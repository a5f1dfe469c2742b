"""Text written by people: decoding, invisible characters, and comparison."""

import re
import unicodedata
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

# Invisible in editors, yet tokens to a tokenizer: controls except white space, soft hyphens, direction marks, zero-width
# and word-joining spaces, byte order marks. Joiners, variation selectors and tags stay: Persian and emoji need them.
INVISIBLE = re.compile(
    "[\0-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
)
JOINERS, SELECTORS = "\u200c\u200d", re.compile("[\ufe00-\ufe0f]")
# Scripts without spaces, where every character counts as a word: Thai to Khmer, kana, Han, Hangul.
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u312f\u31a0-\u31ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
    "\uff66-\uff9f\U00020000-\U0003ffff]"
)
PAGE = "an HTML page, as a failed download leaves one; get the file itself"
# First bytes of files that replace the expected one -> message.
STAND_INS = {
    b"version https://git-lfs.github.com/spec/": "a Git LFS pointer, not the file itself; run `git lfs pull` where it lies",
    b"/annex/objects/": "a git-annex pointer, not the file itself; run `git annex get` where it lies",
    b"<!doctype html": PAGE,
    b"<html": PAGE,
    b"{\\rtf": "RTF; save it as plain text",
}
UTF16 = (BOM_UTF16_LE, BOM_UTF16_BE)


def refuse_stand_in(data: bytes) -> None:
    """Raises ValueError for a pointer to a large file, a web page or a word processor's document."""
    beginning = data[:200].removeprefix(BOM_UTF8).lstrip().lower()
    for mark, message in STAND_INS.items():
        if beginning.startswith(mark):
            raise ValueError(message)


def opened(path: Path, newline: str | None = None) -> TextIO:
    """A text file opened for reading: UTF-8, or UTF-16 with its byte order mark. Raises ValueError if it is no text."""
    with path.open("rb") as file:
        beginning = file.read(200)
    refuse_stand_in(beginning)
    return path.open(encoding="utf-16" if beginning.startswith(UTF16) else "utf-8-sig", newline=newline)


def decoded(data: bytes, *, utf16: bool = True) -> str:
    """The text of a file without its byte order mark. utf16: accept UTF-16, too. Raises ValueError with the remedy."""
    refuse_stand_in(data)
    if data.startswith(UTF16) and not utf16:
        raise ValueError("UTF-16 (as PowerShell and older editors write it); save it as UTF-8")
    try:
        text = data.decode("utf-16" if data.startswith(UTF16) else "utf-8-sig")
    except UnicodeDecodeError as error:
        at, odd = error.start, data[error.start : error.start + 1]
        letter = odd.decode("cp1252", "ignore")
        guess = f", {letter} in Windows-1252" if letter.isprintable() and letter else ""
        place = f"at byte {at}, line {data.count(10, 0, at) + 1}"
        raise ValueError(f"not UTF-8 ({place}: 0x{odd.hex()}{guess}); save it as UTF-8") from error
    if text.count("\0") * 4 > len(text):
        raise ValueError("not UTF-8 (NUL between the letters: UTF-16 without its mark, or no text); save it as UTF-8")
    return text


def visible(text: str) -> str:
    """The text without INVISIBLE characters."""
    return INVISIBLE.sub("", text)


def invisible(text: str) -> str:
    """The code points of the INVISIBLE characters in a text, in words; "" if there are none."""
    return ", ".join(sorted({f"U+{ord(character):04X}" for character in INVISIBLE.findall(text)}))


def composed(text: str) -> str:
    """The text in Unicode form NFC, for comparing names: a Mac writes them in NFD."""
    return unicodedata.normalize("NFC", text)


def spaced(text: str) -> str:
    """The text with each run of white space (NBSP, too) as one space, and none at the ends."""
    return " ".join(text.split())


def folded(text: str) -> str:
    """The text for comparing words: NFC, case-folded, without invisible characters."""
    return composed(SELECTORS.sub("", composed(visible(text)).casefold()))


def in_word(character: str) -> bool:
    """Whether a character is part of a word in a script with spaces between words; False for ""."""
    if not character or UNSPACED.match(character):
        return False
    return character.isalnum() or character in f"_{JOINERS}" or unicodedata.category(character).startswith("M")


def holds(text: str, words: str) -> bool:
    """Whether `text` contains `words` as whole words, in any letter case and Unicode form."""
    return next(_places(folded(text), folded(words)), None) is not None


def replaced(text: str, words: str, instead: str) -> str:
    """The text in NFC with `instead` for each whole-word match of `words`, in any case; "" removes spaces around it, too."""
    text, words, parts, end = composed(visible(text)), composed(visible(words)), [], 0
    for start in _places(text, words, re.IGNORECASE):
        if start >= end:
            parts.append(text[end:start])
            end = start + len(words)
    result = instead.join([*parts, text[end:]])
    return result if instead else re.sub(r"[ \t]{2,}", " ", result).strip()


def _places(text: str, words: str, flags: int = 0) -> Iterator[int]:
    """The offsets in `text` at which `words` begin as whole words."""
    before, after = (UNSPACED.match(words[at : at + 1]) is None for at in (0, len(words) - 1))
    for match in re.finditer(f"(?={re.escape(words)})", text, flags):
        start, end = match.start(), match.start() + len(words)
        if not (before and start and in_word(text[start - 1])) and not (after and in_word(text[end : end + 1])):
            yield start
