"""The keys of [optimizer] and [schedule] together: what is refused, what is written out."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from trainer import config as configs
from trainer.adapters import Adapter, Rates, Rule, Target
from trainer.adapters.kinds import KINDS
from trainer.base.errors import UserError
from trainer.optim import OPTIMIZERS
from trainer.plan import optimizer_rules, requirements
from trainer.resume import pins
from trainer.resume.allowed_changes import Allowance


def config(rules: list[dict[str, Any]] | None = None, **tables: dict[str, Any]) -> configs.Config:
    tree = {
        "run": {"name": "a", "output_dir": "out", "max_steps": 100},
        "model": {"family": "sdxl", "path": "model"},
        "data": {"sources": [{"path": "photos"}]},
        "adapter": {"type": "dora", "rules": rules or []},
    }
    return configs.parse(tree | tables)


def refusal(given: configs.Config) -> str:
    with pytest.raises(UserError) as error:
        optimizer_rules.check(given)
    return str(error.value)


PRODIGY = {"name": "prodigy", "lr": 1.0}


# bitsandbytes and transformers take seconds to import.
SLOW = pytest.mark.slow
REFUSED = [
    (
        {"options": {"amsgard": True}},
        "optimizer.options.amsgard = True: torch.AdamW does not take it; did you mean 'amsgrad'?",
    ),
    ({"options": {"amsgrad": 1}}, "optimizer.options.amsgrad = 1: give true or false"),
    ({"options": {"lr": 1.0}}, "optimizer.options.lr = 1.0: set optimizer.lr instead"),
    ({"options": {"fused": False}}, "optimizer.options.fused = False: the trainer sets it"),
    ({"options": {"betas": [0.9, 0.9]}}, "optimizer.options.betas = [0.9, 0.9]: write it as optimizer.betas"),
    ({"betas": [0.9, 0.9, 0.9]}, "optimizer.betas = [0.9, 0.9, 0.9]: adamw has 2; its defaults are [0.9, 0.999]"),
    ({"name": "came", "betas": [0.9, 0.9]}, "came has 3; its defaults are [0.9, 0.999, 0.9999]"),
    ({"name": "lion", "eps": 1e-6}, "optimizer.eps = 1e-06 has no effect with optimizer.name = 'lion'; leave it out"),
    ({"name": "adafactor", "betas": [0.9, 0.9]}, "has no effect with optimizer.name = 'adafactor'"),
    ({"name": "muon", "options": {"adjust_lr_fn": 3}}, "optimizer.options.adjust_lr_fn = 3: give a text"),
    (
        {"name": "muon", "options": {"adjust_lr_fn": "mine"}},
        "optimizer.options.adjust_lr_fn = 'mine': torch.Muon refuses it: ",
    ),
    ({"name": "muon", "options": {"ns_steps": 5.0}}, "optimizer.options.ns_steps = 5.0: give an integer"),
    ({"name": "schedulefree_adamw", "options": {"warmup_steps": 9}}, "set schedule.warmup instead"),
    (PRODIGY | {"options": {"d_coeff": 2.0}}, "pytorch_optimizer.Prodigy does not take it; did you mean 'd_coef'?"),
    (PRODIGY | {"lr": 1e-4}, "optimizer.lr = 0.0001: prodigy finds the rate itself, and this is a factor of it; set"),
    (PRODIGY | {"lr": 100.0}, "optimizer.lr = 100: prodigy finds the rate itself"),
    (PRODIGY | {"lora_plus": 16.0}, "prodigy takes one rate, which it finds for all parameters together; leave out"),
    (
        PRODIGY | {"magnitude_lr": 0.5, "text_encoder_lr": 0.1},
        "optimizer.text_encoder_lr = 0.1, optimizer.magnitude_lr = 0.5",
    ),
    (PRODIGY | {"options": {"weight_decouple": False}}, "weight_decouple = false with optimizer.name = 'prodigy': its"),
    (PRODIGY | {"options": {"d0": 0}}, "optimizer.options.d0 = 0: give a number above 0; the library's default is 1e-06"),
    (PRODIGY | {"options": {"d0": -1e-6}}, "optimizer.options.d0 = -1e-06: give a number above 0"),
    (PRODIGY | {"options": {"d_coef": 0.0}}, "optimizer.options.d_coef = 0.0: give a number above 0"),
    (PRODIGY | {"options": {"d0": float("nan")}}, "optimizer.options.d0 = nan: give a number"),
    (PRODIGY | {"options": {"d0": 10**400}}, "optimizer.options.d0 = 10000"),
    (
        {"name": "schedulefree_adamw", "betas": [0.0, 0.9]},
        "optimizer.betas = [0.0, 0.9]: schedulefree.AdamWScheduleFree refuses",
    ),
    (
        {"name": "schedulefree_adamw", "options": {"weight_lr_power": -1.0}, "betas": [0.9, 0.999]},
        "optimizer.options.weight_lr_power = -1.0: schedulefree.AdamWScheduleFree refuses it: ",
    ),
    ({"name": "came", "options": {"eps1": -1.0}}, "optimizer.options.eps1 = -1.0: pytorch_optimizer.CAME refuses it: "),
    (
        {"name": "muon", "options": {"ns_coefficients": [1e30, 1e30, 1e30]}},
        ": with it two updates of torch.Muon give weights",
    ),
    ({"options": {"amsgrad": {"a": 1}}}, "optimizer.options.amsgrad = {'a': 1}: give true or false"),
    ({"name": "muon", "options": {"ns_steps": [5]}}, "optimizer.options.ns_steps = [5]: give an integer"),
    ({"name": "prodgy"}, "optimizer.name = 'prodgy' is not known; did you mean 'prodigy'?"),
    pytest.param(
        {"name": "adafactor", "options": {"relative_step": True}}, "relative_step = True: the trainer sets it", marks=SLOW
    ),
    pytest.param({"name": "adafactor", "options": {"eps": [1e-30]}}, "give a list of 2 numbers; the library's", marks=SLOW),
    pytest.param({"name": "adafactor", "options": {"beta1": "0.9"}}, "options.beta1 = '0.9': give a number", marks=SLOW),
    pytest.param(
        {"name": "adamw8bit", "options": {"amsgrad": True}},
        "optimizer.options.amsgrad = True: bitsandbytes.AdamW8bit refuses it: ",
        marks=SLOW,
    ),
]


@pytest.mark.parametrize(("optimizer", "said"), REFUSED)
def test_what_the_optimizer_does_not_take_is_refused(optimizer: dict[str, Any], said: str) -> None:
    assert said in refusal(config(optimizer=optimizer))


@pytest.mark.parametrize(
    "optimizer",
    [
        {}, PRODIGY, PRODIGY | {"magnitude_lr": 1.0}, PRODIGY | {"options": {"d_coef": 2, "beta3": 0.99}},
        PRODIGY | {"options": {"weight_decouple": True}},
        PRODIGY | {"weight_decay": 0, "options": {"weight_decouple": False}},
        {"name": "muon", "options": {"adjust_lr_fn": "original"}}, {"options": {"amsgrad": True}, "eps": 1e-6},
        {"name": "came", "options": {"ams_bound": True}, "betas": [0.9, 0.99, 0.999]},
        pytest.param({"name": "adafactor", "options": {"beta1": 0.9, "eps": [1e-30, 1e-3]}}, marks=SLOW),
    ],
)  # fmt: skip
def test_what_it_takes_passes(optimizer: dict[str, Any]) -> None:
    optimizer_rules.check(config(optimizer=optimizer))


def test_prodigy_refuses_a_rule_with_another_rate() -> None:
    rule = {"component": "unet", "match": "*", "lr": 0.5}
    assert refusal(config([rule], optimizer=PRODIGY)).endswith("leave out adapter.rules[0].lr = 0.5")
    optimizer_rules.check(config([rule | {"lr": 1.0}], optimizer=PRODIGY))
    assert refusal(config([rule | {"lr": 1.0, "stop_step": 9}], optimizer=PRODIGY)).endswith("adapter.rules[0].stop_step")


def test_schedule_free_refuses_what_would_average_or_scale_beside_it() -> None:
    given = {"optimizer": {"name": "schedulefree_adamw"}}
    said = refusal(config(**given, ema={"kind": "constant"}))
    assert said.startswith("ema.kind = 'constant' cannot be combined with optimizer.name = 'schedulefree_adamw'")
    said = refusal(config(**given, adapter={"max_norm": 1.0}))
    assert said.startswith("adapter.max_norm = 1 cannot be combined with optimizer.name = 'schedulefree_adamw'")
    optimizer_rules.check(config(ema={"kind": "constant"}, adapter={"max_norm": 1.0}))


@pytest.mark.parametrize(("adapter", "refused"), [("lora", True), ("dora", False)])
def test_muon_on_a_lora_has_nothing_that_reads_betas_and_eps(adapter: str, refused: bool) -> None:
    """It trains magnitudes with AdamW. The library's own, as a resolved config has them, are no mistake."""
    given = config(adapter={"type": adapter}, optimizer={"name": "muon", "betas": [0.9, 0.95], "eps": 1e-6})
    unread = requirements.unread_beside_others(given)
    assert {"optimizer.betas", "optimizer.eps"} <= unread.keys() if refused else "optimizer.betas" not in unread
    own = config(adapter={"type": adapter}, optimizer={"name": "muon", "betas": [0.9, 0.999], "eps": 1e-8})
    assert not {"optimizer.betas", "optimizer.eps"} & requirements.unread_beside_others(own).keys()


def test_schedule_free_refuses_a_falling_rate() -> None:
    given = {"optimizer": {"name": "schedulefree_adamw"}}
    said = refusal(config(**given, schedule={"name": "cosine"}))
    assert said.startswith("schedule.name = 'cosine' with optimizer.name = 'schedulefree_adamw': its average takes the place")
    optimizer_rules.check(config(**given, schedule={"name": "constant", "warmup": 0.1}))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_left_to_the_library_is_written_out_and_read_again(name: str) -> None:
    given = config(optimizer={"name": name, "lr": 1.0})
    resolved = given.model_copy(update={"optimizer": optimizer_rules.resolve(given.optimizer)})
    entry = OPTIMIZERS[name]
    assert resolved.optimizer.betas == entry.betas and resolved.optimizer.eps == entry.eps
    assert resolved.optimizer.options == entry.presets
    again = configs.parse(tomllib.loads(configs.dumps(resolved)))
    assert configs.tree(again) == configs.tree(resolved)
    assert optimizer_rules.resolve(again.optimizer) == again.optimizer


def test_a_checkpoint_of_before_these_keys_goes_on() -> None:
    """Its config had AdamW's betas and eps, and no options or rates."""
    given = config()
    now = configs.tree(given.model_copy(update={"optimizer": optimizer_rules.resolve(given.optimizer)}))
    old = configs.tree(given)
    old["optimizer"] = {
        "name": "adamw", "lr": 1e-4, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "min_8bit_size": 4096,
    }  # fmt: skip
    pins.refuse_changes(old, now, "the checkpoint", allowed=Allowance())
    now["optimizer"]["lora_plus"] = 16.0
    with pytest.raises(UserError, match=re.escape("optimizer.lora_plus: 1.0 -> 16.0")):
        pins.refuse_changes(old, now, "the checkpoint", allowed=Allowance())


# --- rates ------------------------------------------------------------------------------------------------------------

RULES = [Rule("text_encoder", "*", lr=3e-5), Rule("unet", "*.mlp", weight_decay=0.5)]
TARGETS = {
    "unet.a": Target("unet", "a", 4, 4.0),
    "unet.a.mlp": Target("unet", "a.mlp", 4, 4.0, weight_decay=0.5),
    "text_encoder.a": Target("text_encoder", "a", 4, 4.0, lr=3e-5),
    "text_encoder_2.a": Target("text_encoder_2", "a", 4, 4.0),
}
PARAMETERS = {"A": "lora_A.weight", "B": "lora_B.weight", "m": "lora_magnitude_vector"}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, {("unet", "A"): 1e-4, ("unet", "B"): 1e-4, ("unet", "m"): 1e-4, ("text_encoder_2", "B"): 1e-4}),
        ({"lora_plus": 16.0}, {("unet", "A"): 1e-4, ("unet", "B"): 16e-4, ("unet", "m"): 1e-4}),
        ({"lora_plus": 16.0}, {("text_encoder_2", "A"): 1e-4, ("text_encoder_2", "B"): 16e-4}),
        ({"text_encoder_lr": 1e-5}, {("unet", "B"): 1e-4, ("text_encoder_2", "A"): 1e-5, ("text_encoder_2", "m"): 1e-5}),
        ({"magnitude_lr": 1e-3}, {("unet", "A"): 1e-4, ("unet", "m"): 1e-3, ("text_encoder_2", "m"): 1e-3}),
        (
            {"magnitude_lr": 1e-3, "text_encoder_lr": 1e-5, "lora_plus": 2.0},
            {("unet", "B"): 2e-4, ("text_encoder_2", "B"): 2e-5, ("text_encoder_2", "m"): 1e-3},
        ),
    ],
)  # fmt: skip
def test_the_rate_of_each_parameter(more: dict[str, float], expected: dict[tuple[str, str], float]) -> None:
    rates = Rates(lr=1e-4, weight_decay=0.01, text_encoders=("text_encoder", "text_encoder_2"), **more)
    for (component, part), rate in expected.items():
        name = f"{component}.a.{PARAMETERS[part]}"
        found, decay, magnitude = rates.of(TARGETS[f"{component}.a"], name)
        assert (found, magnitude) == (pytest.approx(rate, rel=1e-12), part == "m")
        assert decay == (0.0 if part == "m" else 0.01), "magnitudes are never decayed"
    # A rule's own rate takes the place of all but B's share.
    for part, name in PARAMETERS.items():
        share = more.get("lora_plus", 1.0) if part == "B" else 1.0
        assert rates.of(TARGETS["text_encoder.a"], f"text_encoder.a.{name}")[0] == pytest.approx(3e-5 * share, rel=1e-12)
        assert rates.of(TARGETS["unet.a.mlp"], f"unet.a.mlp.{name}")[1] == (0.0 if part == "m" else 0.5)


def test_lora_plus_makes_groups_and_its_default_makes_none() -> None:
    adapter = Adapter({}, TARGETS, kind=KINDS["dora"], rslora=False)
    names = [f"unet.a.{name}" for name in PARAMETERS.values()]
    adapter.named_parameters = lambda: dict.fromkeys(names)  # type: ignore[method-assign]
    assert list(adapter.groups(Rates(1e-4, 0.01)).values()) == [names[:2], names[2:]]
    assert list(adapter.groups(Rates(1e-4, 0.01, lora_plus=16.0)).values()) == [[name] for name in names]
