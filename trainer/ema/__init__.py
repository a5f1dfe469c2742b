"""Averages of the trained weights over the updates of a run."""

from trainer.ema.power import power_function
from trainer.ema.running import Averages, NewShare, constant

__all__ = ["Averages", "NewShare", "constant", "described", "power_function", "weights_of"]

# EDM2's two, of which others are made; the first is sampled and exported.
LENGTHS = (0.10, 0.05)


def described(kind: str, decay: float) -> str:
    """What adapter files say of the average that is exported."""
    return f"constant, decay {decay:g}" if kind == "constant" else f"power function, length {LENGTHS[0]:g}"


def weights_of(kind: str, decay: float) -> dict[str, NewShare]:
    """The averages that `ema.kind` asks for, by their names; of power functions the names are the lengths."""
    if kind == "power":
        return {f"{length:.3f}": power_function(length) for length in LENGTHS}
    return {"constant": constant(decay)} if kind == "constant" else {}
