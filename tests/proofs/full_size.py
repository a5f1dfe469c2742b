"""The proof on real bytes: the real command line on models of the published sizes, with random weights, on a CPU.

    python tests/proofs/full_size.py --family sdxl
    python tests/proofs/full_size.py --family flux --against 819532f
    python tests/proofs/full_size.py --family flux2
    python tests/proofs/full_size.py --family flux3
    python tests/proofs/full_size.py --family zimage

Each cell is one thing shown: a storage format loaded and trained, a kill and a resume with equal bytes, a single file. Of
every phase of a cell the time, the peak resident memory and the bytes read and written are measured. Cells whose results are
in the JSON file already are left out, so a proof that was cut off goes on; delete the file to start again. A proof at full
size writes a row for each cell into docs/benchmarks/full_size.md. Exit status 1: a cell failed or a limit was missed; 2: no
room for the models.

--against runs two float8 steps of Flux at another commit too, right before the present one's, with the reader mended there
(it refused every file above 3 GB).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import pages  # noqa: E402
from tests.proofs.shared import PHOTOS, STARTED, worktree  # noqa: E402
from trainer.base.files import json_bytes, write_atomic  # noqa: E402
from trainer.base.tensorfile import TensorFile  # noqa: E402

GIB = 2**30
SAMPLE_SECONDS = 0.05
DENOISER = {"sdxl": "unet"} | dict.fromkeys(("flux", "flux2", "flux3", "zimage"), "transformer")
READER_MENDED = "bf06028"
SINGLE = "single file"
PAGE = ROOT / "docs" / "benchmarks" / "full_size.md"


class Failed(Exception):
    """A cell that did not show what it should."""


class NoModel(Exception):
    """There is no room for it."""


def require(condition: object, otherwise: str) -> None:
    if not condition:
        raise Failed(otherwise)


# ------------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Reading:
    """Of a process at one moment: Unix seconds, resident bytes and their peak so far, bytes read and written so far."""

    time: float
    resident: int
    peak: int
    read: int
    written: int


@dataclass
class Ran:
    """A command that has ended, and what was seen of it. read, written: by its system calls, whether from a disk or not.
    peak: in bytes; of several processes the largest."""

    status: int
    started: float
    ended: float
    output: str
    readings: list[Reading]
    peak: int

    def phase(self, name: str, started: float, ended: float) -> dict[str, Any]:
        """What was seen between two moments."""
        within = [r for r in self.readings if started <= r.time <= ended]
        around = [r for r in self.readings if r.time < started][-1:] + within
        first, last = (around[0], around[-1]) if around else (self.readings[0], self.readings[0])
        return {
            "phase": name,
            "seconds": round(ended - started, 2),
            "peak_bytes": max((r.resident for r in around), default=0),
            "read_bytes": last.read - first.read,
            "written_bytes": last.written - first.written,
        }


def look(pid: int) -> Reading | None:
    """None where the process has just ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        io = Path(f"/proc/{pid}/io").read_text()
    except OSError:
        return None
    kib = {name: int(value) for name, value in re.findall(r"^(Vm\w+):\s+(\d+) kB", status, re.MULTILINE)}
    count = {name: int(value) for name, value in re.findall(r"^(\w+): (\d+)", io, re.MULTILINE)}
    if "VmRSS" not in kib:
        return None
    return Reading(time.time(), kib["VmRSS"] * 1024, kib["VmHWM"] * 1024, count["rchar"], count["wchar"])


def run(
    command: list[str],
    *,
    code: Path = ROOT,
    kill_when: Callable[[], bool] | None = None,
    processes: int = 1,
    one_thread: bool = False,
) -> Ran:
    """Run a command and watch it. kill_when: asked at every look; once it says so, the process is killed. processes: that
    share a run; what is told is the first one's, and the status is 0 where all of theirs are."""
    environment = os.environ | {"PYTHONPATH": str(code), "HF_HUB_OFFLINE": "1", "SOURCE_DATE_EPOCH": STARTED}
    if processes > 1:
        with socket.create_server(("127.0.0.1", 0)) as free:
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        environment |= {"WORLD_SIZE": str(processes)}
    environment |= {"OMP_NUM_THREADS": "1"} if one_thread else {}
    started = time.time()
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(processes)]
        running = [
            subprocess.Popen(
                command, cwd=code, stdout=log, stderr=subprocess.STDOUT,
                env=environment | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}),
            )
            for rank, log in enumerate(logs)
        ]  # fmt: skip
        readings: list[list[Reading]] = [[] for _ in running]
        try:
            while None in [process.poll() for process in running]:
                for process, seen in zip(running, readings, strict=True):
                    if (reading := look(process.pid)) is not None:
                        seen.append(reading)
                if kill_when is not None and kill_when():
                    running[0].kill()
                time.sleep(SAMPLE_SECONDS)
        except BaseException:
            for process in running:
                process.terminate()
                process.wait()
            raise
        ended = time.time()
        for log in logs:
            log.seek(0)
        said = logs[0].read() + "".join(log.read() for log in logs[1:] if any(each.returncode for each in running))
    status = next((process.returncode for process in running if process.returncode), 0)
    return Ran(status, started, ended, said, readings[0], max(reading.peak for seen in readings for reading in seen))


# ------------------------------------------------------------------------------------------------------------ cells


@dataclass(frozen=True)
class Limits:
    """Promised of the full size, on two cores. None: nothing is."""

    peak_gib: float | None = None
    closing_seconds: float | None = None


@dataclass(frozen=True)
class Cell:
    """One thing shown: a training of some steps, and what has to be true of what it leaves.

    settings: dotted config keys. kill: SIGKILL within step 2, then the run goes on to its end. processes: that share the run.
    equals: another cell, whose losses, checkpoint and adapter files this one has to leave, byte for byte. one_thread: as each
    of several processes has, whose last bits depend on that.
    """

    name: str
    settings: Mapping[str, Any]
    resolution: int
    steps: int
    model: str = "shards"
    kill: bool = False
    processes: int = 1
    equals: str | None = None
    one_thread: bool = False
    limits: Limits = field(default_factory=Limits)


def sdxl_cells(large: int, small: int) -> list[Cell]:
    dora = {"model.components.unet.dtype": "fp8_e4m3", "adapter.type": "dora"}
    limits = Limits(peak_gib=5.0, closing_seconds=30)
    sample = [{"prompt": "a photo of sks plush bear", "width": small, "height": small, "steps": 2}]
    return [
        Cell(f"float8 DoRA {large} px", dora, large, 2, limits=limits),
        Cell(
            f"float8 DoRA {large} px, killed", dora, large, 2, kill=True, equals=f"float8 DoRA {large} px", limits=limits
        ),
        Cell(f"float8 DoRA {small} px", dora, small, 2),
        Cell(f"float8 DoRA {small} px, {SINGLE}", dora, small, 2, model=SINGLE, equals=f"float8 DoRA {small} px"),
        Cell(f"int8 LoRA {small} px", {"model.components.unet.dtype": "int8"}, small, 2),
        Cell(f"nf4 DoRA {small} px", {"model.components.unet.dtype": "nf4", "adapter.type": "dora"}, small, 2),
        Cell(
            f"bf16 LoRA {small} px, with samples",
            {"model.components.unet.dtype": "bf16", "validation.every_steps": 1000, "validation.samples": sample},
            small, 2,
        ),
    ]  # fmt: skip


def flux_cells(size: int) -> list[Cell]:
    dora = {"adapter.type": "dora", "adapter.targets": "attention"}
    live = {"data.cache_text": False, "model.components.text_encoder_2.dtype": "nf4"}
    dtype, both = "model.components.transformer.dtype", f"float8 DoRA {size} px, two micro-batches"
    return [
        Cell(f"float8 DoRA {size} px", dora | {dtype: "fp8_e4m3"}, size, 1, limits=Limits(peak_gib=14.5)),
        Cell(f"nf4 DoRA {size} px", dora | {dtype: "nf4"}, size, 1),
        Cell(f"float8 DoRA {size} px, live nf4 T5", dora | {dtype: "fp8_e4m3"} | live, size, 1),
        Cell(both, dora | {dtype: "fp8_e4m3", "step.accumulation": 2}, size, 1, one_thread=True),
        Cell(
            f"float8 DoRA {size} px, shared by two processes", dora | {dtype: "fp8_e4m3", "memory.shard": True}, size, 1,
            processes=2, equals=both, one_thread=True, limits=Limits(peak_gib=9.0),
        ),
    ]  # fmt: skip


def flux2_cells(size: int) -> list[Cell]:
    dora, dtype = {"adapter.type": "dora"}, "model.components.transformer.dtype"
    float8, limits = f"float8 DoRA {size} px", Limits(peak_gib=9.0)
    return [
        Cell(float8, dora | {dtype: "fp8_e4m3"}, size, 2, limits=limits),
        Cell(f"{float8}, killed", dora | {dtype: "fp8_e4m3"}, size, 2, kill=True, equals=float8, limits=limits),
        Cell(f"{float8}, {SINGLE}", dora | {dtype: "fp8_e4m3"}, size, 2, model=SINGLE, equals=float8),
        Cell(f"nf4 LoRA {size} px", {dtype: "nf4"}, size, 1),
    ]


def flux3_cells(size: int) -> list[Cell]:
    keys, float8, limits = {"model.components.transformer.dtype": "fp8_e4m3"}, f"float8 LoRA {size} px", Limits(peak_gib=9.0)
    return [
        Cell(float8, keys, size, 2, limits=limits),
        Cell(f"{float8}, killed", keys, size, 2, kill=True, equals=float8, limits=limits),
    ]


def zimage_cells(size: int) -> list[Cell]:
    keys = {"adapter.type": "dora", "model.components.transformer.dtype": "fp8_e4m3"}
    float8, limits = f"float8 DoRA {size} px", Limits(peak_gib=10.0)
    return [
        Cell(float8, keys, size, 2, limits=limits),
        Cell(f"{float8}, killed", keys, size, 2, kill=True, equals=float8, limits=limits),
    ]


@dataclass(frozen=True)
class Place:
    """Where a proof has its models and its runs."""

    folder: Path
    family: str
    size: str

    @property
    def name(self) -> str:
        return self.family if self.size == "full" else f"{self.family}-{self.size}"

    def model(self, kind: str) -> Path:
        # The file's name says what its model_index.json would: a base model of FLUX.2 klein.
        return self.folder / (f"{self.name}-klein-base-one.safetensors" if kind == SINGLE else self.name)

    @property
    def runs(self) -> Path:
        return self.folder / f"{self.name}-runs"

    def photos(self) -> Path:
        """Two real photos with their captions."""
        folder = self.runs / "photos"
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("00.jpg", "00.txt", "01.jpg", "01.txt"):
            if not (folder / name).exists():
                shutil.copyfile(PHOTOS / name, folder / name)
        return folder


def config(cell: Cell, place: Place, output: Path, *, cache: str = "cache", **more: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    settings = {
        "run.name": "proof",
        "run.output_dir": str(output),
        "run.seed": 7,
        "run.max_steps": cell.steps,
        "run.device": "cpu",
        "model.family": place.family,
        "model.path": str(place.model(cell.model)),
        "adapter.rank": 16,
        "data.resolution": cell.resolution,
        "data.sources": [{"path": str(place.photos())}],
        "data.cache_dir": str(place.runs / cache),
        "data.caption_dropout": 0.0,
        "memory.gradient_checkpointing": True,
        "schedule.warmup": 0,
        "checkpoint.every_steps": 1,
        "validation.every_steps": 0,
        "logging.tensorboard": False,
    }
    if place.family != "sdxl" and place.size != "full":
        settings["data.text_length"] = 64
    for key, value in (settings | dict(cell.settings) | more).items():
        *tables, leaf = key.split(".")
        node = tree
        for table in tables:
            node = node.setdefault(table, {})
        node[leaf] = value
    return tree


def train(tree: Mapping[str, Any], *options: str, **kwargs: Any) -> Ran:
    """`python train.py` with that config. Raises Failed, with the last of what it said, unless it ends well or is killed."""
    path = Path(tree["run"]["output_dir"]).with_suffix(".toml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tomli_w.dumps(dict(tree)))
    ran = run([sys.executable, "-u", "train.py", "--config", str(path), *options], **kwargs)
    require(ran.status in (0, -signal.SIGKILL), f"exit status {ran.status}\n{ran.output[-3000:]}")
    return ran


def lines(path: Path) -> list[dict[str, Any]]:
    """Of a .jsonl file that may not be there yet, or be cut short."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def phases_of(ran: Ran, output: Path) -> list[dict[str, Any]]:
    """The run's own account (phases.jsonl), its steps and its ends, joined with what was seen of the process by time."""
    spans = [(p["phase"], p["started"], p["started"] + p["seconds"]) for p in lines(output / "phases.jsonl")]
    steps = [(f"step {s['step']}", s["time"] - s["seconds"], s["time"]) for s in lines(output / "metrics.jsonl")]
    spans = [(name, max(a, ran.started), b) for name, a, b in spans + steps if b > ran.started]
    steps = [span for span in spans if span[0].startswith("step ")]
    if steps:
        spans.append(("all before the first step", ran.started, steps[0][1]))
        spans.append(("all after the last step", steps[-1][2], ran.ended))
    merged: dict[str, dict[str, Any]] = {}
    for name, begin, end in sorted(spans, key=lambda span: span[1]):
        seen = ran.phase(name, begin, end)
        if name in merged:
            held = merged[name]
            for key in ("seconds", "read_bytes", "written_bytes"):
                held[key] = round(held[key] + seen[key], 2)
            held["peak_bytes"] = max(held["peak_bytes"], seen["peak_bytes"])
        else:
            merged[name] = seen
    return list(merged.values())


def digests_of(output: Path, steps: int) -> dict[str, str]:
    """SHA-256 of what two equal runs share: the last checkpoint's tensors and the adapter files."""
    files = [output / "checkpoints" / f"step-{steps:08d}" / f"{name}.safetensors" for name in ("adapter", "optimizer")]
    files += sorted((output / "adapters").glob("*.safetensors"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def check_exports(output: Path) -> int:
    """Both adapter files open, are finite and change something. Returns their bytes."""
    paths = [output / "adapters" / name for name in ("proof.safetensors", "proof_comfyui.safetensors")]
    for path in paths:
        tensors = TensorFile(path).read_all()
        odd = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
        require(tensors and not odd, f"{path.name}: not finite: {odd[:3]}")
        ups = [tensor for name, tensor in tensors.items() if "lora_B" in name or "lora_up" in name]
        require(ups and any(bool(tensor.any()) for tensor in ups), f"{path.name}: every B is zero")
    return sum(path.stat().st_size for path in paths)


def check_samples(output: Path, steps: int) -> None:
    from PIL import Image

    for step in (0, steps):
        (path,) = (output / "samples" / f"step-{step:08d}").glob("*.png")
        low, high = Image.open(path).convert("L").getextrema()
        require(high > low, f"{path} is of one colour")


def run_cell(cell: Cell, place: Place, results: Mapping[str, Any]) -> dict[str, Any]:
    require(cell.equals is None or cell.equals in results, f"it is compared with {cell.equals!r}, which has no result")
    output = place.runs / re.sub(r"\W+", "-", cell.name)
    shutil.rmtree(output, ignore_errors=True)
    tree = config(cell, place, output)
    peak_before = 0
    if cell.kill:
        first = output / "checkpoints" / "step-00000001" / "manifest.json"
        killed = train(tree, kill_when=first.exists)
        done = [entry["step"] for entry in lines(output / "metrics.jsonl")]
        require(killed.status == -signal.SIGKILL and done == [1], f"killed too late: steps {done} were done")
        peak_before = killed.peak
    resume = ["--resume_from", "auto"] if cell.kill else []
    ran = train(tree, *resume, processes=cell.processes, one_thread=cell.one_thread)
    require(ran.status == 0, f"exit status {ran.status}")
    steps = lines(output / "metrics.jsonl")
    require([entry["step"] for entry in steps] == list(range(1, cell.steps + 1)), "metrics.jsonl lacks steps")
    require("Did it take?" in ran.output, "no table 'Did it take?'")
    if "validation.samples" in cell.settings:
        check_samples(output, cell.steps)
    result = {
        "seconds": round(ran.ended - ran.started, 1),
        "peak_bytes": max(ran.peak, peak_before),
        "step_seconds": [entry["seconds"] for entry in steps],
        "loss": [entry["loss"] for entry in steps],
        "closing_seconds": round(ran.ended - steps[-1]["time"], 1),
        "export_bytes": check_exports(output),
        "sha256": digests_of(output, cell.steps),
        "phases": phases_of(ran, output),
    }
    if cell.equals is not None:
        other = results[cell.equals]["sha256"]
        odd = sorted(name for name in other.keys() | result["sha256"] if other.get(name) != result["sha256"].get(name))
        require(not odd, f"not the bytes of {cell.equals!r}: {', '.join(odd)}")
        require(result["loss"] == results[cell.equals]["loss"], f"not the losses of {cell.equals!r}: {result['loss']}")
        result["equal_bytes"] = cell.equals
    if place.size == "full":
        peak, closing = result["peak_bytes"] / GIB, result["closing_seconds"]
        result["limits"] = [
            {"what": what, "limit": limit, "value": round(value, 2), "met": value <= limit}
            for what, limit, value in (
                ("peak resident GiB", cell.limits.peak_gib, peak),
                ("seconds from the last step to the exit", cell.limits.closing_seconds, closing),
            )
            if limit is not None
        ]
    shutil.rmtree(output)
    return result


def make_models(place: Place, kind: str) -> dict[str, Any] | None:
    """None where it is there already."""
    out = place.model(kind)
    if out.exists():
        return None
    layout = "single_file" if kind == SINGLE else "diffusers"
    command = [sys.executable, "scripts/make_model.py", "--size", place.size, "--family", place.family]
    ran = run([*command, "--layout", layout, str(out)])
    if ran.status == 2:
        raise NoModel(ran.output.strip())
    require(ran.status == 0, ran.output)
    return {
        "seconds": round(ran.ended - ran.started, 1), "peak_bytes": ran.peak,
        "phases": [ran.phase("writing", ran.started, ran.ended)],
    }  # fmt: skip


def plan(cell: Cell, place: Place) -> dict[str, Any]:
    """`--plan` reads headers: what it reads is a small part of the model."""
    ran = train(config(cell, place, place.runs / "plan"), "--plan")
    require(not (place.runs / "plan").exists(), "a plan left an output folder")
    require(f"  {DENOISER[place.family]} " in ran.output, ran.output)
    return {
        "seconds": round(ran.ended - ran.started, 1), "peak_bytes": ran.peak, "said": ran.output.splitlines(),
        "phases": [ran.phase("planning", ran.started, ran.ended)],
    }  # fmt: skip


@contextlib.contextmanager
def tree_of(commit: str, folder: Path) -> Iterator[Path]:
    """That commit's files, with the present reader's mend."""
    git = partial(subprocess.run, check=True, capture_output=True)
    with worktree(commit, folder / f"code-{commit}") as code:
        mended = subprocess.run(["git", "merge-base", "--is-ancestor", READER_MENDED, commit], cwd=ROOT)
        if mended.returncode:
            patch = git(["git", "show", READER_MENDED, "--", "trainer/tensorfile.py"], cwd=ROOT).stdout
            git(["git", "apply", "-"], cwd=code, input=patch)
        yield code


def against(commit: str, cell: Cell, place: Place) -> dict[str, Any]:
    """The second float8 step of each, one after the other: the first also makes what a run needs only once."""
    seconds, phases = {}, []
    with tree_of(commit, place.runs) as code:
        for name, where in ((commit, code), ("present", ROOT)):
            output = place.runs / f"against-{name}"
            shutil.rmtree(output, ignore_errors=True)
            settings = {"run.max_steps": 3, "run.stop_after": 2}
            cache = "cache" if where == ROOT else "cache-against"
            ran = train(config(cell, place, output, cache=cache, **settings), code=where)
            _, step = lines(output / "metrics.jsonl")
            seconds[name] = step["seconds"]
            end = step["time"]
            phases.append(ran.phase(f"step of {name}", end - step["seconds"], end))
            shutil.rmtree(output)
    ratio = seconds["present"] / seconds[commit]
    limit = {"what": f"step against {commit}", "limit": 0.5, "value": round(ratio, 3), "met": ratio <= 0.5}
    return {"step_seconds": seconds, "ratio": round(ratio, 4), "phases": phases, "limits": [limit]}


# ---------------------------------------------------------------------------------------------------------- results


def table(cells: Mapping[str, Any]) -> str:
    """A row for each cell. Its phases, and what they read and wrote, are in the JSON file."""
    rows = []
    for name, result in cells.items():
        seconds = {phase["phase"]: phase["seconds"] for phase in result["phases"]}
        steps = [value for phase, value in seconds.items() if phase.startswith("step ")]
        parts = seconds.get("all before the first step"), steps[-1] if steps else None, seconds.get("all after the last step")
        whole, peak = result.get("seconds"), result.get("peak_bytes")
        shown = ["-" if value is None else f"{value:.1f}" for value in (*parts, whole)]
        rows.append([name, *shown, "-" if peak is None else f"{peak / GIB:.2f}"])
    return pages.table(["cell", "start, s", "last step, s", "end, s", "whole, s", "peak GiB"], rows)


def verdicts(cells: Mapping[str, Any]) -> list[str]:
    said = []
    for name, result in cells.items():
        if "equal_bytes" in result:
            said.append(f"{name}: the same bytes as {result['equal_bytes']!r}")
        for limit in result.get("limits", ()):
            outcome = "met" if limit["met"] else "MISSED"
            said.append(f"{name}: {limit['what']} {limit['value']:g}, at most {limit['limit']:g}: {outcome}")
    return said


def write_page(family: str, tree: Mapping[str, Any]) -> None:
    """The table's place in docs/benchmarks/full_size.md, between two markers."""
    begin, end = f"<!-- {family}: begin -->", f"<!-- {family}: end -->"
    text = PAGE.read_text(encoding="utf-8")
    cells = tree["families"][family]
    about = tree["about"]
    shown = [f"{about['date'][:10]}, {about['machine']}, {about['threads']} threads, torch {about['torch']}:"]
    shown += ["", table(cells), "", *(f"- {line}" for line in verdicts(cells))]
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    write_atomic(PAGE, [(head + begin + "\n" + "\n".join(shown) + "\n" + end + tail).encode()])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=tuple(DENOISER), required=True)
    parser.add_argument("--size", choices=("full", "short"), default="full", help="short: few blocks, for tests")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="models are taken from there, or written and kept there")
    parser.add_argument("--against", metavar="COMMIT", help="Flux: time one float8 step of that commit, too")
    parser.add_argument("--cells", metavar="PATTERN", default="*", help="fnmatch on the cells' names")
    parser.add_argument("--out", type=Path, metavar="JSON", help="left out: docs/benchmarks/full-size-CPU-DATE.json")
    options = parser.parse_args(arguments)
    if options.against and options.family != "flux":
        parser.error("--against measures Flux; give --family flux")
    full = options.size == "full"
    if not full and options.out is None:
        parser.error("--size short needs --out: docs/benchmarks holds figures of the full size")
    now = datetime.now(UTC)
    out = options.out or ROOT / "docs" / "benchmarks" / f"full-size-CPU-{now:%Y-%m-%d}.json"
    tree = json.loads(out.read_text()) if out.exists() else {"about": {}, "families": {}}
    tree["about"] = {
        "date": now.isoformat(timespec="seconds"), "machine": platform.machine(), "torch": torch.__version__,
        "threads": torch.get_num_threads(), "size": options.size,
    }  # fmt: skip
    results = tree["families"].setdefault(options.family, {})

    kept = options.keep is not None  # the encoded photos and captions, too, for a proof that goes on
    folder = options.keep.absolute() if kept else Path(tempfile.mkdtemp(prefix="full-size-"))
    place = Place(folder, options.family, options.size)
    large, small = (512, 256) if full else (128, 64)
    made_for = {"sdxl": partial(sdxl_cells, large), "flux": flux_cells, "flux2": flux2_cells, "flux3": flux3_cells,
                "zimage": zimage_cells}  # fmt: skip
    cells = made_for[options.family](small)
    work: dict[str, tuple[str, Callable[[], dict[str, Any] | None]]] = {"plan": ("shards", partial(plan, cells[0], place))}
    work |= {cell.name: (cell.model, partial(run_cell, cell, place, results)) for cell in cells}
    if options.against:
        work[f"against {options.against}"] = ("shards", partial(against, options.against, cells[0], place))
    failed = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended, too
    try:
        for name, (model, do) in work.items():
            if not fnmatchcase(name, options.cells) or name in results:
                continue
            print(f"{datetime.now():%H:%M:%S} {name}", flush=True)
            try:
                if (made := make_models(place, model)) is not None:
                    results[f"write the model, {model}"] = made
                result = do()
            except Failed as error:
                failed.append(name)
                print(f"{name} failed: {error}", flush=True)
                continue
            results[name] = result
            print(table({name: result}), *verdicts({name: result}), sep="\n", flush=True)
            write_atomic(out, [json_bytes(tree)])
            if options.out is None:
                write_page(options.family, tree)
    except NoModel as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
    print("\n" + table(results), *verdicts(results), sep="\n")
    missed = [limit for result in results.values() for limit in result.get("limits", ()) if not limit["met"]]
    for name in failed:
        print(f"failed: {name}")
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
