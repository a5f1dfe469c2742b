"""Which images pass the VAE in tiles: those that would take far more memory than a step over them."""

# Pixels that pass as a whole. Encoding so many takes 5 GiB in fp32, which a card of 8 GB has; 2048 x 2048 would take 10.
WHOLE = 2**21
SIDES = range(1024, 1472, 64)  # of tiles, in pixels
OVERLAP = 0.25  # of two neighbours, as diffusers has it: there one fades into the other


def side(width: int, height: int) -> int | None:
    """The side, in pixels, of the square tiles that an image passes in; None: it passes as a whole.

    The smallest at which no tile of the last row or column is narrower than half the others, or as near to that as can be: a
    tile is normalised by its own mean and variance, and those of a narrow strip say little.
    """
    if width * height <= WHOLE:
        return None
    return max(SIDES, key=lambda side: (min(0.5, *(_last(length, side) for length in (width, height))), -side))


def _last(length: int, side: int) -> float:
    """The share of a whole tile that the last one has."""
    stride = int(side * (1 - OVERLAP))
    return (length - (length - 1) // stride * stride) / min(length, side)
