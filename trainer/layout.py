"""Every path under a run's output folder, by name. docs/resume.md shows the tree."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


def folder_name(step: int) -> str:
    """The folder of a step's checkpoint or samples."""
    return f"step-{step:08d}"


@dataclass(frozen=True)
class Layout:
    """root: run.output_dir."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.root / "config.toml"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def adapters(self) -> Path:
        """NAME.safetensors of the end, NAME-STEP.safetensors of a step; for other readers with _FORMAT behind."""
        return self.root / "adapters"

    @property
    def samples(self) -> Path:
        return self.root / "samples"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.root / "metrics.jsonl"

    @property
    def phases(self) -> Path:
        """One JSON object for each long piece of work."""
        return self.root / "phases.jsonl"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def cache(self) -> Path:
        """Encoded photos and captions, where data.cache_dir names no other folder."""
        return self.root / "cache"

    def samples_of(self, step: int) -> Path:
        return self.samples / folder_name(step)

    def superseded(self, after: int, again: int = 1) -> Path:
        """Results of steps beyond `after`, which a resumed run makes anew."""
        return self.root / f"superseded-after-{folder_name(after)}{f'-{again}' if again > 1 else ''}"

    def leftovers(self) -> list[Path]:
        """Files of a killed process that never got their names."""
        return [path for folder in (self.root, self.adapters) for path in folder.glob(".*.tmp")]

    def later_results(self, name: str, after: int) -> list[Path]:
        """What the steps beyond `after` left of the run `name`: samples, adapter files (the end's, too), the report."""
        step = re.compile(rf"step-(\d{{8}})|{re.escape(name)}-(\d{{8}})(?:_\w+)?\.safetensors")
        end = re.compile(rf"{re.escape(name)}(?:_\w+)?\.safetensors")
        later = [
            path
            for path in (*self.samples.glob("step-*"), *self.adapters.glob("*"))
            if ((found := step.fullmatch(path.name)) and int(found[1] or found[2]) > after) or end.fullmatch(path.name)
        ]
        return [*later, *([self.report] if self.report.exists() else [])]
