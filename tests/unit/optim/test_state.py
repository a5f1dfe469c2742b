"""The state of an optimizer: what comes back, and what is refused as another one's."""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.optimizers import ENTRIES
from trainer import optim
from trainer.base.errors import UserError
from trainer.optim import OPTIMIZERS, OptimizerState, libraries
from trainer.optim.state import weights_for_use
from trainer.optim.table import optimizer_named


@pytest.fixture(autouse=True)
def entered(monkeypatch) -> None:
    for name, entry in ENTRIES.items():
        monkeypatch.setitem(OPTIMIZERS, name, entry)
    monkeypatch.setattr(libraries, "MIN_8BIT_SIZE", 1)


def trained(name: str, steps: int = 2, device: str = "cpu") -> tuple[OptimizerState, list[nn.Parameter]]:
    """A matrix, a convolution and a vector, the vector in a group of its own."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, device=device)) for shape in ((3, 4), (2, 3, 3, 3), (300,))]
    groups = [
        {"params": part, "lr": 1e-2, "weight_decay": 0.1, "magnitudes": magnitudes}
        for part, magnitudes in ((parameters[:2], False), (parameters[2:], True))
    ]
    optimizer = optim.build_optimizer(name, groups)
    state = OptimizerState(optimizer, name)
    for _ in range(steps):
        step(state, parameters)
    return state, parameters


def step(state: OptimizerState, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad.copy_(parameter.detach().sin())
    state.optimizer.step()


def through_files(values: dict) -> dict:
    """Tensors as they are, all else as JSON."""
    return {k: v.clone() if isinstance(v, torch.Tensor) else json.loads(json.dumps(v)) for k, v in values.items()}


@pytest.mark.parametrize("name", [*OPTIMIZERS, *ENTRIES])
def test_what_is_restored_goes_on_as_what_was_saved(name: str) -> None:
    one, parameters = trained(name)
    other, fresh = trained(name, steps=0)
    with torch.no_grad():
        for parameter, value in zip(fresh, parameters, strict=True):
            parameter.copy_(value)
    other.load_state_dict(through_files(one.state_dict()))
    for _ in range(3):
        step(one, parameters), step(other, fresh)
    assert all(map(torch.equal, parameters, fresh))
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]) if isinstance(value, torch.Tensor) else value == theirs[key], key


@pytest.mark.parametrize("name", [*OPTIMIZERS, *ENTRIES])
def test_a_state_is_restored_where_its_parameter_is(name: str) -> None:
    """lora-scripts-next #320: it stayed on the CPU. The meta device stands for a card."""
    saved, there = trained(name)[0].state_dict(), trained(name, steps=0, device="meta")[0]
    there.load_state_dict(through_files(saved))
    held = [v for part in (*there.optimizer.state.values(), *there.optimizer.param_groups) for v in part.values()]
    assert all(v.device.type == "meta" for v in held if isinstance(v, torch.Tensor))
    assert there.state_dict().keys() == saved.keys()


def test_names_and_kinds() -> None:
    """The layout of a checkpoint: what versions before this one wrote for AdamW has to stay."""
    kinds = {name: {key: optim.state.kind(v) for key, v in trained(name)[0].state_dict().items()} for name in OPTIMIZERS}
    n = {0: 512, 1: 512}  # 12 and 54 elements at multiples of 256; 300
    full = {group: f"torch.float32 [{size}]" for group, size in n.items()}
    assert kinds["adamw"] == {
        f"group.{g}|{key}": kind
        for g in n
        for key, kind in (("step", "torch.float32 []"), ("exp_avg", full[g]), ("exp_avg_sq", full[g]))
    }
    codes = {"state": "torch.uint8 [512]", "qmap": "torch.float32 [256]", "absmax": "torch.float32 [2]"}
    assert kinds["adamw8bit"] == {
        "group.0|step": "count", "group.1|step": "count", "group.1|state1": full[1], "group.1|state2": full[1],
        **{f"group.0|{key}{i}": kind for i in (1, 2) for key, kind in codes.items()},
    }  # fmt: skip
    assert kinds["growing"].keys() == {
        f"{name}|{key}" for g in n for name, key in
        ((f"group.{g}", "momentum"), (f"param_groups.{g}", "d"), (f"param_groups.{g}", "k"))
    }  # fmt: skip
    assert kinds["factored"].keys() == {
        "group.0.0|rows", "group.0.0|columns", "group.0.1|rows", "group.0.1|columns", "group.1.0|v"
    }  # fmt: skip


def test_what_bitsandbytes_remembers_of_another_optimizer_counts_for_nothing(monkeypatch) -> None:
    """It knows parameters by their places and ids, which come again."""
    from bitsandbytes.optim import GlobalOptimManager

    remembered = {(0, 0): {"optim_bits": 32}, (1, 0): {"optim_bits": 8}}
    monkeypatch.setattr(GlobalOptimManager.get_instance(), "index2config", remembered)
    dtypes = {key: value.dtype for key, value in trained("adamw8bit")[0].state_dict().items() if "state1" in key}
    assert dtypes == {"group.0|state1": torch.uint8, "group.1|state1": torch.float32}


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("growing", lambda s: s.pop("param_groups.1|d"), "of param_groups.1 is not what .* keeps there: k count"),
        ("growing", lambda s: [s.pop(f"param_groups.0|{key}") for key in "dk"], "of param_groups.0 is not what .*: nothing"),
        ("growing", lambda s: s.update({"param_groups.0|d": math.nan}), "d neither tensor nor number"),
        ("growing", lambda s: s.update({"param_groups.0|d": 1}), "d count, k count"),
        ("growing", lambda s: s.update({"param_groups.0|k": True}), "d number, k flag"),
        ("adamw", lambda s: s.update({"param_groups.0|d": 1.0}), "of param_groups.0 is not what .*: d number"),
        ("adamw", lambda s: s.update({"group.2|step": torch.ones(())}), "has 'group.2', which this run does not train"),
        ("adamw", lambda s: s.update({"group.0.0|step": torch.ones(())}), "has 'group.0.0', which this run does not"),
        ("adamw", lambda s: s.pop("group.0|exp_avg"), "of group.0 is not what the 512 parameters there need: exp_avg_sq"),
        ("adamw", lambda s: [s.pop(key) for key in list(s) if key.startswith("group.1|")], "no optimizer state for group.1"),
        ("adamw8bit", lambda s: s.update({"group.0|step": 2.0}), "of group.0 is not what the 512 .* step number"),
        ("factored", lambda s: s.pop("group.0.1|rows"), "of group.0.1 is not what the 54 parameters there need: columns"),
        ("factored", lambda s: s.update({"group.0.0|rows": torch.ones(4)}), r"the 12 parameters .* rows torch.float32 \[4\]"),
    ],
)  # fmt: skip
def test_another_state_is_refused(name: str, change, expected: str) -> None:
    saved = trained(name)[0].state_dict()
    change(saved)
    with pytest.raises(UserError, match=expected):
        trained(name, steps=0)[0].load_state_dict(saved)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_another_optimizer_is_refused(name: str) -> None:
    saved = trained(name)[0].state_dict()
    for other in ["adamw", "adamw8bit", *ENTRIES]:
        if other != name.removeprefix("paged_"):  # of one layout: the name, which is pinned, tells them apart
            with pytest.raises(UserError, match="the checkpoint"):
                trained(other, steps=0)[0].load_state_dict(saved)


def test_before_the_first_update_there_is_no_state_but_the_groups() -> None:
    for name in ("adamw", "growing"):
        state, fresh = trained(name, steps=0)[0], trained(name, steps=0)[0]
        assert state.state_dict().keys() == {f"param_groups.{g}|{k}" for g in (0, 1) for k in OPTIMIZERS[name].group_keys}
        fresh.load_state_dict(state.state_dict())
        assert not any(fresh.optimizer.state.values())


@pytest.mark.parametrize("name", ["adamw", "factored"])
def test_a_group_that_stopped_before_its_first_update_is_restored_without_state(name: str) -> None:
    """Every step up to its stop_step was skipped, for a loss that was not finite."""
    (one, parameters), (other, _) = trained(name, steps=0), trained(name, steps=0)
    groups = one.optimizer.param_groups
    one.optimizer.param_groups = [groups[0], groups[1] | {"params": []}]  # as trainer/engine/step.py does it
    step(one, parameters)
    one.optimizer.param_groups = groups
    saved = through_files(one.state_dict())
    with pytest.raises(UserError, match="no optimizer state for group.1"):
        other.load_state_dict(through_files(saved))
    other.optimizer.param_groups[1]["stop_step"] = 1
    stopping = OptimizerState(other.optimizer, name)
    stopping.load_state_dict(through_files(saved))
    assert stopping.state_dict().keys() == saved.keys()


def test_a_change_in_a_group_that_nobody_names_raises() -> None:
    state, _ = trained("adamw")
    state.optimizer.param_groups[1]["lr"] = 1.0  # the schedule's
    state.state_dict()
    state.optimizer.param_groups[1] |= {"betas": (0.5, 0.9), "count": 3}
    with pytest.raises(ValueError, match="do not name: betas, count$"):
        state.state_dict()


@pytest.mark.parametrize("where", ["parameter", "state", "group"])
def test_what_is_not_finite_is_found_wherever_it_is(where: str) -> None:
    state, _ = trained("growing")
    assert state.is_finite()
    group = state.optimizer.param_groups[1]
    if where == "group":
        group["d"] = math.inf
    else:
        held = group["params"][0].data if where == "parameter" else state.optimizer.state[group["params"][0]]["momentum"]
        held[7] = math.nan
    assert not state.is_finite()


def test_evaluating_leaves_the_weights_that_train_as_they_were() -> None:
    state, parameters = trained("averaging", steps=3)
    before, changes = [parameter.clone() for parameter in parameters], []
    with pytest.raises(KeyError), state.evaluating(lambda: changes.append(1)):
        assert len(changes) == 1 and not any(map(torch.equal, parameters, before))
        raise KeyError
    assert len(changes) == 2 and all(map(torch.equal, parameters, before))
    assert all(group["training"] for group in state.optimizer.param_groups)
    with trained("adamw")[0].evaluating(lambda: changes.append(1)):
        assert len(changes) == 2, "nothing to change"


def test_parameters_with_shapes_stay_where_they_are() -> None:
    state, parameters = trained("factored", steps=0)
    held = [parameter for group in state.optimizer.param_groups for parameter in group["params"]]
    assert all(one.data_ptr() == other.data_ptr() for one, other in zip(parameters, held, strict=True))
    assert all(one.grad.data_ptr() == other.grad.data_ptr() for one, other in zip(parameters, held, strict=True))
    assert [tuple(each.shape) for each in held] == [(3, 4), (2, 27), (300,)]
    assert all(p.untyped_storage().nbytes() == 4 * p.numel() and not p.grad.any() for p in parameters)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("adamw_8bit", "did you mean 'adamw8bit'?"), ("sgd", "use one of 'adamw', 'adamw8bit', 'paged_adamw8bit', 'lion', ")],
)
def test_an_unknown_name_is_refused_with_the_one_that_was_meant(name: str, meant: str) -> None:
    assert optimizer_named("growing") is OPTIMIZERS["growing"]
    with pytest.raises(UserError, match=re.escape(f"optimizer.name = {name!r} is not known; {meant}")):
        optimizer_named(name)


# --- other groups -----------------------------------------------------------------------------------------------------

SHAPES = {"a": (3, 4), "b": (2, 3, 3, 3), "c": (300,), "d": (600,)}


def grouped(name: str, groups: list[list[str]], then: list[list[str]] | None = None, *, steps: int = 0):
    """(state, parameters by name) in these groups; then: those of the state that will be loaded."""
    torch.manual_seed(0)
    parameters = {key: nn.Parameter(torch.randn(shape)) for key, shape in SHAPES.items()}
    made = [
        {"params": [parameters[key] for key in keys], "lr": 1e-2, "weight_decay": 0.1, "magnitudes": False} for keys in groups
    ]
    optimizer = optim.build_optimizer(name, made)
    sizes = {key: parameter.numel() for key, parameter in parameters.items()}
    state = OptimizerState(optimizer, name, then and optim.Regrouping(then, groups, sizes))
    for _ in range(steps):
        step(state, list(parameters.values()))
    return state, parameters


ONE, TWO, MIXED, EACH = (
    [["a", "b", "c", "d"]],
    [["a", "c"], ["b", "d"]],
    [["d"], ["c", "b", "a"]],
    [["a"], ["b"], ["c"], ["d"]],
)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", *sorted(OPTIMIZERS.keys() - {"adamw", "adamw8bit"}), "factored"])
@pytest.mark.parametrize(("then", "now"), [(ONE, TWO), (TWO, ONE), (TWO, MIXED), (ONE, EACH), (EACH, MIXED), (MIXED, TWO)])
def test_other_groups_change_no_parameters_course(name: str, then: list[list[str]], now: list[list[str]]) -> None:
    """Split, joined and in another order: every parameter goes on to the bit, and the state comes back as it was."""
    one, parameters = grouped(name, then, steps=3)
    other, fresh = grouped(name, now, then)
    with torch.no_grad():
        for key, value in fresh.items():
            value.copy_(parameters[key])
    saved = through_files(one.state_dict())
    other.load_state_dict(through_files(saved))
    back, _ = grouped(name, then, now)
    back.load_state_dict(through_files(other.state_dict()))
    assert back.state_dict().keys() == saved.keys()
    for key, value in back.state_dict().items():
        assert torch.equal(value, saved[key]) if isinstance(value, torch.Tensor) else value == saved[key], key
    for _ in range(3):
        step(one, list(parameters.values())), step(other, list(fresh.values()))
    for key, value in parameters.items():
        if name == "prodigy":  # its estimate is a sum over all parameters, in another order now
            assert torch.allclose(value, fresh[key], rtol=1e-5), key
        else:
            assert torch.equal(value, fresh[key]), key


def test_a_paged_state_is_read_into_paged_memory(monkeypatch) -> None:
    """What a GPU does with it is not seen here: only that its states, and nothing else, go to the library's buffers."""
    state, _ = trained("paged_adamw8bit")
    parameter = state.optimizer.param_groups[0]["params"][0]
    saved, given = dict(state.optimizer.state[parameter]), []

    def buffer(p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        given.append(torch.empty_like(p, dtype=dtype))
        return given[-1]

    monkeypatch.setattr(state.optimizer, "get_state_buffer", buffer)
    on_gpu = SimpleNamespace(is_cuda=True, shape=parameter.shape)
    monkeypatch.setattr(torch, "empty_like", lambda p, dtype: torch.empty(p.shape, dtype=dtype))
    held = optim.libraries.paged(state.optimizer, on_gpu, saved)
    assert [held["state1"] is given[0], held["state2"] is given[1]] == [True, True] and len(given) == 2
    assert held.keys() == saved.keys() and all(torch.equal(held[key], saved[key]) for key in ("state1", "state2", "qmap1"))
    assert optim.libraries.paged(state.optimizer, parameter, saved) is saved, "on a CPU nothing is paged"


def test_before_the_first_update_there_is_nothing_to_regroup() -> None:
    other, _ = grouped("adamw", TWO, ONE)
    other.load_state_dict(grouped("adamw", ONE)[0].state_dict())
    assert not any(other.optimizer.state.values())


def test_groups_that_cannot_be_one_are_refused(monkeypatch) -> None:
    """In 8 and in 32 bit; and of an optimizer that keeps an estimate for each group."""
    monkeypatch.setattr(libraries, "MIN_8BIT_SIZE", 1024)
    saved = grouped("adamw8bit", [["d"], ["a", "b", "c"]], steps=1)[0].state_dict()
    assert saved["group.0|state1"].dtype == torch.float32 and saved["group.1|state1"].dtype == torch.uint8
    with pytest.raises(UserError, match="become one that keep their state in different ways"):
        grouped("adamw8bit", ONE, [["d"], ["a", "b", "c"]])[0].load_state_dict(saved)
    saved = grouped("growing", TWO, steps=1)[0].state_dict()
    with pytest.raises(UserError, match="become one that keep their state in different ways"):
        grouped("growing", ONE, TWO)[0].load_state_dict(saved)
    saved["group.0|momentum"] = saved["group.0|momentum"][:-1]
    with pytest.raises(UserError, match=r"optimizer state group.0\|momentum is not what 768 parameters need"):
        grouped("growing", EACH, TWO)[0].load_state_dict(saved)


def test_weights_for_use_are_made_from_what_a_checkpoint_has() -> None:
    """As the optimizer's own eval() makes them; of groups before their first update there are none."""
    fresh, _ = trained("schedulefree_adamw", 0)
    state, parameters = trained("schedulefree_adamw", 3)
    names, beta = [["a", "b"], ["c"]], state.optimizer.param_groups[0]["betas"][0]

    def now() -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in zip("abc", parameters, strict=True)}

    before, kept = now(), state.state_dict()
    assert weights_for_use(before, fresh.state_dict(), names, beta) == {}
    made = weights_for_use(before, kept, names, beta)
    with state.evaluating(lambda: None):
        used = now()
    for name, tensor in before.items():
        assert torch.allclose(made[name], used[name], rtol=1e-5, atol=1e-7) and torch.equal(now()[name], tensor)
    assert not torch.allclose(used["a"], before["a"], rtol=1e-3)
    with pytest.raises(ValueError, match="optimizer state of"):
        weights_for_use(before, kept, [["a"], ["c"]], beta)
