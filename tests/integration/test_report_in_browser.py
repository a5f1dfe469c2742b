"""The report in a browser: legible at every width, complete, quiet, and right about every kind of run.

Screenshots lie in the test's folder, or below the folder that SCREENSHOTS names. Look at them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import AUDIT, Browser, Tab, needs_chromium
from tests.harness import ROOT
from tests.unit.test_watching import write_run
from trainer.layout import Layout
from trainer.report import LiveReport
from trainer.report.compared import compare
from trainer.watching import Runs, Server

pytestmark = [pytest.mark.slow, needs_chromium]

WIDTHS, SCHEMES = (360, 800, 1600), ("light", "dark")
LOADED = """new Promise((done, never) => {
    const image = document.querySelector("dialog img"), until = Date.now() + 60000;
    const look = () => image.complete && image.naturalWidth ? done() : Date.now() < until ? setTimeout(look, 20) : never();
    look();
})"""
QUICK = ("validation.steps=4", "data.batch_size=8", "data.held_out=4", "logging.tensorboard=false", "run.device=cpu")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def shots(work: Path) -> Path:
    return Path(os.environ.get("SCREENSHOTS", work / "screenshots"))


@pytest.fixture
def tab() -> Iterator[Tab]:
    with Browser() as browser:
        yield browser.tab()


def begin(work: Path, out: str, *settings: str, resume: str | None = None, allow: str | None = None) -> subprocess.Popen:
    """A run of the pocket SDXL. resume: from the step of that folder, or "auto"."""
    given = [*QUICK, f"run.output_dir={work / out}", f"data.cache_dir={work / 'cache'}", *settings]
    command = [sys.executable, "train.py", "--config", "pocket_sdxl.toml"]
    for setting in given:
        command += ["--set", setting]
    command += ["--resume_from", resume] if resume else []
    command += ["--allow", allow] if allow else []
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)


def end(process: subprocess.Popen, status: int = 0) -> None:
    _, said = process.communicate(timeout=400)
    assert process.returncode == status, said[-2000:]


LIVE = "validation.every_steps=10", "validation.loss_every_steps=10", "checkpoint.every_steps=10"


@pytest.fixture(scope="module")
def finished(work: Path) -> Path:
    """The page of a run that made its 30 steps."""
    end(begin(work, "finished", "run.max_steps=30", *LIVE))
    return work / "finished" / "report.html"


def text(tab: Tab, what: str) -> str:
    return tab.run(f"[...document.querySelectorAll('{what}')].map((part) => part.textContent).join(' | ')")


def shown(tab: Tab) -> list[str]:
    """What the sample cards say of their pictures, those of earlier prompts left out."""
    return tab.run("[...document.querySelectorAll('#samples > .cards .shot img')].map((image) => image.alt)")


def audit(tab: Tab, page: Path, shots: Path, name: str) -> dict:
    """At every width, light and dark. Returns what was found at the last."""
    found: dict = {}
    for width in WIDTHS:
        for scheme in SCHEMES:
            tab.look(width, scheme)
            tab.open(page)
            tab.keep(shots / f"{name}-{width}-{scheme}.png")
            found = tab.run(AUDIT)
            where = f"{name}, {width} px, {scheme}"
            assert not found["bad"], where
            assert found["scroll"] <= found["width"] == width, f"{where}: the page scrolls sideways"
            assert found["texts"] > 50 and not found["broken"], where
            assert all(found["charts"].values()), where
    assert not tab.troubles and not tab.requests
    return found


def test_the_page_of_a_pocket_run_while_it_runs(work: Path, shots: Path, tab: Tab) -> None:
    # Long enough to train whenever it is looked at, however slow the browser is: a signal ends it.
    process, out = begin(work, "live", "run.max_steps=100000", *LIVE), work / "live"
    page, until = out / "report.html", time.monotonic() + 400
    try:
        while not (page.exists() and re.search(r"Training: step ([2-9]\d|\d{3}|\d,\d{3}) of 100,000", page.read_text())):
            assert process.poll() is None and time.monotonic() < until, "the page never said that it trains"
            time.sleep(0.1)
        # A copy that does not load itself again while it is measured.
        (out / "running.html").write_text(re.sub(r'data-reload="\d+"', 'data-reload="3600"', page.read_text()))
        # The page itself, alive: it becomes another without a hand, and stays where the reader is.
        tab.look(1000, "light")
        tab.open(page)
        tab.run("scrollTo(0, 700); for (const part of document.querySelectorAll('#configuration details')) part.open = true")
        first, loads = text(tab, "#state"), tab.loads
        tab.wait_for_load(loads, 150)  # after 15 s, else never
        assert tab.run("document.querySelector('#configuration details:last-of-type').open") and tab.run("scrollY") == 700
        assert (
            first.startswith("Training: step") and text(tab, "#state").startswith("Training: step") and process.poll() is None
        )
        process.terminate()
        end(process, 143)
    finally:
        process.kill()
    tab.open(page)
    assert text(tab, "#state").startswith("Stopped at step ")
    found = audit(tab, out / "running.html", shots, "running")
    assert {"Loss", "Loss by timestep quarter", "Gradient norm", "Learning rate", "Time of a step"} <= found["charts"].keys()
    # Killed: of a page that has not been written for too long the script says so.
    old = re.sub(r'data-written="\d+"', 'data-written="1700000000"', (out / "running.html").read_text())
    (out / "old.html").write_text(old)
    tab.open(out / "old.html")
    assert text(tab, "#state").startswith("No sign of life for ") and "or it was killed" in text(tab, "#state")


def test_the_page_of_a_pocket_run_that_has_finished(finished: Path, shots: Path, tab: Tab) -> None:
    tab.open(finished)
    assert "Finished: step 30 of 30" in text(tab, "#state")
    found = audit(tab, finished, shots, "finished")
    assert found["charts"]["Loss"] > 2 and found["charts"]["Change of the weights"] == 1  # after 16, 32, 64, ... steps
    drawn = shown(tab)
    assert len(drawn) == 6 * (4 + 1) and drawn[:3] == [
        f"a bear, ink style, {what}" for what in ("before training", "step 30", "the truth")
    ]
    assert text(tab, ".tile b").count("%") >= 8


def test_the_slider_the_enlarged_image_and_the_values_of_a_chart(finished: Path, shots: Path, tab: Tab) -> None:
    tab.look(1200, "light")
    tab.open(finished)
    assert text(tab, ".slider output") == "the newest, step 30"
    tab.run("document.getElementById('step').value = 2; document.getElementById('step').dispatchEvent(new Event('input'))")
    assert text(tab, ".slider output") == "step 20"
    assert [alt.rpartition(", ")[2] for alt in shown(tab)[:3]] == ["before training", "step 20", "the truth"]
    tab.run("document.querySelectorAll('.card')[1].querySelector('.shot a').click()")
    assert tab.run("document.querySelector('dialog').open") and "a bicycle, ink style, before training" in text(tab, "dialog")
    tab.keep(shots / "enlarged.png", whole=False)
    for key, expected in (("ArrowRight", "a bicycle, ink style, step 10"), ("ArrowDown", "a fox, ink style, step 10")):
        tab.press(key)
        assert expected in text(tab, "dialog")
    tab.press("Escape")
    assert not tab.run("document.querySelector('dialog').open")
    tab.run("document.querySelector('.plot').scrollIntoView({block: 'center'})")
    where = "document.querySelector('.plot').getBoundingClientRect()"
    frame = tab.run(f"(({{left, top, width}}) => [left + width / 2, top + 60])({where})")
    tab.send("Input.dispatchMouseEvent", type="mouseMoved", x=frame[0], y=frame[1])
    assert re.match(
        r"step 1\deach step: [\d.e-]+moving average, \d+ steps: [\d.e-]+held-out photos: 0\.\d+", text(tab, ".tip")
    )
    tab.keep(shots / "values.png", whole=False)
    loads = tab.loads
    tab.send("Page.reload")
    tab.wait_for_load(loads)
    assert text(tab, ".slider output") == "step 20", "a reload keeps the place"
    # A full file beside the page that is gone: the embedded image is enlarged.
    moved = finished.parent / "alone" / "report.html"
    moved.parent.mkdir(exist_ok=True)
    moved.write_text(finished.read_text().replace('.png">', '.png" data-reduced="">'))
    tab.open(moved)
    tab.run("document.querySelector('.shot a').click()")
    tab.run(LOADED)
    assert tab.run("document.querySelector('dialog img').naturalWidth") == 64
    assert tab.run("document.querySelector('dialog img').src").startswith("data:")


RIGHT = 2e-3  # the rate of pocket_sdxl.toml


@pytest.mark.proof
@pytest.mark.parametrize("rate", [1000 * RIGHT, 100 * RIGHT, 1e-9])
def test_a_run_far_off_the_right_rate_says_so(work: Path, shots: Path, tab: Tab, rate: float) -> None:
    out, name = work / f"rate-{rate:g}", f"rate-{rate:g}"
    process = begin(work, name, "validation.every_steps=15", "validation.loss_every_steps=15", "checkpoint.every_steps=10",
                    f"optimizer.lr={rate}", "run.max_steps=30")  # fmt: skip
    process.communicate(timeout=400)
    found = audit(tab, out / "report.html", shots, name)
    state, title, said = (text(tab, what) for what in ("#state", ".verdict h2", ".verdict p"))
    if rate == 1e-9:
        assert process.returncode == 0 and state.startswith("Finished")
        assert "Nothing was learned" in title and "raise optimizer.lr" in said
        assert set(tab.run("[...document.querySelectorAll('.tile')].map((tile) => tile.className)")) == {"tile h0"}
        return
    assert "learning rate" in said and f"optimizer.lr was {rate:g} at step" in said
    assert found["charts"]["Gradient norm"] >= 3
    if rate == 100 * RIGHT or process.returncode == 0:
        assert process.returncode == 0 and state.startswith("Finished") and "It has diverged" in title
        # Its losses rose from the third step on, which nobody could tell before the weights were measured at step 16.
        assert "No step is kept that is surely from before it diverged" in said and "Best" not in said
        return
    # It may end before its first two windows did.
    assert process.returncode == 4 and state.startswith("Ended at step") and "a value was not finite" in state
    assert re.search("diverged|is not finite", title) and "jitters" not in said
    assert "being looked at" not in text(tab, "#your-data p")


@pytest.mark.proof
def test_a_run_that_learns_its_photos_by_heart_names_the_step_to_take(work: Path, shots: Path, tab: Tab) -> None:
    end(begin(work, "heart", "run.max_steps=90", "validation.every_steps=90", "validation.loss_every_steps=10",
              "checkpoint.every_steps=10", "checkpoint.keep_last=20"))  # fmt: skip
    found = audit(tab, work / "heart" / "report.html", shots, "heart")
    assert found["charts"]["Loss"] >= 10
    assert "It learned the photos by heart" in text(tab, ".verdict h2")
    best = re.search(r"Best: step (\d+)\. There its held-out loss, [\d.]+, is the lowest of 10", text(tab, ".verdict p"))
    assert best and 0 < int(best[1]) < 90 and int(best[1]) % 10 == 0


def test_one_timeline_is_shown(work: Path, shots: Path, tab: Tab) -> None:
    """Stopped, resumed with --allow, then another way from an earlier checkpoint, with other prompts."""
    base = "run.max_steps=30", "validation.every_steps=10", "checkpoint.every_steps=10", "validation.loss_every_steps=10"
    page = work / "ways" / "report.html"
    end(begin(work, "ways", *base, "run.stop_after=10"))
    tab.look(1000, "light")
    tab.open(page)
    assert text(tab, "#state") == "Stopped at step 10 of 30. Go on with --resume_from auto."
    end(begin(work, "ways", *base, "optimizer.lr=1e-3", resume="auto", allow="optimizer.lr"))
    audit(tab, page, shots, "allowed")
    assert text(tab, ".marks li").startswith("resumed after step 10")
    assert "changed after step 10: optimizer.lr: 0.002 \N{RIGHTWARDS ARROW} 0.001" in text(tab, ".marks li")
    assert "Finished" in text(tab, "#state") and tab.run("document.querySelectorAll('.first .mark').length") == 2
    other = 'validation.samples=[{prompt="a key, ink style", guidance=3.0}, {prompt="a cat, ink style", guidance=3.0}]'
    checkpoint = str(work / "ways" / "checkpoints" / "step-00000010")
    end(begin(work, "ways", *base, other, "optimizer.lr=1e-3", "run.stop_after=20", resume=checkpoint))
    audit(tab, page, shots, "ways")
    assert text(tab, "#state").startswith("Stopped at step 20 of 30")
    assert "Results of steps after step-00000010 were set aside" in text(tab, "#lineage li")
    assert tab.run("document.querySelectorAll('.marks li.resumed').length") == 1, "the start that was left is none of it"
    cards = tab.run("[...document.querySelectorAll('#samples > .cards h3')].map((title) => title.textContent)")
    assert cards == ["a key, ink style", "a cat, ink style"], "those that are asked for now"
    folded = tab.run("[...document.querySelectorAll('.gone h3')].map((title) => title.textContent)")
    assert "a bear, ink style" in folded and not [alt for alt in shown(tab) if "step 30" in alt]
    assert not tab.troubles and not tab.requests


def test_a_page_that_is_served_keeps_its_reader_s_place_and_runs_no_other_script(tmp_path: Path, tab: Tab) -> None:
    """Without an origin of its own: a folder that somebody sent reads no other run's files."""
    for name in ("mine", "sent"):
        write_run(tmp_path / name, lr=1e-4, losses=[0.9, 0.8], colour="red")
        with LiveReport(Layout(tmp_path / name), name=name, total=2):
            pass
    sent = tmp_path / "sent" / "report.html"
    sent.write_text(sent.read_text().replace("<script>", "<script>document.title = 'ran'</script><script>"))
    with Server(Runs([tmp_path]), 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        tab.look(1000, "light")
        tab.open(f"{server.address}mine/report.html")
        tab.run("for (const part of document.querySelectorAll('#configuration details')) part.open = true; scrollTo(0, 300)")
        tab.run("new Promise((done) => setTimeout(done, 500))")
        loads = tab.loads
        tab.send("Page.reload")
        tab.wait_for_load(loads)
        assert (tab.run("scrollY"), tab.run("origin")) == (300, "null")
        assert tab.run("document.querySelector('#configuration details:last-of-type').open")
        assert not tab.troubles
        tab.open(f"{server.address}sent/report.html")
        assert tab.run("document.title") == "sent - training report" and "Content Security Policy" in tab.troubles[0]
        assert tab.run("fetch('/mine/config.toml').catch(() => 'refused')") == "refused"
        server.shutdown()


def test_no_column_of_a_comparison_is_cut_at_1200_px(tmp_path: Path, shots: Path, tab: Tab) -> None:
    """With long names, a long verdict and seeds in a group; its band is drawn."""
    for seed in range(3):
        layout = write_run(
            tmp_path / f"a-plush-bear-on-a-shelf-{seed}", lr=1e-4, losses=[0.9, 0.7 + seed / 10, 0.5], colour="red"
        )
        layout.config.write_text(layout.config.read_text().replace("max_steps = 4", f"max_steps = 4\nseed = {seed}"))
    write_run(tmp_path / "another-rate", lr=1e-3, losses=[0.9, 0.9, 123.456], colour="blue")
    page = tmp_path / "compared.html"
    page.write_text(compare(*Runs([tmp_path]).seen()))
    tab.look(1200, "light")
    tab.open(page)
    tab.keep(shots / "compared.png")
    cut = """[...document.querySelectorAll('.runs, .runs th, .runs td')].filter((cell) => {
        const [own, frame] = [cell, cell.closest('.wide')].map((part) => part.getBoundingClientRect());
        return own.right > frame.right + 0.5 || cell.scrollWidth > cell.clientWidth + 1;
    }).map((cell) => cell.textContent)"""
    assert not tab.run(cut)
    assert tab.run("getComputedStyle(document.querySelector('.first path.band0')).fillOpacity") == "0.18"
    found = tab.run(AUDIT)
    assert not found["bad"] and found["scroll"] <= found["width"] and found["charts"]["Held-out loss"] == 3
