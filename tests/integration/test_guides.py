"""The guides quote messages that the program prints, and name keys, configs and options that there are."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from tests import hub
from tests.harness import PHOTOS, ROOT
from trainer import config as configs
from workbench.commands import new_config
from workbench.pages.diagnosis import Kind, judge
from workbench.pages.status import TITLES

FIRST = ROOT / "docs" / "guide" / "first_adapter.md"
GUIDES = sorted((ROOT / "docs" / "guide").glob("*.md"))
QUOTED = re.findall(r"^### (.+)$", (ROOT / "docs" / "guide" / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)


TEXTS = (
    *(ROOT / "trainer").rglob("*.py"),
    *(ROOT / "workbench").rglob("*.py"),
    ROOT / "trainer" / "base" / "file_formats.json",
)


@cache
def said(path: Path) -> tuple[str, ...]:
    """The texts in a file of the program; what differs from case to case is "…"."""
    texts = []
    if path.suffix == ".json":
        return (path.read_text(encoding="utf-8"),)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            texts.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return tuple(texts)


def unsaid(message: str) -> list[str]:
    """Parts of a quoted message that no file of the program has together with its other parts; [] where one has all."""
    parts = [part.strip() for part in message.split("…") if re.search(r"\w\w", part)]
    missing = [[part for part in parts if not any(part in text for text in said(path))] for path in TEXTS]
    return min(missing, key=len)


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_one_of_the_programs(message: str) -> None:
    assert not unsaid(message)


def test_a_message_that_the_program_does_not_print_is_found() -> None:
    assert len(QUOTED) >= 20
    assert unsaid("model.path = … is nowhere to be seen") == ["is nowhere to be seen"]
    assert unsaid("step …: the run is diverging: …; free space or mend the disk"), "parts of two files are no message"


def keys_in(text: str) -> Iterator[str]:
    tables = "|".join(key for key in configs.known_keys() if "." not in key)
    files = r"(?!\.(?:toml|json|jsonl|md|html|png)\b)"  # report.html is a file, and config.toml
    yield from re.findall(rf"(?<![\w./-])((?:{tables})(?:{files}\.\w+)+)", text)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_what_a_guide_names_is_there(guide: Path) -> None:
    text = guide.read_text(encoding="utf-8")
    for key in keys_in(text):
        name = configs.generic(key)
        assert any(known == name or known.startswith(f"{name}.") for known in configs.known_keys()), key
    for name in re.findall(r"`(\w+\.toml)`|--config (\w+\.toml)", text):
        name = "".join(name)
        assert name in ("my_photos.toml", "config.toml") or (ROOT / "configs" / name).is_file(), name
    for option in re.findall(r"train\.py.* (--\w+)", text):
        assert f'"{option}"' in (ROOT / "workbench" / "commands" / "arguments.py").read_text(encoding="utf-8"), option


def test_the_first_guide_shows_the_config_that_new_writes(tmp_path: Path, monkeypatch) -> None:
    """For the photos and the card that the guide names."""
    text = FIRST.read_text(encoding="utf-8")
    (shown,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    shutil.copytree(PHOTOS, tmp_path / "data" / "my_photos")
    monkeypatch.chdir(tmp_path)
    with hub.serve({}) as served:  # the published model's configs come with the program
        served.use(monkeypatch, tmp_path / "home")
        path = new_config.write_first_config(
            "data/my_photos", model=None, memory=12 * 2**30, folder=Path(), show=lambda *_: True
        )
    comments, _, written = path.read_text(encoding="utf-8").partition("\n\n")
    assert len(comments.splitlines()) == 2
    assert shown == written


def test_the_first_guide_quotes_the_verdict_in_the_programs_words() -> None:
    (quoted,) = re.findall(r"^ +(verdict: .*?)\n\n", FIRST.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    before, after, change = (float(number) for number in re.findall(r"0\.\d{4}|\d\.\d{2}(?=%)", quoted))
    rows = [
        {"step": step, "images": step, "lr": 1e-3, "grad_norm": 1.0, "loss": before if step <= 100 else after}
        for step in range(1, 201)
    ]
    found = judge([*rows[:-1], {**rows[-1], "weight_change": change / 100}])
    assert " ".join(quoted.split()) == f"verdict: {found.kind}: {found.sentence}"


def test_every_preset_is_named_where_one_is_chosen() -> None:
    text = (ROOT / "docs" / "guide" / "preset.md").read_text(encoding="utf-8")
    configs = (path.name for path in (ROOT / "configs").glob("*.toml"))
    presets = {name for name in configs if not name.startswith(("tiny_", "compare_"))}
    assert not {name for name in presets if f"`{name}`" not in text}


def test_a_key_that_there_is_not_is_found() -> None:
    text = "set `data.resolutions` or `adapter.rank`, and look at config.toml and outputs/data.html"
    assert list(keys_in(text)) == ["data.resolutions", "adapter.rank"]


def test_the_verdicts_of_the_guide_are_those_of_the_page() -> None:
    text = (ROOT / "docs" / "guide" / "report.md").read_text(encoding="utf-8")
    table = text.partition("| it says |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ([^|]*?) \|", table, re.MULTILINE)
    assert rows[2:] == [ended for _, ended in TITLES.values()]
    for title in rows[:2]:  # of a run that learned: what was measured
        of, fell, _ = title.partition(" fell by ")
        assert fell and not unsaid(of[0].lower() + of[1:]), title
    (words,) = re.findall(r"The console has a word for\s+each: ([^.]*)\.", text)
    assert re.findall(r"`(\w+)`", words) == list(get_args(Kind))
    assert f'"{TITLES["worse"][0]}"' in text and f'"{TITLES["unclear"][0]}"' in text
