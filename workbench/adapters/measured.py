"""Measures the held-out losses of adapters, as a run logs them: the model is loaded once and takes one adapter after another.
Nothing is trained; only the model's caches are written."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from trainer import quantization
from trainer.adapters.kinds import file_kind
from trainer.adapters.portable import Portable
from trainer.artifacts.ports import Ports
from trainer.base.console import write
from trainer.base.errors import NonFiniteError, UserError
from trainer.base.progress import Phases
from trainer.checkpoint.state import Pieces
from trainer.config import AdapterTable, Config, RuleTable, with_values
from trainer.data.cache.entries import MemoryCache
from trainer.engine.assembly import build_adapter
from trainer.engine.encoding import encode
from trainer.engine.held_out_loss import HeldOutLoss
from trainer.monitoring.course import COPIES, COUNT
from trainer.plan.run_plan import RunPlan, fetched
from trainer.resume.initial_adapter import Start
from trainer.run.session import Session, measuring
from trainer.run.setup import choose_attention
from trainer.runtime.device import Memory
from trainer.runtime.jobs import Fields
from workbench.adapter_files.start import check_fits
from workbench.adapters.average import Averaged, check_digests, digests_in
from workbench.hub import hub
from workbench.planning.fitting import fitted
from workbench.sources import LAYOUTS
from workbench.summary.data import too_few

KINDS = ("held_out_loss", "trained_loss")


def plan_losses(config: Config, adapters: Sequence[Averaged], rank: int, phases: Phases) -> tuple[Session, RunPlan]:
    """(a measuring session, its plan): a run of the config whose adapter has room for each of these, and for their mean of at
    most `rank`. Reads photos and headers. Raises UserError if the config holds no photos out, if its run would be refused,
    and for an adapter that does not fit its model."""
    if not config.data.held_out:
        raise UserError("data.held_out = 0 in the config: no photos are held out, and their loss is what is asked for")
    ranks = [max(factors.rank for factors in adapter.portable.layers.values()) for adapter in adapters]
    rules = tuple(RuleTable(component=rule.component, match=rule.match) for rule in config.adapter.rules)
    table, rank = config.adapter, max(*ranks, min(rank, sum(ranks)))
    kind = file_kind(magnitudes=any(adapter.portable.kind.magnitudes for adapter in adapters)).name
    room = AdapterTable(type=kind, rank=rank, init_resize=True, targets=table.targets, kernels=table.kernels, rules=rules)
    session = Session.open(
        measuring(with_values(config, {"run.deterministic": False})), only="measure", ports=Ports(hub=hub, layouts=LAYOUTS)
    )
    session.config, session.quiet = session.config.model_copy(update={"adapter": room}), True
    plan, source = session.plan(phases=phases), session.source
    for adapter in adapters:
        if adapter.model.family is not source.family:
            raise UserError(f"{adapter.path} is of {adapter.model.family.name}, the config's model of {source.family.name}")
        check_fits(str(adapter.path), adapter.portable, plan)
    return session, plan


class HeldOutLosses:
    """The held-out losses of adapters in one model. session, plan: of `plan_losses`, for these adapters. Raises UserError for
    an adapter whose digests are of another model."""

    def __init__(self, session: Session, plan: RunPlan, adapters: Sequence[Averaged], phases: Phases) -> None:
        peers = session.processes
        if peers.count > 1:
            raise UserError(f"{peers.count} processes were started; the losses are measured by one, without torchrun")
        plan = fitted(plan, Memory.of(peers.device, plan.config))
        plan = replace(plan, model=fetched(plan.model, peers, phases))
        components = session.components(plan.model, phases, attention=choose_attention(plan, peers.device, write))
        read = replace(plan, data=replace(plan.data, examples=()))
        reader = encode(read, components, MemoryCache(), on_non_finite=_raise_non_finite)
        modules = [(name, components.load(name)) for name in plan.model.in_steps]
        if bases := [(str(adapter.path), adapter.base) for adapter in adapters if adapter.base]:
            digests = digests_in(quantization.record(modules, phases))
            check_digests([(f"the config's {plan.config.model.path}", digests), *bases])
        self._adapter, self._norms = build_adapter(plan.config, components, Pieces(None))
        self._without = {name: tensor.clone() for name, tensor in self._adapter.state_dict().items()}
        self._loss = HeldOutLoss.of(plan, components, reader, nullcontext)

    def of(self, portable: Portable | None) -> Fields:
        """The log's fields with this adapter; None: without one."""
        self._adapter.load_state_dict(self._without)  # an adapter that changes nothing
        if portable is not None:
            Start(portable=portable).apply(self._adapter, self._norms, lambda line: None)
        return self._loss.measure()


def lines(losses: Sequence[tuple[str, Fields]]) -> list[str]:
    """The losses as a table. losses: (name, the log's fields)."""
    last = losses[-1][1]
    photos, near = last[COUNT], last[COPIES]
    text = f"{photos} held-out photos" + (f", {near} of them with a near duplicate that is trained on" if near else "")
    rows = [[*("not finite" if (loss := fields[kind]) is None else f"{loss:.6g}" for kind in KINDS)] for _, fields in losses]
    table = [
        "  ".join((*(f"{cell:>13}" for cell in row), name)).rstrip()
        for row, name in zip([[*KINDS], *rows], ["", *(name for name, _ in losses)], strict=True)
    ]
    return [*filter(None, [too_few(photos)]), text, *table]


def _raise_non_finite(example: str) -> None:
    raise NonFiniteError(f"{example}: the encoding is not finite")
