"""The pictures of the README and of the guides, from a run of the demo that has ended.

    bash scripts/demo.sh
    .venv/bin/python scripts/pictures.py outputs/ink
    .venv/bin/python scripts/pictures.py --audit audit/audit.html      # one page's alone
    .venv/bin/python scripts/pictures.py --import                      # of docs/import.md: its example, imported now

It writes docs/before_after.png (all subjects), docs/pictures/before_after.png (two of them, large), and with Chromium the top
of the run's report, in light and dark; with --data_report, --comparison, --audit or --fork also
(or only) that of such a page.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from workbench.pages.before_after import table  # noqa: E402
from workbench.pages.rendering import TEMPLATES  # noqa: E402

SHOWN = ("fox", "panda")
EXAMS = ROOT / "examples" / "icons" / "exams"
SIDE = 256  # px of a large sample
IMPORT = """<!doctype html><meta charset="utf-8"><style>{style}
body{{padding:18px 16px;overflow:hidden}}main{{display:grid;grid-template-columns:260px minmax(0,1fr);gap:12px}}
section{{margin:0}}h1{{font-size:15px}}.card{{font:12px/15px monospace;height:660px;overflow:hidden;margin-top:6px}}
.card div{{white-space:pre;overflow:hidden;text-overflow:ellipsis;min-height:6px}}b{{font-weight:400}}
section+section b{{color:var(--accent)}}
section:first-child .card div{{white-space:pre-wrap;line-height:18px}}</style><main>{sides}</main>"""
WIDTH, HEIGHT = 960, 720  # px of a window: its text can be read where the picture is shown at half of that


def large(run: Path, shown: Sequence[str] = SHOWN) -> Image.Image:
    """A row for each subject: before training, after it, and the truth."""
    first, *_, last = sorted((run / "samples").glob("step-*"))
    rows = []
    for subject in shown:
        prompt = f"a {subject}, ink style"
        pictures = [sample(folder, prompt) for folder in (first, last)] + [Image.open(EXAMS / f"{subject}.png")]
        rows.append((prompt, [each.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC) for each in pictures]))
    return table(["before training", f"after step {int(last.name.removeprefix('step-'))}", "the truth"], rows)


def sample(folder: Path, prompt: str) -> Image.Image:
    return next(each for path in sorted(folder.glob("*.png")) if (each := Image.open(path)).info.get("prompt") == prompt)


def small(picture: Image.Image, path: Path) -> None:
    """Written with 256 colours: a third of the bytes."""
    picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def screenshots(page: Path | str, name: str, pictures: Path) -> None:
    """The page's top, as NAME-light.png and NAME-dark.png."""
    from tests.browser import Browser

    with Browser() as browser:
        for scheme in ("light", "dark"):
            tab = browser.tab()  # the same address in the same tab would not be loaded again
            path = pictures / f"{name}-{scheme}.png"
            tab.look(WIDTH, scheme, HEIGHT)
            tab.open(page)
            tab.keep(path, whole=False)
            small(Image.open(path), path)


def import_page(folder: Path) -> Path:
    """A page of the example in docs/import.md: its command line, and beside it the config that the import makes of it."""
    from workbench.importing.writing import import_config

    page = (ROOT / "docs" / "import.md").read_text(encoding="utf-8")
    command = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)[0]
    with contextlib.chdir(folder):
        Path("train.sh").write_text(command, encoding="utf-8")
        made, _ = import_config(Path("train.sh"), None)
        config = made.read_text(encoding="utf-8")
    options = re.sub(r"\s+(\\\s+)?(--|sdxl)", r"\n\2", command)
    sides = ""
    for name, text in (("train.sh, of sd-scripts", options), (f"{made}, made of it", config)):
        lines = re.sub(
            r"(?m)^(.*?)((?:  |^)# .*|^#|$)", r"<div><b>\1</b><span class=soft>\2</span></div>", escape(text, quote=False)
        )
        sides += f'<section><h1>{name}</h1><div class="card">{lines}</div></section>'
    path = folder / "import.html"
    path.write_text(IMPORT.format(style=(TEMPLATES / "page.css").read_text(encoding="utf-8"), sides=sides), encoding="utf-8")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="the demo's output folder")
    parser.add_argument("--data_report", type=Path, help="the page that scripts/data.py report wrote")
    parser.add_argument("--fork", type=Path, help="the report of a run that --fork_from began")
    parser.add_argument("--comparison", type=Path, help="the page that train.py --compare wrote")
    parser.add_argument("--audit", type=Path, help="the page that scripts/audit.py wrote")
    parser.add_argument("--import", dest="imported", action="store_true", help="the example of docs/import.md")
    chosen = parser.parse_args(arguments)
    pictures = ROOT / "docs" / "pictures"
    pictures.mkdir(exist_ok=True)
    if chosen.run:
        shutil.copyfile(chosen.run / "before_after.png", ROOT / "docs" / "before_after.png")
        small(large(chosen.run), pictures / "before_after.png")
        screenshots(chosen.run / "report.html", "report", pictures)
    for name in ("data_report", "comparison", "audit"):
        if page := getattr(chosen, name):
            screenshots(page, name, pictures)
    if chosen.fork:
        screenshots(f"{chosen.fork.resolve().as_uri()}#the-fork", "fork", pictures)
    if chosen.imported:
        with tempfile.TemporaryDirectory() as folder:
            screenshots(import_page(Path(folder)), "import", pictures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
