"""What the choices that people tune do to the demo: optimizers, schedules, objectives, averages, adapter options.

    python benchmarks/craft.py --out outputs/craft --jobs 2       # under an hour on two cores; goes on where it was
    python benchmarks/craft.py --out outputs/craft --cells default,sdxl/lion --seeds 1
    python benchmarks/craft_page.py outputs/craft                 # docs/benchmarks/craft.md, from what was measured

A cell is the training of configs/pocket_sdxl.toml with one choice changed, and with the rate that this choice needs. It
has the same number of steps, batches and noise as the default of the same seed. Measured are

- held-out loss: of the 60 true icons of the style (examples/icons/exams), over 24 fixed draws of noise and timestep. It is
  the plain loss, whatever the cell trains with;
- forgetting: the same of those subjects in the styles that the model knows, 4 draws;
- the cost of a step: the default and the cell take turns, a step each, in the cell of seed 0. On a CPU, seconds are the
  processor's, so another program does not count;
- the loss of every step, as the run would log it;
- the bytes that the optimizer and the average keep.

Where an average is kept (EMA), the average is examined, not the weights that are trained.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import signal
import sys
import time
import tomllib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks import cells, lessons  # noqa: E402
from tests.harness import built, take_step  # noqa: E402
from trainer.data.batches.sampler import MicroBatch  # noqa: E402
from trainer.run.run import Run  # noqa: E402

DRAWS = 24  # of the held-out loss
WARM_UP, TURNS = 2, 12  # steps before the first turn that counts, and turns


@dataclass(frozen=True)
class Choice:
    """One way of training.

    kind: the heading that it stands under. changes: config keys, dots as `__`. against: the choice that it is compared with,
    where it only goes with what that one sets.
    """

    kind: str
    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    against: str = "default"

    @property
    def path(self) -> str:
        return self.name


DEFAULT = Choice("default", "default")
_MEASURED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["choices"]
CHOICES = (DEFAULT, *(Choice(**each) for each in _MEASURED))


def of_config(choice: Choice, seed: int, folder: Path, cache: Path, steps: int | None) -> Any:
    return lessons.config("sdxl", seed, folder / "run", cache, changes=choice.changes, steps=steps)


def timed(run: Run, number: int, update: Sequence[MicroBatch]) -> tuple[float | None, float]:
    """Take a step. Returns (its loss, seconds): the processor's on a CPU, as others use it too; the clock's on a device."""
    on_cpu = run.context.processes.device.type == "cpu"
    started = time.process_time() if on_cpu else lessons.now(run)
    loss = take_step(run, number, update).loss
    return loss, (time.process_time() if on_cpu else lessons.now(run)) - started


_kept = ExitStack()
atexit.register(_kept.close)


@functools.cache
def opponent(cache: Path, steps: int | None) -> Run:
    """The default that the cells take turns with: one for all cells of this process."""
    folder = Path(_kept.enter_context(TemporaryDirectory()))
    return _kept.enter_context(built(of_config(DEFAULT, 0, folder, cache, steps)))


def state_bytes(run: Run) -> int:
    """Of what the optimizer keeps, and of an average."""
    states = run.state.optimizer.optimizer.state.values()
    kept = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    average = run.state.average.weights.values() if run.state.average else ()
    return sum(tensor.nbytes for tensor in [*kept, *average])


def measure(choice: Choice, seed: int, cache: Path, steps: int | None = None) -> cells.Result:
    """Train one cell; returns what was measured. cache: of encoded icons and captions."""
    other = opponent(cache, steps) if seed == 0 else None
    with TemporaryDirectory() as folder, built(of_config(choice, seed, Path(folder), cache, steps)) as run:
        # A run notes a signal and ends at its next step; there is no such loop here.
        for stop in (signal.SIGINT, signal.SIGTERM):
            signal.signal(stop, signal.SIG_DFL)
        examiner = lessons.Examiner(run)
        before = examiner.forgetting() if choice is DEFAULT else None  # an adapter begins as nothing: alike for all
        turns, losses = [], []
        last = run.plan.length.max_steps
        for number, update in zip(range(1, last + 1), lessons.updates(run), strict=False):
            loss, own = timed(run, number, update)
            losses.append(loss)
            if other is not None and number <= WARM_UP + TURNS:
                turn = own, timed(other, number, update)[1]
                turns += [turn] if number > WARM_UP else []
        return {
            "cell": choice.path,
            "seed": seed,
            "steps": last,
            "changes": choice.changes,
            "losses": losses,
            "draws": examiner.held_out(DRAWS),
            "forgetting": examiner.forgetting(),
            "forgetting_before": before,
            "turns": turns,
            "parameters": sum(parameter.numel() for parameter in run.adapter.named_parameters().values()),
            "state_bytes": state_bytes(run),
            "machine": lessons.machine(run),
        }


def told(result: cells.Result) -> str:
    return f"held-out loss {lessons.mean(result['draws']):.4f}"


def settings(choice: Choice, asked: argparse.Namespace) -> dict[str, Any]:
    steps = of_config(DEFAULT, 0, asked.out, asked.out, asked.steps).run.max_steps
    return {"steps": steps, "changes": choice.changes}


BENCH = cells.Bench(
    Path(__file__),
    __doc__,
    CHOICES,
    lambda choice, seed, asked: measure(choice, seed, asked.out / "cache", asked.steps),
    settings,
    told,
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
