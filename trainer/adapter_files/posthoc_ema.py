"""Averages as files, after the training: the one that a checkpoint keeps, and one of any length made of those that the run
set aside (`scripts/adapter.py export` and `ema`).

Reads the folder of a run and no weight of the model: what a DoRA's files need of W is in the newest checkpoint (its row
norms) and beside the averages (W A^T).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from trainer import ema
from trainer.adapter_files.read import OpenedCheckpoint, open_checkpoint
from trainer.adapters.norms import RowNorms
from trainer.base.errors import UserError
from trainer.base.run_layout import AVERAGE, Layout
from trainer.checkpoint import store
from trainer.checkpoint.state import Saved
from trainer.ema import snapshots
from trainer.ema.power import Fit, Profile, fit, gamma_of

# Beyond it, what is made has little to do with the length that was asked for.
MOST_ERROR = 0.2


@dataclass(frozen=True)
class MadeAverage:
    """An average that was made after the training. written: by format. stored: how many averages it was made of. updates:
    that are in it."""

    written: Mapping[str, Path]
    fit: Fit
    stored: int
    step: int
    updates: int

    def lines(self) -> list[str]:
        """What was made, in lines for people."""
        off = self.fit
        return [
            *(f"{format}: {path}" for format, path in self.written.items()),
            f"an average over {self.updates} updates up to step {self.step}, made of {self.stored} that were set aside",
            f"error of the fit: {off.error:.2%} of the profile; no weight is off by more than {off.reach:.3%} of what it "
            f"ranged over in the training, and by rounding {off.rounding:.1e} of its largest size",
        ]


def averaged_checkpoint(opened: OpenedCheckpoint) -> OpenedCheckpoint | None:
    """The checkpoint with the average that its run exports; None where it keeps none.

    The norms of the averaged weights are not in it, so some of a DoRA's files cannot be made of it (`formats`).
    """
    saved = Saved.whatever(opened.folder)
    if "ema" not in saved.pieces:
        return None
    try:
        kind, decay = (saved.state("config")["ema"][key] for key in ("kind", "decay"))
        prefix = f"{next(iter(ema.weights_of(kind, decay)))}|"
    except (KeyError, TypeError, StopIteration) as error:
        raise UserError(f"{opened.folder}: what it says of its average does not fit: {error!r:.500}") from error
    averages = saved.state("ema")
    state = {key.removeprefix(prefix): tensor for key, tensor in averages.items() if key.startswith(prefix)}
    norms = {layer: replace(each, adapted=None) for layer, each in opened.norms.items()}
    return opened.instead(state, norms, replace(opened.about, average=ema.described(kind, decay)))


def average(root: Path, length: float, *, step: int | None = None, folder: Path | None = None) -> MadeAverage:
    """Write the adapter files of the average of that length up to `step` (left out: the last one that was set aside).

    root: run.output_dir. folder: for the files; left out: where the run's own are. Raises UserError for what cannot be made.
    """
    gamma_of(length)
    layout = Layout(root)
    there = snapshots.steps(layout.averages)
    if not there:
        raise UserError(
            f"{layout.averages} holds no averages: a run sets them aside with ema.kind = 'power' and ema.snapshot_every_steps"
        )
    step = max(there) if step is None else step
    if step not in there:
        raise UserError(f"--step {step}: nothing was set aside then; use one of {', '.join(map(str, there))}")
    checkpoint, passed_over = store.newest_valid(layout.checkpoints)
    if checkpoint is None:
        raise UserError(f"{layout.checkpoints} holds no valid checkpoint, which says what the adapter is: {passed_over}")
    opened = open_checkpoint(checkpoint)
    stored = snapshots.read(layout.averages, step)
    newest = stored[-1]
    found = fit([each.profile for each in stored], Profile(length, newest.profile.updates))
    if found.error > MOST_ERROR:
        raise UserError(
            f"--length {length}: the {len(stored)} averages that were set aside give it with an error of {found.error:.0%} "
            f"of the profile, and {MOST_ERROR:.0%} is the most; give a length nearer to 0.1, or set them aside more often "
            "(ema.snapshot_every_steps)"
        )
    sums = snapshots.combined(stored, found.shares)
    products = {key.removesuffix(snapshots.WA): sums.pop(key) for key in list(sums) if key.endswith(snapshots.WA)}
    state = {key: tensor.float() for key, tensor in sums.items()}
    about = replace(
        opened.about,
        step=step,
        epoch=newest.epoch,
        average=f"power function, length {length}, of {len(stored)} averages; error of the fit {found.error:.2%}",
    )
    opened.instead(state, {}, about)  # of this adapter, or it is refused
    if unknown := sorted(products.keys() - opened.norms.keys()):
        raise UserError(f"{newest.file.path} is of another adapter: {opened.folder} has no DoRA over {unknown[0]!r}")
    made = opened.instead(state, _norms(opened, state, products), about)
    # The length with a letter for its point, so that going back to an earlier step sets the file aside with the others.
    stem = f"{about.name}-{step:08d}{AVERAGE}_{str(length).replace('.', 'p')}"
    written = made.export(folder or layout.adapters, stem=stem)
    return MadeAverage(written, found, len(stored), step, newest.profile.updates)


def _norms(opened: OpenedCheckpoint, state: Mapping[str, Tensor], products: Mapping[str, Tensor]) -> dict[str, RowNorms]:
    """Of every layer of a DoRA, with c of the averaged A and B."""
    norms = dict(opened.norms)
    for layer, wa_NR in products.items():
        a, b = (state[f"{layer}.lora_{factor}.weight"].flatten(1) for factor in "AB")
        c_N = snapshots.adapted_norm(norms[layer].base, wa_NR, a, b, opened.scaling(layer))
        norms[layer] = RowNorms(norms[layer].base, norms[layer].original, c_N.float())
    return norms
