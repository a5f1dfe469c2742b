"""The README's table of cards is what docs/memory_tables.md says of the presets, which are what --new takes."""

from __future__ import annotations

import re

import pytest

from scripts import memory_table
from trainer.config.reading import CONFIG_FOLDER
from trainer.models import FAMILIES
from workbench.planning import step_time


def test_the_readmes_table_is_made_from_the_presets_table() -> None:
    """After a change of docs/memory_tables.md: python scripts/memory_table.py --readme"""
    document, readme = memory_table.DOCUMENT.read_text(), memory_table.README.read_text()
    assert readme == memory_table.between(readme, (*memory_table.readme_table(document), ""))


def test_it_has_every_preset_that_new_takes() -> None:
    rows = [line.split(" | ") for line in memory_table.readme_table(memory_table.DOCUMENT.read_text())][2:]
    shown = {(row[0].removeprefix("| "), row[1]) for row in rows}
    presets = {re.fullmatch(r"(\w+)_(\d+)gb", path.stem).groups() for path in CONFIG_FOLDER.glob("*_*gb.toml")}
    assert shown == {(memory_table.NAMES[family], f"{size} GB") for family, size in presets} and len(rows) == len(presets)


def test_each_card_that_is_shown_has_an_estimate_as_a_range() -> None:
    """Its row is that of the largest preset for its memory; nobody measured it, so no file of a GPU's measurements has it."""
    cells = [line.split(" | ") for line in memory_table.readme_table(memory_table.DOCUMENT.read_text())]
    assert cells[0][-1] == "a step, *estimated* |"
    for family in FAMILIES:
        for size, cards in memory_table.SHOWN.items():
            (times,) = [row[-1] for row in cells if row[:2] == [f"| {memory_table.NAMES[family]}", f"{size} GB"]]
            assert re.findall(r"((?:RTX )?\w+): [\d.]+ (?:s |min )?to [\d.]+ (?:s|min)", times) == [
                *map(memory_table.short, cards)
            ]
    named = {f"NVIDIA {card}" for cards in memory_table.SHOWN.values() for card in cards}
    assert named <= step_time.CARDS.keys()
    wanted = {"RTX 3060", "RTX 3090", "RTX 4060", "RTX 4070", "RTX 4080", "RTX 4090", "RTX 5090"}
    assert wanted <= {memory_table.short(card.removeprefix("NVIDIA ")) for card in named}
    for path in (memory_table.ROOT / "docs" / "benchmarks").glob("GPU-*.json"):
        assert not re.search("RTX|estimate", path.read_text())


@pytest.mark.parametrize("streamed", ["", "49 of 57"])
def test_a_row_of_a_preset_becomes_one_of_the_readmes(streamed: str) -> None:
    base = f"float8{f', {streamed} blocks streamed' * bool(streamed)}"
    rows = [
        f"| `{family}_{size}gb` | {base} | 2 | all, graphs | 6.6 | 0.825 | *RTX 4060: 5 to 9 s; H100: 1 s* | nothing: 1.1 |"
        for family in FAMILIES for size in memory_table.SHOWN
    ]  # fmt: skip
    text = memory_table.between(
        memory_table.BEGIN_PRESETS + memory_table.END, memory_table.preset_table(rows), memory_table.BEGIN_PRESETS
    )
    made = [*memory_table.readme_table(text)]
    assert made[2] == f"| SDXL | 8 GB | {base} | all | 6.6 GiB | *RTX 4060: 5 to 9 s<br>H100: 1 s* |" and len(
        made
    ) == 2 + len(rows)
