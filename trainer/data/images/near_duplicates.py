"""Finds near duplicates by perceptual hashes: copies that were re-encoded, resized, mirrored, cropped, made lighter or grey.
Two photos look alike if the print of one whole photo is alike to a print of the other (`look`)."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageOps

from trainer.data.sources import Photo

SIDE = 8  # cells to a side of the grid
LEAST = 2  # levels of 255: smaller differences between two cells are ignored, because re-encoding changes them
BITS = 2 * SIDE * SIDE // 8  # bytes of the bits
PRINT = BITS + 12  # bytes of a print
SMALL = 10 * (SIDE + 1)  # pixels to a side of the thumbnail that prints are made of
CUT = SMALL // 10  # pixels that a crop removes from a side
VIEWS = (
    *((x, y, SMALL - CUT + x, SMALL - CUT + y) for x, y in ((0, 0), (CUT, 0), (0, CUT), (CUT, CUT), (CUT / 2, CUT / 2))),
    (CUT, 0, SMALL, SMALL), (0, CUT, SMALL, SMALL), (0, 0, SMALL - CUT, SMALL), (0, 0, SMALL, SMALL - CUT),
)  # fmt: skip

FAR = 12  # bits of 128 that two prints of one photo may differ by
SHARE = 4  # and at most this part (1 / SHARE) of the bits that are set in either: a plain photo has few
COLOUR = 12  # levels of 255 that their colours may differ by
# Or at most 1 / EQUAL of these bits differ, and the mean of the colours by at most LIGHT: grey, lighter.
EQUAL, LIGHT = 12, 26
NEIGHBOURS = 64  # how many others, next in brightness, a print is compared with among those that share one part of its bits


def look(image: Image.Image) -> bytes:
    """The prints of an RGB image, one after another: of the whole, of its mirror image, of VIEWS. 28 bytes each.

    16 bytes: a bit for each pair of neighbouring cells of an 8 x 8 grid, set if the brightness rises: to the right, then
    downwards (a "difference hash": Krawetz, "Kind of Like That", 2013). 12 bytes: the mean colours of the four quarters.
    """
    small = image.resize((SMALL, SMALL), Image.Resampling.HAMMING, reducing_gap=2.0)
    return b"".join([_print(small), _print(ImageOps.mirror(small)), *(_print(small, box) for box in VIEWS)])


def _print(image: Image.Image, box: tuple[float, float, float, float] | None = None) -> bytes:
    cells = image.resize((SIDE + 1, SIDE + 1), Image.Resampling.HAMMING, box)
    grey = np.asarray(cells.convert("L"), dtype=np.int16)
    rises = [np.diff(grey, axis=1)[:SIDE] > LEAST, np.diff(grey, axis=0)[:, :SIDE] > LEAST]
    return np.packbits(rises).tobytes() + cells.resize((2, 2), Image.Resampling.BOX).tobytes()


def groups(photos: Sequence[Photo]) -> tuple[tuple[Photo, ...], ...]:
    """The photos that are near duplicates of another one, in groups, in the order given."""
    return tuple(tuple(photos[index] for index in group) for group in alike([photo.look for photo in photos]))


def alike(looks: Sequence[bytes]) -> list[list[int]]:
    """Indices of the looks that look like another one, in groups: in ascending order, each index in at most one.

    Two prints are alike if at most FAR bits differ, no more than 1 / SHARE of those that are set, and colours by at most
    COLOUR, or as EQUAL and LIGHT say. Then at least one of FAR + 1 parts of the bits is equal, so only prints with an equal
    part are compared: in each part with the NEIGHBOURS next in brightness, so that thousands of similar ones go fast.
    """
    first: dict[bytes, int] = {}
    indices_of: dict[int, list[int]] = {}
    for index, look in enumerate(looks):
        if look:
            indices_of.setdefault(first.setdefault(look, index), []).append(index)
    labels = _labels(np.frombuffer(b"".join(first), dtype=np.uint8).reshape(len(first), -1, PRINT)) if len(first) > 1 else [0]
    groups: dict[int, list[int]] = {}
    for label, indices in zip(labels, indices_of.values(), strict=False):
        groups.setdefault(int(label), []).extend(indices)
    return sorted(sorted(group) for group in groups.values() if len(group) > 1)


def _labels(looks: np.ndarray) -> np.ndarray:
    """uint8 [N, prints, 28] -> [N]: the least index of the group of each."""
    photos, whole = (each.ravel() for each in np.indices(looks.shape[:2]))
    prints, whole = looks.reshape(-1, PRINT), whole == 0
    bits, colours = np.ascontiguousarray(prints[:, :BITS]).view(np.uint64), prints[:, BITS:].astype(np.int16)
    bright, single = colours.mean(axis=1, dtype=np.float32), np.unpackbits(prints[:, :BITS], axis=1)
    labels = np.arange(len(looks))
    for columns in np.array_split(np.arange(8 * BITS), FAR + 1):
        part = (single[:, columns] @ (1 << np.arange(len(columns), dtype=np.int32))).astype(np.int16)
        order = np.lexsort((bright, part))
        sorted_part, sorted_bright, sorted_whole = part[order], bright[order], whole[order]
        for step in range(1, min(NEIGHBOURS, len(order) - 1) + 1):
            near = sorted_part[step:] == sorted_part[:-step]
            near &= sorted_bright[step:] - sorted_bright[:-step] <= LIGHT
            if not near.any():
                break
            places = np.flatnonzero(near & (sorted_whole[step:] | sorted_whole[:-step]))
            one, other = order[places], order[places + step]
            close = _are_alike(bits, colours, one, other, least=np.where(whole[one] & whole[other], 0, 2 * EQUAL))
            labels = _join(labels, photos[one], photos[other], close)
    return labels


def _are_alike(bits: np.ndarray, colours: np.ndarray, one: np.ndarray, other: np.ndarray, least: np.ndarray) -> np.ndarray:
    """bool [N]. one, other: indices of prints [N]. least: bits that must be set in either: a plain photo has few, and a crop
    of it is easily like another photo."""
    a, b = bits[one], bits[other]
    distance = _count(a ^ b).astype(np.int16)
    close = np.flatnonzero(distance <= FAR)
    distance, either = distance[close], _count(a[close] | b[close]).astype(np.int16)
    off = colours[one[close]] - colours[other[close]]
    lighter = (EQUAL * distance <= either) & (either >= 2 * EQUAL) & (np.abs(off.mean(axis=1)) <= LIGHT)
    matches = np.zeros(len(one), dtype=bool)
    coloured = np.abs(off).max(axis=1, initial=0) <= COLOUR
    matches[close] = (SHARE * distance <= either) & (either >= least[close]) & (coloured | lighter)
    return matches


def _count(words: np.ndarray) -> np.ndarray:
    """uint64 [N, 2] -> [N]: the number of bits set in both words."""
    counts = np.bitwise_count(words)
    return counts[:, 0] + counts[:, 1]


def _join(labels: np.ndarray, one: np.ndarray, other: np.ndarray, close: np.ndarray) -> np.ndarray:
    """The labels, with both labels of each close pair replaced by the lesser."""
    one, other = one[close], other[close]
    while len(unequal := np.flatnonzero(labels[one] != labels[other])):
        one, other = one[unequal], other[unequal]
        less, more = np.minimum(labels[one], labels[other]), np.maximum(labels[one], labels[other])
        np.minimum.at(labels, more, less)
        # A label is an index of its group: follow it to the least.
        while (labels != labels[labels]).any():
            labels = labels[labels]
    return labels
