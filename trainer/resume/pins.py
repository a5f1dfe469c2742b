"""Pins: the settings and data that must not change on a resume. docs/resume.md has the table for users."""

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
from trainer.plan.run_plan import RunPlan
from trainer.resume.allowed_changes import PHOTOS, SHARE, Allowance, objection
from trainer.runtime.attention import OWN

# Config keys that may change on a resume, as they do not change the computation of a step. step.accumulation may if
# accumulation x processes stays (`pin_data`); the policy for non-finite values matters only where the run would have ended.
# step.attention changes the last bits: `pin_environment` compares the attention that it selects.
MAY_CHANGE = (
    "run.max_steps", "run.epochs", "run.stop_after", "run.lost_after", "run.output_dir", "model.cache_dir",
    "model.allow_distilled",
    "data.cache", "data.cache_dir", "data.cache_limit", "data.num_workers", "memory.*", "step.accumulation",
    "step.non_finite", "step.max_skipped", "step.attention", "step.graphs",
    "validation.*", "logging.*", "export.*", "checkpoint.*",
)  # fmt: skip

# Paths of photos and model. They may change, too, if a checkpoint pins the contents: `pin_data`, `pin_model`,
# `pin_quantization`, and the piece "start" for the initial adapter.
PLACES = (
    "model.path", "model.config", "model.revision", "model.variant", "model.components.*.path", "data.sources.*.path",
    "data.sources.*.references*", "data.sources.*.masks", "data.sources.*.held_out",
    "adapter.init_from", "adapter.under",
)  # fmt: skip

# Names of photos per kind of difference: in an error message, and in the run's record.
LISTED, NOTED = 500, 20

NOT_COMPILED = "nothing"  # the value in checkpoints; also the default of those without it

# Libraries that change the bytes of a step.
LIBRARIES = ("torch", "triton", "diffusers", "transformers", "peft", "accelerate", "bitsandbytes")


def pin_config(config: Config, owner: str = "the checkpoint", *, allowed: Allowance) -> Pin:
    """The pin of the resolved config, which may differ in MAY_CHANGE, PLACES and `allowed`. owner: for the message."""
    return Pin(configs.tree(config), lambda saved, current: refuse_changes(saved, current, owner, allowed=allowed))


def refuse_changes(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    owner: str,
    *,
    may_change: tuple[str, ...] = (*MAY_CHANGE, *PLACES),
    allowed: Allowance,
) -> None:
    """Record in `allowed` the changes that it permits. Raises UserError for other differences, with the remedy."""
    old, new = configs.flatten(configs.drop_removed(saved, owner, may_change)), configs.flatten(current)
    # A key newer than the saved config: its default is the behaviour without it.
    defaults = configs.known_keys()
    for key in set(map(configs.whole, new)) - set(map(configs.whole, old)):
        if (default := defaults.get(configs.generic(key))) is not None:
            old |= configs.flatten({key: default})
    refused, forbidden = {}, {}
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) == new.get(key) or any(fnmatchcase(key, pattern) for pattern in may_change):
            continue
        line = f"{key}: {old.get(key, 'absent')!r} -> {new.get(key, 'absent')!r}"
        if reason := objection(key, new.get("optimizer.name")):
            forbidden[key] = f"{line} (never: {reason})"
        elif allowed.permits(key):
            allowed.changed[key] = line
        else:
            refused[key] = line
    if not refused and not forbidden:
        return
    listing = "\n".join([*forbidden.values(), *refused.values()])
    ways = ["restore these keys", "choose another run.output_dir"]
    if refused and allowed.resume_from:
        only = f"what may change ({', '.join(refused)})" if forbidden else "them"
        ways.insert(1, f"go on with {only} from the next step: {allowed.way(refused)}")
    raise UserError(f"{owner} belongs to a run with another config:\n{listing}\n{', or '.join(ways)}")


def pin_data(plan: RunPlan, *, accumulation: int, allowed: Allowance) -> Pin:
    """The pin of the data: other photos or another global batch change the samples of every later step. accumulation: before
    `share_out`."""
    digests, photos = identity.fingerprint(plan.data.examples), identity.photo_digests(plan.data.examples)
    samples, micro_batches = len(plan.data.photos), plan.config.step.accumulation * plan.length.processes
    counts = {"samples": samples, "micro_batches": micro_batches, "steps_per_epoch": plan.length.steps_per_epoch}

    def check(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
        old = {name: saved[name] for name in counts}
        if not all(type(count) is int and 0 < count < 2**53 for count in old.values()):
            raise ValueError(f"counts are {old}")
        allowed.steps_per_epoch = old["steps_per_epoch"]
        changed = sorted(n for n in digests.keys() | saved["digests"].keys() if saved["digests"].get(n) != digests.get(n))
        if changed:
            differences = identity.differences({n: t for n, t in saved.items() if isinstance(t, torch.Tensor)}, photos)
            _other_photos(differences, changed, f"{old['samples']} photos then, {samples} now", allowed)
        if old["micro_batches"] != micro_batches:
            count = old["micro_batches"]
            if not allowed.permits(SHARE):
                raise UserError(
                    f"an update had {count} micro-batches (step.accumulation x processes), now it has {micro_batches}; "
                    f"change step.accumulation to match, with {_parts(count)} processes, or end the present epoch here and "
                    f"go on with as many: {allowed.way([SHARE])}"
                )
            allowed.changed[SHARE] = f"micro-batches in an update: {count} -> {micro_batches}"

    return Pin({"digests": digests, **counts, "accumulation": accumulation, **photos}, check)


def share_out(config: Config, saved: Saved, processes: int, allowed: Allowance, say: Callable[[str], None]) -> Config:
    """The config with the accumulation that keeps the checkpoint's update size with this number of processes. Raises
    UserError if the micro-batches cannot be divided evenly. A step.accumulation changed since is left to `pin_data`."""
    data, accumulation = saved.values("data"), config.step.accumulation
    count, before = data.get("micro_batches"), data.get("accumulation")
    if count == accumulation * processes or before != accumulation or allowed.permits(SHARE) or type(count) is not int:
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
    """The numbers of processes that can share `count` micro-batches evenly, in words."""
    *less, most = [str(number) for number in range(1, count + 1) if count % number == 0]
    return f"{', '.join(less)} or {most}" if less else most


def _other_photos(unlike: Mapping[str, list[str]], changed: list[str], counts: str, allowed: Allowance) -> None:
    """Allow or refuse other photos. unlike: kind of difference -> names. changed: names of digests that differ."""
    # If only settings of the photos differ, they follow from keys that were allowed to change.
    of_files = unlike.keys() & {"added", "removed", "other contents", "other captions"}
    if allowed.permits(PHOTOS) or (not of_files and any(key.startswith(f"{PHOTOS}.") for key in allowed.changed)):
        lines = [f"{kind}: {shortlist(names, NOTED)}" for kind, names in unlike.items()] or [f"other: {', '.join(changed)}"]
        allowed.changed[PHOTOS] = "\n".join([f"photos: {counts}", *lines])
        return
    listed = [f"{kind}: {printable(name)}" for kind, names in unlike.items() for name in names[:LISTED]]
    listed += [f"{kind}: and {len(names) - LISTED} more" for kind, names in unlike.items() if len(names) > LISTED]
    listing = "\n".join(listed or [f"other {', other '.join(changed)}"])
    ways = f", or end the present epoch here and start a new one over these: {allowed.way([PHOTOS])}"
    ways += ", or start a new run (another run.output_dir)"
    # A later version may leave out files that an earlier one trained: thumbnails, samples, masks.
    note = " (--plan names what is left out now, and why; the version that began the run still trains it)"
    restore = f"restore them{note if 'removed' in unlike else ''}{ways if allowed.resume_from else ''}"
    raise UserError(f"the data are not those of the checkpoint ({counts}):\n{listing}\n{restore}")


def pin_model(digests: Mapping[str, str], *, cached: Collection[str] = (), snapshots: Path | None = None) -> Pin:
    """The pin of the model. digests: ModelSource.contents (the tensors are in `pin_quantization`). cached: components whose
    digest covers their files, too. snapshots: the hub cache's folder of a hub id."""
    words = {"scheduler": "scheduler_config.json", "markers": "marker tensors of the objective", "tokenizers": "tokenizers"}
    words |= {"variant": "variant (model.variant says which)", "under": "adapter below (adapter.under)"}
    words |= {name: f"{name} (its files or its config.json)" for name in cached}

    def check(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
        changed = sorted(name for name in saved.keys() | current.keys() if saved.get(name) != current.get(name))
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
    """The pin of the frozen weights. record: format and SHA-256 of every frozen tensor (quantization/record.py). snapshots:
    the hub cache's folder of a hub id."""

    def check(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
        for name in sorted(saved.keys() | current.keys()):
            if difference := _difference(saved.get(name), current.get(name)):
                differs = f"the checkpoint's frozen base differs: {name} {difference}; restore it, or start a new run"
                raise UserError(differs + _earlier(snapshots))

    return Pin(record, check)


def _difference(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> str:
    """The change of a tensor's record, in words; "" for none. Another library version with equal bytes is none."""
    if new is None:
        return "is not there now"
    if old is None:
        return "was not there then"
    # relative_error is not compared: its sums depend on the device.
    changed = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)} - {"library", "relative_error"}
    if not changed:
        return ""
    if "format" in changed:
        return f"is stored as {old.get('format')} in the checkpoint, as {new.get('format')} now"
    old_library, new_library = old.get("library"), new.get("library")
    if old_library == new_library:
        return "has other bytes now: the model's file changed"
    return f"has other bytes now: the model's file or the library changed ({old_library} then, {new_library} now)"


def pin_environment(
    config: Config, device: torch.device, *, kernels: str, attention: str, processes: int, say: Callable[[str], None]
) -> Pin:
    """The pin of everything here that may change the last bits of later steps: a difference is a warning, and an error under
    run.deterministic. kernels, attention: names. processes: their number."""

    def check(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
        saved = {"attention": OWN, "compiled": NOT_COMPILED} | dict(saved)  # defaults of older checkpoints
        changed = [f"{name}: {saved.get(name)} -> {value}" for name, value in current.items() if saved.get(name) != value]
        other = f"another environment than the checkpoint's: {'; '.join(changed)}"
        if changed and config.run.deterministic:
            raise UserError(f"run.deterministic = true, and this is {other}; restore it, or start a new run")
        if changed:
            say(f"warning: {other}. State and draws are the same; later steps may differ in their last bits")

    if device.type == "cuda":
        workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "by default")  # selects cuBLAS's algorithms
        name = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, cuBLAS workspace {workspace}"
    else:
        name = f"{device.type} with {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    compiled = NOT_COMPILED
    if config.step.compile != "none":  # in compiled blocks alone, recomputation changes the sums
        compiled = f"blocks, gradient_checkpointing = {config.memory.gradient_checkpointing}"
    choices = {"device": name, "kernels": kernels, "attention": attention, "compiled": compiled, "processes": processes}
    return Pin({**versions(config.optimizer.name), **choices}, check)


def versions(optimizer: str) -> dict[str, str]:
    """The versions of the libraries that compute a step. optimizer: its name in the table."""
    package = optim.options.library_of(optimizer).partition(".")[0]
    return {library: _version(library) for library in dict.fromkeys((*LIBRARIES, package))}


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:  # e.g. triton, which only CUDA builds of torch have
        return "not installed"
