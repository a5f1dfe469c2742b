"""Adapters on a component: which layers get one, how it is put there, and the trainable weights as one object."""

from trainer.adapters.adapter import ADAPTER_NAME, Adapter
from trainer.adapters.injection import Method, inject
from trainer.adapters.targets import Rates, Rule, Target, adaptable_layers, match_targets

__all__ = ["ADAPTER_NAME", "Adapter", "Method", "Rates", "Rule", "Target", "adaptable_layers", "inject", "match_targets"]
