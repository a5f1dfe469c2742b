"""What an audit of storage formats measures, found out before a weight is read (run/audit.py)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainer.base import patterns
from trainer.base.errors import UserError, number_in
from trainer.base.progress import QUIET, Phases
from trainer.config import ComponentTable, Config
from trainer.data.memo import Memo
from trainer.models import family_named
from trainer.plan import storage
from trainer.plan.run_plan import RunPlan
from trainer.plan.storage import Storage
from trainer.quantization import ALL_FORMATS, FORMATS, Format, formats_of
from trainer.run.session import Session, measuring
from workbench.sources import LAYOUTS


@dataclass(frozen=True)
class AuditPlan:
    """A run over the base, of which one kind of photo is measured, and the denoiser's storages to compare it with."""

    session: Session
    run: RunPlan
    stored: tuple[Storage, ...]


def formats_named(names: Sequence[str]) -> tuple[Format, ...]:
    """The quantised formats of these names, DTYPE or DTYPE:BACKEND, each once. Raises UserError for another name."""
    formats = {}
    known = [format.dtype_name for format in ALL_FORMATS if format.quantised]
    for name in names:
        dtype, _, backend = name.partition(":")
        if dtype not in known:
            why = "is not quantised, it is what the formats are compared with" if dtype in FORMATS else "is no storage format"
            raise UserError(f"--formats {name} {why}; use {', '.join(dict.fromkeys(known))}")
        backends = formats_of(dtype)
        if backend and backend not in backends:
            raise UserError(f"--formats {name}: {patterns.suggestion(backend, list(backends))}")
        format = backends[backend] if backend else next(iter(backends.values()))
        formats[format.name] = format
    return tuple(formats.values())


def plan_audit(config: Config, model: str, formats: Sequence[Format], phases: Phases = QUIET) -> AuditPlan:
    """The audit of a model with a run's config, whose model.path counts no more. Reads photos and headers.

    The base is stored as the config says where that is not quantised, else in bf16. Raises UserError for what cannot work.
    """
    if number_in("WORLD_SIZE", 1, least=1) > 1:
        raise UserError("an audit is made by one process; start it without torchrun")
    if config.precision.matmul != "compute":
        raise UserError(
            f"precision.matmul = {config.precision.matmul!r} rounds activations, too, and an audit is of the weights alone; "
            "give --set precision.matmul=compute"
        )
    denoiser = family_named(config.model.family).denoiser
    asked = config.model.components.get(denoiser, ComponentTable())
    session = Session.open(_over_base(config, model, denoiser), only="measure")
    source = session.source
    held = storage.held_as(source, denoiser)
    if held is not None:
        raise UserError(
            f"{model}: the {denoiser} is stored as {held[0]} ({held[1]}) in the model's files already, and there is "
            "nothing to compare it with; give the 16-bit model"
        )
    run = session.plan(phases=phases, scanned=Memo(layouts=LAYOUTS))
    kind = next(iter(run.data.measured))  # held-out photos where there are any
    data = replace(run.data, measured={kind: run.data.measured[kind]}, requests=())
    # Nothing is trained, so no text encoder has to be at hand.
    run = replace(run, data=data, model=replace(run.model, targets=(), cache_text=True))
    base = run.model.storage[denoiser]
    stored = tuple(replace(base, format=format, exclude=asked.exclude) for format in formats)
    storage.check(source, stored[0])
    return AuditPlan(session, run, stored)


def _over_base(config: Config, model: str, denoiser: str) -> Config:
    """The config of a run over the base that measures the loss."""
    given = config.model.components.get(denoiser, ComponentTable())
    table = _unquantised(given)
    components = config.model.components | {denoiser: table}
    table = config.model.model_copy(update={"path": model, "components": components})
    return measuring(config.model_copy(update={"model": table}))


def _unquantised(given: ComponentTable) -> ComponentTable:
    """A denoiser's table with storage of 16 or 32 bits: the one that it asks for, or the default."""
    plain = given.dtype is not None and not next(iter(formats_of(given.dtype).values())).quantised
    dtype = given.dtype if plain else storage.DEFAULT_STORAGE["denoiser"]
    return given.model_copy(update={"dtype": dtype, "backend": None, "exclude": ()})
