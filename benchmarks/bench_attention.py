"""Attention on a CPU, forward and backward: 16-bit tensors computed in fp32 (trainer/runtime/attention.py) over torch's own.
Ratios.

    OMP_NUM_THREADS=1 python benchmarks/bench_attention.py             # 2 minutes
    OMP_NUM_THREADS=1 python benchmarks/bench_attention.py --json FILE

The two take turns; a figure is the median over the rounds of the ratio within a round, of the processor's seconds. Rows are
(queries, keys). Up to attention.FEW queries every ratio has to be below 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from trainer.runtime import attention  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_SIZES = (16, 32, 64, 128)
TOKENS = ((4, 4), (4, 77), (16, 16), (16, 77), (32, 32), (64, 64), (64, 77), (128, 77), (128, 128), (256, 77), (256, 256),
          (1024, 77), (1024, 1024))  # fmt: skip
WIDTH, ROWS = 128, 768  # of all heads together, and of all queries


def step(call: Callable[..., torch.Tensor], dtype: torch.dtype, queries: int, keys: int, size: int) -> Callable[[], None]:
    """Heads lie beside one another in a token, as a product gives them."""
    batch, generator = max(1, ROWS // queries), torch.Generator().manual_seed(0)

    def drawn(tokens: int) -> torch.Tensor:
        return torch.randn(batch, tokens, WIDTH, generator=generator).to(dtype).requires_grad_()

    query, key, value, upstream = drawn(queries), drawn(keys), drawn(keys), drawn(queries).detach()

    def taken() -> None:
        heads = (tensor.view(batch, -1, WIDTH // size, size).transpose(1, 2) for tensor in (query, key, value))
        out = call(*heads).transpose(1, 2).reshape(upstream.shape)
        torch.autograd.grad(out, (query, key, value), upstream)

    return taken


def ratio(one: Callable[[], None], other: Callable[[], None], rounds: int) -> float:
    def seconds(call: Callable[[], None]) -> float:
        started = time.process_time()
        call()
        return time.process_time() - started

    for call in (one, other):
        call()
    return statistics.median(seconds(one) / seconds(other) for _ in range(rounds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    attention.FEW = 2**30
    found = []
    for name, dtype in DTYPES.items():
        print(f"\n{name}, head size" + "".join(f"{size:>8}" for size in HEAD_SIZES))
        for queries, keys in TOKENS:
            ratios = []
            for size in HEAD_SIZES:
                given = dtype, queries, keys, size
                ours = step(attention.attention, *given)
                ratios.append(ratio(ours, step(scaled_dot_product_attention, *given), asked.rounds))
            by_size = dict(zip(HEAD_SIZES, ratios, strict=True))
            found.append({"dtype": name, "queries": queries, "keys": keys, "ratios": by_size})
            print(f"{f'({queries}, {keys})':>15}" + "".join(f"{each:8.2f}" for each in ratios), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
