"""Keys of a config that are changed beside it: in words, and those that may be changed in mid-run."""

from collections.abc import Mapping
from typing import Any

from trainer.config import IntervalTable, StepTable

Keys = Mapping[str, Any]  # of a config, by their full names, and what they become


def keeps(remedy: str, step: StepTable) -> bool:
    """Whether what memory.fit changes by this name (memory.fit_by) changes no byte of a run: it may change in mid-run."""
    if remedy == "checkpointing":
        return step.compile == "none"  # a compiler makes other sums of a block that is recomputed
    return remedy == "resident_blocks"


def never(name: str, table: IntervalTable) -> Keys:
    """The keys that leave out what the table of that name asks for every so many steps or epochs."""
    return {f"{name}.every_steps": 0} | ({f"{name}.every_epochs": 0} if table.every_epochs else {})


def in_words(keys: Keys) -> str:
    """Keys as they stand in a config, side by side."""
    return ", ".join(f"{key} = {v!r}" if isinstance(v, str) else f"{key} = {v}".lower() for key, v in keys.items())
