"""Every path under a run's output folder, by name. docs/command_line.md shows the tree."""

import re
from collections.abc import Collection
from pathlib import Path


def folder_name(step: int) -> str:
    """The folder of a step's checkpoint or samples."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a folder that `folder_name` names; None for another name."""
    match = re.fullmatch(r"step-(\d{8})", name)
    return None if match is None else int(match[1])


AVERAGE = "_ema"  # how the names of files end that are made with an average of the weights
SUPERSEDED = "superseded-after-"  # how the names of folders begin with what was set aside


def plain_request(request: str) -> str:
    """What was asked of a sample (its PNG's text "request"), whichever weights it was drawn with."""
    # In canonical JSON, where no text between quotation marks can look like this.
    return request.replace(f', "weights": "{AVERAGE[1:]}"', "")


def in_use(cache: Path) -> Path:
    """The empty file in a folder of cached entries whose locks say which processes use it."""
    return cache / "in_use" / ".lock"


class Layout:
    """The files and folders of a run. root: run.output_dir."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lock = root / ".lock"
        self.config = root / "config.toml"  # the resolved one
        self.checkpoints = root / "checkpoints"
        self.adapters = root / "adapters"  # NAME.safetensors of the end, NAME-STEP.safetensors of a step
        self.card = self.adapters / "README.md"
        self.card_images = self.adapters / "images"  # the samples that it shows
        self.samples = root / "samples"
        self.truths = self.samples / "truth"  # what samples ought to look like, where that is known
        self.references = self.samples / "references"  # what the model is shown for them
        self.before_after = root / "before_after.png"
        self.grid = root / "grid"  # pictures of each step's adapter, drawn afterwards
        self.sheet = self.grid / "grid.png"  # all of these
        self.metrics = root / "metrics.jsonl"  # one JSON object a step
        self.original = root / "original.jsonl"  # the log of the run that this one was forked from, as it was then
        self.mirror = root / "mirror.json"  # the name that the run has where it is copied to (checkpoint.mirror)
        self.phases = root / "phases.jsonl"  # one for each long piece of work
        self.alive = root / "alive.json"  # the last sign of life; gone where the run has ended
        self.report = root / "report.html"
        self.tensorboard = root / "tensorboard"
        self.cache = root / "cache"  # encoded photos and captions, where data.cache_dir names no other folder

    def samples_of(self, step: int) -> Path:
        """The folder of the samples of `step`."""
        return self.samples / folder_name(step)

    def superseded(self, after: int, again: int = 1) -> Path:
        """Results of steps beyond `after`, which a resumed run makes anew."""
        return self.root / f"{SUPERSEDED}{folder_name(after)}{f'-{again}' if again > 1 else ''}"

    def set_aside(self) -> list[Path]:
        """The folders of `superseded` that are there."""
        return sorted(self.root.glob(f"{SUPERSEDED}*"))

    def adapter_steps(self, name: str) -> list[int]:
        """Steps of the run `name` whose adapter is there: in a checkpoint, or in a file of its own."""
        file = re.compile(rf"{re.escape(name)}-(\d{{8}})(?:_\w+)?(?:\.safetensors)?")
        files = [int(match[1]) for path in self.adapters.glob("*") if (match := file.fullmatch(path.name))]
        saved = [step for path in self.checkpoints.glob("*") if (step := step_of(path.name)) is not None]
        return sorted({*files, *saved})

    def adapter_files(self, name: str) -> dict[int | None, Path]:
        """The diffusers files of the run `name` by the step whose adapter they hold; None: of the end, which comes last."""
        file = re.compile(rf"{re.escape(name)}(?:-(\d{{8}}))?\.safetensors")
        matches = ((path, match) for path in sorted(self.adapters.glob("*")) if (match := file.fullmatch(path.name)))
        files = {int(match[1]) if match[1] else None: path for path, match in matches}
        return dict(sorted(files.items(), key=lambda item: (item[0] is None, item[0])))

    def leftovers(self) -> list[Path]:
        """Files of a killed process that never got their names."""
        return [path for folder in (self.root, self.adapters, self.card_images) for path in folder.glob(".*.tmp")]

    def step_of_result(self, path: str, name: str) -> int | None:
        """The step after which no later one writes a file again: a sample, an adapter file with a step in its name; None for
        all others. path: below the root, with "/". name: of the run."""
        samples, adapters = (re.escape(each.relative_to(self.root).as_posix()) for each in (self.samples, self.adapters))
        if Path(path).parent in [each.relative_to(self.root) for each in (self.truths, self.references)]:
            return 0
        match = re.fullmatch(
            rf"{samples}/step-(\d{{8}})/[^/]+|{adapters}/{re.escape(name)}-(\d{{8}})(?:_\w+)?(?:\.safetensors|/[^/]+)", path
        )
        return None if match is None else int(match[1] or match[2])

    def results(self, name: str) -> dict[str, int]:
        """The files that steps of the run `name` left for good: their steps by their paths below the root, with "/"."""
        there = (p for folder in (self.samples, self.adapters) for p in folder.rglob("*") if p.is_file())
        paths = sorted(path.relative_to(self.root).as_posix() for path in there)
        return {path: step for path in paths if (step := self.step_of_result(path, name)) is not None}

    def end_files(self, name: str) -> list[str]:
        """What the end of the run `name` leaves, or a stop: adapter files, card and pictures, and last the report."""
        there = (*self.adapters.glob("*"), *self.adapters.glob("*/adapter_*"), *self.card_images.glob("*"))
        made = sorted(path for path in there if path.is_file())
        paths = [path.relative_to(self.root).as_posix() for path in (*made, self.before_after, self.report) if path.is_file()]
        return [path for path in paths if self.step_of_result(path, name) is None and not Path(path).name.startswith(".")]

    def later_results(self, name: str, after: int) -> list[Path]:
        """What the steps beyond `after` left of the run `name`: samples, adapter files (the end's, too), report."""
        step = re.compile(rf"step-(\d{{8}})|{re.escape(name)}-(\d{{8}})(?:_\w+)?(?:\.safetensors)?")
        end = re.compile(rf"{re.escape(name)}(?:\.safetensors|_\w+(?:\.safetensors)?)")
        later = [
            path
            for path in (*self.samples.glob("step-*"), *self.adapters.glob("*"))
            if ((match := step.fullmatch(path.name)) and int(match[1] or match[2]) > after) or end.fullmatch(path.name)
        ]
        return [*later, *(path for path in (self.report, self.before_after, self.card, self.card_images) if path.exists())]


# What a run leaves in its output folder, by name.
MADE_BY_RUNS = frozenset(path.parts[0] for path in vars(Layout(Path())).values() if path.parts)


def made_by_run(name: str) -> bool:
    """Whether a run leaves a file or folder of that name in its output folder."""
    return name in MADE_BY_RUNS or name.startswith(SUPERSEDED)


def holds_run(names: Collection[str]) -> bool:
    """Whether a folder of these files and folders is the output folder of a run."""
    of = Layout(Path())
    return of.config.name in names and (of.metrics.name in names or of.checkpoints.name in names)
