"""--allow: what a run is pinned to and may have another value from its next step on; and what never can."""

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
# With another value of these, other photos come next: the present epoch ends.
ORDER = ("run.seed", "data.batch_size", "data.short_batches")
# Under another value of these a loss measures something else: that of a step, and that at fixed draws (held_out_loss.py),
# which has neither weights nor a range of times. objective.stratified only spreads the times more evenly.
FIXED_LOSS = (
    "objective.guidance", "data.resolution*", "data.sources.*.resolution*", "data.bucket_step", "data.max_aspect",
    "data.crop", "data.enlarge", "data.background", "data.text_length", "data.clip_chunks", "data.weighted_captions",
)  # fmt: skip
LOSS = (
    "objective.[!s]*", "objective.shift", "photos", *FIXED_LOSS, "data.sources.*", "data.masks", "data.unmasked_weight",
    "data.caption_dropout", "data.caption_variants", "data.crop_jitter", "data.colour_jitter", "data.flip",
)  # fmt: skip
PHOTOS, SHARE = "data", "step.accumulation"  # what allows other photos, and another number of micro-batches


@dataclass
class Allowance:
    """What may differ from the checkpoint. keys: as --allow gives them: keys or tables. resume_from: as given, or "" where a
    checkpoint cannot help. changed: by key, a line that says from what to what. steps_per_epoch: at the checkpoint."""

    keys: tuple[str, ...] = ()
    resume_from: str = "auto"
    changed: dict[str, str] = field(default_factory=dict)
    steps_per_epoch: int = 0

    @property
    def ends_epoch(self) -> bool:
        """Whether the changes begin a new epoch: photos, or their order, are others."""
        return any(key in ORDER or key in (PHOTOS, SHARE) for key in self.changed)

    def permits(self, key: str) -> bool:
        """Whether --allow names the key, or a table that it is in."""
        return any(key == given or key.startswith(f"{given}.") for given in self.keys)

    def way(self, needed: Iterable[str]) -> str:
        """The arguments that allow these keys."""
        given = {PHOTOS if key.startswith(f"{PHOTOS}.") else _whole(key) for key in needed}
        return f"--resume_from {self.resume_from} --allow {','.join(sorted({*self.keys, *given}))}"


def parse(allow: str | None, resume_from: str | None) -> Allowance:
    """The allowance that the command line's texts mean. Raises UserError for a key that there is not, and where nothing is
    resumed."""
    if allow is None:
        return Allowance(resume_from=resume_from or "auto")
    if resume_from is None:
        raise UserError(f"--allow {allow}: it goes with --resume_from; a fresh start takes the config as it is")
    keys = tuple(dict.fromkeys(key.strip() for key in allow.split(",") if key.strip()))
    if not keys:
        raise UserError("--allow names no key; write it as --allow optimizer.lr,schedule")
    known = configs.known_keys()
    for key in keys:
        if configs.generic(key) not in known and not any(name.startswith(f"{configs.generic(key)}.") for name in known):
            raise UserError(f"--allow {key}: unknown key; {configs.hint(key)}")
    return Allowance(keys, resume_from)


def never(key: str, optimizer: str | None = None) -> str:
    """Why this key of the config can never change in mid-run; "" where it can. optimizer: the name of the run's."""
    if fnmatchcase(key, "optimizer.betas*") and optimizer in OPTIMIZERS and OPTIMIZERS[optimizer].modes:
        return "the weights for use follow from them and from what was trained so far"
    return next((reason for pattern, reason in NEVER.items() if fnmatchcase(key, pattern)), "")


def noted(changes: Iterable[Mapping[str, Any]], patterns: Sequence[str], after: int | None = None) -> list[str]:
    """Lines of what --allow changed of these keys. changes: Progress.changes. after: this step; None: whenever."""
    lines = [line for change in changes if after in (None, change["step"]) for line in change["what"]]
    return [line for line in lines if any(fnmatchcase(line.partition(":")[0], pattern) for pattern in patterns)]


def _whole(key: str) -> str:
    """The key itself, where `flatten` added the place in its list."""
    return key if configs.generic(key) in configs.known_keys() else key.rpartition(".")[0]
