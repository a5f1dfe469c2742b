"""What one training step asks of an accelerator: operators launched, bytes read and written, FLOPs. Nothing is computed.

    python benchmarks/trace.py                                  # SDXL and Flux at 1024 px: our DoRA and our LoRA
    python benchmarks/trace.py --against peft                   # over one bf16 base: ours, and diffusers + PEFT
    python benchmarks/trace.py --family sdxl --operators 20     # which operators, and how often

A step: forward and backward of a rank-16 adapter on attention and MLP, clipping and AdamW, with the norms of DoRA that the
next step needs; batch 1, bf16 compute, the published sizes, `kernels = "triton"`. The step's own code runs on tensors without
values. What is counted is a fact of the code, on any machine.

An operator that only renames memory is not a launch. An operator of ours counts once, as one of torch does, though some of
either launch two or three kernels. Bytes are those of an operator's arguments and results, as if no cache held them.

PEFT's step is that of benchmarks/plain_loop.py: fp32 adapters over a bf16 base, under autocast, with the casts of torch's
autocast on a CPU, which are fewer than those on CUDA.

The last column is an estimate: the band of workbench/planning/step_time.py for the card that --card names, beside the host
that this program runs on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

from benchmarks import plain_peft, random_models  # noqa: E402
from tests import pretend  # noqa: E402
from trainer import kernels, quantization  # noqa: E402
from trainer.base.types import Batch  # noqa: E402
from trainer.models import family_named  # noqa: E402
from trainer.models.config_files import PUBLISHED  # noqa: E402
from trainer.models.loading import ModelSource  # noqa: E402
from workbench.planning import step_time  # noqa: E402
from workbench.planning.describe import band  # noqa: E402
from workbench.planning.dry_run import fused_rms_norm  # noqa: E402
from workbench.planning.op_trace import Cost, Trace  # noqa: E402

CPU = torch.device("cpu")
RANK, PIXELS = random_models.RANK, 1024
LABELS = {"sdxl": "SDXL", "flux": "Flux"}
PUBLISHED_AS = {"sdxl": "sdxl", "flux": "flux-dev"}
TEXT_TOKENS = {"sdxl": 77, "flux": 512}


@dataclass(frozen=True)
class Row:
    """storage: of the denoiser. who: "ours" or "peft"."""

    family: str
    who: str
    adapter: str
    storage: str
    cost: Cost
    operators: dict[str, int]

    @property
    def moved(self) -> int:
        return self.cost.total("read") + self.cost.total("written")

    def as_json(self) -> dict[str, Any]:
        """As the file of --json has it."""
        counted = {name: getattr(self.cost, name) for name in ("launches", "read", "written", "flops")}
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"cost": counted}


class OneOperator(TorchFunctionMode):
    """A block in which RMSNorm is one operator, as a GPU has it: on tensors of a CPU torch takes it apart."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        return (fused_rms_norm if func is nn.functional.rms_norm else func)(*args, **(kwargs or {}))


def traced(family: str, who: str, adapter: str, storage: str, *, recomputed: bool | str, pixels: int = PIXELS) -> Row:
    """One step after a first one: the optimizer has its state, and DoRA's norms are due."""
    source = ModelSource(family_named(family), PUBLISHED / PUBLISHED_AS[family], quantization.recognise)
    batch = random_models.batch_of(source, pixels, TEXT_TOKENS[family])
    # For its tensors: they are of a CPU, as autocast knows no other here.
    with pretend.accelerator(triton=True), OneOperator():
        step = OF[who](source, adapter, storage, recomputed)
        step(batch)
        with Trace() as trace:
            step(batch)
    return Row(family, who, adapter, storage, trace.cost, dict(trace.by_name.most_common()))


def ours(source: ModelSource, adapter: str, storage: str, recomputed: bool | str) -> Callable[[Batch], object]:
    bench = random_models.Bench(
        source, storage, CPU, dora=adapter == "dora", chosen=kernels.planned("triton"), recomputed=recomputed
    )
    step = pretend.Updating(**{each.name: getattr(bench.step, each.name) for each in fields(bench.step)})
    return lambda batch: step.run(1, [batch], batch.occurrences)


def theirs(source: ModelSource, adapter: str, storage: str, recomputed: bool) -> Callable[[Batch], object]:
    """The same layers, adapted by PEFT."""
    dtype, dora = plain_peft.DTYPES[storage], adapter == "dora"
    bench = random_models.Bench(source, storage, CPU, dora=dora, chosen=kernels.planned("torch"))
    return random_models.plain_step(source, bench, dora=dora, dtype=dtype, recomputed=recomputed)


OF = {"ours": ours, "peft": theirs}


def line(row: Row, machine: step_time.Machine) -> str:
    return (
        f"{LABELS[row.family]:<5} {row.who:<5} {row.adapter:<5} {row.storage:<9} {row.cost.launches:>7,} "
        f"{row.moved / 2**30:>8.1f} {row.cost.total('flops') / 1e12:>8.2f}   {band(*machine.seconds(row.cost))}"
    )


def ratio(one: Row, other: Row) -> str:
    costs = ((row.cost.launches, row.moved, row.cost.total("flops")) for row in (one, other))
    launches, moved, flops = (a / b for a, b in zip(*costs, strict=True))
    return (
        f"{LABELS[one.family]}, {one.storage}: {one.who} {one.adapter} over {other.who} {other.adapter}: "
        f"launches {launches:.2f}, bytes {moved:.2f}, FLOPs {flops:.3f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=sorted(LABELS), action="append", help="both")
    parser.add_argument("--against", choices=["peft"])
    parser.add_argument("--storage", default=None, help="of the denoiser: fp8_e4m3; bf16 with --against")
    parser.add_argument("--pixels", type=int, default=PIXELS)
    parser.add_argument(
        "--recompute", nargs="?", const=True, default=False, choices=["selective"],
        help="every block, as memory.gradient_checkpointing = true or 'selective'",
    )  # fmt: skip
    parser.add_argument("--card", choices=sorted(step_time.CARDS), default="NVIDIA H100 80GB HBM3")
    parser.add_argument("--operators", type=int, default=0, help="how many of each step to list")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    storage = asked.storage or ("bf16" if asked.against else "fp8_e4m3")
    if asked.against and storage not in ("bf16", "fp32"):
        parser.error(f"--storage {storage}: PEFT's base is compared in bf16 or fp32")
    rows, machine = [], step_time.on_card(asked.card, step_time.bare_operator())
    assert machine is not None
    print(f"{'':<27} launches      GiB    TFLOP   a step on {asked.card}, an estimate")
    for family in asked.family or sorted(LABELS, reverse=True):
        found = {}
        for who in ("ours", "peft") if asked.against else ("ours",):
            for adapter in ("lora", "dora"):
                row = traced(family, who, adapter, storage, recomputed=asked.recompute, pixels=asked.pixels)
                found[who, adapter] = row
                rows.append(row)
                print(line(row, machine), flush=True)
                for name, count in list(row.operators.items())[: asked.operators]:
                    print(f"      {count:>7,} {name}")
        print(ratio(found["ours", "dora"], found["ours", "lora"]))
        if asked.against:
            for adapter in ("lora", "dora"):
                print(ratio(found["ours", adapter], found["peft", adapter]))
    if asked.json:
        asked.json.write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
