"""The file of --compare: what is read, and what is refused in one message."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from trainer.base.errors import UserError
from trainer.config import literal, load
from workbench.compare.variations import read_comparison

BASE = """
[run]
name = "bear"
output_dir = "out"
max_steps = 3
[model]
family = "sdxl"
path = "model"
[data]
sources = [{ path = "photos" }]
held_out = 2
[validation]
loss_every_steps = 1
"""
VARIANTS = """
[[variant]]
name = "dora"
set = { adapter.type = "dora" }
[[variant]]
name = "rules"
[variant.set.adapter]
rules = [{ component = "unet", match = 'a"b*', rank = 4 }]
targets = ["x", "y"]
"""


def write(tmp_path: Path, variants: str = VARIANTS, head: str = "seeds = [3, 1]", base: str = BASE) -> str:
    (tmp_path / "base.toml").write_text(base)
    path = tmp_path / "compare.toml"
    path.write_text(f'config = "{tmp_path}/base.toml"\noutput_dir = "compared"\n{head}\n{variants}')
    return str(path)


def test_each_variant_is_trained_with_each_seed_and_shares_the_rest(tmp_path: Path) -> None:
    read = read_comparison(write(tmp_path, head="seeds = [3, 1]\nset.optimizer.lr = 2e-3"))
    assert [(run.seed, run.variant) for run in read.runs] == [(3, "dora"), (3, "rules"), (1, "dora"), (1, "rules")]
    assert all(run.config.run.seed == run.seed and run.config.optimizer.lr == 2e-3 for run in read.runs)
    dora, rules, *_ = (run.config.adapter for run in read.runs)
    assert (dora.type, dora.rules) == ("dora", ()) and (rules.type, rules.targets) == ("lora", ("x", "y"))
    assert rules.rules[0].match == 'a"b*'


@pytest.mark.parametrize("value", [1, 2.5e-4, True, 'a "b" \\ c', ["x", 1], {"a b": [{"c": 'd"'}]}, []])
def test_a_literal_is_the_value_on_one_line(value: object) -> None:
    said = literal(value)
    assert "\n" not in said and tomllib.loads(f"value = {said}")["value"] == value


def variant(name: str = "b", keys: str = "") -> str:
    return f'[[variant]]\nname = "a"\n[[variant]]\nname = "{name}"\nset = {{ {keys} }}\n'


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"variants": ""}, "there is none of the variants; write two [[variant]] tables"),
        ({"variants": '[[variant]]\nname = "a"\n'}, "there is only 'a' of the variants"),
        ({"variants": variant("a")}, "two variants are named 'a'"),
        ({"variants": variant("slow lr")}, "variant.1.name = 'slow lr': use letters, digits, '.', '_' and '-'"),
        ({"head": "seeds = [1]"}, "seeds = [1]: give two at least"),
        ({"head": "seeds = [1, 1]"}, "seeds = [1, 1]: give two at least, each once"),
        ({"head": ""}, "seeds is required"),
        ({"head": "seeds = [1, 2]\nset.run.seed = 3"}, "the comparison decides it; leave it out and write seeds"),
        ({"head": "seeds = [1, 2]\nwidth = 3"}, "unknown key width"),
        ({"variants": variant(keys="adapter.rnak = 3")}, "variant 'b': unknown key adapter.rnak; did you mean adapter.rank?"),
        ({"variants": variant(keys='adapter.rank = "x"')}, "variant 'b': adapter.rank = 'x'"),
        ({"variants": variant(keys="run.seed = 3")}, "variant 'b': run.seed: variants share their seeds"),
        ({"variants": variant(keys="data.batch_size = 3")}, "variant 'b': data.batch_size: variants share photos and draws"),
        ({"variants": variant(keys="data.sources = []")}, "variant 'b': data.sources: variants share photos and draws"),
        ({"variants": variant(keys="validation.seed = 3")}, "variant 'b': validation.seed: variants are measured alike"),
        ({"variants": variant(keys='run.output_dir = "x"')}, "variant 'b': run.output_dir: the comparison decides it; leave"),
        ({"base": BASE.replace("held_out = 2", "")}, "measures no held-out loss, by which the variants are compared; write "
         "set = { data.held_out = 0.2 }"),
        ({"base": BASE.replace("loss_every_steps = 1", "")}, "set = { validation.loss_every_steps = 25 }"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused_with_the_remedy(tmp_path: Path, change: dict[str, str], said: str) -> None:
    path = write(tmp_path, **change)
    with pytest.raises(UserError) as error:
        read_comparison(path)
    assert str(error.value).startswith(f"--compare {path}: ") and said in str(error.value)


def test_files_that_are_missing_are_named_by_the_option_and_by_the_key(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--compare gone\.toml: No such file"):
        read_comparison("gone.toml")
    with pytest.raises(UserError, match=r"this compares variants of a config; write --compare .*compare\.toml$"):
        load(write(tmp_path), [])
    with pytest.raises(UserError, match=r"this is the config of one run; name it as config = "):
        read_comparison(str(tmp_path / "base.toml"))
    path = write(tmp_path)
    (tmp_path / "base.toml").unlink()
    with pytest.raises(UserError, match=r"variant 'dora': .*base\.toml: No such file"):
        read_comparison(path)


def test_an_earlier_comparison_gives_the_deviation_of_its_ends(tmp_path: Path) -> None:
    pairs = [
        {"by_step": [{"differences": [0.0, 90.0]}, {"differences": [0.0, 0.2]}]},
        {"by_step": [{"differences": [5.0, 5.1, 5.2]}]},
    ]
    (tmp_path / "earlier.json").write_text(json.dumps({"runs": [], "pairs": pairs}))
    given = read_comparison(write(tmp_path, head=f'seeds = [3, 1]\nearlier = "{tmp_path}/earlier.json"'))
    assert given.deviation == pytest.approx(((0.02 + 0.02) / 3) ** 0.5)
    assert read_comparison(write(tmp_path)).deviation is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file or directory; give a page's comparison.json"),
        ("{", "Invalid JSON"),
        ("{}", "pairs"),
        ('{"pairs": []}', "its pairs have no differences"),
        ('{"pairs": [{"by_step": []}]}', "by_step"),
        ('{"pairs": [{"by_step": [{"differences": ["a", 2]}]}]}', "differences"),
        ('{"pairs": [{"by_step": [{"differences": [0.1, 0.1]}]}]}', "its pairs have no differences"),
    ],
)
def test_an_earlier_comparison_that_is_none_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "earlier.json").write_text(text)
    with pytest.raises(UserError, match="earlier") as refused:
        read_comparison(write(tmp_path, head=f'seeds = [3, 1]\nearlier = "{tmp_path}/earlier.json"'))
    assert said in str(refused.value)
