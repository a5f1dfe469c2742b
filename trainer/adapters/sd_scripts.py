"""What sd-scripts leaves out of a LoRA file in kohya's keys: it builds modules for layers of some blocks alone, and drops the
tensors of all others without a word. Which layers these are says the model family (`AdapterPart.not_in_sd_scripts`)."""

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

from trainer.adapters.portable import Portable, squared_norm
from trainer.base.console import some

ENTRY = "not_in_sd_scripts"  # of the header, of a LoRA that has such layers


def left_out(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The layers, by full name, that sd-scripts has no module for. patterns: of fnmatch, on full names."""
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def share(portable: Portable, names: Collection[str]) -> float:
    """||s B A|| over the layers `names` beside that over all, each a root of a sum of squares; 0 where nothing changed."""
    squares = {}
    for name, factors in portable.layers.items():
        a, b = (each.make().double().flatten(1) for each in (factors.a, factors.b))
        squares[name] = factors.scaling**2 * squared_norm(a, b)
    return (sum(squares[name] for name in names) / (sum(squares.values()) or 1.0)) ** 0.5


def left_out_phrase(portable: Portable, patterns: Sequence[str]) -> str:
    """What a LoRA loses in sd-scripts, as one phrase; "" where it loses nothing, and of a DoRA, which is not for it."""
    names = [] if portable.kind.module else left_out(portable.layers, patterns)
    return f"{some(names)}: {share(portable, names):.0%} of the norm of the update" if names else ""


def sentence(said: str) -> str:
    """A sentence for people. said: the header's entry."""
    return f"sd-scripts builds no module for some layers of the kohya file and drops them without a message: {said}"
