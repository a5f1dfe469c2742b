"""Tools around a run: commands, plans, pages, adapter files, imports, audits, replays, comparisons.

`trainer/` imports nothing of it. PORTS: the parts of it that a run uses (`commands/ports.py`).
"""

from typing import Any

__all__ = ["PORTS"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from workbench.commands.ports import PORTS

    return PORTS
