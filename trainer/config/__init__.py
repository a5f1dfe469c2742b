"""The TOML contract: tables.py has the keys, reading.py the way from a file to them, mistakes.py what is said of the rest."""

from trainer.config.data_tables import DataTable, Resolutions
from trainer.config.keys import REMOVED, choices, drop_removed, fields, flatten, generic, known_keys, unread, whole
from trainer.config.kinds import IntervalTable, Table, expand_home
from trainer.config.mistakes import hint, near_miss
from trainer.config.reading import dumps, literal, load, override, parse, read_resolved, tree, with_values
from trainer.config.tables import (
    AdapterTable,
    ComponentTable,
    Config,
    LoggingTable,
    RuleTable,
    SampleTable,
    ValidationTable,
    against_graphs,
)
from trainer.config.training_tables import ObjectiveTable, OptimizerTable, ScheduleTable, StepTable

__all__ = [
    "REMOVED", "AdapterTable", "ComponentTable", "Config", "DataTable", "IntervalTable", "LoggingTable",
    "ObjectiveTable", "OptimizerTable", "Resolutions", "RuleTable", "SampleTable", "ScheduleTable", "StepTable",
    "Table", "ValidationTable", "against_graphs", "choices", "drop_removed", "dumps", "expand_home", "fields", "flatten",
    "generic", "hint", "known_keys", "literal", "load", "near_miss", "override", "parse", "read_resolved",
    "tree", "unread", "whole", "with_values",
]  # fmt: skip
