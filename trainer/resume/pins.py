"""What must not have changed since a run stopped. The table for people is in docs/resume.md."""

import os
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from trainer import config as configs
from trainer import optim
from trainer.base.console import printable, shortlist
from trainer.base.errors import UserError
from trainer.checkpoint.state import Pin, Saved
from trainer.config import Config, with_values
from trainer.data import identity
from trainer.resume.allowed_changes import PHOTOS, SHARE, Allowance, never
from trainer.runtime.attention import OWN

# A run may go on under a config that differs in these keys and in no others: none of them changes what a step computes.
# step.accumulation may as far as accumulation x processes stays (`pin_data`); the policy for values that are not finite
# matters only where the run would have ended. step.attention changes the last bits: `pin_environment` compares what it comes
# to.
MAY_CHANGE = (
    "run.max_steps", "run.epochs", "run.stop_after", "run.lost_after", "run.output_dir", "model.cache_dir",
    "model.allow_distilled",
    "data.cache", "data.cache_dir", "data.cache_limit", "data.num_workers", "memory.*", "step.accumulation",
    "step.non_finite", "step.max_skipped", "step.attention", "step.graphs",
    "validation.*", "logging.*", "export.*", "checkpoint.*",
)  # fmt: skip

# Where photos and model lie. It may change, too, where a checkpoint pins what lies there: `pin_data`, `pin_model`,
# `pin_quantization`; what an adapter started from is pinned by the piece "start".
PLACES = (
    "model.path", "model.config", "model.revision", "model.variant", "model.components.*.path", "data.sources.*.path",
    "data.sources.*.references*", "data.sources.*.masks", "data.sources.*.held_out",
    "adapter.init_from", "adapter.under",
)  # fmt: skip

# Names of photos that a refusal lists for each way to differ, and that the run's record keeps.
LISTED, NOTED = 500, 20

NOT_COMPILED = "nothing"  # as checkpoints have it, and those mean that say nothing

# What else the bytes of a step depend on.
LIBRARIES = ("torch", "triton", "diffusers", "transformers", "peft", "accelerate", "bitsandbytes")


def pin_config(config: Config, what: str = "the checkpoint", *, allowed: Allowance) -> Pin:
    """The resolved config: it may differ in MAY_CHANGE and PLACES, and in what is `allowed`."""
    return Pin(configs.tree(config), lambda saved, now: refuse_changes(saved, now, what, allowed=allowed))


def refuse_changes(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    what: str,
    *,
    may_change: tuple[str, ...] = (*MAY_CHANGE, *PLACES),
    allowed: Allowance,
) -> None:
    """Note in `allowed` what it permits. Raises UserError for all else that differs, with the way to permit it."""
    old, new = configs.flatten(configs.drop_removed(saved, what, may_change)), configs.flatten(now)
    # A key that there was not yet: its default is what the run did without it.
    defaults = configs.known_keys()
    for key in set(map(configs.whole, new)) - set(map(configs.whole, old)):
        if (default := defaults.get(configs.generic(key))) is not None:
            old |= configs.flatten({key: default})
    refused, lost = {}, {}
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) == new.get(key) or any(fnmatchcase(key, pattern) for pattern in may_change):
            continue
        line = f"{key}: {old.get(key, 'absent')!r} -> {new.get(key, 'absent')!r}"
        if reason := never(key, new.get("optimizer.name")):
            lost[key] = f"{line} (never: {reason})"
        elif allowed.permits(key):
            allowed.changed[key] = line
        else:
            refused[key] = line
    if not refused and not lost:
        return
    listing = "\n".join([*lost.values(), *refused.values()])
    ways = ["restore these keys", "choose another run.output_dir"]
    if refused and allowed.resume_from:
        only = f"what may change ({', '.join(refused)})" if lost else "them"
        ways.insert(1, f"go on with {only} from the next step: {allowed.way(refused)}")
    raise UserError(f"{what} belongs to a run with another config:\n{listing}\n{', or '.join(ways)}")


def pin_data(
    *,
    digests: Mapping[str, str],
    photos: Mapping[str, torch.Tensor],
    samples: int,
    micro_batches: int,
    accumulation: int,
    steps_per_epoch: int,
    allowed: Allowance,
) -> Pin:
    """Other photos or another global batch would show every later step other samples.

    digests: of all that decides what a step sees, by name; photos: of every photo (identity.py). micro_batches: in an update,
    over all processes. accumulation: as the config gives it, for `share_out`.
    """
    counts = {"samples": samples, "micro_batches": micro_batches, "steps_per_epoch": steps_per_epoch}

    def check(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        then = {name: saved[name] for name in counts}
        if not all(type(count) is int and 0 < count < 2**53 for count in then.values()):
            raise ValueError(f"counts are {then}")
        allowed.steps_per_epoch = then["steps_per_epoch"]
        changed = sorted(n for n in digests.keys() | saved["digests"].keys() if saved["digests"].get(n) != digests.get(n))
        if changed:
            differences = identity.differences({n: t for n, t in saved.items() if isinstance(t, torch.Tensor)}, photos)
            _other_photos(differences, changed, f"{then['samples']} photos then, {samples} now", allowed)
        if then["micro_batches"] != micro_batches:
            was = then["micro_batches"]
            if not allowed.permits(SHARE):
                raise UserError(
                    f"an update had {was} micro-batches (step.accumulation x processes), now it has {micro_batches}; change "
                    f"step.accumulation to match, with {_parts(was)} processes, or end the present epoch here and go on with "
                    f"as many: {allowed.way([SHARE])}"
                )
            allowed.changed[SHARE] = f"micro-batches in an update: {was} -> {micro_batches}"

    return Pin({"digests": digests, **counts, "accumulation": accumulation, **photos}, check)


def share_out(config: Config, saved: Saved, processes: int, allowed: Allowance, say: Callable[[str], None]) -> Config:
    """The config with the accumulation that keeps the checkpoint's update over this number of processes. Raises UserError
    where it cannot be shared out evenly. A step.accumulation that was changed since is left to `pin_data`."""
    then, accumulation = saved.values("data"), config.step.accumulation
    count, given = then.get("micro_batches"), then.get("accumulation")
    if count == accumulation * processes or given != accumulation or allowed.permits(SHARE) or type(count) is not int:
        return config
    images = f"of data.batch_size = {config.data.batch_size}"
    if count % processes:
        raise UserError(
            f"an update has {count} micro-batches {images}, which {processes} processes cannot share evenly; start "
            f"{_parts(count)} processes, or end the present epoch here and go on with another update: {allowed.way([SHARE])}"
        )
    part = count // processes
    say(
        f"step.accumulation: {accumulation} -> {part}: an update keeps its {count} micro-batches {images}, shared by "
        f"{processes} {'processes' if processes > 1 else 'process'}"
    )
    return with_values(config, {"step.accumulation": part})


def _parts(count: int) -> str:
    """The numbers of processes that can share so many micro-batches, to be said."""
    *less, most = [str(number) for number in range(1, count + 1) if count % number == 0]
    return f"{', '.join(less)} or {most}" if less else most


def _other_photos(unlike: Mapping[str, list[str]], changed: list[str], counts: str, allowed: Allowance) -> None:
    """unlike: how photos differ -> which. changed: what differs of all of them together."""
    # Where only their settings differ, the keys that were allowed to change say why.
    of_files = unlike.keys() & {"added", "removed", "other contents", "other captions"}
    if allowed.permits(PHOTOS) or (not of_files and any(key.startswith(f"{PHOTOS}.") for key in allowed.changed)):
        lines = [f"{how}: {shortlist(names, NOTED)}" for how, names in unlike.items()] or [f"other: {', '.join(changed)}"]
        allowed.changed[PHOTOS] = "\n".join([f"photos: {counts}", *lines])
        return
    listed = [f"{how}: {printable(name)}" for how, names in unlike.items() for name in names[:LISTED]]
    listed += [f"{how}: and {len(names) - LISTED} more" for how, names in unlike.items() if len(names) > LISTED]
    listing = "\n".join(listed or [f"other {', other '.join(changed)}"])
    ways = f", or end the present epoch here and start a new one over these: {allowed.way([PHOTOS])}"
    ways += ", or start a new run (another run.output_dir)"
    # A later version may leave out what an earlier one trained: thumbnails, samples, masks.
    why = " (--plan names what is left out now, and why; the version that began the run still trains it)"
    restore = f"restore them{why if 'removed' in unlike else ''}{ways if allowed.resume_from else ''}"
    raise UserError(f"the data are not those of the checkpoint ({counts}):\n{listing}\n{restore}")


def pin_model(digests: Mapping[str, str], *, cached: Collection[str] = (), snapshots: Path | None = None) -> Pin:
    """The pin of the model. digests: ModelSource.contents, what the model's files decide besides the tensors in
    `pin_quantization`. cached: components whose digest is of their files too. snapshots: of a hub id, the cache's folder."""
    words = {"scheduler": "scheduler_config.json", "markers": "marker tensors of the objective", "tokenizers": "tokenizers"}
    words |= {"variant": "variant (model.variant says which)", "under": "adapter below (adapter.under)"}
    words |= {name: f"{name} (its files or its config.json)" for name in cached}

    def check(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        changed = sorted(name for name in saved.keys() | now.keys() if saved.get(name) != now.get(name))
        if changed:
            texts = [words.get(name, f"config.json of {name}") for name in changed]
            raise UserError(
                f"the model is not that of the checkpoint: other {', other '.join(texts)} (by contents, wherever they lie); "
                "restore it, or start a new run (another run.output_dir)" + _earlier(snapshots)
            )

    return Pin(digests, check)


def _earlier(snapshots: Path | None) -> str:
    if snapshots is None:
        return ""
    return f"\nthe earlier files may still be in the hub's cache: set model.path to their snapshot folder in {snapshots}"


def pin_quantization(record: Mapping[str, Any], *, snapshots: Path | None = None) -> Pin:
    """The pin of the frozen weights. record: every frozen tensor's format and SHA-256 (quantization/record.py). snapshots:
    of a hub id, the cache's folder of them."""

    def check(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        for name in sorted(saved.keys() | now.keys()):
            if how := _difference(saved.get(name), now.get(name)):
                differs = f"the checkpoint's frozen base differs: {name} {how}; restore it, or start a new run"
                raise UserError(differs + _earlier(snapshots))

    return Pin(record, check)


def _difference(saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> str:
    """The change of a tensor's record, in words; "" for none. Another library version is none where it gives equal bytes."""
    if now is None:
        return "is not there now"
    if saved is None:
        return "was not there then"
    # The error is measured, not compared: its sums depend on the device.
    odd = {key for key in saved.keys() | now.keys() if saved.get(key) != now.get(key)} - {"library", "relative_error"}
    if not odd:
        return ""
    if "format" in odd:
        return f"is stored as {saved.get('format')} in the checkpoint, as {now.get('format')} now"
    then, today = saved.get("library"), now.get("library")
    if then == today:
        return "has other bytes now: the model's file changed"
    return f"has other bytes now: the model's file or the library changed ({then} then, {today} now)"


def pin_environment(
    device: torch.device, optimizer: str, choices: Mapping[str, Any], *, deterministic: bool, say: Callable[[str], None]
) -> Pin:
    """Libraries, device, and what else was chosen there. optimizer: its name in the table. choices: "kernels" and "attention"
    by name, "processes", their number, and "compiled", what of a step is, or NOT_COMPILED. Where they differ, later steps may
    differ in their last bits: said, and refused under `run.deterministic`."""

    def check(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        saved = {"attention": OWN, "compiled": NOT_COMPILED} | dict(saved)  # before there was a choice
        changed = [f"{name}: {saved.get(name)} -> {value}" for name, value in now.items() if saved.get(name) != value]
        other = f"another environment than the checkpoint's: {'; '.join(changed)}"
        if changed and deterministic:
            raise UserError(f"run.deterministic = true, and this is {other}; restore it, or start a new run")
        if changed:
            say(f"warning: {other}. State and draws are the same; later steps may differ in their last bits")

    if device.type == "cuda":
        workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "by default")  # decides between cuBLAS's algorithms
        name = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, cuBLAS workspace {workspace}"
    else:
        name = f"{device.type} with {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    return Pin({**versions(optimizer), "device": name, **choices}, check)


def versions(optimizer: str) -> dict[str, str]:
    """The versions of the libraries that a step is computed by. optimizer: its name in the table."""
    package = optim.options.library_of(optimizer).partition(".")[0]
    return {library: _version(library) for library in dict.fromkeys((*LIBRARIES, package))}


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:  # triton comes with CUDA builds of torch only
        return "not installed"
