"""The floors of trainer/: which room may import which, and the drawing of those that do.

`scripts/reference_pages.py` writes the drawing, docs/pictures/floors.svg. `tests/unit/test_rooms.py` holds the imports to
the list.
"""

from __future__ import annotations

import ast
from pathlib import Path

TRAINER = Path(__file__).resolve().parent.parent / "trainer"

# The floors, the top one first. A room imports rooms of lower floors alone: those of one floor know nothing of one another.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("cli",),
    ("run",),
    ("artifacts",),
    ("memory_plan",),
    ("engine",),
    ("resume",),
    ("adapter_files",),
    ("plan",),
    ("report",),
    ("monitoring",),
    ("runtime",),
    # The workshops: they do one thing each, and what is above wires them together.
    ("adapters", "checkpoint", "config", "data", "ema", "models", "optim", "quantization"),
    ("kernels", "objectives"),
    ("base",),
)

CELL, NAME, EDGE = 26, 104, 16  # pixels: a row and a column, a room's box, the margin
STYLE = """
svg { --paper: #ffffff; --band: #f1f5f9; --line: #cbd5e1; --box: #1e3a8a; --name: #ffffff; --dot: #b45309; --text: #1f2937 }
@media (prefers-color-scheme: dark) {
svg { --paper: #0f172a; --band: #1e293b; --line: #475569; --box: #bfdbfe; --name: #0f172a; --dot: #fbbf24; --text: #e2e8f0 }
}
text { font: 13px Verdana, "DejaVu Sans", sans-serif }
"""


def imports() -> set[tuple[str, str]]:
    """(room, a room that one of its files imports), wherever the import stands in the file."""
    rooms = {room for floor in FLOORS for room in floor}
    pairs = set()
    for path in TRAINER.rglob("*.py"):
        room = path.relative_to(TRAINER).parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            parts = [name.split(".") for name in names]
            pairs |= {(room, part[1]) for part in parts if part[0] == "trainer" and part[1] in rooms - {room}}
    return pairs


def drawing() -> str:
    """The floors as stairs, in SVG: a box for each room, and on its right a dot above each room that it imports."""
    rooms = [room for floor in FLOORS for room in floor]
    size = len(rooms) * CELL
    width, height = NAME + size + 2 * EDGE, size + 2 * EDGE + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img">',
        "<title>The floors of trainer/: a dot stands right of the room that imports, above the room that is imported</title>",
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
        if above := [tops[who] for who, what in used if what == room]:
            line = f"M{x - CELL // 2} {min(above) + CELL // 2}V{y}"
            parts.append(f'<path d="{line}" style="stroke: var(--line)"/>')
        parts += [
            f'<rect x="{x - NAME}" y="{y + 3}" width="{NAME}" height="{CELL - 6}" rx="4" style="fill: var(--box)"/>',
            f'<text x="{x - NAME // 2}" y="{y + 18}" text-anchor="middle" style="fill: var(--name)">{room}</text>',
        ]
    for who, what in sorted(used):
        x, y = left + CELL * rooms.index(what) - CELL // 2, tops[who] + CELL // 2
        parts.append(f'<circle cx="{x}" cy="{y}" r="5" style="fill: var(--dot)"><title>{who} imports {what}</title></circle>')
    note = "A dot: the room on its left imports the room below it. A band: one floor."
    parts.append(f'<text x="{EDGE}" y="{height - EDGE}" style="fill: var(--text)">{note}</text>')
    return "\n".join([*parts, "</svg>\n"])
