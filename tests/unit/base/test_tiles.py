"""Which images pass the VAE in tiles, and in which."""

from hypothesis import assume, given
from hypothesis import strategies as st

from trainer.base import tiles
from trainer.data.buckets import bucket_of_shape

sides = st.integers(1, 128).map(lambda n: 64 * n)


def test_no_bucket_of_the_usual_resolutions_is_tiled():
    for resolution in (512, 768, 1024, 1280, 1408):
        for shape in range(1, 200):
            assert tiles.side(*bucket_of_shape(shape, 100, resolution=resolution, step=64)) is None
    assert tiles.side(1536, 1536) == tiles.side(2048, 2048) == 1024


@given(sides, sides)
def test_tiles_are_few_sizes_and_smaller_than_what_passes_whole(width: int, height: int):
    side = tiles.side(width, height)
    assert (side is None) == (width * height <= tiles.WHOLE)
    if side is not None:
        assert side in tiles.SIDES and side**2 <= tiles.WHOLE and max(width, height) > side
        # diffusers counts in latents, too: each number of pixels below is a whole number of them.
        assert not side * (1 - tiles.OVERLAP) % 8 and not side * tiles.OVERLAP % 8
        assert side == tiles.side(height, width)


@given(sides, sides)
def test_the_last_tiles_are_as_wide_as_any_size_makes_them(width: int, height: int):
    """Of each row and column; up to half of a tile, from where on the smaller tile is the better one."""
    side = tiles.side(width, height)
    assume(side is not None)

    def narrowest(tile: int) -> float:
        def last(length: int) -> float:
            starts = range(0, length, tile * 3 // 4)
            return (length - starts[-1]) / min(length, tile)

        return min(0.5, last(width), last(height))

    best = max(map(narrowest, tiles.SIDES))
    assert side == next(tile for tile in tiles.SIDES if narrowest(tile) == best)
