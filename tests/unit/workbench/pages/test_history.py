"""What happened when, from the files of a run alone: starts, stops and changes of the present timeline."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.unit.workbench.pages.test_live import read, write_metrics, write_png
from trainer import config as configs
from trainer.base.progress import START, STOP
from trainer.base.run_layout import Layout
from workbench.pages import curves, live
from workbench.pages.history import Events, Mark, Standing, marks_of, read_standing, read_starts
from workbench.pages.live import LiveReport, ReportedRun
from workbench.pages.rendering import render
from workbench.pages.settings import changed_keys, configuration

CHANGE = {"step": 20, "epoch": 1, "what": ["optimizer.lr: 0.002 -> 0.001", "run.seed: 1 -> 2"]}


def write_phases(path: Path, *entries: dict[str, object]) -> Path:
    lines = [json.dumps({"phase": "hashing", "done": 1}), *map(json.dumps, entries), '{"phase": "start of the train']
    path.write_text("\n".join(lines))
    return path


def start(step: int, time: float, total: int = 40) -> dict[str, object]:
    return {"phase": START, "started": time, "done": step, "total": total}


def test_starts_that_a_later_one_went_back_behind_are_gone(tmp_path: Path) -> None:
    path = write_phases(tmp_path / "phases.jsonl", start(0, 1.0), start(20, 2.0), start(30, 3.0), start(20, 4.0))
    assert read_starts(path) == [(0, 1.0), (20, 4.0)]
    assert read_starts(tmp_path / "missing") == []


def test_where_the_last_start_stands(tmp_path: Path) -> None:
    path, end = tmp_path / "phases.jsonl", {"phase": STOP, "done": 0}
    assert read_standing(tmp_path / "missing") == Standing()
    assert read_standing(write_phases(path, start(0, 1.0))) == Standing(40, started=1.0)
    assert read_standing(write_phases(path, start(0, 1.0), end)) == Standing(40, ended=True, started=1.0)
    told = write_phases(path, start(0, 1.0), end | {"why": "out of memory"})
    assert read_standing(told) == Standing(40, ended=True, reason="out of memory", started=1.0)
    resumed = write_phases(path, start(0, 1.0), end, start(20, 2.0, 80))
    assert read_standing(resumed) == Standing(80, start_step=20, started=2.0)


def test_marks_say_what_happened_and_how_long_nothing_did() -> None:
    rows = [{"step": 10, "time": 500.0}, {"step": 20, "time": 1000.0}, {"step": 21, "time": 1300.0}]
    assert marks_of([(0, 400.0)], rows, []) == (), "the first start is none"
    assert marks_of([(0, 400.0), (20, 1180.0)], rows, [CHANGE]) == (
        Mark(20, "resumed", "resumed after step 20, after a pause of 3 min 0 s"),
        Mark(20, "changed", "changed after step 20: optimizer.lr: 0.002 \N{RIGHTWARDS ARROW} 0.001; "
             "run.seed: 1 \N{RIGHTWARDS ARROW} 2"),
    )  # fmt: skip
    assert marks_of([(0, 400.0), (1000, 9.0)], rows, [])[0].text == "resumed after step 1,000", "of no known end"


def test_events_stand_on_the_charts() -> None:
    line = curves.lines_of({"x": [(step, 0.5) for step in range(11)]})
    marks = Mark(5, "resumed", "resumed after step 5"), Mark(50, "changed", "beyond the chart")
    events = Events(marks, {"samples": [0, 5, 10, 99], "kept": [20], "skipped": [7]})
    wide, narrow = (curves.draw("Loss", "", line, events=events, wide=wide) for wide in (True, False))
    for drawn in (wide, narrow):
        assert re.findall(r'<path class="mark (\w+)" d="M([\d.]+) 0V1000"/>', drawn) == [("resumed", "500.0")]
    assert re.findall(r'aria-label="(\w+: \d+)"><path d="([^"]*)"', wide) == [
        ("samples: 3", "M0 0V1000M500 0V1000M1000 0V1000"), ("skipped: 1", "M700 0V1000")
    ]  # fmt: skip
    assert '<li class="resumed">resumed after step 5</li>' in wide and "rail" not in narrow and "<li" not in narrow


def test_a_page_has_the_events_of_its_run(tmp_path: Path) -> None:
    write_metrics(tmp_path, 40)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rows[6] |= {"skipped": True}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_phases(tmp_path / "phases.jsonl", start(0, 1.7e9), start(20, 1.7e9 + 50))
    for step in (0, 20, 40):
        write_png(tmp_path / f"samples/step-{step:08d}/00.png", "a bear")
    for step in (20, 40, 60):  # the last one is of a timeline that was left
        (tmp_path / f"checkpoints/step-{step:08d}").mkdir(parents=True)
    report = LiveReport(ReportedRun(Layout(tmp_path), name="bear", total=40, changes=[CHANGE]))
    text, page = read(report.stopped())
    rails = dict(re.findall(r'aria-label="(samples|kept|skipped): (\d+)"', text))
    assert rails == {"samples": "2", "kept": "2", "skipped": "1"}, "of steps that the chart has"
    assert re.findall(r'<li class="(\w+)">', text) == ["resumed", "changed"] and "after a pause of 30 s" in page.text
    assert "step 60" not in page.text and report.contents(lambda: None)["events"].steps["kept"] == [20, 40]


def test_a_page_knows_for_how_long_its_run_may_be_silent(tmp_path: Path, monkeypatch) -> None:
    """A large model's step may take minutes: it is not called dead for that."""
    now = [1000.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    write_metrics(tmp_path, 3)
    report = LiveReport(ReportedRun(Layout(tmp_path), name="bear", total=40))
    quiet = []
    for silence in (5.0, 400.0, 90.0):
        now[0] += silence
        report.after_step(news=True)
        quiet.append(re.search(r'data-quiet="(\d+)"', (tmp_path / "report.html").read_text())[1])
    assert quiet == ["600", "1600", "1600"]


def test_writing_takes_no_more_than_its_share_of_the_time(tmp_path: Path, monkeypatch) -> None:
    now, written = [1000.0], []
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])

    def slow(path: Path, html: str) -> None:
        now[0] += 2.0
        written.append(now[0])

    monkeypatch.setattr(live, "write_page", slow)
    write_metrics(tmp_path, 3)
    report = LiveReport(ReportedRun(Layout(tmp_path), name="bear", total=40))
    report.write()
    for _ in range(599):
        now[0] += 1.0
        report.after_step(news=True)
    assert len(written) == 3, "2 s each, after 200 s each"
    report.after_step(news=False)
    assert len(written) == 3


def test_the_keys_that_differ_from_their_defaults(tmp_path: Path) -> None:
    """And those alone: a list by its entries."""
    tree = {
        "run": {"name": "bear", "output_dir": "out", "max_steps": 4, "seed": 0},
        "model": {"family": "sdxl", "path": "models/tiny-sdxl"},
        "data": {"sources": [{"path": "photos"}], "batch_size": 3},
        "optimizer": {"lr": 1e-4},
        "objective": {"t_range": [0.0, 0.9]},
    }
    path = tmp_path / "config.toml"
    path.write_text(configs.dumps(configs.parse(tree)))
    changed = {key: (value, default) for key, value, default in changed_keys(path) if default is not None}
    assert changed == {"data.batch_size": (3, 1), "objective.t_range.1": (0.9, [0.0, 1.0])}
    without = [key for key, _, default in changed_keys(path) if default is None]
    assert {"run.name", "run.max_steps", "model.path", "data.sources.0.path"} <= set(
        without
    ) and "optimizer.lr" not in without
    text = path.read_text()
    path.write_text(text.replace("[precision]\n", "[precision]\nloss_scale_growth_interval = 2000\n"))
    assert changed_keys(path) and not any("growth" in key for key, _, _ in changed_keys(path)), "of an earlier version"
    path.write_text(text.replace("[precision]\n", "[precision]\nloss_scale_growth_interval = 9\n"))
    assert ("precision.loss_scale_growth_interval", 9, None) in changed_keys(path)
    path.write_text(text)
    shown = render("configuration.html", config=configuration(path))
    assert "2 keys differ from the defaults" in shown and "data.<wbr>batch_<wbr>size" in shown
    path.write_text("[run\n")
    assert changed_keys(path) == [] and configuration(tmp_path / "missing") is None
