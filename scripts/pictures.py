"""The pictures of the README and of the guides, from a run of the demo that has ended.

    bash scripts/demo.sh
    .venv/bin/python scripts/pictures.py outputs/ink
    .venv/bin/python scripts/pictures.py --audit audit/audit.html      # one page's alone

It writes docs/before_after.png (all subjects), docs/pictures/before_after.png (two of them, large), and with Chromium the top
of the run's report, in light and dark; with --data_report, --comparison, --audit or --fork also
(or only) that of such a page.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trainer.report.before_after import table  # noqa: E402

SHOWN = ("fox", "panda")
EXAMS = ROOT / "examples" / "icons" / "exams"
SIDE = 256  # px of a large sample
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="the demo's output folder")
    parser.add_argument("--data_report", type=Path, help="the page that scripts/data.py report wrote")
    parser.add_argument("--fork", type=Path, help="the report of a run that --fork_from began")
    parser.add_argument("--comparison", type=Path, help="the page that train.py --compare wrote")
    parser.add_argument("--audit", type=Path, help="the page that scripts/audit.py wrote")
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
