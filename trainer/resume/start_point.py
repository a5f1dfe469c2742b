"""The start of a run: fresh, or from a checkpoint."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainer import config as configs
from trainer import optim
from trainer.base import files
from trainer.base.errors import UserError, number_in
from trainer.base.progress import QUIET, Phases
from trainer.base.run_layout import Layout
from trainer.checkpoint import store
from trainer.checkpoint.state import PIECES, Piece, Progress, Saved
from trainer.config import Config, ScheduleTable, with_values
from trainer.data.batches import sampler
from trainer.plan.changes import keeps
from trainer.plan.run_plan import RunPlan
from trainer.resume.allowed_changes import Allowance
from trainer.resume.pins import MAY_CHANGE, PLACES, pin_config, refuse_changes

YEAR_9999 = 253_402_300_799  # the last Unix time with a date


def census(config: Config) -> Mapping[str, Piece]:
    """The pieces of this run's checkpoints: PIECES, and pieces that config keys require."""
    optional = {
        "ema": config.ema.kind != "none" and Piece("ema", file="ema.safetensors", asked_by="ema.kind"),
        "start": config.adapter.init_from and Piece("start", file="start.safetensors", asked_by="adapter.init_from"),
    }
    return PIECES | {name: piece for name, piece in optional.items() if piece}


def find_start(
    config: Config, resume_from: str | None, allowed: Allowance, phases: Phases = QUIET, *, planned: bool = False
) -> tuple[Saved | None, Config, list[str]]:
    """The checkpoint to resume, or None for a fresh start; the config with choices of the run's first start; and warnings.
    planned: nothing will be written, so checkpoints of this run in the output directory are only a warning. Raises UserError
    if the output directory holds another run, or the config has changes that are not allowed."""
    layout = Layout(Path(config.run.output_dir))
    output_dir = f"run.output_dir = {str(layout.root)!r}"
    folder, passed_over = store.find(layout.checkpoints, resume_from, phases)
    steps = store.steps(layout.checkpoints) or store.unnamed(layout.checkpoints)
    results = steps or layout.adapters.exists()
    if folder is not None:
        # First, as a removed key may have required a piece, which the census lacks now.
        configs.drop_removed(Saved(folder, census=None).state("config"), f"the checkpoint {folder}", MAY_CHANGE)
        saved = Saved(folder, census(config), phases)
        config = as_chosen(config, saved.state("config"))
        saved.restore(config=pin_config(config, f"the checkpoint {folder}", allowed=allowed))
        if folder.resolve().parent != layout.checkpoints.resolve() and results:
            way = "go on there with --resume_from auto, or choose another run.output_dir to branch off from that checkpoint"
            raise UserError(f"--resume_from {folder}: {output_dir} already holds a run; {way}")
        return saved, config, passed_over
    if results and not layout.config.exists():
        raise UserError(f"{output_dir} holds another run without a config.toml; choose another")
    if results:
        # A start that ended before its first checkpoint left nothing to protect: a corrected config replaces it. Whether
        # adapter files without a checkpoint are this run's depends on the config alone: nothing pins the contents of PLACES.
        may_change, way = ((*MAY_CHANGE, *PLACES), "auto") if steps else (MAY_CHANGE, "")
        was = configs.read_resolved(layout.config)
        current = configs.tree(as_chosen(config, was))
        refuse_changes(was, current, output_dir, may_change=may_change, allowed=Allowance(resume_from=way))
    remedy = "add --resume_from auto to go on, or choose another run.output_dir"
    started = f"{output_dir} already holds this run's checkpoints; {remedy}"
    if steps and not planned:
        raise UserError(started)
    return None, config, [*passed_over, started] if steps else passed_over


def fixed_levers(config: Config) -> tuple[str, ...]:
    """The names in memory.fit_by whose keys a resumed run must keep, as they change its results."""
    return tuple(name for name in config.memory.fit_by if not keeps(name, config.step))


def as_chosen(config: Config, saved: Mapping[str, Any]) -> Config:
    """The config with the choices of the run's first start for step.compile = "auto" and for memory.fit's `fixed_levers`.
    saved: the resolved config of then."""
    memory, old = config.memory, configs.flatten(saved)
    if config.step.compile == "auto":
        config = with_values(config, {"step.compile": old.get("step.compile", "none")})  # "none" in older configs
    if memory.fit is None:
        return config
    fixed, keys = fixed_levers(config), {}
    if "checkpointing" in fixed and (interval := old.get("memory.gradient_checkpointing")) is not None:
        keys["memory.gradient_checkpointing"] = interval
    if "optimizer_bits" in fixed and old.get("optimizer.name") == (name := optim.in_8_bits(config.optimizer.name)):
        keys["optimizer.name"] = name
    count, size = config.data.batch_size, old.get("data.batch_size")
    if "batch" in fixed and type(size) is int and 0 < size < count and count % size == 0:
        accumulation = config.step.accumulation * count // size
        keys |= {"data.batch_size": size, "step.accumulation": accumulation}
    return with_values(config, keys)


def set_aside_results(layout: Layout, *, name: str, after: int) -> Path | None:
    """Move the results of steps beyond `after` into a new folder, and copy the log there, which the caller cuts. Returns the
    folder, or None if there are no such results."""
    later = layout.later_results(name, after)
    if not later:
        return None
    copy = 1
    while (folder := layout.superseded(after, copy)).exists():
        copy += 1
    for path in later:
        target = folder / path.relative_to(layout.root)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)
    if layout.metrics.exists():
        files.write_atomic(folder / layout.metrics.name, [layout.metrics.read_bytes()])
    return folder


def first_progress(plan: RunPlan) -> Progress:
    """The progress of a fresh run. Raises UserError if the warm-up exceeds the schedule, whose length is frozen here."""
    # Reproducible dates: https://reproducible-builds.org/specs/source-date-epoch/
    clock = number_in("SOURCE_DATE_EPOCH", int(time.time()), most=YEAR_9999)
    started = datetime.fromtimestamp(clock, UTC).isoformat(timespec="seconds")
    length = _schedule_length(plan.config.schedule, plan.length.max_steps)
    return Progress(step=0, images=0, non_finite=0, total_steps=length, started=started)


def _schedule_length(schedule: ScheduleTable, max_steps: int) -> int:
    length = schedule.total_steps or max_steps
    remedy = "lower it, or set schedule.total_steps to the length that the run will have in the end"
    warmup, decay = (optim.steps_of(value, length) for value in (schedule.warmup, schedule.decay))
    if warmup > length:
        problem = f"schedule.warmup = {schedule.warmup} steps is longer than the schedule of {length} steps"
        raise UserError(f"{problem}: the rate would never reach optimizer.lr; {remedy}")
    if "decay" in optim.SCHEDULES[schedule.name].reads and warmup + decay > length:
        problem = f"schedule.decay = {schedule.decay} and schedule.warmup = {schedule.warmup} are {decay} + {warmup} steps"
        reason = "the fall would begin before the warm-up's end"
        raise UserError(f"{problem}, more than the schedule's {length}: {reason}; {remedy}")
    return length


def go_on(plan: RunPlan, progress: Progress, allowed: Allowance, say: Callable[[str], None]) -> RunPlan:
    """The plan from the run's progress on. Changes by --allow are recorded in it, and may end the epoch."""
    if allowed.changed:
        epoch = None
        if allowed.ends_epoch:
            epoch, index = sampler.update_at(progress.step, steps_per_epoch=allowed.steps_per_epoch, began=progress.began)
            epoch += index > 0
        lines = [line for text in allowed.changed.values() for line in text.splitlines()]
        progress.changes.append({"step": progress.step, "epoch": epoch, "what": lines})
        note = "" if epoch is None else f"; epoch {epoch + 1} begins"
        say("\n  ".join([f"changed after step {progress.step}, as --allow says{note}:", *lines]))
    elif allowed.keys:
        say(f"--allow {','.join(allowed.keys)}: nothing that needs it has changed")
    config, length = plan.config, replace(plan.length, began=progress.began)
    began, epoch = progress.began
    if config.run.epochs is not None:
        # The remaining epochs use the current photos.
        length = replace(length, max_steps=began + max(0, config.run.epochs - epoch) * length.steps_per_epoch)
    if "schedule.total_steps" in allowed.changed:
        progress.total_steps = _schedule_length(config.schedule, length.max_steps)
    elif any(key.startswith("schedule.") for key in allowed.changed):
        _schedule_length(config.schedule.model_copy(update={"total_steps": progress.total_steps}), length.max_steps)
    return replace(plan, length=length)


def check_length(
    plan: RunPlan, progress: Progress, folder: Path | None, allowed: Allowance, say: Callable[[str], None]
) -> None:
    """Raises UserError if the checkpoint is beyond the run's end, or for steps with a rate of 0 after the schedule. Warns
    if run.stop_after is reached. folder: the checkpoint's; None: a fresh start."""
    last = plan.length.max_steps
    if last < progress.step:
        beyond = f"the run's length is {last} steps, but {folder} is at step {progress.step}"
        raise UserError(f"{beyond}; raise run.max_steps or run.epochs")
    if (stop := plan.config.run.stop_after) is not None and stop <= progress.step < last:
        say(f"warning: run.stop_after = {stop}: step {progress.step} is reached, so this start trains nothing; raise it")
    way = f"; go on from the next step with {allowed.way(['schedule'])} (a fork: with --set alone)" if folder else ""
    refuse_idle_steps(plan.config.schedule, length=progress.total_steps, step=progress.step, last=last, way=way)


def refuse_idle_steps(schedule: ScheduleTable, *, length: int, step: int, last: int, way: str = "") -> None:
    """Raises UserError if any of steps `step` + 1 to `last` has a rate of 0, after the schedule's `length`. way: a remedy."""
    first = max(step, length) + 1
    constant = schedule.name == "constant" or (schedule.name == "wsd" and not optim.steps_of(schedule.decay, length))
    if schedule.end > 0 or constant or first > last:
        return
    longer = f"set schedule.total_steps = {last}" if way else "leave out schedule.total_steps"
    problem = f"schedule.name = {schedule.name!r} ends after {length} steps, and its rate is 0 from there on"
    remedies = f"set schedule.end above 0, or set schedule.name = 'constant'{way}; or train {first - 1} steps in all"
    raise UserError(f"steps {first} to {last} would train nothing: {problem}; {longer}, {remedies}")
