"""A checkpoint's pieces and files: tensors in NAME.safetensors, the frozen base's record in quantization.json, the rest in
state.json; no pickle."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from reprlib import repr as short
from typing import Any, Protocol, TypeVar

import torch

from trainer.base import files
from trainer.base.errors import UserError
from trainer.base.progress import QUIET, Phases
from trainer.base.tensorfile import TensorFile, serialize

# Version of the files; no other is read. Raise it when a piece moves to another file or a new one is added.
LAYOUT_VERSION = 6


@dataclass(frozen=True)
class Piece:
    """An entry of the census. version: raise it when the meaning of its state_dict changes. file: the file of its tensors;
    "": it has none. asked_by: the config key that requires an optional piece; "": every run has it."""

    name: str
    version: int = 1
    file: str = ""
    asked_by: str = ""


TENSOR_FILES = {name: f"{name}.safetensors" for name in ("adapter", "data", "norms", "optimizer")}
WITHOUT_TENSORS = ("config", "environment", "model", "origin", "progress", "quantization", "scaler", "schedule")
# The census: the pieces of every run. A config may require more (`Pieces`).
PIECES = {name: Piece(name, file=TENSOR_FILES.get(name, "")) for name in (*TENSOR_FILES, *WITHOUT_TENSORS)}
STATE, QUANTIZATION = "state.json", "quantization.json"


class Provider(Protocol):
    """A piece of a run. Its state is tensors and JSON values by name."""

    def state_dict(self) -> Mapping[str, Any]:
        """The current state: tensors and JSON values by name."""

    def load_state_dict(self, state: dict[str, Any]) -> object:
        """Restore such a state, or check it against this run. Raises UserError if it does not fit."""


@dataclass
class Progress:
    """A run's progress.

    step: attempted updates. images: samples seen. non_finite: updates skipped because a value was not finite. total_steps:
    the schedule's frozen length. started: ISO date and time of the first start (UTC). changes: changes by --allow in
    mid-run, in order: {"step": the last step before, "what": lines of text, "epoch": the epoch, from 0, that begins with
    the next step; None: the current one goes on}. log: digest of the log's lines so far; "" before the first.
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
        """(the last step before, the first epoch, from 0) of the training on the current photos."""
        starts = [(change["step"], change["epoch"]) for change in self.changes if change["epoch"] is not None]
        return starts[-1] if starts else (0, 0)

    def state_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the fields. Raises ValueError for numbers that are no counts, and for malformed changes."""
        loaded = Progress(**state)
        counts = (loaded.step, loaded.images, loaded.non_finite, loaded.total_steps)
        if not all(type(count) is int and 0 <= count < 2**53 for count in counts):  # floats are exact up to there
            raise ValueError(f"counts are {short(counts)}")
        for change in loaded.changes:
            places = [change["step"], *([] if change["epoch"] is None else [change["epoch"]])]
            if not all(type(place) is int and 0 <= place <= loaded.step for place in places):
                raise ValueError(f"a change has {short(places)}")
            if not isinstance(change["what"], list) or not all(isinstance(line, str) for line in change["what"]):
                raise ValueError("a change does not say what")
        if not isinstance(loaded.log, str):
            raise ValueError(f"the log's digest is {short(loaded.log)}")
        datetime.fromisoformat(loaded.started)  # ValueError or TypeError if it is no date
        self.__dict__.update(loaded.__dict__)


@dataclass(frozen=True)
class Pin:
    """A piece that must equal the saved one. check: (saved, current) -> None; raises UserError with the differences."""

    value: Mapping[str, Any]
    check: Callable[[Mapping[str, Any], Mapping[str, Any]], object]

    def state_dict(self) -> Mapping[str, Any]:
        """This run's value."""
        return self.value

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check the saved value against this run's. Raises what `check` raises."""
        self.check(state, self.value)


def pack(providers: Mapping[str, Provider], census: Mapping[str, Piece] = PIECES) -> dict[str, list[memoryview | bytes]]:
    """A snapshot in host memory: the checkpoint's files by name. Raises ValueError unless the pieces match the census."""
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
    """The pieces of every run, and the optional ones that a checkpoint lists (`pieces` of its state.json)."""
    optional = {
        name: Piece(name, piece.get("version"), str(piece.get("file", "")), piece["asked_by"])
        for name, piece in listed.items()
        if isinstance(piece, dict) and isinstance(piece.get("asked_by"), str)
    }
    return optional | PIECES


class Saved:
    """A verified checkpoint, read piece by piece. census: the pieces that the config requires; None: the checkpoint's own
    pieces, for reading without resuming. Raises UserError if a piece is missing, malformed or of another version."""

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
        self._unrestored = set(self.pieces)

    def _disagreement(self, name: str) -> str:
        """The message about a piece that only the checkpoint or only the census has."""
        lacks = name in self.census
        key = self.census[name].asked_by if lacks else self.pieces[name].get("asked_by")
        if key:
            remedy = f"set {key} as it was when the run started, or start a new run (another run.output_dir)"
            return f"{'lacks' if lacks else 'has'} {name}, which {key} asks for: {remedy}"
        if lacks:
            return f"lacks {name}: it is not a whole checkpoint of this version"
        return f"has an unknown piece, {name}: go on with the version that wrote it"

    def values(self, name: str) -> dict[str, Any]:
        """A piece's state without tensors."""
        state = files.read_json(self.folder / QUANTIZATION) if name == "quantization" else self.pieces[name].get("state")
        if not isinstance(state, dict):
            raise UserError(f"{self.folder}: the state of {name} is not there or not a table")
        return state

    def state(self, name: str) -> dict[str, Any]:
        """A piece's state with tensors."""
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
        """Restore pieces from the checkpoint. Raises UserError if one does not fit this run."""
        for name, provider in providers.items():
            try:
                provider.load_state_dict(self.state(name))
            except UserError:
                raise
            except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
                raise UserError(f"{self.folder}: the state of {name} does not fit: {error!r:.500}") from error
            self._unrestored.discard(name)

    def finish(self) -> None:
        """Raises ValueError if a piece was not restored: the run would go on without it."""
        if self._unrestored:
            raise ValueError(f"{self.folder}: not restored: {', '.join(sorted(self._unrestored))}")


P = TypeVar("P", bound=Provider)


class Pieces:
    """The registered pieces of a run. saved: the checkpoint to resume, or None. census: the config's pieces."""

    def __init__(self, saved: Saved | None, census: Mapping[str, Piece] = PIECES) -> None:
        self.census = census
        self._saved, self._providers = saved, dict[str, Provider]()

    def enter(self, name: str, provider: P) -> P:
        """Register a piece, and restore it if the run is resumed. Raises UserError if the saved one does not fit."""
        self._providers[name] = provider
        if self._saved is not None:
            self._saved.restore(**{name: provider})
        return provider

    def complete(self) -> None:
        """Raises ValueError if a piece of the census or of the saved checkpoint was never entered."""
        missing = sorted(self.census.keys() - self._providers.keys())
        if missing:
            raise ValueError(f"never entered: {', '.join(missing)}")
        if self._saved is not None:
            self._saved.finish()

    def states(self, *, but: Collection[str] = ()) -> dict[str, Mapping[str, Any]]:
        """The current states of the pieces by name, except those named in `but`."""
        return {name: piece.state_dict() for name, piece in self._providers.items() if name not in but}

    def pack(self) -> dict[str, list[memoryview | bytes]]:
        """The checkpoint's files with the current state (`pack`)."""
        return pack(self._providers, self.census)
