"""Checks a config's optimizer options, betas and eps against the optimizer's library."""

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trainer.base import patterns
from trainer.base.errors import UserError, shown
from trainer.optim.table import build_optimizer, optimizer_named

# Keywords of the libraries that are no options -> the config key to set instead; "": the trainer sets it.
ELSEWHERE = {
    "lr": "optimizer.lr", "weight_decay": "optimizer.weight_decay", "warmup_steps": "schedule.warmup",
    **dict.fromkeys(("self", "params", "args", "optim_bits", "is_paged", "foreach", "fused", "capturable"), ""),
    **dict.fromkeys(("differentiable", "maximize", "min_8bit_size"), ""),
}  # fmt: skip
WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}


def library_of(name: str) -> str:
    """PACKAGE.CLASS of the optimizer `name`."""
    library = optimizer_named(name).library()
    return f"{library.__module__.partition('.')[0]}.{library.__name__}"


def options_of(name: str) -> dict[str, inspect.Parameter]:
    """The keywords that [optimizer.options] may have. Imports the library."""
    entry = optimizer_named(name)
    keywords = inspect.signature(entry.library().__init__).parameters
    reserved = {*ELSEWHERE, *entry.fixed, *(["betas"] if entry.betas else []), *(["eps"] if entry.eps else [])}
    return {
        key: parameter
        for key, parameter in keywords.items()
        if key not in reserved and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }


def check(name: str, *, betas: Sequence[float] | None, eps: float | None, options: Mapping[str, Any]) -> None:
    """Raises UserError for a keyword that the library does not have, and for a value that it refuses. Imports the library
    unless nothing is set. betas, eps: None if the optimizer has none."""
    entry = optimizer_named(name)
    if betas is not None and len(betas) != len(entry.betas or ()):
        defaults = list(entry.betas or ())
        raise UserError(f"optimizer.betas = {list(betas)}: {name} has {len(defaults)}; its defaults are {defaults}")
    settings = {f"optimizer.{key}": value for key, value in (("betas", betas), ("eps", eps)) if value is not None}
    settings |= {f"optimizer.options.{key}": value for key, value in options.items()}
    if not settings:
        return
    defaults = {"optimizer.betas": entry.betas, "optimizer.eps": entry.eps}
    defaults |= {f"optimizer.options.{key}": value for key, value in entry.presets.items()}
    allowed = options_of(name) if options else {}
    for key, value in options.items():
        _check_option(f"optimizer.options.{key} = {_text(value)}", key, value, allowed, name)
    text = ", ".join(f"{key} = {_text(value)}" for key, value in settings.items() if value != defaults.get(key))
    try:
        finite = _is_finite(name, betas=betas, eps=eps, options=options)
    except (ValueError, TypeError, RuntimeError, NotImplementedError, ArithmeticError) as error:
        raise UserError(f"{text}: {library_of(name)} refuses it: {error}") from error
    if not finite:
        raise UserError(f"{text}: with it two updates of {library_of(name)} give weights that are not finite")


def _is_finite(name: str, *, betas: Sequence[float] | None, eps: float | None, options: Mapping[str, Any]) -> bool:
    """Whether two updates of four weights and two magnitudes, the first at rate 0 as in a warm-up, leave finite numbers.
    Raises what the library raises: some check their keywords only in an update."""
    groups = [
        {"params": [nn.Parameter(torch.zeros(shape))], "lr": 0.0, "weight_decay": 0.0, "magnitudes": magnitudes}
        for shape, magnitudes in (((2, 2), False), ((2,), True))
    ]
    toy = build_optimizer(name, groups, betas=betas, eps=eps, options=options)
    for rate in (0.0, 1e-4):
        for group in toy.param_groups:
            group["lr"] = rate
            for parameter in group["params"]:
                parameter.grad.fill_(1.0)
        toy.step()
    if optimizer_named(name).modes:
        toy.eval()  # type: ignore[attr-defined]
        toy.train()  # type: ignore[attr-defined]
    return all(bool(p.isfinite().all()) for group in toy.param_groups for p in group["params"])


def _check_option(text: str, key: str, value: Any, allowed: Mapping[str, inspect.Parameter], name: str) -> None:
    if key in ("betas", "eps") and key not in allowed:
        raise UserError(f"{text}: write it as optimizer.{key}")
    if key in ELSEWHERE or key in optimizer_named(name).fixed:
        raise UserError(f"{text}: " + (f"set {ELSEWHERE[key]} instead" if ELSEWHERE.get(key) else "the trainer sets it"))
    if key not in allowed:
        hint = patterns.suggestion(key, allowed) if allowed else "it takes none"
        raise UserError(f"{text}: {library_of(name)} does not take it; {hint}")
    default, kinds = allowed[key].default, _kinds(allowed[key])
    if isinstance(default, tuple):
        if not isinstance(value, (list, tuple)) or len(value) != len(default) or not all(map(_is_number, value)):
            raise UserError(f"{text}: give a list of {len(default)} numbers; the library's default is {list(default)}")
    elif not any(_is_number(value) if kind is float else type(value) is kind for kind in kinds):
        raise UserError(f"{text}: give {' or '.join(WORDS[kind] for kind in kinds)}")
    elif (finds := optimizer_named(name).finds) and key in (finds.start, finds.factor) and not value > 0:
        raise UserError(f"{text}: give a number above 0; the library's default is {default:g}")


def _kinds(parameter: inspect.Parameter) -> list[type]:
    """The types of a keyword's values: its default's; for None those in its annotation, or else a number's."""
    if parameter.default is not None:
        return [type(parameter.default)]
    return [kind for kind in WORDS if kind.__name__ in str(parameter.annotation)] or [float]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _text(value: Any) -> str:
    return shown(list(value) if isinstance(value, tuple) else value)
