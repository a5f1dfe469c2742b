"""Near duplicates: copies are found, other photos of the same subject are not."""

from __future__ import annotations

import io
import random
from itertools import combinations

import pytest
from PIL import Image

from tests.harness import ROOT
from trainer.data.images import near_duplicates
from trainer.data.images.near_duplicates import BITS, COLOUR, FAR, NEIGHBOURS, SHARE, alike, look

PHOTOS = sorted((ROOT / "examples").glob("*/0?.jpg"))


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


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_found_and_other_photos_of_the_subject_are_not(name):
    images = [Image.open(path).convert("RGB") for path in PHOTOS]
    assert len(images) == 10
    prints = [look(image) for image in images] + [look(COPIES[name](image)) for image in images]
    assert alike(prints) == [[index, index + 10] for index in range(10)]


def test_grouping_agrees_with_comparing_all_pairs():
    """Written out here without numpy, over prints of which some are close, some not, and some are chains."""
    chosen = random.Random(3)
    prints = [chosen.randbytes(28) for _ in range(60)]
    for index in range(60):
        near = bytearray(prints[index])
        for _ in range(chosen.randrange(2 * FAR)):
            near[chosen.randrange(BITS)] ^= 1 << chosen.randrange(8)
        near[BITS] = min(255, near[BITS] + chosen.randrange(2 * COLOUR))
        prints += [bytes(near), prints[index]] if index % 7 == 0 else [bytes(near)]
    groups = {index: {index} for index in range(len(prints))}
    for one, other in combinations(range(len(prints)), 2):
        a, b = (int.from_bytes(prints[index][:BITS], "big") for index in (one, other))
        colours = max(abs(x - y) for x, y in zip(prints[one][BITS:], prints[other][BITS:], strict=True))
        apart = (a ^ b).bit_count()
        if apart <= FAR and SHARE * apart <= (a | b).bit_count() and colours <= COLOUR:
            both = groups[one] | groups[other]
            groups |= dict.fromkeys(both, both)
    expected = sorted({tuple(sorted(group)) for group in groups.values() if len(group) > 1})
    assert 20 < len(expected) < 60
    assert alike(prints) == [list(group) for group in expected]


def test_a_thousand_times_the_same_are_not_compared_each_with_each(monkeypatch):
    """Each with the next ones alone: ten times the prints are ten times the pairs."""
    compared, real = [], near_duplicates._are_alike
    monkeypatch.setattr(near_duplicates, "_are_alike", lambda *given: (compared.append(len(given[2])), real(*given))[1])
    chosen = random.Random(5)
    own = bytes(chosen.randbytes(BITS))
    prints = [own + bytes([100 + number % COLOUR, number % 256, number // 256]) + bytes(25 - BITS) for number in range(3000)]
    assert alike(prints) and 0 < sum(compared) <= (FAR + 1) * NEIGHBOURS * len(prints)


def test_plain_images_are_told_apart_by_their_colours():
    images = [Image.new("RGB", (64, 64), colour) for colour in ("red", "#f80404", "blue", "white")]
    assert alike([look(image) for image in images]) == [[0, 1]]
    assert alike([]) == alike([b"", b""]) == []
