"""How far each block of the adapter has moved its layers, as a heat map."""

from collections.abc import Mapping

from trainer.monitoring.course import is_finite

# ||dW|| / ||W|| of a block's layer that moved most: from these on, a darker tile.
SHADES = (0.0005, 0.002, 0.01, 0.03, 0.1, 0.3)


def by_container(changes: Mapping[str, float | None]) -> dict[str, list[tuple[str, float | None]]]:
    """(name, change) of each block by what contains it ("unet.down_blocks"). changes: by block, in order."""
    rows: dict[str, list[tuple[str, float | None]]] = {}
    for block, change in changes.items():
        container, _, last = block.rpartition(".")
        group, name = (container, last) if last.isdigit() else (container or block, last or block)
        rows.setdefault(group, []).append((name, change))
    return rows


def shade(change: float | None) -> int:
    """The number of the shade for a change; the last one for a change that is not finite."""
    return sum(change >= edge for edge in SHADES) if is_finite(change) else len(SHADES)


def percent(change: float | None) -> str:
    """A change in percent, for people."""
    if not is_finite(change):
        return "not finite"
    share = 100 * change
    return f"{share:.0f}%" if share >= 10 else f"{share:.1f}%" if share >= 1 else f"{share:.2f}%"


def legend() -> list[str]:
    """What each shade stands for."""
    return [f"below {100 * SHADES[0]:g}%", *(f"{100 * edge:g}%" for edge in SHADES[:-1]), f"{100 * SHADES[-1]:g}% and more"]
