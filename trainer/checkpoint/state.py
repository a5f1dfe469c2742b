"""What a run is made of, and how it becomes files: every piece by name, none optional.

adapter.safetensors, optimizer.safetensors, norms.safetensors: the tensors of those pieces. quantization.json: what the frozen
base is stored as. state.json: everything else. No pickle anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from reprlib import repr as short
from typing import Any, Protocol

import torch

from trainer import files
from trainer.errors import UserError
from trainer.phases import QUIET, Phases
from trainer.tensorfile import TensorFile, serialize

LAYOUT_VERSION = 4  # of the files; raise it when a piece moves to another one, or there is a new one

# The census: every piece of a run, with the version of its content. Raise that when its state_dict changes its meaning.
PIECES = {
    "adapter": 1,
    "config": 1,
    "data": 1,
    "environment": 1,
    "model": 1,
    "norms": 1,
    "optimizer": 1,
    "progress": 1,
    "quantization": 1,
    "scaler": 1,
    "schedule": 1,
}
TENSOR_FILES = {
    "adapter": "adapter.safetensors",
    "norms": "norms.safetensors",
    "optimizer": "optimizer.safetensors",
}
STATE, QUANTIZATION = "state.json", "quantization.json"


class Provider(Protocol):
    """A piece of a run. What it gives is tensors and JSON values by name; it takes back exactly that.

    `load_state_dict` raises UserError where the saved state is not of this run; what a run is pinned to (its config, its
    photos, its frozen base) has nothing to load and only compares.
    """

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> object: ...


@dataclass
class Progress:
    """Where a run stands.

    step: attempted updates. images: samples seen. non_finite: updates skipped because a value was not finite.
    total_steps: the schedule's frozen length. started: ISO date and time of the first start (UTC).
    """

    step: int
    images: int
    non_finite: int
    total_steps: int
    started: str

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        loaded = Progress(**state)
        counts = (loaded.step, loaded.images, loaded.non_finite, loaded.total_steps)
        if not all(type(count) is int and 0 <= count < 2**53 for count in counts):  # up to there floats count exactly
            raise ValueError(f"counts are {short(counts)}")
        datetime.fromisoformat(loaded.started)  # ValueError or TypeError where it is no date
        self.__dict__.update(loaded.__dict__)


@dataclass(frozen=True)
class Pin:
    """A piece that decides what the following steps do, and must be now what it was then.

    check: (saved, now) -> None; raises UserError, naming what differs.
    """

    value: Mapping[str, Any]
    check: Callable[[Mapping[str, Any], Mapping[str, Any]], object]

    def state_dict(self) -> Mapping[str, Any]:
        return self.value

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check(state, self.value)


def pack(providers: Mapping[str, Provider]) -> dict[str, list[memoryview | bytes]]:
    """A snapshot in host memory: the checkpoint's files by name, which later steps do not change.

    Raises ValueError where a piece of the census is left out, or one is not in it.
    """
    if providers.keys() != PIECES.keys():
        raise ValueError(
            f"a checkpoint needs exactly {sorted(PIECES)}; odd: {sorted(providers.keys() ^ PIECES.keys())}"
        )
    contents: dict[str, list[memoryview | bytes]] = {}
    pieces = {}
    for name, provider in sorted(providers.items()):
        state = provider.state_dict()
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        values = {key: value for key, value in state.items() if key not in tensors}
        pieces[name] = {"version": PIECES[name], "state": values}
        if name in TENSOR_FILES:
            pieces[name]["tensors"] = sorted(tensors)
            contents[TENSOR_FILES[name]] = list(
                serialize({k: t.detach().to("cpu", copy=True) for k, t in tensors.items()})
            )
        elif tensors:
            raise ValueError(f"{name} has tensors, and no file for them: {sorted(tensors)}")
    contents[QUANTIZATION] = [files.json_bytes(pieces["quantization"].pop("state"))]
    contents[STATE] = [files.json_bytes({"layout": LAYOUT_VERSION, "pieces": pieces})]
    return contents


class Saved:
    """A verified checkpoint, read piece by piece. Each goes back to what it came from; `finish` sees to it that all did.

    Raises UserError where a piece is missing, malformed, or of another version.
    """

    def __init__(self, folder: Path, phases: Phases = QUIET) -> None:
        self.folder, self.phases = folder, phases
        tree = files.read_json(folder / STATE)
        layout = tree.get("layout") if isinstance(tree, dict) else None
        if layout != LAYOUT_VERSION:
            raise UserError(
                f"{folder} has checkpoint layout {short(layout)}, this version reads {LAYOUT_VERSION}; "
                "go on with the version that wrote it"
            )
        self.pieces = tree.get("pieces")
        if not isinstance(self.pieces, dict) or not all(isinstance(piece, dict) for piece in self.pieces.values()):
            raise UserError(f"{folder / STATE} is damaged: it lists no pieces")
        odd = sorted(self.pieces.keys() ^ PIECES.keys())
        if odd:
            what = "lacks" if odd[0] in PIECES else "has an unknown piece,"
            raise UserError(f"{folder} {what} {odd[0]}: it is not a whole checkpoint of this version")
        for name, piece in self.pieces.items():
            if piece.get("version") != PIECES[name]:
                raise UserError(
                    f"{folder}: {name} has version {short(piece.get('version'))}, this version reads {PIECES[name]}; "
                    "go on with the version that wrote it"
                )
        self._left = set(PIECES)

    def state(self, name: str) -> dict[str, Any]:
        """One piece's state, tensors included."""
        piece = self.pieces[name]
        state = files.read_json(self.folder / QUANTIZATION) if name == "quantization" else piece.get("state")
        if not isinstance(state, dict):
            raise UserError(f"{self.folder}: the state of {name} is not there or not a table")
        if name in TENSOR_FILES:
            file = TensorFile(self.folder / TENSOR_FILES[name])
            listed = piece.get("tensors")
            if sorted(file.entries) != listed:
                names = {n for n in listed if isinstance(n, str)} if isinstance(listed, list) else set()
                odd = ", ".join(map(repr, sorted(file.entries.keys() ^ names)))
                raise UserError(f"{file.path} does not hold the tensors that {STATE} lists: {odd}")
            size = sum(entry.bytes for entry in file.entries.values())
            with self.phases(f"reading the checkpoint's {name}", size, "B") as phase:
                state = state | file.read_all(phase.advance)
        return state

    def restore(self, **providers: Provider) -> None:
        """Give pieces back. Raises UserError where one does not fit this run."""
        for name, provider in providers.items():
            try:
                provider.load_state_dict(self.state(name))
            except UserError:
                raise
            except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
                raise UserError(f"{self.folder}: the state of {name} does not fit: {error!r:.500}") from error
            self._left.remove(name)

    def finish(self) -> None:
        """Raises ValueError where a piece was not given back: the run would go on without it."""
        if self._left:
            raise ValueError(f"{self.folder}: not restored: {', '.join(sorted(self._left))}")
