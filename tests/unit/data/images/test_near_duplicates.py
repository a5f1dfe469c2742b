"""Near duplicates: copies are found, other photos of the same subject are not."""

from __future__ import annotations

import io
import random
from itertools import combinations

import pytest
from PIL import Image, ImageEnhance, ImageOps

from tests.harness import ROOT
from trainer.data.images import near_duplicates
from trainer.data.images.near_duplicates import BITS, COLOUR, EQUAL, FAR, LIGHT, NEIGHBOURS, PRINT, SHARE, alike, look

PHOTOS = sorted((ROOT / "examples").glob("*/0?.jpg"))
# Flat, alike in style, many of them symmetric: what different pictures are easily taken for copies among.
ICONS = [sorted(folder.glob("*.png")) for folder in sorted((ROOT / "examples/icons").glob("trained/*"))]


def reencoded(image: Image.Image, quality: int, kind: str = "JPEG") -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, kind, quality=quality)
    return Image.open(buffer).convert("RGB")


COPIES = {
    "JPEG 30": lambda image: reencoded(image, 30),
    "WebP 60": lambda image: reencoded(image, 60, "WEBP"),
    "half the size": lambda image: image.resize((image.width // 2, image.height // 2), Image.Resampling.LANCZOS),
    "a fifth of the size": lambda image: image.resize((image.width // 5, image.height // 5)),
    "a few pixels cropped": lambda image: image.crop((5, 3, image.width - 7, image.height)),
    "cropped, smaller, JPEG": lambda image: reencoded(image.crop((4, 4, image.width, image.height)).resize((300, 200)), 50),
}
# Whatever the size of the image.
OF_ALL = {
    "mirrored": ImageOps.mirror,
    "mirrored, smaller, JPEG": lambda image: reencoded(ImageOps.mirror(image).resize((300, 200)), 50),
    "a tenth cropped, around": lambda image: cropped(image, 0.05, 0.05, 0.95, 0.95),
    "a tenth cropped, left": lambda image: cropped(image, 0.1, 0, 1, 1),
    "a tenth cropped, below and right": lambda image: cropped(image, 0, 0, 0.9, 0.9),
    "grey": lambda image: image.convert("L").convert("RGB"),
    "10 % lighter": lambda image: ImageEnhance.Brightness(image).enhance(1.1),
    "10 % darker": lambda image: ImageEnhance.Brightness(image).enhance(0.9),
}
# Of which fewer are found: the crops of a print are of a tenth.
HARD = {
    "a twentieth cropped, left": lambda image: cropped(image, 0.05, 0, 1, 1),
    "7 % cropped left, 2 % above, 4 % right, 6 % below": lambda image: cropped(image, 0.07, 0.02, 0.96, 0.94),
}


def cropped(image: Image.Image, *shares: float) -> Image.Image:
    sides = (image.width, image.height) * 2
    return image.crop(tuple(int(share * side) for share, side in zip(shares, sides, strict=True)))


@pytest.mark.parametrize("name", [*COPIES, *OF_ALL])
def test_copies_are_found_and_other_photos_of_the_subject_are_not(name):
    images = [Image.open(path).convert("RGB") for path in PHOTOS]
    assert len(images) == 10
    prints = [look(image) for image in images] + [look((COPIES | OF_ALL)[name](image)) for image in images]
    assert alike(prints) == [[index, index + 10] for index in range(10)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OF_ALL, *HARD])
def test_how_many_copies_of_icons_are_found(name):
    """Prints the row of the table in docs/data_checks.md."""
    make, images = (OF_ALL | HARD)[name], [[Image.open(path).convert("RGB") for path in paths] for paths in (PHOTOS, *ICONS)]
    found, *of_icons = ([len(alike([look(image), look(make(image))])) for image in each] for each in images)
    icons = [each for folder in of_icons for each in folder]
    print("|", name, "|", f"{sum(found)} of {len(found)}", "|", f"{sum(icons) / len(icons):.0%}", "|")
    assert sum(icons) >= (0.9 if name in OF_ALL else 0.5) * len(icons) and len(icons) == 180


@pytest.mark.parametrize("folder", ICONS, ids=lambda paths: paths[0].parent.name)
def test_other_icons_of_a_style_are_no_copies(folder):
    assert len(folder) == 60
    assert alike([look(Image.open(path).convert("RGB")) for path in folder]) == []


def test_grouping_agrees_with_comparing_all_pairs():
    """Written out here without numpy, over looks of two prints, of which some are close, some not, and some are chains."""
    chosen = random.Random(3)
    looks = [chosen.randbytes(2 * PRINT) for _ in range(60)]
    for index in range(60):
        near = bytearray(looks[index])
        for _ in range(chosen.randrange(2 * FAR)):
            near[chosen.randrange(BITS)] ^= 1 << chosen.randrange(8)
        near[BITS] = min(255, near[BITS] + chosen.randrange(2 * COLOUR))
        if index % 3 == 0:  # all of it is lighter
            near[BITS:PRINT] = bytes(min(255, colour + 2 * COLOUR) for colour in near[BITS:PRINT])
        if index % 2 == 0:  # the other print is like the first one's
            near = near[PRINT:] + near[:PRINT]
        looks += [bytes(near), looks[index]] if index % 7 == 0 else [bytes(near)]

    def close(one: bytes, other: bytes, least: int = 0) -> bool:
        a, b = (int.from_bytes(each[:BITS], "big") for each in (one, other))
        off = [x - y for x, y in zip(one[BITS:], other[BITS:], strict=True)]
        apart, either = (a ^ b).bit_count(), (a | b).bit_count()
        lighter = EQUAL * apart <= either >= 2 * EQUAL and abs(sum(off)) <= 12 * LIGHT
        return apart <= FAR and SHARE * apart <= either >= least and (max(map(abs, off)) <= COLOUR or lighter)

    groups = {index: {index} for index in range(len(looks))}
    for one, other in combinations(range(len(looks)), 2):
        (a, mirrored_a), (b, mirrored_b) = ((look[:PRINT], look[PRINT:]) for look in (looks[one], looks[other]))
        if close(a, b) or close(a, mirrored_b, 2 * EQUAL) or close(mirrored_a, b, 2 * EQUAL):
            both = groups[one] | groups[other]
            groups |= dict.fromkeys(both, both)
    expected = sorted({tuple(sorted(group)) for group in groups.values() if len(group) > 1})
    assert 20 < len(expected) < 60
    assert alike(looks) == [list(group) for group in expected]


@pytest.mark.slow
def test_a_thousand_times_the_same_are_not_compared_each_with_each(monkeypatch):
    """Each with the next ones alone: ten times the prints are ten times the pairs."""
    compared, real = [], near_duplicates._are_alike
    monkeypatch.setattr(
        near_duplicates, "_are_alike", lambda *given, **more: (compared.append(len(given[2])), real(*given, **more))[1]
    )
    chosen = random.Random(5)
    own = bytes(chosen.randbytes(BITS))
    looks = [
        own + bytes([100 + number % COLOUR, number % 256, number // 256]) + bytes(PRINT - BITS - 3) for number in range(3000)
    ]
    assert alike(looks) and 0 < sum(compared) <= (FAR + 1) * NEIGHBOURS * len(looks)


@pytest.mark.parametrize("bits", [EQUAL, 3 * EQUAL])
def test_of_plain_images_only_the_whole_counts(bits: int):
    """Few bits are set in their prints, so crops of such are soon alike."""
    chosen = random.Random(1)
    prints = [sum(1 << place for place in chosen.sample(range(8 * BITS), bits)).to_bytes(BITS, "big") for _ in range(3)]
    a, b, c = (each + bytes(PRINT - BITS) for each in prints)
    assert alike([a + b, b + c]) == ([] if bits == EQUAL else [[0, 1]])
    assert alike([a + b, a + c]) == [[0, 1]]


def test_plain_images_are_told_apart_by_their_colours():
    images = [Image.new("RGB", (64, 64), colour) for colour in ("red", "#f80404", "blue", "white")]
    assert alike([look(image) for image in images]) == [[0, 1]]
    assert alike([]) == alike([b"", b""]) == []
