"""The outcome of a whole run in tables for people: the change of the weights, and other effects."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from trainer import quantization
from trainer.adapters import export
from trainer.adapters.portable import of_adapter
from trainer.base.files import Advance, no_progress
from trainer.base.pictures import is_sound, pngs
from trainer.base.run_layout import Layout, plain_request
from trainer.base.tensorfile import TensorFile
from trainer.checkpoint.state import Progress
from trainer.engine.assembly import TrainState
from trainer.engine.components import Components
from trainer.monitoring.weight_change import BlockChange
from trainer.plan.run_plan import RunPlan
from trainer.resume.initial_adapter import Start
from trainer.runtime.context import RunContext
from trainer.runtime.precision import COMPUTE_DTYPES


@dataclass(frozen=True)
class Outcome:
    """The outcome of one start of a run. start: the weights that the run began with."""

    plan: RunPlan
    components: Components
    context: RunContext
    progress: Progress
    start: Start

    def tables(
        self, state: TrainState, moved: Mapping[str, BlockChange], files: Mapping[str, Path]
    ) -> dict[str, dict[str, Any]]:
        """The sections of a page, by title. moved: the change of each block. files: the adapter files, by format."""
        sections: dict[str, dict[str, Any]] = {
            "Did it take?": change_table(moved, drifts=state.adapter.kind.magnitudes),
            "Effect": {"columns": ["what", "value"], "rows": self.effects(state, files)},
        }
        if self.progress.changes:
            changes = [
                [change["step"], "-" if change["epoch"] is None else change["epoch"] + 1, line]
                for change in self.progress.changes
                for line in change["what"]
            ]
            sections["Changed in mid-run"] = {"columns": ["after step", "new epoch", "what"], "rows": changes}
        if self.components.storage:
            sections["Frozen weights"] = {
                "columns": ["component", *quantization.REPORT_COLUMNS],
                "rows": [[component, *stored.row()] for component, stored in self.components.storage.items()],
            }
        return sections

    def effects(self, state: TrainState, files: Mapping[str, Path]) -> list[list[Any]]:
        """The rows on samples, files and skipped updates. files: the adapter files, by format."""
        phases, rows = self.context.phases, []
        for before, after, _ in sample_triples(self.context.layout, self.progress.step):
            rows.append([f"sample {after.stem} moved by (relative L2 of pixels)", f"{image_distance(before, after):.3%}"])
        for ending, used in state.weights_for_use().items():
            of_average = ", average" if ending else ""
            file = files.get(f"diffusers{of_average}")
            if file is None:
                continue
            with phases("reading the adapter file back", file.stat().st_size, "B") as phase, used():
                whole = of_adapter(state.adapter, state.norms.now(), "magnitude", lambda count: phase.check())
                layers = whole.rounded(dtype := COMPUTE_DTYPES[self.plan.config.export.dtype])
                if dtype != torch.float32:
                    loss, name = whole.distance(layers)
                    title = f"export.dtype = {self.plan.config.export.dtype!r} takes of a layer's change{of_average}, at most"
                    rows.append([title, f"{loss:.3%} ({name})"])
                layers, _ = layers.parted(self.plan.model.family.adapters.peft)
                live = {name: tensor.make() for name, tensor in export.diffusers_tensors(layers).items()}
                read = read_back(file, live, phase.advance)
            magnitudes = " (magnitudes: as made for the file's base)" if state.adapter.kind.magnitudes else ""
            rows.append([f"exported file, read back, against the live adapter{of_average}{magnitudes}", read])
        if self.start.path:
            rows.append(["changes are measured from the weights of adapter.init_from", self.start.name])
        if self.progress.non_finite:
            skipped = f"{self.progress.non_finite} of {self.progress.step}"
            rows.append(["updates skipped because a value was not finite (see metrics.jsonl)", skipped])
        return rows


def change_table(changes: Mapping[str, BlockChange], *, drifts: bool) -> dict[str, Any]:
    """The section "Did it take?". drifts: whether the adapter has magnitudes."""
    columns = ["block", "layers", "largest ||dW||/||W||", "median"] + (["drift of a row's magnitude"] if drifts else [])
    rows = [
        [block, c.layers, f"{c.largest:.3%}", f"{c.median:.3%}"] + ([f"{c.drift:.3%}"] if drifts else [])
        for block, c in changes.items()
    ]
    return {"columns": columns, "rows": rows}


def read_back(path: Path, live: Mapping[str, torch.Tensor], advance: Advance = no_progress) -> str:
    """'equal' if the exported file, read back, holds the live tensors bit for bit; else the first difference. advance:
    called with the number of bytes just read; may raise."""
    file = TensorFile(path)
    if file.entries.keys() != live.keys():
        return f"keys differ: {sorted(file.entries.keys() ^ live.keys())[0]}"
    for name, tensor in live.items():
        if not torch.equal(file.read(name, advance), tensor.cpu()):
            return f"{name} differs"
    return "equal"


def sample_triples(layout: Layout, step: int) -> list[tuple[Path, Path, Path | None]]:
    """(before training, after `step`, the truth if known): the files of each request, with the weights or their average."""
    first, truths = by_request(layout.samples_of(0)), by_request(layout.truths)
    after = [(plain_request(request), path) for request, path in by_request(layout.samples_of(step)).items()]
    return [(first[request], path, truths.get(request)) for request, path in after if request in first]


def by_request(folder: Path) -> dict[str, Path]:
    """The sound PNGs of a folder by their request (the PNG's text "request"), in the files' order."""
    files = {}
    for path in filter(is_sound, pngs(folder)):
        with Image.open(path) as image:
            if "request" in image.info:
                files[image.info["request"]] = path
    return files


def image_distance(before: Path, after: Path) -> float:
    """The relative L2 distance of two images' pixels in [0, 1]."""

    def pixels(path: Path) -> torch.Tensor:
        image = Image.open(path).convert("RGB")
        return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).float() / 255

    a, b = pixels(before), pixels(after)
    return float((b - a).norm() / a.norm().clamp_min(1e-12))
