"""Dropouts, the limit of norms, stop steps: each changes exactly what it says. Resumed they are in test_resume_pairs.py."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import Workbench, built, metrics_of, take_step
from trainer import config as configs
from trainer.adapters.adapter import drawn_rows
from trainer.base.errors import UserError
from trainer.base.tensorfile import TensorFile
from trainer.checkpoint.state import PIECES, Saved
from trainer.resume import allowed_changes
from workbench.commands import launch

TARGETS = ["*attn1.to_q", "*attn1.to_k", "*attn1.to_v", "conv_in"]
ENCODER = {"component": "text_encoder", "match": "*self_attn.q_proj"}


def tree(bench: Workbench, out: str, **more: Any) -> dict[str, Any]:
    return bench.tree(
        **{
            "run__output_dir": str(bench.tmp / out), "run__max_steps": 4, "optimizer__lr": 1e-2, "adapter__targets": TARGETS,
            "step__accumulation": 2, "data__batch_size": 1,
        } | more
    )  # fmt: skip


def train(bench: Workbench, out: str, resume_from: str | None = None, allow: str | None = None, **more: Any) -> Path:
    allowed = allowed_changes.parse(allow, resume_from)
    launch.train(configs.parse(tree(bench, out, **more)), resume_from=resume_from, allowed=allowed)
    step = more.get("run__stop_after", more.get("run__max_steps", 4))
    return bench.tmp / out / "checkpoints" / f"step-{step:08d}"


@pytest.mark.slow
def test_what_is_written_out_and_off_changes_no_byte(bench: Workbench) -> None:
    """A limit that nothing reaches and a stop at the last step, too."""
    rules = {"adapter__rules": [{"component": "unet", "match": "conv_in"}], "run__max_steps": 2}
    plain = train(bench, "plain", **rules)
    off = train(bench, "off", adapter__rank_dropout=0.0, adapter__module_dropout=0.0, adapter__max_norm=1e9, **rules)
    for name in ("adapter.safetensors", "optimizer.safetensors"):
        assert (plain / name).read_bytes() == (off / name).read_bytes(), name
    told = metrics_of(bench.tmp / "off")
    assert [line.pop("layers_limited") for line in told] == [0] * 2
    assert told == metrics_of(bench.tmp / "plain")
    late = train(bench, "late", **rules | {"adapter__rules": [rules["adapter__rules"][0] | {"stop_step": 2}]})
    one, other = (TensorFile(folder / "adapter.safetensors").read_all() for folder in (plain, late))
    # Another group of the optimizer: its kernel may cut the same elements into other pieces, no more.
    assert one.keys() == other.keys() and all(torch.allclose(one[name], other[name], rtol=1e-6, atol=1e-9) for name in one)


@pytest.mark.slow
def test_the_expected_update_is_the_whole_one() -> None:
    """Exactly: over every outcome of a layer of rank 3, weighed with its probability; and the draws have these shares."""
    p, q = 0.3, 0.25
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 5), (4, 3)))
    expected = torch.zeros(4, 5, dtype=torch.float64)
    outcomes = []
    for module, *ranks in itertools.product((0, 1), repeat=4):
        probability = ((1 - q) if module else q) * math.prod((1 - p) if kept else p for kept in ranks)
        rows = module * torch.tensor(ranks, dtype=torch.float64) / ((1 - p) * (1 - q))
        expected += probability * (b @ (rows[:, None] * a))
        outcomes.append(rows)
    assert torch.allclose(expected, b @ a, rtol=1e-14, atol=0)
    counts = dict.fromkeys(range(16), 0)
    draws = 4000
    for step in range(draws):
        rows = drawn_rows({"unet.a": 3}, rank_dropout=p, module_dropout=q, seed=1, step=step, micro_batch=0)["unet.a"]
        (place,) = [i for i, each in enumerate(outcomes) if torch.allclose(each.float(), rows)][:1]
        counts[place] += 1
    # Outcomes without any row are one and the same: the first. Pearson's chi-squared over the 8 that differ.
    share = [float(q + (1 - q) * p**3)]
    some = list(itertools.product((0, 1), repeat=3))[1:]
    share += [(1 - q) * math.prod((1 - p) if kept else p for kept in ranks) for ranks in some]
    seen = [counts[0], *(counts[9 + i] for i in range(7))]
    assert sum(seen) == draws
    chi = sum((n - draws * s) ** 2 / (draws * s) for n, s in zip(seen, share, strict=True))
    assert chi < 24.3  # 0.999 of chi-squared with 7 degrees of freedom


def test_a_draw_is_of_seed_step_micro_batch_and_layer() -> None:
    def rows(seed=0, step=1, micro_batch=0, layer="unet.a"):
        drawn = drawn_rows({layer: 64}, rank_dropout=0.5, module_dropout=0.0, seed=seed, step=step, micro_batch=micro_batch)
        return drawn[layer]

    assert torch.equal(rows(), rows())
    others = rows(seed=1), rows(step=2), rows(micro_batch=1), rows(layer="unet.b")
    assert len({tuple(drawn.tolist()) for drawn in (rows(), *others)}) == 5


@pytest.mark.slow
@pytest.mark.parametrize("target", ["*attn1.to_q", "conv_in"])
def test_forward_and_gradients_are_those_of_dense_autograd(bench: Workbench, target: str) -> None:
    """fp64 autograd over W + s B (rows A), with the rows that were drawn; other layers share nothing meanwhile."""
    config = tree(bench, "out", adapter__targets=[target], adapter__rank_dropout=0.5, adapter__module_dropout=0.1)
    with built(configs.parse(config)) as run:
        name, layer = next(iter(run.adapter.layers.items()))
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        torch.nn.init.normal_(b)
        layer.mark_stale()
        base, s = layer.get_base_layer(), layer.scaling["default"]
        convolution = a.dim() == 4
        x = torch.randn((2, a.shape[1], 8, 8) if convolution else (2, 5, a.shape[1]), requires_grad=True)
        told = run.step.training
        for step in range(1, 4):
            with told(step, 0):
                rows = layer.current.rows.double()
                right = drawn_rows({name: len(a)}, rank_dropout=0.5, module_dropout=0.1, seed=7, step=step, micro_batch=0)
                assert torch.equal(rows.float(), right[name])
                y = layer(x)
                g = torch.randn_like(y)
                grads = torch.autograd.grad(y, (x, a, b), g)
            x64, a64, b64 = (t.detach().double().requires_grad_() for t in (x, a, b))
            update = (b64.flatten(1) @ (rows[:, None] * a64.flatten(1))).view(base.weight_shape)
            weight = base.dequantize(torch.float32).double() + s * update
            bias = None if base.bias is None else base.bias.double()
            if convolution:
                y64 = torch.nn.functional.conv2d(x64, weight, bias, padding=1)
            else:
                y64 = torch.nn.functional.linear(x64, weight, bias)
            for one, other in zip((y, *grads), (y64, *torch.autograd.grad(y64, (x64, a64, b64), g.double())), strict=True):
                assert (one.double() - other).abs().max() <= 1e-5 * other.abs().max().clamp_min(1), step
        assert layer.current.rows is None and not layer.training, "off again"


@pytest.mark.slow
def test_each_micro_batch_of_a_step_has_the_draws_of_its_own(bench: Workbench) -> None:
    """The rows of rank dropout are drawn for (step, micro-batch), and the dropout of inputs is on: both while a step trains,
    and neither after it."""
    more = {"adapter__targets": ["conv_in"], "adapter__rank_dropout": 0.5, "adapter__dropout": 0.5}
    with built(configs.parse(tree(bench, "out", **more))) as run:
        ((name, layer),) = run.adapter.layers.items()
        seen: list[tuple[torch.Tensor, bool]] = []
        layer.register_forward_pre_hook(lambda *_: seen.append((layer.current.rows.clone(), layer.training)))
        for step, update in zip((1, 2), run.updates(), strict=False):
            take_step(run, step, update)
        places = [(step, micro_batch) for step in (1, 2) for micro_batch in (0, 1)]
        drawn = [
            drawn_rows({name: 4}, rank_dropout=0.5, module_dropout=0.0, seed=7, step=step, micro_batch=number)[name]
            for step, number in places
        ]
        assert len(seen) == 4 and all(torch.equal(rows, right) for (rows, _), right in zip(seen, drawn, strict=True))
        assert all(on for _, on in seen) and not layer.training and layer.current.rows is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_limit_is_that_of_the_dense_norm(bench: Workbench, kind: str) -> None:
    """As kohya's sd-scripts: up and down by the root of limit / ||s B A||, where that is below 1, and else not a bit."""
    config = tree(bench, "out", adapter__max_norm=0.5, adapter__type=kind, adapter__rslora=True)
    with built(configs.parse(config)) as run:
        parameters = run.adapter.named_parameters()
        generator = torch.Generator().manual_seed(0)
        for index, (name, parameter) in enumerate(parameters.items()):
            if name.endswith("lora_B.weight"):
                with torch.no_grad():
                    parameter.normal_(0, 10.0 ** (-index % 5 - 3), generator=generator)
        run.adapter.mark_stale()
        before = {name: p.detach().clone() for name, p in parameters.items()}
        limited = run.step.after_update(1)["layers_limited"]
        above = 0
        for layer, module in run.adapter.layers.items():
            a, b = (f"{layer}.lora_{x}.weight" for x in "AB")
            norm = (module.scaling["default"] * before[b].double().flatten(1) @ before[a].double().flatten(1)).norm()
            above += bool(norm > 0.5)
            ratio = float((0.5 / norm).sqrt()) if norm > 0.5 else 1.0
            for name in (a, b):
                if ratio == 1:
                    assert torch.equal(parameters[name], before[name])
                else:
                    assert torch.allclose(parameters[name].double(), before[name].double() * ratio, rtol=1e-5, atol=0)
            now = (module.scaling["default"] * parameters[b].double().flatten(1) @ parameters[a].double().flatten(1)).norm()
            assert now <= 0.5 * (1 + 1e-5) or ratio == 1
            assert module.stale, "what follows from A and B is made anew"
        assert limited == above and 0 < above < len(run.adapter.layers)
        magnitudes = [name for name in parameters if name.endswith("vector")]
        assert (kind == "dora") == bool(magnitudes) and all(torch.equal(parameters[n], before[n]) for n in magnitudes)


@pytest.mark.parametrize("optimizer", ["adamw8bit", pytest.param("adamw", marks=pytest.mark.slow)])
def test_a_stopped_part_moves_no_more(bench: Workbench, optimizer: str) -> None:
    """Neither by gradients nor by decay, momentum or the schedule, nor what the optimizer keeps of it; the rest goes on."""
    more = {"adapter__rules": [ENCODER | {"stop_step": 2}], "adapter__type": "dora", "optimizer__weight_decay": 0.5,
            "optimizer__name": optimizer, "schedule__name": "cosine"}  # fmt: skip
    with built(configs.parse(tree(bench, "out", **more))) as run:
        named = run.adapter.named_parameters()
        encoder = [name for name in named if name.startswith("text_encoder.")]
        seen = []
        for step, update in zip(range(1, 5), run.updates(), strict=False):
            assert take_step(run, step, update).updated
            kept = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in run.state.optimizer.state_dict().items()}
            seen.append(({name: p.detach().clone() for name, p in named.items()}, kept))
        groups = run.step.optimizer.param_groups
        stopped = [i for i, group in enumerate(groups) if "stop_step" in group]
        assert len(groups) == 4 and stopped == [2, 3] and all(group["params"] for group in groups)
        for (now, kept), (then, kept_then), same in zip(seen[1:], seen, (False, True, True), strict=False):
            for name in named:
                assert torch.equal(now[name], then[name]) == (same and name in encoder), name
            for key, value in kept.items():
                of_stopped = int(key.split("|")[0].split(".")[1]) in stopped
                equal = torch.equal(value, kept_then[key]) if isinstance(value, torch.Tensor) else value == kept_then[key]
                if of_stopped:
                    assert equal == same or "qmap" in key, key
        assert not any(named[name].requires_grad or named[name].grad.any() for name in encoder)
        module = run.model.modules["text_encoder"]
        assert not any(p.requires_grad for p in module.parameters()), "it gets no backward pass any more"


@pytest.mark.slow
def test_a_stopped_part_is_limited_no_more_even_where_no_micro_batch_came(bench: Workbench) -> None:
    """A process without one must leave the part as the others do, though nothing switched its gradients off there."""
    more = {"adapter__rules": [{"component": "unet", "match": "conv_in", "stop_step": 2}], "adapter__max_norm": 0.5}
    with built(configs.parse(tree(bench, "out", **more))) as run:
        named = run.adapter.named_parameters()
        for step, limited in ((2, len(run.adapter.layers)), (3, len(run.adapter.layers) - 1)):
            with torch.no_grad():
                for parameter in named.values():
                    parameter.fill_(1.0)
            assert run.step.after_update(step)["layers_limited"] == limited
            assert all(parameter.requires_grad for parameter in named.values())
            unscaled = {name.partition(".lora_")[0] for name, p in named.items() if torch.equal(p, torch.ones_like(p))}
            assert unscaled == ({"unet.conv_in"} if step == 3 else set())


@pytest.mark.slow
def test_a_stop_step_may_come_in_mid_run(bench: Workbench) -> None:
    train(bench, "out", run__stop_after=2, adapter__rules=[ENCODER])
    with pytest.raises(UserError, match="--allow adapter.rules"):
        train(bench, "out", "auto", adapter__rules=[ENCODER | {"stop_step": 2}])
    folder = train(bench, "out", "auto", "adapter.rules", adapter__rules=[ENCODER | {"stop_step": 2}])
    then = TensorFile(bench.tmp / "out/checkpoints/superseded-step-00000002/adapter.safetensors").read_all()
    now = TensorFile(folder / "adapter.safetensors").read_all()
    for name in now:
        assert torch.equal(now[name], then[name]) == name.startswith("text_encoder."), name
    assert Saved(folder, PIECES).pieces["config"]["state"]["adapter"]["rules"][0]["stop_step"] == 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"adapter__type": "dora", "adapter__rank_dropout": 0.1}, "adapter.rank_dropout = 0.1 cannot be combined"),
        ({"adapter__type": "dora", "adapter__module_dropout": 0.1}, "the rows would not have the magnitudes' lengths"),
        ({"adapter__rank_dropout": 1.0}, "adapter.rank_dropout"),
        ({"adapter__max_norm": 0.0}, "adapter.max_norm"),
        ({"adapter__rules": [{"component": "unet", "match": "*", "stop_step": 0}]}, "stop_step"),
        (
            {"adapter__rules": [{"component": "unet", "match": p, "stop_step": 3} for p in TARGETS]},
            "every adapted layer stops by step 3, and run.max_steps = 4: nothing would be trained after that",
        ),
        (
            {"adapter__rules": [{"component": "unet", "match": p, "stop_step": 1} for p in TARGETS]}
            | {"run__max_steps": None, "run__epochs": 9},
            r"every adapted layer stops by step 1, and run.epochs = 9 is \d+ steps: nothing would be trained after that",
        ),
    ],
)
def test_what_cannot_be_is_refused(bench: Workbench, more: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        train(bench, "out", **more)
    assert not (bench.tmp / "out").exists()
