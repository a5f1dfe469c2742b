"""docs/ as a site: every page is in it, every link leads somewhere, and a reader's browser asks nobody else for anything."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import site_pages
from tests.harness import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Built strictly: a link or an anchor that leads nowhere fails, and so does a page that the navigation leaves out."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.slow
def test_every_page_is_in_the_site(site: Path) -> None:
    pages = [*(path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")), *site_pages.PAGES.values()]
    missing = [str(page) for page in pages if not (site / page).with_suffix(".html").is_file()]
    assert not missing


@pytest.mark.slow
def test_a_browser_asks_nobody_else(site: Path) -> None:
    """Links that a person may follow are no requests."""
    elsewhere = r"[\"']?(?:https?:)?//"
    asked = re.compile(
        rf"<(?:script|img|iframe|source|video)[^>]*\bsrc={elsewhere}|<link[^>]*\bhref={elsewhere}|url\({elsewhere}|@import"
    )
    found = [
        f"{path.relative_to(site)}: {hit[0]}"
        for path in site.rglob("*")
        if path.suffix in (".html", ".css")
        for hit in asked.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found


@pytest.mark.slow
def test_the_readme_links_to_places_that_there_are(site: Path) -> None:
    links = re.findall(r"\]\(docs/([\w/]+)\.md#([\w-]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert links
    for page, anchor in links:
        assert f'id="{anchor}"' in (site / f"{page}.html").read_text(encoding="utf-8"), f"docs/{page}.md#{anchor}"


@pytest.mark.parametrize(
    ("source", "page", "link", "written"),
    [("CONTRIBUTING.md", "contributing.md", "[f](docs/figures.md)", "[f](figures.md)"),
     ("docker/README.md", "docker.md", "[i](../docs/data.md#images)", "[i](data.md#images)"),
     ("docs/guide/use.md", "guide/use.md", "[c](../../CONTRIBUTING.md#rules)", "[c](../contributing.md#rules)"),
     ("docs/guide/use.md", "guide/use.md", "[m](../memory.md)", "[m](../memory.md)"),
     ("docs/models.md", "models.md", "![b](before_after.png)", "![b](before_after.png)"),
     ("CONTRIBUTING.md", "contributing.md", "[p](examples/pocket_sdxl/README.md)", "p"),
     ("docs/models.md", "models.md", "[s](https://example.org/a.md)", "[s](https://example.org/a.md)"),
     ("docs/models.md", "models.md", "[h](#the-hub)", "[h](#the-hub)")],
)  # fmt: skip
def test_a_link_is_written_for_the_site(source: str, page: str, link: str, written: str) -> None:
    assert site_pages.rewritten(f"See {link}, too.", source, page) == f"See {written}, too."
