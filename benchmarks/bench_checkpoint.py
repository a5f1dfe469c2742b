"""What checkpointing costs: a training loop that saves every 10 steps over one that does not.

    python benchmarks/bench_checkpoint.py [--rounds 3] [--json FILE]

A tiny Flux, 200 steps of batch 2, rank 16 on attention and MLP, float8 base, 64 tokens of text. Three processes train it:
"none" saves nothing but the last checkpoint, which all write; "background" saves every 10 steps beside the training (the
default), "foreground" within it. They take turns of 10 steps, from the middle between two saves to the next middle, so that a
turn holds a save and what it does to the steps after it. So a machine that others use, too, slows all three alike; the order
is reversed every other round. A round's ratio is that of the sums of all its turns, the whole loop; beside it, less moved by
single stalls, the median over turns.

CPU: seconds of all threads of the process. The three must end in the same bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.proofs.shared import PHOTOS, make_models  # noqa: E402

LIMIT = 1.03
NONE, BACKGROUND, FOREGROUND = WAYS = ("none", "background", "foreground")


def tree_of(work: Path, way: str, steps: int, every: int) -> dict[str, Any]:
    return {
        "run": {"name": "bench", "output_dir": str(work / way), "max_steps": steps, "device": "cpu"},
        "model": {
            "family": "flux", "path": str(work.parent / "flux"), "components": {"transformer": {"dtype": "fp8_e4m3"}},
        },
        # One bucket, and as many photos as make whole batches: all steps are alike. At T5's 512 tokens two thirds of a step
        # would be padding, and saves look cheaper.
        "data": {
            "resolution": 64, "bucket_step": 64, "batch_size": 2, "caption_dropout": 0.0, "text_length": 64,
            "sources": [{"path": str(PHOTOS), "repeats": 2}],
        },
        "checkpoint": {"every_steps": 0 if way == NONE else every, "background": way != FOREGROUND},
        "validation": {"every_steps": 0},
        "logging": {"tensorboard": False},
    }  # fmt: skip


# --- one of the three -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def patched(owner: Any, name: str, change: Callable[[Callable], Callable]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, change(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def work(folder: Path, way: str, steps: int, every: int) -> None:
    """Train in turns: one line on stdin starts one, one line of JSON on stdout ends it; the last says what saves took."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the run prints, too
    from trainer import config as configs
    from trainer.checkpoint import state
    from trainer.checkpoint.saver import Saver
    from trainer.run.checkpointing import Saves
    from trainer.run.loop import Loop
    from workbench.commands import main as cli
    from workbench.commands.launch import train

    started: tuple[float, float] | None = None
    took: dict[str, list[float]] = {"waited": [], "snapshot": [], "written": []}
    late = 0

    def pause(loop: Loop) -> None:
        nonlocal started, late
        if started is not None:
            turn = time.perf_counter() - started[0], time.process_time() - started[1]
            thread = loop.saves.saver._thread
            late += thread is not None and thread.is_alive()
            if thread is not None:
                thread.join()
            print(json.dumps(turn), file=answers, flush=True)
        if not sys.stdin.readline():
            os._exit(1)  # the parent has gone
        started = time.perf_counter(), time.process_time()

    def in_turns(read: Callable) -> Callable:
        def call(loop: Loop) -> Any:
            if started is None or loop.state.progress.step % every == every // 2:
                pause(loop)
            return read(loop)

        return call

    def then_pause(steps: Callable) -> Callable:
        def call(loop: Loop) -> Iterator[Any]:
            yield from steps(loop)
            pause(loop)

        return call

    def timed(what: str) -> Callable[[Callable], Callable]:
        def change(function: Callable) -> Callable:
            def call(*arguments: Any, **options: Any) -> Any:
                start = time.perf_counter()
                result = function(*arguments, **options)
                if not options.get("final"):  # the last save waits for the disk, in all three
                    took[what].append(time.perf_counter() - start)
                return result

            return call

        return change

    cli.quiet_libraries()
    with (
        patched(Loop, "steps", then_pause),
        patched(Loop, "_read", in_turns),
        patched(Saves, "save", timed("waited")),
        patched(state, "pack", timed("snapshot")),
        patched(Saver, "_write", timed("written")),
    ):
        train(configs.parse(tree_of(folder, way, steps, every)), resume_from=None)
    import torch

    print(json.dumps(took | {"late": late, "threads": torch.get_num_threads()}), file=answers, flush=True)


# --- all of them ------------------------------------------------------------------------------------------------------


def one_round(folder: Path, order: Sequence[str], steps: int, every: int) -> dict[str, dict[str, Any]]:
    """By way: "turns", [seconds, CPU seconds] of each, and what a worker says at its end. Exits with a worker's log.

    One order for all turns of a round: none follows itself, which would find its data in the caches.
    """
    workers = {}
    folder.mkdir()
    for way in WAYS:
        command = [sys.executable, __file__, "--worker", str(folder), way, "--steps", str(steps), "--every", str(every)]
        with open(folder / f"{way}.txt", "w") as log:
            workers[way] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            )  # fmt: skip

    def ask(way: str) -> Any:
        with contextlib.suppress(BrokenPipeError):  # it has ended: there is no line to read
            print(file=workers[way].stdin, flush=True)
        line = workers[way].stdout.readline()
        if not line:
            sys.exit(f"error: {way} ended early:\n" + (folder / f"{way}.txt").read_text(errors="replace")[-4000:])
        return json.loads(line)

    result: dict[str, dict[str, Any]] = {way: {"turns": []} for way in WAYS}
    count = 1 + len([step for step in range(1, steps) if step % every == every // 2])
    for _ in range(count):
        for way in order:
            result[way]["turns"].append(ask(way))
    for way in WAYS:
        result[way] |= ask(way)
        workers[way].wait()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    steps, every = arguments.steps, arguments.every
    if arguments.worker:
        work(Path(arguments.worker[0]), arguments.worker[1], steps, every)
        return 0
    if arguments.rounds < 1 or every < 2 or steps < 2 * every:
        parser.error("--rounds must be at least 1, --every at least 2, --steps at least twice --every")
    rounds = []
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-") as temporary:
        folder = Path(temporary)
        make_models(folder, ["flux"])
        for number in range(arguments.rounds):
            here = folder / str(number)
            rounds.append(one_round(here, WAYS if number % 2 == 0 else WAYS[::-1], steps, every))
            last = f"checkpoints/step-{steps:08d}/adapter.safetensors"
            if len({(here / way / last).read_bytes() for way in WAYS}) > 1:
                print("error: the three ended in different adapters: not comparable", file=sys.stderr)
                return 1
            shown = ", ".join(f"{way} {sum(turn[0] for turn in rounds[-1][way]['turns']):.2f} s" for way in WAYS)
            print(f"round {number + 1}: {shown}", file=sys.stderr, flush=True)
    result = summary(rounds, steps, every)
    print(text(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def summary(rounds: list[dict[str, dict[str, Any]]], steps: int, every: int) -> dict[str, Any]:
    def loops(way: str, figure: int) -> list[float]:
        return [sum(turn[figure] for turn in each[way]["turns"]) for each in rounds]

    def milliseconds(way: str, what: str) -> float:
        return 1000 * statistics.median([seconds for each in rounds for seconds in each[way][what]])

    result: dict[str, Any] = {
        "steps": steps, "every": every, "rounds": len(rounds), "threads": rounds[0][NONE]["threads"],
        "cores": os.cpu_count(), "limit": LIMIT, "step_ms": 1000 * statistics.median(loops(NONE, 0)) / steps,
        "loop_s": {way: loops(way, 0) for way in WAYS},
    }  # fmt: skip
    for way in (BACKGROUND, FOREGROUND):
        ratios, cpu = ([a / b for a, b in zip(loops(way, figure), loops(NONE, figure), strict=True)] for figure in (0, 1))
        turns = [a[0] / b[0] for each in rounds for a, b in zip(each[way]["turns"], each[NONE]["turns"], strict=True)]
        result[way] = {
            "ratio": statistics.median(ratios), "ratios": ratios, "turn_ratio": statistics.median(turns),
            "cpu_ratio": statistics.median(cpu), "waited_ms": milliseconds(way, "waited"),
            "snapshot_ms": milliseconds(way, "snapshot"), "written_ms": milliseconds(way, "written"),
            # Saves that were still being written at the end of their turn: what they cost after it is not counted.
            "late": sum(each[way]["late"] for each in rounds),
        }  # fmt: skip
    return result


def text(result: dict[str, Any]) -> str:
    lines = [
        f"{result['steps']} steps of {result['step_ms']:.1f} ms, a checkpoint every {result['every']}; "
        f"{result['rounds']} round(s), {result['threads']} thread(s), {result['cores']} cores"
    ]
    for way in (BACKGROUND, FOREGROUND):
        row = result[way]
        met = "met" if row["ratio"] <= result["limit"] else "MISSED"
        lines += [
            f"{way}:",
            f"  loop / loop without checkpoints  {row['ratio']:.3f} ({', '.join(f'{r:.3f}' for r in row['ratios'])})"
            + (f"; at most {result['limit']}: {met}" if way == BACKGROUND else ""),
            f"  median over turns                {row['turn_ratio']:.3f}",
            f"  the same of CPU time             {row['cpu_ratio']:.3f}",
            f"  a save keeps the loop waiting    {row['waited_ms']:.1f} ms, of that the snapshot "
            f"{row['snapshot_ms']:.1f} ms; it writes for {row['written_ms']:.1f} ms",
        ]
        if row["late"]:
            lines.append(f"  {row['late']} saves took longer than their turn: what they cost after it is not counted")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
