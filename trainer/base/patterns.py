"""Suggestions for misspelt names and patterns of layer names (case-sensitive fnmatch on the whole dotted name)."""

import difflib
import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from trainer.base import other_trainers


def near(name: str, choices: Collection[str], cutoff: float = 0.6) -> str | None:
    """The choice spelt most like `name`, or None."""
    return next(iter(difflib.get_close_matches(name, choices, n=1, cutoff=cutoff)), None)


def likely(name: object, choices: Collection[str]) -> str | None:
    """The choice that another trainer calls `name`, or that is spelt most like it, or None."""
    return other_trainers.value_for(name, choices) or (near(name, choices) if isinstance(name, str) else None)


def suggestion(name: str, choices: Collection[str]) -> str:
    """The remedy for a name that is none of the choices."""
    match = likely(name, choices)
    return f"did you mean {match!r}?" if match else f"use one of {', '.join(map(repr, choices))}"


def advice(pattern: str, names: Sequence[str]) -> str:
    """The remedy for a pattern without a match: one word corrected, wildcards around it, the nearest names, or any names."""
    words = dict.fromkeys(part for name in names for part in name.split("."))
    candidates = [
        pattern[: match.start()] + near + pattern[match.end() :]
        for match in re.finditer(r"\w+", pattern)
        if match[0] not in words
        for near in difflib.get_close_matches(match[0], words, n=3)
    ]
    for candidate in (*candidates, f"*{pattern}", f"*.{pattern}.*", f"*{pattern}*"):
        count = sum(fnmatchcase(name, candidate) for name in names)
        if count:
            return f"did you mean {candidate!r} ({count} layers)?"
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
    return f"near misses: {', '.join(near)}" if near else f"layers have names like {', '.join(names[:3])}"
