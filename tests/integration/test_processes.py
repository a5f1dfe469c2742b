"""Several processes and one: the same order, the same draws, the same decisions; losses differ by the order of a sum.

Nearly all are forks of a process that has imported the libraries, beside a store as the launcher has one, or without one. A
test starts them by torch.distributed.run, for what it does of its own. Not by `accelerate launch --cpu`: without an MPI that
starts one process, whatever --num_processes says.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.harness import PHOTOS, ROOT, Workbench, built, metrics_of
from tests.proofs.forks import Order, Server
from trainer import config as configs
from trainer.base.tensorfile import TensorFile
from trainer.checkpoint import store
from trainer.data.cache import pruning
from trainer.data.cache.fill import latent_key
from trainer.data.images import views
from workbench.commands import main as cli
from workbench.commands.launch import train

LENGTH = 6
# The gradients of an update are summed in another order: fp32 rounding, a few steps of AdamW on.
LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-3


def tree(bench: Workbench, out: str, *, processes: int, **overrides) -> dict:
    """Four micro-batches to an update, or what an epoch leaves; adapter dropout, which is seeded by micro-batch."""
    return bench.tree(
        **{
            "run__output_dir": str(bench.tmp / out), "run__max_steps": LENGTH, "step__accumulation": 4 // processes,
            "adapter__targets": ["*attn1.to_q", "*attn2.to_v"], "adapter__dropout": 0.2, "optimizer__lr": 1e-2,
            "data__flip": True, "data__caption_dropout": 0.3, "data__batch_size": 1,
            "data__cache_dir": str(bench.tmp / "cache"), "checkpoint__every_steps": 2,
        } | overrides
    )  # fmt: skip


# What a patch of one of the processes may name.
NAMES = """
import os, signal, sys, time
from datetime import timedelta
import torch
from trainer.engine import assembly
from trainer.runtime import processes
from trainer.run import session as sessions
from trainer.artifacts import sampling as validation
from trainer.adapters import export
from trainer.checkpoint import store
from trainer.data.cache import fill as caches, entries
from trainer.base.errors import UserError
from trainer.engine.step import Losses, Step
"""


def live(rank: int, count: int, port: int, patch: str, arguments: list[str], launched: bool) -> int:
    """One of `count` processes, in a fork; returns its status. patch: a fault, as code that knows its `rank` and may add to
    its `arguments`. launched: as by
    torch.distributed.run, whose store outlives them; else the first of them has the store."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)}  # fmt: skip
    if launched:
        os.environ |= {"LOCAL_WORLD_SIZE": str(count), "TORCHELASTIC_USE_AGENT_STORE": "True",
                       "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "none"}  # fmt: skip
    exec(NAMES + patch, {"rank": rank, "arguments": arguments})
    return cli.main(arguments)


@dataclass
class Both:
    """The processes of one run, two mostly, and the launcher's store that outlives them."""

    server: Server
    folders: list[Path]
    pids: list[int]
    store: TCPStore | None

    def wait(self) -> tuple[list[int], str]:
        """Their statuses, and what they said."""
        statuses: dict[int, int] = {}
        deadline = time.monotonic() + 240
        try:
            while len(statuses) < len(self.pids):
                assert time.monotonic() < deadline, f"they do not end; {self.said}"
                for pid in self.pids:
                    if pid not in statuses and (status := self.server.status(pid)) is not None:
                        statuses[pid] = status
                time.sleep(0.05)
        finally:
            for pid in self.pids:
                if pid not in statuses:
                    os.killpg(pid, signal.SIGKILL)
        return [statuses[pid] for pid in self.pids], self.said

    @property
    def said(self) -> str:
        return "\n".join((folder / "log").read_text() for folder in self.folders)


def start_both(
    server: Server, bench: Workbench, config: dict, *arguments: str, patch: str = "", launched: bool = True, count: int = 2
) -> Both:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if launched else None
    port = store.port if store else free_port()
    path = bench.write(config, f"{Path(config['run']['output_dir']).name}.toml")
    folders, pids = [], []
    for rank in range(count):
        folder = bench.tmp / f"{path.stem} of {rank}"
        folder.mkdir(exist_ok=True)
        given = {"rank": rank, "count": count, "port": port, "patch": patch, "launched": launched}
        given["arguments"] = ["--config", str(path), *arguments]
        folders.append(folder)
        pids.append(server.start(Order("tests.integration.test_processes:live", str(folder), given)))
    return Both(server, folders, pids, store)


def run_both(
    server: Server, bench: Workbench, config: dict, *arguments: str, patch: str = "", status: int | None = 0, count: int = 2
) -> str:
    """They end with that status, None: with any but 0. Returns what they said."""
    statuses, said = start_both(server, bench, config, *arguments, patch=patch, count=count).wait()
    assert (0 not in statuses) if status is None else statuses == [status] * count, f"{statuses}\n{said[-3000:]}"
    return said


def two_processes(bench: Workbench, config: dict, *arguments: str, script: str = "train.py") -> subprocess.Popen:
    """By torch.distributed.run, each a process of its own."""
    path = bench.write(config, f"{Path(config['run']['output_dir']).name}.toml")
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", script,
         "--config", str(path), *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def assert_same_course(bench: Workbench, out: str, other: str) -> None:
    one, two = metrics_of(bench.tmp / out), metrics_of(bench.tmp / other)
    assert [(e["step"], e["epoch"], e["images"], e["lr"]) for e in one] == [
        (e["step"], e["epoch"], e["images"], e["lr"]) for e in two
    ]
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=LOSS_TOLERANCE), a["step"]
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=NORM_TOLERANCE), a["step"]


@pytest.mark.slow
def test_two_processes_and_one_take_turns(server: Server, bench: Workbench) -> None:
    """2 -> 1 -> 2 -> 1 with one config: every checkpoint goes on under the other number, with the losses of a run of one
    process."""
    train(configs.parse(tree(bench, "one", processes=1)), resume_from=None)
    for stop, processes, kept in ((1, 2, 2), (2, 1, 4), (4, 2, 2), (LENGTH, 1, 4)):
        config = tree(bench, "turns", processes=2, run__stop_after=stop)
        if processes == 2:
            run_both(server, bench, config, "--resume_from", "auto")
        else:
            train(configs.parse(config), resume_from="auto")
        assert store.steps(bench.tmp / "turns" / "checkpoints")[-1] == stop
        resolved = configs.read_resolved(bench.tmp / "turns" / "config.toml")
        assert (resolved["step"]["accumulation"], resolved["data"]["batch_size"]) == (kept, 1)
    assert_same_course(bench, "one", "turns")


@pytest.mark.slow
def test_the_same_global_batch_in_other_micro_batches(bench: Workbench) -> None:
    """Five photos of one bucket, four to an update: the same samples in the same order however they are cut."""
    cuts = [(4, 1), (2, 2), (1, 4)]
    more = {"run__max_steps": 4, "adapter__targets": ["up_blocks.1.attentions.*to_q"]}  # late layers: a short backward pass
    for batch_size, accumulation in cuts:
        out = f"{batch_size}-{accumulation}"
        # Dropout masks belong to micro-batches, so there is none here.
        overrides = {"data__bucket_step": 64, "data__batch_size": batch_size, "step__accumulation": accumulation}
        config = tree(bench, out, processes=1, adapter__dropout=0.0, **overrides, **more)
        train(configs.parse(config), resume_from=None)
    assert [entry["images"] for entry in metrics_of(bench.tmp / "4-1")] == [4, 5, 9, 10]
    for batch_size, accumulation in cuts[1:]:
        assert_same_course(bench, "4-1", f"{batch_size}-{accumulation}")


@pytest.mark.slow
def test_another_global_batch_is_refused(bench: Workbench) -> None:
    train(configs.parse(tree(bench, "out", processes=1, run__stop_after=1)), resume_from="auto")
    with pytest.raises(ValueError, match="an update had 4 micro-batches .step.accumulation x processes., now it has 2"):
        train(configs.parse(tree(bench, "out", processes=2)), resume_from="auto")


@pytest.mark.slow
def test_with_a_mirror_two_processes_go_on_in_an_empty_folder(server: Server, bench: Workbench) -> None:
    """The main one fetches the checkpoint, and the other finds it there."""
    few = {"run__max_steps": 4, "checkpoint__mirror": f"file://{bench.tmp / 'bucket'}"}
    run_both(server, bench, tree(bench, "whole", processes=2, run__max_steps=4))
    run_both(server, bench, tree(bench, "lost", processes=2, **few, run__stop_after=2))
    shutil.rmtree(bench.tmp / "lost")
    said = run_both(server, bench, tree(bench, "lost", processes=2, **few), "--resume_from", "auto")
    assert "step-00000002 came from file://" in said
    last = f"checkpoints/{store.folder_name(4)}/"
    one, two = ({n: e for n, e in made(bench.tmp / out).items() if n.startswith(last)} for out in ("whole", "lost"))
    assert one == two and len(one) >= 2


def poison(bench: Workbench, sample: str) -> None:
    """Put NaN into the cached latents of a photo. Packs of the same entries are written: they have the same names."""
    with built(configs.parse(tree(bench, "unused", processes=1, step__non_finite="skip"))) as run:
        known, cache = run.reader.latent_fingerprint, run.reader.cache
        example = run.reader.examples[sample]
        poisoned = {latent_key(example, view, fingerprint=known) for view in views.every(run.reader.seed, example)}
        for pack in [*(cache.directory / pruning.PACKS).glob("*.safetensors")]:
            for key in TensorFile(pack).entries:
                tensors = cache.get(key)
                cache.put(key, {"latents": tensors["latents"] * float("nan")} if key in poisoned else tensors)
            cache.flush()


@pytest.mark.slow
def test_a_value_of_one_process_that_is_not_finite_is_skipped_by_both(server: Server, bench: Workbench) -> None:
    """No process waits for a reduction that the other does not come to."""
    poison(bench, "0/02.jpg")
    train(configs.parse(tree(bench, "one", processes=1, step__non_finite="skip")), resume_from=None)
    run_both(server, bench, tree(bench, "two", processes=2, step__non_finite="skip"))
    one, two = (metrics_of(bench.tmp / out) for out in ("one", "two"))
    assert [e.get("non_finite") for e in one] == [e.get("non_finite") for e in two]
    assert [e["skipped"] for e in one].count(True) == 3 and not all(e["skipped"] for e in one)
    name = f"checkpoints/{store.folder_name(LENGTH)}/optimizer.safetensors"
    updates = [TensorFile(bench.tmp / out / name).read("group.0|step").item() for out in ("one", "two")]
    assert updates == [3, 3]


def patched(bench: Workbench, patch: str) -> str:
    """train.py with a fault in it; each process says how it ended."""
    script = bench.tmp / "patched.py"
    script.write_text(
        f"{NAMES}from workbench.commands import main as cli\nrank = int(os.environ['RANK'])\n"
        + patch
        + "\nstatus = cli.main(sys.argv[1:])\nprint(f'rank {rank} status {status}', file=sys.stderr)\ncli.leave(status)\n"
    )
    return str(script)


PATCHES = {
    # A loss that is not finite in one process only: both stop, with status 4.
    "loss": """
real = Losses.__call__
def spoilt(self, batch, update=()):
    bad = [rank == 1 and o.epoch == 1 for o in batch.occurrences]
    return torch.where(torch.tensor(bad), torch.nan, real(self, batch, update))
Losses.__call__ = spoilt
""",
    # A process asks for a checkpoint, and later to stop.
    "usr1": """
step = Step.run
def asked(self, number, *more):
    if number == 2 and rank == 1:
        signal.raise_signal(signal.SIGUSR1)
    if number == 4 and rank == 1:
        signal.raise_signal(signal.SIGTERM)
    return step(self, number, *more)
Step.run = asked
""",
    # A checkpoint that the main process cannot write ends both, with status 6.
    "disk": """
def full(*arguments):
    raise OSError(28, "No space left on device", "optimizer.safetensors")
store.save = full
""",
}


@pytest.mark.slow
@pytest.mark.parametrize(("patch", "status", "saved"), [("loss", 4, [2]), ("usr1", 143, [2, 4]), ("disk", 6, [])])
def test_what_one_process_meets_with_both_answer(
    server: Server, bench: Workbench, patch: str, status: int, saved: list[int]
) -> None:
    every = {"disk": 2}.get(patch, 0)
    config = tree(bench, "two", processes=2, checkpoint__every_steps=every)
    errors = run_both(server, bench, config, patch=PATCHES[patch], status=status)
    assert store.steps(bench.tmp / "two" / "checkpoints") == saved
    assert "the loss of" in errors if patch == "loss" else "No space left" in errors if patch == "disk" else True


# A reduction waits for 5 s at most, and the main process is alone for 7 s where `slowly` says so.
ALONE = """
processes.REDUCTION_TIMEOUT = timedelta(seconds=5)
def slowly(module, name):
    real, slept = getattr(module, name), []
    def slow(*arguments, **more):
        if rank == 0 and not slept:
            slept.append(time.sleep(7))
            print(f"slept before {name}", file=sys.stderr)
        return real(*arguments, **more)
    setattr(module, name, slow)
"""
ALONE_IN = {
    "fill_latents": "caches", "draw_samples": "validation", "write_files": "export", "save": "store",
}  # fmt: skip


def made(out: Path) -> dict[str, bytes]:
    """Tensors, adapter files and images, by name."""
    found = {path.relative_to(out): path for kind in ("*.safetensors", "*.png") for path in out.rglob(kind)}
    return {str(name): path.read_bytes() for name, path in found.items()}


@pytest.mark.slow
def test_what_the_main_process_does_alone_runs_into_no_time_out(server: Server, bench: Workbench) -> None:
    sample = {"prompt": "a bear", "seed": 1, "steps": 2, "width": 64, "height": 64}
    more = {"validation__every_steps": 2, "validation__samples": [sample], "export__every_steps": 2,
            "checkpoint__background": False, "run__max_steps": 4}  # fmt: skip
    for out, patch in (("quick", ""), ("slow", "\n".join(f"slowly({m}, '{name}')" for name, m in ALONE_IN.items()))):
        config = tree(bench, out, processes=2, **more, data__cache_dir=str(bench.tmp / out / "cache"))
        errors = run_both(server, bench, config, patch=ALONE + patch)
        assert [f"slept before {name}" in errors for name in ALONE_IN] == [out == "slow"] * 4, errors
    quick, slow = made(bench.tmp / "quick"), made(bench.tmp / "slow")
    assert quick == slow
    kinds = {"cache", "checkpoints", "adapters", "samples", "before_after.png"}
    assert {name.split("/")[0] for name in quick} == kinds


@pytest.mark.parametrize(
    "resumed", [pytest.param(False, marks=pytest.mark.proof), pytest.param(True, marks=pytest.mark.slow)]
)
def test_a_process_without_a_micro_batch_in_fp16(server: Server, bench: Workbench, resumed: bool) -> None:
    """One photo, so the main process has every micro-batch, and the bytes are those of one process. It encodes for longer
    than a reduction waits."""
    photos = bench.tmp / "photos"
    photos.mkdir()
    for name in ("01.jpg", "01.txt"):
        shutil.copy(PHOTOS / name, photos)
    more = {"precision__compute": "fp16", "data__sources": [{"path": str(photos)}], "run__max_steps": 2}

    def few(out: str, processes: int, **overrides) -> dict:
        return tree(bench, out, processes=processes, step__accumulation=2 // processes, **more | overrides)

    train(configs.parse(few("one", 1)), resume_from=None)
    if resumed:
        train(configs.parse(few("two", 1, run__stop_after=1)), resume_from=None)
    config = few("two", 2, data__cache_dir=str(bench.tmp / "its cache"))
    arguments = ("--resume_from", "auto") if resumed else ()
    errors = run_both(server, bench, config, *arguments, patch=ALONE + "slowly(caches, 'fill_latents')")
    assert "slept before fill_latents" in errors
    one, two = made(bench.tmp / "one"), made(bench.tmp / "two")
    assert two == one if not resumed else one.items() <= two.items()
    assert metrics_of(bench.tmp / "two") == metrics_of(bench.tmp / "one")
    assert [entry["skipped"] for entry in metrics_of(bench.tmp / "two")] == [False, False]


FAILS = {
    # While the main process encodes, and the other waits for it.
    "user": """
def changed(*arguments, **more):
    raise UserError("photo 1 changed while it was read; start again")
if rank == 0:
    caches.fill_text = changed
""",
    "full": """
def full(self, key, *more):
    raise OSError(28, "No space left on device", "a cache entry")
if rank == 0:
    entries.Cache.put = full
""",
    # While the other waits for the main process, which works for minutes.
    "other": """
def failed(*arguments, **more):
    time.sleep(1)
    raise UserError("process 1 met with something of its own")
""",
    "killed": """
def failed(*arguments, **more):
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
""",
    # While the main process waits in a reduction.
    "killed in a step": """
step = Step.run
def shot(self, number, *more):
    if number == 2 and rank == 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, number, *more)
Step.run = shot
""",
}
WORKS_ON = """
def long_work(*arguments, phases, **more):
    for _ in range(2000):
        time.sleep(0.1)
        phases.check()
if rank == 0:
    caches.fill_latents = long_work
else:
    processes.Processes.wait = failed
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [("user", 2, "error: photo 1 changed while it was read"),
     ("full", 6, "error: storage: [Errno 28] No space left on device: 'a cache entry'"),
     ("other", 2, "error: process 1 met with something of its own"),
     ("killed in a step", None, "error: another process is gone")],
)  # fmt: skip
def test_a_process_that_fails_alone_ends_both(server: Server, bench: Workbench, fault: str, status, said: str) -> None:
    """By what it tells the other, before anybody's patience is over: that is ten minutes, and a test waits four."""
    config = tree(bench, "two", processes=2, data__cache_dir=str(bench.tmp / "its cache"))
    patch = FAILS[fault] + (WORKS_ON if "failed" in FAILS[fault] else "")
    errors = run_both(server, bench, config, patch=patch, status=status)
    assert errors.count(said) == 1, errors[-3000:]
    if "killed" not in fault:
        failed = int(fault == "other")
        assert errors.count(f"error: process {failed} could not go on; its message says why") == 1, errors[-3000:]
    assert "trainer/run/run.py" not in errors, "a traceback"


@pytest.mark.slow
def test_the_launcher_ends_what_works_on_when_a_process_is_killed(bench: Workbench) -> None:
    """It says of both how they ended: the one by its signal, the other in order."""
    config = tree(bench, "two", processes=2, data__cache_dir=str(bench.tmp / "its cache"))
    process = two_processes(bench, config, script=patched(bench, FAILS["killed"] + WORKS_ON))
    _, errors = process.communicate(timeout=240)
    assert process.returncode != 0 and "rank 0 status 143\n" in errors, errors[-3000:]
    assert errors.count("stopped by SIGTERM before the first step of this start") == 1, errors[-3000:]
    first = errors.partition("FAILED")[2].partition("Root Cause")[2]
    assert set(re.findall(r"exitcode\s*: (-?\d+)", first)) == {"-9"}, errors[-3000:]
    assert "trainer/run/run.py" not in errors, "a traceback"


SLOW_FILES = """
from trainer.artifacts import exports
exports.STOP_SECONDS = 600.0
write = export.write_files
def slow(*arguments, **more):
    time.sleep(3)
    return write(*arguments, **more)
export.write_files = slow
"""


@pytest.mark.slow
def test_a_signal_to_one_of_two_processes_stops_both_at_one_step(server: Server, bench: Workbench) -> None:
    """The main one writes the adapter files, slowly, and the other one waits: a launcher ends all that live when one has
    ended."""
    config = tree(bench, "two", processes=2, run__max_steps=400, checkpoint__every_steps=0)
    both = start_both(server, bench, config, patch=SLOW_FILES)
    log, adapter = (bench.tmp / "two" / name for name in ("metrics.jsonl", "adapters/bear.safetensors"))
    deadline = time.monotonic() + 90
    while not (log.exists() and log.read_text().count("\n") >= 3):
        assert time.monotonic() < deadline, both.said
        time.sleep(0.02)
    os.kill(both.pids[1], signal.SIGTERM)
    while (status := server.status(both.pids[1])) is None:
        assert time.monotonic() < deadline + 90, both.said
        time.sleep(0.05)
    assert adapter.exists(), "the main one is not waited for"
    assert [server.wait(both.pids[0]), status] == [143, 143], both.said[-3000:]
    (step,) = store.steps(bench.tmp / "two" / "checkpoints")
    assert step == len(metrics_of(bench.tmp / "two")) and step < 400
    assert TensorFile(adapter).metadata["ss_steps"] == str(step)


# The one that is to be lost is killed, or stopped, while it encodes photos, trains or saves; the other one goes on with its
# share.
LOST = """
from trainer.base import files
fill, step, write = caches.fill_latents, Step.run, files.write
def saving(path, *more, **named):
    if at == 'saving' and rank == victim and 'step-00000002' in str(path) and path.name == 'state.json':
        os.kill(os.getpid(), signum)
        time.sleep(60)  # another thread of this process may be the one that takes the signal, a moment later
    return write(path, *more, **named)
files.write = saving
def encoding(*arguments, **more):
    if at == 'encoding' and rank == victim:
        os.kill(os.getpid(), signum)
    return fill(*arguments, **more)
def stepping(self, number, *more):
    if at == 'step' and rank == victim and number == 3:
        os.kill(os.getpid(), signum)
    return step(self, number, *more)
caches.fill_latents, Step.run = encoding, stepping
close = sessions.close
def closing(*arguments, **more):
    if at == 'closing' and rank == victim:
        os.kill(os.getpid(), signum)
    return close(*arguments, **more)
sessions.close = closing
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "victim", "signum"),
    [
        ("encoding", 0, signal.SIGSTOP),
        ("step", 1, signal.SIGKILL),
        ("step", 1, signal.SIGSTOP),
        ("saving", 0, signal.SIGSTOP),
        ("closing", 0, signal.SIGSTOP),
    ],
)
def test_without_a_launcher_a_lost_process_ends_the_other(
    server: Server, bench: Workbench, at: str, victim: int, signum: int
) -> None:
    """Named, with status 143, nothing half-written; between two steps, or in a step, what was trained is saved, unless the
    one that saves is lost."""
    config = tree(
        bench, "two", processes=2, data__cache_dir=str(bench.tmp / "its cache"), run__lost_after=10,
        checkpoint__every_steps=2 if at == "saving" else 0,
    )  # fmt: skip
    patch = f"at, victim, signum = {at!r}, {victim}, {int(signum)}\n{LOST}"
    both = start_both(server, bench, config, "--resume_from", "auto", patch=patch, launched=False)
    try:
        status = server.wait(both.pids[1 - victim])
    finally:
        os.kill(both.pids[victim], signal.SIGKILL)  # a zombie still has its number
    assert server.wait(both.pids[victim]) == -signal.SIGKILL
    errors = (both.folders[1 - victim] / "log").read_text()
    assert status == 143, errors[-3000:]
    main = ", the main one," if victim == 0 else ""
    assert re.search(
        rf"^error: process {victim} \(host \S+, pid {both.pids[victim]}\){main} (is gone|has given no sign)", errors, re.M
    )
    assert "Traceback" not in errors, errors[-3000:]
    assert store.steps(bench.tmp / "two" / "checkpoints") == {"step": [2], "closing": [LENGTH]}.get(at, [])
    left = [path.name for path in (bench.tmp / "two").rglob("*") if path.name.endswith(".tmp")]
    assert left == ([".step-00000002.new.tmp"] if at == "saving" else []), "of a kill alone, for the next start to remove"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
