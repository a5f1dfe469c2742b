"""Parses the options of a training command in a shell script: sh, Windows (.bat, .cmd) or PowerShell (.ps1). Words are split
before variables are expanded, so that a blank within a value does not split it."""

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
PASSED_ON = ("%*", "$*", "$@", "${@}")  # the script's own arguments
IGNORED = re.compile(r"\s*(?:#|::|@?rem\b|@?echo\b)", re.I)
END = re.compile(r"\"[^\"]*\"|'[^']*'|(\s\d?[<>#]|&+|[|;]+)")  # group 1: the end of a command
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
    """The options of the first command that runs a `*train_network` script, with its name as the option `script`; empty if
    there is none. path: the file's; its suffix gives the shell, else the text does. Raises ValueError."""
    suffix, folder = path.suffix.lower(), str(path.absolute().parent)
    windows = suffix in (".bat", ".cmd", ".ps1") or suffix != ".sh" and LOOKS_LIKE_WINDOWS.search(text) is not None
    text = re.sub(r"^[ \t]*>>[ \t]?", "", text, flags=re.MULTILINE)  # PowerShell's prompt for continued lines
    text = re.sub(r"[\^`][ \t]*\n" if windows else r"[\\^`][ \t]*\n", " ", text).replace("%~dp0", f"{folder}/")
    values = {"psscriptroot": folder, "home": "~"}

    def value_of(match: re.Match[str]) -> str:
        """A variable's value, else the default written beside it, else the variable itself."""
        name = next(filter(None, (match[1], *match.groups()[2:])))
        return values.get(name.lower(), match[0] if match[2] is None else match[2])

    expand = partial(NAMED.sub, value_of)
    for name, value in _assignments(text):
        values[name.lower()] = expand(value.strip("\"'"))
    split = partial(_split, escape="" if windows else "\\", quotes='"' if suffix in (".bat", ".cmd") else "\"'")
    for command in _commands(text):
        if "train" not in expand(command):
            continue
        words = [part for word in split(command) for part in _expanded(word, expand(word), split)]
        for place, word in enumerate(words):
            match, arguments = SCRIPT.search(word), words[place + 1 :]
            if match and any(argument.startswith("--") for argument in arguments):  # else its name alone, in a variable
                return {"script": match[1], **_options(arguments, ADDED.findall(text))}
    return {}


def variables(text: str) -> set[str]:
    """The names of the variables that a script sets."""
    return {name for name, _ in _assignments(text)}


def _assignments(text: str) -> list[tuple[str, str]]:
    return [pair for pattern in ASSIGNMENTS for pair in pattern.findall(text)]


def _split(line: str, escape: str = "", quotes: str = "\"'") -> list[str]:
    """The words of a line. escape: none in Windows, where a backslash separates folders."""
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


def _expanded(word: str, value: str, split: Callable[[str], list[str]]) -> list[str]:
    """The words in `value`, the expanded word: several if it is one variable that holds options."""
    if NAMED.fullmatch(word) and value.lstrip("@(\"' \n").startswith("--"):
        return split(re.sub(r"^@?\(|\)$|(?<=[\"']),", " ", value))
    return [value]


def _options(words: Sequence[str], added: Sequence[str] = ()) -> dict[str, Any]:
    """`--name value ...` by name: true without a value, else the value or a list. added: set by the file under conditions."""
    options: dict[str, Any] = {}
    values: list[Any] = []
    name = ""
    for word in [*(word for word in words if word not in PASSED_ON), "--"]:
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
    """The options in one line, as typed into a field of a window."""
    return _options(_split(line))
