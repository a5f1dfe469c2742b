"""Repeats logged steps from a checkpoint, one by one: in the run's own precision and in fp64.

The run's files are only read. Photos and captions are encoded anew, in memory: a wrong cache of the run is detected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from trainer import config as configs
from trainer.artifacts.ports import Ports
from trainer.base.errors import UserError
from trainer.base.progress import Phases
from trainer.base.run_layout import Layout
from trainer.base.types import Occurrence
from trainer.checkpoint import store
from trainer.checkpoint.state import Saved
from trainer.config import Config
from trainer.data.batches.loader import Reader
from trainer.data.batches.sampler import MicroBatch
from trainer.engine.assembly import TrainState
from trainer.engine.components import Components
from trainer.engine.encoding import encode
from trainer.monitoring import metrics
from trainer.plan.data_sources import cache_dir, open_cache
from trainer.plan.run_plan import RunPlan, fetched
from trainer.resume.allowed_changes import Allowance
from trainer.resume.pins import pin_environment
from trainer.run.run import build_components, build_state
from trainer.run.session import Session
from trainer.run.setup import Launch, begin, choose_attention, updates_of
from trainer.runtime.context import RunContext
from trainer.runtime.device import Memory
from workbench.adapter_files import start
from workbench.hub import hub
from workbench.planning import fitting
from workbench.replay.exact import computing_exactly
from workbench.replay.formulas import Snapshot, Update, Updates
from workbench.replay.judged import Judge, JudgedStep, RecordingStep, RepeatedStep, recording
from workbench.sources import LAYOUTS

Logged = tuple[float | None, float | None]  # (loss, gradient norm); None: not finite


@dataclass(frozen=True)
class Span:
    """The steps to repeat, first to last. folder: the checkpoint, at step `first - 1`. judged: steps repeated in fp64, too.
    following: the run's next checkpoint, or None. logged: the log of these steps."""

    folder: Path
    first: int
    last: int
    judged: tuple[int, ...]
    following: Path | None
    logged: Mapping[int, Logged]


@dataclass
class Replay:
    """The result. precision: the run's, in words. environment: differences from the checkpoint's, in words, or "". repeats:
    whether roundings repeat here bit for bit. differing: tensors of the next checkpoint that these steps do not reproduce;
    None if it was not compared. unequal: the steps with other numbers than the log's."""

    precision: str
    environment: str
    repeats: bool
    differing: list[str] | None = None
    judgements: list[JudgedStep] = field(default_factory=list)
    unequal: list[int] = field(default_factory=list)

    @property
    def unexplained(self) -> list[int]:
        """The steps that rounding does not explain."""
        return [judged.number for judged in self.judgements if not judged.explained]

    @property
    def broken(self) -> int | None:
        """The first step with other numbers than the log's although roundings repeat, so that they do not explain it."""
        return self.unequal[0] if self.repeats and self.unequal else None

    @property
    def forged(self) -> bool:
        """Whether the next checkpoint holds other tensors although every step has the log's bits here."""
        return bool(self.differing) and self.repeats and not self.unequal

    @property
    def explained(self) -> bool:
        """Whether everything is explained."""
        return not self.unexplained and not self.forged and self.broken is None


def span_of(folder: Path, step: int | None, *, every: bool) -> Span:
    """The span from a checkpoint. step: its last step; None: the first one after the checkpoint. every: judge all steps up to
    the next checkpoint. Raises UserError for a step outside of the two checkpoints, or not logged."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the folder of a run's checkpoint")
    if (problem := store.problem(folder)) is not None:
        raise UserError(f"{folder} is not a valid checkpoint: {problem}")
    layout = Layout(folder.resolve().parent.parent)
    if layout.checkpoints != folder.resolve().parent or not layout.metrics.is_file():
        reason = f"so that there is no log to hold its steps against: {layout.metrics} is not there"
        raise UserError(f"{folder} does not lie in its run's folder, {reason}; give the checkpoint at its place")
    at = Saved(folder, census=None).values("progress")["step"]
    entries = {entry["step"]: (entry.get("loss"), entry.get("grad_norm")) for entry in metrics.read_lines(layout.metrics)}
    later = [number for number in store.steps(layout.checkpoints) if number > at]
    following = layout.checkpoints / store.folder_name(later[0]) if later else None
    end = min([*later[:1], max(entries, default=0)])
    if end <= at:
        raise UserError(f"{folder} is at step {at}, and {layout.metrics} has no later step; give an earlier checkpoint")
    last, one = end if every else at + 1 if step is None else step, f"give one of {at + 1} to {end}"
    if not at < last:
        raise UserError(f"--step {step}: {folder} is at step {at}; {one}, or an earlier checkpoint")
    if later and last > later[0]:
        raise UserError(f"--step {step} lies beyond the run's next checkpoint, {following}; {one}, or that checkpoint")
    steps = range(at + 1, last + 1)
    if missing := [number for number in steps if number not in entries]:
        raise UserError(f"step {missing[0]} is not in {layout.metrics}; {one}")
    logged = {number: entries[number] for number in steps}
    return Span(folder, at + 1, last, tuple(steps) if every else (last,), following, logged)


@dataclass(frozen=True)
class Rebuilt:
    """The run in the state of the checkpoint. It writes nothing."""

    plan: RunPlan
    components: Components
    reader: Reader
    state: TrainState
    step: RecordingStep


def replay(span: Span, overrides: Sequence[str] = (), *, phases: Phases) -> Replay:
    """Repeat the steps of a span. overrides: of --set: the present places of photos and model. Raises UserError, before a
    weight is read, if the photos, the config or the model's files are not the checkpoint's."""
    with TemporaryDirectory(prefix="replay-") as scratch:
        rebuilt, result = _rebuild(_config(span, overrides, Path(scratch)), span, phases)
        model, step = rebuilt.plan.model, rebuilt.step
        coarsest = max((model.storage[name].compute for name in model.in_steps), key=lambda dtype: torch.finfo(dtype).eps)
        judge = Judge(step.losses, rebuilt.state.adapter, step.training, coarsest)
        with phases("steps", span.last - span.first + 1, "step") as phase:
            for number, numbers, to_judge in _repeat(span, rebuilt):
                if numbers != span.logged[number]:
                    result.unequal.append(number)
                if to_judge is not None:
                    repeated, update = to_judge
                    with computing_exactly(rebuilt.components):
                        judged = judge.judge(repeated, span.logged[number])
                    result.judgements.append(replace(judged, update=update))
                phase.advance(1)
        result.differing = _differing(span, rebuilt.state)
        return result


def _config(span: Span, overrides: Sequence[str], scratch: Path) -> Config:
    """The checkpoint's config with another output folder, and without activities besides training."""
    tree = Saved(span.folder, census=None).values("config")
    configs.override(tree, overrides)
    tree["run"]["output_dir"] = str(scratch / "run")
    tree["data"].update(cache="memory", cache_dir=str(scratch), num_workers=0)
    tree["validation"] = {"every_steps": 0, "loss_every_steps": 0}
    tree["checkpoint"].pop("mirror", None)
    tree["export"].pop("base_model", None)
    tree["logging"] = {"tensorboard": False}
    return configs.parse(tree)


def _rebuild(config: Config, span: Span, phases: Phases) -> tuple[Rebuilt, Replay]:
    """The run at the checkpoint, and a result without steps."""
    ports = Ports(hub=hub, adapter_files=start, layouts=LAYOUTS, planning=fitting)
    session = Session.open(config, only="measure", ports=ports)
    config, source, peers = session.config, session.source, session.processes
    if peers.count > 1:
        raise UserError(f"{peers.count} processes were started; a replay is one process, which does the share of all")
    memory, allowed = Memory.of(peers.device, config), Allowance(resume_from="")
    launch = Launch(str(span.folder), allowed, ports)
    # Without the device: a different environment is reported, and never refused.
    beginning = begin(config, source, replace(memory, device=None), launch, processes=1, phases=phases, say=peers.say)
    pieces, differences = beginning.pieces, list[str]()
    attention = choose_attention(beginning.plan, peers.device, peers.say)
    tolerant = configs.with_values(beginning.plan.config, {"run.deterministic": False})
    names = {"kernels": memory.kernels.name, "attention": str(attention)}
    pieces.enter("environment", pin_environment(tolerant, peers.device, **names, processes=1, say=differences.append))
    eager = configs.with_values(beginning.plan.config, {"step.compile": "none", "step.graphs": False})
    plan = replace(beginning.plan, config=eager, model=fetched(beginning.plan.model, peers, phases))
    samples = {occurrence.sample for _, occurrences in _updates(span, plan) for occurrence in occurrences}
    # Only the photos of these steps are encoded.
    examples = tuple(example for example in plan.data.examples if example.sample in samples)
    reduced = replace(plan, data=replace(plan.data, examples=examples, held_out=(), measured={}, requests=()))
    context = RunContext(peers, phases, Layout(Path(config.run.output_dir)))
    components, _ = build_components(reduced, memory.kernels, attention, context, pieces)
    reader = encode(reduced, components, open_cache(config.data, cache_dir(config)), on_non_finite=peers.say)
    state, _, step = build_state(reduced, components, beginning, allowed)
    pieces.complete()
    stored = plan.model.storage[plan.model.family.denoiser]
    products = ", float8 products" if stored.scaled_matmul else ""
    precision = f"{config.precision.compute}, {stored.name} stored as {stored.format.name}{products}"
    if config.step.compile != "none":
        differences.append("blocks were compiled there, and are not here")
    if span.following is not None:
        first, last = (Saved(folder, census=None).values("environment") for folder in (span.folder, span.following))
        if first != last:
            differences.append("the run itself went on in another environment before its next checkpoint")
    repeats = not differences and (components.model.device.type == "cpu" or plan.config.run.deterministic)
    rebuilt = Rebuilt(plan, components, reader, state, recording(step, state.adapter))
    return rebuilt, Replay(precision, "; ".join(differences), repeats)


def _updates(span: Span, plan: RunPlan) -> Iterator[tuple[list[MicroBatch], list[Occurrence]]]:
    """(micro-batches, their occurrences) of each step of the span."""
    updates = updates_of(plan, after=span.first - 1)
    for _, update in zip(range(span.first, span.last + 1), updates, strict=False):
        yield update, [occurrence for micro_batch in update for occurrence in micro_batch]


def _repeat(span: Span, rebuilt: Rebuilt) -> Iterator[tuple[int, Logged, tuple[RepeatedStep, Update] | None]]:
    """Repeat the steps in the run's own precision: (step, its numbers, the step and its update if it is to be judged)."""
    state, progress, config = rebuilt.state, rebuilt.state.progress, rebuilt.plan.config
    table = config.optimizer
    updates = Updates(
        state,
        adamw=table.name == "adamw" and not table.options and config.adapter.max_norm is None,
        betas=tuple(table.betas or (0.9, 0.999)),
        eps=1e-8 if table.eps is None else table.eps,
        weight_decay=table.weight_decay,
        max_grad_norm=config.step.max_grad_norm,
        average=config.ema.decay,
    )
    for number, (micro_batches, occurrences) in enumerate(_updates(span, rebuilt.plan), span.first):
        batches = [rebuilt.reader[micro_batch] for micro_batch in micro_batches]
        before, to_judge = Snapshot.of(state) if number in span.judged else None, None
        result = rebuilt.step.run(number, batches, occurrences)
        progress.step += 1
        progress.images += len(occurrences)
        if before is not None:
            gradients = rebuilt.step.gradients
            repeated = RepeatedStep(number, result, before.parameters, batches, occurrences, gradients)
            to_judge = repeated, updates.judge(before, Snapshot.of(state), gradients, number, result)
        yield number, (result.loss, result.grad_norm), to_judge


def _differing(span: Span, state: TrainState) -> list[str] | None:
    """The tensors of the next checkpoint that the repeated steps do not reproduce bit for bit; None if it is not reached."""
    if span.following is None or span.following != span.following.with_name(store.folder_name(state.progress.step)):
        return None
    if (problem := store.problem(span.following)) is not None:
        raise UserError(f"{span.following} is not a valid checkpoint: {problem}")
    checkpoint, differing = Saved(span.following, census=None), list[str]()
    pieces = {"adapter": state.adapter, "optimizer": state.optimizer} | ({"ema": state.average} if state.average else {})
    for piece, part in pieces.items():
        saved, repeated = checkpoint.state(piece), part.state_dict()
        names = sorted(name for name in saved.keys() | repeated.keys() if not _equal(saved.get(name), repeated.get(name)))
        differing += names if piece == "adapter" else [f"{piece} {name}" for name in names]
    return differing


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and one == other
    return torch.equal(one.cpu(), other.cpu())
