"""What was probably meant by a name, or by a pattern of layer names (fnmatch on the whole dotted name, case-sensitive)."""

import difflib
import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from trainer.base import other_trainers


def near(name: str, known: Collection[str], cutoff: float = 0.6) -> str | None:
    """The one of `known` that is spelt most like `name`."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), None)


def likely(name: object, known: Collection[str]) -> str | None:
    """The one of `known` that another trainer calls `name`, or that is spelt most like it."""
    return other_trainers.value_for(name, known) or (near(name, known) if isinstance(name, str) else None)


def suggestion(name: str, known: Collection[str]) -> str:
    """What to say of a name that is not among the known ones."""
    matches = likely(name, known)
    return f"did you mean {matches!r}?" if matches else f"use one of {', '.join(map(repr, known))}"


def advice(pattern: str, names: Sequence[str]) -> str:
    """What was probably meant by a pattern that matches none of `names`: the pattern with one of its words replaced by a near
    one of the names' own, the pattern in the middle of a name, the nearest names, any names."""
    known = dict.fromkeys(word for name in names for word in name.split("."))
    candidates = [
        pattern[: match.start()] + near + pattern[match.end() :]
        for match in re.finditer(r"\w+", pattern)
        if match[0] not in known
        for near in difflib.get_close_matches(match[0], known, n=3)
    ]
    for candidate in (*candidates, f"*{pattern}", f"*.{pattern}.*", f"*{pattern}*"):
        count = sum(fnmatchcase(name, candidate) for name in names)
        if count:
            return f"did you mean {candidate!r} ({count} layers)?"
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
    return f"near misses: {', '.join(near)}" if near else f"layers have names like {', '.join(names[:3])}"
