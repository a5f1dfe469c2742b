"""The options of a training command, in a file of a shell: of Linux (sh), of Windows (.bat, .cmd), or PowerShell (.ps1).

Words are split first and variables put in place then, so that no blank within a value parts it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Split = Callable[[str], list[str]]
SCRIPT = re.compile(r"(?:^|[\\/])(\w*train_network)(?:\.py)?$")
# A command whose words are another command: `cmd /k "..."`, `bash -c '...'`.
WRAPPED = re.compile(
    r"[\s@]*(?:call\s+)?\S*(?:cmd|bash|sh|powershell|pwsh)(?:\.exe)?\s+(?:/[ck]|-l?c|-command)\s+([\"'])(.*)\1\s*", re.I
)
IGNORED = re.compile(r"\s*(?:#|::|@?rem\b|@?echo\b)", re.I)
END = re.compile(r"\"[^\"]*\"|'[^']*'|(\s\d?[<>#]|&+|[|;]+)")  # its group: where a command ends
NAMED = re.compile(r"\$\{(\w+)(?::?-([^}]*))?(?:\[@\])?\}|\$(?:env:)?(\w+)|%(\w+)%|!(\w+)!|^@(\w+)$")
ASSIGNMENTS = [
    re.compile(pattern, re.MULTILINE | re.I)
    for pattern in (
        r"^[ \t]*@?set[ \t]+\"?(\w+)=([^\"\n]*|\"[^\"\n]*\")\"?[ \t]*$",
        r"^[ \t]*\$(?:env:)?(\w+)[ \t]*=[ \t]*(@\([^()]*\)|\"[^\"\n]*\"|'[^'\n]*'|[^\s#;@(\[]+)",
        r"^[ \t]*(?:export[ \t]+)?(\w+)=(\([^()]*\)|'[^'\n]*'|\"[^\"\n]*\"|[^\s'\"]*)[ \t;]*(?:#.*)?$",
    )
]


def command_options(text: str, path: Path) -> dict[str, Any]:
    """The options of the first command that runs a script for networks, whose name is the option `script`. Empty where
    there is none. Raises ValueError. path: of the file; its suffix says which shell, else the text does."""
    suffix, folder = path.suffix.lower(), str(path.absolute().parent)
    windows = (
        suffix in (".bat", ".cmd", ".ps1") or suffix != ".sh" and bool(re.search(r"[\^`][ \t]*\n|=\"?[A-Za-z]:\\", text))
    )
    text = re.sub(r"^[ \t]*>>[ \t]?", "", text, flags=re.MULTILINE)  # as PowerShell shows a command of several lines
    text = re.sub(r"[\^`][ \t]*\n" if windows else r"[\\^`][ \t]*\n", " ", text).replace("%~dp0", f"{folder}/")

    def split(line: str) -> list[str]:
        lexer = shlex.shlex(line, posix=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        lexer.escape = "" if windows else "\\"  # in Windows a backslash parts folders
        lexer.quotes = '"' if suffix in (".bat", ".cmd") else "\"'"
        return list(lexer)

    given = [pair for pattern in ASSIGNMENTS for pair in pattern.findall(text)]
    known = {"psscriptroot": folder, "home": "~"}
    for name, value in given:
        known[name.lower()] = NAMED.sub(lambda found: _value(found, known), value.strip("\"'"))
    for command in _commands(text):
        if "train" not in NAMED.sub(lambda found: _value(found, known), command):
            continue
        words = [part for word in split(command) for part in _in_place(word, known, split)]
        for place, word in enumerate(words):
            if found := SCRIPT.search(word):
                return {"script": found[1], **_options(words[place + 1 :], re.findall(r"\.Add\(\s*[\"'](--\w+)", text, re.I))}
    return {}


def variables(text: str) -> set[str]:
    """The names that the text of a shell gives a value."""
    return {name for pattern in ASSIGNMENTS for name, _ in pattern.findall(text)}


def _commands(text: str) -> Iterator[str]:
    """Each command of each line, without comments."""
    for line in text.splitlines():
        line = inner[2] if (inner := WRAPPED.fullmatch(line)) else line
        start = 0
        for found in [] if IGNORED.match(line) else END.finditer(line):
            if found[1]:
                yield line[start : found.start()]
                start = found.end()
                if found[1].endswith("#"):
                    break
        else:
            yield "" if IGNORED.match(line) else line[start:]


def _value(found: re.Match[str], known: Mapping[str, str]) -> str:
    """What stands for a variable: its value, the default that is written beside it, or itself."""
    name = next(filter(None, (found[1], *found.groups()[2:])))
    return known.get(name.lower(), found[0] if found[2] is None else found[2])


def _in_place(word: str, known: Mapping[str, str], split: Split) -> list[str]:
    """The words that a word becomes with the values of its variables: several where it is one that holds options."""
    alone = NAMED.fullmatch(word)
    word = NAMED.sub(lambda found: _value(found, known), word)
    if alone and word.lstrip("@(\"' \n").startswith("--"):
        return split(re.sub(r"^@?\(|\)$|(?<=[\"']),", " ", word))
    return [word]


def _options(words: Sequence[str], added: Sequence[str] = ()) -> dict[str, Any]:
    """`--name value ...` by name; without a value true, with several a list; each a text, as it stands.

    added: options that the file adds under conditions of its own.
    """
    options: dict[str, Any] = {}
    values: list[Any] = []
    name = ""
    for word in [*words, "--"]:
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
    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split, lexer.commenters, lexer.escape = True, "", ""
    return _options(list(lexer))
