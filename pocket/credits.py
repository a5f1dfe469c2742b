"""Whose the icons are: what their licences ask every copy to say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pocket import icons

MIT = """\
> Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated documentation
> files (the "Software"), to deal in the Software without restriction, including without limitation the rights to use, copy,
> modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit persons to whom the
> Software is furnished to do so, subject to the following conditions:
>
> The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
> Software.
>
> THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
> WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
> COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE,
> ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""
LINKS = {
    "Apache-2.0": "[Apache-2.0](https://www.apache.org/licenses/LICENSE-2.0)",
    "CC-BY-4.0": "[CC BY 4.0](https://creativecommons.org/licenses/by/4.0/)",
    "MIT": "MIT, below",
}


def mit(*holders: str) -> str:
    """The MIT licence's text under its copyright lines."""
    return "".join(f"> Copyright (c) {holder}\n" for holder in holders) + ">\n" + MIT


def table(sets: Iterable[icons.IconSet], folders: Mapping[str, str] | None = None) -> str:
    """A row for each set. folders: style -> where its icons are, as a first column."""
    titles = ["style", "made by", "from", "licence"]
    rows = [titles, ["---"] * len(titles)]
    for each in sets:
        package = f"[{each.work}]({each.source}), as `@iconify-json/{each.package}` {each.version}"
        rows.append([each.style, each.author, package, LINKS[each.licence]])
    if folders is not None:
        first = ["folder", "---", *(folders[row[0]] for row in rows[2:])]
        rows = [[cell, *row] for cell, row in zip(first, rows, strict=True)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
