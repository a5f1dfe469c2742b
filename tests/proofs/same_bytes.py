"""Does this tree train the same bytes as an earlier commit? 12 short runs in both, compared file by file.

    python tests/proofs/same_bytes.py                          # against the last commit that changed them
    python tests/proofs/same_bytes.py COMMIT --cells 'flux-*'
    python tests/proofs/same_bytes.py COMMIT --metadata-but KEY  # that entry of a file's metadata is not compared; repeatable
    python tests/proofs/same_bytes.py COMMIT --upgrade         # this tree goes on from the checkpoints of the earlier one

A cell is one config. Each tree trains it with its own `train.py --config`: four steps on a tiny model, stopped after the
second and resumed. Then these files must be equal, byte for byte: adapter.safetensors and optimizer.safetensors of every
checkpoint, the adapter files in both formats, and the samples. Both trees read the same model files and have the same clock.

A start is a fork of a process that has imported its own tree; --fresh makes it a new process. Exit status 1: a file differs
(the first tensor that does is named) or a run failed; 2: there is no such commit or cell.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import tomli_w

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.proofs.forks import Order, Server  # noqa: E402
from tests.proofs.shared import PHOTOS, STARTED, make_models, worktree  # noqa: E402
from trainer.base.errors import UserError  # noqa: E402
from trainer.base.tensorfile import TensorFile  # noqa: E402

# The last commit that changed bytes of a run: in a DoRA's diffusers file a text encoder's magnitudes have other keys.
BEFORE = "cbb36ba77299"
STEPS, STOP = 4, 2
DENOISER = {"sdxl": "unet", "flux": "transformer"}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "SOURCE_DATE_EPOCH": STARTED, "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One config. storage: of the denoiser. more: further keys."""

    family: str
    kind: str
    storage: str
    optimizer: str
    more: Mapping[str, Any]
    also: str = ""

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.family, self.kind, self.storage, self.optimizer, self.also)))


def text(*encoders: str) -> dict[str, Any]:
    """The key that adapts text encoders, too."""
    return {"adapter.rules": [{"component": encoder, "match": "*"} for encoder in encoders]}


SAMPLE = {"validation.every_steps": 4, "validation.steps": 2, "validation.prompts": ["a photo of sks plush bear"]}
SPLIT = {"step.accumulation": 2}
DROPOUT = {"adapter.dropout": 0.1}
RECOMPUTED = {"memory.gradient_checkpointing": True}
FP32, FP16 = {"precision.compute": "fp32"}, {"precision.compute": "fp16", "precision.loss_scale": 1024.0}
BNB = {"model.components.unet.backend": "bitsandbytes"}
WIDE = {"adapter.targets": "all", "adapter.rslora": True}
MLP = {"adapter.targets": "attention+mlp"}
SNR = {"objective.min_snr_gamma": 5.0}

CELLS = (
    Cell("sdxl", "lora", "fp32", "adamw", FP32 | MLP | SAMPLE, "sample"),
    Cell("sdxl", "lora", "fp8_e4m3", "adamw8bit", text("text_encoder", "text_encoder_2"), "text"),
    Cell("sdxl", "lora", "nf4", "adamw", FP16 | DROPOUT | SPLIT, "dropout-split-fp16"),
    Cell("sdxl", "dora", "fp8_e4m3", "adamw", SPLIT | MLP | RECOMPUTED | SAMPLE, "split-sample"),
    Cell("sdxl", "dora", "int8", "adamw8bit", BNB | WIDE | SNR, "convolutions"),
    Cell("sdxl", "dora", "nf4", "adamw8bit", FP32 | text("text_encoder"), "text"),
    Cell("flux", "lora", "fp32", "adamw8bit", DROPOUT | SPLIT, "dropout-split"),
    Cell("flux", "lora", "int8", "adamw", text("text_encoder"), "text"),
    Cell("flux", "lora", "nf4", "adamw8bit", MLP | RECOMPUTED | {"export.every_steps": 3}, "mlp"),
    Cell("flux", "dora", "fp32", "adamw", FP32 | text("text_encoder_2"), "text"),
    Cell("flux", "dora", "fp8_e4m3", "adamw", FP16 | SPLIT | SAMPLE, "split-sample-fp16"),
    Cell("flux", "dora", "int8", "adamw8bit", {"data.num_workers": 1, "export.dora_scale": "magnitude"}, "worker"),
)


def config(cell: Cell, model: Path, cache: Path) -> dict[str, Any]:
    settings = {
        "run.name": "bear", "run.output_dir": "out", "run.seed": 7, "run.max_steps": STEPS, "run.device": "cpu",
        "model.family": cell.family, "model.path": str(model),
        f"model.components.{DENOISER[cell.family]}.dtype": cell.storage,
        "adapter.type": cell.kind, "adapter.rank": 4, "adapter.alpha": 2.0, "adapter.targets": "attention",
        "data.resolution": 64, "data.batch_size": 2, "data.flip": True, "data.caption_dropout": 0.3,
        "data.sources": [{"path": str(PHOTOS)}], "data.cache_dir": str(cache),
        "optimizer.name": cell.optimizer, "optimizer.lr": 1e-2,
        "schedule.name": "cosine", "schedule.warmup": 0.3,
        "precision.compute": "bf16", "checkpoint.every_steps": 1, "checkpoint.keep_last": STEPS,
        "validation.every_steps": 0, "logging.tensorboard": False,
    }  # fmt: skip
    if cell.family == "flux":
        settings["data.text_length"] = 32
    tree: dict[str, Any] = {}
    for key, value in (settings | dict(cell.more)).items():
        *tables, leaf = key.split(".")
        node = tree
        for table in tables:
            node = node.setdefault(table, {})
        node[leaf] = value
    return tree


class Failed(Exception):
    """A run that does not do what it is to be compared by."""


class Side:
    """One tree and its runs, each in a folder of its own under `folder`."""

    def __init__(self, code: Path, folder: Path, server: Server) -> None:
        self.code, self.folder, self.server = code, folder, server

    def write(self, cell: Cell, models: Path) -> Path:
        """The config of the cell's run; returns where that will leave what it leaves."""
        home = self.folder / cell.name
        home.mkdir(parents=True)
        # One cache for all cells: its entries are found by what went into them.
        tree = config(cell, models / cell.family, self.folder / "cache")
        (home / "run.toml").write_text(tomli_w.dumps(tree))
        return home / "out"

    def start(self, cell: Cell, *more: str) -> int:
        train = self.code / "train.py"
        return self.server.start(
            Order(
                "runpy:run_path", str(self.folder / cell.name), {"path_name": str(train), "run_name": "__main__"},
                [str(train), "--config", "run.toml", *more],
            )
        )  # fmt: skip


def run_cell(cell: Cell, sides: Sequence[Side], models: Path, *, upgrade: bool = False) -> list[Path]:
    """Train the cell in all trees side by side; returns what they left. Raises Failed.

    upgrade: the first tree alone trains the first half, and all go on from its checkpoint.
    """
    outs = [side.write(cell, models) for side in sides]
    for more, last in ((["--set", f"run.stop_after={STOP}"], STOP), (["--resume_from", "latest"], STEPS)):
        first = upgrade and last == STOP
        started = [(side, side.start(cell, *more)) for side in (sides[:1] if first else sides)]
        ended = [(side, side.server.wait(pid)) for side, pid in started]
        for (side, status), out in zip(ended, outs[: len(ended)], strict=True):
            said = (out.parent / "log").read_text(errors="replace")
            if status:
                raise Failed(f"exit status {status} in {side.code}:\n{said[-3000:]}")
            steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
            if steps != list(range(1, last + 1)):
                raise Failed(f"{side.code} trained the steps {steps}, not up to {last}")
        if first:
            for out in outs[1:]:
                shutil.copytree(outs[0], out)
    return outs


def left(out: Path) -> dict[str, Path]:
    """What has to be equal, by its path in the output folder."""
    patterns = [
        "checkpoints/*/adapter.safetensors",
        "checkpoints/*/optimizer.safetensors",
        "adapters/**/*.safetensors",
        "samples/*/*.png",
    ]
    return {str(path.relative_to(out)): path for pattern in patterns for path in sorted(out.glob(pattern)) if path.is_file()}


def without(path: Path, but: Sequence[str]) -> tuple[dict[str, Any], bytes]:
    """A safetensors file's header, its metadata without the entries named in `but`; and the bytes that follow it."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    metadata = {key: value for key, value in header.pop("__metadata__", {}).items() if key not in but}
    return {"__metadata__": list(metadata.items()), "tensors": list(header.items())}, content[end:]


def difference(ours: Path, theirs: Path, but: Sequence[str] = ()) -> str | None:
    """What differs first between two files; None where they have the same bytes.

    but: metadata entries of safetensors files that may differ, or be in one of them only.
    """
    if ours.read_bytes() == theirs.read_bytes():
        return None
    if ours.suffix != ".safetensors":
        return "its bytes differ"
    try:
        a, b = TensorFile(ours), TensorFile(theirs)
    except UserError as error:
        return str(error)
    if odd := sorted(a.entries.keys() ^ b.entries.keys()):
        return f"tensor {odd[0]} is in one of them only"
    for name, entry in a.entries.items():
        if (entry.dtype, entry.shape) != (b.entries[name].dtype, b.entries[name].shape):
            return f"tensor {name} is {entry.dtype} {entry.shape} and {b.entries[name].dtype} {b.entries[name].shape}"
        mine, other = (file.read(name).flatten() for file in (a, b))
        bits = [tensor.view(-1).numpy(force=True).view("u1") if entry.bytes else None for tensor in (mine, other)]
        if bits[0] is not None and (bits[0] != bits[1]).any():
            gap = (mine.double() - other.double()).abs().max()
            return f"tensor {name} differs, by {float(gap):.3g} at most"
    odd = {key for key in a.metadata.keys() | b.metadata if a.metadata.get(key) != b.metadata.get(key)} - set(but)
    if odd:
        return "; ".join(f"metadata {key!r} is {a.metadata.get(key)!r} and {b.metadata.get(key)!r}" for key in sorted(odd))
    if without(ours, but) == without(theirs, but):
        return None
    return "the tensors and the metadata are equal, their order in the file is not"


def compare(cell: Cell, then: Path, now: Path, but: Sequence[str] = ()) -> tuple[int, list[str]]:
    """(how many files are equal, what is not). Raises Failed where a run left too little to be compared."""
    ours, theirs = left(now), left(then)
    least = 2 * STEPS + 2 + 2 * ("validation.prompts" in cell.more)
    if len(theirs) < least:
        raise Failed(f"only {len(theirs)} files to compare, at least {least} were expected")
    first, last = (theirs[f"checkpoints/step-{step:08d}/adapter.safetensors"] for step in (1, STEPS))
    if difference(first, last) is None:
        raise Failed("the adapter did not change from the first step to the last")
    told = [f"{name} is in one of the trees only" for name in sorted(ours.keys() ^ theirs.keys())]
    shared = sorted(ours.keys() & theirs.keys())
    differences = {name: difference(ours[name], theirs[name], but) for name in shared}
    told += [f"{name}: {what}" for name, what in differences.items() if what]
    return sum(what is None for what in differences.values()), told


def has(commit: str) -> bool:
    """Whether this clone has that commit."""
    found = subprocess.run(["git", "-C", str(ROOT), "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True)
    return found.returncode == 0


def prove(
    commit: str,
    cells: Sequence[Cell],
    folder: Path,
    *,
    fresh: bool = False,
    code: Path = ROOT,
    but: Sequence[str] = (),
    upgrade: bool = False,
) -> list[str]:
    """Compare the cells between `commit` and the tree `code`, print a row for each; returns the names of those that fail.

    but: metadata entries that are not compared. upgrade: as run_cell's.
    """
    failed = []
    with ExitStack() as stack:
        earlier = stack.enter_context(worktree(commit, folder / "code"))
        models = make_models(folder / "models", sorted({cell.family for cell in cells}))
        sides = []
        for name, tree in (("then", earlier), ("now", code)):
            # A tree of before trainer/ had floors builds a run in a file.
            run = "trainer.run.run" if (tree / "trainer" / "run").is_dir() else "trainer.run"
            server = stack.enter_context(Server(tree, [run], ENVIRONMENT, fresh=fresh))
            sides.append(Side(tree, folder / name, server))
        print(f"{'cell':<48}{'equal files':>12}{'different':>11}{'seconds':>9}", flush=True)
        for cell in cells:
            began = time.monotonic()
            try:
                equal, told = compare(cell, *run_cell(cell, sides, models, upgrade=upgrade), but)
            except Failed as error:
                equal, told = 0, [str(error)]
            print(f"{cell.name:<48}{equal:>12}{len(told):>11}{time.monotonic() - began:>9.1f}", flush=True)
            for line in told:
                print(f"    {line}", flush=True)
            failed += [cell.name] if told else []
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default=BEFORE, help="left out: %(default)s")
    parser.add_argument("--cells", metavar="PATTERN", default="*", help="fnmatch on the cells' names")
    parser.add_argument("--fresh", action="store_true", help="a new interpreter for every start")
    parser.add_argument(
        "--metadata-but", metavar="KEY", action="append", default=[], help="leave this metadata entry out; repeatable"
    )
    parser.add_argument("--upgrade", action="store_true", help="go on here from checkpoints that COMMIT wrote")
    options = parser.parse_args(arguments)
    cells = [cell for cell in CELLS if fnmatchcase(cell.name, options.cells)]
    if not cells:
        parser.error(f"--cells {options.cells} matches none of {', '.join(cell.name for cell in CELLS)}")
    if not has(options.commit):
        parser.error(f"this clone has no commit {options.commit}; a shallow one gets it by: git fetch --unshallow")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no worktree stays
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="same-bytes-") as made:
        folder, but = Path(made), options.metadata_but
        failed = prove(options.commit, cells, folder, fresh=options.fresh, but=but, upgrade=options.upgrade)
    left_out = "".join(f", metadata {key!r} not compared" for key in options.metadata_but)
    outcome = f"not the same bytes as {options.commit}: {', '.join(failed)}" if failed else f"the bytes of {options.commit}"
    print(f"\n{len(cells) - len(failed)} of {len(cells)} cells: {outcome}{left_out}; {time.monotonic() - began:.0f} s")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
