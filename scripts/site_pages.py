"""Hooks of mkdocs.yml: pages of the site that do not lie in docs/, and links between them and those that do.

On GitHub a link is relative to its file. In the site these files have other places, so their links are written anew. A link
to a file that is no page becomes its text.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

from mkdocs.structure.files import File, Files

# Of the repository: the site's.
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "docker/README.md": "docker.md",
    "tests/README.md": "tests.md",
}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, *, config: Any) -> Files:
    root = posixpath.dirname(config.config_file_path)
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=posixpath.join(root, source)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    sources = {page: source for source, page in PAGES.items()}
    return rewritten(markdown, sources.get(page.file.src_uri, f"docs/{page.file.src_uri}"), page.file.src_uri)


def rewritten(markdown: str, source: str, page: str) -> str:
    """`markdown` of the repository's file `source` with the links that it needs as the site's `page`."""

    def link(found: re.Match[str]) -> str:
        image, text, target = found.groups()
        path, mark, anchor = target.partition("#")
        if not path or re.match(r"\w+:", path):
            return found[0]
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        there = PAGES.get(place) or (place.removeprefix("docs/") if place.startswith("docs/") else None)
        if there is None:
            return text
        return f"{image}[{text}]({posixpath.relpath(there, posixpath.dirname(page) or '.')}{mark}{anchor})"

    return LINK.sub(link, markdown)
