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


AVERAGE = "_ema"  # suffix of the names of files made with averaged weights
SUPERSEDED = "superseded-after-"  # prefix of folders of results that were set aside


def plain_request(request: str) -> str:
    """A sample's request (the PNG's text "request") without the weights that it was drawn with."""
    # Safe, as in canonical JSON no string can contain this text.
    return request.replace(f', "weights": "{AVERAGE[1:]}"', "")


def in_use(cache: Path) -> Path:
    """The empty file in a cache folder whose locks tell which processes use the cache."""
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
        self.card_images = self.adapters / "images"  # samples shown by the card
        self.samples = root / "samples"
        self.truths = self.samples / "truth"  # target images of samples, if given
        self.references = self.samples / "references"  # reference images of samples
        self.before_after = root / "before_after.png"
        self.grid = root / "grid"  # images by each step's adapter, drawn afterwards
        self.sheet = self.grid / "grid.png"  # all of them in one
        self.metrics = root / "metrics.jsonl"  # one JSON object a step
        self.original = root / "original.jsonl"  # the log of the run that was forked, at that time
        self.mirror = root / "mirror.json"  # the run's name at the mirror (checkpoint.mirror)
        self.phases = root / "phases.jsonl"  # one JSON object a phase of long work
        self.alive = root / "alive.json"  # the last heartbeat; deleted when the run ends
        self.report = root / "report.html"
        self.tensorboard = root / "tensorboard"
        self.cache = root / "cache"  # encoded photos and captions, unless data.cache_dir is set

    def samples_of(self, step: int) -> Path:
        """The folder of the samples of `step`."""
        return self.samples / folder_name(step)

    def superseded(self, after: int, copy: int = 1) -> Path:
        """The folder for old results of steps beyond `after`, which a resumed run makes again."""
        return self.root / f"{SUPERSEDED}{folder_name(after)}{f'-{copy}' if copy > 1 else ''}"

    def set_aside(self) -> list[Path]:
        """The existing folders of `superseded`."""
        return sorted(self.root.glob(f"{SUPERSEDED}*"))

    def adapter_steps(self, name: str) -> list[int]:
        """The steps of the run `name` whose adapter is in a checkpoint or in a file of its own."""
        steps = [_step_of_adapter(path.name, name) for path in self.adapters.glob("*")]
        steps += [step_of(path.name) for path in self.checkpoints.glob("*")]
        return sorted({step for step in steps if step is not None})

    def adapter_files(self, name: str) -> dict[int | None, Path]:
        """The diffusers files of the run `name` by step; None: the final one, which comes last."""
        file = re.compile(rf"{re.escape(name)}(?:-(\d{{8}}))?\.safetensors")
        matches = ((path, match) for path in sorted(self.adapters.glob("*")) if (match := file.fullmatch(path.name)))
        files = {int(match[1]) if match[1] else None: path for path, match in matches}
        return dict(sorted(files.items(), key=lambda item: (item[0] is None, item[0])))

    def leftovers(self) -> list[Path]:
        """Temporary files of killed processes."""
        return [path for folder in (self.root, self.adapters, self.card_images) for path in folder.glob(".*.tmp")]

    def step_of_result(self, path: str, name: str) -> int | None:
        """The step that writes a file for the last time: a sample, or an adapter file with a step in its name; else None.
        path: below the root, with "/". name: the run's."""
        samples, adapters = (re.escape(each.relative_to(self.root).as_posix()) for each in (self.samples, self.adapters))
        if Path(path).parent in [each.relative_to(self.root) for each in (self.truths, self.references)]:
            return 0
        match = re.fullmatch(
            rf"{samples}/step-(\d{{8}})/[^/]+|{adapters}/{re.escape(name)}-(\d{{8}})(?:_\w+)?(?:\.safetensors|/[^/]+)", path
        )
        return None if match is None else int(match[1] or match[2])

    def results(self, name: str) -> dict[str, int]:
        """The `step_of_result` of each such file of the run `name`, by its path below the root, with "/"."""
        files = (path for folder in (self.samples, self.adapters) for path in folder.rglob("*") if path.is_file())
        names = sorted(path.relative_to(self.root).as_posix() for path in files)
        return {path: step for path in names if (step := self.step_of_result(path, name)) is not None}

    def end_files(self, name: str) -> list[str]:
        """The files written at the end or a stop of the run `name`: adapter files, card and images, and last the report."""
        files = (*self.adapters.glob("*"), *self.adapters.glob("*/adapter_*"), *self.card_images.glob("*"))
        ordered = (*sorted(files), self.before_after, self.report)
        paths = [path.relative_to(self.root).as_posix() for path in ordered if path.is_file()]
        return [path for path in paths if self.step_of_result(path, name) is None and not Path(path).name.startswith(".")]

    def later_results(self, name: str, after: int) -> list[Path]:
        """The results of the run `name` that steps beyond `after` wrote: samples, adapter files (final ones, too), report."""
        final = re.compile(rf"{re.escape(name)}(?:\.safetensors|_\w+(?:\.safetensors)?)")
        later = [path for path in self.samples.glob("step-*") if (step_of(path.name) or 0) > after]
        for path in self.adapters.glob("*"):
            if final.fullmatch(path.name) or (_step_of_adapter(path.name, name) or 0) > after:
                later.append(path)
        return [*later, *(path for path in (self.report, self.before_after, self.card, self.card_images) if path.exists())]


def _step_of_adapter(file: str, name: str) -> int | None:
    """The step in the name of an adapter file or folder of the run `name`; None for other names."""
    match = re.fullmatch(rf"{re.escape(name)}-(\d{{8}})(?:_\w+)?(?:\.safetensors)?", file)
    return None if match is None else int(match[1])


# Names of files and folders in a run's output folder.
MADE_BY_RUNS = frozenset(path.parts[0] for path in vars(Layout(Path())).values() if path.parts)


def made_by_run(name: str) -> bool:
    """Whether runs write a file or folder of that name into their output folder."""
    return name in MADE_BY_RUNS or name.startswith(SUPERSEDED)


def holds_run(names: Collection[str]) -> bool:
    """Whether a folder with entries of these names is the output folder of a run."""
    layout = Layout(Path())
    return layout.config.name in names and (layout.metrics.name in names or layout.checkpoints.name in names)
