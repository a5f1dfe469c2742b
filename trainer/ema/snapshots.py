"""Averages set aside while a run goes on: ema/step-00000500.safetensors, from which any other average is made (power.py).

A file holds each of the run's averages, AVERAGE|PARAMETER, fp32. Of a DoRA also AVERAGE|LAYER.wa = W A^T [N, R] of its A: it
is linear in A, so the norm of any combination's W + s B A follows without W.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainer import files
from trainer.ema.power import Profile
from trainer.ema.running import Averages
from trainer.errors import UserError
from trainer.files import Advance, unheard
from trainer.kernels.dora_torch import adapted_norm_of, added_product
from trainer.layout import snapshot_name, snapshot_step
from trainer.tensorfile import TensorFile, serialize, write_tensors

WA = ".wa"


def write(
    folder: Path, step: int, epoch: int, averages: Averages, products: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
    advance: Advance = unheard,
) -> Path:  # fmt: skip
    """Write the step's file, read it back, and return its path; one that is there and whole stays.

    products: of an average by its parameters' names, W A^T by the layers' names; none of a LoRA.
    Raises OSError where it could not be written, or does not read back.
    """
    path = folder / snapshot_name(step)
    if path.exists() and problem(path) is None:
        return path
    files.make_folder(folder)
    tensors: dict[str, Tensor] = {}
    for name in averages.kept:
        own = averages.of(name)
        tensors |= {f"{name}|{key}": tensor for key, tensor in own.items()}
        tensors |= {f"{name}|{layer}{WA}": product for layer, product in products(own).items()}
    fields = {"step": str(step), "epoch": str(epoch), "updates": str(averages.updates)}
    write_tensors(path, tensors, fields | {"sha256": _digest(serialize(tensors))}, advance)
    files.sync_folder(folder)
    reason = problem(path)
    if reason is not None:
        raise OSError(5, f"the averages that were set aside do not read back ({reason})", str(path))
    return path


def _digest(pieces: Iterable[memoryview | bytes]) -> str:
    """Of the tensors: everything behind the header."""
    digest, pieces = hashlib.sha256(), iter(pieces)
    next(pieces)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def problem(path: Path) -> str | None:
    """Why the file is not what was written, or None. Reads every byte."""
    try:
        file = TensorFile(path)
        start = min((entry.start for entry in file.entries.values()), default=0)
        digest = hashlib.sha256()
        with open(path, "rb", buffering=0) as opened:
            opened.seek(start)
            while piece := opened.read(files.CHUNK_BYTES):
                digest.update(piece)
        if digest.hexdigest() != file.metadata["sha256"]:
            return "it does not match its SHA-256"
        if not (int(file.metadata["step"]) == snapshot_step(path.name) and int(file.metadata["updates"]) > 0):
            return "its step is not that of its name, or it is of no update"
    except (UserError, OSError, KeyError, ValueError) as error:
        return f"it cannot be read ({error})"
    return None


def steps(folder: Path) -> dict[int, Path]:
    """The files that are there, by step, ascending."""
    there = folder.iterdir() if folder.is_dir() else ()
    return dict(sorted((step, path) for path in there if (step := snapshot_step(path.name)) is not None))


def remove_after(folder: Path, step: int) -> None:
    """Delete those of later steps: a killed start made them after its last checkpoint, and they are made again."""
    for later, path in steps(folder).items():
        if later > step:
            os.unlink(path)


@dataclass(frozen=True)
class SetAside:
    """One average in one file."""

    file: TensorFile
    name: str
    profile: Profile
    epoch: int


def read(folder: Path, upto: int) -> list[SetAside]:
    """Every average of the steps up to that one, in their order. Raises UserError where a file is damaged.

    Of files between which every update was skipped, the last: they are the same averages.
    """
    found: dict[Profile, SetAside] = {}
    for step, path in steps(folder).items():
        if step > upto:
            break
        reason = problem(path)
        if reason is not None:
            raise UserError(f"{path} is damaged: {reason}; restore it, or move it elsewhere to do without it")
        file = TensorFile(path)
        for name in sorted({key.partition("|")[0] for key in file.entries}):
            profile = Profile(float(name), int(file.metadata["updates"]))
            found[profile] = SetAside(file, name, profile, int(file.metadata["epoch"]))
    return list(found.values())


def combined(stored: Sequence[SetAside], shares: Sequence[float]) -> dict[str, Tensor]:
    """Sum of share x average, by the names in the files, summed in fp64. A tensor of all files is read at a time."""
    keys = sorted(key.partition("|")[2] for key in stored[0].file.entries if key.startswith(f"{stored[0].name}|"))
    sums = {}
    for key in keys:
        total = torch.zeros(stored[0].file.entries[f"{stored[0].name}|{key}"].shape, dtype=torch.float64)
        for each, share in zip(stored, shares, strict=True):
            total.add_(each.file.read(f"{each.name}|{key}").double(), alpha=share)
        sums[key] = total
    return sums


def adapted_norm(base_N: Tensor, wa_NR: Tensor, a_RK: Tensor, b_NR: Tensor, scaling: float) -> Tensor:
    """c = ||W + s B A||_row in fp64 [N], of ||W||_row and W A^T: the formula and the floor of the training."""
    base, a, b = (tensor.double() for tensor in (base_N, a_RK, b_NR))
    added = added_product(wa_NR.to(torch.float64, copy=True), a, b, scaling)
    return adapted_norm_of(base.square(), added, b)
