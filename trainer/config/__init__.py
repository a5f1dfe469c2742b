"""The TOML contract: tables.py has the keys, reading.py the way from a file to them."""

from trainer.config.reading import dumps, flatten, generic, known_keys, load, near_miss, parse, read_resolved, tree
from trainer.config.tables import (
    ComponentTable,
    Config,
    DataTable,
    ObjectiveTable,
    OptimizerTable,
    Resolutions,
    SampleTable,
    ScheduleTable,
    Table,
    expand_home,
)

__all__ = [
    "ComponentTable", "Config", "DataTable", "ObjectiveTable", "OptimizerTable", "Resolutions", "SampleTable",
    "ScheduleTable", "Table",
    "dumps", "expand_home", "flatten", "generic", "known_keys", "load", "near_miss", "parse", "read_resolved", "tree",
]  # fmt: skip
