"""The time to draw one icon with a pocket model under the demo's adapter: 20 steps with guidance, 64 px, on a CPU.

    OMP_NUM_THREADS=1 python benchmarks/bench_sampling.py [--rounds 15]

Seconds are the processor's, of all threads, from the encoded prompt to the picture. With one thread no more than one core is
used, and another program does not count. The calmest of the rounds and their median are printed. At most 1.5 s is wanted.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import time
import tomllib
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from tests.harness import built  # noqa: E402
from trainer import config as configs  # noqa: E402
from trainer.engine.encoding import prompt_conditioning  # noqa: E402


def seconds(family: str, rounds: int, folder: Path) -> list[float]:
    tree = tomllib.loads((ROOT / "configs" / f"pocket_{family}.toml").read_text(encoding="utf-8"))
    tree["run"] |= {"output_dir": str(folder / family)}
    tree["model"]["path"] = str(ROOT / tree["model"]["path"])
    tree["logging"] = {"tensorboard": False}
    for entry in (*tree["data"]["sources"], *tree["validation"]["samples"]):
        for key in entry.keys() & {"path", "truth"}:
            entry[key] = str(ROOT / entry[key])
    found = []
    with redirect_stdout(io.StringIO()), built(configs.parse(tree)) as run, torch.no_grad():  # what a run says of itself
        request = run.plan.data.requests[0]
        assert request.steps == 20 and request.guidance
        told = [prompt_conditioning(run.components, run.reader, text) for text in (request.prompt, request.negative)]
        for _ in range(rounds + 1):
            started = time.process_time()
            run.family.images.draw(run.model, request, *told)
            found.append(time.process_time() - started)
    return found[1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    with TemporaryDirectory() as folder:
        for family in ("sdxl", "flux"):
            found = seconds(family, asked.rounds, Path(folder))
            print(f"pocket {family}: {min(found):.2f} s (median {statistics.median(found):.2f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
