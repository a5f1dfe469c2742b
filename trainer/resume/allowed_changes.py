"""--allow: which keys may change when a run is resumed, and which never can."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from trainer import config as configs
from trainer.base.errors import UserError
from trainer.optim import OPTIMIZERS

# Key pattern -> why the key must not change on resume. The first match wins; an empty reason, or no match, allows it.
SHAPE, MODEL = "the saved adapter would not fit, or would mean another change", "the adapter was trained on that model"
NEVER = {
    **dict.fromkeys(("adapter.dropout", "adapter.module_dropout", "adapter.rank_dropout", "adapter.kernels"), ""),
    **dict.fromkeys(("adapter.max_norm", *(f"adapter.rules.*.{key}" for key in ("lr", "stop_step", "weight_decay"))), ""),
    "adapter.*": SHAPE,
    "model.*": MODEL,
    "precision.*": "the saved state was computed so",
    "vae.*": "the adapter was trained on these latents",
    "ema.kind": "an average is of all updates of a run",
    "optimizer.name": "its saved state would not fit",
    "optimizer.options*": "its saved state follows from them",
    "data.cache_text": "which text encoders are loaded, and compared with the checkpoint's, follows from it",
}
# A change of these changes the next photos, and so ends the current epoch.
ORDER = ("run.seed", "data.batch_size", "data.short_batches")
# A change of these makes losses incomparable: LOSS that of a step, FIXED_LOSS that at fixed draws (held_out_loss.py), which
# has neither weights nor a range of times. objective.stratified only spreads the times more evenly.
FIXED_LOSS = (
    "objective.guidance", "data.resolution*", "data.sources.*.resolution*", "data.bucket_step", "data.max_aspect",
    "data.crop", "data.enlarge", "data.background", "data.text_length", "data.clip_chunks", "data.weighted_captions",
)  # fmt: skip
LOSS = (
    "objective.[!s]*", "objective.shift", "photos", *FIXED_LOSS, "data.sources.*", "data.masks", "data.unmasked_weight",
    "data.caption_dropout", "data.caption_variants", "data.crop_jitter", "data.colour_jitter", "data.flip",
)  # fmt: skip
PHOTOS, SHARE = "data", "step.accumulation"  # --allow names of other photos, and of another number of micro-batches


@dataclass
class Allowance:
    """The permitted differences from a checkpoint. keys: the keys or tables of --allow. resume_from: the option, or "" if no
    checkpoint is involved. changed: text of each change by key. steps_per_epoch: at the checkpoint."""

    keys: tuple[str, ...] = ()
    resume_from: str = "auto"
    changed: dict[str, str] = field(default_factory=dict)
    steps_per_epoch: int = 0

    @property
    def ends_epoch(self) -> bool:
        """Whether the changes begin a new epoch, as they change photos or their order."""
        return any(key in ORDER or key in (PHOTOS, SHARE) for key in self.changed)

    def permits(self, key: str) -> bool:
        """Whether --allow names the key or a table around it."""
        return any(key == table or key.startswith(f"{table}.") for table in self.keys)

    def way(self, changed_keys: Iterable[str]) -> str:
        """The command-line arguments that allow these changes."""
        names = {PHOTOS if key.startswith(f"{PHOTOS}.") else _whole(key) for key in changed_keys}
        return f"--resume_from {self.resume_from} --allow {','.join(sorted({*self.keys, *names}))}"


def parse(allow: str | None, resume_from: str | None) -> Allowance:
    """The allowance of the command line's texts. Raises UserError for unknown keys, and without --resume_from."""
    if allow is None:
        return Allowance(resume_from=resume_from or "auto")
    if resume_from is None:
        raise UserError(f"--allow {allow}: it goes with --resume_from; a fresh start takes the config as it is")
    keys = tuple(dict.fromkeys(key.strip() for key in allow.split(",") if key.strip()))
    if not keys:
        raise UserError("--allow names no key; write it as --allow optimizer.lr,schedule")
    schema = configs.known_keys()
    for key in keys:
        if configs.generic(key) not in schema and not any(name.startswith(f"{configs.generic(key)}.") for name in schema):
            raise UserError(f"--allow {key}: unknown key; {configs.hint(key)}")
    return Allowance(keys, resume_from)


def objection(key: str, optimizer: str | None = None) -> str:
    """The reason why this config key can never change on resume; "" if it can. optimizer: the name of the run's."""
    if fnmatchcase(key, "optimizer.betas*") and optimizer in OPTIMIZERS and OPTIMIZERS[optimizer].modes:
        return "the weights for use follow from them and from what was trained so far"
    return next((reason for pattern, reason in NEVER.items() if fnmatchcase(key, pattern)), "")


def change_lines(changes: Iterable[Mapping[str, Any]], patterns: Sequence[str], after: int | None = None) -> list[str]:
    """The lines of --allow's changes of keys that match. changes: Progress.changes. after: the step before; None: any."""
    lines = [line for change in changes if after in (None, change["step"]) for line in change["what"]]
    return [line for line in lines if any(fnmatchcase(line.partition(":")[0], pattern) for pattern in patterns)]


def _whole(key: str) -> str:
    """The key without the list index that `flatten` adds."""
    return key if configs.generic(key) in configs.known_keys() else key.rpartition(".")[0]
