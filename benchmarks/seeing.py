"""What it costs to see a run: log, progress and report, in its own time; and how soon a page of a long run opens.

    OMP_NUM_THREADS=1 python benchmarks/seeing.py [--steps 200] [--json FILE]       # the pocket SDXL, a few minutes
    python benchmarks/seeing.py --only page                                         # needs Chromium

The first part is one run of configs/pocket_sdxl.toml with samples, held-out losses and checkpoints, on a terminal. Every call
that logs, shows or writes the page is timed; a call within another counts once. The many looks whether a line is due are
counted, and one is timed afterwards. The share is that time in the run's, from the opened
output folder to its end, on the clock and of the processor; so both sides meet the same slow spells of the machine.

The second part writes the files of a run of 20,000 steps and 400 samples of 512 px, then its page: at first, and again.
Chromium opens that page five times, in a tab of its own.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
import timeit
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from trainer.base.run_layout import Layout  # noqa: E402
from workbench.pages.live import LiveReport, ReportedRun  # noqa: E402

STEPS, SAMPLES, PROMPTS, SIDE, OPENED = 20_000, 400, 8, 512, 5


class Spent:
    """Seconds inside the calls that are watched, by name: on the clock and of the processor."""

    def __init__(self) -> None:
        self.clock: dict[str, float] = defaultdict(float)
        self.processor: dict[str, float] = defaultdict(float)
        self._inside = False

    def watched(self, owner: type, method: str, name: str) -> Any:
        real = getattr(owner, method)

        def timed(*arguments: Any, **more: Any) -> Any:
            if self._inside:
                return real(*arguments, **more)
            self._inside, began = True, (time.perf_counter(), time.process_time())
            try:
                return real(*arguments, **more)
            finally:
                self._inside = False
                self.clock[name] += time.perf_counter() - began[0]
                self.processor[name] += time.process_time() - began[1]

        return patch.object(owner, method, timed)


@contextmanager
def counted(owner: type, method: str) -> Iterator[Iterator[int]]:
    """Counts calls that are too short to be timed one by one. Inside the block: what gives their number at its `next`."""
    real, count = getattr(owner, method), itertools.count()

    def counting(*arguments: Any) -> Any:
        next(count)
        return real(*arguments)

    with patch.object(owner, method, counting):
        yield count


def seconds_of_a_look() -> float:
    """Of one look whether a line is due, which it is not."""
    from trainer.base.progress import Phase, Phases

    phase = Phase(Phases(show=True, every=1e9), "a look", None, "")
    return min(timeit.repeat(phase.check, number=10_000, repeat=20)) / 10_000


class Terminal(io.StringIO):
    """Takes the live line, too."""

    def isatty(self) -> bool:
        return True


def of_a_run(folder: Path, steps: int) -> dict[str, Any]:
    from contextlib import ExitStack

    from trainer.base.progress import Phase, Record
    from trainer.monitoring.metrics import Metrics
    from trainer.run import session
    from workbench.commands import main as cli

    spent, whole = Spent(), {"clock": 0.0, "processor": 0.0}

    @contextmanager
    def opened(*arguments: Any, **more: Any) -> Iterator[None]:
        with real_opened(*arguments, **more):
            began = time.perf_counter(), time.process_time()
            yield
            whole.update(clock=time.perf_counter() - began[0], processor=time.process_time() - began[1])

    real_opened = session.open_output
    watched = [
        (Metrics, "log", "log and progress"),
        (Metrics, "add", "log and progress"),
        (Metrics, "sync", "log and progress"),
        (Metrics, "close", "log and progress"),
        (Phase, "_draw", "progress"),
        (Record, "add", "progress"),
        (LiveReport, "__enter__", "report"),
        (LiveReport, "after_step", "report"),
        (LiveReport, "finished", "report"),
    ]
    settings = {
        "run.output_dir": folder / "run", "run.max_steps": steps, "data.cache_dir": folder / "cache", "data.held_out": 4,
        "data.batch_size": 8, "validation.every_steps": steps // 4, "validation.loss_every_steps": steps // 8,
        "checkpoint.every_steps": steps // 8,
    }  # fmt: skip
    given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    said = Terminal()
    with ExitStack() as stack, redirect_stdout(said), redirect_stderr(said):
        for owner, method, name in watched:
            stack.enter_context(spent.watched(owner, method, name))
        looks = stack.enter_context(counted(Phase, "check"))
        stack.enter_context(patch.object(session, "open_output", opened))
        status = cli.main(["--config", "pocket_sdxl.toml", *given])
    if status:
        raise SystemExit(said.getvalue())
    spent.clock["looks"] = spent.processor["looks"] = next(looks) * seconds_of_a_look()
    parts = {name: {"clock_s": spent.clock[name], "processor_s": spent.processor[name]} for name in spent.clock}
    return {
        "steps": steps, "clock_s": whole["clock"], "processor_s": whole["processor"], "parts": parts,
        "share_of_clock": sum(spent.clock.values()) / whole["clock"],
        "share_of_processor": sum(spent.processor.values()) / whole["processor"],
        "page_bytes": Layout(folder / "run").report.stat().st_size,
    }  # fmt: skip


def synthetic(folder: Path) -> Layout:
    """The files of a long run: loss, held-out loss, and samples that look a little like photos."""
    from PIL import Image, ImageFilter, PngImagePlugin

    layout, draw = Layout(folder), random.Random(0)
    lines = []
    for step in range(1, STEPS + 1):
        loss = 0.2 * math.exp(-step / 6000) + 0.05 + draw.gauss(0, 0.02)
        row = {
            "step": step, "epoch": step // 100 + 1, "loss": loss, "lr": 1e-4 * (1 - step / STEPS),
            "grad_norm": abs(draw.gauss(0.1, 0.03)), "images": 4 * step, "skipped": step % 3001 == 0, "seconds": 1.5,
            "images_per_second": 2.7, "time": 1.7e9 + 1.5 * step, "peak_bytes": 2**33 + step,
        }  # fmt: skip
        if step % 250 == 0:
            fields = {
                "held_out_loss": 0.1 + 0.1 * math.exp(-step / 4000),
                "trained_loss": 0.08 + 0.1 * math.exp(-step / 5000),
            }
            row |= fields | {"held_out_quarters": [0.4, 0.1, 0.05, 0.02], "measured_photos": "a"}
        if step >= 16 and step & (step - 1) == 0:
            row |= {"weight_change": 0.01, "weight_change_blocks": {f"unet.down_blocks.{n}": 0.01 for n in range(57)}}
        lines.append(json.dumps(row) + "\n")
    layout.metrics.parent.mkdir(parents=True, exist_ok=True)
    layout.metrics.write_text("".join(lines))
    steps = [round(n * STEPS / (SAMPLES // PROMPTS - 1)) for n in range(SAMPLES // PROMPTS)]
    for step in steps:
        for prompt in range(PROMPTS):
            path = layout.samples_of(step) / f"{prompt:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            coarse = Image.frombytes("RGB", (32, 32), draw.randbytes(32 * 32 * 3)).resize(
                (SIDE, SIDE), Image.Resampling.BICUBIC
            )
            noise = Image.effect_noise((SIDE, SIDE), 40).convert("RGB")
            info = PngImagePlugin.PngInfo()
            info.add_text("prompt", f"prompt number {prompt}")
            info.add_text("request", json.dumps({"prompt": prompt, "width": SIDE, "height": SIDE, "seed": 0, "steps": 20}))
            Image.blend(coarse, noise, 0.15).filter(ImageFilter.GaussianBlur(0.6)).save(path, pnginfo=info, compress_level=1)
    return layout


def of_a_page(folder: Path) -> dict[str, Any]:
    from tests.browser import CHROMIUM, Browser

    layout = synthetic(folder)
    report = LiveReport(ReportedRun(layout, name="long", total=STEPS + 1))
    written = []
    for _ in range(3):
        before = report.seconds
        report.write()
        written.append(report.seconds - before)
    found: dict[str, Any] = {
        "steps": STEPS, "samples": SAMPLES, "page_bytes": layout.report.stat().st_size, "first_written_s": written[0],
        "written_again_s": statistics.median(written[1:]),
    }  # fmt: skip
    if CHROMIUM is None:
        return found | {"opened_s": None, "why": "no Chromium is installed"}
    opened, processor = [], []
    with Browser() as browser:
        for _ in range(OPENED):
            tab = browser.tab()
            tab.look(1200, "light")
            tab.send("Performance.enable")
            tab.open(layout.report)
            # The browser's own clock: from the start of the navigation until page and images are there.
            opened.append(tab.run("performance.getEntriesByType('navigation')[0].loadEventEnd / 1000"))
            measured = {entry["name"]: entry["value"] for entry in tab.send("Performance.getMetrics")["metrics"]}
            processor.append(measured["ProcessTime"])
            assert not tab.troubles and not tab.requests
            tab.send("Page.close")
    return found | {
        "opened_s": opened, "median_opened_s": statistics.median(opened), "opened_processor_s": processor,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", choices=("run", "page"))
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    found: dict[str, Any] = {"machine": {"machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}}
    with tempfile.TemporaryDirectory() as folder:
        if given.only != "page":
            found["run"] = of_a_run(Path(folder), given.steps)
            run = found["run"]
            shares = f"{run['share_of_clock']:.2%} of the clock, {run['share_of_processor']:.2%} of the processor"
            print(f"of a run: {shares}: {run['parts']}", flush=True)
        if given.only != "run":
            found["page"] = of_a_page(Path(folder) / "long")
            print(f"of a page: {found['page']}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
