"""Zib, a character that no model knows: pictures in poses and places, drawn here as SVG.

An adapter learns it by its name from eight of them. Everything is on a grid of 64 x 64.
"""

from __future__ import annotations

from dataclasses import dataclass

SKY, GRASS, NIGHT, SAND, ROOM, WHITE = "#bfe3ff", "#9fd67a", "#27306b", "#f2d9a0", "#ffd9e4", "#ffffff"


@dataclass(frozen=True)
class Scene:
    """One picture: what stands behind Zib, its arms (degrees from hanging), its eyes, how high it is, what it holds."""

    caption: str
    background: str
    left: int = 20
    right: int = 20
    asleep: bool = False
    lift: int = 0
    behind: str = ""
    before: str = ""


SUN = '<circle cx="52" cy="11" r="6" fill="#ffd23f"/>'
STARS = "".join(f'<circle cx="{x}" cy="{y}" r="1" fill="#fff"/>' for x, y in ((10, 12), (20, 6)))
MOON = f'<path d="M54 6a7 7 0 1 0 5 11a6 6 0 0 1-5-11z" fill="#ffe9a8"/>{STARS}'
FLOOR = '<rect x="0" y="52" width="64" height="12" fill="{}"/>'
BALLOON = '<path d="M50 40L53 22" stroke="#555" stroke-width="1"/><ellipse cx="53" cy="15" rx="7" ry="8" fill="#e5383b"/>'
UMBRELLA = '<path d="M50 44V20" stroke="#6b4f3a" stroke-width="2"/><path d="M36 22a14 12 0 0 1 28 0z" fill="#3a86ff"/>'
RAIN = "".join(
    f'<path d="M{x} {y}l-2 6" stroke="#6aa9e9" stroke-width="1.5"/>' for x, y in ((8, 6), (20, 12), (32, 4), (10, 30))
)
BALL = '<circle cx="54" cy="55" r="6" fill="#ff8c42"/><path d="M48 55h12M54 49v12" stroke="#5c2c0a" stroke-width="1"/>'
BOOK = (
    '<rect x="22" y="46" width="20" height="11" rx="1" fill="#8338ec"/><path d="M32 46v11" stroke="#fff" stroke-width="1"/>'
)
FLOWER = (
    '<path d="M51 44V34" stroke="#2d8a3e" stroke-width="2"/><circle cx="51" cy="31" r="4.5" fill="#ff5d8f"/>'
    '<circle cx="51" cy="31" r="1.8" fill="#ffd23f"/>'
)

SCENES = (
    Scene("zib", WHITE),
    Scene("zib waving in front of a blue sky", SKY, right=150, behind=SUN + FLOOR.format(GRASS)),
    Scene("zib holding a red balloon", WHITE, right=110, before=BALLOON),
    Scene("zib asleep at night", NIGHT, asleep=True, behind=MOON + FLOOR.format("#1b2150")),
    Scene("zib jumping on a beach", SKY, left=140, right=140, lift=5, behind=SUN + FLOOR.format(SAND)),
    Scene("zib under a blue umbrella in the rain", "#d5dde6", right=100, behind=RAIN, before=UMBRELLA),
    Scene("zib reading a purple book in a pink room", ROOM, left=50, right=50, behind=FLOOR.format("#e8a7bd"), before=BOOK),
    Scene("zib with a flower on green grass", "#e9f7d9", right=110, behind=FLOOR.format(GRASS), before=FLOWER),
)

# What it is asked for afterwards: poses and places that were each seen, but never together.
EXAMS = (
    Scene("zib asleep on a beach", SKY, asleep=True, behind=SUN + FLOOR.format(SAND)),
    Scene("zib waving at night", NIGHT, right=150, behind=MOON + FLOOR.format("#1b2150")),
    Scene("zib holding a red balloon on green grass", "#e9f7d9", right=110, behind=FLOOR.format(GRASS), before=BALLOON),
    Scene("zib jumping in a pink room", ROOM, left=140, right=140, lift=5, behind=FLOOR.format("#e8a7bd")),
)


def svg(scene: Scene) -> str:
    """A turquoise drop with a leaf on its head, an orange scarf, one tooth."""
    arm = '<rect x="{0}" y="38" width="5" height="13" rx="2.5" fill="#12908e" transform="rotate({1} {2} 40)"/>'
    parts = (
        f'<rect width="64" height="64" fill="{scene.background}"/>',
        scene.behind,
        f'<g transform="translate(0 {-scene.lift})">',
        arm.format(17, scene.left, 19.5),
        arm.format(42, -scene.right, 44.5),
        *(f'<rect x="{x}" y="53" width="6" height="7" rx="3" fill="#12908e"/>' for x in (24, 34)),
        '<path d="M32 14C22 20 18 30 18 40a14 16 0 0 0 28 0C46 30 42 20 32 14z" fill="#1fc7c1"/>',
        '<path d="M32 15C32 9 37 6 43 7C43 12 38 15 32 15z" fill="#55b947"/>',
        '<ellipse cx="32" cy="47" rx="8" ry="6" fill="#a8f0ea"/>',
        *(eye(x, scene.asleep) for x in (27, 37)),
        '<path d="M28 36q4 3 8 0" stroke="#10312f" stroke-width="1.4" fill="none"/>',
        '<rect x="31" y="37" width="2.4" height="2.6" fill="#fff"/>',
        '<path d="M19.5 40q12.5 6 25 0l-.5 4q-12 5.5-24 0z" fill="#ff7a1a"/>',
        '<rect x="38" y="42" width="5" height="9" rx="1.5" fill="#ff7a1a"/>',
        "</g>",
        scene.before,
    )
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64">{"".join(parts)}</svg>'


def eye(x: int, asleep: bool) -> str:
    if asleep:
        return f'<path d="M{x - 3} 30q3 3 6 0" stroke="#10312f" stroke-width="1.6" fill="none"/>'
    return f'<circle cx="{x}" cy="30" r="3.4" fill="#fff"/><circle cx="{x}" cy="30.5" r="1.8" fill="#10312f"/>'
