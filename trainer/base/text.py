"""Text that people bring: how its bytes are read, what of it is dropped, and when two texts are the same."""

import re
import unicodedata
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

# No editor shows them, and tokenizers make tokens of them: controls but for white space, soft hyphens, marks of direction,
# zero-width and word-joining spaces, byte order marks. Joiners, variation selectors and tags stay: Persian, emoji.
INVISIBLE = re.compile(
    "[\0-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
)
JOINERS, SELECTORS = "\u200c\u200d", re.compile("[\ufe00-\ufe0f]")
# Scripts without spaces between words, where every character counts as a word: Thai to Khmer, kana, Han, Hangul.
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u312f\u31a0-\u31ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
    "\uff66-\uff9f\U00020000-\U0003ffff]"
)
PAGE = "an HTML page, as a failed download leaves one; get the file itself"
# What stands in the place of a file, by its beginning.
STAND_INS = {
    b"version https://git-lfs.github.com/spec/": "a Git LFS pointer, not the file itself; run `git lfs pull` where it lies",
    b"/annex/objects/": "a git-annex pointer, not the file itself; run `git annex get` where it lies",
    b"<!doctype html": PAGE,
    b"<html": PAGE,
    b"{\\rtf": "RTF; save it as plain text",
}
UTF16 = (BOM_UTF16_LE, BOM_UTF16_BE)


def refuse_stand_in(data: bytes) -> None:
    """Raises ValueError for a large file that was not fetched, a web page, a document of an editor."""
    beginning = data[:200].removeprefix(BOM_UTF8).lstrip().lower()
    for mark, what in STAND_INS.items():
        if beginning.startswith(mark):
            raise ValueError(what)


def opened(path: Path, newline: str | None = None) -> TextIO:
    """A text file, to be read in lines: UTF-8, or UTF-16 with its mark. Raises ValueError for what is no text."""
    with path.open("rb") as file:
        beginning = file.read(200)
    refuse_stand_in(beginning)
    return path.open(encoding="utf-16" if beginning.startswith(UTF16) else "utf-8-sig", newline=newline)


def decoded(data: bytes, *, utf16: bool = True) -> str:
    """The text of a file, without its byte order mark. utf16: whether that is read, too, where the file has its mark.

    Raises ValueError with the remedy.
    """
    refuse_stand_in(data)
    if data.startswith(UTF16) and not utf16:
        raise ValueError("UTF-16 (as PowerShell and older editors write it); save it as UTF-8")
    try:
        text = data.decode("utf-16" if data.startswith(UTF16) else "utf-8-sig")
    except UnicodeDecodeError as error:
        at, odd = error.start, data[error.start : error.start + 1]
        letter = odd.decode("cp1252", "ignore")
        meant = f", {letter} in Windows-1252" if letter.isprintable() and letter else ""
        where = f"at byte {at}, line {data.count(10, 0, at) + 1}"
        raise ValueError(f"not UTF-8 ({where}: 0x{odd.hex()}{meant}); save it as UTF-8") from error
    if text.count("\0") * 4 > len(text):
        raise ValueError("not UTF-8 (NUL between the letters: UTF-16 without its mark, or no text); save it as UTF-8")
    return text


def visible(text: str) -> str:
    """The text without INVISIBLE characters."""
    return INVISIBLE.sub("", text)


def invisible(text: str) -> str:
    """The code points of the INVISIBLE characters in a text, for people; "" without any."""
    return ", ".join(sorted({f"U+{ord(each):04X}" for each in INVISIBLE.findall(text)}))


def composed(text: str) -> str:
    """The text in Unicode's form NFC, in which names are compared: a Mac writes them in another one (NFD)."""
    return unicodedata.normalize("NFC", text)


def spaced(text: str) -> str:
    """The text with one plain space for any white space (a browser's NBSP, too), and none at the ends."""
    return " ".join(text.split())


def folded(text: str) -> str:
    """The text as words are compared: in NFC, in any letter case, without what does not show."""
    return composed(SELECTORS.sub("", composed(visible(text)).casefold()))


def in_word(character: str) -> bool:
    """Whether a character belongs to a word of a script that puts spaces between words; "" does not."""
    if not character or UNSPACED.match(character):
        return False
    return character.isalnum() or character in f"_{JOINERS}" or unicodedata.category(character).startswith("M")


def holds(text: str, words: str) -> bool:
    """Whether `text` contains `words` as whole words, in any case and any of Unicode's forms."""
    return any(True for _ in _places(folded(text), folded(words)))


def replaced(text: str, words: str, instead: str) -> str:
    """The text with `instead` at each place of `words`, as whole words in any case; composed, and without the spaces around
    words that are gone."""
    text, words, parts, end = composed(visible(text)), composed(visible(words)), [], 0
    for start in _places(text, words, re.IGNORECASE):
        if start >= end:
            parts.append(text[end:start])
            end = start + len(words)
    made = instead.join([*parts, text[end:]])
    return made if instead else re.sub(r"[ \t]{2,}", " ", made).strip()


def _places(text: str, words: str, flags: int = 0) -> Iterator[int]:
    """Where `words` begin in `text` as whole words."""
    before, after = (UNSPACED.match(words[at : at + 1]) is None for at in (0, len(words) - 1))
    for match in re.finditer(f"(?={re.escape(words)})", text, flags):
        start, end = match.start(), match.start() + len(words)
        if not (before and start and in_word(text[start - 1])) and not (after and in_word(text[end : end + 1])):
            yield start
