"""--allow: the keys it takes, what it lets through, and what a refusal says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from trainer import config as configs
from trainer import optim
from trainer.base.errors import UserError
from trainer.checkpoint.state import Progress
from trainer.config.data_tables import DataTable, SourceTable
from trainer.config.training_tables import ObjectiveTable
from trainer.resume import pins
from trainer.resume.allowed_changes import FIXED_LOSS, LOSS, NEVER, Allowance, change_lines, objection, parse

TREE: dict[str, Any] = {
    "run": {"name": "bear", "output_dir": "out", "max_steps": 4},
    "model": {"family": "sdxl", "path": "model"},
    "data": {"sources": [{"path": "photos"}]},
    "optimizer": {"betas": [0.9, 0.999], "eps": 1e-8},  # as the resolved config has them
}


def changed(*keys: tuple[str, Any]) -> dict[str, Any]:
    """The resolved config with other values."""
    tree = configs.tree(configs.parse(TREE))
    for key, value in keys:
        *tables, leaf = key.split(".")
        node = tree
        for table in tables:
            node = node[int(table)] if isinstance(node, list) else node[table]
        node[leaf] = value
    return tree


def refused(tree: dict[str, Any], allowed: Allowance) -> str:
    with pytest.raises(UserError) as error:
        pins.refuse_changes(changed(), tree, "the checkpoint", allowed=allowed)
    return str(error.value)


def test_a_refusal_shows_only_what_differs_and_names_the_way() -> None:
    tree = changed(("optimizer.lr", 5e-5), ("optimizer.betas", [0.9, 0.99]), ("data.flip", True), ("run.max_steps", 9))
    assert refused(tree, Allowance(resume_from="out/checkpoints/step-00000002")).splitlines() == [
        "the checkpoint belongs to a run with another config:",
        "data.flip: False -> True",
        "optimizer.betas.1: 0.999 -> 0.99",
        "optimizer.lr: 0.0001 -> 5e-05",
        "restore these keys, or go on with them from the next step: --resume_from out/checkpoints/step-00000002 --allow "
        "data,optimizer.betas,optimizer.lr, or choose another run.output_dir",
    ]


def test_the_way_that_is_named_leads_on() -> None:
    tree = changed(("optimizer.lr", 5e-5), ("optimizer.betas", [0.9, 0.99]), ("data.flip", True))
    allowed = parse("data,optimizer.betas,optimizer.lr", "auto")
    pins.refuse_changes(changed(), tree, "the checkpoint", allowed=allowed)
    assert allowed.changed == {
        "data.flip": "data.flip: False -> True",
        "optimizer.betas.1": "optimizer.betas.1: 0.999 -> 0.99",
        "optimizer.lr": "optimizer.lr: 0.0001 -> 5e-05",
    }
    assert not allowed.ends_epoch


def test_a_key_that_there_was_not_yet_had_its_default() -> None:
    """The checkpoint of an earlier version goes on, and a value that changes the run is still refused."""
    before, everything = configs.tree(configs.parse(TREE)), configs.tree(configs.parse(TREE))
    for key in ("cycles", "end"):
        del before["schedule"][key]
    del before["data"]["masks"], before["validation"]["prompts"], before["objective"]["t_range"]
    pins.refuse_changes(before, everything, "the checkpoint", allowed=Allowance())
    everything["schedule"]["end"] = 0.5
    with pytest.raises(UserError, match="schedule.end: 0.0 -> 0.5"):
        pins.refuse_changes(before, everything, "the checkpoint", allowed=Allowance())
    everything["schedule"]["end"], everything["objective"]["t_range"] = 0.0, [0.0, 0.5]
    with pytest.raises(UserError, match=r"objective\.t_range\.1: 1\.0 -> 0\.5\n"):
        pins.refuse_changes(before, everything, "the checkpoint", allowed=Allowance())


def test_keys_that_there_are_no_more_leave_a_run_what_it_is() -> None:
    """The checkpoint of an earlier version goes on, but for one that did what is gone: that is said, under any config."""
    now = configs.tree(configs.parse(TREE | {"ema": {"kind": "constant"}}))
    before = copy.deepcopy(now)
    defaults = {"ema.snapshot_every_steps": 0, "optimizer.min_8bit_size": 4096, "precision.loss_scale_growth_interval": 2000}
    for key, value in (defaults | {"export.license_link": "https://a.example"}).items():  # what is exported may change
        table, _, name = key.partition(".")
        before[table][name] = value
    pins.refuse_changes(before, now, "the checkpoint", allowed=Allowance())
    for key, value in {"ema.kind": "power", "optimizer.min_8bit_size": 1, "precision.loss_scale_growth_interval": 9}.items():
        table, _, name = key.partition(".")
        with pytest.raises(UserError) as refusal:
            other = before | {table: before[table] | {name: value}}
            pins.refuse_changes(other, now, "the checkpoint", allowed=Allowance((table, key)))
        assert str(refusal.value) == f"the checkpoint: {key} = {value!r}: {configs.REMOVED[key][1]}"
        assert "with commit " in configs.REMOVED[key][1]


def test_a_table_allows_its_keys_and_no_others() -> None:
    tree = changed(("schedule.name", "cosine"), ("schedule.warmup", 1), ("optimizer.lr", 5e-5))
    said = refused(tree, parse("schedule", "auto"))
    assert "schedule.name" not in said and "optimizer.lr: 0.0001 -> 5e-05" in said
    assert "--resume_from auto --allow optimizer.lr,schedule" in said, "with what is allowed already"
    tree = changed(("step.max_grad_norm", 0.5))
    assert "step.max_grad_norm" in refused(tree, Allowance(("step.max",))), "no prefix of a name"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("adapter.rank", 8), ("adapter.targets", "attention"), ("adapter.type", "dora"), ("adapter.alpha", 2.0),
        ("model.family", "flux"), ("model.components", {"unet": {"dtype": "nf4"}}), ("precision.compute", "fp16"),
        ("optimizer.name", "adamw8bit"), ("data.cache_text", False),
    ],
)  # fmt: skip
def test_what_would_not_fit_stays_refused_with_the_reason(key: str, value: Any) -> None:
    everything = tuple(name for name in configs.known_keys() if "." not in name)
    said = refused(changed((key, value), ("optimizer.lr", 5e-5)), Allowance(everything))
    assert f"{key}" in said and "(never: " in said
    assert "optimizer.lr" not in said and "--allow" not in said, "what is allowed is no reason to refuse"
    said = refused(changed((key, value), ("optimizer.lr", 5e-5)), Allowance())
    assert "go on with what may change (optimizer.lr) from the next step: --resume_from auto --allow optimizer.lr" in said


def test_every_reason_is_of_a_key_that_there_is() -> None:
    for pattern in NEVER:
        assert any(
            objection(key) == NEVER[pattern] for key in configs.known_keys() if key.startswith(pattern.partition("*")[0])
        )
    assert (
        not objection("optimizer.lr") and not objection("adapter.rules.0.lr") and not objection("adapter.rules.0.stop_step")
    )
    assert not any(
        objection(f"adapter.{key}") for key in ("dropout", "rank_dropout", "module_dropout", "max_norm", "kernels")
    )
    assert objection("adapter.rules.0.rank") and objection("model.components.unet.dtype")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("optimiser.lr", "--allow optimiser.lr: unknown key; did you mean optimizer.lr?"),
        ("optimizer.lr,optimizer.rl", "--allow optimizer.rl: unknown key; did you mean optimizer.lr?"),
        ("shedule", "--allow shedule: unknown key; did you mean schedule?"),
        ("dat", "--allow dat: unknown key; did you mean data?"),
        ("everything", "--allow everything: unknown key; see docs/keys.md"),
        (" , ", "--allow names no key"),
    ],
)
def test_an_unknown_key_is_refused_with_a_near_miss(given: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        parse(given, "auto")
    assert str(error.value).startswith(said)


def test_allow_goes_with_resume_from() -> None:
    with pytest.raises(UserError, match="it goes with --resume_from"):
        parse("data", None)
    assert parse(None, None).keys == () and parse("data, optimizer.lr,data", "latest").keys == ("data", "optimizer.lr")
    parse("model.components.unet.dtype,data.sources.0.repeats,adapter.rules", "auto")


# --- what a change does to a run's progress ---------------------------------------------------------------------------


def at(step: int, *changes: dict[str, Any]) -> Progress:
    return Progress(step, 2 * step, 0, 40, "2025-01-01T00:00:00+00:00", list(changes))


def test_an_epoch_begins_where_the_last_change_of_photos_was() -> None:
    config_only = {"step": 7, "epoch": None, "what": ["optimizer.lr: 1 -> 2"]}
    photos = {"step": 4, "epoch": 2, "what": ["photos"]}
    assert at(9).began == (0, 0) and at(9, config_only).began == (0, 0)
    assert at(9, photos, config_only).began == (4, 2)
    again = at(1)
    again.load_state_dict(at(9, photos, config_only).state_dict())
    assert again == at(9, photos, config_only)


@pytest.mark.parametrize(
    "change",
    [
        {"step": 10, "epoch": None, "what": []}, {"step": -1, "epoch": None, "what": []},
        {"step": 1, "epoch": 1.5, "what": []}, {"step": 1, "epoch": None, "what": "text"},
        {"step": 1, "epoch": None, "what": [1]}, {"step": 1, "what": []}, "change",
    ],
)  # fmt: skip
def test_a_malformed_change_is_refused(change) -> None:
    state = at(9).state_dict() | {"changes": [change]}
    with pytest.raises((ValueError, KeyError, TypeError)):
        at(9).load_state_dict(copy.deepcopy(state))


# --- the rate ---------------------------------------------------------------------------------------------------------


def schedule(lr: float, name: str = "cosine", total: int = 10) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=lr)
    return optimizer, optim.build_schedule(name, optimizer, warmup=0, total_steps=total)


def after(steps: int, lr: float, name: str = "cosine", total: int = 10) -> tuple[torch.optim.Optimizer, Any]:
    optimizer, made = schedule(lr, name, total)
    for _ in range(steps):
        optimizer.step()
        made.step()
    return optimizer, made


@pytest.mark.parametrize(("lr", "name", "total"), [(1e-2, "cosine", 10), (5e-3, "cosine", 10), (1e-2, "linear", 20)])
def test_a_new_rate_or_schedule_holds_from_the_next_step(lr: float, name: str, total: int) -> None:
    _, saved = after(4, 1e-2)
    optimizer, resumed = schedule(lr, name, total)
    optim.ScheduleState(resumed, anew=True).load_state_dict(optim.ScheduleState(saved).state_dict())
    known, whole = after(4, lr, name, total)
    for _ in range(5):
        assert optimizer.param_groups[0]["lr"] == known.param_groups[0]["lr"]
        assert resumed.get_last_lr() == whole.get_last_lr()
        for each, its in ((optimizer, resumed), (known, whole)):
            each.step()
            its.step()


def test_without_allow_the_saved_rate_is_kept_bit_for_bit() -> None:
    _, saved = after(4, 1e-2)
    state = optim.ScheduleState(saved).state_dict()
    state["_last_lr"] = [0.123]
    optimizer, resumed = schedule(1e-2)
    optim.ScheduleState(resumed).load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.123


def test_betas_of_an_optimizer_with_modes_never_change() -> None:
    """The weights for use are recovered from those that train with beta1."""
    tree = changed(("optimizer.name", "schedulefree_adamw"))
    other = copy.deepcopy(tree)
    other["optimizer"]["betas"] = [0.95, 0.999]
    with pytest.raises(UserError, match="never: the weights for use follow from them"):
        pins.refuse_changes(tree, other, "the checkpoint", allowed=Allowance(("optimizer.betas",)))
    assert objection("optimizer.betas.0", "schedulefree_adamw") and not objection("optimizer.betas.0", "adamw")
    assert not objection("optimizer.lr", "schedulefree_adamw")


def test_every_key_of_the_objective_changes_what_the_loss_measures_but_for_how_evenly_times_are_drawn() -> None:
    keys = [f"objective.{name}" for name in ObjectiveTable.model_fields]
    others = ["optimizer.lr", "step.accumulation", "adapter.dropout", "run.seed", "data.batch_size", "schedule.name"]
    changes = [{"step": 3, "what": [f"{key}: 1 -> 2" for key in [*keys, "objective.t_range.1", *others]]}]
    told = [line.partition(":")[0] for line in change_lines(changes, LOSS, 3)]
    assert told == [*(key for key in keys if key != "objective.stratified"), "objective.t_range.1"]
    assert [line.partition(":")[0] for line in change_lines(changes, FIXED_LOSS)] == ["objective.guidance"]
    assert change_lines(changes, LOSS, 4) == [] and change_lines(changes, LOSS) == change_lines(changes, LOSS, 3)
    photos = [{"step": 5, "what": ["photos: 5 photos then, 6 now", "added: 0/05.jpg", "data.resolution: 64 -> 128"]}]
    assert change_lines(photos, LOSS) == ["photos: 5 photos then, 6 now", "data.resolution: 64 -> 128"]
    assert change_lines(photos, FIXED_LOSS) == ["data.resolution: 64 -> 128"]


def test_keys_of_the_data_that_change_what_is_asked_change_what_the_loss_measures() -> None:
    """All but those of order, reading, caching, and which photos there are, which have a line of their own."""
    same = {"sources", "batch_size", "short_batches", "held_out", "num_workers", "strict_captions", "image_variants"}
    same |= {name for name in DataTable.model_fields if name.startswith("cache")}
    keys = [f"data.{name}" for name in DataTable.model_fields]
    keys += [f"data.sources.0.{name}" for name in SourceTable.model_fields]
    told = [key for key in keys if change_lines([{"step": 3, "what": [f"{key}: 1 -> 2"]}], LOSS)]
    assert told == [key for key in keys if key.removeprefix("data.") not in same]
