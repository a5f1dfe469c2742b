"""Logged steps, done again from a checkpoint, one by one: in the run's own precision and in fp64.

The run's files are only read. Photos and captions are encoded anew, in memory: a cache that holds something else is found
out.
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
from trainer.engine.step import StepResult
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
from workbench.replay.formulas import Kept, Update, Updates
from workbench.replay.judged import Judge, JudgedStep, Made, WatchedStep, watched
from workbench.sources import LAYOUTS

Logged = Mapping[int, tuple[float | None, float | None]]  # step -> (loss, gradient norm)


@dataclass(frozen=True)
class Span:
    """The steps that are done again, first to last. folder: the checkpoint, at step `first - 1`. judged: those that are done
    in fp64, too. following: the run's next checkpoint; None where there is none. logged: of these steps."""

    folder: Path
    first: int
    last: int
    judged: tuple[int, ...]
    following: Path | None
    logged: Logged


@dataclass
class Replay:
    """What came of it. precision: what the run computes in, in words. environment: what differs from the checkpoint's, in
    words, or "". repeats: whether roundings repeat here bit for bit. strangers: tensors of the next checkpoint that are not
    what these steps make; None where it was not compared. unequal: the steps with other numbers than the log's."""

    precision: str
    environment: str
    repeats: bool
    strangers: list[str] | None = None
    judgements: list[JudgedStep] = field(default_factory=list)
    unequal: list[int] = field(default_factory=list)

    @property
    def unexplained(self) -> list[int]:
        """The steps that rounding does not explain."""
        return [each.number for each in self.judgements if not each.explained]

    @property
    def broken(self) -> int | None:
        """The first step whose numbers are not the log's, where roundings repeat: they do not explain it."""
        return self.unequal[0] if self.repeats and self.unequal else None

    @property
    def forged(self) -> bool:
        """Whether the next checkpoint holds other tensors, though every step has the log's bits here."""
        return bool(self.strangers) and self.repeats and not self.unequal

    @property
    def explained(self) -> bool:
        """Whether all of it is."""
        return not self.unexplained and not self.forged and self.broken is None


def span_of(folder: Path, step: int | None, *, every: bool) -> Span:
    """What is to be done again. step: None: the first one after the checkpoint. every: all up to the next one are judged.
    Raises UserError for a step that is not among those between, or not logged."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the folder of a run's checkpoint")
    if (problem := store.problem(folder)) is not None:
        raise UserError(f"{folder} is not a valid checkpoint: {problem}")
    layout = Layout(folder.resolve().parent.parent)
    if layout.checkpoints != folder.resolve().parent or not layout.metrics.is_file():
        why = f"so that there is no log to hold its steps against: {layout.metrics} is not there"
        raise UserError(f"{folder} does not lie in its run's folder, {why}; give the checkpoint at its place")
    at = Saved(folder, census=None).values("progress")["step"]
    entries = {entry["step"]: (entry.get("loss"), entry.get("grad_norm")) for entry in metrics.read_lines(layout.metrics)}
    later = [each for each in store.steps(layout.checkpoints) if each > at]
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
    """The run as it stood at the checkpoint, without anything that it writes. precision, environment: as Replay has them."""

    plan: RunPlan
    components: Components
    reader: Reader
    state: TrainState
    step: WatchedStep
    precision: str
    environment: str


def replay(span: Span, overrides: Sequence[str] = (), *, phases: Phases) -> Replay:
    """The steps of a span, done again. overrides: of --set: where photos and model lie now. Raises UserError, before a weight
    is read, where the photos, the config or the model's files are not the checkpoint's."""
    with TemporaryDirectory(prefix="replay-") as elsewhere:
        rebuilt = _rebuilt(_config(span, overrides, Path(elsewhere)), span, phases)
        device, deterministic = rebuilt.components.model.device, rebuilt.plan.config.run.deterministic
        repeats = not rebuilt.environment and (device.type == "cpu" or deterministic)
        found = Replay(rebuilt.precision, rebuilt.environment, repeats)
        model, step = rebuilt.plan.model, rebuilt.step
        coarsest = max((model.storage[name].compute for name in model.in_steps), key=lambda dtype: torch.finfo(dtype).eps)
        judge = Judge(step.losses, rebuilt.state.adapter, step.training, coarsest)
        with phases("steps", span.last - span.first + 1, "step") as phase:
            for number, result, kept in _again(span, rebuilt):
                if (result.loss, result.grad_norm) != span.logged[number]:
                    found.unequal.append(number)
                if kept is not None:
                    made, update = kept
                    with computing_exactly(rebuilt.components):
                        judged = judge.judge(made, span.logged[number])
                    found.judgements.append(replace(judged, update=update))
                phase.advance(1)
        found.strangers = _strangers(span, rebuilt.state)
        return found


def _config(span: Span, overrides: Sequence[str], elsewhere: Path) -> Config:
    """The checkpoint's, with another output folder, and without what is done beside training."""
    tree = Saved(span.folder, census=None).values("config")
    configs.override(tree, overrides)
    tree["run"]["output_dir"] = str(elsewhere / "run")
    tree["data"].update(cache="memory", cache_dir=str(elsewhere), num_workers=0)
    tree["validation"] = {"every_steps": 0, "loss_every_steps": 0}
    tree["checkpoint"].pop("mirror", None)
    tree["export"].pop("base_model", None)
    tree["logging"] = {"tensorboard": False}
    return configs.parse(tree)


def _rebuilt(config: Config, span: Span, phases: Phases) -> Rebuilt:
    ports = Ports(hub=hub, adapter_files=start, layouts=LAYOUTS, planning=fitting)
    session = Session.open(config, only="measure", ports=ports)
    config, source, peers = session.config, session.source, session.processes
    if peers.count > 1:
        raise UserError(f"{peers.count} processes were started; a replay is one process, which does the share of all")
    there, allowed = Memory.of(peers.device, config), Allowance(resume_from="")
    asked = Launch(str(span.folder), allowed, ports)
    # The device is left out: an environment that differs is told of, and never refused.
    begun = begin(config, source, replace(there, device=None), asked, processes=1, phases=phases, say=peers.say)
    pieces, differs = begun.pieces, list[str]()
    attention = choose_attention(begun.plan, peers.device, peers.say)
    tolerant = configs.with_values(begun.plan.config, {"run.deterministic": False})
    names = {"kernels": there.kernels.name, "attention": str(attention)}
    pieces.enter("environment", pin_environment(tolerant, peers.device, **names, processes=1, say=differs.append))
    plan = replace(begun.plan, config=configs.with_values(begun.plan.config, {"step.compile": "none", "step.graphs": False}))
    plan = replace(plan, model=fetched(plan.model, peers, phases))
    read = {occurrence.sample for _, occurrences in _updates(span, plan) for occurrence in occurrences}
    # Only what these steps see is encoded.
    examples = tuple(example for example in plan.data.examples if example.sample in read)
    seen = replace(plan, data=replace(plan.data, examples=examples, held_out=(), measured={}, requests=()))
    context = RunContext(peers, phases, Layout(Path(config.run.output_dir)))
    components, _ = build_components(seen, there.kernels, attention, context, pieces)
    reader = encode(seen, components, open_cache(config.data, cache_dir(config)), on_non_finite=peers.say)
    state, _, step = build_state(seen, components, begun, allowed)
    pieces.complete()
    stored = plan.model.storage[plan.model.family.denoiser]
    products = ", float8 products" if stored.scaled_matmul else ""
    how = f"{config.precision.compute}, {stored.name} stored as {stored.format.name}{products}"
    if config.step.compile != "none":
        differs.append("blocks were compiled there, and are not here")
    if span.following is not None:
        there, later = (Saved(each, census=None).values("environment") for each in (span.folder, span.following))
        if there != later:
            differs.append("the run itself went on in another environment before its next checkpoint")
    return Rebuilt(plan, components, reader, state, watched(step, state.adapter), how, "; ".join(differs))


def _updates(span: Span, plan: RunPlan) -> Iterator[tuple[list[MicroBatch], list[Occurrence]]]:
    """Of each step of the span its micro-batches, and the occurrences in them."""
    updates = updates_of(plan, after=span.first - 1)
    for _, update in zip(range(span.first, span.last + 1), updates, strict=False):
        yield update, [occurrence for micro_batch in update for occurrence in micro_batch]


def _again(span: Span, rebuilt: Rebuilt) -> Iterator[tuple[int, StepResult, tuple[Made, Update] | None]]:
    """The steps in the run's own precision. A judged step has what it made, and what it did with its gradients."""
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
        before, judged = Kept.of(state) if number in span.judged else None, None
        result = rebuilt.step.run(number, batches, occurrences)
        progress.step += 1
        progress.images += len(occurrences)
        if before is not None:
            seen = rebuilt.step.seen
            made = Made(number, result, before.parameters, batches, occurrences, seen)
            judged = made, updates.judge(before, Kept.of(state), seen, number, result)
        yield number, result, judged


def _strangers(span: Span, state: TrainState) -> list[str] | None:
    """The tensors of the next checkpoint that the steps up to there do not make, bit for bit; None: it is not reached."""
    if span.following is None or span.following != span.following.with_name(store.folder_name(state.progress.step)):
        return None
    if (problem := store.problem(span.following)) is not None:
        raise UserError(f"{span.following} is not a valid checkpoint: {problem}")
    saved, strangers = Saved(span.following, census=None), list[str]()
    pieces = {"adapter": state.adapter, "optimizer": state.optimizer} | ({"ema": state.average} if state.average else {})
    for piece, part in pieces.items():
        there, made = saved.state(piece), part.state_dict()
        unlike = sorted(name for name in there.keys() | made.keys() if not _same(there.get(name), made.get(name)))
        strangers += unlike if piece == "adapter" else [f"{piece} {name}" for name in unlike]
    return strangers


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and one == other
    return torch.equal(one.cpu(), other.cpu())
