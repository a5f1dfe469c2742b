"""Tiling for the VAE of images that would take far more memory than a training step on them."""

# Maximum pixels without tiles: encoding them takes 5 GiB in fp32, which fits a card of 8 GB; 2048 x 2048 would take 10.
WHOLE = 2**21
SIDES = range(1024, 1472, 64)  # sides of tiles in pixels
OVERLAP = 0.25  # of neighbouring tiles, which are blended there; the value of diffusers


def side(width: int, height: int) -> int | None:
    """The side, in pixels, of an image's square tiles; None: no tiles. The smallest at which the last row and column are at
    least half a tile wide, or nearest to that: each tile is normalised by its own statistics; a narrow strip's are poor."""
    if width * height <= WHOLE:
        return None
    return max(SIDES, key=lambda side: (min(0.5, *(_last(length, side) for length in (width, height))), -side))


def _last(length: int, side: int) -> float:
    """The length of the last tile as a share of a whole one."""
    stride = int(side * (1 - OVERLAP))
    return (length - (length - 1) // stride * stride) / min(length, side)
