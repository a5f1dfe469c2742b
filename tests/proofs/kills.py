"""Is a run that is killed again and again, and started again with the same command line, one that never was killed?

    python tests/proofs/kills.py                               # 8 cells, 104 kills, 48 of them inside a save
    python tests/proofs/kills.py --signals 200                 # SIGTERM and SIGINT instead
    python tests/proofs/kills.py --cells 'flux-*' --seed 3 --fresh

A cell trains a tiny model once without a break and once in a row of lives, each ended by SIGKILL. Inside a save a life ends
at a system call of the commit protocol, drawn from all that a save and the pruning after it make, or halfway through a
write. Elsewhere it ends at a random time of a start or a step, or at a random time or system call while photos and captions
are encoded, while a sample is drawn, while the adapter files are written. After each the checkpoints there are all valid and
none is lost. In the end both folders hold the same files with the same bytes, but for the times in metrics.jsonl,
phases.jsonl and report.html.

With --signals every life gets SIGTERM or SIGINT instead: it exits within 30 s with 143 or 130, and the newest checkpoint is
of the last step in metrics.jsonl.

A life is a fork of a process that has imported the libraries and done nothing else. That is as good as a new process, since
only files go from one life to the next, and saves the seconds of the imports; --fresh starts a new one all the same.

Exit status 1 where anything is lost, left over or different. Linux, on the CPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from tests.harness import DENOISER, PHOTOS, Workbench, metrics_of  # noqa: E402
from tests.proofs.forks import Order, Server  # noqa: E402
from tests.proofs.shared import STARTED, make_models  # noqa: E402
from trainer.base.digests import SETTLED_SECONDS  # noqa: E402
from trainer.base.tensorfile import TensorFile  # noqa: E402
from trainer.checkpoint import store  # noqa: E402
from workbench.commands import main as cli  # noqa: E402

LEVELS: dict[str, tuple[Any, ...]] = {
    "family": ("sdxl", "flux"),
    "kind": ("lora", "dora"),
    "optimizer": ("adamw", "adamw8bit"),
    "storage": ("fp8_e4m3", "int8", "nf4"),
    "workers": (0, 2),
}


@dataclass(frozen=True)
class Cell:
    family: str
    kind: str
    optimizer: str
    storage: str
    workers: int

    @property
    def name(self) -> str:
        return "-".join(map(str, asdict(self).values()))


# Every two levels of different factors meet; no two meet more than three times.
CELLS = (
    Cell("sdxl", "lora", "adamw", "int8", 2),
    Cell("sdxl", "lora", "adamw8bit", "fp8_e4m3", 0),
    Cell("sdxl", "dora", "adamw", "nf4", 0),
    Cell("sdxl", "dora", "adamw8bit", "fp8_e4m3", 2),
    Cell("flux", "lora", "adamw", "int8", 0),
    Cell("flux", "lora", "adamw8bit", "nf4", 2),
    Cell("flux", "dora", "adamw", "fp8_e4m3", 2),
    Cell("flux", "dora", "adamw8bit", "int8", 2),
)

# ------------------------------------------------------------------------------------------------------------- lives

# What a life is watched in.
REGIONS = {
    "caching": "trainer.run.run:encode",
    "drawing": "trainer.artifacts.sampling:draw_samples",
    "logging": "trainer.monitoring.metrics:Metrics.log",
    "saving": "trainer.checkpoint.store:save",
    "pruning": "trainer.checkpoint.store:prune",
    "finishing": "trainer.run.session:close",
}
# What changes the disk there; os.open reads only where a folder is synced or removed.
CALLS = ("mkdir", "open", "write", "fsync", "replace", "unlink", "rmdir")

# Of the process that starts lives. One thread: bytes are promised for one thread count.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "SOURCE_DATE_EPOCH": STARTED, "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip


@dataclass(frozen=True)
class Life:
    """One start of the trainer, and the end it brings upon itself there, if any.

    In one of `regions` it sends itself `signum`: before the `nth` call of `call`, or, where `half`, after half of that write;
    without a call `delay` seconds after it first enters, at the latest when it leaves.
    """

    arguments: tuple[str, ...]
    signum: int = signal.SIGKILL
    regions: tuple[str, ...] = ()
    call: str = ""
    nth: int = 0
    half: bool = False
    delay: float = 0.0


class Watch:
    """Writes down what a life does in the regions, and ends it.

    events: [region, seconds of its beginning and end, calls by name], seconds counted from the birth of the life.
    """

    def __init__(self, life: Life) -> None:
        self.life = life
        self.events: list[tuple[str, float, float, dict[str, int]]] = []
        self.here = threading.local()  # a checkpoint is written in a thread of its own
        self.count = 0
        self.done = False
        self.born = time.monotonic()

    def install(self) -> None:
        for region, target in REGIONS.items():
            module, _, path = target.partition(":")
            *owners, name = path.split(".")
            owner = importlib.import_module(module)
            for part in owners:
                owner = getattr(owner, part)
            setattr(owner, name, bound(self.in_region, region, getattr(owner, name)))
        for name in CALLS:
            setattr(os, name, bound(self.at_call, name, getattr(os, name)))

    def in_region(self, region: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
        doomed = region in self.life.regions and not self.life.call and not self.done
        timer = threading.Timer(self.life.delay, self.end) if doomed else None
        if timer is not None:
            timer.daemon = True
            timer.start()
        entered = time.monotonic()
        self.here.region, self.here.calls = region, Counter()
        try:
            return function(*args, **kwargs)
        finally:
            if timer is not None:
                timer.cancel()
                self.end()
            self.events.append((region, entered - self.born, time.monotonic() - self.born, self.here.calls))
            self.here.region = None

    def at_call(self, name: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
        region, life = getattr(self.here, "region", None), self.life
        if region is not None:
            self.here.calls[name] += 1
            if name == life.call and region in life.regions:
                self.count += 1
                if self.count == life.nth:
                    if life.half:
                        descriptor, data = args
                        function(descriptor, memoryview(data)[: len(data) // 2])
                    self.end()
        return function(*args, **kwargs)

    def end(self) -> None:
        if not self.done:
            self.done = True
            if self.life.signum != signal.SIGKILL:
                Path("signalled").write_text(str(time.monotonic()))
            os.kill(os.getpid(), self.life.signum)


def bound(function: Callable, *first: Any) -> Callable:
    """`functools.partial`, but a method where it is put into a class."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*first, *args, **kwargs)

    return call


def live(**fields: Any) -> int:
    """A whole life of the trainer, in this process and its present folder; returns its exit status.

    fields: of a `Life`. Leaves beside the run: alive, when it begins; watched.json, when it ends by itself.
    """
    life = Life(**fields)
    watch = Watch(life)
    watch.install()
    print(f"--- {life}", flush=True)
    Path("alive").touch()
    try:
        status = cli.main(list(life.arguments))
    except KeyboardInterrupt:  # before or after all that main does: as the interpreter says it
        status = 128 + signal.SIGINT
    if status == 0:
        Path("watched.json").write_text(json.dumps(watch.events))
    return status


def lives(*, fresh: bool = False) -> Server:
    """What starts them."""
    return Server(ROOT, ["tests.proofs.kills", "trainer.adapters.dora"], ENVIRONMENT, fresh=fresh)


# ----------------------------------------------------------------------------------------------------------- moments

SAVES = {"first save": ("saving",), "save": ("saving", "pruning"), "pruning": ("pruning",)}
KILLS = ("save",) * 4 + ("pruning", "drawing") + ("start", "step") * 2
SIGNALS = ("step",) * 7 + ("save", "drawing") * 5 + ("start", "caching") * 4


@dataclass(frozen=True)
class Moment:
    """When a life ends: where, and how far into it. All of it is drawn, so a seed gives the same moments again.

    where: "start"; "step", after `steps` steps of this life; "caching", "drawing", "finishing"; inside a save: "first save",
    with no checkpoint there yet, "save", the pruning after it included, "pruning".
    part: of the time that takes, or of the calls of one kind. pick: of the kinds. half: of a write, after half of it.
    group: the signal goes to the workers too, as from a terminal.
    """

    where: str
    part: float
    pick: float
    half: bool
    steps: int
    signum: int
    group: bool


def drawn(places: Iterable[str], draw: random.Random, signums: Sequence[int] = (signal.SIGKILL,)) -> list[Moment]:
    return [
        Moment(
            where, draw.random(), draw.random(), draw.random() < 0.5, draw.randrange(3), draw.choice(signums),
            signal.SIGKILL not in signums and draw.random() < 0.5,
        )
        for where in places
    ]  # fmt: skip


def kills(draw: random.Random) -> list[Moment]:
    """The 13 of a cell, 6 of them inside a save. The first two only a run without a checkpoint has."""
    return drawn(["caching", "first save", *draw.sample(KILLS, len(KILLS)), "finishing"], draw)


def stops(number: int, draw: random.Random) -> list[Moment]:
    places = draw.sample(SIGNALS, len(SIGNALS)) * (number // len(SIGNALS) + 1)
    return drawn(places[:number], draw, (signal.SIGTERM, signal.SIGINT))


@dataclass(frozen=True)
class Measured:
    """What the uninterrupted run took. start: seconds to the first step, with all caches filled; step: seconds; regions:
    seconds; calls: by region and name, as the last entry made them, since the first makes more folders.
    """

    start: float
    step: float
    regions: dict[str, float]
    calls: dict[str, dict[str, int]]

    @staticmethod
    def read(path: Path) -> Measured:
        regions: dict[str, float] = {}
        calls: dict[str, dict[str, int]] = {}
        steps, before_first = [], 0.0
        for region, entered, left, made in json.loads(path.read_text()):
            regions[region] = max(regions.get(region, 0), left - entered)
            if made or region not in calls:
                calls[region] = {name: made.get(name, 0) for name in CALLS}
            if region == "logging":
                steps.append(left)
            elif not steps:
                before_first += left - entered
        return Measured(steps[0] - before_first, (steps[-1] - steps[0]) / (len(steps) - 1), regions, calls)


def doomed(moment: Moment, measured: Measured) -> dict[str, Any]:
    """What of a Life brings about a moment that only it can meet: in a save a call, elsewhere a call or a time."""
    regions = SAVES.get(moment.where, (moment.where,))
    if not REGIONS.keys() >= set(regions):
        return {}
    made = {name: sum(measured.calls[region][name] for region in regions) for name in CALLS}
    kinds = [name for name in CALLS if made[name]]
    if moment.where not in SAVES:
        kinds += [""] * len(kinds)
    call = kinds[int(moment.pick * len(kinds))]
    saves = 2 if moment.where == "save" else 1  # not always the first one of a life
    return {
        "signum": moment.signum, "regions": regions, "call": call,
        "nth": 1 + int(moment.part * saves * made[call]) if call else 0,
        "half": moment.half and call == "write" and moment.signum == signal.SIGKILL,
        "delay": 0.0 if call else moment.part * measured.regions[moment.where],
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- a run

KEEP_LAST, SAVE_EVERY, DRAW_EVERY, EXPORT_EVERY = 2, 2, 6, 4
BOUND = 8  # steps a life may go, so that a late signal does not find the run at its end
STEPS_A_LIFE = 3  # a run's length for each moment; more than a life goes on average
TRIES = 3  # for a moment: a signal from outside can come too late
PATIENCE = 300.0  # seconds for a life that nothing ends
GRACE = 30.0  # seconds from a signal to the exit: what spot machines give
WORKERS_LINGER = 15.0  # seconds; torch's workers look after their parent every 5

TARGETS = {  # late layers: what is before them needs no backward pass
    "sdxl": ["up_blocks.1.attentions.*to_q", "conv_out"],
    "flux": ["single_transformer_blocks.1.attn.to_q", "single_transformer_blocks.1.proj_out"],
}


@dataclass(frozen=True)
class End:
    """How a life ended. status: negative for a signal; seconds: from the signal on; stepped: it made a step."""

    status: int
    seconds: float
    stepped: bool


class Run:
    """One run, life after life, in a folder of its own. What the lives say is in `log`."""

    def __init__(self, server: Server, folder: Path, config: Path) -> None:
        folder.mkdir()
        self.server, self.folder, self.config = server, folder, config
        self.out = folder / "out"
        self.checkpoints, self.metrics = self.out / "checkpoints", self.out / "metrics.jsonl"
        self.lives = 0
        self.pids: set[int] = set()  # of all its lives

    def steps(self) -> tuple[list[int], list[int]]:
        """Those of the valid checkpoints, and of the others."""
        present = store.steps(self.checkpoints)
        valid = [s for s in present if store.problem(self.checkpoints / store.folder_name(s)) is None]
        return valid, sorted(set(present) - set(valid))

    def newest(self) -> int:
        """The step of the newest valid checkpoint; 0 where there is none."""
        return max(self.steps()[0], default=0)

    def logged(self) -> int:
        """How many whole lines metrics.jsonl has."""
        return self.metrics.read_bytes().count(b"\n") if self.metrics.exists() else 0

    def live(self, moment: Moment | None = None, measured: Measured | None = None) -> End:
        """One life: to the moment, or to its bound where that came first; without one to the run's end.

        Raises TimeoutError where it neither does what it should nor exits.
        """
        newest = self.newest()
        arguments = ["--config", str(self.config), "--resume_from", "auto"]
        if moment is not None and moment.where != "finishing":
            arguments += ["--set", f"run.stop_after={newest + BOUND}"]
        inside = doomed(moment, measured) if moment and measured else {}
        alive, signalled = self.folder / "alive", self.folder / "signalled"
        for file in (alive, signalled):
            file.unlink(missing_ok=True)
        # Opening the output writes it anew.
        old = self.metrics.stat().st_ino if self.metrics.exists() else None

        def stepped(count: int) -> bool:
            return self.metrics.exists() and self.metrics.stat().st_ino != old and self.logged() >= newest + count

        self.lives += 1
        life = Life(tuple(arguments), **inside)
        pid = self.server.start(Order("tests.proofs.kills:live", str(self.folder), asdict(life)))
        self.pids.add(pid)
        status, sent = self._until(alive.exists, pid), None
        if moment and measured and not inside:
            wait = moment.part * measured.start
            if moment.where == "step":
                wait = moment.part * measured.step
                status = self._until(lambda: stepped(moment.steps), pid)
            due = time.monotonic() + wait
            if status is None:
                status = self._until(lambda: time.monotonic() >= due, pid)
            if status is None:
                sent = time.monotonic()
                (os.killpg if moment.group else os.kill)(pid, moment.signum)
        if status is None:
            status = self._until(lambda: False, pid, PATIENCE if sent is None else GRACE)
            assert status is not None
        ended = time.monotonic()
        if signalled.exists():
            sent = float(signalled.read_text())
        return End(status, 0.0 if sent is None else ended - sent, stepped(1))

    def _until(self, condition: Callable[[], bool], pid: int, seconds: float = PATIENCE) -> int | None:
        """The life's exit status, or None where the condition came first."""
        limit = time.monotonic() + seconds
        while (status := self.server.status(pid)) is None and not condition():
            if time.monotonic() > limit:
                os.killpg(pid, signal.SIGKILL)
                raise TimeoutError(f"life {self.lives} does not get on or exit within {seconds:.0f} s")
            time.sleep(0.005)
        return status

    def left_over(self) -> list[int]:
        """Processes that outlive their lives: workers that do not notice. They are ended."""
        limit = time.monotonic() + WORKERS_LINGER
        while (left := list(self._processes())) and time.monotonic() < limit:
            time.sleep(0.2)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return left

    def _processes(self) -> Iterator[int]:
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            except OSError:  # gone meanwhile
                continue
            if int(group) in self.pids and state != "Z":
                yield int(stat.parent.name)


@dataclass
class Result:
    """Of one cell. ends: lives ended by a signal; inside: of them, in a save. slowest: seconds from a signal to the exit.

    recoveries: ends after which a life went on; none where the last one ended in anything else than the uninterrupted run.
    orphans: files and folders that the uninterrupted run has not. lost: checkpoints that are gone or not valid, logged steps
    that are not saved. problems: whatever else is not as it should be.
    """

    cell: Cell
    ends: int = 0
    inside: int = 0
    lives: int = 0
    recoveries: int = 0
    orphans: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    slowest: float = 0.0
    seconds: float = 0.0
    log: str = field(default="", repr=False)

    @property
    def ok(self) -> bool:
        return not (self.orphans or self.lost or self.problems) and self.recoveries == self.ends


def run_cell(cell: Cell, moments: Sequence[Moment], *, server: Server, models: Path, folder: Path) -> Result:
    """Train `cell` without a break and through the moments, both under `folder`, and compare."""
    result, began = Result(cell), time.monotonic()
    folder.mkdir(parents=True)
    settle(models)
    config = write_config(cell, STEPS_A_LIFE * len(moments), models, folder)
    whole, broken = Run(server, folder / "whole", config), Run(server, folder / "broken", config)
    try:
        require(whole.live().status == 0, "the uninterrupted run fails")
        result.problems += not_as_meant(cell, whole)
        go_through(moments, broken, Measured.read(whole.folder / "watched.json"), result)
        result.orphans, differences = compare(whole, broken)
        result.problems += differences
    except (Broken, TimeoutError) as error:
        result.problems.append(str(error))
    finally:
        result.problems += [f"process {pid} outlived its run" for pid in whole.left_over() + broken.left_over()]
    result.lives, result.seconds = broken.lives, time.monotonic() - began
    if not result.ok:
        result.recoveries = 0 if result.problems else result.recoveries
        result.log = said(whole) + said(broken)
    return result


def said(run: Run, lines: int = 40) -> str:
    """The end of its log, without progress bars."""
    log = run.folder / "log"
    text = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join([line for line in text if "step/s" not in line][-lines:]) + "\n"


def go_through(moments: Sequence[Moment], run: Run, measured: Measured, result: Result) -> None:
    """Life after life: one for each moment, more where it was missed, and the last one to the end."""
    waiting = 0  # ends that no life has gone on from yet
    for moment in moments:
        for _ in range(TRIES):
            before = run.steps()[0]
            require(not before or moment.where != "first save", "the first save comes too late")
            if moment.where == "caching":
                empty(run.out / "cache")
            end = run.live(moment, measured)
            result.lost += lost(before, run, by_signal=moment.signum != signal.SIGKILL)
            result.slowest = max(result.slowest, end.seconds)
            if end.stepped:
                result.recoveries, waiting = result.recoveries + waiting, 0
            if end.status != 0:  # else it was at its bound before the signal
                break
        # A signal before the handlers are there ends a process at once, which has done nothing yet.
        at_once = end.status == -moment.signum and (moment.signum == signal.SIGKILL or not end.stepped)
        require(at_once or end.status == 128 + moment.signum, f"a life exits with {end.status} at {moment}")
        require(end.seconds < GRACE, f"a life takes {end.seconds:.0f} s to exit at {moment}")
        result.ends += 1
        result.inside += moment.where in SAVES
        waiting += 1
    require(run.live().status == 0, "the last life fails")
    result.recoveries += waiting


def empty(cache: Path) -> None:
    """Delete the entries. What killed lives left stays: it is for the trainer to remove."""
    for path in cache.rglob("[!.]*"):
        if path.is_file():
            path.unlink()


def lost(before: list[int], run: Run, *, by_signal: bool) -> list[str]:
    """Checkpoints that a life should have left and has not; `before`: the steps of those it found."""
    valid, others = run.steps()
    gone = [step for step in before if step not in valid and sum(s > step for s in valid) < KEEP_LAST]
    missing = [run.logged()] if by_signal and run.newest() != run.logged() else []
    return [
        *(f"step {step} is gone after life {run.lives}" for step in gone),
        *(f"step {step} is not valid after life {run.lives}" for step in others),
        *(f"step {step} was not saved by life {run.lives}" for step in missing),
    ]


def compare(whole: Run, broken: Run) -> tuple[list[str], list[str]]:
    """(orphans, differences) of the run that was broken off.

    Of the checkpoints only the last are compared: which are older depends on when a signal came.
    """

    def entries(run: Run) -> set[Path]:
        old = {run.checkpoints / store.folder_name(step) for step in run.steps()[0][:-1]}
        return {path.relative_to(run.out) for path in run.out.rglob("*") if not old & {path, path.parent}}

    ours, theirs = entries(whole), entries(broken)
    differences = [f"{path} is missing" for path in sorted(ours - theirs)]
    for path in sorted(ours & theirs):
        a, b = whole.out / path, broken.out / path
        if path.name == "metrics.jsonl":
            same = metrics_of(whole.out) == metrics_of(broken.out)
        else:
            same = a.is_dir() or path.name in ("report.html", "phases.jsonl") or a.read_bytes() == b.read_bytes()
        if not same:
            differences.append(f"{path} differs")
    if len(broken.steps()[0]) != KEEP_LAST:
        differences.append(f"it keeps the checkpoints {broken.steps()[0]}")
    return [str(path) for path in sorted(theirs - ours)], differences


def not_as_meant(cell: Cell, run: Run) -> list[str]:
    """What the uninterrupted run shows of the cell's levels."""
    last = run.checkpoints / store.folder_name(run.newest())
    state = TensorFile(last / "optimizer.safetensors").entries.values()
    record = json.loads((last / "quantization.json").read_text())
    stored = {tensor.get("format") for tensor in record.values()}
    problems = []
    if any(entry.dtype == torch.uint8 for entry in state) != (cell.optimizer == "adamw8bit"):
        problems.append(f"the optimizer's state is {sorted({str(entry.dtype) for entry in state})}")
    if not any(str(name).startswith(cell.storage) for name in stored):
        problems.append(f"the base is stored as {stored}")
    if [entry["step"] for entry in metrics_of(run.out)] != list(range(1, run.newest() + 1)):
        problems.append("the uninterrupted run's metrics.jsonl has a gap")
    return problems


def write_config(cell: Cell, steps: int, models: Path, folder: Path) -> Path:
    """Five photos twice in batches of 2 of 3 buckets, accumulation 2: three steps an epoch, and a checkpoint every two."""
    bench = Workbench(models, folder)
    tree = bench.tree(
        cell.family, run__output_dir="out", run__max_steps=steps,
        model__components={DENOISER[cell.family]: {"dtype": cell.storage}},
        adapter__type=cell.kind, adapter__targets=TARGETS[cell.family],
        data__sources=[{"path": str(PHOTOS), "repeats": 2}], data__flip=True, data__caption_dropout=0.3,
        data__num_workers=cell.workers, data__cache_dir="out/cache", step__accumulation=2,
        optimizer__name=cell.optimizer, optimizer__lr=1e-2,
        # Of a smaller group the state would not have 8 bits.
        **({"adapter__rank": 8} if cell.optimizer == "adamw8bit" else {}),
        schedule__name="cosine", schedule__warmup=0.3,
        checkpoint__every_steps=SAVE_EVERY, checkpoint__keep_last=KEEP_LAST,
        export__every_steps=EXPORT_EVERY, validation__every_steps=DRAW_EVERY,
        validation__prompts=["a photo of sks plush bear"], validation__steps=1,
    )  # fmt: skip
    return bench.write(tree)


def settle(models: Path) -> None:
    """Until digests of the models' files may be remembered: both runs leave the same cache then."""
    newest = max(path.stat().st_ctime for path in models.rglob("*"))
    time.sleep(max(0.0, newest + SETTLED_SECONDS + 0.1 - time.time()))


class Broken(Exception):
    """A run that does not do what it is to be compared by."""


def require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Broken(otherwise)


# ------------------------------------------------------------------------------------------------------ command line


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", metavar="PATTERN", default="*", help="fnmatch on " + "-".join(LEVELS))
    parser.add_argument("--signals", metavar="N", type=int, default=0, help="SIGTERMs and SIGINTs, not kills")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--fresh", action="store_true", help="a new interpreter for every life")
    options = parser.parse_args(arguments)
    cells = [cell for cell in CELLS if fnmatchcase(cell.name, options.cells)]
    if not cells:
        parser.error(f"--cells {options.cells} matches none of {', '.join(cell.name for cell in CELLS)}")

    folder = Path(tempfile.mkdtemp(prefix="kill-test-"))
    make_models(folder / "models", sorted({cell.family for cell in cells}))
    what = "signals" if options.signals else "kills"
    print(f"moments drawn from seed {options.seed}\n")
    print(f"{'cell':<32}{what:>8}  in a save  lives  recoveries  orphans  lost  seconds")
    results = []
    with lives(fresh=options.fresh) as server:
        for index, cell in enumerate(cells):
            draw = random.Random(f"{options.seed} {cell.name}")
            share = options.signals * (index + 1) // len(cells) - options.signals * index // len(cells)
            moments = stops(share, draw) if options.signals else kills(draw)
            r = run_cell(cell, moments, server=server, models=folder / "models", folder=folder / cell.name)
            results.append(r)
            counts = f"{r.ends:>8}{r.inside:>11}{r.lives:>7}{r.recoveries:>12}{len(r.orphans):>9}{len(r.lost):>6}"
            print(f"{cell.name:<32}{counts}{r.seconds:>9.1f}", flush=True)
            for line in (*(f"orphan: {path}" for path in r.orphans), *r.lost, *r.problems):
                print(f"    {line}", flush=True)
    ends, inside, recoveries = (sum(getattr(r, name) for r in results) for name in ("ends", "inside", "recoveries"))
    orphans, gone = (sum(len(getattr(r, name)) for r in results) for name in ("orphans", "lost"))
    print(f"\n{inside} of {ends} {what} inside a save" + (
        f", every exit within {max(r.slowest for r in results):.1f} s" if options.signals else ""
    ))  # fmt: skip
    print(f"{ends} {what}: {recoveries} recoveries, {orphans} orphan files, {gone} lost checkpoints")
    if all(r.ok for r in results):
        shutil.rmtree(folder)
        return 0
    print(f"failed; the runs and what they said (log) are in {folder}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
