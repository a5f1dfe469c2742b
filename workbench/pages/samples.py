"""The validation images of a run, ready to embed: one row for what was asked (prompt, size, seed...), one column a step."""

import base64
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from trainer.base.pictures import at_full_strength, data_uri, pngs, reduced
from trainer.base.run_layout import plain_request, step_of
from workbench.pages.thumbnails import Picture, Thumbnails

SMALL = 128  # px
BESIDE, PEEK_PX = 3, 192  # pictures beside the verdict, and their longer side
MOST_BETWEEN = 3000  # images of a page between the first and the newest ones; of more, some steps are left out


@dataclass(frozen=True)
class Embedded:
    """A picture in the page. link: the file's path from the page. small: so few pixels that each is to be seen."""

    picture: Picture
    link: str
    small: bool


@dataclass
class Row:
    """What was asked, and what came of it. detail: all but the prompt, in words. files: by step. images: of these, the ones
    that the page holds. truth: what it ought to look like. references: what the model is shown for it."""

    prompt: str
    detail: str
    files: dict[int, Path] = field(default_factory=dict)
    images: dict[int, Embedded] = field(default_factory=dict)
    truth: Embedded | None = None
    references: tuple[Embedded, ...] = ()


@dataclass(frozen=True)
class Samples:
    """The samples of a run. steps: at which any was drawn. rows: in the order of the newest step; earlier prompts come
    last. unreadable: images that are left out, since they cannot be read."""

    steps: tuple[int, ...] = ()
    rows: tuple[Row, ...] = ()
    unreadable: int = 0

    def asked(self, *, still: bool) -> list[tuple[int, Row]]:
        """(place, row) of what was asked for at the newest step, or at earlier ones alone."""
        return [(place, row) for place, row in enumerate(self.rows) if (self.steps[-1] in row.files) == still]

    @property
    def newest(self) -> list[tuple[Row, Embedded]]:
        """The newest picture of the first few prompts."""
        drawn = [(row, row.images.get(self.steps[-1])) for row in self.rows]
        return [(row, image) for row, image in drawn if image is not None][:BESIDE]


def read_samples(folder: Path, thumbnails: Thumbnails | None = None, check: Callable[[], None] = lambda: None) -> Samples:
    """Read FOLDER/step-00000000/*.png, FOLDER/truth/*.png and FOLDER/references/*.png. thumbnails: from earlier readings. An
    image belongs to the row of its PNG's text entry "request", whatever its file is called; without that entry, to that of
    its prompt, else its name, and its size."""
    thumbnails = thumbnails or Thumbnails()
    files_at = [(file, step) for file in pngs(folder, "*/*.png") if (step := step_of(file.parent.name)) is not None]
    files = []
    rows: dict[tuple[str, int], Row] = {}
    asked: Counter[tuple[str, int]] = Counter()
    place: dict[tuple[str, int], tuple[int, str]] = {}
    for file, step in files_at:
        check()
        if (about := thumbnails.describe(file)) is None:
            continue
        files.append((file, step))
        what = about.request or f"{about.prompt or file.stem} {about.size}"
        key = what, asked[what, step]  # what is asked twice has two rows
        asked[what, step] += 1
        row = rows.setdefault(key, Row(about.prompt or file.stem, _detail(about.request)))
        row.files[step] = file
        place[key] = -step, file.stem
    truths, shown_for = (_by_request(folder, kind, thumbnails) for kind in ("truth", "references"))
    ends = [row.files[step] for row in rows.values() for step in dict.fromkeys((min(row.files), max(row.files)))]
    every = 1 + (len(files) - len(ends)) // MOST_BETWEEN
    between = [file for row in rows.values() for file in [*row.files.values()][1:-1][::-every]]
    beside = [file for what, _ in rows for known in (truths, shown_for) for file in known.get(plain_request(what), [])]
    pictures = thumbnails.of([*ends, *dict.fromkeys(beside)], between, check)
    broken = {file for file in (*ends, *between) if file not in pictures}  # below a sound head

    def image(file: Path) -> Embedded | None:
        about = thumbnails.describe(file)
        if about is None or file not in pictures:
            return None
        return Embedded(pictures[file], file.relative_to(folder.parent).as_posix(), max(about.size) <= SMALL)

    for (what, _), row in rows.items():
        row.files = {step: file for step, file in row.files.items() if file not in broken}
        row.images = {step: images for step, file in sorted(row.files.items()) if (images := image(file)) is not None}
        asked_for = plain_request(what)
        row.truth = next(map(image, truths.get(asked_for, [])), None)
        row.references = tuple(each for file in shown_for.get(asked_for, []) if (each := image(file)) is not None)
    steps = tuple(sorted({step for file, step in files if file not in broken}))
    images = sorted((key for key, row in rows.items() if row.images), key=place.__getitem__)
    return Samples(steps, tuple(rows[key] for key in images), len(files_at) - len(files) + len(broken))


def _by_request(folder: Path, kind: str, thumbnails: Thumbnails) -> dict[str | None, list[Path]]:
    files: dict[str | None, list[Path]] = {}
    for file in pngs(folder, f"{kind}/*.png"):
        if (about := thumbnails.describe(file)) is not None:
            files.setdefault(about.request, []).append(file)
    return files


def step_name(step: int) -> str:
    """A step for people: "step 1,000", "before training"."""
    return f"step {step:,}" if step else "before training"


@lru_cache(maxsize=4 * BESIDE)
def peek(uri: str) -> str:
    """A small copy of an embedded picture."""
    return data_uri(reduced(base64.b64decode(uri.partition(",")[2]), PEEK_PX), "jpeg")


def _detail(request: str | None) -> str:
    """'64 x 64 px, seed 0, 20 steps', and what else was asked for."""
    try:
        asked = json.loads(request or "")
        parts = [f"{asked['width']} x {asked['height']} px", f"seed {asked['seed']}", f"{asked['steps']} steps"]
        parts += [f"not: {asked['negative']}"] if asked.get("negative") else []
        parts += [f"guidance {asked['guidance']:g}"] if asked.get("guidance") is not None else []
        parts += [f"cfg {asked['cfg']:g}"] if asked.get("cfg") is not None else []
        parts += [f"strength {asked['strength']:g}"] if not at_full_strength(asked) else []
        parts += [f"shown {', '.join(Path(file).name for file in asked['references'])}"] if asked.get("references") else []
        parts += [f"average of the weights ({asked['weights']})"] if asked.get("weights") else []
    except (ValueError, KeyError, TypeError, RecursionError):  # not written by this program
        return ""
    return ", ".join(parts)
