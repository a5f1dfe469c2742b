"""What a checkpoint is made of, and how it becomes files, by the names of pieces: tensors to NAME.safetensors, what the
frozen base is stored as to quantization.json, everything else to state.json. No pickle anywhere."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from reprlib import repr as short
from typing import Any, Protocol

import torch

from trainer.base import files
from trainer.base.errors import UserError
from trainer.base.progress import QUIET, Phases
from trainer.base.tensorfile import TensorFile, serialize

# Of the files, and the only one that is read; raise it when a piece moves to another file, or there is a new one.
LAYOUT_VERSION = 6


@dataclass(frozen=True)
class Piece:
    """One entry of the census. version: of its content; raise it when its state_dict changes its meaning. file: where its
    tensors go; "" for a piece without any. asked_by: the key that asks for an optional piece; "" for one of every run."""

    name: str
    version: int = 1
    file: str = ""
    asked_by: str = ""


TENSOR_FILES = {name: f"{name}.safetensors" for name in ("adapter", "data", "norms", "optimizer")}
WITHOUT_TENSORS = ("config", "environment", "model", "origin", "progress", "quantization", "scaler", "schedule")
# The census: what every run has. Pieces that a config asks for come beside them (`Pieces`).
PIECES = {name: Piece(name, file=TENSOR_FILES.get(name, "")) for name in (*TENSOR_FILES, *WITHOUT_TENSORS)}
STATE, QUANTIZATION = "state.json", "quantization.json"


class Provider(Protocol):
    """A piece of a run. What it gives is tensors and JSON values by name; it takes back exactly that."""

    def state_dict(self) -> Mapping[str, Any]:
        """The piece at this moment: JSON values, and tensors by name."""

    def load_state_dict(self, state: dict[str, Any]) -> object:
        """Take back what `state_dict` gave, or check what the run is pinned to. Raises UserError where it does not fit."""


@dataclass
class Progress:
    """How far a run is.

    step: attempted updates. images: samples seen. non_finite: updates skipped because a value was not finite. total_steps:
    the schedule's frozen length. started: ISO date and time of the first start (UTC). changes: what --allow changed in
    mid-run, in order: {"step": the last one before, "what": lines, "epoch": the one that begins with the next step, from 0;
    None where the present one goes on}. log: the digest of the log's lines up to here; "" before one is written.
    """

    step: int
    images: int
    non_finite: int
    total_steps: int
    started: str
    changes: list[dict[str, Any]] = field(default_factory=list)
    log: str = ""

    @property
    def began(self) -> tuple[int, int]:
        """(steps made before, epoch from 0) when the present photos came to be trained."""
        begun = [(change["step"], change["epoch"]) for change in self.changes if change["epoch"] is not None]
        return begun[-1] if begun else (0, 0)

    def state_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the fields back. Raises ValueError for what is no count, and for changes that are malformed."""
        loaded = Progress(**state)
        counts = (loaded.step, loaded.images, loaded.non_finite, loaded.total_steps)
        if not all(type(count) is int and 0 <= count < 2**53 for count in counts):  # up to there floats count exactly
            raise ValueError(f"counts are {short(counts)}")
        for change in loaded.changes:
            places = [change["step"], *([] if change["epoch"] is None else [change["epoch"]])]
            if not all(type(place) is int and 0 <= place <= loaded.step for place in places):
                raise ValueError(f"a change has {short(places)}")
            if not isinstance(change["what"], list) or not all(isinstance(line, str) for line in change["what"]):
                raise ValueError("a change does not say what")
        if not isinstance(loaded.log, str):
            raise ValueError(f"the log's digest is {short(loaded.log)}")
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
        """The value of this run."""
        return self.value

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check the saved value against this run's. Raises what `check` raises."""
        self.check(state, self.value)


def pack(providers: Mapping[str, Provider], census: Mapping[str, Piece] = PIECES) -> dict[str, list[memoryview | bytes]]:
    """A snapshot in host memory: the checkpoint's files by name. Raises ValueError where a piece of the census is left out,
    or one is not in it."""
    odd = sorted(providers.keys() ^ census.keys())
    if odd:
        raise ValueError(f"a checkpoint needs exactly {sorted(census)}; odd: {odd}")
    contents: dict[str, list[memoryview | bytes]] = {}
    pieces = {}
    for _, piece in sorted(census.items()):
        state = providers[piece.name].state_dict()
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        values = {key: value for key, value in state.items() if key not in tensors}
        pieces[piece.name] = {"version": piece.version, "state": values}
        if piece.asked_by:
            pieces[piece.name] |= {"asked_by": piece.asked_by, "file": piece.file}
        if piece.file:
            pieces[piece.name]["tensors"] = sorted(tensors)
            contents[piece.file] = list(serialize({k: t.detach().to("cpu", copy=True) for k, t in tensors.items()}))
        elif tensors:
            raise ValueError(f"{piece.name} has tensors, and no file for them: {sorted(tensors)}")
    contents[QUANTIZATION] = [files.json_bytes(pieces["quantization"].pop("state"))]
    contents[STATE] = [files.json_bytes({"layout": LAYOUT_VERSION, "pieces": pieces})]
    return contents


def own_census(listed: Mapping[str, Any]) -> dict[str, Piece]:
    """What every run has, and the optional pieces that a checkpoint itself lists (`pieces` of its state.json)."""
    optional = {
        name: Piece(name, piece.get("version"), str(piece.get("file", "")), piece["asked_by"])
        for name, piece in listed.items()
        if isinstance(piece, dict) and isinstance(piece.get("asked_by"), str)
    }
    return optional | PIECES


class Saved:
    """A verified checkpoint, read piece by piece. Each goes back to what it came from; `finish` sees to it that all did.
    census: what the config asks for; None: what the checkpoint has itself, to read it and not to go on from it. Raises
    UserError where a piece is missing, malformed, or of another version."""

    def __init__(self, folder: Path, census: Mapping[str, Piece] | None, phases: Phases = QUIET) -> None:
        self.folder, self.phases = folder, phases
        tree = files.read_json(folder / STATE)
        layout = tree.get("layout") if isinstance(tree, dict) else None
        if type(layout) is not int or layout != LAYOUT_VERSION:
            raise UserError(
                f"{folder} has checkpoint layout {short(layout)}, this version reads layout {LAYOUT_VERSION}; "
                "go on with the version that wrote it"
            )
        self.pieces = tree.get("pieces")
        if not isinstance(self.pieces, dict) or not all(isinstance(piece, dict) for piece in self.pieces.values()):
            raise UserError(f"{folder / STATE} is damaged: it lists no pieces")
        self.census = own_census(self.pieces) if census is None else census
        odd = sorted(self.pieces.keys() ^ self.census.keys())
        if odd:
            raise UserError(f"{folder} {self._disagreement(odd[0])}")
        for name, piece in self.pieces.items():
            if piece.get("version") != self.census[name].version:
                raise UserError(
                    f"{folder}: {name} has version {short(piece.get('version'))}, this version reads "
                    f"{self.census[name].version}; go on with the version that wrote it"
                )
        self._left = set(self.pieces)

    def _disagreement(self, name: str) -> str:
        """What is wrong with a piece that only one of checkpoint and census has."""
        lacks = name in self.census
        key = self.census[name].asked_by if lacks else self.pieces[name].get("asked_by")
        if key:
            remedy = f"set {key} as it was when the run started, or start a new run (another run.output_dir)"
            return f"{'lacks' if lacks else 'has'} {name}, which {key} asks for: {remedy}"
        if lacks:
            return f"lacks {name}: it is not a whole checkpoint of this version"
        return f"has an unknown piece, {name}: go on with the version that wrote it"

    def values(self, name: str) -> dict[str, Any]:
        """One piece's state without tensors."""
        state = files.read_json(self.folder / QUANTIZATION) if name == "quantization" else self.pieces[name].get("state")
        if not isinstance(state, dict):
            raise UserError(f"{self.folder}: the state of {name} is not there or not a table")
        return state

    def state(self, name: str) -> dict[str, Any]:
        """One piece's state, tensors included."""
        piece, state = self.pieces[name], self.values(name)
        if self.census[name].file:
            file = TensorFile(self.folder / self.census[name].file)
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
            self._left.discard(name)

    def finish(self) -> None:
        """Raises ValueError where a piece was not given back: the run would go on without it."""
        if self._left:
            raise ValueError(f"{self.folder}: not restored: {', '.join(sorted(self._left))}")
