"""How long a step waits for its batch, and how soon the first batch comes where nothing is cached.

    python benchmarks/data.py waits [--steps 100] [--json FILE]
    python benchmarks/data.py first [--files 100000] [--json FILE]
    python benchmarks/data.py plan [--files 100000] [--json FILE]
    python benchmarks/data.py report [--files 100000] [--json FILE]
    python benchmarks/data.py starts [--files 10000] [--against COMMIT] [--rounds 1] [--json FILE]

waits: tiny SDXL and Flux from a warm cache, with 0 and 2 workers, in one process. Of each update after the first ten the time
that the loop waits for the batch, and the time of the step. Their share, waited / (waited + step), is to be at most 2 %.

first: a folder of tiny JPEGs, each with its caption, data.cache = "none". Seconds until the photos are read, until the run is
built, and until the first batch is there; and how many photos were encoded for it.

report: processor seconds of scripts/data.py report where all photos look alike. Ten times the photos may take 15 times as
long.

starts: a tiny Flux over hard links of 100 JPEGs of 12 megapixels, each with a caption. A start with an empty cache (cold), a
second one (warm), both by a Session up to the first step and its checkpoint, and a warm one over 10 of the photos, which is
taken off. Processor seconds, decoded images, bytes read of all files (as Linux counts them), calls of fsync, files and bytes
of the cache. --against: the cold start beside an earlier commit's, in turns.
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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import tomli_w  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402

from scripts.make_model import make  # noqa: E402
from tests.harness import built  # noqa: E402
from tests.proofs.shared import worktree  # noqa: E402
from trainer import config as configs  # noqa: E402
from trainer.base.progress import Phases, Record  # noqa: E402
from trainer.base.run_layout import Layout  # noqa: E402
from trainer.base.signals import Signals  # noqa: E402
from trainer.run import run as runs  # noqa: E402
from trainer.run.session import Session  # noqa: E402
from trainer.runtime.context import RunContext  # noqa: E402
from workbench.commands.launch import make_launch  # noqa: E402

LIMIT = 0.02
FIRST_STEPS = 10  # of a run, not counted: workers start, libraries warm up
FAMILIES = ("sdxl", "flux")


def config(folder: Path, family: str, photos: Path, **data: Any) -> configs.Config:
    model = folder / family
    if not model.exists():
        make("tiny", family, "diffusers", model, 0, "epsilon", None)
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
    run = runs.build(chosen, source, context, make_launch(None))
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


# --- starts -----------------------------------------------------------------------------------------------------------

DISTINCT, FEW = 100, 10
# What is allowed: processor seconds, a share of the cache's bytes, calls, files, a share of the earlier commit's time.
MOST = {"warm_s": 5, "warm_share": 0.01, "fsyncs": 50, "files": 60, "ratio": 0.6}
START = """
import json, os, resource, sys
from PIL import ImageFile

counts = {"decodes": 0, "fsyncs": 0}
load, fsync = ImageFile.ImageFile.load, os.fsync

def loading(image):
    counts["decodes"] += bool(image.tile)
    return load(image)

def syncing(file):
    counts["fsyncs"] += 1
    fsync(file)

ImageFile.ImageFile.load, os.fsync = loading, syncing
from trainer.run.session import Session, load_config

with Session.open(load_config(sys.argv[1])) as session:
    session.train()
used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
counts["cpu_s"] = sum(each.ru_utime + each.ru_stime for each in used)
counts["read"] = int(open("/proc/self/io").readline().split()[1])
print("\\n" + json.dumps(counts))
"""


def link_photos(folder: Path, count: int) -> None:
    """`count` hard links of DISTINCT JPEGs of 12 megapixels, each with a caption of its own."""
    for number in range(DISTINCT):
        Image.effect_noise((1000, 750), 60).convert("RGB").resize((4000, 3000)).save(folder / f"{number}.jpeg", quality=90)
    for name, links in (("many", count), ("few", FEW)):
        (folder / name).mkdir()
        for number in range(links):
            os.link(folder / f"{number % DISTINCT}.jpeg", folder / name / f"{number:06d}.jpg")
            (folder / name / f"{number:06d}.txt").write_text(f"photo number {number}")
    time.sleep(3)  # what was written just now may change again within its time stamp


def start(tree: Path, folder: Path, photos: str, cache: Path) -> dict[str, Any]:
    """One start of that tree, up to its first step and checkpoint. The photos: "many" or "few"."""
    made = config(folder, "flux", folder / photos, resolution=512, batch_size=1)
    tree_of = json.loads(made.model_dump_json(exclude_unset=True))
    tree_of["run"] |= {"stop_after": 1, "device": "cpu"}
    tree_of["data"]["cache_dir"] = str(cache)
    tree_of["export"] = {"on_stop": False}
    (folder / "start.toml").write_text(tomli_w.dumps(tree_of))
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", START, str(folder / "start.toml")],
        cwd=tree, env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(tree)}, capture_output=True, text=True,
    )  # fmt: skip
    wall = time.perf_counter() - began
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    files = [path for path in cache.rglob("*") if path.is_file()]
    about = {"wall_s": wall, "files": len(files), "bytes": sum(path.stat().st_size for path in files)}
    return json.loads(done.stdout.splitlines()[-1]) | about


def starts(folder: Path, count: int, against: str | None, rounds: int) -> dict[str, Any]:
    """Counts of a cold start, of a warm one less that over FEW photos, and the cold wall time over an earlier commit's."""
    link_photos(folder, count)
    found: dict[str, Any] = {"files": count, "cold": [], "before": []}
    with ExitStack() as stack:
        earlier = stack.enter_context(worktree(against, folder / "earlier")) if against else None
        for number in range(rounds):
            for name, tree in (("before", earlier), ("cold", ROOT)):
                if tree is not None:
                    found[name].append(start(tree, folder, "many", folder / f"{name}-{number}"))
                    print(f"{name}: {found[name][-1]}", flush=True)
    cache = folder / f"cold-{rounds - 1}"
    warm = start(ROOT, folder, "many", cache)
    for _ in range(2):  # the first one is not warm
        few = start(ROOT, folder, "few", folder / "few-cache")
    found |= {"warm": warm, "few": few, "difference": {name: warm[name] - few[name] for name in warm}}
    return found


def starts_lines(found: dict[str, Any]) -> tuple[list[str], bool]:
    """What is printed, and whether everything is within MOST."""
    cold, less, whole = found["cold"][-1], found["difference"], found["warm"]["bytes"]
    rows = [
        ("cold: calls of fsync", cold["fsyncs"], MOST["fsyncs"]),
        ("cold: files of the cache", cold["files"], MOST["files"]),
        ("warm - few: processor seconds", less["cpu_s"], MOST["warm_s"]),
        ("warm - few: decoded images", less["decodes"], 0),
        ("warm - few: bytes read / bytes of the cache", less["read"] / whole, MOST["warm_share"]),
    ]
    if found["before"]:
        walls = [[row["wall_s"] for row in found[name]] for name in ("cold", "before")]
        rows.append(("cold: wall / that of the earlier commit", sum(walls[0]) / sum(walls[1]), MOST["ratio"]))
    lines = [f"{what}: {value:.3g}, at most {most:g}: {'met' if value <= most else 'MISSED'}" for what, value, most in rows]
    return lines, all(value <= most for _, value, most in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="part", required=True)
    for part in ("waits", "first", "plan", "report", "starts"):
        command = commands.add_parser(part)
        command.add_argument("--json", type=Path)
        if part == "waits":
            command.add_argument("--steps", type=int, default=100)
        else:
            command.add_argument("--files", type=int, default=10_000 if part == "starts" else 100_000)
        if part == "starts":
            command.add_argument("--against", metavar="COMMIT")
            command.add_argument("--rounds", type=int, default=1)
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
        elif chosen.part == "starts":
            result = about | starts(folder, chosen.files, chosen.against, chosen.rounds)
            lines, met = starts_lines(result)
            print("\n".join(lines))
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
