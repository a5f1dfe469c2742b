"""What the table says of an optimizer, against the optimizer itself."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from trainer.optim import OPTIMIZERS, build_optimizer, levers, libraries, state_bytes
from trainer.optim.options import options_of

# A and B of a Linear and of a convolution, and magnitudes: as an adapter has them.
SHAPES = [((8, 96), (64, 8), (8, 12, 3, 3), (40, 8, 1, 1)), ((64,), (1, 40, 1, 1))]


def adapter(seed: int = 0, rates: tuple[float, float] = (1e-2, 1e-2)) -> tuple[list[dict[str, Any]], list[nn.Parameter]]:
    """(groups, parameters) of those shapes, B zero, as at the start of a run."""
    made = torch.Generator().manual_seed(seed)
    parameters = [[nn.Parameter(torch.randn(shape, generator=made)) for shape in shapes] for shapes in SHAPES]
    for b in (parameters[0][1], parameters[0][3]):
        b.data.zero_()
    groups = [
        {"params": part, "lr": lr, "weight_decay": 0.0 if magnitudes else 0.1, "magnitudes": magnitudes}
        for part, lr, magnitudes in zip(parameters, rates, (False, True), strict=True)
    ]
    return groups, [*parameters[0], *parameters[1]]


PRODIGY = {"d0": 1e-3, "bias_correction": False}  # so that d grows within five updates


def gradients(step: int) -> list[torch.Tensor]:
    """One direction, and noise."""
    same, made = torch.Generator().manual_seed(99), torch.Generator().manual_seed(100 + step)
    shapes = [shape for part in SHAPES for shape in part]
    return [torch.randn(shape, generator=same) * 0.1 + torch.randn(shape, generator=made) * 0.02 for shape in shapes]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_an_update_takes_for_a_moment_on_a_cpu(name: str) -> None:
    """Counted where memory is given out, also below the operators of a library. Without oneDNN, which repacks 16-bit matrices
    on a CPU with AMX, and on others does not: muon's then take 1 MiB more here."""
    elements = 2**18
    matrix = torch.zeros(elements // 16, 16)
    groups = [{"params": [nn.Parameter(matrix)], "lr": 1e-3, "weight_decay": 0.01, "magnitudes": False}]
    optimizer = build_optimizer(name, groups)
    optimizer.step()  # makes the state
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.fill_(1.0)
    without = torch.backends.mkldnn.flags(enabled=False)
    with without, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        optimizer.step()
    there = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            there += event.nbytes()
            peak = max(peak, there)
    rows = 0 if OPTIMIZERS[name].flat else 2 * 4 * elements // 16  # of factors, as many as rows
    assert abs(there) <= 8 and OPTIMIZERS[name].cpu_scratch * elements == pytest.approx(peak, abs=2048 + rows)


def direct(name: str, weights: list[torch.Tensor], magnitudes: list[torch.Tensor]) -> list[torch.optim.Optimizer]:
    """The library used as its own documentation says, with what the table says it is given."""
    groups = [{"params": weights, "lr": 1e-2, "weight_decay": 0.1}, {"params": magnitudes, "lr": 1e-2, "weight_decay": 0.0}]
    if name == "adamw":
        return [torch.optim.AdamW(groups, fused=True)]
    if name == "muon":
        keys = {"lr": 1e-2, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
        return [torch.optim.Muon(weights, **keys), torch.optim.AdamW(magnitudes, lr=1e-2, weight_decay=0.0, fused=True)]
    if name == "adafactor":
        from transformers.optimization import Adafactor

        return [Adafactor(groups, scale_parameter=False, relative_step=False)]
    if name == "schedulefree_adamw":
        import schedulefree

        (optimizer := schedulefree.AdamWScheduleFree(groups)).train()
        return [optimizer]
    if name.endswith("8bit"):
        import bitsandbytes as bnb

        eight, full = {"lion8bit": ("Lion8bit", "Lion32bit")}.get(name, ("AdamW8bit", "AdamW32bit"))
        more = {"min_8bit_size": 1}
        return [
            getattr(bnb.optim, eight)(weights, lr=1e-2, weight_decay=0.1, **more),
            getattr(bnb.optim, full)(magnitudes, lr=1e-2, weight_decay=0.0),
        ]
    import pytorch_optimizer

    if name == "prodigy":
        for group in groups:
            group["lr"] = 1.0
        return [pytorch_optimizer.Prodigy(groups, safeguard_warmup=True, **PRODIGY)]
    return [{"lion": pytorch_optimizer.Lion, "came": pytorch_optimizer.CAME}[name](groups)]


@pytest.mark.parametrize(("decay", "tolerance"), [(0.0, 1e-5), (0.1, 1e-4)])
def test_prodigy_decays_as_the_formula_has_it(decay: float, tolerance: float) -> None:
    """Thirty updates against arXiv 2306.06101, algorithm 4, in fp64, as prodigyopt 1.1.2 has it: with decoupled decay, bias
    correction and safeguard. d grows from d0 within them."""
    steps, d0, (beta1, beta2) = 30, 1e-3, (0.9, 0.999)
    g, beta3 = torch.Generator().manual_seed(0), math.sqrt(beta2)
    start, target = (torch.randn(24, 8, generator=g, dtype=torch.float64) for _ in range(2))
    parameter = nn.Parameter(start.float())
    group = {"params": [parameter], "lr": 1.0, "weight_decay": decay, "magnitudes": False}
    optimizer = build_optimizer("prodigy", [group], options={"d0": d0})
    x, m, v, s = start.clone(), *(torch.zeros_like(start) for _ in range(3))
    d, numerator = d0, 0.0
    for step in range(1, steps + 1):
        slope = x - target
        rate = d * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        numerator = beta3 * numerator + d / d0 * rate * float((slope * (start - x)).sum())
        m, v = beta1 * m + (1 - beta1) * d * slope, beta2 * v + (1 - beta2) * (d * slope) ** 2
        s = beta3 * s + d / d0 * d * slope
        now = max(d, numerator / float(s.abs().sum()))
        x = x * (1 - decay * rate) - rate * m / (v.sqrt() + now * 1e-8)
        d = now
        parameter.grad.copy_(parameter.detach() - target)
        optimizer.step()
    assert d > 5 * d0 and optimizer.param_groups[0]["d"] == pytest.approx(d, rel=1e-4)
    assert float((parameter.detach() - x).norm() / (x - start).norm()) < tolerance


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_five_updates_are_those_of_the_library(name: str, monkeypatch) -> None:
    """With the adapter's own shapes, or with matrices where it needs matrices."""
    monkeypatch.setattr(libraries, "MIN_8BIT_SIZE", 1)
    if OPTIMIZERS[name].make is libraries.blockwise:  # it remembers ids of parameters that are gone, which come again
        from bitsandbytes.optim import GlobalOptimManager

        monkeypatch.setattr(GlobalOptimManager.get_instance(), "pid2config", {})
    rate = 1.0 if OPTIMIZERS[name].finds else 1e-2
    groups, ours = adapter(rates=(rate, rate))
    optimizer = build_optimizer(name, groups, options=PRODIGY if name == "prodigy" else {})
    _, theirs = adapter()
    views = [
        p if OPTIMIZERS[name].flat else nn.Parameter(p.data.reshape(p.shape[0], -1) if i < 4 else p.data.reshape(-1))
        for i, p in enumerate(theirs)
    ]
    references = direct(name, views[:4], views[4:])
    for step in range(5):
        for parameter, view, gradient in zip(ours, views, gradients(step), strict=True):
            parameter.grad.copy_(gradient)
            view.grad = gradient.reshape(view.shape).clone()
        optimizer.step()
        for reference in references:
            reference.step()
    _, before = adapter()
    for mine, view, start in zip(ours, views, before, strict=True):
        moved, expected = mine - start, view.view_as(mine) - start
        assert expected.abs().max() > 1e-3
        if name == "prodigy":  # it sums over all numbers, here in another order
            assert torch.allclose(moved, expected, rtol=1e-4, atol=1e-6)
        else:
            assert torch.equal(moved, expected)
    if name == "prodigy":
        d, expected = (each.param_groups[0]["d"] for each in (optimizer, *references))
        assert d == pytest.approx(expected, rel=1e-5) and d > 1.2 * PRODIGY["d0"]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("least", [1, 512, 10**6])
def test_what_the_plan_counts_is_what_is_kept(name: str, least: int, monkeypatch) -> None:
    monkeypatch.setattr(libraries, "MIN_8BIT_SIZE", least)
    groups, _ = adapter()
    optimizer = build_optimizer(name, groups)
    counted = state_bytes(name, optimizer)
    optimizer.step()
    assert counted == sum(t.nbytes for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))


def test_muon_leaves_out_the_groups_that_a_step_leaves_out() -> None:
    """As trainer/engine/step.py does it where a rule has a stop_step."""
    groups, parameters = adapter()
    optimizer = build_optimizer("muon", groups)
    for parameter in parameters:
        parameter.grad.fill_(1.0)
    before, every = [parameter.detach().clone() for parameter in parameters], optimizer.param_groups
    for off in range(2):
        optimizer.param_groups = [group | {"params": []} if place == off else group for place, group in enumerate(every)]
        optimizer.step()
        moved = [not torch.equal(parameter, was) for parameter, was in zip(parameters, before, strict=True)]
        assert moved == ([False] * 4 + [True] * 2 if off == 0 else [True] * 6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_betas_and_eps_are_the_librarys_own(name: str) -> None:
    entry = OPTIMIZERS[name]
    library = torch.optim.AdamW if name == "muon" else entry.library()
    taken = inspect.signature(library.__init__).parameters
    for key, said in (("betas", entry.betas), ("eps", entry.eps)):
        if said is not None:
            assert taken[key].default == said
        else:
            assert key not in taken or key in options_of(name)
    assert entry.presets.keys() <= options_of(name).keys()
    assert all(key in taken for key in entry.fixed)


@pytest.mark.slow
def test_no_library_is_imported_before_it_is_asked_for() -> None:
    """A run with one optimizer pays for no other's library."""
    code = "import sys, trainer.plan.optimizer_rules; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"bitsandbytes", "pytorch_optimizer", "schedulefree", "transformers"} & set(loaded)


def test_what_makes_its_updates_larger_is_named() -> None:
    assert levers("adamw") == "optimizer.lr"
    assert levers("prodigy") == "optimizer.options.d0 or d_coef"
