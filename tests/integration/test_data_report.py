"""scripts/data.py report: counts against those made here, a page that stands alone, and the same lines as --plan's."""

from __future__ import annotations

import html
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from scripts.data import main as data
from tests.harness import PHOTOS, ROOT, Workbench
from tests.unit.data.test_scan_many import fill
from tests.unit.workbench.pages.test_live import Page
from workbench.commands.main import main as train

# In a process of its own, whose memory is the libraries' and the report's.
PROGRAM = """
import json, re, sys
from scripts.data import main
status = main(["report", "--config", sys.argv[1], "--out", sys.argv[2]])
peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())  # getrusage counts the parent's, too
print(json.dumps({"status": status, "MB": int(peak[1]) / 1024, "diffusers": "diffusers" in sys.modules}))
"""

NASTY = 'a <script>alert("x")</script> & <b>bear</b>'


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Seven photos, of which one has no caption, one a long one and one is a copy; eight files that are none."""
    folder = shutil.copytree(PHOTOS, tmp_path / "photos", ignore=shutil.ignore_patterns("*.md"))
    (folder / "00.txt").write_text(NASTY)
    (folder / "01.txt").write_text("bear " * 100)
    (folder / "02.txt").unlink()
    Image.open(folder / "03.jpg").resize((384, 256)).save(folder / "copy.webp", quality=70)
    (folder / "copy.txt").write_text("a copy")
    Image.new("RGB", (40, 60), "teal").save(folder / "small.png")
    (folder / "small.txt").write_text("small")
    for name in ("a<i>.mp4", *(f"{letter}.psd" for letter in "bcdef"), "lonely.txt", ".hidden"):
        (folder / name).touch()
    return folder


def bucket_of(width: int, height: int) -> tuple[int, int]:
    """At data.resolution = 64 and a step of 16: the bucket nearest to the photo's shape, else the nearest that it covers."""

    def nearest(wide: int, high: int) -> tuple[int, int]:
        sides = range(16, 129, 16)
        fits = [(w, h) for w in sides for h in sides if w * h <= 64 * 64 and max(w, h) <= 2 * min(w, h)]
        fits = [(w, h) for w, h in fits if w <= wide and h <= high]
        largest = [b for b in fits if not any(o != b and o[0] >= b[0] and o[1] >= b[1] for o in fits)]
        return min(largest, key=lambda b: abs(math.log(b[0] / b[1]) - math.log(width / height)))

    usual = nearest(128, 128)
    return usual if usual[0] <= width and usual[1] <= height else nearest(width, height)


def lines_of(said: str) -> list[str]:
    """train.py sets the lines below the first one in."""
    return [line.strip() for line in said.splitlines()]


def rows_of(page: Page, title: str) -> list[list[str]]:
    """The cells of the table below a title."""
    part = page.html.partition(f"<h2>{title}</h2>")[2].partition("</table>")[0]
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in part.split("<tr>")[2:]]


def pictured(page: Page) -> tuple[list[str], list[str]]:
    """The names below the pictures: of photos that are trained on, and of those that are held out."""
    trained, _, apart = page.html.partition("<h2>As they are cropped</h2>")[2].partition("<h2>Held out, as they would be")
    return re.findall(r'alt="(.*?)"', trained), re.findall(r'alt="(.*?)"', apart)


def reported(path: Path, out: Path, *more: str) -> tuple[int, Page]:
    status = data(["report", "--config", str(path), "--out", str(out), *more])
    page = (out / "data_report.html").read_text(encoding="utf-8")
    assert not any(word in page for word in ("http://", "https://", "url(", "@import", "<script"))
    return status, Page(page)


def test_no_name_of_a_file_or_of_a_member_reaches_the_terminal_as_it_is(bench: Workbench, tmp_path: Path, capsys) -> None:
    hostile = "\n  error: all is lost\x1b[31m\u202e\x7f"
    folder = tmp_path / "photos"
    for place in (folder, folder / "10_k\x1b[31m"):
        place.mkdir()
        for name in (f"x{hostile}.jpg", f"y{hostile}.jpg"):  # which look alike
            shutil.copy(PHOTOS / "00.jpg", place / name)
        shutil.copy(PHOTOS / "01.jpg", place / "ordinary.jpg")
        for name in (f"n{hostile}.md", f"s.e{hostile}", "a.txt", f".{hostile}"):
            (place / name).touch()
        (place / f"y{hostile}.txt").write_text("bear " * 100)
        (place / f"Y{hostile}.txt").touch()
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        archive.add(folder, "photos")
    sources = [{"path": str(folder)}, {"path": f"{tmp_path}/all.tar"}]
    path = bench.write(bench.tree(data__sources=sources, data__held_out=1, data__background="#000000"))
    status, page = reported(path, tmp_path / "out")
    written = capsys.readouterr()
    for said in (written.out, written.err):
        lines = said.replace("\r", "\n").split("\n")
        assert not [line for line in lines if not line.isprintable() or line.strip().startswith("error: all")]
    assert hostile not in page.text and page.text.count("all is lost") > 20
    assert status == 3 and all(written.out.count(f"{letter}\\n  error: all") > 1 for letter in "xyn")


@pytest.mark.slow
def test_the_report_names_everything_and_agrees_with_the_plan(
    bench: Workbench, photos: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    def refuse(*arguments, **named):
        raise AssertionError("a weight was read")

    path = bench.write(bench.tree(data__sources=[{"path": str(photos), "repeats": 3}], data__batch_size=2))
    with monkeypatch.context() as patch:
        patch.setattr("trainer.models.loading.ModelSource.load", refuse)
        status, page = reported(path, tmp_path / "out")
    said = capsys.readouterr().out
    assert status == 3
    assert not (tmp_path / "out" / "config.toml").exists()

    # Each file is named: trained on, or left out with the reason.
    for name in sorted(os.listdir(photos)):
        assert name in page.text or Path(name).suffix == ".txt", name
    for name, why in (("a<i>.mp4", "a video"), ("lonely.txt", "no image has its name"), (".hidden", "hidden")):
        assert name in page.text and why in page.text and why in said

    # Escaped, whatever it is.
    assert NASTY in page.text

    for photo in page.all("img"):
        assert photo["src"].startswith("data:image/jpeg;base64,")
    assert len(page.all("img")) == 7 and len({photo["alt"] for photo in page.all("img")}) == 7

    # Buckets and batches, counted here: of multiples of 16 within 64 x 64 pixels, the one nearest to the photo's shape.
    shapes = Counter()
    for file in photos.iterdir():
        if file.suffix in (".jpg", ".webp", ".png"):
            with Image.open(file) as image:
                shapes[bucket_of(*image.size)] += 1
    rows = [
        [f"{width}x{height}", str(count), str(3 * count), str(-(-3 * count // 2)), str(3 * count % 2 or 2)]
        for (width, height), count in sorted(shapes.items())
    ]
    assert rows_of(page, "Buckets") == rows and len(rows) >= 3
    short = sum(row[-1] == "1" for row in rows)
    assert 0 < short < len(rows)
    assert (
        f"Batches that are not full: {short}." in page.text
        and f"{sum(int(row[3]) for row in rows)} batches an epoch" in page.text
    )
    assert (
        f"short batches: {short} of an epoch's {sum(int(row[3]) for row in rows)} batches have fewer than 2 photos (" in said
    )

    # Captions: missing, and cut by both encoders.
    assert "captions of 7 photos: 1 missing, 0 empty, 1 truncated by text_encoder, 1 truncated by text_encoder_2" in said
    assert "0/02.jpg: no caption for it" in said and "0/01.jpg: too long for text_encoder, which reads 77 tokens" in said
    assert "caption from .txt" in page.text and "no caption was found" in page.text

    # Copies, small photos.
    assert "near duplicates: 2 photos in 1 group (0/03.jpg = 0/copy.webp)" in said
    assert "0/small.png" in page.text and "40x60" in page.text

    # The run's own lines are these.
    train(["--config", str(path), "--plan"])
    plan = capsys.readouterr().out
    lines = [line for line in plan.splitlines() if line.startswith(("data ", "  left out"))]
    assert len(lines) == 2
    for line in lines:
        assert line in said and line in page.text
    assert "missing or empty" in plan and "missing or empty" not in said, "the report counts them"
    for line in said.partition("captions of 7")[0].splitlines():
        assert line.removeprefix("  captions: ") in plan, line


@pytest.mark.slow
def test_all_photos_are_pictured_while_there_is_room(bench: Workbench, tmp_path: Path, monkeypatch) -> None:
    """Also those that are held out. Of more the first of each bucket are, and the page says how many are not."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(30):
        Image.new("RGB", (90, 64) if number < 3 else (64, 64), (8 * number, 99, 9)).save(folder / f"{number:02}.png")
    path = bench.write(bench.tree(data__sources=[{"path": str(folder)}], data__held_out=4))
    _, page = reported(path, tmp_path / "out", "--set", "data.resolution=[48,64]")
    assert sorted(photo["alt"] for photo in page.all("img")) == sorted(
        f"0/{number:02}.png@{size}" for number in range(30) for size in (48, 64)
    )
    trained, apart = pictured(page)
    assert len(trained) == 2 * 26 and len(apart) == 2 * 4 and "not pictured" not in page.text
    assert {name.partition("@")[0] for name in apart} == {row[0] for row in rows_of(page, "Held out")}
    monkeypatch.setattr("workbench.pages.data_report.PICTURES", 20)
    _, page = reported(path, tmp_path / "out")
    shown = [photo["alt"] for photo in page.all("img")]
    assert 18 <= len(shown) <= 20 and f"{len(shown)} in all; {30 - len(shown)} more are not pictured" in page.text
    held_out = [row[0] for row in rows_of(page, "Held out")]
    assert len(held_out) == 4 and sorted(held_out) == sorted(pictured(page)[1]), "a small bucket is shown whole"
    assert {f"0/{number:02}.png" for number in range(3)} <= set(shown)


@pytest.mark.slow
def test_of_damaged_data_the_rest_is_shown_and_the_refusal_is_a_run_s(
    bench: Workbench, photos: Path, tmp_path: Path, capsys
) -> None:
    data_of_one = (photos / "00.jpg").read_bytes()
    (photos / "00.jpg").write_bytes(data_of_one[: len(data_of_one) // 2])
    (photos / "03.txt").write_bytes(b"caf\xe9")
    path = bench.write(bench.tree(data__sources=[{"path": str(photos)}]))
    assert train(["--config", str(path), "--plan"]) == 2
    refusal = lines_of(capsys.readouterr().err)
    assert "2 problems" in refusal[0]
    status, page = reported(path, tmp_path / "out")
    assert status == 2
    assert lines_of(capsys.readouterr().err) == refusal
    wrong = [html.unescape(row[0]) for row in rows_of(page, "Damaged")]
    assert wrong == refusal[1:] and len(wrong) == 2
    assert sorted(photo["alt"] for photo in page.all("img")) == [f"0/{n}" for n in ("01.jpg", "02.jpg", "04.jpg", "copy.webp",
                                                                                  "small.png")]  # fmt: skip

    # Where the sound ones alone would be refused for something else, or there are none: the run's refusal all the same.
    shutil.rmtree(tmp_path / "out")
    for more in (["data.held_out=5"], [f"data.sources.0.path={tmp_path / 'no'}"]):
        assert train(["--config", str(path), "--plan", "--set", *more]) == 2
        refusal = lines_of(capsys.readouterr().err)
        assert data(["report", "--config", str(path), "--out", str(tmp_path / "out"), "--set", *more]) == 2
        assert lines_of(capsys.readouterr().err) == refusal and not (tmp_path / "out").exists()


def test_lines_of_strict_mode_end_with_how_many_more_there_are(
    bench: Workbench, photos: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("workbench.pages.data_report.ROWS", 2)
    path = bench.write(bench.tree(data__sources=[{"path": str(photos)}]))
    reported(path, tmp_path / "out")
    said = capsys.readouterr().out
    assert "data.strict_captions = true would refuse these captions: 3 problems\n  0/02.jpg: no caption" in said
    assert said.partition("3 problems\n")[2].splitlines()[2] == "  and 1 more"


def test_the_exit_status_says_what_strict_mode_would(bench: Workbench, tmp_path: Path, capsys) -> None:
    path, out = bench.write(bench.tree()), tmp_path / "out"
    assert reported(path, out)[0] == 0
    assert "strict_captions" not in capsys.readouterr().out
    assert data(["report", "--config", str(path), "--out", str(out), "--set", "data.sources.0.captions=none"]) == 0
    assert data(["report", "--config", str(path), "--out", str(out), "--set", "data.sources.0.captions=nonsense"]) == 2
    assert data(["report", "--config", str(path), "--out", str(out), "--set", f"data.sources.0.path={tmp_path / 'no'}"]) == 2
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.slow
def test_a_copy_of_a_held_out_photo_is_reported(bench: Workbench, photos: Path, tmp_path: Path, capsys) -> None:
    buffer = io.BytesIO()
    for name in os.listdir(photos):  # each photo twice, so whichever is held out has a copy
        if name.endswith(".jpg"):
            Image.open(photos / name).save(buffer, "PNG")
            (photos / f"again-{name[:2]}.png").write_bytes(buffer.getvalue())
            buffer.seek(0), buffer.truncate()
    path = bench.write(bench.tree(data__sources=[{"path": str(photos)}], data__held_out=1))
    _, page = reported(path, tmp_path / "out")
    assert "near duplicates on both sides of data.held_out" in capsys.readouterr().out
    assert "held out" in page.text and "Held out" in page.text


@pytest.mark.slow
def test_a_run_s_report_has_the_same_section(bench: Workbench, photos: Path, tmp_path: Path, capsys) -> None:
    tree = bench.tree(data__sources=[{"path": str(photos)}], run__max_steps=1, validation__every_steps=0)
    path = bench.write(tree)
    _, alone = reported(path, tmp_path / "out")
    assert train(["--config", str(path)]) == 0
    text = (Path(tree["run"]["output_dir"]) / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert "<h2>Your data</h2>" in text
    assert [image["src"] for image in alone.all("img")] == [image["src"] for image in page.all("img")]
    for line in ("lonely.txt", "0/03.jpg = 0/copy.webp", NASTY, "no caption was found"):
        assert line in page.text


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read there")
@pytest.mark.parametrize("count", [pytest.param(500, marks=pytest.mark.slow), pytest.param(100_000, marks=pytest.mark.proof)])
def test_many_photos_take_little_memory(bench: Workbench, tmp_path: Path, count: int) -> None:
    """All photos are near duplicates, the worst case for grouping them and for listing the groups. How long it takes is
    measured by benchmarks/data.py."""
    root = fill(tmp_path / "photos", count)
    path = bench.write(bench.tree(data__sources=[{"path": str(root)}], data__enlarge=True))
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), str(tmp_path / "out")],
        capture_output=True, text=True, cwd=ROOT, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    found, said = json.loads(process.stdout.splitlines()[-1]), process.stdout
    page = (tmp_path / "out" / "data_report.html").read_text(encoding="utf-8")
    assert f"near duplicates: {count} photos in 1 group (" in said
    assert (f"and {count - 1000:,} more" in page) == (count > 1000)
    assert page.count("<img ") <= 240 and len(page) < 5_000_000
    assert found["status"] == 0 and not found["diffusers"] and found["MB"] < 500, found
