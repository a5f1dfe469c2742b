"""A reference trainer for LoRA and DoRA adapters on SDXL and Flux.

`Session` and `load_config` are its door for Python (docs/api.md). They are imported when they are asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.run.session import Session as Session
    from trainer.run.session import load_config as load_config

__version__ = "0.1.0"
__all__ = ["Session", "load_config"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trainer.run import session

    return getattr(session, name)
