"""What run.deterministic = true costs: a step of the full-size models with it over one without.

    python benchmarks/bench_deterministic.py [--seconds 120] [--storage fp8_e4m3] [--json FILE]
    python benchmarks/bench_deterministic.py --quick     # tiny models on a CPU: it runs, its ratios mean nothing

The steps are of random_models.py: random weights, rank-16 DoRA, every block recomputed, bf16, batch 1 at 1024 and 512 px. The
settings belong to a process, so each way has one of its own, and both hold the model at once (Flux in float8: 25 GB). They
take turns, a step each, the first of a round in turn; a ratio is the median over the rounds of deterministic over ordinary.

Each way also makes the gradients of one batch twice and says whether they are the same bytes: they must be where it is
deterministic (else exit status 1), and need not be elsewhere. "attention" is what torch chooses for the model's shape.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ORDINARY, DETERMINISTIC = WAYS = ("ordinary", "deterministic")
MODELS = ("Flux", "SDXL")
# (heads, tokens of queries at 1024 px, width of a head) of the attention that takes the most time; SDXL's at its 32 x 32.
ATTENTION = {"Flux": (24, 4608, 128), "SDXL": (20, 1024, 64)}


class Failed(Exception):
    """A worker could not do what it was asked."""


class Worker:
    """A process with the settings of one way. Asked in one line of JSON, it answers in one."""

    def __init__(self, way: str, device: str, storage: str, quick: bool) -> None:
        command = [sys.executable, __file__, "--worker", way, "--device", device, "--storage", storage]
        environment = {key: value for key, value in os.environ.items() if key != "CUBLAS_WORKSPACE_CONFIG"}
        self.process = subprocess.Popen(
            command + ["--quick"] * quick, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, *question: Any) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: `answer` says so
            print(json.dumps(question), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise Failed(f"the worker ended with status {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer["value"]


def both(workers: dict[str, Worker], *question: Any) -> dict[str, Any]:
    """Both workers' answers; they work at the same time."""
    for worker in workers.values():
        worker.ask(*question)
    answers: dict[str, Any] = {}
    failure = None
    for way, worker in workers.items():
        try:
            answers[way] = worker.answer()
        except Failed as error:  # the other's answer is waiting, and would be taken for that to the next question
            failure = Failed(f"{way}: {error}")
    if failure:
        raise failure
    return answers


def measure(workers: dict[str, Worker], model: str, sizes: list[int], rounds: int, end: float) -> Iterator[dict]:
    """One row for each size. Rounds end early at `end`. Raises Failed where a worker cannot go on."""
    both(workers, "build", model)
    for pixels in sizes:
        # One after the other: the first steps take the most memory.
        about = {way: both({way: worker}, "prepare", pixels)[way] for way, worker in workers.items()}
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for done in range(rounds):
            if done and time.monotonic() > end:
                break
            for way in WAYS if done % 2 == 0 else reversed(WAYS):
                times[way] += both({way: workers[way]}, "step").values()
        ratios = [a / b for a, b in zip(times[DETERMINISTIC], times[ORDINARY], strict=True)]
        yield {
            "model": model, "pixels": pixels, "ratio": statistics.median(ratios), "ratios": ratios,
            "ms": {way: statistics.median(values) for way, values in times.items()},
            "attention": {way: each["attention"] for way, each in about.items()},
            "same gradients": {way: each["same gradients"] for way, each in about.items()},
        }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """Of one row: the ratio, both times, and what else differs."""
    ms, attention, same = row["ms"], row["attention"], row["same gradients"]
    repeats = {way: "the same" if same[way] else "other" for way in WAYS}
    return (
        f"{row['model']:<5} {row['pixels']:>4} px deterministic / ordinary {row['ratio']:.3f} "
        f"({min(row['ratios']):.3f} to {max(row['ratios']):.3f}): {ms[DETERMINISTIC]:.1f} / {ms[ORDINARY]:.1f} ms, "
        f"attention {attention[DETERMINISTIC]} / {attention[ORDINARY]}; gradients made twice are "
        f"{repeats[DETERMINISTIC]} / {repeats[ORDINARY]} bytes"
    )


def work(way: str, device_name: str, storage: str, quick: bool) -> None:
    """A worker's life: answers questions until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print, too
    sys.path.insert(0, str(ROOT))
    import torch
    from torch.nn.attention import SDPBackend

    from trainer.runtime import precision

    if way == DETERMINISTIC:
        precision.be_deterministic()
    from benchmarks import random_models
    from trainer.kernels import scratch

    device = torch.device(device_name)
    bench = batch = None

    def same_gradients() -> bool:
        made = []
        for _ in range(2):
            for parameter in bench.step.parameters:
                parameter.grad.zero_()
            bench.step.losses(batch).mean().backward()
            made.append([parameter.grad.clone() for parameter in bench.step.parameters])
        return all(torch.equal(one, other) for one, other in zip(*made, strict=True))

    def attention(model: str) -> str:
        heads, tokens, width = ATTENTION[model]
        q = torch.empty(1, heads, tokens, width, dtype=torch.bfloat16, device=device, requires_grad=True)
        return SDPBackend(torch._fused_sdp_choice(q, q, q)).name

    with tempfile.TemporaryDirectory() as folder:
        sources = random_models.sources(quick, Path(folder))
        model = ""
        for asked in sys.stdin:
            what, *details = json.loads(asked)
            value: Any = None
            try:
                if what == "start":
                    if device.type == "cuda" and not torch.cuda.is_available():
                        raise RuntimeError("--device cuda, but no CUDA device is visible")
                    precision.prepare_device(device, {"bf16"})
                    torch.manual_seed(0)
                    value = {
                        "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
                        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                    }  # fmt: skip
                elif what == "build":
                    bench = batch = None
                    scratch._buffers.clear()
                    gc.collect()
                    if device.type == "cuda":
                        torch.cuda.empty_cache()
                    (model,) = details
                    bench = random_models.Bench(sources[model], storage, device)
                elif what == "prepare":
                    text = 8 if quick else {"Flux": 512, "SDXL": 77}[model]
                    batch = random_models.batch_of(sources[model], details[0], text)
                    for _ in range(2):  # compiles kernels, makes the optimizer's state
                        bench.milliseconds(batch)
                    value = {"same gradients": same_gradients(), "attention": attention(model)}
                elif what == "step":
                    value = bench.milliseconds(batch)
                answer = {"value": value}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="cuda; with --quick cpu")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--storage", default="fp8_e4m3", help="of the frozen weights")
    parser.add_argument("--rounds", type=int, help="9; with --quick 3")
    parser.add_argument("--seconds", type=float, default=600, help="start no further round or model after this time")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    quick = arguments.quick
    device = arguments.device or ("cpu" if quick else "cuda")
    if arguments.worker:
        work(arguments.worker, device, arguments.storage, quick)
        return 0
    if device == "cpu" and not quick:
        print("error: the full-size models need --device cuda; --quick runs tiny ones on a CPU", file=sys.stderr)
        return 2
    start, errors = time.monotonic(), {}
    workers = {way: Worker(way, device, arguments.storage, quick) for way in WAYS}
    try:
        about = both(workers, "start")[ORDINARY]
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result: dict[str, Any] = {
        "about": {"date": datetime.now(UTC).isoformat(timespec="seconds"), "quick": quick} | about,
        "storage": arguments.storage, "rows": [], "errors": errors,
    }  # fmt: skip

    def write() -> None:
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")

    sizes, rounds = ([64, 32], 3) if quick else ([1024, 512], 9)
    # Flux may take seven tenths of the time.
    for model, share in zip(MODELS, (0.7, 1.0), strict=True):
        end = start + share * arguments.seconds
        if time.monotonic() > end:
            print(f"{model}: left out, out of time", flush=True)
            continue
        try:
            for row in measure(workers, model, sizes, arguments.rounds or rounds, end):
                print(line(row), flush=True)
                result["rows"].append(row)
                if not row["same gradients"][DETERMINISTIC]:
                    raise Failed("deterministic, and yet two passes over one batch give other gradients")
                write()  # after each, so that a time limit loses little
        except Failed as error:
            errors[model] = str(error)
            print(f"error: {model}: {error}", flush=True)
    write()
    for worker in workers.values():
        assert worker.process.stdin is not None
        worker.process.stdin.close()
        worker.process.wait()
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
