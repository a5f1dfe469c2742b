"""The pages of all keys and of other trainers' names are what the program has."""

from __future__ import annotations

import re

import pytest

from scripts import reference_pages
from tests.harness import ROOT
from trainer import config as configs


@pytest.mark.parametrize("page", reference_pages.WRITTEN)
def test_the_page_is_what_the_script_writes(page: str) -> None:
    written = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert written == reference_pages.WRITTEN[page](), "run scripts/reference_pages.py"


def test_the_page_has_every_key_with_its_meaning() -> None:
    named, table = set(), ""
    for line in reference_pages.key_page().splitlines():
        if heading := re.fullmatch(r"## `(\[+)([\w.]+)\]+`", line):
            table = heading[2] + (".*" if heading[1] == "[[" else "")
        elif key := re.match(r"\| `(\w+)` \| (.+) \| (.+) \| (.+) \| (.+) \|$", line):
            named.add(f"{table.replace('NAME', '*')}.{key[1]}")
            assert key[4].endswith((".", ":")) or key[4].endswith("below."), line
    tables = {key for key in configs.known_keys() if "." not in key}
    entries = {"model.components.*"}  # the table of any name, not a key
    assert named == configs.known_keys().keys() - tables - entries


@pytest.mark.parametrize(
    ("key", "cells"),
    [("rank", ["a whole number, from 1", "`16`"]), ("lr", ["a number, above 0", "`0.0001`"]),
     ("bucket_step", ["a whole number, from 8, a multiple of 8", "-"]),
     ("t_range", ["a list of 2: a number, from 0 to 1 each", "`[0.0, 1.0]`"]),
     ("held_out", ["a whole number, from 0, or a number, from 0 below 1", "`0`"]),
     ("cache_text", ['`"auto"`, or true or false', '`"auto"`']), ("output_dir", ["text", "required"]),
     ("text_length", ["a whole number, from 1", "-"])],
)  # fmt: skip
def test_types_and_ranges_are_told_in_words(key: str, cells: list[str]) -> None:
    assert f"| `{key}` | {' | '.join(cells)} |" in reference_pages.key_page()


def test_a_key_that_one_family_reads_is_marked_so() -> None:
    page = reference_pages.key_page()
    assert re.search(r"\| `shift` \| .* \| `flux`, `flux2`, `flux3`, `zimage` \|\n", page) and re.search(
        r"\| `clip_chunks` \| .* \| `sdxl` \|\n", page
    )
    assert re.search(r"\| `references` \| .* \| `flux`, `flux2`, `flux3` \|\n", page) and re.search(
        r"\| `rank` \| .* \| all \|\n", page
    )
