"""Averages set aside while a run goes on: ema/step-00000500.safetensors, from which any other average is made (power.py).

A file holds each of the run's averages, AVERAGE|PARAMETER, fp32. Of a DoRA also AVERAGE|LAYER.wa = W A^T [N, R] of its A: it
is linear in A, so the norm of any combination's W + s B A follows without W.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from trainer.base import files
from trainer.base.errors import UserError
from trainer.base.files import Advance, unheard
from trainer.base.run_layout import snapshot_name, snapshot_step
from trainer.base.tensorfile import TensorFile, serialize, write_tensors
from trainer.ema.power import Profile, gamma_of
from trainer.ema.running import Averages
from trainer.kernels.dora_torch import adapted_norm_of, added_product

WA = ".wa"
# Of the whole file, header included, which has UNKNOWN there while it is hashed.
DIGEST, UNKNOWN = "sha256", "0" * 64
OLDER = "it was written by an earlier version of this program, whose digest leaves out the header"


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
    write_tensors(path, tensors, fields | {DIGEST: digest_of(serialize(tensors, fields | {DIGEST: UNKNOWN}))}, advance)
    files.sync_folder(folder)
    reason = problem(path)
    if reason is not None:
        raise OSError(5, f"the averages that were set aside do not read back ({reason})", str(path))
    return path


def digest_of(pieces: Iterable[memoryview | bytes]) -> str:
    """SHA-256 of a file that is given in pieces, with UNKNOWN where its digest will be."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def problem(path: Path) -> str | None:
    """Why the file is not what was written, or None. Reads every byte."""
    try:
        file = TensorFile(path)
        said = file.metadata[DIGEST]
        with open(path, "rb") as opened:
            header = opened.read(min((entry.start for entry in file.entries.values()), default=0))
            rest = iter(partial(opened.read, files.CHUNK_BYTES), b"")
            if digest_of(chain([header.replace(said.encode(), UNKNOWN.encode(), 1)], rest)) != said:
                opened.seek(len(header))
                older = digest_of(iter(partial(opened.read, files.CHUNK_BYTES), b"")) == said
                return OLDER if older else "it does not match its SHA-256"
        step, updates, _ = (int(file.metadata[key]) for key in ("step", "updates", "epoch"))
        if step != snapshot_step(path.name) or updates <= 0:
            return "its step is not that of its name, or it is of no update"
        for name in {key.partition("|")[0] for key in file.entries}:
            gamma_of(float(name))
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

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape, by its name without the average's."""
        own = f"{self.name}|"
        return {key.removeprefix(own): entry.shape for key, entry in self.file.entries.items() if key.startswith(own)}


def read(folder: Path, upto: int) -> list[SetAside]:
    """Every average of the steps up to that one, in their order. Raises UserError where a file is damaged, or of another run.

    Of files between which every update was skipped, the last: they are the same averages.
    """
    found: dict[Profile, SetAside] = {}
    for step, path in steps(folder).items():
        if step > upto:
            break
        reason = problem(path)
        if reason == OLDER:
            raise UserError(
                f"{path} cannot be used: {reason}; make the average with that version, or move the file elsewhere to do "
                "without it"
            )
        if reason is not None:
            raise UserError(f"{path} is damaged: {reason}; restore it, or move it elsewhere to do without it")
        file = TensorFile(path)
        for name in sorted({key.partition("|")[0] for key in file.entries}):
            profile = Profile(float(name), int(file.metadata["updates"]))
            found[profile] = SetAside(file, name, profile, int(file.metadata["epoch"]))
    kinds = [each.shapes for each in found.values()]
    if odd := next((each for each, kind in zip(found.values(), kinds, strict=True) if kind != kinds[0]), None):
        raise UserError(f"{odd.file.path} has other tensors than the first file: it is of another run; move it elsewhere")
    return list(found.values())


def combined(stored: Sequence[SetAside], shares: Sequence[float]) -> dict[str, Tensor]:
    """Sum of share x average, by the names in the files, summed in fp64. A tensor of all files is read at a time."""
    sums = {}
    for key, shape in sorted(stored[0].shapes.items()):
        total = torch.zeros(shape, dtype=torch.float64)
        for each, share in zip(stored, shares, strict=True):
            total.add_(each.file.read(f"{each.name}|{key}").double(), alpha=share)
        sums[key] = total
    return sums


def adapted_norm(base_N: Tensor, wa_NR: Tensor, a_RK: Tensor, b_NR: Tensor, scaling: float) -> Tensor:
    """c = ||W + s B A||_row in fp64 [N], of ||W||_row and W A^T: the formula and the floor of the training."""
    base, a, b = (tensor.double() for tensor in (base_N, a_RK, b_NR))
    added = added_product(wa_NR.to(torch.float64, copy=True), a, b, scaling)
    return adapted_norm_of(base.square(), added, b)
