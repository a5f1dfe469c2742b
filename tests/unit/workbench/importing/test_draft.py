"""A value of a wrong kind in another trainer's config is told by the name of its option, wherever it stands."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import import_config
from tests import foreign_configs
from trainer.base import other_trainers
from trainer.base.errors import UserError
from trainer.models import FAMILIES
from workbench.importing.catalogues import facts
from workbench.importing.draft import Options
from workbench.importing.reading import SIGNS, read_tree
from workbench.importing.writing import config_of, draft_of, text_of

WRONG: tuple[Any, ...] = ("big", ["big"], {"big": 1}, None, -1, 0.5, True)
# Of a config: what stands there, what is written in its place, the file that is to blame, and what is said.
MISTAKES = [
    ("sd-scripts", "--network_dim 32", "--network_dim 3 2", "train.sh", "network_dim = [3, 2]: it should be a number"),
    ("sd-scripts", "--unet_lr 2e-4", "--unet_lr fast", "train.sh", 'unet_lr = "fast": it should be a number'),
    ("sd-scripts", "--lr_warmup_steps 10", "--lr_warmup_steps 100%", "train.sh",
     'lr_warmup_steps = "100%": it should be a number of steps, or a share below 100%'),
    ("sd-scripts", "betas=0.9,0.99", "betas=0.9,high", "train.sh", 'betas = [0.9, "high"]: it should be a number'),
    ("sd-scripts", "--save_every_n_steps 20", "--save_every_n_steps 0", "train.sh",
     "save_every_n_steps = 0: it should be a number, 1 or more"),
    ("sd-scripts", "resolution = [1024, 768]", 'resolution = "big"', "data.toml",
     'subset resolution = "big": it should be a size, such as 1024 or "1024,768"'),
    ("sd-scripts", "datasets.subsets", "datasets.parts", "data.toml",
     "datasets subsets is left out: it should be a list of tables, each with its image_dir"),
    ("sd-scripts", "--network_dim 32", "--network_dim 32 --weighted_captions perhaps", "train.sh",
     'weighted_captions = "perhaps": it should be true or false'),
    ("sd-scripts", "beach", "\xe9t\xe9", "prompts.txt", "not UTF-8 (at byte"),
    ("OneTrainer", '"epochs": 12', '"epochs": "many"', "config.json", 'epochs = "many": it should be a number'),
    ("OneTrainer", '"epochs": 12', '"epochs": 1.5', "config.json", "epochs = 1.5: it should be a whole number"),
    ("OneTrainer", '{"enable_random_flip": false}', "3", "concepts.json",
     "concept image = 3: it should be a table: names with their values"),
    ("OneTrainer", '"epochs": 12', '"epochs": 12, "compile": 2', "config.json", "compile = 2: it should be true or false"),
    ("OneTrainer", '"epochs": 12', '"epochs": 12, "layer_offload_fraction": true', "config.json",
     "layer_offload_fraction = true: it should be a number"),
    ("ai-toolkit", "folder_path: img", "folder_path: img\n          network_weight: big", "config.yaml",
     'datasets.network_weight = "big": it should be a number'),
    ("ai-toolkit", "linear: 8", "linear: eight", "config.yaml", 'network.linear = "eight": it should be a number'),
    ("ai-toolkit", "quantize: true", "quantize: perhaps", "config.yaml",
     'model.quantize = "perhaps": it should be true or false'),
    ("ai-toolkit", "resolution: 512", "resolution: 2020-01-01", "config.yaml",
     'datasets.resolution = "2020-01-01": it should be a number, 16 or more'),
    ("SimpleTuner", '"--learning_rate": 0.0003', '"--learning_rate": NaN', "config.json",
     "learning_rate = nan: it should be a number"),
    ("SimpleTuner", '"repeats": 2', '"repeats": []', "backends.json", "backend repeats = []: it should be a number"),
]  # fmt: skip


@pytest.mark.parametrize(("trainer", "before", "after", "blamed", "said"), MISTAKES)
def test_a_value_of_another_kind_is_told_with_its_option_and_file(
    tmp_path: Path, capsys, monkeypatch, trainer: str, before: str, after: str, blamed: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = foreign_configs.write(tmp_path, trainer)
    text = (tmp_path / blamed).read_text()
    assert before in text
    (tmp_path / blamed).write_bytes(text.replace(before, after).encode("latin-1"))
    there = {*tmp_path.iterdir()}
    assert import_config.main([str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and f"{blamed}" in error and said in error and error.count("\n") == 1
    assert {*tmp_path.iterdir()} == there


@pytest.mark.parametrize(
    ("trainer", "before", "after", "kept"),
    [
        ("sd-scripts", "--network_dim 32", "--network_dim 32 --weighted_captions 1", "weighted_captions = true"),
        ("OneTrainer", '"epochs": 12', '"epochs": 12, "layer_offload_fraction": 0.5', 'offload = "blocks"'),
        ("OneTrainer", '"epochs": 12', '"epochs": 12, "compile": 1', 'compile = "blocks"'),
        ("ai-toolkit", "folder_path: img", "folder_path: img\n          network_weight: 0", "network_weight = 0"),
    ],
)
def test_a_switch_is_kept_however_its_program_writes_it(tmp_path: Path, trainer, before, after, kept) -> None:
    file = foreign_configs.write(tmp_path, trainer)
    for path in tmp_path.iterdir():
        path.write_text(path.read_text().replace(before, after))
    draft = draft_of(file)
    assert kept in text_of(draft, file)


def in_json(folder: Path, trainer: str) -> dict[Path, Any]:
    """The trees of a trainer's config by file, the config's first; the files are JSON under their names of before."""
    foreign_configs.write(folder, trainer)
    trees = {}
    for path in [folder / name for name in foreign_configs.MADE[trainer]]:
        if path.suffix != ".txt":
            trees[path.with_suffix(".json")] = read_tree(path)
    first = next(iter(trees))
    if trainer == "sd-scripts":
        trees[first]["dataset_config"] = "data.json"
    for path, tree in trees.items():
        path.write_text(json.dumps(tree))
    return trees


def changed(tree: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """(where, what stands there now, the tree) with each value in turn in place of each value of the tree."""
    node = tree
    for part in before:
        node = node[part]
    for part in [*node] if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        for wrong in WRONG:
            other = copy.deepcopy(tree)
            place = other
            for outer in before:
                place = place[outer]
            place[part] = wrong
            yield (*before, part), wrong, other
        yield from changed(tree, (*before, part))


@pytest.mark.parametrize("trainer", foreign_configs.MADE)
def test_every_value_may_be_of_a_wrong_kind(tmp_path: Path, trainer: str) -> None:
    """Exhaustive: each value of the config and of the files that it names, by each wrong kind."""
    trees = in_json(tmp_path, trainer)
    config = next(iter(trees))
    assert draft_of(config).sources
    refused = tried = 0
    for path, tree in trees.items():
        for where, wrong, other in [*(((), each, each) for each in WRONG), *changed(tree)]:
            path.write_text(json.dumps(other))
            tried += 1
            try:
                draft_of(config)
            except UserError as error:
                refused += 1
                names = {str(part).lstrip("-") for part in where if isinstance(part, str)} | {path.name}
                assert any(name in str(error) for name in names), (where, wrong)
        path.write_text(json.dumps(tree))
    assert refused > tried / 4


@pytest.mark.parametrize("trainer", foreign_configs.MADE)
def test_every_option_that_is_read_may_be_of_a_wrong_kind(tmp_path: Path, monkeypatch, trainer: str) -> None:
    """Those that the config leaves out, too: each is given as it is read."""
    config, get = next(iter(in_json(tmp_path, trainer))), Options.get
    asked: set[tuple[str, str]] = set()

    def noted(self: Options, name: str, otherwise: Any = None) -> Any:
        asked.add((self.prefix, name))
        return get(self, name, otherwise)

    monkeypatch.setattr(Options, "get", noted)
    draft_of(config)
    for option in sorted(asked):
        for wrong in WRONG:

            def given(self: Options, option=option, wrong=wrong) -> None:
                if self.prefix == option[0]:
                    self.values = {**self.values, option[1]: wrong}

            monkeypatch.setattr(Options, "__post_init__", given, raising=False)
            try:
                draft = draft_of(config)
                text_of(draft, config)
            except UserError as error:
                assert option[1] in str(error) or "cannot be brought along" in str(error), (option, wrong)
    assert len(asked) > 40


def test_numbers_in_words_are_taken_and_a_fault_of_this_program_is_none_of_the_users(tmp_path: Path, monkeypatch) -> None:
    file = foreign_configs.write(tmp_path, "SimpleTuner")
    text = file.read_text()
    file.write_text(text.replace("0.0003", '"3e-4"').replace('"--lora_rank": 8', '"--lora_rank": "8"'))
    draft = draft_of(file)
    assert (draft.value("optimizer.lr"), draft.value("adapter.rank")) == (3e-4, 8)
    monkeypatch.delitem(facts().flavours, "flux")
    file.write_text(text.replace('"--pretrained_model_name_or_path": "MODEL", ', ""))
    with pytest.raises(KeyError):
        draft_of(file)


def test_facts_of_other_trainers_are_of_names_that_there_are() -> None:
    tables, known = other_trainers.tables(), facts()
    assert {*vars(known)} == {
        "defaults", "defaults_at", "unlooked_defaults", "targets", "layer_presets", "flavours", "times", "guidance",
        "layers_option", "differs", "model_names", "optimizers",
    }  # fmt: skip
    assert known.defaults.keys() == known.defaults_at.keys() == known.unlooked_defaults.keys() == known.differs.keys()
    assert known.defaults.keys() == known.targets.keys() == {*tables.trainers[:-1]}
    for trainer, unlooked in known.unlooked_defaults.items():
        assert {*unlooked.split()} <= known.defaults[trainer].keys()
        for family, targets in known.targets[trainer].items():
            assert "*" in targets or targets in FAMILIES[family].adapters.presets
    assert known.flavours.keys() == FAMILIES.keys() == known.layer_presets.keys()


@pytest.mark.parametrize("trainer", ["SimpleTuner", "sd-scripts"])
def test_a_program_is_known_by_names_that_no_other_has(trainer: str) -> None:
    rows = [row for rows in other_trainers.tables().names.values() for row in rows]
    others = {name for row in rows for other in SIGNS if other != trainer for name in row.get(other, "").split()}
    own = {name for row in rows for name in row.get(trainer, "").split()}
    signs = {*SIGNS[trainer][0]} - {"script", "config_file"}  # the command itself, and a file that it names
    assert signs <= own and not signs & others


def test_a_simpletuner_config_without_its_family_asks_for_it(tmp_path: Path) -> None:
    said = {
        "pretrained_model_name_or_path": "m",
        "model_type": "lora",
        "data_backend_config": "b.json",
        "learning_rate": 1e-4,
    }
    (file := tmp_path / "a.json").write_text(json.dumps({f"--{name}": value for name, value in said.items()}))
    with pytest.raises(UserError, match=r"\(SimpleTuner\).*\n  model_family is left out: .*; --set model.family=VALUE says"):
        draft_of(file)
    draft = draft_of(file, overrides=["model.family=flux"])
    assert draft.trainer == "SimpleTuner" and config_of(draft, file).model.family == "flux"


@pytest.mark.parametrize(("name", "said"), [("gone.json", "is not there"), (".", "is a folder"), ("empty.yaml", "is empty")])
def test_a_file_that_is_none_is_named(tmp_path: Path, monkeypatch, name: str, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.yaml").write_text(" \n")
    with pytest.raises(UserError, match=f"^{name} {said}; give the file of a config$"):
        read_tree(Path(name))


BOMB = "\n".join(["a0: &a0 [x, x, x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 7))])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", BOMB, "it holds more than 100,000 values"),
        ("a.yaml", "job: &a [*a]", "its lists or tables stand too deep in one another"),
        ("a.sh", "python sdxl_train_network.py " + "$A " * 100_000, "300,029 letters, and 100,000 are the most of a script"),
    ],
)
def test_what_would_be_read_without_end_is_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    """Above what anybody has: an anchor of YAML that is used is none."""
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=f"{name}: {said}; correct it in the file"):
        read_tree(tmp_path / name)
    (tmp_path / "b.yaml").write_text("shared: &s {rank: 4}\nsets:\n" + "  - *s\n" * 1000)
    assert read_tree(tmp_path / "b.yaml")["sets"][999] == {"rank": 4}
