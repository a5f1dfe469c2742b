"""The report in a browser: legible at every width, complete, quiet, and right about every kind of run.

Screenshots lie in the test's folder, or below the folder that SCREENSHOTS names. Look at them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.browser import AUDIT, Browser, Tab, needs_chromium
from tests.harness import ROOT, Workbench, command_line
from tests.unit.workbench.watch.test_server import write_run
from trainer.base.run_layout import Layout
from trainer.plan import fixed_draws
from workbench.commands import main as cli
from workbench.compare.page import compare
from workbench.pages import live
from workbench.pages.live import LiveReport, ReportedRun
from workbench.watch.server import Runs, Server

pytestmark = [pytest.mark.slow, needs_chromium]

# Each width and each scheme, and of the first page all of both.
SEEN = ((360, "light"), (800, "dark"), (1600, "light"))
ALL_SEEN = tuple((width, scheme) for width, _ in SEEN for scheme in ("light", "dark"))
LOADED = """new Promise((done, never) => {
    const image = document.querySelector("dialog img"), until = Date.now() + 60000;
    const look = () => image.complete && image.naturalWidth ? done() : Date.now() < until ? setTimeout(look, 20) : never();
    look();
})"""
ICONS = ROOT / "examples" / "icons"
SUBJECTS = ("bear", "bicycle", "fox")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def shots(work: Path) -> Path:
    return Path(os.environ.get("SCREENSHOTS", work / "screenshots"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    tab = browser.tab()
    yield tab
    tab.close()


@pytest.fixture(scope="module")
def pages(models: Path, work: Path) -> Path:
    """The folder of a run that was stopped after 6 of 18 steps, resumed with --allow to the end, and taken another way from
    step 6 on, with other prompts; and its page at each of these places, and one of mid-run."""
    bench = Workbench(models, work)
    samples = [
        {"prompt": f"a {name}, ink style", "truth": str(ICONS / "exams" / f"{name}.png"), "guidance": 3.0}
        for name in SUBJECTS
    ]
    tree = bench.tree(
        run__max_steps=18, data__sources=[{"path": str(ICONS / "lessons")}], data__held_out=4, validation__every_steps=6,
        validation__loss_every_steps=6, validation__steps=1, validation__samples=samples, checkpoint__every_steps=6,
        adapter__targets=["*attn1*"],
    )  # fmt: skip
    page = Path(tree["run"]["output_dir"]) / "report.html"

    def run(name: str, *arguments: str) -> None:
        assert cli.main(["--config", str(bench.write(tree)), *arguments]) == 0
        shutil.copy(page, page.with_name(f"{name}.html"))

    def write(self: LiveReport, *arguments: Any) -> None:
        real(self, *arguments)
        running = page.with_name("running.html")
        if self.state.alive and not running.exists() and "Training: step 12 of 18" in page.read_text():
            shutil.copy(page, running)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "SHARE", 1e9)  # written as soon as there is anything new
        patch.setattr(fixed_draws, "FEWEST", 8)
        real = LiveReport.write
        patch.setattr(LiveReport, "write", write)
        tree["run"]["stop_after"] = 6
        run("stopped")
        del tree["run"]["stop_after"]
        tree["optimizer"] = {"lr": 1e-3}
        run("finished", "--resume_from", "auto", "--allow", "optimizer.lr")
        tree["run"]["stop_after"] = 12
        tree["validation"]["samples"] = [{"prompt": f"a {name}, ink style", "guidance": 3.0} for name in ("key", "cat")]
        run("ways", "--resume_from", str(page.parent / "checkpoints" / "step-00000006"))
    return page.parent


def text(tab: Tab, what: str) -> str:
    return tab.run(f"[...document.querySelectorAll('{what}')].map((part) => part.textContent).join(' | ')")


def shown(tab: Tab) -> list[str]:
    """What the sample cards say of their pictures, those of earlier prompts left out."""
    return tab.run("[...document.querySelectorAll('#samples > .cards .shot img')].map((image) => image.alt)")


def audit(tab: Tab, page: Path, shots: Path, name: str, seen: Sequence[tuple[int, str]] = SEEN) -> dict:
    """At every width and scheme of `seen`. Returns what was found at the last."""
    found: dict = {}
    for width, scheme in seen:
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


def test_the_page_of_a_run_while_it_runs(pages: Path, shots: Path, tab: Tab) -> None:
    found = audit(tab, pages / "running.html", shots, "running")
    assert {"Loss", "Loss by timestep quarter", "Gradient norm", "Learning rate", "Time of a step"} <= found["charts"].keys()
    # It becomes another without a hand, and stays where the reader is.
    page = pages / "alive.html"
    text_of = (pages / "running.html").read_text()
    page.write_text(re.sub(r'data-reload="\d+"', 'data-reload="1"', text_of))
    tab.look(1000, "light")
    tab.open(page)
    tab.run("scrollTo(0, 700); for (const part of document.querySelectorAll('#configuration details')) part.open = true")
    assert text(tab, "#state").startswith("Training: step 12 of 18")
    loads = tab.loads
    shutil.copy(pages / "finished.html", page)
    tab.wait_for_load(loads)
    assert tab.run("document.querySelector('#configuration details:last-of-type').open") and tab.run("scrollY") == 700
    assert text(tab, "#state").startswith("Finished: step 18 of 18")
    # Killed: of a page that has not been written for too long the script says so.
    (pages / "old.html").write_text(re.sub(r'data-written="\d+"', 'data-written="1700000000"', text_of))
    tab.open(pages / "old.html")
    assert text(tab, "#state").startswith("No sign of life for ") and "or it was killed" in text(tab, "#state")


def test_the_page_of_a_run_that_has_finished(pages: Path, shots: Path, tab: Tab) -> None:
    tab.open(pages / "finished.html")
    assert "Finished: step 18 of 18" in text(tab, "#state")
    found = audit(tab, pages / "finished.html", shots, "finished", ALL_SEEN)
    assert found["charts"]["Loss"] > 2 and found["charts"]["Change of the weights"] == 1  # after 16, 32, 64, ... steps
    drawn = shown(tab)
    assert len(drawn) == len(SUBJECTS) * (4 + 1) and drawn[:3] == [
        f"a bear, ink style, {what}" for what in ("before training", "step 18", "the truth")
    ]
    assert text(tab, ".tile b").count("%") >= 1


def test_the_slider_the_enlarged_image_and_the_values_of_a_chart(pages: Path, shots: Path, tab: Tab) -> None:
    finished = pages / "report.html"
    shutil.copy(pages / "finished.html", finished)  # the files beside it are its own again
    tab.look(1200, "light")
    tab.open(finished)
    assert text(tab, ".slider output") == "the newest, step 18"
    tab.run("document.getElementById('step').value = 2; document.getElementById('step').dispatchEvent(new Event('input'))")
    assert text(tab, ".slider output") == "step 12"
    assert [alt.rpartition(", ")[2] for alt in shown(tab)[:3]] == ["before training", "step 12", "the truth"]
    tab.run("document.querySelectorAll('.card')[1].querySelector('.shot a').click()")
    assert tab.run("document.querySelector('dialog').open") and "a bicycle, ink style, before training" in text(tab, "dialog")
    tab.keep(shots / "enlarged.png", whole=False)
    for key, expected in (("ArrowRight", "a bicycle, ink style, step 6"), ("ArrowDown", "a fox, ink style, step 6")):
        tab.press(key)
        assert expected in text(tab, "dialog")
    tab.press("Escape")
    assert not tab.run("document.querySelector('dialog').open")
    tab.run("document.querySelector('.plot').scrollIntoView({block: 'center'})")
    where = "document.querySelector('.plot').getBoundingClientRect()"
    frame = tab.run(f"(({{left, top, width}}) => [left + width / 2, top + 60])({where})")
    tab.send("Input.dispatchMouseEvent", type="mouseMoved", x=frame[0], y=frame[1])
    assert re.match(
        r"step \d+each step: [\d.e-]+moving average, \d+ steps: [\d.e-]+held-out photos: \d\.\d+", text(tab, ".tip")
    )
    tab.keep(shots / "values.png", whole=False)
    loads = tab.loads
    tab.send("Page.reload")
    tab.wait_for_load(loads)
    assert text(tab, ".slider output") == "step 12", "a reload keeps the place"
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
QUICK = ("validation.steps=4", "data.batch_size=8", "data.held_out=4", "logging.tensorboard=false", "run.device=cpu")


def pocket(work: Path, out: str, *settings: str) -> subprocess.CompletedProcess:
    """A run of the pocket SDXL."""
    given = [*QUICK, f"run.output_dir={work / out}", f"data.cache_dir={work / 'cache'}", *settings]
    return command_line("--config", "pocket_sdxl.toml", *(part for key in given for part in ("--set", key)), timeout=400)


@pytest.mark.proof
@pytest.mark.parametrize("rate", [1000 * RIGHT, 100 * RIGHT, 1e-9])
def test_a_run_far_off_the_right_rate_says_so(work: Path, shots: Path, tab: Tab, rate: float) -> None:
    out, name = work / f"rate-{rate:g}", f"rate-{rate:g}"
    process = pocket(work, name, "validation.every_steps=15", "validation.loss_every_steps=15", "checkpoint.every_steps=10",
                     f"optimizer.lr={rate}", "run.max_steps=30")  # fmt: skip
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
    ended = pocket(work, "heart", "run.max_steps=90", "validation.every_steps=90", "validation.loss_every_steps=10",
                   "checkpoint.every_steps=10", "checkpoint.keep_last=20")  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = audit(tab, work / "heart" / "report.html", shots, "heart")
    assert found["charts"]["Loss"] >= 10
    assert "It learned the photos by heart" in text(tab, ".verdict h2")
    best = re.search(r"Best: step (\d+)\. There its held-out loss, [\d.]+, is the lowest of 10", text(tab, ".verdict p"))
    assert best and 0 < int(best[1]) < 90 and int(best[1]) % 10 == 0


def test_one_timeline_is_shown(pages: Path, shots: Path, tab: Tab) -> None:
    """Stopped, resumed with --allow, then another way from an earlier checkpoint, with other prompts."""
    tab.look(1000, "light")
    tab.open(pages / "stopped.html")
    assert text(tab, "#state") == "Stopped at step 6 of 18. Go on with --resume_from auto."
    tab.open(pages / "finished.html")
    assert text(tab, ".marks li").startswith("resumed after step 6")
    assert "changed after step 6: optimizer.lr: 0.0001 \N{RIGHTWARDS ARROW} 0.001" in text(tab, ".marks li")
    assert tab.run("document.querySelectorAll('.first .mark').length") == 2
    audit(tab, pages / "ways.html", shots, "ways")
    assert text(tab, "#state").startswith("Stopped at step 12 of 18")
    assert "Results of steps after step-00000006 were set aside" in text(tab, "#lineage li")
    assert tab.run("document.querySelectorAll('.marks li.resumed').length") == 1, "the start that was left is none of it"
    cards = tab.run("[...document.querySelectorAll('#samples > .cards h3')].map((title) => title.textContent)")
    assert cards == ["a key, ink style", "a cat, ink style"], "those that are asked for now"
    folded = tab.run("[...document.querySelectorAll('.gone h3')].map((title) => title.textContent)")
    assert "a bear, ink style" in folded and not [alt for alt in shown(tab) if "step 18" in alt]
    assert not tab.troubles and not tab.requests


def test_a_page_that_is_served_keeps_its_reader_s_place_and_runs_no_other_script(tmp_path: Path, tab: Tab) -> None:
    """Without an origin of its own: a folder that somebody sent reads no other run's files."""
    for name in ("mine", "sent"):
        write_run(tmp_path / name, lr=1e-4, losses=[0.9, 0.8], colour="red")
        with LiveReport(ReportedRun(Layout(tmp_path / name), name=name, total=2)):
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


# On how many lines a word of a run's state stands, as a sorted set over all words: [1] where none is broken.
WORDS_OF_STATES_ON_LINES = r"""
[...new Set([...document.querySelectorAll('.runs td:nth-child(3)')].flatMap((cell) => {
  const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT), lines = [];
  for (let text; (text = walker.nextNode()); )
    for (const word of text.data.matchAll(/\S+/g)) {
      const range = document.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      lines.push(new Set([...range.getClientRects()].map((line) => line.top)).size);
    }
  return lines;
}))].sort()"""


def test_short_names_and_states_of_a_comparison_are_not_broken(tmp_path: Path, tab: Tab) -> None:
    for name in ("ink", "my_photos"):
        write_run(tmp_path / name, lr=1e-3, losses=[0.9, 0.9], colour="blue")
    page = tmp_path / "compared.html"
    page.write_text(compare(*Runs([tmp_path]).runs()))
    for width in (1200, 400):
        tab.look(width, "light")
        tab.open(page)
        assert tab.run("""document.querySelector('.runs a[href^="my_photos"]').getClientRects().length""") == 1
        assert tab.run(WORDS_OF_STATES_ON_LINES) == [1]


def test_no_column_of_a_comparison_is_cut_at_1200_px(tmp_path: Path, shots: Path, tab: Tab) -> None:
    """With long names, a long verdict and seeds in a group; its band is drawn."""
    for seed in range(3):
        layout = write_run(
            tmp_path / f"a-plush-bear-on-a-shelf-{seed}", lr=1e-4, losses=[0.9, 0.7 + seed / 10, 0.5], colour="red"
        )
        layout.config.write_text(layout.config.read_text().replace("max_steps = 4", f"max_steps = 4\nseed = {seed}"))
    write_run(tmp_path / "another-rate", lr=1e-3, losses=[0.9, 0.9, 123.456], colour="blue")
    page = tmp_path / "compared.html"
    page.write_text(compare(*Runs([tmp_path]).runs()))
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
