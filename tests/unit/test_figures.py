"""Figures with a unit in tables of the README and of docs/: each has a marker below its table, or a command beside it.

A marker names a file of docs/benchmarks/ (or a path below the root), for each column where its figures lie there, and for
each row what stands for {}:

    <!-- figures: GPU-2026-11-26.json
    | | #S.{}.ms | #S.{}.utilisation × #steps.matmul_tflops | #S.{}.peak_bytes in GiB |
    S = steps.cells.Flux 1024 px, batch 1: compiled.sides
    DoRA bf16, eager
    DoRA bf16, compiled
    -->

A path has its keys between dots; [a=b; c=d] is the only entry of a list that has these values. A list under one figure is
its median; several figures of a cell are a list's in their order, or `A & B`. A row "-" has no figures in the file. What
stands behind ` | ` in a row is {1}.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.harness import ROOT

BENCHMARKS = ROOT / "docs" / "benchmarks"
TABLE = re.compile(r"(^\|.*\n\|[-| :]+\n(?:\|.*(?:\n|\Z))*)(?:\n<!-- figures: ((?:.*\n)+?)-->)?", re.MULTILINE)
UNITS = "GiB|MiB|GB/s|ms|s|min|TFLOP|TFLOP/s|%|us"
UNIT = re.compile(rf"\d (?:{UNITS})(?![\w/])")
HEAD = re.compile(rf"(?:^|[\s,(])(?:{UNITS})(?:$|[\s,)])")
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?")
SCALES = {"GiB": 2**-30, "MiB": 2**-20, "%": 100, "ms": 1000, "s": 1e-3, "TFLOP": 1e-12}
# A line of a command, or one in a sentence; a test by its file is one.
COMMAND = re.compile(
    r"^ {4,}(?:[A-Z_]+=\S+ )*(?:\S*python|bash)\b|`(?:[A-Z_]+=\S+ )*(?:python|bash|pytest) [^`]+`|`tests/[\w/]+\.py[^`]*`",
    re.MULTILINE,
)
# Figures that nobody measured: page and first head of the table -> what they are.
NOT_MEASURED = {
    ("docs/keys.md", "key"): "defaults",
    ("docs/verdict.md", "verdict"): "thresholds of the verdict, which tests/unit/workbench/pages/test_diagnosis.py holds",
    ("docs/guide/report.md", "it says"): "sentences of a report, quoted",
    ("docs/memory.md", ""): "rates that step_time.py assumes",
}
BY_SCRIPT = re.compile(r"<!-- scripts/[\w.]+(?: --\w+)? writes from here -->\s*$")


@dataclass(frozen=True)
class Table:
    """page: its name from the root. beside: the text of its section, and of a page of measurements also the opening; marker:
    "" without one. by_script: whether a comment above it names the script that writes it."""

    page: str
    rows: list[list[str]]
    beside: str
    marker: str
    by_script: bool = False

    @property
    def has_units(self) -> bool:
        """Whether a column's head names a unit above figures, or a cell holds both."""
        head, *body = self.rows
        return any(
            UNIT.search(row[place]) or (HEAD.search(title) and NUMBER.search(row[place]))
            for place, title in enumerate(head)
            for row in body
        )


def tables(root: Path) -> Iterator[Table]:
    for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))):
        text = path.read_text(encoding="utf-8")
        for found in TABLE.finditer(text):
            head, _, *body = ([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in found[1].splitlines())
            name, before, after = path.relative_to(root).as_posix(), text[: found.start()], text[found.end() :]
            beside = (
                re.split(r"^## ", before, flags=re.MULTILINE)[-1] + found[0] + re.split(r"^## ", after, flags=re.MULTILINE)[0]
            )
            opening = text.partition("\n## ")[0] if name.startswith("docs/benchmarks/") else ""
            yield Table(name, [head, *body], opening + "\n" + beside, found[2] or "", bool(BY_SCRIPT.search(before)))


def figures(cell: str) -> list[str]:
    return [number.replace(",", "") for number in NUMBER.findall(cell)]


def at(data: Any, path: str) -> Any:
    """What lies there. Raises KeyError."""
    for key in re.findall(r"\[[^\]]*\]|[^.\[]+", path):
        if key.startswith("["):
            wanted = dict(pair.split("=", 1) for pair in key[1:-1].split("; "))
            fitting = [entry for entry in data if all(shown(entry[k]) == value for k, value in wanted.items())]
            if len(fitting) != 1:
                raise KeyError(f"{path}: {len(fitting)} entries fit {key}")
            data = fitting[0]
        elif isinstance(data, list):
            data = data[int(key)] if key.isdigit() else [entry[key] for entry in data]  # of every round
        else:
            data = data[key]
    return data


def shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def values(data: Any, expression: str) -> list[float] | float:
    """Of `#PATH`, with ` × ` and ` ÷ ` between several, and ` in UNIT` at the end."""
    expression, _, unit = expression.partition(" in ")
    first, *others = re.split(r" ([×÷]) ", expression)
    found = at(data, first.removeprefix("#"))
    for sign, term in zip(others[::2], others[1::2], strict=True):
        other = at(data, term.removeprefix("#"))
        if isinstance(found, list):  # round by round
            found = [a / b for a, b in zip(found, other, strict=True)]
        else:
            found = found * other if sign == "×" else found / other
    if isinstance(found, list):
        return [each * SCALES.get(unit, 1) for each in found]
    return found * SCALES.get(unit, 1)


def faults(table: Table, root: Path = ROOT) -> list[str]:
    """What is wrong with its figures."""
    if not table.marker:
        bare = table.has_units and not table.by_script and not COMMAND.search(table.beside)
        known = (table.page, table.rows[0][0]) in NOT_MEASURED
        return [f"{table.page}: {table.rows[0]} has neither a marker nor a command"] if bare and not known else []
    name, columns, *lines = (line.strip() for line in table.marker.strip().splitlines())
    path = next(place for place in (root / "docs" / "benchmarks" / name, root / name) if place.is_file())
    data, found = json.loads(path.read_text(encoding="utf-8")), []
    while lines and (short := re.fullmatch(r"(\w) = (.+)", lines[0])):
        columns, lines = columns.replace(f"#{short[1]}.", f"#{short[2]}."), lines[1:]
    asked = [cell.strip() for cell in columns.split("|")[1:-1]]
    if len(asked) != len(table.rows[0]) or len(lines) != len(table.rows) - 1:
        return [f"{table.page}: the marker of {table.rows[0]} has {len(asked)} columns, {len(lines)} rows"]
    for row, line in zip(table.rows[1:], lines, strict=True):
        for cell, expression in zip(row, asked, strict=True):
            if line == "-" or not expression or not (written := figures(cell)):
                continue
            given: list[float] = []
            first, _, second = line.partition(" | ")
            for each in expression.replace("{}", first).replace("{1}", second).split(" & "):
                value = values(data, each)
                given += [value] if not isinstance(value, list) else value if len(written) > 1 else [median(value)]
            counted = [f"{value:.{len(number.partition('.')[2])}f}" for value, number in zip(given, written, strict=False)]
            if len(given) != len(written) or counted != written:
                found.append(f"{table.page}: {cell!r} is {given} in {name}, {line}")
    return found


def test_every_figure_of_a_table_is_that_of_its_marker_or_has_a_command() -> None:
    found = [fault for table in tables(ROOT) for fault in faults(table)]
    assert not found, "\n".join(found)


def test_markers_are_many() -> None:
    """Cells that are compared: a page that loses its markers is seen."""
    counts = [
        prod((len(table.rows) - 1, sum("#" in cell for cell in table.marker.strip().splitlines()[1].split("|"))))
        for table in tables(ROOT)
        if table.marker
    ]
    assert len(counts) >= 12 and sum(counts) >= 250, (len(counts), sum(counts))


DATA = {"sides": {"a": {"ms": 12.345, "of": [1.0, 3.0, 2.0], "bytes": 2**30}}, "rate": 10, "rows": [{"n": [1, 2], "x": 0.25}]}


@pytest.mark.parametrize(
    ("cell", "expression", "right"),
    [("12.3 ms", "#sides.{}.ms", True), ("12.4 ms", "#sides.{}.ms", False),
     ("12 ms, 1.0 GiB", "#sides.{}.ms & #sides.{}.bytes in GiB", True),
     ("12 ms, 1.1 GiB", "#sides.{}.ms & #sides.{}.bytes in GiB", False), ("123 TFLOP/s", "#sides.{}.ms × #rate", True),
     ("1.2", "#sides.{}.ms ÷ #rate", True), ("2.0 s", "#sides.{}.of", True), ("1.0 (3.0 to 2.0)", "#sides.{}.of", True),
     ("1.0 (2.0 to 3.0)", "#sides.{}.of", False), ("1.0 (3.0)", "#sides.{}.of", False),
     ("25 %", "#rows.[n=1, 2].x in %", True),
     ("1,234 ms", "#rate", False), ("", "#nothing", True), ("5 ms", "", True)],
)  # fmt: skip
def test_a_figure_is_compared_as_it_is_rounded(tmp_path: Path, cell: str, expression: str, right: bool) -> None:
    (tmp_path / "docs" / "benchmarks").mkdir(parents=True)
    (tmp_path / "docs" / "benchmarks" / "A.json").write_text(json.dumps(DATA))
    marker = f"A.json\n| | {expression} |\na\n"
    assert (not faults(Table("a.md", [["what", "took"], ["us", cell]], "", marker), tmp_path)) == right


@pytest.mark.parametrize(
    ("above", "head", "cell", "bare"),
    [("", "took", "5 ms", True), ("", "ms", "5", True), ("", "took", "5", False),
     ("    python a.py\n\n", "took", "5 ms", False),
     ("Made by `OMP_NUM_THREADS=1 python a.py`.\n\n", "took", "5 ms", False), ("", "took", "5 msec", False),
     ("By `tests/unit/a.py -k b`.\n\n", "took", "5 ms", False), ("", "peak, GiB", "5.1", True), ("", "took, s", "1", True),
     ("<!-- scripts/a.py --all writes from here -->\n\n", "took", "5 ms", False)],
)  # fmt: skip
def test_a_table_with_units_and_nothing_beside_it_is_found(
    tmp_path: Path, above: str, head: str, cell: str, bare: bool
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(
        f"## A\n\n    python b.py\n\n## B\n\n{above}| what | {head} |\n|---|---|\n| we | {cell} |\n"
    )
    (table,) = tables(tmp_path)
    assert bool(faults(table, tmp_path)) == bare


def test_a_marker_of_other_rows_or_columns_is_found(tmp_path: Path) -> None:
    (tmp_path / "docs" / "benchmarks").mkdir(parents=True)
    (tmp_path / "docs" / "benchmarks" / "A.json").write_text(json.dumps(DATA))
    rows = [["what", "took"], ["we", "12.3 ms"]]
    for marker in ("A.json\n| #sides.{}.ms |\na\n", "A.json\n| | #sides.{}.ms |\na\na\n"):
        assert "the marker of" in faults(Table("a.md", rows, "", marker), tmp_path)[0]
    with pytest.raises(KeyError, match="0 entries fit"):
        faults(Table("a.md", rows, "", "A.json\n| | #rows.[n={}].x |\n7\n"), tmp_path)
