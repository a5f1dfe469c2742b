"""How long a step waits for its batch, and how soon the first batch comes where nothing is cached.

    python benchmarks/data.py waits [--steps 100] [--json FILE]
    python benchmarks/data.py first [--files 100000] [--json FILE]
    python benchmarks/data.py plan [--files 100000] [--json FILE]
    python benchmarks/data.py report [--files 100000] [--json FILE]

waits: tiny SDXL and Flux from a warm cache, with 0 and 2 workers, in one process. Of each update after the first ten the time
that the loop waits for the batch, and the time of the step. Their share, waited / (waited + step), is to be at most 2 %.

first: a folder of tiny JPEGs, each with its caption, data.cache = "none". Seconds until the photos are read, until the run is
built, and until the first batch is there; and how many photos were encoded for it.

report: processor seconds of scripts/data.py report where all photos look alike. Ten times the photos may take 15 times as
long.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from PIL import Image  # noqa: E402

from scripts.make_model import make  # noqa: E402
from tests.harness import built  # noqa: E402
from trainer import config as configs  # noqa: E402
from trainer.base.progress import Phases, Record  # noqa: E402
from trainer.base.run_layout import Layout  # noqa: E402
from trainer.base.signals import Signals  # noqa: E402
from trainer.run import run as runs  # noqa: E402
from trainer.run.session import Session  # noqa: E402
from trainer.runtime.context import RunContext  # noqa: E402
from workbench.commands.launch import asked  # noqa: E402

LIMIT = 0.02
FIRST_STEPS = 10  # of a run, not counted: workers start, libraries warm up
FAMILIES = ("sdxl", "flux")


def config(folder: Path, family: str, photos: Path, **data: Any) -> configs.Config:
    model = folder / family
    if not model.exists():
        make("tiny", family, "diffusers", model, 0, "epsilon", False)
    return configs.parse({
        "run": {"name": "bench", "output_dir": str(folder / "out" / f"{family}-{len(list(folder.glob('out/*')))}"),
                "max_steps": 10**6},
        "model": {"family": family, "path": str(model)},
        "adapter": {"rank": 8},
        "data": {"resolution": 64, "batch_size": 2, "cache_dir": str(folder / "cache"), "sources": [{"path": str(photos)}]}
        | data,
        "checkpoint": {"every_steps": 0},
        "validation": {"every_steps": 0},
        "logging": {"tensorboard": False},
    })  # fmt: skip


# --- waits ------------------------------------------------------------------------------------------------------------


def waits(folder: Path, family: str, workers: int, steps: int) -> dict[str, Any]:
    """Of one run: milliseconds waited and computed, by update."""
    photos = ROOT / "examples" / "bear_plushie"
    settled = config(folder, family, photos, flip=True, num_workers=workers)
    settled = configs.with_values(settled, {"run.stop_after": FIRST_STEPS + steps})
    waited: list[float] = []
    with built(settled) as run, Signals() as signals:
        loop = runs.make_loop(run, signals)
        loop.data = timed(loop.data, waited.append)
        deque(loop.steps(), maxlen=0)
    log = [json.loads(line) for line in run.context.layout.metrics.read_text().splitlines()]
    computed = [entry["seconds"] for entry in log][FIRST_STEPS:]
    waited = waited[FIRST_STEPS : FIRST_STEPS + steps]
    assert len(computed) == len(waited) == steps
    return {
        "family": family, "workers": workers, "share": sum(waited) / (sum(waited) + sum(computed)),
        "step_ms": 1000 * sum(computed) / steps, "waited_ms": 1000 * sum(waited) / steps,
        "longest_wait_ms": 1000 * max(waited),
    }  # fmt: skip


def timed(batches: Any, told: Callable[[float], None]) -> Iterator[Any]:
    """The same, telling of each how long it took to come."""
    try:
        while True:
            began = time.perf_counter()
            batch = next(batches)
            told(time.perf_counter() - began)
            yield batch
    finally:
        batches.close()


# --- the first batch --------------------------------------------------------------------------------------------------


def write_photos(folder: Path, count: int) -> None:
    """`count` different JPEGs of 64 x 64 pixels, which differ in a comment, each with a caption of its own."""
    buffer = io.BytesIO()
    Image.effect_noise((64, 64), 60).convert("RGB").save(buffer, "JPEG")
    jpeg = buffer.getvalue()
    folder.mkdir()
    for number in range(count):
        comment = f"{number:08d}".encode()
        (folder / f"{number:06d}.jpg").write_bytes(jpeg[:2] + b"\xff\xfe\x00\x0a" + comment + jpeg[2:])
        (folder / f"{number:06d}.txt").write_text(f"photo number {number}")


def first(folder: Path, count: int) -> dict[str, Any]:
    """Seconds until the first batch of `count` photos, none of them cached."""
    photos, record, encoded = folder / "photos", Record(), []
    began = time.perf_counter()
    write_photos(photos, count)
    written = time.perf_counter()
    chosen = config(folder, "sdxl", photos, cache="none")
    model_made = time.perf_counter()
    session = Session.open(chosen)
    chosen, source = session.config, session.source
    peers = session.processes
    context = RunContext(peers, Phases(show=True, record=record), Layout(Path(chosen.run.output_dir)))
    run = runs.build(chosen, source, context, asked(None))
    ready = time.perf_counter()
    encode = run.components.encode_images
    run.reader.encoders = type(run.reader.encoders)(
        lambda pixels: encoded.append(pixels) or encode(pixels), run.components.encode_prompts
    )
    batches = run.updates()
    batch = run.reader[next(batches)[0]]
    there = time.perf_counter()
    record.open(folder / "phases.jsonl")
    phases = [json.loads(line) for line in (folder / "phases.jsonl").read_text().splitlines()]
    return {
        "files": count, "to_write_them_s": written - began,
        "phases_s": {entry["phase"]: entry["seconds"] for entry in phases if entry["seconds"] > 0.5},
        "start_to_built_s": ready - model_made, "built_to_first_batch_s": there - ready,
        "start_to_first_batch_s": there - model_made, "photos_encoded": len(encoded),
        "photos_in_the_batch": len(batch.occurrences),
    }  # fmt: skip


# --- a plan -----------------------------------------------------------------------------------------------------------


def plan(folder: Path, count: int) -> dict[str, Any]:
    """Processor seconds of `--plan` for a preset at full size, over the five example photos and over `count` small ones."""
    write_photos(folder / "photos", count)
    found: dict[str, Any] = {"files": count}
    for name, photos in (("few", ROOT / "examples" / "bear_plushie"), ("many", folder / "photos")):
        command = [sys.executable, "train.py", "--config", "sdxl_12gb.toml", "--plan_memory", "12GiB"]
        for key in (f"data.sources.0.path={str(photos)!r}", "data.enlarge=true", f"run.output_dir={str(folder / 'out')!r}"):
            command += ["--set", key]
        before, began = os.times(), time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
        after, wall = os.times(), time.perf_counter() - began
        assert done.returncode == 0 and done.stdout.splitlines()[-1].startswith("fits: "), done.stdout + done.stderr
        used = after.children_user + after.children_system - before.children_user - before.children_system
        found |= {f"{name}_processor_s": used, f"{name}_wall_s": wall}
    return found


def report(folder: Path, count: int) -> dict[str, Any]:
    """Processor seconds of `scripts/data.py report` over `count` photos that look alike, and over a tenth of them."""
    found: dict[str, Any] = {"files": count}
    for name, photos in (("tenth", count // 10), ("all", count)):
        write_photos(folder / name, photos)
        command = [sys.executable, "scripts/data.py", "report", "--config", "pocket_sdxl.toml", "--out", str(folder / "out")]
        for key in (f"data.sources.0.path={str(folder / name)!r}", "data.held_out=0"):
            command += ["--set", key]
        before, began = os.times(), time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
        after, wall = os.times(), time.perf_counter() - began
        assert done.returncode in (0, 3), done.stdout + done.stderr
        used = after.children_user + after.children_system - before.children_user - before.children_system
        found |= {f"{name}_processor_s": used, f"{name}_wall_s": wall}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="part", required=True)
    for part in ("waits", "first", "plan", "report"):
        command = commands.add_parser(part)
        command.add_argument("--json", type=Path)
        if part == "waits":
            command.add_argument("--steps", type=int, default=100)
        else:
            command.add_argument("--files", type=int, default=100_000)
    chosen = parser.parse_args()
    about = {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "machine": platform.machine()}
    with tempfile.TemporaryDirectory(prefix="bench-data-") as temporary:
        folder = Path(temporary)
        if chosen.part == "waits":
            rows = []
            for family, workers in ((family, workers) for family in FAMILIES for workers in (0, 2)):
                rows.append(row := waits(folder, family, workers, chosen.steps))
                whole = row["step_ms"] + row["waited_ms"]
                print(
                    f"{family}, {workers} workers: waits {row['share']:.2%} of its time ({row['waited_ms']:.2f} of "
                    f"{whole:.1f} ms, at most {row['longest_wait_ms']:.1f}); {'met' if row['share'] <= LIMIT else 'MISSED'}",
                    flush=True,
                )
            result = about | {"steps": chosen.steps, "limit": LIMIT, "runs": rows}
            met = all(row["share"] <= LIMIT for row in rows)
        elif chosen.part == "plan":
            row = plan(folder, chosen.files)
            result, met = about | row, True
            print(
                f"--plan of sdxl_12gb.toml: {row['few_processor_s']:.1f} s of a processor over 5 photos, "
                f"{row['many_processor_s']:.1f} s over {row['files']}"
            )
        elif chosen.part == "report":
            row = report(folder, chosen.files)
            result, met = about | row, row["all_processor_s"] < 15 * row["tenth_processor_s"]
            print(
                f"data.py report: {row['all_processor_s']:.1f} s of a processor over {row['files']} photos, "
                f"{row['tenth_processor_s']:.1f} s over a tenth of them"
            )
        else:
            row = first(folder, chosen.files)
            result, met = about | row, row["photos_encoded"] == row["photos_in_the_batch"]
            print(
                f"{row['files']} files: the first batch after {row['start_to_first_batch_s']:.1f} s, of that "
                f"{row['start_to_built_s']:.1f} s until the run was built ({row['phases_s']}) and "
                f"{row['built_to_first_batch_s']:.2f} s for the batch; {row['photos_encoded']} photos encoded"
            )
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
