"""A reference trainer for LoRA and DoRA adapters on SDXL and Flux.

The Python API (docs/api.md) is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.run.session import Session as Session
    from trainer.run.session import load_config as load_config
    from trainer.runtime.peft_dora import accelerate_peft_dora as accelerate_peft_dora

__version__ = "0.1.0"
__all__ = ["Session", "accelerate_peft_dora", "load_config"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("trainer.runtime.peft_dora" if "peft" in name else "trainer.run.session"), name)
