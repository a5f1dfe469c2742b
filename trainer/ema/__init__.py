"""An average of the trained weights over the updates of a run."""

from trainer.ema.running import OF, Average

__all__ = ["OF", "Average", "described"]


def described(decay: float) -> str:
    """What adapter files say of it."""
    return f"constant, decay {decay:g}"
