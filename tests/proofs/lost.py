"""Is a run of two processes, one of which is lost again and again, one that never lost any?

    python tests/proofs/lost.py                        # 60 seeds
    python tests/proofs/lost.py --seeds 5 --first 100

A seed draws one or two faults: a process is killed (SIGKILL), is stopped for good (SIGSTOP), has a full disk, or is slow, at
the start, while photos are encoded, in a step, while a checkpoint is written, or while the run is closed; or it starts with
another seed, rate, caption or photo than the other, or with a photo less. torchrun's agent starts all processes again after
each but the slow one. After that it must not: the process is alive, if for longer than run.lost_after. In the end adapter
files, the last checkpoint and metrics.jsonl, but for times, are compared with those of a run without a fault.

The agent is torch.distributed.launcher's, as torchrun uses it; it and the processes that it starts are forks of one that has
imported the libraries (tests/proofs/forks.py).

Exit status 1 where a byte differs, or a start is missing or one too many. Linux, on the CPU.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.harness import PHOTOS, Workbench, metrics_of  # noqa: E402
from tests.proofs.forks import Order, Server  # noqa: E402
from tests.proofs.shared import STARTED, make_models  # noqa: E402
from trainer.artifacts import exports  # noqa: E402
from trainer.base import files  # noqa: E402
from trainer.checkpoint import store  # noqa: E402
from trainer.data.cache import fill  # noqa: E402
from trainer.engine.step import Step  # noqa: E402
from trainer.run import session as sessions  # noqa: E402
from workbench.commands import main as cli  # noqa: E402

STEPS, SAVE_EVERY = 8, 2
LOST_AFTER = 8.0
SLOW = LOST_AFTER + 2  # seconds
PATIENCE = 240.0  # seconds for a run
GRACE = 3  # seconds between SIGTERM and SIGKILL; torchrun gives 30, which only a stopped process takes
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "SOURCE_DATE_EPOCH": STARTED, "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip

# Where a fault can be: what only the main process does, and what ends no process if it is only slow.
MAIN_ONLY = ("saving", "closing")
UNLIKE = ("seed", "rate", "caption", "photo", "less")  # of a start: what one process has otherwise
PLACES = {
    "kill": ("start", "encoding", "step", "saving", "closing"),
    "stop": ("encoding", "step", "saving", "closing"),  # at the start the others wait for minutes
    "full": ("encoding", "step", "saving"),
    "slow": ("encoding", "step", "saving", "closing"),
    "unlike": UNLIKE,
}


@dataclass(frozen=True)
class Fault:
    """kind: of PLACES. step: the first one that it may be in, or whose checkpoint."""

    kind: str
    victim: int
    place: str
    step: int

    @property
    def ends(self) -> bool:
        """Whether the processes have to start again."""
        return self.kind != "slow"


def drawn(seed: int) -> list[Fault]:
    """The faults of a seed, in the order in which they come: the later ones find the photos encoded, and no start twice."""
    draw = random.Random(seed)
    faults = []
    count = draw.randint(1, 2)
    for index in range(count):
        goes_on = bool(faults) and not faults[-1].ends  # without another start
        kind = draw.choice(sorted(kind for kind in PLACES if kind != "unlike" or not goes_on))
        places = [place for place in PLACES[kind] if index == 0 or place != "encoding"]
        if goes_on:
            places = [place for place in places if place != "start"]
        place = draw.choice([place for place in places if index == count - 1 or place != "closing"])
        # Only the main process writes while it trains.
        victim = 0 if place in MAIN_ONLY or (kind == "full" and place == "step") else draw.randint(0, 1)
        faults.append(Fault(kind, victim, place, draw.randint(1, 4) + 4 * index))
    return faults


# ------------------------------------------------------------------------------------------------- one of the processes


def mark(number: int) -> Path:
    """What says that a fault came."""
    return Path(f"fault-{number}")


class Victim:
    """This process, if it is the one that the next fault is for. Each comes once: a file says so."""

    def __init__(self, faults: Sequence[Fault], rank: int) -> None:
        self.faults, self.rank = faults, rank
        self.born = sum(mark(number).exists() for number in range(len(faults)))

    def next(self) -> tuple[int, Fault | None]:
        """(its number, the fault that comes next in this life)."""
        number = self.born
        while number < len(self.faults) and not self.faults[number].ends and mark(number).exists():
            number += 1  # that one was met in this life
        return number, self.faults[number] if number < len(self.faults) and not mark(number).exists() else None

    def unlike(self) -> list[str]:
        """What the command line of this start has that the others' has not."""
        number, fault = self.next()
        if fault is None or fault.kind != "unlike" or fault.victim != self.rank:
            return []
        # When both know what was to come in this life.
        before(sessions, "refuse_unlike_configs", lambda *_: mark(number).touch())
        print(f"--- {fault} in {os.getpid()}", flush=True)
        return ["--set", stale(fault.place)]

    def at(self, place: str, step: int) -> None:
        number, fault = self.next()
        if fault is None or (fault.victim, fault.place) != (self.rank, place) or step < fault.step:
            return
        mark(number).touch()
        print(f"--- {fault} in {os.getpid()}", flush=True)
        if fault.kind == "slow":
            time.sleep(SLOW)
        elif fault.kind == "full":
            os.write = full(os.write)
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
            time.sleep(PATIENCE)  # another thread may be the one that takes the signal, a moment later

    def install(self) -> None:
        before(fill, "fill_latents", lambda *_: self.at("encoding", STEPS))
        before(Step, "run", lambda _, number, *more: self.at("step", number))
        before(exports.Artifacts, "finish", lambda *_: self.at("closing", STEPS))
        before(files, "write", lambda path, *_: self.at("saving", saved_step(Path(path))))


def before(owner: Any, name: str, what: Callable[..., None]) -> None:
    function = getattr(owner, name)

    def both(*arguments: Any, **more: Any) -> Any:
        what(*arguments)
        return function(*arguments, **more)

    setattr(owner, name, both)


def saved_step(path: Path) -> int:
    """Of the checkpoint whose last but one file this is; 0 of any other."""
    digits = path.parent.name.removeprefix(".step-").partition(".")[0]
    return int(digits) if path.name == "state.json" and digits.isdigit() else 0


def stale(what: str) -> str:
    """A key of a config, or of a copy of the photos, that is not that of the other process."""
    if what in ("seed", "rate"):
        return {"seed": "run.seed=8", "rate": "optimizer.lr=5e-3"}[what]
    photos = Path(shutil.copytree(PHOTOS, f"photos-{what}", dirs_exist_ok=True))
    first, *_, last = sorted(photos.glob("*.jpg"))
    if what == "caption":
        first.with_suffix(".txt").write_text("something else")
    elif what == "photo":
        shutil.copy(last, first)
    else:
        first.unlink()
        first.with_suffix(".txt").unlink()
    return f'data.sources=[{{path="{photos}"}}]'


def full(write: Callable[[int, Any], int]) -> Callable[[int, Any], int]:
    """os.write on a disk without space."""

    def none_left(descriptor: int, data: Any) -> int:
        if descriptor > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    return none_left


def live(arguments: list[str], faults: list[Fault], pace_alone: float) -> int:
    """One process of a start, in a fork of the agent. pace_alone: seconds of a step where it is the only one."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with open("starts", "a") as starts:
        starts.write(f"{rank} of {count}\n")
    victim = Victim(faults, rank)
    victim.install()
    victim.at("start", STEPS)
    if count == 1:
        before(Step, "run", lambda *_: time.sleep(pace_alone))
    status = cli.main([*arguments, *victim.unlike()])
    if status:
        print(f"--- process {rank} of {count} ends with {status}", flush=True)
        sys.stderr.flush()
        os._exit(status)
    return 0


def launch(
    arguments: list[str], port: int, nodes: int = 1, faults: Sequence[dict[str, Any]] = (), pace_alone: float = 0.0
) -> int:
    """torchrun's agent in this process. nodes: 1 has both processes here; 2 is --nnodes=1:2, one process in each."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    from torch.multiprocessing.spawn import ProcessContext

    join = ProcessContext._join_procs_with_timeout
    ProcessContext._join_procs_with_timeout = lambda self, timeout: join(self, GRACE)
    elastic = {"last_call_timeout": 4, "keep_alive_interval": 1, "keep_alive_max_attempt": 3}
    config = LaunchConfig(
        min_nodes=1, max_nodes=nodes, nproc_per_node=2 // nodes, max_restarts=6, shutdown_timeout=GRACE, start_method="fork",
        run_id="lost", rdzv_backend="static" if nodes == 1 else "c10d", rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": 0} if nodes == 1 else elastic, local_addr="127.0.0.1",
    )  # fmt: skip
    try:
        elastic_launch(config, live)(arguments, [Fault(**fault) for fault in faults], pace_alone)
    except ChildFailedError:
        traceback.print_exc()
        return 1
    return 0


def lives() -> Server:
    """What starts the agents."""
    return Server(ROOT, ["tests.proofs.lost", "trainer.adapters.dora", "torch.distributed.launcher.api"], ENVIRONMENT)


# --------------------------------------------------------------------------------------------------------------- a run


def config_of(bench: Workbench, **overrides: Any) -> Path:
    """Of a run in the folder that it is started in; its photos are encoded there, too."""
    given = {
        "run__output_dir": "out", "run__max_steps": STEPS, "run__lost_after": LOST_AFTER, "data__cache_dir": "out/cache",
        "data__batch_size": 1, "data__flip": True, "step__accumulation": 2, "optimizer__lr": 1e-2,
        "adapter__targets": ["up_blocks.1.attentions.*to_q"], "checkpoint__every_steps": SAVE_EVERY,
        "checkpoint__keep_last": 2,
    }  # fmt: skip
    return bench.write(bench.tree("sdxl", **given | overrides))


class Run:
    """A run under agents, in a folder of its own."""

    def __init__(self, server: Server, config: Path, folder: Path) -> None:
        self.server, self.config, self.folder, self.port = server, config, folder, free_port()
        folder.mkdir(parents=True)
        self.agents: list[int] = []

    def start(self, **more: Any) -> int:
        """Start an agent; returns its process number, which is that of its group, too."""
        given = {"arguments": ["--config", str(self.config), "--resume_from", "auto"], "port": self.port} | more
        self.agents.append(self.server.start(Order("tests.proofs.lost:launch", str(self.folder), given)))
        return self.agents[-1]

    def wait(self) -> list[int]:
        """The agents' statuses. Raises TimeoutError where one does not end."""
        statuses: dict[int, int] = {}
        self.until(lambda: len(statuses) == len(self.agents), statuses)
        return [statuses[agent] for agent in self.agents]

    def until(self, condition: Callable[[], bool], statuses: dict[int, int] | None = None) -> None:
        """Wait for it. Raises TimeoutError, and ends all, where that takes too long."""
        end = time.monotonic() + PATIENCE
        while not condition():
            for agent in self.agents if statuses is not None else ():
                if agent not in statuses and (status := self.server.status(agent)) is not None:
                    statuses[agent] = status
            if time.monotonic() > end:
                self.kill()
                raise TimeoutError(f"it does not get on: {self.folder}\n{self.said[-3000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        """End at once what there still is of it."""
        for agent in self.agents:
            with suppress(ProcessLookupError):
                os.killpg(agent, signal.SIGKILL)

    @property
    def said(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    @property
    def starts(self) -> list[int]:
        """Of each start, how many processes it had."""
        lines = (self.folder / "starts").read_text().splitlines() if (self.folder / "starts").exists() else []
        return [int(line.split()[-1]) for line in lines if line.startswith("0 ")]

    @property
    def logged(self) -> int:
        """How many steps the log has."""
        log = self.folder / "out" / "metrics.jsonl"
        return log.read_bytes().count(b"\n") if log.exists() else 0

    def left(self) -> dict[str, Any]:
        """What may not depend on what was lost, by name."""
        out = self.folder / "out"
        kept = store.steps(out / "checkpoints")
        last = out / "checkpoints" / store.folder_name(kept[-1])
        paths = [*(out / "adapters").glob("*"), *last.iterdir()]
        found: dict[str, Any] = {str(path.relative_to(out)): path.read_bytes() for path in paths if path.is_file()}
        return found | {"metrics.jsonl": metrics_of(out), "half-written": [str(path) for path in out.rglob("*.tmp")]}


def problems(run: Run, faults: Sequence[Fault], whole: dict[str, Any]) -> list[str]:
    """Let a run meet with these faults. Returns what is wrong then. whole: what a run without any left."""
    run.start(faults=[asdict(fault) for fault in faults])
    try:
        statuses = run.wait()
    except TimeoutError as error:
        return [str(error)]
    if statuses != [0]:
        return [f"torchrun ended with {statuses}\n{run.said[-3000:]}"]
    wrong = [f"{fault} never came" for n, fault in enumerate(faults) if not (run.folder / f"fault-{n}").exists()]
    if len(run.starts) != 1 + sum(fault.ends for fault in faults):
        wrong.append(f"{len(run.starts)} starts")
    # The agent may end the other one before it has said so itself. Of a run that goes on, one refuses other photos alone.
    refusals = sum(map(run.said.count, ("do not train the same:", "the data are not those of the checkpoint")))
    unlike = sum(fault.kind == "unlike" for fault in faults)
    if not unlike <= refusals <= 2 * unlike or run.said.count(" of 2 ends with 2\n") < unlike:
        wrong.append(f"{refusals} refusals of {unlike} unequal starts")
    left = run.left()
    return wrong + [f"{name} differs" for name in sorted(left.keys() | whole) if left.get(name) != whole.get(name)]


def whole_run(server: Server, config: Path, folder: Path) -> dict[str, Any]:
    """What a run leaves that loses no process."""
    run = Run(server, config, folder)
    if wrong := problems(run, (), {}):
        wrong = [line for line in wrong if not line.endswith(" differs")]
    if wrong:
        sys.exit("\n".join(wrong))
    return run.left()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=60, help="how many runs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    asked = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="lost-"))
    config = config_of(Workbench(make_models(folder / "models", ["sdxl"]), folder))
    bad, count = 0, dict.fromkeys(PLACES, 0)
    with lives() as server:
        whole = whole_run(server, config, folder / "whole")
        for seed in range(asked.first, asked.first + asked.seeds):
            faults, began = drawn(seed), time.monotonic()
            run = Run(server, config, folder / str(seed))
            wrong = problems(run, faults, whole)
            bad += bool(wrong)
            for fault in faults:
                count[fault.kind] += 1
            met = ", ".join(f"{fault.kind} {fault.victim} {fault.place} {fault.step}" for fault in faults)
            print(
                f"{seed:>4} {met:<50}{time.monotonic() - began:>6.1f} s  {'; '.join(wrong) or 'the same bytes'}", flush=True
            )
            if not wrong:
                shutil.rmtree(run.folder)
    told = ", ".join(f"{number} {kind}" for kind, number in count.items())
    print(f"\n{asked.seeds} runs with {sum(count.values())} faults ({told}): {asked.seeds - bad} ended in the same bytes")
    if bad:
        print(f"failed; the runs and what they said (log) are in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
