"""The floors of the house: which room may import which, and the drawing of those that do.

A room is a folder of `trainer/`, the core, or of `workbench/`, which stands on top of it.

`scripts/reference_pages.py` writes the drawing, docs/pictures/floors.svg. `tests/unit/test_rooms.py` holds the imports to
the list.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("trainer", "workbench")

# The floors, the top one first. A room imports rooms of lower floors alone: those of one floor know nothing of one another.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("workbench/commands",),
    ("workbench/watch",),
    tuple(f"workbench/{room}" for room in ("adapters", "audit", "compare", "drawing", "importing", "replay")),
    tuple(f"workbench/{room}" for room in ("adapter_files", "mirror", "pages", "planning", "trackers")),
    ("workbench/hub", "workbench/sources", "workbench/summary"),
    ("run",),
    ("artifacts",),
    ("engine",),
    ("resume",),
    ("plan",),
    ("monitoring",),
    ("runtime",),
    # The workshops: they do one thing each, and what is above wires them together.
    ("adapters", "checkpoint", "config", "data", "ema", "models", "optim", "quantization"),
    ("kernels", "objectives"),
    ("base",),
)

CELL, NAME, EDGE = 26, 104, 16  # pixels: a row and a column, a room's box, the margin
STYLE = """
svg { --paper: #ffffff; --band: #f1f5f9; --line: #cbd5e1; --box: #1e3a8a; --bench: #166534;
--name: #ffffff; --dot: #b45309; --text: #1f2937 }
@media (prefers-color-scheme: dark) {
svg { --paper: #0f172a; --band: #1e293b; --line: #475569; --box: #bfdbfe; --bench: #bbf7d0;
--name: #0f172a; --dot: #fbbf24; --text: #e2e8f0 }
}
text { font: 13px Verdana, "DejaVu Sans", sans-serif }
"""


def room_of(module: str) -> str:
    """The room of a module, "engine" or "workbench/audit"; "" of a package itself, and of what is not in the house."""
    package, _, inside = module.partition(".")
    room = inside.partition(".")[0] if package in PACKAGES else ""
    return f"workbench/{room}" if room and package == "workbench" else room


def imports() -> set[tuple[str, str]]:
    """(room, a room that one of its files imports), wherever the import stands in the file."""
    rooms = {room for floor in FLOORS for room in floor}
    pairs = set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        room = room_of(".".join(path.relative_to(ROOT).parts))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            pairs |= {(room, other) for other in map(room_of, names) if room in rooms and other in rooms - {room}}
    return pairs


def drawing() -> str:
    """The floors as stairs, in SVG: a box for each room, and on its right a dot above each room that it imports."""
    rooms = [room for floor in FLOORS for room in floor]
    size = len(rooms) * CELL
    width, height = NAME + size + 2 * EDGE, size + 2 * EDGE + 24 + 2 * CELL
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img">',
        "<title>The floors of the house: a dot stands right of the room that imports, above the imported room</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" rx="6" style="fill: var(--paper)"/>',
    ]
    left = EDGE + NAME  # of the first room's column, in which its box ends
    tops = {room: EDGE + CELL * row for row, room in enumerate(rooms)}
    for floor in FLOORS[::2]:
        parts.append(
            f'<rect x="{EDGE}" y="{tops[floor[0]]}" width="{width - 2 * EDGE}" height="{CELL * len(floor)}" '
            'style="fill: var(--band)"/>'
        )
    used = imports()
    for column, room in enumerate(rooms):
        x, y = left + CELL * column, tops[room]
        name, color = room.rpartition("/")[2], "bench" if "/" in room else "box"
        if above := [tops[who] for who, what in used if what == room]:
            line = f"M{x - CELL // 2} {min(above) + CELL // 2}V{y}"
            parts.append(f'<path d="{line}" style="stroke: var(--line)"/>')
        parts += [
            f'<rect x="{x - NAME}" y="{y + 3}" width="{NAME}" height="{CELL - 6}" rx="4" style="fill: var(--{color})"/>',
            f'<text x="{x - NAME // 2}" y="{y + 18}" text-anchor="middle" style="fill: var(--name)">{name}</text>',
        ]
    for who, what in sorted(used):
        x, y = left + CELL * rooms.index(what) - CELL // 2, tops[who] + CELL // 2
        parts.append(f'<circle cx="{x}" cy="{y}" r="5" style="fill: var(--dot)"><title>{who} imports {what}</title></circle>')
    notes = (("box", "trainer/: the core, begin at run"), ("bench", "workbench/: on top of it, begin at commands"))
    for row, (color, note) in enumerate(notes):
        y = height - EDGE - CELL * (len(notes) - row)
        parts.append(f'<rect x="{EDGE}" y="{y - 12}" width="{EDGE}" height="{EDGE}" rx="4" style="fill: var(--{color})"/>')
        parts.append(f'<text x="{2 * EDGE + 8}" y="{y}" style="fill: var(--text)">{note}</text>')
    note = "A dot: the room on its left imports the room below it. A band: one floor."
    parts.append(f'<text x="{EDGE}" y="{height - EDGE}" style="fill: var(--text)">{note}</text>')
    return "\n".join([*parts, "</svg>\n"])
