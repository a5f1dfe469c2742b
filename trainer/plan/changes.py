"""Changes of config keys that save memory or switch a feature off."""

from collections.abc import Mapping
from typing import Any

from trainer.config import IntervalTable, StepTable

Keys = Mapping[str, Any]  # full name of a config key -> its new value


def keeps(remedy: str, step: StepTable) -> bool:
    """Whether this remedy (a name of memory.fit_by) changes no byte of a run, so that it may change on resume."""
    if remedy == "checkpointing":
        return step.compile == "none"  # compiled, a recomputed block sums in another order
    return remedy == "resident_blocks"


def never(name: str, table: IntervalTable) -> Keys:
    """The keys that switch off what the table `name` asks for at an interval."""
    return {f"{name}.every_steps": 0} | ({f"{name}.every_epochs": 0} if table.every_epochs else {})


def in_words(keys: Keys) -> str:
    """The keys as TOML, on one line."""
    return ", ".join(f"{key} = {v!r}" if isinstance(v, str) else f"{key} = {v}".lower() for key, v in keys.items())
