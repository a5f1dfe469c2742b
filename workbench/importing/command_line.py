"""The options of a training command, in a file of a shell: of Linux (sh), of Windows (.bat, .cmd), or PowerShell (.ps1).
Words are split first and variables put in place then, so that no blank within a value parts it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

SCRIPT = re.compile(r"(?:^|[\\/])(\w*train_network)(?:\.py)?$")
# A command whose words are another command: `cmd /k "..."`, `bash -c '...'`.
WRAPPED = re.compile(
    r"[\s@]*(?:call\s+)?\S*(?:cmd|bash|sh|powershell|pwsh)(?:\.exe)?\s+(?:/[ck]|-l?c|-command)\s+([\"'])(.*)\1\s*", re.I
)
LOOKS_LIKE_WINDOWS = re.compile(r"[\^`][ \t]*\n|[\s='\"](?:[A-Za-z]:\\|\\\\\w)")
PASSED_ON = ("%*", "$*", "$@", "${@}")  # what a script was called with
IGNORED = re.compile(r"\s*(?:#|::|@?rem\b|@?echo\b)", re.I)
END = re.compile(r"\"[^\"]*\"|'[^']*'|(\s\d?[<>#]|&+|[|;]+)")  # its group: where a command ends
NAMED = re.compile(r"\$\{(\w+)(?::?-([^}]*))?(?:\[@\])?\}|\$(?:env:)?(\w+)|%(\w+)%|!(\w+)!|^@(\w+)$")
ADDED = re.compile(r"\.Add\(\s*[\"'](--\w+)", re.I)  # an option that a PowerShell script adds to a list
ASSIGNMENTS = [
    re.compile(pattern, re.MULTILINE | re.I)
    for pattern in (
        r"^[ \t]*@?set[ \t]+\"?(\w+)=([^\"&\n]*|\"[^\"\n]*\")\"?[ \t]*(?:&.*)?$",
        r"^[ \t]*\$(?:env:)?(\w+)[ \t]*=[ \t]*(@\([^()]*\)|\"[^\"\n]*\"|'[^'\n]*'|[^\s#;@(\[]+)",
        r"^[ \t]*(?:export[ \t]+)?(\w+)=(\([^()]*\)|'[^'\n]*'|\"[^\"\n]*\"|[^\s;'\"]*)[ \t]*(?:[;#&].*)?$",
    )
]


def command_options(text: str, path: Path) -> dict[str, Any]:
    """The options of the first command that runs a script for networks, whose name is the option `script`; empty where there
    is none. path: of the file; its suffix says which shell, else the text does. Raises ValueError."""
    suffix, folder = path.suffix.lower(), str(path.absolute().parent)
    windows = suffix in (".bat", ".cmd", ".ps1") or suffix != ".sh" and LOOKS_LIKE_WINDOWS.search(text) is not None
    text = re.sub(r"^[ \t]*>>[ \t]?", "", text, flags=re.MULTILINE)  # as PowerShell shows a command of several lines
    text = re.sub(r"[\^`][ \t]*\n" if windows else r"[\\^`][ \t]*\n", " ", text).replace("%~dp0", f"{folder}/")
    known = {"psscriptroot": folder, "home": "~"}

    def value_of(match: re.Match[str]) -> str:
        """What stands for a variable: its value, the default that is written beside it, or itself."""
        name = next(filter(None, (match[1], *match.groups()[2:])))
        return known.get(name.lower(), match[0] if match[2] is None else match[2])

    filled = partial(NAMED.sub, value_of)
    for name, value in _assignments(text):
        known[name.lower()] = filled(value.strip("\"'"))
    split = partial(_split, escape="" if windows else "\\", quotes='"' if suffix in (".bat", ".cmd") else "\"'")
    for command in _commands(text):
        if "train" not in filled(command):
            continue
        words = [part for word in split(command) for part in _in_place(word, filled(word), split)]
        for place, word in enumerate(words):
            match, behind = SCRIPT.search(word), words[place + 1 :]
            if match and any(each.startswith("--") for each in behind):  # else its name alone, in a variable
                return {"script": match[1], **_options(behind, ADDED.findall(text))}
    return {}


def variables(text: str) -> set[str]:
    """The names that the text of a shell gives a value."""
    return {name for name, _ in _assignments(text)}


def _assignments(text: str) -> list[tuple[str, str]]:
    return [pair for pattern in ASSIGNMENTS for pair in pattern.findall(text)]


def _split(line: str, escape: str = "", quotes: str = "\"'") -> list[str]:
    """The words of a line. escape: none in Windows, where a backslash parts folders."""
    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split, lexer.commenters, lexer.escape, lexer.quotes = True, "", escape, quotes
    return list(lexer)


def _commands(text: str) -> Iterator[str]:
    for line in text.splitlines():
        line = inner[2] if (inner := WRAPPED.fullmatch(line)) else line
        if IGNORED.match(line):
            continue
        start = 0
        for match in END.finditer(line):
            if match[1]:
                yield line[start : match.start()]
                start = match.end()
                if match[1].endswith("#"):
                    break
        else:
            yield line[start:]


def _in_place(word: str, filled: str, split: Callable[[str], list[str]]) -> list[str]:
    """The words that a word becomes with the values of its variables: several where it is one that holds options."""
    if NAMED.fullmatch(word) and filled.lstrip("@(\"' \n").startswith("--"):
        return split(re.sub(r"^@?\(|\)$|(?<=[\"']),", " ", filled))
    return [filled]


def _options(words: Sequence[str], added: Sequence[str] = ()) -> dict[str, Any]:
    """`--name value ...` by name; without a value true, with several a list. added: what the file adds under conditions."""
    options: dict[str, Any] = {}
    values: list[Any] = []
    name = ""
    for word in [*(each for each in words if each not in PASSED_ON), "--"]:
        if word.startswith("--"):
            if name:
                options[name] = values[0] if len(values) == 1 else values or True
            name, equals, value = word[2:].partition("=")
            values = [value] if equals else []
        elif NAMED.fullmatch(word) and (values or re.search("arg|opt|extra", word, re.I)):
            options[word] = [*added] or "further options, which the file does not say"
        elif name:
            values.append(word)
    unset = [name for name, value in options.items() if NAMED.search(str(value)) and not re.search(r"[\\/]", str(value))]
    if unset:
        raise ValueError(f"--{unset[0]} {options[unset[0]]}: the file does not say what that is; write the value there")
    return options


def words(line: str) -> dict[str, Any]:
    """The options in a line of words, as a person types them into a field of a window."""
    return _options(_split(line))
