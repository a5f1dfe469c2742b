"""A comparison judges what has one unit, each pair also at its own ends, and says as data what the page says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.base.progress import Sign
from trainer.base.run_layout import Layout
from workbench.compare.page import RunFiles, compare, group_runs, not_judged, pairs_of, read_run, record, without_samples
from workbench.pages.history import Standing


def run(root: Path, variant: str, seed: int, losses: list[float], keys: str = "") -> RunFiles:
    layout = Layout(root / f"{variant}-{seed}")
    layout.config.parent.mkdir(parents=True)
    layout.config.write_text(f"[run]\nseed = {seed}\nmax_steps = {len(losses)}\n{keys}")
    row = {"loss": 1.0, "lr": 0.1, "grad_norm": 0.1, "epoch": 1, "seconds": 0.5, "measured_photos": "m"}
    lines = [row | {"step": s, "images": s, "time": 1e9 + s, "held_out_loss": loss} for s, loss in enumerate(losses, 1)]
    layout.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return replace(read_run(layout.config.parent.name, layout), variant=variant)


@pytest.mark.parametrize(
    "keys",
    ['[model]\nprediction = "v"\n', "[model]\nzero_terminal_snr = true\n", '[model]\npath = "another"\n',
     '[model.components.vae]\npath = "another"\n', "[objective]\nguidance = 3.5\n"],
)  # fmt: skip
def test_losses_of_other_units_are_not_judged_and_the_rest_of_the_page_stays(tmp_path: Path, keys: str) -> None:
    both = (("a", ""), ("b", keys))
    runs = [run(tmp_path, name, seed, [0.9, 0.5 + seed / 9], more) for name, more in both for seed in (1, 2)]
    table, key = keys.splitlines()[0].strip("[]"), keys.splitlines()[1].partition(" ")[0]
    assert not pairs_of(group_runs(runs))
    assert not_judged(group_runs(runs)) == [
        f"a and b are not judged by the held-out loss, which is another quantity where {table}.{key} differs; compare their "
        "samples, times and memory."
    ]
    page = compare(runs, {})
    assert f"{table}.{key} differs" in page and "<b>Held-out loss</b>" in page
    assert f"{table}.{key} differs" in compare([replace(each, variant="") for each in runs], {}), "on any page of runs"


@pytest.mark.parametrize("keys", ['[model.components.unet]\ndtype = "nf4"\n', '[objective]\nloss = "huber"\n'])
def test_how_weights_are_stored_and_what_is_trained_by_changes_no_unit(tmp_path: Path, keys: str) -> None:
    """The held-out loss is the plain squared error, whatever the run's own loss is."""
    both = (("a", ""), ("b", keys))
    runs = [run(tmp_path, name, seed, [0.9, 0.5 + seed / 9], more) for name, more in both for seed in (1, 2)]
    assert len(pairs_of(group_runs(runs))) == 1 and not not_judged(group_runs(runs))


@pytest.mark.parametrize(("age", "kind"), [(60, "training"), (599, "training"), (601, "stopped"), (None, "stopped")])
def test_a_run_that_encodes_for_an_hour_is_at_work(tmp_path: Path, age: int | None, kind: str) -> None:
    """By its signs of life: it makes no step meanwhile."""
    alone = replace(run(tmp_path, "a", 1, [0.9]), config={"run.max_steps": 9})
    sign = None if age is None else Sign(2e9 - age, 5, "encoding photos")
    assert replace(alone, sign=sign).state(2e9).kind == kind
    assert replace(alone, sign=sign, standing=Standing(9, ended=True)).state(2e9).kind == "stopped", "it has told its end"


def test_variants_of_other_lengths_are_judged_at_their_ends_too(tmp_path: Path) -> None:
    runs = [run(tmp_path, "short", seed, [0.9, 0.5 + seed / 100]) for seed in (1, 2)]
    runs += [run(tmp_path, "long", seed, [0.9, 0.5 + seed / 100, 0.2, 0.1 + seed / 90]) for seed in (1, 2)]
    together, ends = pairs_of(group_runs(runs))
    assert (together.first, together.second, together.last.step) == ("short", "long", 2) and not any(together.last.each)
    assert (ends.first, ends.second) == ("short at its end (step 2)", "long at its end (step 4)")
    assert ends.last.each == pytest.approx([0.51 - 0.1 - 1 / 90, 0.52 - 0.1 - 2 / 90])
    assert {together.divisor, ends.divisor} == {1, 2}, "one more look is corrected for"


def test_the_data_are_those_of_the_page(tmp_path: Path) -> None:
    runs = [run(tmp_path, name, seed, [0.9, base + seed / 9]) for name, base in (("a", 0.5), ("b", 0.4)) for seed in (1, 2)]
    pairs = pairs_of(group_runs(runs))
    found = json.loads(json.dumps(record(runs, pairs)))
    assert [(each["variant"], each["seed"], each["seconds"], each["peak_bytes"]) for each in found["runs"]] == [
        ("a", 1, 0.5, None), ("a", 2, 0.5, None), ("b", 1, 0.5, None), ("b", 2, 0.5, None)
    ], "on a CPU no memory is measured"  # fmt: skip
    (pair,) = found["pairs"]
    assert [(at["step"], at["seeds"]) for at in pair["by_step"]] == [(1, [1, 2]), (2, [1, 2])]
    assert pair["by_step"][1]["differences"] == pytest.approx([0.1, 0.1]) and pair["interval"] == list(pairs[0].interval)


ASKED = '[validation]\nprompts = ["a bear"]\n'


@pytest.mark.parametrize(
    ("keys", "said"),
    [("", True), (ASKED, False), ('[validation]\nprompts = "captions"\n', False), (ASKED + "every_steps = 0\n", True),
     (ASKED + "every_steps = 0\nevery_epochs = 2\n", False), ('[[validation.samples]]\nprompt = "a bear"\n', False)],
)  # fmt: skip
def test_a_comparison_without_samples_says_so(tmp_path: Path, keys: str, said: bool) -> None:
    """One whose runs were asked for some, and drew none yet, says that."""
    runs = [run(tmp_path, name, 1, [0.9], keys) for name in "ab"]
    text = "There are no samples to compare: validation.prompts is empty, or validation.every_steps is 0."
    assert without_samples([each.config for each in runs]) == text * said
    page = compare(runs, {})
    assert (text in page) == said and ("No sample is drawn yet." in page) == (not said)
    assert without_samples([{}]) == "", "a run whose config is gone may have had them"


def test_a_narrow_page_begins_with_the_held_out_loss_and_its_interval(tmp_path: Path) -> None:
    """What a window of 400 px shows without scrolling: the first sentence, and the first two columns of a table."""
    runs = [run(tmp_path, name, seed, [0.9, loss + seed / 9]) for name, loss in (("a", 0.5), ("b", 0.6)) for seed in (1, 2)]
    body = compare(runs, {}, power="2 seeds tell apart what is far apart").partition("<main>")[2]
    first = body.partition("<p>")[2].partition("</p>")[0]
    assert "on these held-out photos the loss of a is lower by" in first and "95 % interval" in first
    assert body.index("2 seeds tell") > body.index(first) and body.index("<table") > body.index(first)
    table = body.partition("<thead>")[2]
    assert table.index(">Run<") < table.index(">Held-out loss<") < table.index(">State<")
    assert "0.6111, lowest 0.6111" in table.partition("a-1/report.html")[2].split("</td>")[1]
