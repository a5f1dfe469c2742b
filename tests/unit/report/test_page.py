"""report.html: complete, escaped, loading nothing from elsewhere, and sensible for a run that has hardly begun."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image, PngImagePlugin

from trainer import validation
from trainer.layout import Layout
from trainer.report import curves, write_report
from trainer.report.samples import EMBED_BYTES, read_samples

NASTY = '<script>alert("x")</script> & co'
OUTCOME = {
    f"By block {NASTY}": {
        "columns": ["block", "largest", "same"],
        "rows": [[NASTY, 0.012345678, True], ["mid", None, False]],
        "notes": [f"note {NASTY}"],
    }
}


class Page(HTMLParser):
    """The tags of a page, its links and sources, and whether every opened tag was closed in order."""

    VOID = frozenset({"meta", "img", "br", "line", "circle", "polyline"})

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
    text, page = read(write_report(Layout(run), name=NASTY, outcome=OUTCOME))
    assert not page.all("script") and "<script" not in text
    assert page.text.count(NASTY) >= 5  # title, heading, outcome, prompt, config


def test_nothing_is_loaded_from_elsewhere(run: Path) -> None:
    text, page = read(write_report(Layout(run), name="bear", outcome=OUTCOME))
    assert "http://" not in text and "https://" not in text and "url(" not in text and "@import" not in text
    assert not [tag for tag, _ in page.tags if tag in {"link", "script", "iframe", "object", "embed", "base"}]
    assert all(attrs["src"].startswith("data:image/") for attrs in page.all("img"))
    (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy["content"].startswith("default-src 'none'")


def test_every_sample_is_embedded_as_it_is(run: Path) -> None:
    _, page = read(write_report(Layout(run), name="bear", outcome=None))
    images = page.all("img")
    files = sorted((run / "samples").glob("*/*.png"), key=lambda file: (file.stem, file.parent.name))
    assert [base64.b64decode(attrs["src"].partition(",")[2]) for attrs in images] == [f.read_bytes() for f in files]
    assert all(attrs["alt"] for attrs in images)
    assert images[0]["alt"] == "00, before training" and images[-1]["alt"] == f"{NASTY}, step 40"
    assert all((run / attrs["href"]).exists() for attrs in page.all("a"))


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
    assert [(row.prompt, row.detail, sorted(row.links.items())) for row in samples.rows] == [
        ("a cat", "8 x 8 px, seed 1, 20 steps",
         [(0, "samples/step-00000000/01.png"), (2, "samples/step-00000002/00.png")]),
        ("a bear", "8 x 8 px, seed 2, 20 steps", [(2, "samples/step-00000002/01.png")]),
        ("a bear", "8 x 8 px, seed 2, 20 steps", [(2, "samples/step-00000002/02.png")]),
        ("a bear", "8 x 8 px, seed 1, 20 steps, not: fur, guidance 3.5, strength 0.5",
         [(2, "samples/step-00000002/03.png")]),
        ("a bear", "8 x 8 px, seed 1, 20 steps", [(0, "samples/step-00000000/00.png")]),
    ]  # fmt: skip
    before, after = tmp_path / "samples/step-00000000", tmp_path / "samples/step-00000002"
    assert validation.compared(before, after, tmp_path) == [(before / "01.png", after / "00.png", None)]
    text, page = read(write_report(Layout(tmp_path), name="bear", outcome=None))
    assert text.count(">none</td>") == 4 and "8 x 8 px, seed 2, 20 steps" in page.text


def test_a_large_set_of_samples_becomes_thumbnails(tmp_path: Path) -> None:
    total = sum(len(write_png(tmp_path / f"samples/step-{s:08d}/00.png", None, 1500, noise=True)) for s in range(3))
    assert total > EMBED_BYTES
    text, page = read(write_report(Layout(tmp_path), name="bear", outcome=None))
    assert len(page.all("img")) == 3 and len(text) < total / 3
    assert all(attrs["src"].startswith("data:image/jpeg") for attrs in page.all("img"))


@pytest.mark.parametrize(("steps", "raw", "mean"), [(2, 0, 2), (40, 40, 40), (800, 800, 400), (20_000, 800, 400)])
def test_polylines_have_the_points_of_the_run(tmp_path: Path, steps: int, raw: int, mean: int) -> None:
    write_metrics(tmp_path, steps)
    text, _ = read(write_report(Layout(tmp_path), name="bear", outcome=None))
    chart = next(part for part in text.split("<figure") if "<b>Loss</b>" in part)
    points = {kind: len(p.split()) for kind, p in re.findall(r'<polyline class="(\w+)" points="([^"]*)"', chart)}
    assert points == ({"raw": raw} if raw else {}) | {"mean": mean}
    assert "nan" not in chart.lower() and "inf" not in chart.lower()


def test_thinning_keeps_a_spike() -> None:
    series = [(float(step), 100.0 if step == 31_234 else 1.0) for step in range(100_000)]
    assert (31_234.0, 100.0) in curves.thin(series)


def test_a_null_value_is_a_gap_and_a_lone_value_a_dot() -> None:
    curve = curves.Curve("loss", "Loss", "", smooth=False)
    svg = curves.draw(curve, [(1, 0.5), (2, None), (3, 0.4), (4, 0.3)])
    assert svg.count("<polyline") == 1 and svg.count("<circle") == 1


def test_the_moving_average_of_a_constant_is_the_constant() -> None:
    smoothed = curves.smooth([(1, 2.0), (2, None), (3, 2.0)], window=5)
    assert [value for _, value in smoothed] == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize("values", [[0.0], [0.0, 0.0], [-1.0, 1.0], [1e-30, 1e30], [3.0, 3.0], [1e-12, 2e-12]])
def test_any_range_of_values_can_be_drawn(values: list[float]) -> None:
    svg = curves.draw(curves.Curve("x", "X", "", may_be_log=True), list(enumerate(values, 1)))
    assert len(re.findall('class="grid"', svg)) in range(2, 12)
    heights = [float(y) for y in re.findall(r'c?y1?="([-\d.]+)"', svg)]
    assert all(0 <= y <= curves.HEIGHT for y in heights)


def test_other_numeric_fields_are_drawn_when_they_vary(tmp_path: Path) -> None:
    rows = [{"step": s, "loss": 0.1, "loss_scale": 2.0**s, "vram_bytes": s, "constant": 1, "skipped": False} for s in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text, _ = read(write_report(Layout(tmp_path), name="bear", outcome=None))
    assert re.findall(r"<figcaption><b>([^<]*)</b>", text) == ["Loss", "Loss scale", "vram bytes"]


def test_adapter_files_are_listed_with_size_and_hash(run: Path) -> None:
    text, page = read(write_report(Layout(run), name="bear", outcome=None))
    assert hashlib.sha256(b"x" * 2048).hexdigest() in text and "2.0 KiB" in page.text and "bear.safetensors" in page.text


def test_outcome_cells(run: Path) -> None:
    text, page = read(write_report(Layout(run), name="bear", outcome=OUTCOME))
    assert "0.01235" in page.text and ">yes<" in text and ">-<" in text


def test_a_run_that_has_done_nothing_gives_a_page(tmp_path: Path) -> None:
    _, page = read(write_report(Layout(tmp_path), name="bear", outcome=None))
    for sentence in ("recorded nothing yet", "No step has been", "no sample images", "No adapter file", "no config.toml"):
        assert sentence in page.text
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]  # no temporary left


def test_a_torn_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    write_metrics(tmp_path, 3)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    _, page = read(write_report(Layout(tmp_path), name="bear", outcome=None))
    assert "1 line(s) of metrics.jsonl could not be read" in page.text


def test_the_held_out_loss_is_drawn_from_step_0_on(tmp_path: Path) -> None:
    def measured(held_out: float) -> dict:
        quarters = [4 * held_out, held_out, held_out / 4, held_out / 16]
        return {"held_out_loss": held_out, "held_out_quarters": quarters, "trained_loss": 0.8, "trained_quarters": quarters}

    rows = [{"step": step, "loss": 1 / step, "lr": 1e-4} for step in range(1, 21)]
    rows[0] |= {"at_start": measured(0.9)}
    rows[9] |= measured(0.5)
    rows[19] |= measured(0.6)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, page = read(write_report(Layout(tmp_path), name="bear", outcome=None))
    said = [attrs["aria-label"] for attrs in page.all("svg")]
    (losses,) = (text for text in said if text.startswith("Loss at fixed draws over steps 0 to 20"))
    assert "held-out photos from 0.9 to 0.6; trained photos from 0.8 to 0.8; loss of the training" in losses
    (quarters,) = (text for text in said if text.startswith("Loss of held-out photos by time"))
    assert "least noise from 3.6 to 2.4" in quarters and "most noise from 0.05625 to 0.0375" in quarters
    assert not [text for text in said if text.startswith(("held out", "trained", "at start"))]
