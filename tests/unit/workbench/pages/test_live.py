"""report.html: complete, escaped, loading nothing from elsewhere, and sensible for a run that has hardly begun."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, PngImagePlugin

from trainer.base.run_layout import Layout
from workbench.pages import curves, data_report, history, live, thumbnails
from workbench.pages.live import LiveReport, ReportedRun
from workbench.pages.samples import read_samples
from workbench.summary.outcome import sample_triples

NASTY = '<script>alert("x")</script> & co'
OUTCOME = {
    f"By block {NASTY}": {
        "columns": ["block", "largest", "same"],
        "rows": [[NASTY, 0.012345678, True], ["mid", None, False]],
        "notes": [f"note {NASTY}"],
    }
}


def write_report(layout: Layout, *, name: str = "bear", outcome: dict | None = None, **more: Any) -> Path:
    """The page of a run that has stopped, or with an outcome of one that has reached its end."""
    data_of = more.pop("data_of", dict)
    report = LiveReport(ReportedRun(layout, name=name, total=40, **more), data_of=data_of)
    return report.stopped() if outcome is None else report.finished(outcome, {"unet.mid_block": 0.02})


class Page(HTMLParser):
    """The tags of a page, its links and sources, and whether every opened tag was closed in order."""

    VOID = frozenset({"meta", "img", "br", "link", "wbr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.html, self.text = text, ""
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def all(self, tag: str, **wanted: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag and wanted.items() <= attrs.items()]


def write_metrics(folder: Path, steps: int, **changes: object) -> None:
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            row = {
                "step": step,
                "epoch": 0,
                "loss": 1 / step,
                "lr": 1e-4,
                "grad_norm": 0.5,
                "images": 2 * step,
                "seconds": 0.1,
                "time": 1.7e9 + step,
            }
            file.write(json.dumps(row | changes) + "\n")


def write_png(path: Path, prompt: str | None = None, side: int = 8, noise: bool = False, **asked: object) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    info = PngImagePlugin.PngInfo()
    if prompt:
        info.add_text("prompt", prompt)
    if asked:
        default = {"prompt": prompt, "width": 8, "height": 8, "steps": 20, "guidance": None, "negative": "", "strength": 1.0}
        info.add_text("request", json.dumps(default | asked))
    image = Image.effect_noise((side, side), 90).convert("RGB") if noise else Image.new("RGB", (side, side), "teal")
    image.save(path, pnginfo=info)
    return path.read_bytes()


def read(path: Path) -> tuple[str, Page]:
    text = path.read_text(encoding="utf-8")
    return text, Page(text)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_metrics(tmp_path, 40)
    (tmp_path / "config.toml").write_text(f'[run]\nname = "bear"\n\n[adapter]\nrank = 8\n# {NASTY}\n')
    for step in (0, 20, 40):
        for index in range(2):
            write_png(tmp_path / f"samples/step-{step:08d}/{index:02d}.png", NASTY if index else None)
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters/bear.safetensors").write_bytes(b"x" * 2048)
    return tmp_path


def test_everything_from_outside_is_escaped(run: Path) -> None:
    data = {NASTY: {"columns": [NASTY], "rows": [[NASTY]], "notes": [NASTY]}}
    told = {"lineage": {NASTY: NASTY}, "environment": {NASTY: NASTY}, "kicker": NASTY, "data_of": lambda: data}
    text, page = read(write_report(Layout(run), name=NASTY, outcome=OUTCOME, **told))
    assert len(page.all("script")) == 1 and text.count("<script") == 1
    assert page.text.count(NASTY) >= 15  # title, kicker, heading, data, outcome, prompt, lineage, environment, config


def test_nothing_is_loaded_from_elsewhere_and_one_script_runs(run: Path) -> None:
    text, page = read(write_report(Layout(run), outcome=OUTCOME))
    assert "http://" not in text and "https://" not in text and "url(" not in text and "@import" not in text
    assert not [tag for tag, _ in page.tags if tag in {"iframe", "object", "embed", "base"}]
    assert all(attrs["src"].startswith("data:image/") for attrs in page.all("img"))
    assert [attrs["href"] for attrs in page.all("link")] == ["data:,"], "a browser would ask a server for an icon"
    (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = [rule.strip() for rule in policy["content"].split(";")]
    assert rules[0] == "default-src 'none'" and f"script-src 'sha256-{digest}'" in rules


def test_a_data_report_opens_with_the_photos_and_ends_with_what_the_console_said() -> None:
    picture = {"jpeg": b"", "title": "0/a.jpg", "lines": [], "details": []}
    data = {
        "Damaged": {"columns": ("file",), "rows": [("0/b.jpg",)]},
        "In short": {"text": "data: 3 photos"},
        "Buckets": {"columns": ("size",), "rows": [("64x64",)]},
        "As they are cropped": {"pictures": [picture]},
    }
    text = data_report.html(name="bear", data=data)
    titles = ["As they are cropped", "Damaged", "Buckets", "In short"]
    assert re.findall(r"<h2>(.*?)</h2>", text) == titles == re.findall(r'<a href="#[\w-]+">(.*?)</a>', text)
    last = re.sub(r">\s+<", "><", text).partition("In short</h2>")[2]
    assert last.startswith("<details><summary>As the console says it</summary><pre>data: 3 photos</pre></details></section>")
    assert "<pre>" not in text.partition("<details")[0]


def test_every_sample_is_embedded_once_as_it_is(run: Path) -> None:
    _, page = read(write_report(Layout(run)))
    beside = [attrs for attrs in page.all("img") if "title" in attrs]  # small copies of the newest, beside the verdict
    assert all(attrs["src"].startswith("data:image/jpeg") and ", step 40" in attrs["title"] for attrs in beside)
    assert page.html.index(beside[0]["src"]) < page.html.index('id="samples"') and 0 < len(beside) <= 3
    images = [attrs for attrs in page.all("img") if attrs not in beside]
    files = sorted((run / "samples").glob("*/*.png"))
    assert sorted(base64.b64decode(attrs["src"].partition(",")[2]) for attrs in images) == sorted(
        f.read_bytes() for f in files
    )
    steps = "before training", "step 40", "step 20"  # what lies between stands on the strip
    assert [attrs["alt"] for attrs in images] == [f"{prompt}, {step}" for prompt in ("00", NASTY) for step in steps]
    assert all((run / attrs["href"]).exists() for attrs in page.all("a") if not attrs["href"].startswith("#"))


def test_an_image_stands_under_what_was_asked_for(tmp_path: Path) -> None:
    """A run that went on with other prompts gives other images the same file names."""
    drawn = {
        ("00000000", "00"): ("a bear", {"seed": 1}),
        ("00000000", "01"): ("a cat", {"seed": 1}),
        ("00000002", "00"): ("a cat", {"seed": 1}),
        ("00000002", "01"): ("a bear", {"seed": 2}),
        ("00000002", "02"): ("a bear", {"seed": 2}),
        ("00000002", "03"): ("a bear", {"seed": 1, "negative": "fur", "guidance": 3.5, "strength": 0.5}),
    }
    for (step, index), (prompt, asked) in drawn.items():
        write_png(tmp_path / f"samples/step-{step}/{index}.png", prompt, **asked)
    samples = read_samples(tmp_path / "samples")
    assert [(row.prompt, row.detail, [(s, image.link) for s, image in row.images.items()]) for row in samples.rows] == [
        ("a cat", "8 x 8 px, seed 1, 20 steps",
         [(0, "samples/step-00000000/01.png"), (2, "samples/step-00000002/00.png")]),
        ("a bear", "8 x 8 px, seed 2, 20 steps", [(2, "samples/step-00000002/01.png")]),
        ("a bear", "8 x 8 px, seed 2, 20 steps", [(2, "samples/step-00000002/02.png")]),
        ("a bear", "8 x 8 px, seed 1, 20 steps, not: fur, guidance 3.5, strength 0.5",
         [(2, "samples/step-00000002/03.png")]),
        ("a bear", "8 x 8 px, seed 1, 20 steps", [(0, "samples/step-00000000/00.png")]),
    ]  # fmt: skip
    before, after = tmp_path / "samples/step-00000000", tmp_path / "samples/step-00000002"
    assert sample_triples(Layout(tmp_path), 2) == [(before / "01.png", after / "00.png", None)]
    text, page = read(write_report(Layout(tmp_path)))
    present, _, gone = page.text.partition("1 prompt of earlier steps, not asked for any more")
    assert present.count("a bear") == 3 and gone.count("a bear") == 1 and "8 x 8 px, seed 2, 20 steps" in present


@pytest.mark.slow
def test_a_large_set_of_samples_stays_small_and_is_encoded_once(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(thumbnails, "EMBED_BYTES", budget := 250_000)
    total = sum(len(write_png(tmp_path / f"samples/step-{s:08d}/00.png", None, 250, noise=True)) for s in range(3))
    assert total > budget
    made: list[int] = []
    real = thumbnails.reduced
    monkeypatch.setattr(thumbnails, "reduced", lambda data, side: made.append(side) or real(data, side))
    report = LiveReport(ReportedRun(Layout(tmp_path), name="bear", total=40))
    report.write()
    text, page = read(tmp_path / "report.html")
    images = [attrs for attrs in page.all("img") if "decoding" in attrs]  # the gallery's
    assert len(images) == 3 and 3 <= len(made) <= 9, "noise may need a second and a third attempt"
    assert all(attrs["src"].startswith("data:image/jpeg") for attrs in images)
    tried = len(made)
    report.write()
    assert len(made) == tried
    for step in range(3, 30):  # the budget is for all of them: each gets smaller
        write_png(tmp_path / f"samples/step-{step:08d}/00.png", None, 250, noise=True)
    report.write()
    images = [attrs for attrs in read(tmp_path / "report.html")[1].all("img") if "decoding" in attrs]
    assert len(images) == 30 and sum(len(attrs["src"]) for attrs in images) < 1.4 * budget


def test_the_first_step_of_a_start_is_on_the_page_at_once(tmp_path: Path, monkeypatch) -> None:
    """However long writing takes. Later ones wait until they cost less than a hundredth of the time."""
    monkeypatch.setattr(live, "SHARE", 0.0)
    for begun in (0, 25):
        report = LiveReport(ReportedRun(Layout(tmp_path), name="bear", total=40, start_step=begun))
        with report:
            for step in range(begun, begun + 3):
                if step:
                    write_metrics(tmp_path, step)
                report.after_step(news=True)
                said = read(tmp_path / "report.html")[1].text
                assert (f"Training: step {begun + 1} of 40" in said) == (step > begun), step
                assert step == begun or "No step had been made" not in said


@pytest.mark.parametrize(("steps", "raw", "mean"), [(2, 0, 2), (40, 40, 40), (800, 600, 300), (20_000, 600, 300)])
def test_lines_have_the_points_of_the_run(tmp_path: Path, steps: int, raw: int, mean: int) -> None:
    write_metrics(tmp_path, steps)
    text, _ = read(write_report(Layout(tmp_path)))
    chart = next(part for part in text.split("<figure") if "<b>Loss</b>" in part)
    points = {kind: p.count(" ") for kind, p in re.findall(r'<path class="(\w+)" data-name="[^"]*" d="([^"]*)"', chart)}
    assert points == ({"raw": raw} if raw else {}) | {"line0": mean}
    assert "nan" not in chart.lower().replace("name", "") and "inf" not in chart.lower()


def test_thinning_keeps_a_spike() -> None:
    series = [(float(step), 100.0 if step == 31_234 else 1.0) for step in range(100_000)]
    assert (31_234.0, 100.0) in curves.thin(series)


def test_a_long_log_is_thinned_before_it_is_drawn(monkeypatch) -> None:
    """Once for each line. The axes and the words are those of all values."""
    seen, over, thin = [], curves.Axes.over, curves.thin

    def counted(steps, values, *, log: bool):
        seen.append(len(values))
        return over(steps, values, log=log)

    monkeypatch.setattr(curves.Axes, "over", staticmethod(counted))
    monkeypatch.setattr(curves, "thin", lambda series: (seen.append("thinned"), thin(series))[1])
    series = [(float(step), 3.0 + step % 7 + 50.0 * (step == 61_234)) for step in range(1, 100_001)]
    line = curves.Curve("loss", series, "line0", band=[series, series])
    text = curves.draw("Loss", "", [line])
    assert seen == ["thinned"] * 3 + [seen[-1]] and seen[-1] <= 3 * 2 * curves.POINTS
    assert "over steps 1 to 100000: loss from 4 to 8" in text and "[1.0, 100000.0, 3.0, 58.0, true]" in text


def test_a_null_value_is_a_gap_and_a_lone_value_a_dot() -> None:
    svg = curves.draw("Loss", "", curves.lines_of({"loss": [(1, 0.5), (2, None), (3, 0.4), (4, 0.3)]}))
    (drawn,) = re.findall(r' d="(M[^"]*)"/></svg>', svg)
    dot, line = drawn[1:].split("M")
    assert dot.endswith("h0") and dot.count(" ") == 1 and line.count(" ") == 2


def test_the_moving_average_of_a_constant_is_the_constant() -> None:
    smoothed = curves.smooth([(1, 2.0), (2, None), (3, 2.0)], window=5)
    assert [value for _, value in smoothed] == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize("values", [[0.0], [0.0, 0.0], [-1.0, 1.0], [1e-30, 1e30], [3.0, 3.0], [1e-12, 2e-12], [0.3, 4.0]])
def test_any_range_of_values_can_be_drawn(values: list[float]) -> None:
    svg = curves.draw("X", "", curves.lines_of({"x": list(enumerate(values, 1))}))
    assert svg.count('class="y"') in range(2, 12)
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([-\d.]+)", svg)]
    assert heights and all(0 <= y <= curves.SIDE for y in heights)


def test_peak_memory_is_drawn_and_told_in_gib(tmp_path: Path) -> None:
    """No run on a CPU has it: the log of one on a GPU does. A step without it is a gap, no zero."""
    write_metrics(tmp_path, 4)
    peaks = [3.0, None, 7.5, 6.0]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for row, gib in zip(rows, peaks, strict=True):
        row["peak_bytes"] = gib and int(gib * 2**30)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text, page = read(write_report(Layout(tmp_path)))
    (chart,) = (part for part in text.split("<figure") if "<b>Peak memory</b>" in part)
    assert '<span class="unit">GiB</span>' in chart
    assert "Peak memory over steps 1 to 4: peak memory from 3 to 6" in chart
    ticks = [float(tick) for tick in re.findall(r'class="y"[^>]*>([\d.]+)<', chart)]
    assert ticks[0] <= 3 and 7.5 <= ticks[-1] <= 10
    (drawn,) = re.findall(r'data-name="peak memory" d="([^"]*)"', chart)
    assert drawn.count("M") == 2 and drawn.count("L") == 1
    assert re.search(r"<dt>Peak memory</dt><dd>7\.5 GiB</dd>", text), "the highest of all steps"
    write_metrics(tmp_path, 4)
    assert "Peak memory" not in read(write_report(Layout(tmp_path)))[0]


def test_other_numeric_fields_are_drawn_when_they_vary(tmp_path: Path) -> None:
    rows = [{"step": s, "loss": 0.1, "loss_scale": 2.0**s, "vram_bytes": s, "constant": 1, "skipped": False} for s in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(row | {"lr": 1, "images": s}) + "\n" for row in rows for s in [1])
    )
    text, _ = read(write_report(Layout(tmp_path)))
    assert re.findall(r"<figcaption><b>([^<]*)</b>", text) == ["Loss", "Learning rate", "Loss scale", "Vram bytes"]


def test_adapter_files_are_listed_with_size_and_hash_and_hashed_once(run: Path, monkeypatch) -> None:
    report, read_files, real = LiveReport(ReportedRun(Layout(run), name="bear", total=40)), [], live.hash_file
    monkeypatch.setattr(live, "hash_file", lambda path, advance: read_files.append(path) or real(path, advance))
    for content in (b"x" * 2048, b"x" * 2048, b"other"):
        if content == b"other":
            (run / "adapters/bear.safetensors").write_bytes(content)
        report.write()
        text, page = read(run / "report.html")
        assert hashlib.sha256(content).hexdigest() in text and "bear.safetensors" in page.text
        assert ("5 B" if content == b"other" else "2.0 KiB") in page.text
    assert len(read_files) == 2


def test_outcome_cells(run: Path) -> None:
    text, page = read(write_report(Layout(run), outcome=OUTCOME))
    assert "0.01235" in page.text and ">yes<" in text and ">-<" in text


def test_a_run_that_has_done_nothing_gives_a_page(tmp_path: Path) -> None:
    with LiveReport(ReportedRun(Layout(tmp_path), name="bear", total=40)):
        _, page = read(tmp_path / "report.html")
        for sentence in (
            "Starting: 40 steps",
            "No step had been made when this page was written",
            "No step has been",
            "No sample is drawn",
            "No adapter file",
            "There is no config.toml",
            "The photos are being looked at.",
        ):
            assert sentence in page.text
        assert page.all("body")[0]["data-written"]
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]  # no temporary left
    _, page = read(tmp_path / "report.html")
    assert "Stopped at step 0 of 40" in page.text and "data-written" not in page.all("body")[0]
    assert "The run ended before its photos were looked at." in page.text


def test_the_log_is_read_as_it_grows(tmp_path: Path) -> None:
    write_metrics(tmp_path, 3)
    found = history.History(tmp_path / "metrics.jsonl")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
        file.flush()
        assert (found.read().step, found.unreadable) == (3, 1)
        _, page = read(write_report(Layout(tmp_path)))
        assert "1 line(s) of metrics.jsonl could not be read" in page.text
        file.write('ss": 2.5, "lr": 1e-4, "images": 8}\n[]\n')
        file.flush()
        assert (found.read().step, found.unreadable, found.last("loss")) == (4, 1, 2.5)
    write_metrics(tmp_path, 2)  # cut, as by a resumed run
    assert (found.read().step, found.unreadable, len(found.series("loss"))) == (2, 0, 2)


def test_the_held_out_loss_is_drawn_from_step_0_on(tmp_path: Path) -> None:
    def measured(held_out: float, mark: str = "a") -> dict:
        quarters = [4 * held_out, held_out, held_out / 4, held_out / 16]
        told = {"held_out_loss": held_out, "held_out_quarters": quarters, "trained_loss": 0.8, "trained_quarters": quarters}
        return told | {"measured_photos": mark}

    rows: list[dict] = [{"step": step, "loss": 1 / step, "lr": 1e-4, "images": step} for step in range(1, 21)]
    rows[0] |= {"at_start": measured(0.9)}
    rows[9] |= measured(0.5)
    rows[10] |= {"at_start": measured(0.2, "b")}
    rows[19] |= measured(0.6, "b")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text, page = read(write_report(Layout(tmp_path)))
    said = [attrs["aria-label"] or "" for attrs in page.all("svg")]
    (losses,) = (told for told in said if told.startswith("Loss over steps 0 to 20"))
    assert "each step from 1 to 0.05; moving average" in losses
    assert "held-out photos from 0.9 to 0.6; trained photos, same draws from 0.8 to 0.8" in losses
    (quarters,) = (told for told in said if told.startswith("Loss by timestep quarter"))
    assert "least noise from 3.6 to 2.4" in quarters and "most noise from 0.05625 to 0.0375" in quarters
    assert not [told for told in said if told.lower().startswith(("held out", "trained", "at start"))]
    (drawn,) = re.findall(r'data-name="held-out photos" d="([^"]*)"', text)
    assert drawn.count("M") == 2, "of other photos it is another curve"


@pytest.mark.slow
@pytest.mark.parametrize("side", [8, 1600], ids=["as they are", "reduced"])
def test_images_that_cannot_be_read_are_left_out(tmp_path: Path, side: int) -> None:
    """Cut below the head, within it, of no length, of another kind, and beside what says it is an image."""
    for step in (0, 20, 40):
        write_png(tmp_path / f"samples/step-{step:08d}/00.png", "a bear", side, noise=True, seed=1)
    folder = tmp_path / "samples/step-00000040"
    whole = (folder / "00.png").read_bytes()
    for name, data in (("00", whole[:-40]), ("01", whole[:20]), ("02", b""), ("03", b"GIF89a"), ("._00", b"x")):
        (folder / f"{name}.png").write_bytes(data)
    write_png(tmp_path / "samples/truth/of.png", "a bear", seed=1)
    (tmp_path / "samples/truth/of.png").write_bytes(b"x")
    report = LiveReport(ReportedRun(Layout(tmp_path), name="bear", total=40))
    for _ in range(2):  # what was read of them is remembered
        report.write()
        _, page = read(tmp_path / "report.html")
        assert "4 image(s) of samples/ could not be read and are left out." in page.text
        assert [shot["data-step"] for shot in page.all("figure", **{"class": "shot"})] == ["0", "20"]


def test_a_page_of_nothing_but_damaged_images_says_so(tmp_path: Path) -> None:
    (tmp_path / "samples/step-00000000").mkdir(parents=True)
    (tmp_path / "samples/step-00000000/00.png").write_bytes(b"x")
    _, page = read(write_report(Layout(tmp_path)))
    assert "1 image(s) of samples/ could not be read" in page.text and "No sample is drawn yet" not in page.text


@pytest.mark.parametrize("asked", [{"guidance": "x"}, {"strength": []}, {"negative": {}, "guidance": [1]}])
def test_a_request_that_makes_no_sense_is_shown_without_its_words(tmp_path: Path, asked: dict) -> None:
    write_png(tmp_path / "samples/step-00000000/00.png", "a bear", seed=1, **asked)
    _, page = read(write_report(Layout(tmp_path)))
    assert "a bear" in page.text and "seed 1" not in page.text
