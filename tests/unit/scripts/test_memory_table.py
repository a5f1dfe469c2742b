"""The README's table of cards is what docs/memory.md's tables say."""

from __future__ import annotations

from itertools import product

import pytest

from scripts import memory_table
from trainer.models import FAMILIES


def test_the_readmes_table_is_made_from_the_documents_tables() -> None:
    """After a change of docs/memory.md: python scripts/memory_table.py --readme"""
    document, readme = memory_table.DOCUMENT.read_text(), memory_table.README.read_text()
    assert readme == memory_table.between(readme, (*memory_table.readme_table(document), ""))


GIB = 2**30


def document(sizes: dict[tuple, float]) -> str:
    """Tables in which all needs 100 GiB but `sizes`: (dtype, adapter, resolution, batch, recomputed) -> GiB; with "streamed"
    as a sixth, those of streamed blocks."""

    def size(model: memory_table.Model, cell: tuple[int, int]) -> int:
        streamed = ("streamed",) * (model.resident == 0)
        return int(sizes.get((model.dtype, model.adapter, *cell, model.recomputed, *streamed), 100) * GIB)

    cells = [*product(memory_table.RESOLUTIONS, memory_table.BATCHES)]
    found = {model: {cell: size(model, cell) for cell in cells} for model in memory_table.MODELS}
    return "# Memory\n" + "\n".join(memory_table.tables(found))


@pytest.mark.parametrize(
    ("sizes", "cells"),
    [
        ({}, {8: "nothing fits", 80: "nothing fits"}),
        ({("nf4", "dora", 512, 1, True): 7.96}, {8: "512 px, 4-bit base, recomputed: 8.0 GiB"}),
        ({("nf4", "dora", 512, 1, True): 8.01}, {8: "nothing fits", 12: "512 px, 4-bit base, recomputed: 8.0 GiB"}),
        # Larger photos, then the finer dtype, then nothing recomputed. Neither a LoRA nor another batch counts.
        (
            {("bf16", "dora", 512, 1, False): 5, ("nf4", "dora", 768, 1, True): 6, ("bf16", "lora", 1024, 1, True): 4,
             ("fp8_e4m3", "dora", 768, 1, True): 9, ("fp8_e4m3", "dora", 768, 1, False): 13,
             ("bf16", "dora", 1024, 4, True): 7},
            {8: "768 px, 4-bit base, recomputed: 6.0 GiB", 12: "768 px, float8 base, recomputed: 9.0 GiB",
             16: "768 px, float8 base: 13.0 GiB", 80: "768 px, float8 base: 13.0 GiB"},
        ),
    ],
)  # fmt: skip
def test_a_card_gets_the_best_that_fits(sizes, cells: dict[int, str]) -> None:
    text = document(sizes)
    for card, cell in cells.items():
        for family in FAMILIES:
            assert memory_table.best(text, family, card, False) == cell


def test_streamed_blocks_have_a_column_of_their_own() -> None:
    text = document({("bf16", "dora", 768, 1, True, "streamed"): 7, ("nf4", "dora", 1024, 1, True): 7})
    for family in FAMILIES:
        assert memory_table.best(text, family, 8, True) == "768 px, bf16 base: 7.0 GiB"
        assert memory_table.best(text, family, 8, False) == "1024 px, 4-bit base, recomputed: 7.0 GiB"
