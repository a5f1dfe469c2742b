"""The pieces of a run's checkpoints. Each is entered where it is built, in one call that also restores it on a resume."""

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from trainer.checkpoint import state
from trainer.checkpoint.state import PIECES, Piece, Provider, Saved

P = TypeVar("P", bound=Provider)


class Pieces:
    """What a run's checkpoints are made of. saved: the checkpoint that the run goes on from, None for a fresh start.
    census: all that the run's config asks for."""

    def __init__(self, saved: Saved | None, census: Mapping[str, Piece] = PIECES) -> None:
        self.census = census
        self._saved, self._providers = saved, dict[str, Provider]()

    def enter(self, name: str, provider: P) -> P:
        """Have `provider` saved from now on, restored first where the run is resumed; returns it. Raises UserError where the
        saved piece does not fit."""
        self._providers[name] = provider
        if self._saved is not None:
            self._saved.restore(**{name: provider})
        return provider

    def complete(self) -> None:
        """Check that all pieces were entered. Raises ValueError where a piece of the census, or of the saved checkpoint,
        was left out."""
        missing = sorted(self.census.keys() - self._providers.keys())
        if missing:
            raise ValueError(f"never entered: {', '.join(missing)}")
        if self._saved is not None:
            self._saved.finish()

    def states(self, *, but: Collection[str] = ()) -> dict[str, Mapping[str, Any]]:
        """The pieces that are entered, as they are now, by name. but: names of those that are not wanted."""
        return {name: piece.state_dict() for name, piece in self._providers.items() if name not in but}

    def pack(self) -> dict[str, list[memoryview | bytes]]:
        """The checkpoint's files at this moment (state.pack)."""
        return state.pack(self._providers, self.census)
