"""The TOML contract: the design's example works, every one-edit typo is refused with a suggestion."""

from __future__ import annotations

import random
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.harness import ROOT
from trainer import config as configs
from trainer.base.errors import UserError
from trainer.optim import libraries
from trainer.resume import pins
from trainer.resume.allowed_changes import Allowance
from trainer.runtime import precision
from workbench.compare.variations import read_comparison

MINIMAL = {
    "run": {"name": "bear", "output_dir": "out", "max_steps": 4},
    "model": {"family": "sdxl", "path": "models/tiny-sdxl"},
    "data": {"sources": [{"path": "photos"}]},
}

CONTRACT = """
[run]
name = "bear"
output_dir = "outputs/bear"
seed = 7
max_steps = 40
[model]
family = "sdxl"
path = "models/tiny-sdxl"
[model.components.unet]
dtype = "fp8_e4m3"
backend = "native"
exclude = []
[model.components.text_encoder]
dtype = "fp32"
[precision]
compute = "bf16"
matmul = "compute"
[adapter]
type = "dora"
rank = 8
alpha = 8
targets = "attention"
[data]
resolution = 64
batch_size = 2
num_workers = 0
[[data.sources]]
path = "examples/bear_plushie"
repeats = 1
[step]
accumulation = 1
max_grad_norm = 1.0
[memory]
gradient_checkpointing = false
[optimizer]
name = "adamw"
lr = 1e-4
[schedule]
name = "constant"
warmup = 0
[checkpoint]
every_steps = 10
keep_last = 3
[export]
every_steps = 0
formats = ["diffusers", "comfyui"]
[validation]
every_steps = 20
prompts = ["a photo of sks plush bear on a beach"]
"""


def test_the_contracts_example_is_accepted() -> None:
    config = configs.parse(tomllib.loads(CONTRACT))
    assert config.adapter.alpha == 8 and config.schedule.warmup == 0


def test_defaults_people_rely_on() -> None:
    config = configs.parse(MINIMAL)
    assert (config.adapter.type, config.adapter.rank, config.adapter.targets) == ("lora", 16, "attention+mlp")
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.weight_decay) == ("adamw", 1e-4, 0.01)
    assert (config.schedule.name, config.schedule.warmup) == ("constant", 0.05)
    assert (config.step.max_grad_norm, config.data.caption_dropout) == (1.0, 0.05)
    assert config.precision.compute == "bf16" and config.objective.min_snr_gamma is None
    assert config.objective.guidance == 1.0
    assert (config.checkpoint.every_steps, config.checkpoint.every_minutes, config.run.lost_after) == (500, 10, 60)


SHIPPED = sorted((ROOT / "configs").glob("*.toml"))
COMPARISONS = [path for path in SHIPPED if path.name.startswith("compare_")]


@pytest.mark.parametrize("path", COMPARISONS, ids=lambda p: p.name)
def test_shipped_comparisons_are_accepted(path: Path) -> None:
    assert read_comparison(path.name).runs


@pytest.mark.parametrize("path", [path for path in SHIPPED if path not in COMPARISONS], ids=lambda p: p.name)
def test_shipped_configs_are_accepted_and_round_trip(path: Path) -> None:
    config = configs.load(path.name, [])
    again = configs.parse(tomllib.loads(configs.dumps(config)))
    assert again == config
    pins.refuse_changes(tomllib.loads(configs.dumps(config)), configs.tree(config), "the written one", allowed=Allowance())


NO_SHARE = "a share must be below 1; write 0.05 for a twentieth, or a count without a point:"


@pytest.mark.parametrize(
    ("key", "given", "said"),
    [
        ("data.held_out", "1.0", f"{NO_SHARE} 1 photo"),
        ("data.held_out", "2.5", f"{NO_SHARE} 2 photos"),
        ("data.held_out", "-1", "give a count of photos, or a share of all below 1; 0 is none"),
        ("data.held_out", "-0.1", "give a count of photos, or a share of all below 1; 0 is none"),
        ("schedule.warmup", "1.0", f"{NO_SHARE} 1 step"),
        ("schedule.warmup", "100.0", f"{NO_SHARE} 100 steps"),
        ("schedule.warmup", "-1", "give a count of steps, or a share of all below 1; 0 is none"),
        ("schedule.warmup", "-0.5", "give a count of steps, or a share of all below 1; 0 is none"),
    ],
)
def test_what_is_no_count_and_no_share_is_refused_with_what_to_write(key: str, given: str, said: str) -> None:
    table, _, name = key.partition(".")
    with pytest.raises(UserError) as refused:
        configs.parse(MINIMAL | {table: MINIMAL.get(table, {}) | tomllib.loads(f"{name} = {given}")})
    assert str(refused.value).startswith(f"{key} = {given}: {said}") and "\n" not in str(refused.value)


@pytest.mark.parametrize(("given", "kind"), [("1", int), ("0", int), ("0.5", float), ("0.0", float)])
def test_a_count_stays_a_count_and_a_share_a_share(given: str, kind: type) -> None:
    tree = tomllib.loads(configs.dumps(configs.parse(MINIMAL)))
    tree["data"]["held_out"] = tree["schedule"]["warmup"] = tomllib.loads(f"x = {given}")["x"]
    config = configs.parse(tree)
    assert type(config.data.held_out) is type(config.schedule.warmup) is kind


def test_a_list_whose_items_are_refused_is_not_called_too_short_as_well() -> None:
    tree = tomllib.loads(configs.dumps(configs.parse(MINIMAL)))
    tree["data"]["sources"] = [{"path": "photos", "repeats": 0}]
    with pytest.raises(UserError) as refused:
        configs.parse(tree)
    assert str(refused.value) == "data.sources.0.repeats = 0: must be greater than or equal to 1"
    tree["data"]["sources"] = []
    with pytest.raises(UserError, match=r"^data\.sources = \[\]: give at least one$"):
        configs.parse(tree)


def test_the_word_for_references_beside_the_photos_is_no_folder_of_a_list() -> None:
    tree = tomllib.loads(configs.dumps(configs.parse(MINIMAL)))
    tree["data"]["sources"] = [{"path": "photos", "references": ["before", "files"]}]
    with pytest.raises(UserError, match="references: 'files' stands alone; in a list give folders"):
        configs.parse(tree)


def one_edits(word: str, rng: random.Random) -> set[str]:
    """A deletion, a substitution, an insertion and a swap."""
    i = rng.randrange(len(word))
    j = rng.randrange(len(word) - 1) if len(word) > 1 else 0
    letter = rng.choice("abcdefghijklmnopqrstuvwxyz")
    edits = {word[:i] + word[i + 1 :], word[:i] + letter + word[i + 1 :], word[:i] + letter + word[i:]}
    return edits | {word[:j] + word[j + 1 : j + 2] + word[j] + word[j + 2 :]}


@pytest.mark.slow
def test_every_one_edit_typo_is_refused_with_a_suggestion() -> None:
    rng, known = random.Random(0), set(configs.known_keys())
    tried = 0
    for key in sorted(known):
        if "*" in key:
            continue
        table, _, leaf = key.rpartition(".")
        for typo in one_edits(leaf, rng):
            wrong = f"{table}.{typo}" if table else typo
            if not typo or wrong in known:
                continue
            tree = tomllib.loads(configs.dumps(configs.parse(MINIMAL)))
            node = tree
            for part in table.split(".") if table else []:
                node = node.setdefault(part, {})
            node[typo] = node.get(leaf, 1)
            with pytest.raises(UserError, match="unknown key") as refused:
                configs.parse(tree)
            if len(leaf) > 3:
                assert f"did you mean {key}" in str(refused.value), f"{wrong}: {refused.value}"
            tried += 1
    assert tried > 200


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("run.seed=3", "run.seed", 3),
        ("run.name=candle", "run.name", "candle"),
        ("data.sources.0.repeats=5", "data.sources.0.repeats", 5),
        ('adapter.targets=["a", "b"]', "adapter.targets.1", "b"),
        ("model.components.unet.dtype=bf16", "model.components.unet.dtype", "bf16"),
        ("schedule.warmup=0.1", "schedule.warmup", 0.1),
    ],
)
def test_overrides_take_toml_literals(tmp_path: Path, override: str, key: str, value) -> None:
    import tomli_w

    path = tmp_path / "c.toml"
    path.write_text(tomli_w.dumps(MINIMAL))
    flat = configs.flatten(configs.load(str(path), [override]).model_dump(mode="json"))
    assert flat[key] == value


def test_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        configs.parse(MINIMAL).run.seed = 3


def test_a_tilde_is_the_home_folder_in_every_path(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = {key for key in configs.known_keys() if key.rpartition(".")[2] in ("path", "config", "output_dir", "cache_dir")}
    assert paths == {
        "run.output_dir", "model.path", "model.config", "model.cache_dir", "model.components.*.path", "data.cache_dir",
        "data.sources.*.path",
    }  # fmt: skip
    tree = {
        "run": {"name": "bear", "output_dir": "~/out", "max_steps": 4},
        "model": {"family": "sdxl", "path": "~/m", "config": "~/c", "cache_dir": "~/k",
                  "components": {"vae": {"path": "~/vae"}}},
        "data": {"sources": [{"path": "~/photos"}], "cache_dir": "~"},
    }  # fmt: skip
    (tmp_path / "run.toml").write_text(tomli_w.dumps(tree))
    flat = configs.flatten(configs.tree(configs.load("~/run.toml", ["data.sources.0.path=~/other"])))
    assert {key for key, value in flat.items() if str(value).startswith(str(tmp_path))} == {
        key.replace("components.*", "components.vae").replace("*", "0") for key in paths
    }
    assert flat["data.sources.0.path"] == f"{tmp_path}/other" and flat["data.cache_dir"] == str(tmp_path)


def test_a_home_that_is_not_there_is_named() -> None:
    tree = {**MINIMAL, "run": {**MINIMAL["run"], "output_dir": "~nobody-here/out"}}
    with pytest.raises(UserError, match="run.output_dir = '~nobody-here/out': there is no home folder ~nobody-here"):
        configs.parse(tree)
    with pytest.raises(UserError, match="--config ~nobody-here/run.toml: there is no home folder"):
        configs.load("~nobody-here/run.toml", [])


@pytest.mark.parametrize("path", [r"C:\Users\me\photos", "C:/Users/me/photos"])
def test_a_path_of_windows_is_told_its_name_in_wsl(path: str) -> None:
    said = "path of Windows; in WSL write /mnt/c/Users/me/photos$"
    with pytest.raises(UserError, match=f"run.output_dir = .*{said}"):
        configs.parse({**MINIMAL, "run": {**MINIMAL["run"], "output_dir": path}})
    with pytest.raises(UserError, match=f"--config .*{said}"):
        configs.load(path, [])


# What every config.toml and checkpoint of an earlier version has beside the keys of this one.
EARLIER = {
    "ema": {"kind": "constant", "snapshot_every_steps": 0},
    "export": {"license_link": ""},
    "optimizer": {"min_8bit_size": 4096},
    "precision": {"loss_scale_growth_interval": 2000},
}


def test_keys_that_earlier_versions_wrote_into_every_config_are_no_mistake() -> None:
    """With their defaults they ask for what every run does."""
    assert configs.parse(MINIMAL | EARLIER) == configs.parse(MINIMAL | {"ema": {"kind": "constant"}})
    left_out = {key for table, keys in EARLIER.items() for key in (f"{table}.{name}" for name in keys)}
    assert left_out == configs.REMOVED.keys() and {"ema.kind"} == configs.REMOVED.keys() & configs.known_keys().keys()


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"ema.kind": "power"}, "ema.kind = 'power': averages of any length are gone; take ema.kind = 'constant' alone"),
        (
            {"ema.kind": "power", "ema.snapshot_every_steps": 5},
            "ema.kind = 'power', ema.snapshot_every_steps = 5: averages of any length are gone; take ema.kind",
        ),
        ({"ema.snapshot_every_steps": 5}, "ema.snapshot_every_steps = 5: averages of any length are gone; take ema.kind"),
        (
            {"export.license_link": "https://me:secret@a.example"},
            "export.license_link = 'https://***@a.example': leave it out; for a licence that the hub has no name for",
        ),
        (
            {"optimizer.min_8bit_size": 16},
            "optimizer.min_8bit_size = 16: a group of fewer than 4096 elements has 32-bit state in every run; leave",
        ),
        (
            {"precision.loss_scale_growth_interval": {"a": 1}},
            "precision.loss_scale_growth_interval = {'a': 1}: it is 2000 updates without an overflow in every run; leave",
        ),
    ],
)
def test_what_an_earlier_version_had_is_named_in_one_sentence_with_what_to_take(given: dict[str, Any], line: str) -> None:
    overrides: dict[str, Any] = {}
    for key, value in given.items():
        table, _, name = key.partition(".")
        overrides.setdefault(table, {})[name] = value
    with pytest.raises(UserError) as refusal:
        configs.parse(MINIMAL | overrides)
    assert str(refusal.value).startswith(line) and "\n" not in str(refusal.value)
    assert all(configs.hint(key) in str(refusal.value) for key in given if key not in configs.known_keys())


def test_the_numbers_that_are_no_keys_any_more_are_those_of_the_runs() -> None:
    """What a default of a removed key stands for, and what the sentence says of it."""
    for key, number in {
        "optimizer.min_8bit_size": libraries.MIN_8BIT_SIZE, "precision.loss_scale_growth_interval": precision.GROWTH_INTERVAL
    }.items():  # fmt: skip
        default, instead = configs.REMOVED[key]
        assert default == number and str(number) in instead
