"""The validation images of a run, ready to embed: a row for each request (prompt, size, seed...), a column for each step."""

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
MOST_BETWEEN = 3000  # images of a page between the first and the newest ones; beyond, some steps are left out


@dataclass(frozen=True)
class Embedded:
    """A picture in the page. link: the file's path from the page. small: so few pixels that it is drawn without smoothing."""

    picture: Picture
    link: str
    small: bool


@dataclass
class Row:
    """A request and its images. detail: the request without its prompt, in words. files: by step. images: the images in the
    page, by step. truth: the expected image. references: images that the model is shown."""

    prompt: str
    detail: str
    files: dict[int, Path] = field(default_factory=dict)
    images: dict[int, Embedded] = field(default_factory=dict)
    truth: Embedded | None = None
    references: tuple[Embedded, ...] = ()


@dataclass(frozen=True)
class Samples:
    """The samples of a run. steps: those with a sample. rows: in the order of the newest step; earlier prompts come last.
    unreadable: count of images that cannot be read and are left out."""

    steps: tuple[int, ...] = ()
    rows: tuple[Row, ...] = ()
    unreadable: int = 0

    def requests(self, *, current: bool) -> list[tuple[int, Row]]:
        """(index, row) of the requests of the newest step, or of those at earlier steps alone."""
        return [(index, row) for index, row in enumerate(self.rows) if (self.steps[-1] in row.files) == current]

    @property
    def newest(self) -> list[tuple[Row, Embedded]]:
        """The newest picture of the first few prompts."""
        images = [(row, row.images.get(self.steps[-1])) for row in self.rows]
        return [(row, image) for row, image in images if image is not None][:BESIDE]


def read_samples(folder: Path, thumbnails: Thumbnails | None = None, check: Callable[[], None] = lambda: None) -> Samples:
    """Read FOLDER/step-00000000/*.png, FOLDER/truth/*.png and FOLDER/references/*.png. thumbnails: from earlier readings. An
    image belongs to the row of its PNG's text entry "request", whatever its file is called; without that entry, to the row
    of its size and its prompt, else its name."""
    thumbnails = thumbnails or Thumbnails()
    files_at = [(file, step) for file in pngs(folder, "*/*.png") if (step := step_of(file.parent.name)) is not None]
    files = []
    rows: dict[tuple[str, int], Row] = {}
    counts: Counter[tuple[str, int]] = Counter()
    order: dict[tuple[str, int], tuple[int, str]] = {}
    for file, step in files_at:
        check()
        if (about := thumbnails.describe(file)) is None:
            continue
        files.append((file, step))
        request = about.request or f"{about.prompt or file.stem} {about.size}"
        key = request, counts[request, step]  # two equal requests have two rows
        counts[request, step] += 1
        row = rows.setdefault(key, Row(about.prompt or file.stem, _detail(about.request)))
        row.files[step] = file
        order[key] = -step, file.stem
    truths, references = (_by_request(folder, kind, thumbnails) for kind in ("truth", "references"))
    ends = [row.files[step] for row in rows.values() for step in dict.fromkeys((min(row.files), max(row.files)))]
    every = 1 + (len(files) - len(ends)) // MOST_BETWEEN
    between = [file for row in rows.values() for file in [*row.files.values()][1:-1][::-every]]
    beside = [file for request, _ in rows for part in (truths, references) for file in part.get(plain_request(request), [])]
    pictures = thumbnails.of([*ends, *dict.fromkeys(beside)], between, check)
    broken = {file for file in (*ends, *between) if file not in pictures}  # below a sound head

    def image(file: Path) -> Embedded | None:
        about = thumbnails.describe(file)
        if about is None or file not in pictures:
            return None
        return Embedded(pictures[file], file.relative_to(folder.parent).as_posix(), max(about.size) <= SMALL)

    for (request, _), row in rows.items():
        row.files = {step: file for step, file in row.files.items() if file not in broken}
        row.images = {step: one for step, file in sorted(row.files.items()) if (one := image(file)) is not None}
        plain = plain_request(request)
        row.truth = next(map(image, truths.get(plain, [])), None)
        row.references = tuple(one for file in references.get(plain, []) if (one := image(file)) is not None)
    steps = tuple(sorted({step for file, step in files if file not in broken}))
    ordered = sorted((key for key, row in rows.items() if row.images), key=order.__getitem__)
    return Samples(steps, tuple(rows[key] for key in ordered), len(files_at) - len(files) + len(broken))


def _by_request(folder: Path, kind: str, thumbnails: Thumbnails) -> dict[str | None, list[Path]]:
    files: dict[str | None, list[Path]] = {}
    for file in pngs(folder, f"{kind}/*.png"):
        if (about := thumbnails.describe(file)) is not None:
            files.setdefault(about.request, []).append(file)
    return files


def step_name(step: int) -> str:
    """The name of a step: "step 1,000", "before training"."""
    return f"step {step:,}" if step else "before training"


@lru_cache(maxsize=4 * BESIDE)
def peek(uri: str) -> str:
    """A small copy of an embedded picture."""
    return data_uri(reduced(base64.b64decode(uri.partition(",")[2]), PEEK_PX), "jpeg")


def _detail(request: str | None) -> str:
    """'64 x 64 px, seed 0, 20 steps', and the other fields of the request."""
    try:
        fields = json.loads(request or "")
        parts = [f"{fields['width']} x {fields['height']} px", f"seed {fields['seed']}", f"{fields['steps']} steps"]
        parts += [f"not: {fields['negative']}"] if fields.get("negative") else []
        parts += [f"guidance {fields['guidance']:g}"] if fields.get("guidance") is not None else []
        parts += [f"cfg {fields['cfg']:g}"] if fields.get("cfg") is not None else []
        parts += [f"strength {fields['strength']:g}"] if not at_full_strength(fields) else []
        parts += [f"shown {', '.join(Path(file).name for file in fields['references'])}"] if fields.get("references") else []
        parts += [f"average of the weights ({fields['weights']})"] if fields.get("weights") else []
    except (ValueError, KeyError, TypeError, RecursionError):  # not written by this program
        return ""
    return ", ".join(parts)
